"""What a loss has to know of all scores of a row, from a block of labels at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.errors import ConfigError, DataError
from gossamer.losses._collectives import Alone
from gossamer.losses._labels import Pairs

__all__ = ["Blocks", "LogSumExp", "Plan", "Shift"]


class LogSumExp:
    r"""$Z = \log \sum_l \exp(s_l)$; one pass."""

    passes = 1

    def fit(self, blocks: Iterable[Tensor], rows: Tensor, group: Alone) -> Tensor:
        """Return the value of each row.

        Args:
            blocks: Scores of all rows with some labels at a time.
            rows: Any tensor with one entry a row, for dtype and device.
            group: Processes that hold the labels together.
        """
        total = torch.full_like(rows, -math.inf)
        for scores in blocks:
            total = torch.logaddexp(total, scores.logsumexp(1))
        self.value = group.cat(total[None]).logsumexp(0)
        return self.value

    def slopes(self, scores: Tensor) -> Tensor:
        """Return the derivative of the value by each score."""
        # a row without any label has -inf - (-inf); its slopes are 0
        safe = torch.where(self.value.isfinite(), self.value, math.inf)
        return (scores - safe[:, None]).exp()

    def joined(self, group: Alone) -> LogSumExp:
        """Return the same for the rows of all processes."""
        return self


class Shift:
    r"""The t with $\sum_l \mathrm{sigmoid}(\alpha (s_l + t)) = k$; a pass for each step.

    Newton steps inside a bracket, halved where a step would leave it.

    Args:
        k: Wanted sum of each row.
        alpha: Steepness.
    """

    passes = 64

    def __init__(self, k: Tensor, alpha: float) -> None:
        self.k = k
        self.alpha = alpha

    def joined(self, group: Alone) -> Shift:
        """Return the same for the rows of all processes."""
        return Shift(group.cat(self.k), self.alpha)

    def fit(self, blocks: Iterable[Tensor], rows: Tensor, group: Alone) -> Tensor:
        """Return the shift of each row; arguments as for `LogSumExp`."""
        low, high = self._bracket(blocks, rows, group)
        t = (low + high) / 2
        tiny, near = torch.finfo(t.dtype).tiny, 4 * torch.finfo(t.dtype).eps
        for _ in range(self.passes):
            total, slope = self._sums(blocks, t, group)
            above = total > self.k
            low, high = torch.where(above, low, t), torch.where(above, t, high)
            step = ((total - self.k) / slope.clamp(min=tiny)).to(t.dtype)
            inside = (t - step >= low) & (t - step <= high)
            moved = torch.where(inside, t - step, (low + high) / 2)
            done = (moved - t).abs() <= near * t.abs().clamp(min=1.0)
            t = moved
            if bool(done.all()):
                break
        self.value = t
        self.total_slope = self._sums(blocks, t, group)[1].clamp(min=tiny).to(t.dtype)
        return t

    def slopes(self, scores: Tensor) -> Tensor:
        """Return the derivative of the shift by each score."""
        u = torch.sigmoid(self.alpha * (scores + self.value[:, None]))
        return -self.alpha * u * (1 - u) / self.total_slope[:, None]

    def _bracket(
        self, blocks: Iterable[Tensor], rows: Tensor, group: Alone
    ) -> tuple[Tensor, Tensor]:
        high, low = torch.full_like(rows, -math.inf), torch.full_like(rows, math.inf)
        count, bad = torch.zeros((2, len(rows)), dtype=torch.long, device=rows.device)
        for scores in blocks:
            bad += scores.isnan().sum(1)
            shown = scores.isfinite()
            high = torch.maximum(high, scores.amax(1))
            low = torch.minimum(low, scores.masked_fill(~shown, math.inf).amin(1))
            count += shown.sum(1)
        if bool(group.sum(bad).any()):  # all processes know, so that none waits for another
            raise nan_scores()
        high, low, count = group.largest(high), -group.largest(-low), group.sum(count)
        if bool(((self.k <= 0) | (self.k >= count)).any()):
            raise ConfigError(
                f"k must be above 0 and below the number of labels; got {float(self.k.min()):g} "
                f"to {float(self.k.max()):g} with {int(count.min())} labels. Change k."
            )
        level = torch.logit(self.k.double() / count).to(rows.dtype) / self.alpha
        return level - high, level - low

    def _sums(self, blocks: Iterable[Tensor], t: Tensor, group: Alone) -> tuple[Tensor, Tensor]:
        """Return the sums of memberships and of their slopes."""
        sums = torch.zeros((2, len(t)), dtype=torch.float64, device=t.device)
        for scores in blocks:
            u = torch.sigmoid(self.alpha * (scores + t[:, None]))
            sums[0] += u.sum(1)
            sums[1] += (self.alpha * u * (1 - u)).sum(1)
        return group.sum(sums).unbind()  # type: ignore[return-value]


@dataclass(frozen=True)
class Plan:
    """What a loss does with one batch.

    Args:
        relevant: Pairs whose scores enter by themselves.
        hidden: Pairs that the statistic does not see.
        some: Which rows count.
        statistic: Of all other scores of a row.
    """

    relevant: Pairs
    hidden: Pairs
    some: Tensor
    statistic: LogSumExp | Shift

    def joined(self, group: Alone, begin: int) -> Plan:
        """Return the plan of the rows of all processes; this one's rows start at `begin`."""

        def cat(pairs: Pairs) -> Pairs:
            rows, columns, weights = (
                group.cat(part) for part in (pairs.rows + begin, pairs.columns, pairs.weights)
            )
            whole = Pairs(rows, columns, weights)
            return whole.where(columns.argsort(stable=True))

        return Plan(
            cat(self.relevant),
            cat(self.hidden),
            group.cat(self.some),
            self.statistic.joined(group),
        )

    def of_labels(self, begin: int, end: int) -> Plan:
        """Return the plan for a part of the labels, counted from `begin`."""

        def cut(pairs: Pairs) -> Pairs:
            part = pairs.where(pairs.between(begin, end))
            return Pairs(part.rows, part.columns - begin, part.weights)

        return replace(self, relevant=cut(self.relevant), hidden=cut(self.hidden))


