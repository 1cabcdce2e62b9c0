"""What holds for every registered method, recipe and public name; a new one fails by name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

import gossamer
from gossamer.layers import SparkFeedForward
from gossamer.losses import SymmetricNoise
from gossamer.models import BagEncoder
from gossamer.recipes import build_config, find_recipe, list_recipes
from gossamer.registry import MethodInfo, get_method, list_methods

ROOT = Path(__file__).parents[2]
METHODS = list_methods()
PACKAGES = [
    "attention", "layers", "losses", "measures", "models", "optim", "positions", "recipes",
    "report", "retrieval", "tasks", "train",
]  # fmt: skip
SYMBOLS = [
    (package, name)
    for package in PACKAGES
    for name in importlib.import_module(f"gossamer.{package}").__all__
]

# how to build the modules that need more than the sizes below
BUILD = {
    "positions.CoupledPositions": {"max_position": 16},
    "positions.DietAbsolutePositions": {"max_length": 16},
    "positions.DietRelativePositions": {"max_length": 16},
    "positions.LearnedPositions": {"max_position": 16},
    "layers.Residual": {"norm": "pre"},
    "models.Decoder": {"vocab_size": 14, "num_layers": 1},
    "models.DualEncoder": {"encoder": BagEncoder(4)},
    "models.MultiLayerPerceptron": {"num_features": 8, "num_classes": 2},
    "models.Encoder": {"vocab_size": 14, "num_layers": 1, "max_length": 4, "num_segments": 2},
    "attention.LinformerAttention": {"length": 4, "projection_dim": 2},
    "attention.ShawAttention": {"max_distance": 2},
    "attention.StatisticalTopK": {"k": 2},
    "models.Seq2Seq": {"vocab_size": 14, "num_layers": 1, "max_length": 4},
    "losses.SoftTopKLoss": {"k": 1},
    "losses.SmearedLoss": {"matrix": [[0.9, 0.1], [0.2, 0.8]]},
    "losses.ForwardCorrectionLoss": {"transition": SymmetricNoise(2, 0.2)},
    "losses.BackwardCorrectionLoss": {"transition": [[0.9, 0.1], [0.2, 0.8]]},
    "layers.PackedSparkFeedForward": {"module": SparkFeedForward(8, 8, k=2)},
    "models.ScaleInvariantTransformer": {"vocab_size": 14, "num_layers": 1, "max_length": 4},
    "attention.SparseAttention": {"patterns": [{"kind": "full", "length": 1}]},
    "attention.TopKAttention": {"num_keys": 2},
}
SIZES = {"dim": 8, "num_heads": 2, "head_dim": 4, "hidden_dim": 8}


def symbol(package: str, name: str) -> object:
    return getattr(importlib.import_module(f"gossamer.{package}"), name)


def is_module(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, nn.Module) and not inspect.isabstract(thing)


def build(package: str, name: str) -> nn.Module:
    """Build a module from the sizes that its constructor asks for."""
    cls = symbol(package, name)
    wanted = inspect.signature(cls).parameters
    needed = {
        k: v
        for k, v in SIZES.items()
        if k in wanted and wanted[k].default is inspect.Parameter.empty
    }
    return cls(**{**needed, **BUILD.get(f"{package}.{name}", {})})


MODULES = [
    (p, n)
    for p, n in SYMBOLS
    if is_module(symbol(p, n)) and n not in ("PretrainedModel", "TextEncoder")
]


# --- methods ---


@pytest.mark.parametrize("info", METHODS, ids=lambda m: m.name)
def test_method_is_complete(info: MethodInfo) -> None:
    package = importlib.import_module(f"gossamer.{info.theme}")
    assert set(info.symbols) <= set(package.__all__)
    assert info.deviations
    assert info.paper.bibtex().startswith("@inproceedings{")
    assert set(info.recipes) <= set(list_recipes())
    assert (info.status == "checked") == bool(info.recipes)
    page = ROOT / "docs" / "methods" / f"{info.name}.md"
    assert page.exists(), f"{info.name} needs the page docs/methods/{info.name}.md"
    index = (ROOT / "docs" / "methods" / "index.md").read_text()
    assert f"({info.name}.md)" in index, f"{info.name} is missing from docs/methods/index.md"


@pytest.mark.parametrize("name", list_recipes())
def test_recipe_is_complete(name: str) -> None:
    recipe = find_recipe(name)
    method = get_method(recipe.method)
    assert name in method.recipes
    assert "small" in recipe.scales
    assert recipe.budget["small"] <= 10
    for config in recipe.scales.values():
        plain = dataclasses.asdict(config)
        assert build_config(config, plain, name) == config
        assert type(config).__dataclass_params__.frozen
    assert any(column.in_domain for column in recipe.columns)
    assert {arm.role for arm in recipe.arms} == {"ours", "baseline"}
    page = ROOT / "docs" / "methods" / f"{name}.md"
    assert page.exists(), f"{name} needs the page docs/methods/{name}.md"


@pytest.mark.parametrize("info", METHODS, ids=lambda m: m.name)
@pytest.mark.slow
def test_theme_imports_alone(info: MethodInfo) -> None:
    code = f"import gossamer.{info.theme} as t; [getattr(t, name) for name in {info.symbols!r}]"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


# --- public names ---


@pytest.mark.parametrize(("package", "name"), SYMBOLS)
def test_symbol_is_documented_and_typed(package: str, name: str) -> None:
    thing = symbol(package, name)
    if not callable(thing):
        return
    assert inspect.getdoc(thing), f"{package}.{name} has no docstring"
    target = thing.__init__ if inspect.isclass(thing) else thing
    if target is object.__init__ or getattr(thing, "_is_protocol", False):
        return
    for parameter in list(inspect.signature(target).parameters.values())[inspect.isclass(thing) :]:
        assert parameter.annotation is not inspect.Parameter.empty, f"{package}.{name}: {parameter}"


@pytest.mark.parametrize(("package", "name"), MODULES)
def test_docstring_and_signature_agree(package: str, name: str) -> None:
    cls = symbol(package, name)
    doc = inspect.getdoc(cls) or ""
    listed = set(
        re.findall(r"^    (\w+):", doc.partition("Args:")[2].partition("\n\n")[0], re.MULTILINE)
    )
    parameters = {
        p for p in inspect.signature(cls).parameters if p not in ("self", "args", "kwargs")
    }
    assert parameters == listed
    for section in ("Source:", "Deviations:", ">>> "):
        assert section in doc, f"{package}.{name} lacks {section!r}"


# --- modules ---


@pytest.mark.parametrize(("package", "name"), MODULES)
def test_module_round_trips_through_safetensors(package: str, name: str) -> None:
    one, two = build(package, name), build(package, name)
    state = one.state_dict()
    two.load_state_dict(load(save(state)) if state else {})
    assert all(
        torch.equal(a, b) for a, b in zip(state.values(), two.state_dict().values(), strict=True)
    )
    assert type(one).__name__ in repr(one)


@pytest.mark.parametrize(("package", "name"), MODULES)
def test_building_takes_at_most_ten_arguments(package: str, name: str) -> None:
    assert len(inspect.signature(symbol(package, name)).parameters) <= 10


def call(package: str, module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """Run a module on the smallest input there is: one sample of one token."""
    ids = torch.ones(1, 1, dtype=torch.long)
    if package == "positions":
        q = torch.ones(1, 2, 1, 4, dtype=dtype)
        results = (module.embed(ids), module.bias(ids, ids, q_index=ids - 1))
        turned = module.rotate(q, q, ids, ids, q_index=ids - 1)
        return torch.cat([r.flatten().float() for r in (*results, *turned) if r is not None])
    if package == "models" and "tokens" in inspect.signature(module.forward).parameters:
        return module(ids)
    if package == "models" and "target" in inspect.signature(module.forward).parameters:
        return module(ids, ids)
    if package == "losses" and hasattr(module, "of_rows"):  # one class for each row
        return module(torch.ones(1, 2, dtype=dtype), [0])
    if type(module).__name__ == "DistillationLoss":
        return module(torch.ones(1, 2, dtype=dtype), torch.ones(1, 2, dtype=dtype), [0])
    if "neighbor_logits" in inspect.signature(module.forward).parameters:
        logits = torch.ones(1, 1, 2, dtype=dtype)
        return module(logits, ids, logits, ids)
    if package == "losses":
        pairs = "InBatch" in type(module).__name__
        return module(torch.ones(1, 1 if pairs else 2, dtype=dtype), [[0]])
    x = torch.ones(1, 1, 8, dtype=dtype)
    if "texts" in inspect.signature(module.forward).parameters:
        return module(["a"])
    if "queries" in inspect.signature(module.forward).parameters:
        return module(["a"], ["b"])
    if "source" in inspect.signature(module.forward).parameters:
        reader = getattr(module, "cross_attention", module)
        return module(x, source=reader.read(x))
    if "sublayer" in inspect.signature(module.forward).parameters:
        return module(x, lambda y: 2 * y)
    return module(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("package", "name"), MODULES)
def test_the_smallest_input_works_in_full_and_half_precision(
    package: str, name: str, dtype: torch.dtype
) -> None:
    module = build(package, name).to(dtype).eval()
    with torch.no_grad():
        out = call(package, module, dtype)
    assert out.numel() > 0
    assert torch.isfinite(out).all()


def test_top_level_names() -> None:
    assert set(PACKAGES) <= set(gossamer.__all__)
    with pytest.raises(AttributeError):
        gossamer.nothing  # noqa: B018


# --- files ---


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda p: p.stem)
def test_file_is_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
