"""The report of all measures, and the comparison of many networks."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau
from torch import Tensor, nn

from gossamer.errors import ConfigError, DataError, ShapeError, UnsupportedError
from gossamer.measures import (
    GeneralizationReport,
    compare_measures,
    frobenius_complexity,
    generalization_report,
    max_sharpness,
    output_margins,
    pac_bayes_bound,
    path_norm,
    spectral_complexity,
)
from gossamer.measures.norms import margin_quantile_of

NAMES = ["l2", "l1_path", "l2_path", "spectral", "sharpness", "pac_bayes"]


def data(rows: int = 60) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=draw)
    return x, x[:, :3].argmax(1)


def network(bias: bool = True) -> nn.Sequential:
    """Return a network that is right on all of `data`: its hidden units keep the coordinates."""
    first, last = nn.Linear(4, 8, bias=bias), nn.Linear(8, 3, bias=bias)
    eye = torch.eye(4)
    first.weight.data.copy_(torch.cat([eye, -eye]))
    last.weight.data.copy_(torch.cat([eye[:3], -eye[:3]], dim=1))
    if bias:
        nn.init.zeros_(first.bias)
        nn.init.constant_(last.bias, 0.5)
    return nn.Sequential(first, nn.ReLU(), last)


# --- reference values ---


def test_the_report_is_its_parts() -> None:
    model, pair = network(), data()
    start = copy.deepcopy(model)
    start[0].weight.data.zero_()
    report = generalization_report(model, pair, init_model=start)
    assert list(report.values) == NAMES
    gamma = margin_quantile_of(output_margins(model, pair), 0.05)
    assert report.margin == gamma > 0
    minus = 2 * math.log(gamma)
    norms = {
        "l2": frobenius_complexity(model),
        "l1_path": path_norm(model, (4,), p=1),
        "l2_path": path_norm(model, (4,), p=2),
        "spectral": spectral_complexity(model, (4,)),
    }
    for name, value in norms.items():
        assert report.norms[name] == pytest.approx(value, rel=1e-12)
        assert report.values[name] == pytest.approx(value - minus, rel=1e-12)
    assert report.values["sharpness"] == max_sharpness(model, pair).value
    bound = pac_bayes_bound(model, pair, init_model=start)
    assert report.details["pac_bayes"] == bound.to_dict()
    assert report.values["pac_bayes"] == bound.bound
    found = report.baselines
    assert found["parameters"] == 4 * 8 + 8 + 8 * 3 + 3
    assert found["distance"] == pytest.approx(float(model[0].weight.detach().norm()))
    assert found["inverse_margin"] == 1 / gamma
    assert found["train_error"] == 0
    assert report.num_examples == 60
    assert [layer["layer"] for layer in report.layers] == ["0", "2"]
    assert report.layers[0]["spectral"] == pytest.approx(math.sqrt(2))
    assert report.notes == ["biases are left out of the norms"]


def test_numbers_instead_of_logarithms() -> None:
    logs = generalization_report(network(), data(), measures=NAMES[:4])
    plain = generalization_report(network(), data(), measures=NAMES[:4], log=False)
    for name in NAMES[:4]:
        assert plain.values[name] == pytest.approx(math.exp(logs.values[name]), rel=1e-12)
    assert {row["unit"] for row in plain.rows()} == {""}
    assert logs.rows()[0]["unit"] == "ln"


def test_rows_say_what_a_number_is_worth() -> None:
    report = generalization_report(network(), data())
    rows = {row["measure"]: row for row in report.rows()}
    assert "vacuous" in rows["pac_bayes"]["remark"]
    assert "lower bound" in rows["sharpness"]["remark"]
    assert rows["parameters"]["value"] == 67
    assert math.isnan(rows["distance"]["value"])
    plain = report.to_dict()
    assert set(plain) == set(GeneralizationReport.__dataclass_fields__)
    json.dumps(plain)


def test_progress_is_told() -> None:
    told: list[str] = []
    generalization_report(network(), data(), measures=["sharpness", "l2"], on_progress=told.append)
    assert told == ["margins", "l2", "sharpness"]


# --- limits and invariances ---


def test_scaling_the_last_layer_changes_no_norm() -> None:
    model, other = network(bias=False), network(bias=False)
    other[2].weight.data *= 8
    reports = [generalization_report(m, data(), measures=NAMES[:4]) for m in (model, other)]
    assert reports[1].margin == pytest.approx(8 * reports[0].margin)
    for name in NAMES[:4]:
        assert reports[1].values[name] == pytest.approx(reports[0].values[name], abs=1e-10)


def test_rescaling_units_changes_neither_path_norms_nor_margin() -> None:
    model, other = network(bias=False), network(bias=False)
    other[0].weight.data[2] *= 16
    other[2].weight.data[:, 2] /= 16
    reports = [generalization_report(m, data(), measures=NAMES[:4]) for m in (model, other)]
    for name in ("l1_path", "l2_path"):
        assert reports[1].values[name] == pytest.approx(reports[0].values[name], abs=1e-10)
    for name in ("l2", "spectral"):
        assert abs(reports[1].values[name] - reports[0].values[name]) > 0.1


def test_a_convolutional_network_under_training_with_any_loader() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(64, 3),
    )
    x = torch.randn(50, 1, 8, 8)
    model(x)
    y = model.eval()(x).argmax(1)
    model.train()
    before = copy.deepcopy(model.state_dict())
    rows = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=False)
    report = generalization_report(model, loader)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.training
    assert report.notes == ["biases are left out of the norms"]  # of the folded BatchNorm
    again = generalization_report(model.eval(), (x, y))
    for name in NAMES:
        assert again.values[name] == pytest.approx(report.values[name], rel=1e-8)


def test_branches_and_shared_weights_are_noted() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)
            self.head = nn.Linear(4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = x + self.inner(x).relu()
            return self.head(x)

    pair = data()
    report = generalization_report(Residual(), (pair[0], 0 * pair[1]), measures=["l2", "spectral"])
    assert any("extension" in note for note in report.notes)
    assert any("inner = inner" in note for note in report.notes)
    assert [layer["layer"] for layer in report.layers] == ["inner", "inner", "head"]


def test_layers_that_are_not_used_count_nothing() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network(bias=False)
            self.spare = nn.Linear(3, 7, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    one = generalization_report(network(bias=False), data(), measures=NAMES[:4])
    two = generalization_report(Part(), data(), measures=NAMES[:4])
    assert two.values == one.values


# --- bad input ---


def test_margins_that_are_not_positive_give_nan_and_the_reason() -> None:
    x, y = data()
    report = generalization_report(network(), (x, (y + 1) % 3), measures=[*NAMES[:4], "sharpness"])
    assert report.margin < 0
    for name in NAMES[:4]:
        assert math.isnan(report.values[name])
        assert "not > 0" in report.reasons[name]
        assert math.isfinite(report.norms[name])
    assert "sharpness" not in report.reasons
    assert math.isfinite(report.values["sharpness"])
    assert "undefined" in report.rows()[0]["remark"]
    assert math.isnan(report.baselines["inverse_margin"])


def test_tiny_sets_take_the_smallest_margin_and_warn() -> None:
    pair = data(10)
    with pytest.warns(UserWarning, match="smallest margin"):
        report = generalization_report(network(), pair, measures=["l2"])
    assert report.margin == float(output_margins(network(), pair).min())


def test_bad_options_and_layers() -> None:
    with pytest.raises(ConfigError, match="did you mean 'l2_path'"):
        generalization_report(network(), data(), measures=["l2_pat"])
    with pytest.raises(ConfigError, match="must be a list of names; got 'l2'"):
        generalization_report(network(), data(), measures="l2")
    with pytest.raises(ConfigError, match="at least one measure"):
        generalization_report(network(), data(), measures=[])
    with pytest.raises(ConfigError, match="margin_quantile"):
        generalization_report(network(), data(), margin_quantile=1.0)
    odd = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    with pytest.raises(UnsupportedError, match=r"LayerNorm at '1'.*approximate=True"):
        generalization_report(odd, data())
    generalization_report(odd, data(), measures=["sharpness"])
    report = generalization_report(odd, data(), measures=["l2"], approximate=True)
    assert any(note.startswith("approximate: layer_norm") for note in report.notes)
    with pytest.raises(DataError, match="at least one"):
        generalization_report(network(), [])


def test_batchnorm_on_another_axis_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.linear(x)).flatten(1))

    model = Odd()
    x = torch.randn(40, 4, 4) * torch.tensor([1.0, 5.0, 0.1, 2.0])[:, None]
    model(x)
    with pytest.raises(ShapeError, match="axis"):
        generalization_report(model, (x, torch.zeros(40, dtype=torch.long)))


# --- comparison ---


def reports_of(values: list[float], name: str = "l2") -> list[GeneralizationReport]:
    return [GeneralizationReport({name: v}, {}, True, 1.0, 0.05, {}, {}, 9) for v in values]


def test_tau_is_kendalls() -> None:
    rng = np.random.default_rng(0)
    values, errors = rng.standard_normal(15), rng.standard_normal(15)
    found = compare_measures(reports_of(list(values)), errors)
    assert found.tau["l2"] == pytest.approx(kendalltau(values, errors).statistic, abs=1e-12)
    assert found.num_models["l2"] == 15
    ordered = compare_measures(reports_of([1.0, 2.0, math.inf]), [0.1, 0.2, 0.3])
    assert ordered.tau["l2"] == 1.0
    assert compare_measures(reports_of([3.0, 2.0]), [0.1, 0.2]).tau["l2"] == -1.0
    assert compare_measures(reports_of([2.0, 2.0, math.inf, math.inf]), [1, 2, 3, 4]).tau[
        "l2"
    ] == pytest.approx(8 / 12)


def test_granulated_tau_looks_within_one_hyperparameter() -> None:
    # the measure follows the width and ignores the error within it: tau is high, granulated not
    width = [1, 1, 2, 2, 3, 3]
    labels = ["a", "b"] * 3
    values = [1.0, 0.9, 2.0, 1.9, 3.0, 2.9]
    errors = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    found = compare_measures(reports_of(values), errors, groups={"width": width, "labels": labels})
    assert found.tau["l2"] == pytest.approx((12 - 3) / 15)
    assert found.by_group["l2"] == {"width": 1.0, "labels": -1.0}
    assert found.granulated["l2"] == 0.0
    row = found.rows()[0]
    assert (row["tau_width"], row["tau_labels"], row["granulated"]) == (1.0, -1.0, 0.0)
    assert found.table[3]["width"] == 2
    assert found.table[3]["labels"] == "b"
    json.dumps(found.to_dict())


def test_networks_without_a_value_are_left_out() -> None:
    found = compare_measures(
        {
            "one": reports_of([1.0])[0],
            "two": reports_of([math.nan])[0],
            "three": reports_of([2.0])[0],
        },
        [0.1, 0.9, 0.2],
        groups={"seed": [0, 1, 2]},
    )
    assert (found.tau["l2"], found.num_models["l2"]) == (1.0, 2)
    assert [row["model"] for row in found.table] == ["one", "two", "three"]
    assert math.isnan(compare_measures(reports_of([math.nan, 1.0]), [1, 2]).tau["l2"])


def test_bad_comparisons() -> None:
    with pytest.raises(ShapeError, match="test_errors"):
        compare_measures(reports_of([1.0, 2.0]), [0.1])
    with pytest.raises(ShapeError, match="width"):
        compare_measures(reports_of([1.0, 2.0]), [0.1, 0.2], groups={"width": [1]})
    with pytest.raises(DataError, match="two networks"):
        compare_measures(reports_of([1.0]), [0.1])
    with pytest.raises(DataError, match="finite"):
        compare_measures(reports_of([1.0, 2.0]), [0.1, math.nan])
    mixed = [*reports_of([1.0]), GeneralizationReport({}, {}, False, 1.0, 0.05, {}, {}, 9)]
    with pytest.raises(ConfigError, match="log"):
        compare_measures(mixed, [0.1, 0.2])