class Blocks:
    """Scores of all queries with a chunk of keys at a time, computed anew in every loop.

    `relevant` holds the scores of the relevant pairs after a loop.

    Args:
        queries: `(B, D)`, divided by the temperature.
        chunks: Returns the keys, some rows at a time.
        plan: Of the loss.
    """

    def __init__(self, queries: Tensor, chunks: Callable[[], Iterator[Tensor]], plan: Plan) -> None:
        self.queries = queries
        self.chunks = chunks
        self.plan = plan
        self.relevant = torch.zeros(
            len(plan.relevant.rows), dtype=queries.dtype, device=queries.device
        )

    def __iter__(self) -> Iterator[Tensor]:
        """Yield scores, hidden ones -inf."""
        begin = 0
        for keys in self.chunks():
            scores = self.queries @ keys.to(self.queries.dtype).T
            pairs = self.plan.relevant
            part = pairs.between(begin, begin + len(keys))
            self.relevant[part] = scores[pairs.rows[part], pairs.columns[part] - begin]
            yield self._shown(scores, begin)
            begin += len(keys)

    def fit(self, group: Alone) -> Tensor:
        """Return the statistic of each row; `relevant` is then that of all processes.

        Raises:
            DataError: If a score is NaN.
        """
        value = self.plan.statistic.fit(self, self.queries[:, 0], group)
        self.relevant = group.cat(self.relevant)
        if bool(value.isnan().any()) or bool(self.relevant.isnan().any()):
            raise nan_scores()
        return value

    def gradient(
        self, keys: Tensor, begin: int, to_relevant: Tensor, to_statistic: Tensor
    ) -> Tensor:
        """Return the gradient of the scores with one chunk of keys.

        Args:
            keys: The chunk.
            begin: Number of its first key.
            to_relevant: Gradient of the scores of the relevant pairs.
            to_statistic: Gradient of the statistic of each row.
        """
        scores = self._shown(self.queries @ keys.to(self.queries.dtype).T, begin)
        gradient = self.plan.statistic.slopes(scores) * to_statistic[:, None]
        pairs = self.plan.relevant
        part = pairs.between(begin, begin + len(keys))
        where = pairs.rows[part], pairs.columns[part] - begin
        return gradient.index_put_(where, to_relevant[part], accumulate=True)

    def _shown(self, scores: Tensor, begin: int) -> Tensor:
        pairs = self.plan.hidden
        part = pairs.between(begin, begin + scores.shape[1])
        scores[pairs.rows[part], pairs.columns[part] - begin] = -math.inf
        return scores


def nan_scores() -> DataError:
    """Return the error for scores that are NaN."""
    return DataError(
        "scores must not be NaN; got some. Lower the learning rate or check the encoder."
    )
