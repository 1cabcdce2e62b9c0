"""The scale-invariant transformer: invariance, order, padding, saving, and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gossamer.errors import ConfigError, DataError, DtypeError, UnsupportedError
from gossamer.layers import check_scale_invariance, homogeneity_degrees, split_parameters
from gossamer.models import Encoder, ScaleInvariantTransformer

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def small(**options: object) -> ScaleInvariantTransformer:
    torch.manual_seed(0)
    return ScaleInvariantTransformer(11, 16, 2, 2, **{"max_length": 8, **options}).eval()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"num_segments": 2}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_but_the_head_is_invariant(options: dict[str, object], dtype: torch.dtype) -> None:
    model = small(**options).to(dtype)
    scales = (1e-3, 1e-2, 1e2, 1e3)
    tol = 1e-4 if dtype == torch.float32 else 1e-10
    report = check_scale_invariance(model, TOKENS, scales=scales, tol=tol)
    assert report.holds, str(report)
    degrees = homogeneity_degrees(model, TOKENS)
    assert degrees["input_norm"] == 1
    assert degrees["input"] == degrees["layers.1"] == 2
    assert degrees["final_norm"] == degrees[""] == 0


def test_the_ordinary_encoder_is_not() -> None:
    report = check_scale_invariance(Encoder(11, 16, 1, 2, max_length=8), TOKENS)
    kinds = {part.kind for part in report.breaks}
    assert not report.holds
    assert {"MultiHeadAttention", "RMSNorm"} & kinds


def test_the_groups_are_the_head_and_the_rest() -> None:
    model = small(num_segments=2)
    body, head = split_parameters(model)
    assert [id(p) for p in head] == [id(model.head.weight)]
    assert len(body) + len(head) == len(list(model.parameters()))


def test_an_encoder_knows_the_order_by_its_table() -> None:
    swapped = TOKENS[:, [1, 0, 2, 3, 4, 5]]
    with_table, without = small(), small(max_length=None)
    back = [1, 0, 2, 3, 4, 5]
    assert not torch.allclose(with_table(swapped)[:, back], with_table(TOKENS), atol=1e-4)
    torch.testing.assert_close(without(swapped)[:, back], without(TOKENS), rtol=1e-4, atol=1e-5)


def test_a_causal_model_sees_nothing_that_follows() -> None:
    model = small(causal=True)
    changed = TOKENS.clone()
    changed[:, 4:] = 7
    torch.testing.assert_close(model(changed)[:, :4], model(TOKENS)[:, :4])


def test_padding_on_either_side_does_not_matter() -> None:
    model = small()
    expected = model(TOKENS[:1, :4])[0]
    for left, right in ((0, 2), (2, 0), (1, 1)):
        filler = [torch.full((1, n), 7) for n in (left, right)]
        tokens = torch.cat((filler[0], TOKENS[:1, :4], filler[1]), 1)
        mask = torch.zeros(1, 6, dtype=torch.bool)
        mask[:, left : left + 4] = True
        out = model(tokens, mask=mask)[0, left : left + 4]
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_segments_count() -> None:
    model = small(num_segments=2)
    ones = torch.ones_like(TOKENS)
    torch.testing.assert_close(model(TOKENS, segments=0 * ones), model(TOKENS))
    assert not torch.allclose(model(TOKENS, segments=ones), model(TOKENS), atol=1e-4)


def test_balanced_start() -> None:
    assert bool((small().input_norm.weight == 1.0).all())
    assert bool((small(balanced_init=True, init_std=0.05).input_norm.weight == 0.05).all())


def test_saving(tmp_path: Path) -> None:
    model = small(causal=True, balanced_init=True, hidden_dim=24, num_segments=2)
    model.save_pretrained(tmp_path)
    loaded = ScaleInvariantTransformer.from_pretrained(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(TOKENS), model(TOKENS))


def test_decoding_follows_the_logits() -> None:
    model = small(causal=True)
    produced = model.generate(TOKENS[:, :2], max_new_tokens=3)
    tokens = TOKENS[:, :2]
    for _ in range(3):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), 1)
    assert torch.equal(produced, tokens[:, 2:])


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="multiple of num_heads"):
        ScaleInvariantTransformer(11, 10, 1, 4)
    with pytest.raises(ConfigError, match="vocab_size"):
        ScaleInvariantTransformer(0, 8, 1, 4)
    with pytest.raises(ConfigError, match="num_segments"):
        small(num_segments=-1)
    with pytest.raises(ConfigError, match="init_std"):
        small(init_std=0.0)
    with pytest.raises(ConfigError, match="max_length"):
        small(max_length=0)
    with pytest.raises(DataError, match="max_length = 8"):
        small()(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(DataError, match="segments are not expected"):
        small()(TOKENS, segments=TOKENS * 0)
    with pytest.raises(DataError, match="got 0 to 2"):
        small(num_segments=2)(TOKENS, segments=TOKENS % 3)
    with pytest.raises(DtypeError, match="boolean"):
        small()(TOKENS, mask=torch.ones_like(TOKENS))
    with pytest.raises(UnsupportedError, match="causal"):
        small().generate(TOKENS, max_new_tokens=1)
    with pytest.raises(UnsupportedError, match="cache"):
        small(causal=True)(TOKENS, cache=object())
