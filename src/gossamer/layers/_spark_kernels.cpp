// Loops over the rows of active hidden units. Weights in bfloat16 are widened to float32 as they are
// read: they are the upper half of one. Inputs and sums are float32.

#include <cstdint>
#include <cstring>

namespace {

inline float widen(float x) { return x; }

inline float widen(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
inline float dot(const T* row, const float* x, int64_t size) {
  float total = 0.0f;
  for (int64_t i = 0; i < size; ++i) total += widen(row[i]) * x[i];
  return total;
}

// Four rows at a time: four streams of memory, and sums that do not wait for each other.
template <typename T>
inline void four_dots(const T* const* row, const float* x, int64_t size, float* out) {
  const T *p = row[0], *q = row[1], *r = row[2], *s = row[3];
  float a = 0.0f, b = 0.0f, c = 0.0f, d = 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    a += widen(p[i]) * x[i];
    b += widen(q[i]) * x[i];
    c += widen(r[i]) * x[i];
    d += widen(s[i]) * x[i];
  }
  out[0] = a;
  out[1] = b;
  out[2] = c;
  out[3] = d;
}

template <typename T>
void matvec(const T* matrix, const float* x, float* out, int64_t rows, int64_t columns) {
  // short rows of bfloat16 are read faster one after the other (measured)
  const bool together = sizeof(T) == 4;
  int64_t i = 0;
  for (; together && i + 4 <= rows; i += 4) {
    const T* first = matrix + i * columns;
    const T* row[4] = {first, first + columns, first + 2 * columns, first + 3 * columns};
    four_dots(row, x, columns, out + i);
  }
  for (; i < rows; ++i) out[i] = dot(matrix + i * columns, x, columns);
}

// Each row holds what a unit reads, `width` numbers, and what it adds, `dim` numbers. Four units at a
// time again, which also saves three quarters of the passes over `out`.
template <typename T>
void gather(const int64_t* units, const float* weights, const T* rows, const float* rest,
            float* out, int64_t count, int64_t width, int64_t dim) {
  const int64_t size = width + dim;
  int64_t n = 0;
  for (; n + 4 <= count; n += 4) {
    const T* row[4];
    for (int j = 0; j < 4; ++j) row[j] = rows + units[n + j] * size;
    float w[4];
    four_dots(row, rest, width, w);
    for (int j = 0; j < 4; ++j) w[j] *= weights[n + j];
    const T *p = row[0] + width, *q = row[1] + width, *r = row[2] + width, *s = row[3] + width;
    for (int64_t i = 0; i < dim; ++i)
      out[i] += w[0] * widen(p[i]) + w[1] * widen(q[i]) + w[2] * widen(r[i]) + w[3] * widen(s[i]);
  }
  for (; n < count; ++n) {
    const T* row = rows + units[n] * size;
    const float weight = weights[n] * dot(row, rest, width);
    for (int64_t i = 0; i < dim; ++i) out[i] += weight * widen(row[width + i]);
  }
}

}  // namespace

#define EXPORT(NAME, T)                                                                          \
  extern "C" void gossamer_matvec_##NAME(const T* matrix, const float* x, float* out,           \
                                         int64_t rows, int64_t columns) {                        \
    matvec<T>(matrix, x, out, rows, columns);                                                    \
  }                                                                                              \
  extern "C" void gossamer_gather_##NAME(const int64_t* units, const float* weights,             \
                                         const T* rows, const float* rest, float* out,           \
                                         int64_t count, int64_t width, int64_t dim) {            \
    gather<T>(units, weights, rows, rest, out, count, width, dim);                               \
  }

EXPORT(f32, float)
EXPORT(bf16, uint16_t)
