"""Losses of this library in the trainer of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.errors import ConfigError, MissingDependencyError, ShapeError

__all__ = ["as_sentence_transformers_loss"]


def as_sentence_transformers_loss(loss: Callable[[Tensor, Any], Tensor], model: Any) -> nn.Module:
    r"""Return a loss of this library in the form that `SentenceTransformerTrainer` calls.

    The first column of the data set holds queries (anchors), the second a relevant text for each,
    further columns other texts, irrelevant ones by default. Each query is scored by cosine against
    all texts of the batch. A text that stands twice in the batch is relevant to all queries that it
    is relevant to once, and so are the texts of equal queries: no text is taken for irrelevant
    because of the row it came with. With `CoupledSoftmaxLoss(temperature=0.05)` or
    `DecoupledSoftmaxLoss` and no such repetition this is `MultipleNegativesRankingLoss` of that
    library at its scale of 20.

    Args:
        loss: Called with cosines `(B, N)` and the relevant texts as a boolean `(B, N)`, N all texts
            of the batch. `InBatchSoftmaxLoss` takes two columns.
        model: A `SentenceTransformer`.

    Returns:
        A module to call with `(sentence_features, labels)`. Labels, a data set's column `label`,
        say which text columns are relevant: `None`, the first one; integers `(B,)`, the column of
        each row, from 0; or 0-1 `(B, columns)`, several of them.

    Raises:
        MissingDependencyError: Without sentence-transformers (extra `retrieval`).
        ConfigError: If `loss` cannot be called or `model` is no `SentenceTransformer`.

    Example:
        >>> from sentence_transformers import SentenceTransformer  # doctest: +SKIP
        >>> from gossamer.losses import DecoupledSoftmaxLoss
        >>> from gossamer.models import packaged_model
        >>> model = SentenceTransformer(str(packaged_model("minilm")))  # doctest: +SKIP
        >>> loss = as_sentence_transformers_loss(DecoupledSoftmaxLoss(), model)  # doctest: +SKIP

    Source: Reimers and Gurevych, *Sentence-BERT*, EMNLP 2019; the form of its library's losses.
    Deviations: repeated texts count as relevant (that library has a sampler that avoids them).
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise MissingDependencyError("sentence_transformers", "retrieval") from None
    if not callable(loss):
        raise ConfigError(
            f"loss must be callable with (logits, labels); got {type(loss).__name__}. Use a loss "
            "such as DecoupledSoftmaxLoss()."
        )
    if not isinstance(model, SentenceTransformer):
        raise ConfigError(
            f"model must be a SentenceTransformer; got {type(model).__name__}. Load it with "
            "SentenceTransformer(folder)."
        )
    return _ColumnLoss(loss, model)


class _ColumnLoss(nn.Module):
    """A loss over the columns of a batch; the trainer looks for the attribute `model`."""

    def __init__(self, loss: Callable[[Tensor, Any], Tensor], model: Any) -> None:
        super().__init__()
        self.loss = loss
        self.model = model

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None
    ) -> Tensor:
        """Return the loss of one batch."""
        features = list(sentence_features)
        if len(features) < 2:
            raise ShapeError(
                f"a batch must have at least two columns of texts, queries and relevant texts; got "
                f"{len(features)}. Add a column to the data set."
            )
        embeddings = [
            F.normalize(self.model(column)["sentence_embedding"], dim=-1) for column in features
        ]
        queries, texts = embeddings[0], torch.cat(embeddings[1:])
        marks = _marks(labels, len(queries), len(features) - 1, queries.device)
        queries_as = _numbers(_texts_of(features[0], embeddings[0]))
        texts_as = _numbers(
            [text for column in zip(features[1:], embeddings[1:], strict=True)
             for text in _texts_of(*column)]
        )  # fmt: skip
        relevant = _relevant(marks, queries_as.to(queries.device), texts_as.to(queries.device))
        return self.loss(queries @ texts.T, relevant)

    def get_config_dict(self) -> dict[str, Any]:
        """Return what that library writes on a model's page."""
        return {"loss": type(self.loss).__name__, "similarity_fct": "cos_sim"} | {
            key: getattr(self.loss, key)
            for key in ("temperature", "k", "alpha", "normalize")
            if isinstance(getattr(self.loss, key, None), (int, float, str))
        }


def _marks(labels: Tensor | None, rows: int, columns: int, device: torch.device) -> Tensor:
    """Return which text columns are relevant to each row, `(B, columns)`."""
    marks = torch.zeros((rows, columns), dtype=torch.bool, device=device)
    if labels is None or not labels.numel():
        marks[:, 0] = True
    elif labels.shape == (rows, columns):
        marks = labels.to(device) > 0
    elif labels.shape == (rows,) and bool(((labels >= 0) & (labels < columns)).all()):
        marks[torch.arange(rows, device=device), labels.to(device).long()] = True
    else:
        raise ShapeError(
            f"labels must be None, columns from 0 to {columns - 1} of {rows} rows, or 0-1 "
            f"({rows}, {columns}); got {tuple(labels.shape)}. Change or drop the column 'label'."
        )
    return marks


def _texts_of(column: dict[str, Tensor], embeddings: Tensor) -> Sequence[Hashable]:
    """Return something for each text that equal texts, and no others, share."""
    ids, mask = column.get("input_ids"), column.get("attention_mask")
    if ids is None or mask is None or ids.shape != mask.shape or ids.dim() != 2:
        return [tuple(row) for row in embeddings.detach().tolist()]
    pairs = zip(ids.tolist(), mask.tolist(), strict=True)
    return [tuple(t for t, there in zip(*pair, strict=True) if there) for pair in pairs]


def _numbers(texts: Sequence[Hashable]) -> Tensor:
    """Return a number for each text, the same for equal ones."""
    known: dict[Hashable, int] = {}
    return torch.tensor([known.setdefault(text, len(known)) for text in texts])


def _relevant(marks: Tensor, queries: Tensor, texts: Tensor) -> Tensor:
    """Return the relevant texts of each row, also those marked in rows of an equal query."""
    rows, columns = marks.nonzero().T
    known = marks.new_zeros((int(queries.max()) + 1, int(texts.max()) + 1))
    known[queries[rows], texts[columns * len(marks) + rows]] = True
    return known[queries][:, texts]
