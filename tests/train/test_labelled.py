"""Training on labelled rows: losses by name, folds, estimated noise, resume, the estimator."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import make_blobs
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError
from gossamer.losses import ForwardCorrectionLoss, SymmetricNoise, inject_noise, pair_noise
from gossamer.models import MultiLayerPerceptron
from gossamer.tasks import LabelledStream, TableTask
from gossamer.train import (
    NoisyLabelClassifier,
    TrainConfig,
    TrainJob,
    build_class_loss,
    labelled,
    load_labelled_run,
    load_run,
    noisy_label,
    train_labelled,
)
from gossamer.train.labelled import fit_rows, out_of_fold, predict_rows

QUICK = {"steps": 60, "lr": 3e-3, "device": "cpu", "checkpoint_every": 20, "log_every": 20}


def blobs(seed: int = 0, size: int = 600, rate: float = 0.3) -> tuple[Any, ...]:
    """Return rows of three classes, their true labels, noisy ones and which were changed."""
    x, true = make_blobs(size, 4, centers=3, cluster_std=1.5, random_state=seed)
    labels, flipped = inject_noise(true, pair_noise(3, rate), random_state=seed)
    return x.astype(np.float32), true, labels, flipped


def job_on(folder: Path, **values: Any) -> TrainJob:
    x, _, labels, _ = blobs()
    lines = [
        ",".join([*(f"{v:.4f}" for v in row), f"c{y}"]) for row, y in zip(x, labels, strict=True)
    ]
    path = folder / "rows.csv"
    path.write_text("\n".join(["a,b,c,d,label", *lines]))
    table = {"name": "table", "path": str(path)}
    return TrainJob.from_dict({"task": table, "train": QUICK, **values}, "test")


@pytest.mark.parametrize("name", ["cross_entropy", "smoothing", "forward", "generalized"])
def test_losses_by_name(name: str) -> None:
    logits, labels = torch.randn(20, 4, dtype=torch.float64), torch.arange(20) % 4
    found = float(build_class_loss({"name": name}, 4)(logits, labels))
    log_p = F.log_softmax(logits, 1)
    p = log_p.exp()[torch.arange(20), labels]
    expected = {
        "cross_entropy": -p.log(),
        "smoothing": -0.9 * p.log() - 0.1 * log_p.mean(1),
        "forward": -(0.9 * p + 0.025).log(),  # a label is drawn again with chance 0.1
        "generalized": (1 - p**0.7) / 0.7,
    }[name]
    assert found == pytest.approx(float(expected.mean()), abs=1e-12)


def test_a_loss_with_a_matrix_of_a_file(tmp_path: Path) -> None:
    matrix = np.array([[0.8, 0.2], [0.1, 0.9]])
    np.save(tmp_path / "t.npy", matrix)
    loss = build_class_loss({"name": "forward", "noise_matrix": str(tmp_path / "t.npy")}, 2)
    logits, labels = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([1])
    p = logits.softmax(1)[0]
    assert float(loss(logits, labels)) == pytest.approx(-float((p[0] * 0.2 + p[1] * 0.9).log()))
    with pytest.raises(DataError, match=r"\(3, 3\); got \(2, 2\)"):
        build_class_loss({"name": "forward", "noise_matrix": str(tmp_path / "t.npy")}, 3)
    for content in (b"text", b"", b"PK\x03\x04"):
        (tmp_path / "bad.npy").write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.npy"):
            build_class_loss({"name": "backward", "noise_matrix": str(tmp_path / "bad.npy")}, 2)
    np.save(tmp_path / "bad.npy", np.array([["a", "b"], ["c", "d"]]))
    with pytest.raises(DataError, match=r"bad\.npy must hold numbers; got <U1"):
        build_class_loss({"name": "backward", "noise_matrix": str(tmp_path / "bad.npy")}, 2)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"name": "foward"}, "did you mean 'forward'"),
        ({"name": "cross_entropy", "alpha": 0.1}, "unknown key 'alpha'"),
        ({"name": "smoothing", "noise_matrix": "t.npy"}, "unknown key 'noise_matrix'"),
        ({"name": "smoothing", "alpha": 1.5}, "alpha"),
        ({"name": "forward", "noise_matrix": "estimate"}, "needs a table or images"),
    ],
)
def test_bad_losses(table: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_class_loss(table, 4)


def test_out_of_fold_means_that_a_row_was_not_seen() -> None:
    """Labels at random cannot be told for rows that were not seen, but for those that were."""
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.standard_normal((90, 20)).astype(np.float32))
    labels = torch.from_numpy(random.integers(0, 3, 90))
    config = TrainConfig(steps=200, lr=1e-2, device="cpu", checkpoint_every=0)
    done: list[int] = []

    def build() -> MultiLayerPerceptron:
        torch.manual_seed(0)
        return MultiLayerPerceptron(20, 3, hidden_dims=(64,))

    p = out_of_fold(build, x, labels, config, folds=3, progress=done.append)
    assert p.sum(1).tolist() == pytest.approx([1.0] * 90)
    assert (p.argmax(1) == labels).float().mean() < 0.6  # a third by chance
    model = build()
    fit_rows(model, x, labels, F.cross_entropy, config)
    assert (predict_rows(model, x).argmax(1) == labels).all()
    assert done == [1, 2, 3]
    with pytest.raises(ConfigError, match="folds"):
        out_of_fold(build, x, labels, config, folds=1)


def test_a_run_on_a_table_is_kept_resumed_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = {"name": "forward", "noise_matrix": "estimate"}
    job = job_on(tmp_path, loss=loss)
    whole = train_labelled(job, tmp_path / "whole", quiet=True)
    assert whole.rows()[0]["num_samples"] == len(whole.labels)
    assert whole.transition is not None
    assert np.load(tmp_path / "whole" / "transition.npy") == pytest.approx(whole.transition)
    p, y = whole.probabilities, whole.labels
    assert whole.accuracy == (p.argmax(1) == y).mean()
    assert whole.cross_entropy == pytest.approx(-np.log(p[np.arange(len(y)), y]).mean())

    # broken off in the last training: the matrix is not estimated a second time
    calls = {"batches": 0, "estimates": 0}
    plain_batch, plain_folds = LabelledStream.batch, labelled.out_of_fold

    def batch(stream: LabelledStream, number: int) -> Any:
        calls["batches"] += 1
        if calls["batches"] == 3 * 60 + 45:
            raise RuntimeError("broken off")
        return plain_batch(stream, number)

    def folds(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls["estimates"] += 1
        return plain_folds(*args, **kwargs)

    monkeypatch.setattr(LabelledStream, "batch", batch)
    monkeypatch.setattr(labelled, "out_of_fold", folds)
    part = tmp_path / "part"
    with pytest.raises(RuntimeError, match="broken off"):
        train_labelled(job, part, quiet=True)
    again = train_labelled(job, part, quiet=True, resume=True)
    assert np.array_equal(again.probabilities, whole.probabilities)
    assert calls == {"batches": 3 * 60 + 45 + 20, "estimates": 1}

    model, task = load_labelled_run(tmp_path / "whole")
    assert task["facts"]["classes"] == ["c0", "c1", "c2"]
    assert model.config["num_features"] == 4
    with pytest.raises(DataError, match="classifier of table"):
        load_run(tmp_path / "whole")


def test_a_job_on_a_table_refuses_what_is_not_for_it(tmp_path: Path) -> None:
    for values, words in (
        ({"model": {"name": "decoder"}}, "model for labelled rows"),
        ({"model": {"dim": 8}}, "unknown key 'dim'"),
        ({"loss": {"name": "smoothing", "noise_matrix": "estimate"}}, "noise_matrix"),
        ({"train": {**QUICK, "optimizer": "scale_invariant_sgd"}}, "scale_invariant"),
    ):
        with pytest.raises(ConfigError, match=words):
            train_labelled(job_on(tmp_path, **values), tmp_path / "never", quiet=True)
    assert not (tmp_path / "never").exists()


def test_a_class_without_rows_of_training_is_named(tmp_path: Path) -> None:
    job = job_on(tmp_path, loss={"name": "forward", "noise_matrix": "estimate"})
    path = Path(job.task["path"])
    header, *lines = path.read_text().split("\n")
    held = TableTask(path).test_rows.tolist().index(True)
    lines[held] = lines[held].rpartition(",")[0] + ",rare"  # a row keeps its side
    path.write_text("\n".join([header, *lines]))
    job = TrainJob.from_dict({"task": {"name": "table", "path": str(path)}, "loss": job.loss}, "t")
    with pytest.raises(DataError, match="estimate the noise; got 0 of class 'rare'"):
        train_labelled(job, tmp_path / "never", quiet=True)
    assert not (tmp_path / "never").exists()


def classifier(**options: Any) -> NoisyLabelClassifier:
    return NoisyLabelClassifier(
        **{"hidden_dims": (32,), "max_epochs": 30, "lr": 3e-3, "random_state": 0, **options}
    )


def test_estimator_finds_the_noise_and_the_wrong_labels() -> None:
    x, true, labels, flipped = blobs(rate=0.3)
    model = classifier().fit(x, labels)
    assert np.abs(model.transition_ - pair_noise(3, 0.3).numpy()).max() < 0.12
    wrong = model.label_errors_
    assert flipped[wrong.indices].mean() > 0.85
    assert len(set(wrong.indices) & set(np.flatnonzero(flipped))) > 0.85 * flipped.sum()
    assert abs(wrong.noise_rate - flipped.mean()) < 0.08
    assert model.score(x, true) > 0.9
    # corrected probabilities are those of the true classes, uncorrected ones of the labels
    sure = model.predict_proba(x).max(1).mean()
    plain = classifier(loss="cross_entropy").fit(x, labels)
    assert sure > plain.predict_proba(x).max(1).mean() + 0.1
    assert plain.label_errors_ is None
    assert plain.transition_ is None


@pytest.mark.parametrize("loss", ["smoothing", "backward", "forward", "cross_entropy"])
def test_estimator_is_that_loss_on_that_network(loss: str) -> None:
    x, _, labels, _ = blobs(size=100)
    noise = SymmetricNoise(3, 0.2)
    model = classifier(loss=loss, transition=noise, alpha=0.3, max_epochs=2).fit(x, labels)
    table = {"name": loss, **({"alpha": 0.3} if loss == "smoothing" else {})}
    by_hand = build_class_loss(table, 3, transition=noise)
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    torch.manual_seed(seed)
    network = MultiLayerPerceptron(4, 3, hidden_dims=(32,))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    rows = torch.from_numpy(x)
    for epoch in range(2):
        order = torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(100))
        for part in (order[:64], order[64:]):
            optimizer.zero_grad()
            by_hand(network(rows[part]), torch.from_numpy(labels)[part]).backward()
            optimizer.step()
    expected = network(rows).double().softmax(1).detach().numpy()
    assert model.predict_proba(x) == pytest.approx(expected, abs=1e-4)


def test_estimator_keeps_symmetric_noise_in_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _, labels, _ = blobs(size=60)
    noise, seen = SymmetricNoise(3, 0.2), []

    def build(table: dict, count: int, *, transition: Any) -> Any:
        seen.append(transition)
        return build_class_loss(table, count, transition=transition)

    monkeypatch.setattr(noisy_label, "build_class_loss", build)
    model = classifier(transition=noise, max_epochs=1).fit(x, labels)
    assert seen == [noise]
    assert np.array_equal(model.transition_, noise.matrix().numpy())


def test_estimator_in_a_pipeline_with_names_as_labels() -> None:
    x, true, _, _ = blobs()
    names = np.array(["low", "mid", "high"])[true]
    pipeline = make_pipeline(StandardScaler(), classifier(loss="smoothing"))
    assert cross_val_score(pipeline, 100 * x, names, cv=3).mean() > 0.9
    assert pipeline.fit(x, names).classes_.tolist() == ["high", "low", "mid"]


def test_estimator_takes_rows_that_are_read_only_and_leaves_them() -> None:
    x, _, labels, _ = blobs(size=60)
    before = x.copy()
    x.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = classifier(max_epochs=1).fit(x, labels)
        model.predict(x)
    assert np.array_equal(x, before)


def test_same_number_same_model_and_no_global_seed_is_read() -> None:
    x, _, labels, _ = blobs(size=100)
    found = []
    for state in (1, 2):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        found.append(classifier(max_epochs=2).fit(x, labels).predict_proba(x))
        assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(*found)
    other = classifier(max_epochs=2, random_state=1).fit(x, labels).predict_proba(x)
    assert not np.array_equal(other, found[0])


@pytest.mark.slow
def test_scikit_learns_own_checks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(
            NoisyLabelClassifier(hidden_dims=(32,), max_epochs=20, lr=1e-2), on_fail=None
        )
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert not failed
    assert sum(r["status"] == "passed" for r in results) > 40


def test_estimator_bad_input() -> None:
    x, _, labels, _ = blobs(size=50)
    for options, words in (
        ({"loss": "focal"}, "unknown loss 'focal'"),
        ({"transition": "estimated"}, "'estimate' or a matrix"),
        ({"max_epochs": 0}, "max_epochs"),
        ({"batch_size": 0}, "batch_size"),
        ({"hidden_dims": 5}, "hidden_dims must be a list of widths; got 5"),
        ({"lr": 0.0}, "lr"),
        ({"loss": "smoothing", "alpha": 2.0}, "alpha"),
    ):
        with pytest.raises(ConfigError, match=words):
            classifier(**options).fit(x, labels)
    with pytest.raises(DataError, match="two classes"):
        classifier().fit(x, np.zeros(50, int))
    with pytest.raises(DataError, match="at least to estimate the noise; got 1 of class '7'"):
        classifier().fit(x, np.where(np.arange(50) == 3, 7, labels))
    with pytest.raises(DataError, match="sum to 1"):
        classifier(transition=np.full((3, 3), 0.5)).fit(x, labels)
    assert isinstance(build_class_loss({"name": "forward"}, 3), ForwardCorrectionLoss)
