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
from gossamer.models import Decoder, Encoder, ScaleInvariantTransformer, Seq2Seq
from gossamer.tasks import PAD, Task

__all__ = ["SolveResult", "solve_queries"]


@dataclass(frozen=True)
class SolveResult:
    """One answered query.

    Args:
        query: As given.
        answer: The model's answer as text; `""` when it produced none.
        correct: Whether the task's own exact rule agrees; `None` when that was not asked, or the
            task knows no true answer.
        scratchpad: The working before the answer, `""` for tasks without one.
    """

    query: str
    answer: str
    correct: bool | None
    scratchpad: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, as in `answers.jsonl`; empty ones are left out."""
        row: dict[str, Any] = {"query": self.query, "answer": self.answer}
        if self.scratchpad:
            row["scratchpad"] = self.scratchpad
        return row if self.correct is None else {**row, "correct": self.correct}


def solve_queries(
    model: Decoder | Encoder | ScaleInvariantTransformer | Seq2Seq,
    task: Task,
    queries: Sequence[str],
    *,
    batch_size: int = 64,
    check: bool = True,
    use_cache: bool | None = None,
    names: Sequence[str] | None = None,
) -> list[SolveResult]:
    """Answer queries in their order.

    Queries of similar length share a batch, padded on the left, which changes no answer. A
    bidirectional model fills in all places of an answer at once, an encoder-decoder reads a query
    as its source.

    Args:
        model: A trained model.
        task: The task it was trained on.
        queries: Texts such as `"123+4567="`.
        batch_size: Queries at once. Range: >= 1. Default 64.
        check: Compare with the true answer. Default true.
        use_cache: As in `generate`.
        names: What each query is called in messages. Default `"query 1"` and so on.

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
    called = names or [f"query {number}" for number in range(1, len(queries) + 1)]
    prompts = [_read(task, query, name) for query, name in zip(queries, called, strict=True)]
    order = sorted(range(len(queries)), key=lambda i: len(prompts[i][0]))
    produced: dict[int, Tensor] = {}
    for begin in range(0, len(order), batch_size):
        chosen = order[begin : begin + batch_size]
        part = [prompts[i] for i in chosen]
        if isinstance(model, Seq2Seq):
            answers = _translate(model, task, part)
        elif not model.causal:
            answers = _fill(model, part)
        else:
            answers = _generate(model, task, part, use_cache)
        produced.update(zip(chosen, answers, strict=True))
    return [_result(task, query, produced[i], check) for i, query in enumerate(queries)]


def _read(task: Task, query: str, name: str) -> tuple[Tensor, Tensor]:
    try:
        return task.prompt(query)
    except DataError as error:
        raise DataError(f"{name}: {error}" if name else str(error)) from None


def _result(task: Task, query: str, tokens: Tensor, check: bool) -> SolveResult:
    answer = task.decode(tokens)
    correct = task.check(query, answer) if check else None
    return SolveResult(query, answer, correct, task.scratchpad(tokens))


def _generate(
    model: Any, task: Task, prompts: list[tuple[Tensor, Tensor]], use_cache: bool | None
) -> list[Tensor]:
    longest = max(len(tokens) for tokens, _ in prompts)
    new = max(len(ids) - len(tokens) for tokens, ids in prompts)
    # the ids of a shorter prompt move with it to the right; places after its answer have none
    ids = [torch.cat((i.new_zeros(longest - len(t), *i.shape[1:]), i)) for t, i in prompts]
    rows = pad_sequence(ids, batch_first=True)
    room = rows.new_zeros(len(rows), max(0, longest + new - rows.shape[1]), *rows.shape[2:])
    tokens = torch.stack([torch.cat((t.new_zeros(longest - len(t)), t)) for t, _ in prompts])
    lengths = torch.tensor([len(t) for t, _ in prompts])
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
    return list(produced.cpu())


def _translate(model: Seq2Seq, task: Task, prompts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return the targets of sources, padded on the right."""
    source = pad_sequence([tokens for tokens, _ in prompts], batch_first=True, padding_value=PAD)
    source = source.to(model.device)
    # the ids of a source and a target as long as any in training
    new = max(len(ids) - len(tokens) for tokens, ids in prompts)
    made = model.generate(source, mask=source != PAD, max_new_tokens=new, eos=task.eos)
    return list(made.cpu())


@torch.no_grad()
def _fill(model: Any, prompts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return the most likely tokens at the blanks, those of the answers and in the prompts."""
    lengths = torch.tensor([len(ids) for _, ids in prompts])
    ids = pad_sequence([ids for _, ids in prompts], batch_first=True)
    tokens = torch.full(ids.shape[:2], PAD)
    for row, (prompt, _) in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    mask = torch.arange(tokens.shape[1]) < lengths[:, None]
    device = model.device
    logits = model.eval()(tokens.to(device), ids.to(device), mask=mask.to(device))
    best = logits.argmax(-1).cpu()
    return [row[blank] for row, blank in zip(best, mask & (tokens == PAD), strict=True)]
