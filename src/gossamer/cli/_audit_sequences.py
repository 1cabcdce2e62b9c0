"""Checks of `gossamer audit` on sequence models and on patterns of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.cli._audit import Check, Finding

if TYPE_CHECKING:
    from gossamer.tasks import Task

__all__ = ["is_sequence_run", "of_pattern", "of_sequences"]

_ROWS = 64
_PRECISION = (
    {
        "term": "Tied rows, tied bias",
        "text": "Share of queries with two or more weights that bfloat16 rounds to 1, and the mean "
        "error of their outputs over the mean output, in units of 2^-8. At risk: a tenth of a unit "
        "or more, far from 0, in a head whose values have one sign in some feature.",
    },
)
_RANKS = (
    {
        "term": "Logit rank, weight rank",
        "text": "How many directions the attention of a head uses, before and after the softmax, "
        "mean over samples. The first cannot exceed the width of the head.",
    },
)
_UNITS = (
    {
        "term": "Active, skew, kurtosis, recall",
        "text": "Share of hidden units that are not 0; how far the scores are from a normal law (0 "
        "and 0); with a predictor, the share of the largest units that it keeps.",
    },
)


def is_sequence_run(folder: Path) -> bool:
    """Whether a folder is a run of `gossamer train` on sequences."""
    from gossamer.cli._solve_labelled import is_labelled_run

    return (folder / "config.toml").is_file() and not is_labelled_run(folder)


def of_pattern(path: Path) -> dict[str, Check]:
    """Return the check of a pattern, a square boolean matrix in a `.npy` file."""
    import numpy as np

    from gossamer.attention import AttentionPattern
    from gossamer.errors import DataError

    try:
        mask = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} must be a .npy file with a square boolean matrix, True = takes part; {error}. "
            "Write it by numpy.save."
        ) from None
    return {"pattern": partial(_pattern, AttentionPattern.from_mask(mask))}


def _pattern(pattern: Any) -> Finding:
    from gossamer.attention import check_patterns

    report = check_patterns([pattern])
    rows = [{"kind": "condition", **row} for row in report.rows()]
    repair = [{"kind": "repair", "query": query, "key": key} for _, query, key in report.repair]
    lists = [_list("conditions", "Conditions", "condition", ("condition", "answer"))]
    if repair:
        lists.append(_list("repair", "Entries that would repair it", "repair", ("query", "key")))
    pairs = int(pattern.mask().sum())
    answers = ", ".join(f"{row['condition']}: {row['answer']}" for row in report.rows())
    return Finding(
        values={"steps": report.reach_steps, "pairs": pairs},
        columns=[
            {"name": "steps", "label": "layers until every token reaches every other", "unit": ""},
            {"name": "pairs", "label": "pairs that take part", "unit": ""},
        ],
        lines=[
            f"pattern of {pattern.length} tokens, {pairs} pairs: {report.verdict} ({answers})",
            *(f"  {note}" for note in report.notes),
        ],
        rows=[*rows, *repair],
        lists=lists,
        notes=[
            "The conditions are sufficient for sparse transformers to approximate every continuous "
            "function of sequences; a pattern that violates one may still be expressive.",
            *report.notes,
        ],
        details=report.to_dict(),
    )


def of_sequences(folder: Path, *, seed: int) -> dict[str, Check]:
    """Return the checks of a run on sequences.

    Args:
        folder: The run.
        seed: Of the samples.
    """
    from gossamer.train import load_run

    model, task = load_run(folder)
    return {
        "variance": partial(_variance, model, task, seed),
        "precision": partial(_precision, model, task, seed),
        "head_size": partial(_head_size, model, task, seed),
        "sparsity": partial(_sparsity, model, task, seed),
    }


def _batches(model: Any, task: Task, seed: int, *, cells: int) -> list[Any]:
    """Return one batch of test samples for each cell of the task's grid that the model can take."""
    import torch

    from gossamer.train.job import reachable_cells

    generator = torch.Generator().manual_seed(seed)
    return [
        cell.task.sample(_ROWS, generator=generator, split="test")
        for cell in reachable_cells(model, task)[:cells]
    ]


