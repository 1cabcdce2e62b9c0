"""The order-k chain: transition matrix, entropy and ladder in NumPy, seeds, bad input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from gossamer.errors import ConfigError, DataError
from gossamer.tasks import MarkovTask, build_task

# --- reference values ---


def stationary(matrix: np.ndarray) -> np.ndarray:
    """Return the left eigenvector for eigenvalue 1."""
    values, vectors = np.linalg.eig(matrix.T)
    law = np.real(vectors[:, np.argmin(np.abs(values - 1))])
    return law / law.sum()


@pytest.mark.parametrize("num_symbols", [2, 5, 8])
def test_order_1_is_its_transition_matrix(num_symbols: int, generator: torch.Generator) -> None:
    task = MarkovTask(num_symbols, 1, weights=[1.5])
    matrix = task.transition().numpy()
    np.testing.assert_allclose(matrix.sum(1), 1.0, atol=1e-12)
    # every row is a softmax with one logit of 1.5, each at another place
    peak = np.exp(1.5) / (np.exp(1.5) + num_symbols - 1)
    np.testing.assert_allclose(np.sort(matrix, 1)[:, -1], peak)
    assert sorted(matrix.argmax(1)) == list(range(num_symbols))
    law = stationary(matrix)
    entropy = -(law[:, None] * matrix * np.log(matrix)).sum()
    assert task.entropy_rate() == pytest.approx(entropy, abs=1e-10)
    symbols = task.sample(400, generator=generator).tokens.numpy() - 2
    pairs = np.zeros((num_symbols, num_symbols))
    np.add.at(pairs, (symbols[:, :-1], symbols[:, 1:]), 1)
    expected = law[:, None] * matrix * pairs.sum()
    np.testing.assert_allclose(pairs / pairs.sum(), expected / pairs.sum(), atol=0.012)


def test_entropy_of_a_sample_agrees_with_the_exact_one() -> None:
    """300 x 65 symbols; 0.02 is more than 4 standard errors of the mean of such a sample."""
    for order in (1, 2, 3):
        task = MarkovTask(order=order, random_state=3)
        sampled = task.entropy_rate(num_sequences=300)
        assert sampled != task.entropy_rate()
        assert abs(sampled - task.entropy_rate()) < 0.02


def test_transition_of_order_2_follows_the_formula() -> None:
    task = MarkovTask(4, 2, weights=(2.0, 1.0), random_state=5)
    draw = torch.Generator().manual_seed(5)
    moves = [np.eye(4)[torch.randperm(4, generator=draw).numpy()] for _ in range(2)]
    for older in range(4):
        for newer in range(4):
            logits = 2.0 * moves[0][newer] + 1.0 * moves[1][older]
            wanted = np.exp(logits) / np.exp(logits).sum()
            np.testing.assert_allclose(task.transition()[older, newer].numpy(), wanted, atol=1e-12)


def test_samples_start_in_the_stationary_law(generator: torch.Generator) -> None:
    """This chain changes rarely between two sets of symbols: a uniform start would be seen."""
    task = MarkovTask(random_state=1)
    contexts = task._joint.sum((0, 1, 3))
    first = task.sample(4000, generator=generator).tokens - 2
    for column in (0, 64):
        share = torch.bincount(first[:, column], minlength=8) / 4000
        assert (share - contexts).abs().max() < 0.03


def test_the_ladder_against_a_scipy_fit() -> None:
    task = MarkovTask(3, 2, weights=(2.0, 1.0), random_state=2)
    joint = task._joint.numpy()
    pairs = joint.sum(0)
    marginal = pairs.sum(0)
    ladder = task.ladder()
    assert ladder[0] == pytest.approx(-(marginal * np.log(marginal)).sum(), abs=1e-9)
    # with one lag an additive model is any conditional law, so its loss is a conditional entropy
    conditional = pairs / pairs.sum(1, keepdims=True)
    assert ladder[1] == pytest.approx(-(pairs * np.log(conditional)).sum(), abs=1e-9)
    assert ladder[2] == pytest.approx(task.entropy_rate(), abs=1e-8)

    three = MarkovTask(3, 3, random_state=2)
    seen = three._joint.sum(0).numpy()

    def loss(flat: np.ndarray) -> float:
        older, newer = flat.reshape(2, 3, 3)
        logits = older[:, None] + newer[None]
        logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return float(-(seen * logits).sum())

    best = minimize(loss, np.zeros(18), method="BFGS", options={"gtol": 1e-7})
    assert three.ladder()[2] == pytest.approx(best.fun, abs=1e-7)


@pytest.mark.slow
def test_every_lag_lowers_the_ladder() -> None:
    for random_state in range(3):
        task = MarkovTask(random_state=random_state)
        rungs = task.ladder()
        assert len(rungs) == 4
        assert all(a > b + 0.005 for a, b in itertools.pairwise(rungs))
        assert rungs[3] == pytest.approx(task.entropy_rate(), abs=1e-7)


# --- samples ---


def test_layout_and_mask(generator: torch.Generator) -> None:
    task = MarkovTask(length=20)
    batch = task.sample(3, generator=generator)
    assert batch.tokens.shape == (3, 21)
    assert batch.position_ids[1].tolist() == list(range(1, 22))
    # with 20 symbols going in, targets 1 to 8 are not scored and 9 to 20 are
    assert batch.loss_mask[0].tolist() == [False] * 9 + [True] * 12
    assert [c.coordinates["length"] for c in task.grid()] == [20, 40, 80]
    cell = task.grid(length=[33])[0].task
    assert cell.sample(1, generator=generator, split="test").tokens.shape == (1, 34)
    assert torch.equal(cell.transition(), task.transition())


def test_a_batch_depends_on_seed_and_number_alone() -> None:
    one, two = MarkovTask().stream(4, seed=3), MarkovTask().stream(4, seed=3)
    assert torch.equal(one.batch(7).tokens, two.batch(7).tokens)
    assert not torch.equal(one.batch(7).tokens, one.batch(8).tokens)
    other = MarkovTask(random_state=1)
    assert not torch.equal(other.transition(), MarkovTask().transition())


def test_queries() -> None:
    task = MarkovTask(random_state=3)
    context = tuple("abcdefgh".index(letter) for letter in "gfa")
    best = "abcdefgh"[int(task.transition()[context].argmax())]
    assert task.answer("abcgfa") == best
    assert task.check("gfa", best)
    example = task.example("gfa")
    assert task.symbols(example.tokens) == "gfa" + best
    assert example.loss_mask.tolist() == [False, False, False, True]
    assert example.position_ids.tolist() == task.position_ids("gfa").tolist() == [1, 2, 3, 4]
    assert task.decode([2, 3, 1, 4]) == "ab"


def test_by_name() -> None:
    task = build_task("markov:num_symbols=4,order=2,weights=2-1.5,length=9")
    assert task.config["weights"] == [2.0, 1.5]
    options = {key: value for key, value in task.config.items() if key != "name"}
    assert build_task("markov", **options).config == task.config


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": (9.0, 4.0, 1.0)}, "entropy of at least 0.2 nats for each symbol; got 0"),
        ({"order": 1, "weights": [8.0]}, "entropy"),
        ({"weights": (3.0, 2.0)}, "3 falling numbers"),
        ({"weights": (1.0, 2.0, 3.0)}, "3 falling numbers"),
        ({"weights": (3.0, 2.0, -1.0)}, "3 falling numbers"),
        ({"weights": "a-b-c"}, "3 falling numbers"),
        ({"weights": (3.0, 2.0, float("nan"))}, "3 falling numbers"),
        ({"order": 4}, "weights are needed for an order above 3"),
        ({"num_symbols": 20, "order": 5, "weights": [5, 4, 3, 2, 1]}, "got 20 and 5"),
        ({"length": 8}, "length must be >= 9"),
        ({"num_symbols": 1}, "num_symbols"),
        ({"order": 0}, "order"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MarkovTask(**options)


@pytest.mark.parametrize(
    ("query", "message"),
    [("ab", "at least 3 symbols"), ("abz", "'z' at column 3"), ("", "at least 3 symbols")],
)
def test_bad_queries(query: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        MarkovTask().answer(query)
