"""Training of a dual encoder: pools, losses, hard negatives, resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch import nn

from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.losses import BinaryCrossEntropyLoss, CoupledSoftmaxLoss, DecoupledSoftmaxLoss
from gossamer.models import BagEncoder, DualEncoder
from gossamer.retrieval import (
    Collection,
    RetrieverConfig,
    TrainingRows,
    XmcData,
    build_loss,
    fit,
    fit_retriever,
    mine_negatives,
)
from gossamer.retrieval._pools import PoolBatches
from gossamer.retrieval.fit import _StepLoss
from gossamer.train import TrainConfig

WORDS = ["red", "blue", "green", "shoe", "lamp", "boat", "wing", "slab"]


def toy(num_rows: int = 40) -> XmcData:
    """Rows that hold the words of their labels, one to three of eight, and one of noise."""
    rng = np.random.default_rng(0)
    labels = np.zeros((num_rows, len(WORDS)), dtype=np.float32)
    texts = []
    for row in labels:
        chosen = rng.choice(len(WORDS), size=rng.integers(1, 4), replace=False)
        row[chosen] = 1.0
        texts.append(" ".join([*(WORDS[i] for i in chosen), f"noise{rng.integers(50)}"]))
    return XmcData(csr_matrix(labels), texts=texts, label_texts=[f"about {w}" for w in WORDS])


def encoder(dim: int = 16) -> DualEncoder:
    torch.manual_seed(0)
    return DualEncoder(BagEncoder(dim, num_buckets=512))


def small(**options: Any) -> RetrieverConfig:
    return RetrieverConfig(**{"epochs": 4, "batch_size": 16, "device": "cpu", **options})


@pytest.mark.parametrize("negatives", ["all", "in_batch", "mined"])
def test_a_retriever_learns_which_labels_belong_to_a_text(negatives: str) -> None:
    model, data = encoder(), toy(200)
    config = small(epochs=8, lr=1e-2, mine_every=2, num_negatives=2)
    fit_retriever(model, data, loss="decoupled", negatives=negatives, config=config, quiet=True)
    scores = model.encode_queries(data.texts) @ model.encode_documents(data.label_texts).T
    best = scores.argmax(1).numpy()
    right = data.labels.toarray()[np.arange(len(best)), best] > 0
    assert right.mean() > 0.9  # by chance a quarter


def test_a_step_is_the_gradient_of_the_loss_over_all_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, torch.Tensor] = {}

    def keep(self: Any, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                seen[str(tuple(p.shape))] = p.grad.clone()

    monkeypatch.setattr(torch.optim.AdamW, "step", keep)
    data, model = toy(16), encoder()
    loss = DecoupledSoftmaxLoss()
    plain = encoder()
    loss(plain(data.texts, data.label_texts), data.labels).backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    config = small(epochs=1, chunk_size=3)  # rows and labels are encoded by chunks
    fit_retriever(model, data, loss=loss, config=config, quiet=True)
    for p in plain.parameters():
        clipped = p.grad / max(1.0, float(norm))
        torch.testing.assert_close(seen[str(tuple(p.shape))], clipped, atol=1e-6, rtol=1e-4)


def test_very_many_scores_are_never_held_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, streamed = encoder(), encoder()
    for model, most in ((plain, 10**9), (streamed, 1)):
        monkeypatch.setattr(fit, "_MANY_SCORES", most)
        fit_retriever(model, toy(), loss="decoupled", config=small(epochs=2), quiet=True)
    for a, b in zip(plain.parameters(), streamed.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_chunks_repeat_the_random_numbers_of_dropout() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = BagEncoder(8, num_buckets=64)

        def forward(self, texts: list[str]) -> torch.Tensor:
            return nn.functional.dropout(self.bag(texts), 0.5, training=True)

    grads = []
    for again in (False, True):
        torch.manual_seed(0)
        model = DualEncoder(Noisy(), normalize=False)
        torch.manual_seed(1)
        step = _StepLoss(DecoupledSoftmaxLoss(temperature=1.0), 2 if again else 100)
        parts = [step._embed(model.embed_queries, WORDS[i : i + 2], model) for i in (0, 2)]
        if again:
            torch.manual_seed(1)
            parts = [step._embed(model.embed_queries, WORDS[:4], model)]
        torch.cat(parts).square().sum().backward()
        grads.append(model.encoder.bag.table.weight.grad.clone())
    torch.testing.assert_close(*grads)


def test_a_pool_holds_the_drawn_labels_and_says_all_that_is_relevant() -> None:
    rows = TrainingRows.of(toy())
    lists = np.full((len(rows.texts), 3), -1, dtype=np.int32)
    lists[:, 0] = 7
    batches = PoolBatches(rows, "mined", 5, num_negatives=2, seed=3, mine=lambda epoch: lists)
    for number in range(batches.per_epoch):
        batch = batches.batch(number)
        assert len(set(batch.pool_texts)) == len(batch.pool_texts)
        assert "about slab" in batch.pool_texts
        assert (np.diff(batch.labels.indptr) > 0).all()
        for text, row in zip(batch.texts, batch.labels.toarray(), strict=True):
            named = [pool.split()[1] in text.split() for pool in batch.pool_texts]
            assert named == (row > 0).tolist()


def test_pairs_keep_one_label_for_each_row_in_order() -> None:
    rows = TrainingRows.of(toy())
    batch = PoolBatches(rows, "in_batch", 8, pairs=True).batch(0)
    assert batch.labels.shape == (8, 8)
    assert (batch.labels.diagonal() > 0).all()


def test_batches_are_the_same_wherever_a_run_begins() -> None:
    rows = TrainingRows.of(toy())
    whole = PoolBatches(rows, "in_batch", 16, seed=1)
    texts = [whole.batch(n).texts for n in range(2 * whole.per_epoch)]
    assert sorted(t for part in texts[: whole.per_epoch] for t in part) == sorted(rows.texts)
    assert texts[: whole.per_epoch] != texts[whole.per_epoch :]
    later = PoolBatches(rows, "in_batch", 16, seed=1)
    assert later.batch(4).texts == texts[4]
    assert later.batch(4).pool_texts == whole.batch(4).pool_texts


def test_mined_labels_are_the_hardest_irrelevant_ones() -> None:
    model, data = encoder(), toy()
    mined = mine_negatives(model, data, top_k=8)
    scores = (model.encode_queries(data.texts) @ model.encode_documents(data.label_texts).T).numpy()
    for row, (found, values) in enumerate(zip(mined, scores, strict=True)):
        relevant = set(data.labels[row].indices.tolist())
        expected = [i for i in np.argsort(-values, kind="stable") if i not in relevant]
        assert found.tolist() == expected + [-1] * (8 - len(expected))


def test_a_share_leaves_out_what_scores_like_a_relevant_label() -> None:
    model, data = encoder(), toy()
    fit_retriever(model, data, loss="coupled", config=small(), quiet=True)
    mined = mine_negatives(model, data, top_k=8, max_share=0.5)
    scores = (model.encode_queries(data.texts) @ model.encode_documents(data.label_texts).T).numpy()
    for row, found in enumerate(mined):
        bar = 0.5 * scores[row, data.labels[row].indices].min()
        kept = found[found >= 0]
        assert (scores[row, kept] <= bar + 1e-6).all()
        others = set(range(8)) - set(kept.tolist()) - set(data.labels[row].indices.tolist())
        assert all(scores[row, i] > bar - 1e-6 for i in others)


@pytest.mark.parametrize("negatives", ["all", "mined"])
def test_an_interrupted_run_goes_on_to_the_same_weights(tmp_path: Path, negatives: str) -> None:
    config = small(epochs=6, mine_every=2)
    options: dict[str, Any] = {"loss": "decoupled", "negatives": negatives, "config": config}

    class Breaking(DecoupledSoftmaxLoss):
        calls = 0

        def forward(self, logits: torch.Tensor, labels: Any) -> torch.Tensor:
            Breaking.calls += 1
            if Breaking.calls == 12:
                raise KeyboardInterrupt
            return super().forward(logits, labels)

    loop = RetrieverConfig.loop

    def often(self: RetrieverConfig, steps: int) -> TrainConfig:
        return dataclasses.replace(loop(self, steps), checkpoint_every=5)

    whole = encoder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RetrieverConfig, "loop", often)
        fit_retriever(whole, toy(), folder=tmp_path / "whole", quiet=True, **options)
        patch.setitem(fit.LOSSES, "decoupled", Breaking)
        with pytest.raises(KeyboardInterrupt):
            fit_retriever(encoder(), toy(), folder=tmp_path / "part", quiet=True, **options)
        patch.setitem(fit.LOSSES, "decoupled", DecoupledSoftmaxLoss)
        again = encoder()
        fit_retriever(again, toy(), folder=tmp_path / "part", resume=True, quiet=True, **options)
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    loaded = DualEncoder.from_pretrained(tmp_path / "part")
    assert torch.equal(loaded.encode_queries(WORDS), again.encode_queries(WORDS))


def test_a_collection_gives_rows_of_its_judgements() -> None:
    data = Collection(
        {"a": "x", "b": "y", "c": "z"}, {"q": "one", "r": "two"},
        {"q": {"b": 2, "c": 0, "lost": 1}, "r": {"a": 0}},
    )  # fmt: skip
    rows = TrainingRows.of(data)
    assert (rows.texts, rows.num_empty) == (["one"], 1)
    assert rows.labels.toarray().tolist() == [[0, 1, 0]]


def test_losses_have_names() -> None:
    assert isinstance(build_loss("coupled", temperature=0.1), CoupledSoftmaxLoss)
    own = nn.Identity()
    assert build_loss(own) is own
    with pytest.raises(ConfigError, match="unknown loss"):
        build_loss("softmax")


# --- bad input ---


def test_bad_options_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown negatives"):
        fit_retriever(encoder(), toy(), loss="decoupled", negatives="random")
    with pytest.raises(ConfigError, match="negatives='in_batch'"):
        fit_retriever(encoder(), toy(), loss="in_batch", negatives="all")
    learns = BinaryCrossEntropyLoss(bias=-3.0)
    with pytest.raises(ConfigError, match="the parameters of a loss do not learn here"):
        fit_retriever(encoder(), toy(), loss=learns)
    with pytest.raises(ConfigError, match="max_share"):
        RetrieverConfig(max_share=0.0)
    with pytest.raises(ConfigError, match="resume needs the folder"):
        fit_retriever(encoder(), toy(), loss="decoupled", resume=True)
    with pytest.raises(ConfigError, match="epochs"):
        RetrieverConfig(epochs=0)
    with pytest.raises(ConfigError, match="lr"):
        RetrieverConfig(lr=0.0)
    with pytest.raises(ConfigError, match="top_k"):
        mine_negatives(encoder(), toy(), top_k=0)
    with pytest.raises(ConfigError, match="max_share"):
        mine_negatives(encoder(), toy(), max_share=0.0)


def test_bad_data_is_named() -> None:
    data = toy()
    with pytest.raises(DataError, match="no label_texts"):
        fit_retriever(encoder(), XmcData(data.labels, texts=data.texts), loss="decoupled")
    with pytest.raises(ShapeError, match=r"label_texts must hold one text for each of the 8"):
        TrainingRows(data.texts, ["a"], data.labels)
    with pytest.raises(DataError, match="a row with a relevant"):
        TrainingRows.of(XmcData(csr_matrix((2, 1)), texts=["a", "b"], label_texts=["c"]))
    with pytest.raises(DataError, match="judged queries must have texts; got none for 'q'"):
        TrainingRows.of(Collection({"a": "x"}, {}, {"q": {"a": 1}}))


def test_a_run_goes_on_with_its_own_settings_only(tmp_path: Path) -> None:
    fit_retriever(
        encoder(), toy(), loss="decoupled", config=small(epochs=1), folder=tmp_path, quiet=True
    )
    with pytest.raises(DataError, match="other settings"):
        fit_retriever(
            encoder(), toy(), loss="coupled", config=small(epochs=1), folder=tmp_path,
            resume=True, quiet=True,
        )  # fmt: skip


@pytest.mark.parametrize("changed", ["temperature", "rows", "width"])
def test_a_run_knows_its_loss_rows_and_model(tmp_path: Path, changed: str) -> None:
    options: dict[str, Any] = {"config": small(epochs=1), "folder": tmp_path, "quiet": True}
    fit_retriever(encoder(), toy(), loss=DecoupledSoftmaxLoss(), **options)
    assert "temperature=0.05" in (tmp_path / "config.toml").read_text()
    temperature = 0.1 if changed == "temperature" else 0.05
    loss = DecoupledSoftmaxLoss(temperature=temperature)
    model, data = encoder(8 if changed == "width" else 16), toy()
    if changed == "rows" and data.texts is not None:
        data.texts[0] += " more"
    with pytest.raises(DataError, match="other settings"):
        fit_retriever(model, data, loss=loss, resume=True, **options)


def test_a_loss_that_is_a_function_can_be_resumed(tmp_path: Path) -> None:
    def made() -> Any:  # each has another address in memory
        def plain(logits: torch.Tensor, labels: Any) -> torch.Tensor:
            return DecoupledSoftmaxLoss()(logits, labels)

        return plain

    options: dict[str, Any] = {"config": small(epochs=1), "folder": tmp_path, "quiet": True}
    first, again = encoder(), encoder()
    fit_retriever(first, toy(), loss=made(), **options)
    fit_retriever(again, toy(), loss=made(), resume=True, **options)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_new_run_does_not_take_the_hard_negatives_of_an_old_one(tmp_path: Path) -> None:
    (tmp_path / "negatives-00002.npy").write_bytes(b"of another run")
    config = small(epochs=3, mine_every=2)
    fit_retriever(
        encoder(), toy(), loss="decoupled", negatives="mined", config=config, folder=tmp_path,
        quiet=True,
    )  # fmt: skip
    assert np.load(tmp_path / "negatives-00002.npy").shape == (40, 100)


def test_labels_that_score_like_relevant_ones_are_not_drawn(tmp_path: Path) -> None:
    config = small(epochs=3, mine_every=2, max_share=1e-6)
    fit_retriever(
        encoder(), toy(), loss="decoupled", negatives="mined", config=config, folder=tmp_path,
        quiet=True,
    )  # fmt: skip
    few = np.load(tmp_path / "negatives-00002.npy")
    assert (few >= 0).sum() < 40  # of up to 7 a row


def test_an_encoder_that_cannot_be_saved_is_named_before_training(tmp_path: Path) -> None:
    class Own(nn.Module):
        def forward(self, texts: list[str]) -> torch.Tensor:
            return torch.zeros(len(texts), 2)

    with pytest.raises(ConfigError, match="BagEncoder, TextEncoder"):
        fit_retriever(DualEncoder(Own()), toy(), loss="decoupled", folder=tmp_path)
    assert not (tmp_path / "config.toml").exists()