def _variance(model: Any, task: Task, seed: int) -> Finding:
    from gossamer.errors import UnsupportedError
    from gossamer.measures import variance_report

    try:
        report = variance_report(model, _batches(model, task, seed, cells=5))
    except UnsupportedError as error:
        return _not_for("variance", error)
    slopes = [value for value in report.slopes.values() if value == value]
    steepest = min(slopes) if slopes else None
    rows = [{"kind": "variance", **row} for row in report.rows()]
    said = "one length only" if steepest is None else f"steepest slope {steepest:.2f}"
    return Finding(
        values={"variance_slope": steepest},
        columns=[{"name": "variance_slope", "label": "slope of attention's spread", "unit": ""}],
        lines=[f"variance: the spread of attention outputs over length, {said} (-0.5: averages)"],
        rows=rows,
        figures=[
            {
                "kind": "curve", "name": "variance", "where": {"kind": "variance"},
                "title": "Spread of attention outputs", "group": "module",
                "alt": "Standard deviation of the output of attention against length.",
                "x": "length", "y": "std", "y_label": "standard deviation", "log_x": True,
            }
        ],
        notes=[
            "Slope of the log of the spread against the log of the length: -0.5 where attention "
            "averages independent values, 0 where length does not matter."
        ],
        details=report.to_dict(),
    )  # fmt: skip


def _precision(model: Any, task: Task, seed: int) -> Finding:
    from gossamer.attention import rounding_report
    from gossamer.errors import UnsupportedError

    try:
        report = rounding_report(model, _batches(model, task, seed, cells=1)[0])
    except UnsupportedError as error:
        return _not_for("precision", error)
    risky = report.at_risk()
    columns = ("layer", "head", "at_risk", "tied_rows", "tied_bias", "largest_logit")
    return Finding(
        values={"at_risk": len(risky)},
        columns=[
            {"name": "at_risk", "label": "heads that bfloat16 rounds to one side", "unit": ""}
        ],
        lines=[f"precision: {len(risky)} of {len(report.rows())} heads at risk in bfloat16"],
        rows=[
            {"kind": "precision", **row, "at_risk": "yes" if row["at_risk"] else "no"}
            for row in report.rows()
        ],
        terms=_PRECISION,
        lists=[_list("precision", "Rounding in bfloat16, head by head", "precision", columns)],
        details=report.to_dict(),
    )


def _head_size(model: Any, task: Task, seed: int) -> Finding:
    from gossamer.attention import rank_report
    from gossamer.errors import UnsupportedError

    try:
        report = rank_report(model, _batches(model, task, seed, cells=1)[0])
    except UnsupportedError as error:
        return _not_for("head_size", error)
    rows = report.rows()
    narrow = report.narrow()
    columns = ("layer", "head", "head_dim", "length", "logit_rank", "weight_rank")
    return Finding(
        values={"narrow": len(narrow)},
        columns=[{"name": "narrow", "label": "layers with heads narrower than the length",
                  "unit": ""}],
        lines=[
            f"head_size: {len(narrow)} of {len(report.layers)} layers have heads narrower than "
            "the length less 1, which cannot make every attention matrix"
        ],
        rows=[{"kind": "head_size", **row} for row in rows],
        terms=_RANKS,
        lists=[_list("head-size", "Ranks of logits and weights", "head_size", columns)],
        details={"rows": rows, "narrow": narrow},
    )  # fmt: skip


def _sparsity(model: Any, task: Task, seed: int) -> Finding:
    from gossamer.errors import UnsupportedError
    from gossamer.layers import sparsity_report

    try:
        report = sparsity_report(model, _batches(model, task, seed, cells=1))
    except UnsupportedError as error:
        return _not_for("sparsity", error)
    rows = report.rows()
    active = 100 * sum(row["active"] for row in rows) / len(rows)
    return Finding(
        values={"active": active},
        columns=[{"name": "active", "label": "active hidden units", "unit": "%"}],
        lines=[f"sparsity: {active:.1f} % of the hidden units are active"],
        rows=[{"kind": "sparsity", **row} for row in rows],
        terms=_UNITS,
        lists=[_list("sparsity", "Hidden units, layer by layer", "sparsity",
                     ("layer", "active", "target", "skew", "kurtosis", "recall"))],
        details={"rows": rows},
    )  # fmt: skip


def _not_for(name: str, error: Exception) -> Finding:
    """Return that a check does not fit the model, with the reason."""
    words = f"{name}: not for this model. {error}"
    return Finding(values={}, columns=[], lines=[words], notes=[words])


def _list(name: str, title: str, kind: str, columns: Sequence[str]) -> Mapping[str, Any]:
    shown = [{"name": column, "label": column.replace("_", " ")} for column in columns]
    return {"name": name, "title": title, "where": {"kind": kind}, "columns": shown}
