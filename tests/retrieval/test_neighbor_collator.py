"""The collator with a tokenizer and a small T5 of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gossamer.errors import ConfigError, DataError
from gossamer.losses import SequenceSmoothingLoss
from gossamer.retrieval import NeighborCollator, NeighborTable, mine_neighbors

pytest.importorskip("transformers")

TARGETS = [
    "the red cat sat", "the red cat ran", "a red cat sat down", "the dog ran off",
    "the dog ran home", "rain", "the red dog ran", "a cat sat down",
]  # fmt: skip
SOURCES = [" ".join(reversed(text.split())) for text in TARGETS]


@pytest.fixture(scope="module")
def table() -> NeighborTable:
    return mine_neighbors(TARGETS, min_bleu=0.1, num_neighbors=3)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(sorted({word for text in TARGETS for word in text.split()}))


def make_tokenizer(words: list[str], end: bool = True) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if end:
        core.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def features_of(tokenizer: Any, rows: list[int] | None = None) -> list[dict[str, Any]]:
    made = []
    for row in range(len(TARGETS)) if rows is None else rows:
        both = tokenizer(SOURCES[row], text_target=TARGETS[row])
        made.append({"row": row, "input_ids": both["input_ids"], "labels": both["labels"]})
    return made


def decoded(tokenizer: Any, labels: torch.Tensor) -> str:
    return tokenizer.decode(labels[labels >= 0], skip_special_tokens=True)


# --- what is added ---


def test_one_drawn_neighbour(tokenizer: Any, table: NeighborTable) -> None:
    collate = NeighborCollator(tokenizer, table, random_state=3)
    batch = collate(features_of(tokenizer))
    drawn = table.sample(range(8), random_state=3)
    assert batch["neighbor_labels"].dtype == torch.int64
    for row, index in enumerate(drawn):
        assert decoded(tokenizer, batch["labels"][row]) == TARGETS[row]
        expected = TARGETS[index] if index >= 0 else ""
        assert decoded(tokenizer, batch["neighbor_labels"][row]) == expected
    assert (batch["neighbor_labels"][5] == -100).all()  # "rain"
    assert set(batch) == {"input_ids", "attention_mask", "labels", "neighbor_labels"}


def test_all_neighbours(tokenizer: Any, table: NeighborTable) -> None:
    batch = NeighborCollator(tokenizer, table, sample=False)(features_of(tokenizer))
    assert batch["neighbor_labels"].shape[:2] == (8, 3)
    for row in range(8):
        texts = [decoded(tokenizer, labels) for labels in batch["neighbor_labels"][row]]
        assert texts == [*table.texts(row), *[""] * (3 - len(table.texts(row)))]


def test_replacement(tokenizer: Any, table: NeighborTable) -> None:
    features = features_of(tokenizer)
    collate = NeighborCollator(tokenizer, table, replace=0.4)
    replaced = 0
    for epoch in range(60):
        collate.set_epoch(epoch)
        batch = collate(features)
        drawn = table.sample(range(8), epoch=epoch, chance=0.4)
        for row, index in enumerate(drawn):
            text = TARGETS[index if index >= 0 else row]
            assert decoded(tokenizer, batch["labels"][row]) == text
        assert "neighbor_labels" not in batch
        replaced += int((drawn >= 0).sum())
    assert abs(replaced / (60 * 7) - 0.4) < 5 * np.sqrt(0.24 / 420)
    assert features == features_of(tokenizer)  # what is given stays as it is


def test_rows_without_neighbours(tokenizer: Any, table: NeighborTable) -> None:
    collate = NeighborCollator(tokenizer, table)
    known = features_of(tokenizer, [0, 1])
    other = {**features_of(tokenizer, [3])[0], "row": -1}
    mixed = collate([known[0], other, known[1]])["neighbor_labels"]
    assert (mixed[1] == -100).all()
    assert torch.equal(mixed[[0, 2]], collate(known)["neighbor_labels"])
    assert "neighbor_labels" not in collate([other])


def test_long_neighbours_are_cut(tokenizer: Any, table: NeighborTable) -> None:
    batch = NeighborCollator(tokenizer, table, max_length=3, sample=False)(features_of(tokenizer))
    assert batch["neighbor_labels"].shape[2] == 3
    # targets that were cut, with or without the end of the text, are known again
    short = [{**f, "labels": [*f["labels"][:2], 1]} for f in features_of(tokenizer, [0, 1, 2])]
    NeighborCollator(tokenizer, table)(short)
    NeighborCollator(tokenizer, table)([{**f, "labels": f["labels"][:3]} for f in short])


def test_labels_may_be_tensors_or_padded(tokenizer: Any, table: NeighborTable) -> None:
    plain = NeighborCollator(tokenizer, table)(features_of(tokenizer))
    tensors = [
        {**f, "row": torch.tensor(f["row"]), "labels": torch.tensor([*f["labels"], -100])}
        for f in features_of(tokenizer)
    ]
    found = NeighborCollator(tokenizer, table)(tensors)
    assert torch.equal(found["neighbor_labels"], plain["neighbor_labels"])


# --- draws: order, workers, epochs ---


def by_row(collate: NeighborCollator, features: list[dict[str, Any]], **options: Any) -> Any:
    """Return the text that is drawn for each row, over all batches of a loader."""
    loader = torch.utils.data.DataLoader(features, collate_fn=collate, **options)
    found = {}
    for batch in loader:
        for labels, neighbor in zip(batch["labels"], batch["neighbor_labels"], strict=True):
            found[tuple(labels[labels >= 0].tolist())] = tuple(neighbor[neighbor >= 0].tolist())
    return found


def test_draws_do_not_depend_on_batches(tokenizer: Any, table: NeighborTable) -> None:
    collate = NeighborCollator(tokenizer, table)
    features = features_of(tokenizer)
    expected = by_row(collate, features, batch_size=8)
    assert by_row(collate, features[::-1], batch_size=1) == expected
    shuffled = by_row(collate, features, batch_size=3, shuffle=True)
    assert shuffled == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_draws_do_not_depend_on_workers(tokenizer: Any, table: NeighborTable) -> None:
    features = features_of(tokenizer)
    collate = NeighborCollator(tokenizer, table)
    loader = torch.utils.data.DataLoader(
        features, collate_fn=collate, batch_size=2, num_workers=2, persistent_workers=True
    )
    seen = []
    for epoch in range(4):
        collate.set_epoch(epoch)
        drawn = torch.cat([b["neighbor_labels"].sum(1) for b in loader])
        here = NeighborCollator(tokenizer, table)
        here.set_epoch(epoch)
        plain = torch.utils.data.DataLoader(features, collate_fn=here, batch_size=2)
        assert torch.equal(drawn, torch.cat([b["neighbor_labels"].sum(1) for b in plain]))
        seen.append(drawn.tolist())
    assert len({tuple(one) for one in seen}) > 1  # the workers saw the epochs


def test_global_random_state_is_not_read(tokenizer: Any, table: NeighborTable) -> None:
    collate, features = NeighborCollator(tokenizer, table), features_of(tokenizer)
    torch.manual_seed(0)
    one = collate(features)["neighbor_labels"]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(collate(features)["neighbor_labels"], one)
    assert torch.equal(torch.get_rng_state(), state)


# --- with a model of transformers ---


def small_model(vocab: int) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=vocab, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def test_a_step_runs_the_encoder_once(tokenizer: Any, table: NeighborTable) -> None:
    model = small_model(len(tokenizer))
    calls = []
    model.encoder.register_forward_hook(lambda *_: calls.append(1))
    batch = NeighborCollator(tokenizer, table)(features_of(tokenizer))
    mask = batch["attention_mask"]
    encoded = model.encoder(batch["input_ids"], attention_mask=mask)
    logits, neighbor_logits = (
        model(encoder_outputs=encoded, attention_mask=mask, labels=batch[key]).logits
        for key in ("labels", "neighbor_labels")
    )
    loss = SequenceSmoothingLoss(alpha=0.3)
    mixed = loss(logits, batch["labels"], neighbor_logits, batch["neighbor_labels"])
    mixed.backward()
    assert len(calls) == 1
    plain = model(**{k: batch[k] for k in ("input_ids", "attention_mask", "labels")}).loss
    zero = SequenceSmoothingLoss(alpha=0.0)(logits, batch["labels"], None, None)
    torch.testing.assert_close(zero, plain)
    assert not torch.isclose(mixed, plain)


@pytest.mark.slow
def test_the_trainer_of_transformers(tokenizer: Any, table: NeighborTable, tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    seen: list[int] = []

    class Recorded(NeighborCollator):
        def __call__(self, features: Any) -> Any:
            seen.append(int(self._epoch))
            return super().__call__(features)

    collate = Recorded(tokenizer, table, replace=0.5)
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, num_train_epochs=3, report_to=[],
        remove_unused_columns=False, save_strategy="no", use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    validation = [{**f, "row": -1} for f in features_of(tokenizer, [0, 3])]
    trainer = Trainer(
        small_model(len(tokenizer)), arguments, data_collator=collate,
        train_dataset=features_of(tokenizer), eval_dataset=validation,
        callbacks=[collate.trainer_callback()],
    )  # fmt: skip
    trainer.train()
    # the loader fetches one batch ahead, never one of the next epoch
    assert seen == [0, 0, 1, 1, 2, 2]
    assert trainer.evaluate()["eval_loss"] > 0


# --- bad input ---


def test_another_tokenizer_is_noticed(tokenizer: Any, table: NeighborTable) -> None:
    words = sorted({word for text in TARGETS for word in text.split()})
    for other in (make_tokenizer(words[::-1]), make_tokenizer(words, end=False)):
        with pytest.raises(DataError, match=r"labels of row 0 must be what the tokenizer makes of"):
            NeighborCollator(other, table)(features_of(tokenizer))


def test_rows_of_another_order_are_noticed(tokenizer: Any, table: NeighborTable) -> None:
    features = features_of(tokenizer)
    moved = [{**f, "row": (f["row"] + 1) % 8} for f in features]
    with pytest.raises(DataError, match=r"rows in the order of the table"):
        NeighborCollator(tokenizer, table)(moved)


def test_bad_features(tokenizer: Any, table: NeighborTable) -> None:
    collate = NeighborCollator(tokenizer, table)
    feature = features_of(tokenizer, [0])[0]
    for key in ("row", "labels"):
        with pytest.raises(ConfigError, match=f"Add '{key}'; .*remove_unused_columns=False"):
            collate([{k: v for k, v in feature.items() if k != key}])
    with pytest.raises(DataError, match=r"row must lie in 0 to 7.*got 8"):
        collate([{**feature, "row": 8}])
    with pytest.raises(DataError, match="row must be a target of the table, or -1; got -2"):
        collate([{**feature, "row": -2}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"random_state": -1}, "random_state must be"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"replace": 1.1}, "replace must be"),
        ({"replace": 0.1, "sample": False}, "replace must be 0 with sample=False"),
        ({"max_length": 0}, "max_length must be"),
    ],
)
def test_bad_options(
    options: dict[str, Any], message: str, tokenizer: Any, table: NeighborTable
) -> None:
    with pytest.raises(ConfigError, match=message):
        NeighborCollator(tokenizer, table, **options)


def test_bad_epoch(tokenizer: Any, table: NeighborTable) -> None:
    with pytest.raises(ConfigError, match="epoch must be an integer"):
        NeighborCollator(tokenizer, table).set_epoch(0.5)
