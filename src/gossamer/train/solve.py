"""Answers to queries written as text, in batches, with the key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gossamer.checks import check_range
from gossamer.errors import DataError
from gossamer.models import Decoder
from gossamer.tasks import Task

__all__ = ["SolveResult", "solve_queries"]


@dataclass(frozen=True)
class SolveResult:
    """One answered query.

    Args:
        query: As given.
        answer: The model's answer as text; `""` when it produced none.
        correct: Whether the task's own exact rule agrees; `None` when that was not asked.
    """

    query: str
    answer: str
    correct: bool | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, as in `answers.jsonl`."""
        row: dict[str, Any] = {"query": self.query, "answer": self.answer}
        return row if self.correct is None else {**row, "correct": self.correct}


def solve_queries(
    model: Decoder,
    task: Task,
    queries: Sequence[str],
    *,
    batch_size: int = 64,
    check: bool = True,
    use_cache: bool | None = None,
) -> list[SolveResult]:
    """Answer queries in their order.

    Queries of similar length share a batch, padded on the left, which changes no answer.

    Args:
        model: A trained model.
        task: The task it was trained on.
        queries: Texts such as `"123+4567="`.
        batch_size: Queries at once. Range: >= 1. Default 64.
        check: Compare with the true answer. Default true.
        use_cache: As in `generate`.

    Raises:
        DataError: If a query cannot be read; the message says which. No query is answered then.

    Example:
        >>> from gossamer.tasks import AdditionTask
        >>> model = Decoder(14, 16, 1, 2)
        >>> solve_queries(model, AdditionTask(), ["1+2="])[0].query
        '1+2='

    Source: the library's own.
    Deviations: none
    """
    check_range(batch_size, "batch_size", low=1, integer=True)
    encoded = [_read(task, query, number) for number, query in enumerate(queries, start=1)]
    order = sorted(range(len(queries)), key=lambda i: len(encoded[i][0]))
    answers = [""] * len(queries)
    for begin in range(0, len(order), batch_size):
        chosen = order[begin : begin + batch_size]
        for index, answer in zip(
            chosen, _answer(model, task, [encoded[i] for i in chosen], use_cache), strict=True
        ):
            answers[index] = answer
    return [
        SolveResult(query, answer, task.check(query, answer) if check else None)
        for query, answer in zip(queries, answers, strict=True)
    ]


def _read(task: Task, query: str, number: int) -> tuple[Tensor, Tensor]:
    try:
        return task.encode(query), task.position_ids(query)
    except DataError as error:
        raise DataError(f"query {number}: {error}") from None


def _answer(
    model: Decoder, task: Task, encoded: list[tuple[Tensor, Tensor]], use_cache: bool | None
) -> list[str]:
    prompts = [tokens for tokens, _ in encoded]
    longest = max(map(len, prompts))
    new = max(len(ids) - len(tokens) for tokens, ids in encoded)
    # the ids of a shorter prompt move with it to the right; places after its answer have none
    ids = [torch.cat((ids.new_zeros(longest - len(p), *ids.shape[1:]), ids)) for p, ids in encoded]
    rows = pad_sequence(ids, batch_first=True)
    room = rows.new_zeros(len(rows), max(0, longest + new - rows.shape[1]), *rows.shape[2:])
    tokens = torch.stack([torch.cat((p.new_zeros(longest - len(p)), p)) for p in prompts])
    lengths = torch.tensor([len(p) for p in prompts])
    mask = torch.arange(longest) >= longest - lengths[:, None]
    device = model.device
    produced = model.generate(
        tokens.to(device),
        torch.cat((rows, room), dim=1).to(device),
        max_new_tokens=new,
        mask=None if bool(mask.all()) else mask.to(device),
        eos=task.eos,
        use_cache=use_cache,
    )
    return [task.decode(row) for row in produced.cpu()]
