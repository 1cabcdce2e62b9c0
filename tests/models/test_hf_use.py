"""Models of transformers with added positions: saving, copying, the example, and wrong use."""

from __future__ import annotations

import copy
import importlib.util
import json
import pickle
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from gossamer.errors import (
    ConfigError,
    DataError,
    MissingDependencyError,
    ShapeError,
    UnsupportedError,
)
from gossamer.models import add_positions, load_with_positions
from gossamer.positions import (
    AlibiPositions,
    CoupledRelativePositions,
    FirePositions,
    LearnedPositions,
    RopePositions,
)
from gossamer.tasks import AdditionTask

from .hf_models import KINDS, VOCAB, attention_layers, make

ROOT = Path(__file__).parents[2]


# --- moving, copying, saving ---


def test_moves_and_copies() -> None:
    model = add_positions(make("gpt2"), "fire").to(torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in model.base_model.positions.parameters())
    tokens = torch.randint(2, VOCAB, (1, 5))
    out = model(tokens).logits
    assert out.dtype == torch.bfloat16
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(tokens).logits, out)
        assert isinstance(other, transformers.GPT2LMHeadModel)
        with torch.no_grad():
            other.base_model.positions[0].mlp[2].weight.add_(1.0)
        torch.testing.assert_close(model(tokens).logits, out)
        ids = torch.arange(1, 6)[None]
        assert other.generate(tokens, position_ids=ids, max_new_tokens=2).shape == (1, 7)


@pytest.mark.parametrize(
    ("kind", "named", "share"),
    [(kind, True, True) for kind in KINDS]
    + [("llama", True, False), ("bert", False, True), ("gpt2", False, False)],
)
def test_round_trip(tmp_path: Path, kind, named, share) -> None:
    def given():
        return {"name": "fire", "init_length": 4.0} if named else FirePositions(4, init_length=4.0)

    model = add_positions(make(kind).float(), given(), share=share)
    with torch.no_grad():
        for parameter in model.base_model.positions.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    model_class = KINDS[kind][0]
    again = load_with_positions(model_class, tmp_path, None if named else given(), share=share)
    tokens = torch.randint(2, VOCAB, (2, 7))
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert not again.training
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [KINDS[kind][0].__name__]
    assert ("gossamer_positions" in config) == named
    again.save_pretrained(tmp_path / "twice")
    positions = None if named else given()
    twice = load_with_positions(model_class, tmp_path / "twice", positions, share=share)
    assert torch.equal(twice(tokens).logits, model(tokens).logits)


def test_round_trip_by_an_auto_class_and_in_parts(tmp_path: Path) -> None:
    model = add_positions(make("llama"), {"name": "t5", "share": False}).bfloat16()
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = load_with_positions(transformers.AutoModelForCausalLM, tmp_path)
    assert again.dtype == torch.bfloat16
    assert len(again.model.positions) == 2
    assert again.generation_config.max_new_tokens == 3
    tokens = torch.randint(2, VOCAB, (2, 7))
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    model_class = transformers.LlamaForCausalLM
    with pytest.raises(DataError, match=r"config\.json does not exist"):
        load_with_positions(model_class, tmp_path, "fire")
    make("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="positions are needed"):
        load_with_positions(model_class, tmp_path)
    with pytest.raises(DataError, match=r"missing: model\.positions\.0\.c"):
        load_with_positions(model_class, tmp_path, "fire")
    add_positions(make("llama"), FirePositions(4)).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"not used: model\.positions\.0"):
        load_with_positions(model_class, tmp_path, "alibi")
    with pytest.raises(DataError, match="must hold the weights"):
        load_with_positions(model_class, tmp_path, FirePositions(4, hidden_dim=3))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataError, match="Copy all files"):
        load_with_positions(model_class, tmp_path, FirePositions(4))


# --- wrong use ---


def test_models_that_are_not_supported() -> None:
    config = transformers.OPTConfig(vocab_size=14, num_hidden_layers=1, hidden_size=24, ffn_dim=8)
    with pytest.raises(UnsupportedError, match=r"bert, gpt2, llama.*got 'opt'"):
        add_positions(transformers.OPTModel(config), "fire")
    with pytest.raises(UnsupportedError, match="got 'Linear'"):
        add_positions(torch.nn.Linear(2, 2), "fire")


def test_without_transformers(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "gossamer\[hf\]"'):
        add_positions(torch.nn.Linear(2, 2), "fire")
    with pytest.raises(MissingDependencyError):
        load_with_positions(None, ".")


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (AlibiPositions(3), "num_heads of the position encoding must be that of the model, 4"),
        (RopePositions(6), "head_dim of the position encoding must be that of the model, 4"),
        (LearnedPositions(8, 9), "dim of the position encoding must be that of the model, 16"),
        ("fir", "did you mean 'fire'"),
        ({"name": "fire", "init_len": 3}, "unknown key 'init_len'"),
    ],
)
def test_encodings_that_do_not_fit(positions, message) -> None:
    model = make("llama")
    with pytest.raises(ConfigError, match=message):
        add_positions(model, positions)
    assert isinstance(model.model.rotary_emb, torch.nn.Module)
    assert not hasattr(model.model, "positions")


def test_adding_twice_and_losing_the_attention() -> None:
    model = add_positions(make("llama"), "alibi")
    with pytest.raises(ConfigError, match="must not have added positions yet"):
        add_positions(model, "fire")
    tokens = torch.randint(2, VOCAB, (1, 5))
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match="would leave the positions out"):
        model(tokens)
    model.set_attn_implementation("gossamer_positions")
    with pytest.raises(UnsupportedError, match="output_attentions=True"):
        model(tokens, output_attentions=True)
    layer = attention_layers(model)[0]
    with pytest.raises(UnsupportedError, match="through its model"):
        layer(torch.zeros(1, 2, 16).double(), model.model.rotary_emb(torch.zeros(1)))
    with pytest.raises(ConfigError, match="share must be true"):
        add_positions(make("llama"), LearnedPositions(16, 9), share=False)


def test_bad_ids_and_masks() -> None:
    model = add_positions(make("llama"), CoupledRelativePositions(4, levels=2))
    tokens, ids = torch.randint(2, VOCAB, (2, 5)), torch.ones(2, 5, 2, dtype=torch.long)
    with pytest.raises(DataError, match="position_ids are needed"):
        model(tokens)
    with pytest.raises(ShapeError, match=r"\(B, T\) = \(2, 5\)"):
        model(tokens, position_ids=ids[:, :4])
    with pytest.raises(ShapeError, match=r"\(B, T, 2\) for 2 level"):
        model(tokens, position_ids=ids[..., 0])
    with pytest.raises(DataError, match="position_ids must be >= 0"):
        model(tokens, position_ids=-ids)
    with pytest.raises(ShapeError, match=r"cached and new tokens, 0 \+ 5; got 4"):
        model(tokens, position_ids=ids, attention_mask=torch.ones(2, 4))
    with pytest.raises(DataError, match="got neither"):
        model.model(position_ids=ids)


# --- the example ---


@pytest.mark.slow
def test_the_example_runs() -> None:
    spec = importlib.util.spec_from_file_location("hf_finetune", ROOT / "examples/hf_finetune.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    task = AdditionTask(digits=(1, 2))
    model = example.build(task)
    before = [p.clone() for p in model.base_model.positions.parameters()]
    example.train(model, task, 2)
    after = list(model.base_model.positions.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert 0 <= example.exact_answers(model.eval(), task, 3, 4) <= 4
