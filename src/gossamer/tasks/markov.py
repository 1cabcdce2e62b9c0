"""A chain whose next symbol depends on several earlier ones, with the least losses there are."""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, DataError
from gossamer.tasks.base import EOS, Batch, Example, GridCell, Task

__all__ = ["MarkovTask"]

_WEIGHTS = (3.0, 2.0, 1.2)
_UNSCORED = 8
_LEAST_ENTROPY = 0.2
_MOST_STATES = 1_000_000
_FIRST = 2


class MarkovTask(Task):
    r"""Sequences of a chain of order k in which nearer symbols weigh more.

    $$x_t \sim \mathrm{softmax}\Big(\sum_{j=1}^{k} A_j\,\mathrm{onehot}(x_{t-j})\Big), \qquad
      A_j = w_j P_j$$

    with a random permutation matrix P_j for each lag and weights that fall with the lag. So a model
    can learn it in stages, one lag after the other, and the loss of each stage is known:
    `entropy_rate` and `ladder` compute the least loss of any predictor and of those that see only
    the last j symbols. A sample has `length` + 1 symbols; `length` go in, and every symbol from the
    tenth on is predicted. A query is a text of symbols; its answer is the most probable next one.

    Args:
        num_symbols: Size V of the alphabet. Range: 2 to 26. Default 8.
        order: Lags k. Range: 1 to 8, and V ** (k + 1) <= 1,000,000. Default 3.
        weights: One for each lag, > 0 and falling; text such as `"3-2-1.2"` works too. Default
            (3, 2, 1.2), of which the first k are used.
        length: Symbols that go in. Unit: tokens. Range: >= 9. Default 64.
        random_state: Decides the permutations. Range: >= 0. Default 0.

    Raises:
        ConfigError: If a value is out of range, or the chain has less than .2 nats of entropy for
            each symbol, so that there is next to nothing to learn.

    Example:
        >>> task = MarkovTask()
        >>> task.sample(2, generator=torch.Generator().manual_seed(0)).tokens.shape
        torch.Size([2, 65])
        >>> round(task.entropy_rate(), 3)
        1.065

    Source: *Incremental Learning of Sparse Attention Patterns in Transformers*, 2026, section 3.
    Deviations: one lag for each block, and permutation matrices in place of general ones: with
        these most chains use all symbols about equally often.
    """

    def __init__(
        self,
        num_symbols: int = 8,
        order: int = 3,
        *,
        weights: Sequence[float] | str | None = None,
        length: int = 64,
        random_state: int = 0,
    ) -> None:
        check_range(num_symbols, "num_symbols", low=2, high=26, integer=True)
        check_range(order, "order", low=1, high=_UNSCORED, integer=True)
        check_range(length, "length", low=_UNSCORED + 1, integer=True)
        check_range(random_state, "random_state", low=0, high=2**63 - 1, integer=True)
        if num_symbols ** (order + 1) > _MOST_STATES:
            raise ConfigError(
                f"num_symbols ** (order + 1) must be <= {_MOST_STATES:,}; got {num_symbols} and "
                f"{order}. Use fewer symbols or a lower order."
            )
        self.num_symbols = num_symbols
        self.order = order
        self.length = length
        self.random_state = random_state
        self.weights = _read_weights(weights, order)
        letters = string.ascii_lowercase[:num_symbols]
        self.vocab = ("_", "$", *letters)
        draw = torch.Generator().manual_seed(random_state)
        matrices = [
            weight
            * torch.eye(num_symbols, dtype=torch.float64)[
                torch.randperm(num_symbols, generator=draw)
            ]
            for weight in self.weights
        ]
        self._logits = torch.stack(matrices)  # (lag, earlier symbol, next symbol)
        self._joint = self._stationary()
        if self.entropy_rate() < _LEAST_ENTROPY:
            raise ConfigError(
                f"weights must leave an entropy of at least {_LEAST_ENTROPY} nats for each "
                f"symbol; got {self.entropy_rate():.3f} with {list(self.weights)}. Lower them."
            )

    @property
    def config(self) -> dict[str, Any]:
        """Name and options."""
        return {
            "name": "markov",
            "num_symbols": self.num_symbols,
            "order": self.order,
            "weights": list(self.weights),
            "length": self.length,
            "random_state": self.random_state,
        }

    def transition(self) -> Tensor:
        """Return the probability of each next symbol after each context, `(V,) * (k + 1)`.

        The axes are the earlier symbols, the oldest first, and the next symbol.
        """
        return self._log_transition().exp()

    def _log_transition(self) -> Tensor:
        logits = torch.zeros((), dtype=torch.float64)
        for lag in range(self.order, 0, -1):
            block = self._logits[lag - 1]
            places = [1] * (self.order - lag) + [self.num_symbols] + [1] * (lag - 1)
            logits = logits + block.reshape(*places, self.num_symbols)
        return logits.log_softmax(-1)

    def entropy_rate(self, *, num_sequences: int | None = None) -> float:
        """Return the least cross-entropy that any predictor can reach. Unit: nats for each symbol.

        Args:
            num_sequences: Estimate it from this many sequences, as the mean of the probabilities'
                logarithms that made them. Default `None`: exactly, from the law of the contexts.
        """
        if num_sequences is None:
            return float(-(self._joint * self._log_transition()).sum())
        check_range(num_sequences, "num_sequences", low=1, integer=True)
        generator = torch.Generator().manual_seed(self.random_state)
        symbols = self._draw(num_sequences, self.length + 1, generator)
        windows = symbols.unfold(1, self.order + 1, 1)
        return float(-self._log_transition()[windows.unbind(-1)].mean())

    def ladder(self) -> list[float]:
        """Return the loss of the best additive predictors of the last 0, 1, ..., k symbols.

        Predictor j is a logistic regression on the last j symbols, fitted to the exact law of the
        chain; rung k is the entropy rate. Unit: nats for each symbol.
        """
        seen = [self._joint.numpy()]
        for _ in range(self.order):
            seen.append(seen[-1].sum(0))  # the oldest symbol is forgotten
        return [_best_loss(joint) for joint in reversed(seen)]

    def sample(self, batch_size: int, *, generator: torch.Generator, split: str = "train") -> Batch:
        """Draw sequences; both splits have the same law."""
        check_choice(split, ("train", "test"), "split")
        tokens = self._draw(batch_size, self.length + 1, generator) + _FIRST
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, : _UNSCORED + 1] = False
        ids = torch.arange(1, self.length + 2).expand_as(tokens)
        return Batch(tokens, ids, mask)

    def encode(self, query: str) -> Tensor:
        """Return the tokens of a sequence to predict from."""
        text = query.strip()
        symbols = "".join(self.vocab[_FIRST:])
        for column, character in enumerate(text, start=1):
            if character not in symbols:
                raise DataError(
                    f"query must hold the symbols {symbols}; got {character!r} at column {column} "
                    f"of {text!r}. Remove it."
                )
        if len(text) < self.order:
            raise DataError(
                f"query must hold at least {self.order} symbols, on which the next one depends; "
                f"got {len(text)}. Write more of them."
            )
        return torch.tensor([symbols.index(character) + _FIRST for character in text])

    def position_ids(self, query: str, *, start: int | None = None) -> Tensor:
        """Return the ids of a sequence and the symbol after it."""
        begin = 1 if start is None else start
        check_range(begin, "start", low=1, integer=True)
        return torch.arange(begin, begin + len(self.encode(query)) + 1)

    def answer(self, query: str) -> str:
        """Return the most probable next symbol."""
        context = self.encode(query)[-self.order :] - _FIRST
        best = int(self.transition()[tuple(context)].argmax())
        return self.vocab[best + _FIRST]

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return produced tokens as symbols."""
        produced = [int(token) for token in tokens]
        return self.symbols(produced[: produced.index(EOS)] if EOS in produced else produced)

    def example(self, query: str, *, start: int | None = None) -> Example:
        """Return a sequence with the most probable next symbol, which alone is scored."""
        best = self.vocab.index(self.answer(query))
        tokens = torch.cat((self.encode(query), torch.tensor([best])))
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[-1] = True
        return Example(tokens, self.position_ids(query, start=start), mask)

    def grid(  # type: ignore[override]
        self, *, length: Iterable[int] | None = None
    ) -> list[GridCell]:
        """Return one cell for each length of sequence.

        Args:
            length: Unit: tokens. Default 1, 2 and 4 times the trained length.
        """
        if length is None:
            length = [self.length * k for k in (1, 2, 4)]
        options = {key: value for key, value in self.config.items() if key != "name"}
        return [GridCell({"length": n}, MarkovTask(**{**options, "length": n})) for n in length]

    def _draw(self, count: int, size: int, generator: torch.Generator) -> Tensor:
        """Return sequences of symbols, `(count, size)`, from the stationary law of the chain."""
        law = self._joint.sum(-1).flatten()
        state = torch.multinomial(law, count, replacement=True, generator=generator)
        uniform = torch.rand((count, size), generator=generator, dtype=torch.float64)
        bounds = self.transition().flatten(0, -2).cumsum(-1)[:, :-1]
        symbols = []
        for step in range(size):
            # a state is the last k symbols as one number in base V
            new = (uniform[:, step, None] > bounds[state]).sum(-1)
            symbols.append(new)
            state = (state * self.num_symbols + new) % len(law)
        return torch.stack(symbols, dim=1)

    def _stationary(self) -> Tensor:
        """Return the law of k + 1 symbols in a row, `(V,) * (k + 1)`, by power iteration."""
        rule = self.transition()
        contexts = torch.full(rule.shape[:-1], self.num_symbols**-self.order, dtype=torch.float64)
        change = math.inf
        while change > 1e-13:
            following = (contexts.unsqueeze(-1) * rule).sum(0)
            change = float((following - contexts).abs().sum())
            contexts = following
        return contexts.unsqueeze(-1) * rule


def _read_weights(weights: Sequence[float] | str | None, order: int) -> tuple[float, ...]:
    if weights is None:
        if order > len(_WEIGHTS):
            raise ConfigError(
                f"weights are needed for an order above {len(_WEIGHTS)}; got none for order "
                f"{order}. Give one for each lag."
            )
        return _WEIGHTS[:order]
    values: Sequence[Any] = weights.split("-") if isinstance(weights, str) else weights
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        numbers = ()
    falling = all(a > b for a, b in itertools.pairwise((*numbers, 0.0)))
    if len(numbers) != order or not falling or not all(map(math.isfinite, numbers)):
        raise ConfigError(
            f"weights must be {order} falling numbers > 0, one for each lag; got {weights!r}. "
            "Change weights."
        )
    return numbers


def _best_loss(joint: NDArray[np.float64]) -> float:
    """Return the least cross-entropy of an additive logistic model of the last axis, `(V,) * n`."""
    from scipy.optimize import minimize
    from scipy.special import logsumexp

    size, lags = joint.shape[-1], joint.ndim - 1
    total = joint.sum(-1, keepdims=True)
    # block j is a matrix from symbol j of the context to the next one; the bias has no context
    shapes = [(size,), *([1] * j + [size] + [1] * (lags - 1 - j) + [size] for j in range(lags))]

    def loss(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        parts = np.split(flat, np.cumsum([np.prod(shape) for shape in shapes])[:-1])
        logits = np.zeros_like(joint)
        for part, shape in zip(parts, shapes, strict=True):
            logits = logits + part.reshape(shape)
        norm = logsumexp(logits, axis=-1, keepdims=True)
        value = float((total * norm).sum() - (joint * logits).sum())
        error = total * np.exp(logits - norm) - joint
        axes = [tuple(range(lags)), *(tuple({*range(lags)} - {j}) for j in range(lags))]
        return value, np.concatenate([error.sum(axis).ravel() for axis in axes])

    start = np.zeros(int(sum(np.prod(shape) for shape in shapes)))
    options = {"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-9}
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    return float(found.fun)
