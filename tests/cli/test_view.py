"""`gossamer view` on a run of `gossamer train` and on saved models of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gossamer.attention import capture_attention
from gossamer.cli import main
from gossamer.models import Decoder, add_positions
from gossamer.train import TrainJob, load_run, train_task

transformers = pytest.importorskip("transformers")

WORDS = ("<pad>", "</s>", "<unk>", "the", "fox", "sees", "a", "<script>", "dog")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def view(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> dict[str, Any]:
    """Run the command with --json; return what it printed."""
    assert run("view", str(folder), *options, "--json", "--device", "cpu") == 0
    return json.loads(capsys.readouterr().out)


def train(folder: Path, model: dict[str, Any], task: dict[str, Any]) -> Path:
    sizes = {"dim": 16, "num_heads": 2, "num_layers": 2, "feed_forward": "gelu"}
    job = {"task": task, "model": {**sizes, **model}, "train": {"steps": 2}}
    train_task(TrainJob.from_dict(job, "test"), folder, num_samples=1, quiet=True)
    return folder


def save(folder: Path, kind: str, *, tokenizer: bool = True, **options: Any) -> Path:
    """Save a tiny random model of transformers with a tokenizer of words."""
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "T5":
        sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
        tokens["decoder_start_token_id"] = 0
    else:
        sizes["intermediate_size"] = 32
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(WORDS), **sizes, **tokens)
    ending = {"T5": "ForConditionalGeneration", "Bert": "ForMaskedLM", "Llama": "ForCausalLM"}
    model = getattr(transformers, f"{kind}{ending[kind]}")(config)
    if options:
        model = add_positions(model, options["positions"])
    model.save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(folder)


# --- runs ---


def test_a_run_shows_query_and_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train(tmp_path / "run", {}, {"name": "addition", "digits": [1, 2]})
    result = view(capsys, folder, "--text", "12+34=", "--out", "shown")
    assert list(result)[:4] == ["command", "version", "seconds", "files"]
    assert result["about"]["query"] == "12+34="
    model, task = load_run(folder)
    prompt, ids = task.prompt("12+34=")
    produced = model.generate(
        prompt[None], ids[None], max_new_tokens=len(ids) - len(prompt), eos=task.eos
    )[0]
    tokens = torch.cat((prompt, produced[:-1]))  # the last one is not read
    assert "".join(result["tokens"]["input"]) == "".join(task.vocab[int(t)] for t in tokens)
    given = {"tokens": tokens[None], "position_ids": ids[None, : len(tokens)]}
    maps = capture_attention(model, given)
    with np.load("shown/attention.npz") as arrays:
        assert sorted(arrays) == ["input_tokens", "layer_0", "layer_1"]
        np.testing.assert_allclose(arrays["layer_1"], maps.layers[1].weights[0], atol=1e-6)
        assert arrays["input_tokens"].tolist() == result["tokens"]["input"]
    assert [row["head"] for row in result["heads"]] == [0, 1, 0, 1]
    assert "12+34=" in Path("shown/attention.html").read_text("utf-8")


def test_an_encoder_shows_its_blanks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "song.txt"
    text.write_text("la la li la " * 40)
    task = {"name": "masked_text", "path": str(text), "length": 8}
    folder = train(tmp_path / "run", {"name": "encoder", "max_length": 16}, task)
    result = view(capsys, folder, "--text", "la l_ li", "--layers", "1")
    labels = result["tokens"]["input"]
    assert labels[:4] == ["l", "a", " ", "l"]
    assert labels[4][0] == "?"
    assert labels[5:] == [" ", "l", "i"]
    assert {row["layer"] for row in result["heads"]} == {"layer 1"}
    assert Path("runs/view/attention.html").exists()


def test_a_text_goes_on_to_the_end_of_its_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "song.txt"
    text.write_text("la la li la " * 40)
    task = {"name": "text", "path": str(text), "length": 8}
    positions = {"name": "learned", "max_position": 9}
    folder = train(tmp_path / "run", {"positions": positions}, task)
    result = view(capsys, folder, "--text", "la l")
    assert len(result["about"]["answer"]) == 5
    assert "".join(result["tokens"]["input"]) == "la l" + result["about"]["answer"][:4]


# --- models of transformers ---


@pytest.mark.parametrize("kind", ["Llama", "Bert"])
def test_one_stack(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "model", kind)
    result = view(capsys, folder, "--text", "the fox sees a <script>", "--out", "shown")
    assert result["tokens"] == {"input": ["the", "fox", "sees", "a", "<script>"]}
    assert len(result["heads"]) == 8
    with np.load("shown/attention.npz") as arrays:
        assert arrays["layer_1"].shape == (4, 5, 5)
        np.testing.assert_allclose(arrays["layer_1"].sum(-1), 1.0, atol=1e-5)
    page = Path("shown/attention.html").read_text("utf-8")
    assert "&lt;script&gt;" in page
    assert page.count("<script") == 2  # the data and the code of the page


def test_encoder_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "model", "T5")
    result = view(capsys, folder, "--text", "the fox sees", "--layers", "0", "--out", "shown")
    written = len(result["tokens"]["output"])
    assert 1 < written <= 33
    assert result["tokens"]["output"][0] == "<pad>"
    with np.load("shown/attention.npz") as arrays:
        shapes = {name: arrays[name].shape for name in arrays if name.endswith("0")}
    assert shapes == {
        "encoder_0": (4, 3, 3),
        "decoder_0": (4, written, written),
        "cross_0": (4, written, 3),
    }
    assert [row["distance"] is None for row in result["heads"]] == [False] * 8 + [True] * 4


def test_added_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "named", "Llama", positions="alibi")
    assert len(view(capsys, folder, "--text", "the fox")["heads"]) == 8
    learned = {"name": "t5"}
    folder = save(tmp_path / "module", "Llama", positions=learned)
    config = json.loads((folder / "config.json").read_text())
    del config["gossamer_positions"]  # as for an encoding given as a module
    (folder / "config.json").write_text(json.dumps(config))
    assert run("view", str(folder), "--text", "the fox") == 2
    assert "given as a module" in capsys.readouterr().err


# --- errors ---


def test_user_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = save(tmp_path / "bare", "Llama", tokenizer=False)
    ours = tmp_path / "ours"
    Decoder(9, 16, 1, 2).save_pretrained(ours)
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    save_tokenizer(odd)
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = [
        (["none", "--text", "a"], "none is no folder"),
        ([str(empty), "--text", "a"], "config.json does not exist"),
        ([str(bare), "--text", ""], "at least one character"),
        ([str(bare), "--text", "a", "--layers", "0,x"], "such as 0,1; got '0,x'"),
        ([str(bare), "--text", "a"], "must hold the model's tokenizer"),
        ([str(ours), "--text", "a"], "must name its class under 'architectures'"),
        ([str(odd), "--text", "a"], "got 'NoSuchModel'"),
        ([str(bare)], "--text"),
    ]
    for arguments, message in cases:
        assert run("view", *arguments) == 2
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if line.startswith("gossamer: ")]
        assert len(lines) == 1, captured.err
        assert message in lines[0]
    save_tokenizer(bare)
    assert run("view", str(bare), "--text", "the " * 3000) == 2
    assert "at most 2048 tokens long, as the model allows; got 3000" in capsys.readouterr().err
    config = json.loads((bare / "config.json").read_text())
    config["architectures"] = ["LlamaForTokenClassification"]
    (bare / "config.json").write_text(json.dumps(config))
    assert run("view", str(bare), "--text", "the") == 2
    assert "missing: score" in capsys.readouterr().err
    (bare / "model.safetensors").write_bytes(b"broken")
    assert run("view", str(bare), "--text", "the") == 2
    assert "cannot be loaded" in capsys.readouterr().err
    (bare / "model.safetensors").unlink()
    assert run("view", str(bare), "--text", "the") == 2
    assert "cannot be loaded" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_text_that_is_too_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gossamer.report import viewer

    folder = save(tmp_path / "model", "Bert")
    monkeypatch.setattr(viewer, "_LIMIT", 50)
    assert run("view", str(folder), "--text", "the fox") == 2
    err = capsys.readouterr().err
    assert "Keep fewer layers (--layers 0,1) or view a shorter text" in err
    assert not Path("runs").exists()
