"""Labels that are probably wrong, from what a model says of rows it did not see; NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import DataError
from gossamer.probabilities import check_probabilities, confident_guess

__all__ = ["LabelErrorReport", "find_label_errors"]


@dataclass(frozen=True)
class LabelErrorReport:
    """Suspicious rows, the most suspicious first.

    Args:
        indices: Of the rows.
        given: Their labels.
        suggested: The class that the model is confident of.
        score: Probability of the suggested class less that of the label. Range: > 0 to 1.
        noise_rate: Share of rows with a confident class whose label is another one: an estimate of
            how many labels are wrong.
        num_rows: Rows that were looked at.
    """

    indices: NDArray[np.int64]
    given: NDArray[np.int64]
    suggested: NDArray[np.int64]
    score: NDArray[np.float64]
    noise_rate: float
    num_rows: int

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row for each suspicious row."""
        columns = (self.indices, self.given, self.suggested, self.score)
        names = ("row", "given", "suggested", "score")
        return [
            dict(zip(names, values, strict=True))
            for values in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            "num_rows": self.num_rows,
            "num_suspicious": len(self.indices),
            "noise_rate": self.noise_rate,
            "rows": self.rows(),
        }


def find_label_errors(probabilities: Any, labels: Any) -> LabelErrorReport:
    """List rows whose label is probably wrong.

    A row is suspicious if the model is confident of another class than its label, and finds that
    class likelier. It is confident of the classes whose probability reaches what the rows with
    that label get on average, so that a class of which the model is never sure has a low bar.

    Args:
        probabilities: `(N, C)`, of a model that did not train on the row: out-of-fold. One that
            has seen the row repeats its label.
        labels: `(N,)`, integers from 0.

    Raises:
        ShapeError: If the two do not belong together.
        DataError: If a row is no distribution, a label no class, or all labels are the same.

    Example:
        >>> p = [[0.9, 0.1], [0.8, 0.2], [0.2, 0.8], [0.9, 0.1]]
        >>> find_label_errors(p, [0, 0, 1, 1]).rows()
        [{'row': 3, 'given': 1, 'suggested': 0, 'score': 0.8}]

    Source: Northcutt et al., *Confident Learning*, JAIR 2021, section 3.
    Deviations: ranked by the difference of the two probabilities; a row stays out if its label is
        the likeliest class.
    """
    p, y = check_probabilities(probabilities, labels)
    if len(np.unique(y)) < 2:
        raise DataError(
            f"labels must be of two classes at least; got {y[0]} alone. With one class no label "
            "can be wrong."
        )
    guess = confident_guess(p, y)
    every = np.arange(len(y))
    score = p[every, guess] - p[every, y]
    other = (guess >= 0) & (guess != y)
    suspicious = np.flatnonzero(other & (score > 0) & (p.argmax(1) != y))
    order = suspicious[np.argsort(-score[suspicious], kind="stable")]
    return LabelErrorReport(
        indices=order,
        given=y[order],
        suggested=guess[order],
        score=np.round(score[order], 12),
        noise_rate=float(other.sum() / max(1, (guess >= 0).sum())),
        num_rows=len(y),
    )
