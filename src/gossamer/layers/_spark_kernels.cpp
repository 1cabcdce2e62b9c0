// Loops over the rows of active hidden units. bfloat16 is widened to float32 as it is read: it is
// the upper half of one. Sums are float32.

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
inline float dot(const T* row, const T* x, int64_t size) {
  float total = 0.0f;
  for (int64_t i = 0; i < size; ++i) total += widen(row[i]) * widen(x[i]);
  return total;
}

// The hardware follows one row, but cannot guess where the next active one begins.
template <typename T>
inline void prefetch(const T* row, int64_t size) {
  const char* begin = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < size * static_cast<int64_t>(sizeof(T)); i += 64)
    __builtin_prefetch(begin + i);
}

template <typename T>
void matvec(const T* matrix, const T* x, float* out, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) out[i] = dot(matrix + i * columns, x, columns);
}

// Four units at a time: four streams of memory at once, and a quarter of the passes over `out`.
template <typename T>
void gather(const int64_t* units, const float* weights, const T* up, const T* rest, const T* down,
            float* out, int64_t count, int64_t width, int64_t dim) {
  int64_t n = 0;
  for (; n + 4 <= count; n += 4) {
    const T *u[4], *v[4];
    for (int j = 0; j < 4; ++j) {
      u[j] = up + units[n + j] * width;
      v[j] = down + units[n + j] * dim;
      prefetch(v[j], dim);
    }
    float a = 0.0f, b = 0.0f, c = 0.0f, d = 0.0f;
    for (int64_t i = 0; i < width; ++i) {
      const float x = widen(rest[i]);
      a += widen(u[0][i]) * x;
      b += widen(u[1][i]) * x;
      c += widen(u[2][i]) * x;
      d += widen(u[3][i]) * x;
    }
    a *= weights[n];
    b *= weights[n + 1];
    c *= weights[n + 2];
    d *= weights[n + 3];
    for (int j = 4; j < 8 && n + j < count; ++j) prefetch(up + units[n + j] * width, width);
    for (int64_t i = 0; i < dim; ++i)
      out[i] += a * widen(v[0][i]) + b * widen(v[1][i]) + c * widen(v[2][i]) + d * widen(v[3][i]);
  }
  for (; n < count; ++n) {
    const float weight = weights[n] * dot(up + units[n] * width, rest, width);
    const T* values = down + units[n] * dim;
    for (int64_t i = 0; i < dim; ++i) out[i] += weight * widen(values[i]);
  }
}

}  // namespace

#define EXPORT(NAME, T)                                                                          \
  extern "C" void gossamer_matvec_##NAME(const T* matrix, const T* x, float* out, int64_t rows,  \
                                         int64_t columns) {                                      \
    matvec<T>(matrix, x, out, rows, columns);                                                    \
  }                                                                                              \
  extern "C" void gossamer_gather_##NAME(const int64_t* units, const float* weights,             \
                                         const T* up, const T* rest, const T* down, float* out,  \
                                         int64_t count, int64_t width, int64_t dim) {            \
    gather<T>(units, weights, up, rest, down, out, count, width, dim);                           \
  }

EXPORT(f32, float)
EXPORT(bf16, uint16_t)
