"""Do measures order networks as their test errors do? Rank correlations over many networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.measures.generalization import GeneralizationReport

__all__ = ["MeasureComparison", "compare_measures"]

Array = NDArray[Any]


@dataclass(frozen=True)
class MeasureComparison:
    """Rank correlations of measures with the test error, and the table they come from.

    Args:
        tau: Kendall's tau, by measure; NaN with fewer than two networks.
        by_group: Mean tau over networks that differ in one hyper-parameter alone, by measure and
            hyper-parameter; empty without `groups`.
        granulated: The mean of those over the hyper-parameters, by measure.
        num_models: Networks for which the measure is defined.
        table: One row for each network, with its name, hyper-parameters, test error and measures.

    Example:
        >>> found = MeasureComparison({"l2": 1.0}, {}, {}, {"l2": 3}, [])
        >>> found.rows()
        [{'measure': 'l2', 'tau': 1.0, 'num_models': 3}]
    """

    tau: Mapping[str, float]
    by_group: Mapping[str, Mapping[str, float]]
    granulated: Mapping[str, float]
    num_models: Mapping[str, int]
    table: Sequence[Mapping[str, Any]]

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row for each measure."""
        found = []
        for name, tau in self.tau.items():
            row: dict[str, Any] = {"measure": name, "tau": tau}
            if name in self.by_group:
                row["granulated"] = self.granulated[name]
                row |= {f"tau_{group}": value for group, value in self.by_group[name].items()}
            found.append({**row, "num_models": self.num_models[name]})
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            "tau": dict(self.tau),
            "by_group": {name: dict(taus) for name, taus in self.by_group.items()},
            "granulated": dict(self.granulated),
            "num_models": dict(self.num_models),
            "table": [dict(row) for row in self.table],
        }


def compare_measures(
    reports: Sequence[GeneralizationReport] | Mapping[str, GeneralizationReport],
    test_errors: Sequence[float],
    *,
    groups: Mapping[str, Sequence[Any]] | None = None,
) -> MeasureComparison:
    r"""Compare measures of several networks with their test errors, by rank.

    $$\tau = \frac{1}{n (n - 1)} \sum_{i \ne j}
      \mathrm{sign}(\mu_i - \mu_j)\, \mathrm{sign}(e_i - e_j)$$

    1 if a measure orders the networks as the errors do, 0 for chance, -1 if in reverse. A measure
    can reach a high tau only by telling apart a hyper-parameter that matters, such as the size of
    the training set; the granulated tau compares networks that differ in one hyper-parameter
    alone, and takes the mean over their sets and then over the hyper-parameters. Networks for
    which a measure is NaN are left out of its tau.

    Args:
        reports: One for each network; a mapping names them. All with the same `log`.
        test_errors: One for each network, in the same order. Unit: any.
        groups: For each hyper-parameter its value in each network. Default none.

    Raises:
        ShapeError: If the lengths differ.
        DataError: If there are fewer than two networks, or an error is not finite.
        ConfigError: If reports differ in `log`.

    Example:
        >>> rest = ({}, True, 1.0, 0.05, {}, {}, 100)
        >>> reports = [GeneralizationReport({"l2": value}, *rest) for value in (1.0, 3.0, 2.0)]
        >>> round(compare_measures(reports, [0.1, 0.2, 0.3]).tau["l2"], 2)
        0.33

    Source: Kendall, *A New Measure of Rank Correlation*, 1938; granulated: Jiang et al., *Fantastic
        Generalization Measures and Where to Find Them*, ICLR 2020, section 4.
    Deviations: sets of one network are left out of the mean; equal values count 0.
    """
    named = reports if isinstance(reports, Mapping) else dict(enumerate(reports))
    listed = list(named.values())
    errors = np.asarray(test_errors, dtype=np.float64)
    lengths = {"test_errors": errors.shape, **{k: (len(v),) for k, v in (groups or {}).items()}}
    for name, shape in lengths.items():
        if shape != (len(listed),):
            raise ShapeError(
                f"{name} must have one value for each of {len(listed)} reports; got the shape "
                f"{shape}. Make them agree."
            )
    if len(listed) < 2 or not np.isfinite(errors).all():
        raise DataError(
            "a comparison needs at least two networks with finite test errors; got "
            f"{len(listed)} and errors {errors.tolist()}. Add networks."
        )
    if len({report.log for report in listed}) > 1:
        raise ConfigError("all reports must have the same `log`; got both. Make them anew.")
    columns = {**_columns(listed, "values"), **_columns(listed, "baselines")}
    tau, by_group, granulated, counts = {}, {}, {}, {}
    for name, values in columns.items():
        defined = ~np.isnan(values)
        counts[name] = int(defined.sum())
        tau[name] = _tau(values[defined], errors[defined])
        if groups:
            kept = {
                key: [v for v, d in zip(of, defined, strict=True) if d]
                for key, of in groups.items()
            }
            by_group[name] = {
                key: _tau_along(key, kept, values[defined], errors[defined]) for key in groups
            }
            found = [value for value in by_group[name].values() if not math.isnan(value)]
            granulated[name] = sum(found) / len(found) if found else math.nan
    table = [
        {
            "model": name,
            **{key: of[index] for key, of in (groups or {}).items()},
            "test_error": float(errors[index]),
            **{key: float(values[index]) for key, values in columns.items()},
        }
        for index, name in enumerate(named)
    ]
    return MeasureComparison(tau, by_group, granulated, counts, table)


def _columns(reports: Sequence[GeneralizationReport], which: str) -> dict[str, Array]:
    names = dict.fromkeys(name for report in reports for name in getattr(report, which))
    return {
        name: np.array([getattr(report, which).get(name, math.nan) for report in reports])
        for name in names
    }


def _tau(values: Array, errors: Array) -> float:
    count = len(values)
    if count < 2:
        return math.nan
    # comparisons and not differences: infinite values are equal to each other
    signs = [np.greater.outer(v, v).astype(int) - np.less.outer(v, v) for v in (values, errors)]
    return float((signs[0] * signs[1]).sum()) / (count * (count - 1))


def _tau_along(
    key: str, groups: Mapping[str, Sequence[Any]], values: Array, errors: Array
) -> float:
    """Return the mean tau over sets of networks that differ in one hyper-parameter alone."""
    sets: dict[tuple[Any, ...], list[int]] = {}
    for index in range(len(values)):
        others = tuple(of[index] for name, of in groups.items() if name != key)
        sets.setdefault(others, []).append(index)
    taus = [
        _tau(values[rows], errors[rows])
        for rows in sets.values()
        if len({groups[key][row] for row in rows}) > 1
    ]
    return sum(taus) / len(taus) if taus else math.nan
