"""A tiny random Llama, a tokenizer of whole words, and rows whose answer repeats the query."""

from __future__ import annotations

import random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gossamer.retrieval import RankingRow

WORDS = [f"w{number}" for number in range(12)]
_PROMPT = (
    "You get a query and list of documents , each written as ID : < > | CONTENT text END ` . Read "
    "all them then find the that help to answer Query Documents ====== Now let ' s start ! Which "
    "document is most relevant ? Print out following ( ) can Final Answer [ ] 0 1 2 3 4 5"
)


def tokenizer() -> Any:
    vocab = {"<pad>": 0, "<end>": 1, "<unk>": 2}
    for word in [*dict.fromkeys(_PROMPT.split()), *WORDS]:
        vocab.setdefault(word, len(vocab))
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )


def model(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer()), max_position_embeddings=512, pad_token_id=0, bos_token_id=None,
        eos_token_id=1, **{**sizes, **heads, **options},
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    with torch.no_grad():  # the start of transformers is too small to tell layers apart
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return made.eval()


def rows(count: int = 6, documents: int = 4, seed: int = 0) -> list[RankingRow]:
    draw = random.Random(seed)
    made = []
    for number in range(count):
        right = draw.randrange(documents)
        asked = WORDS[number % len(WORDS)]
        words = draw.sample([word for word in WORDS if word != asked], documents)
        words[right] = asked
        texts = {f"d{k}": f"{word} {draw.choice(words)}" for k, word in enumerate(words)}
        made.append(RankingRow(words[right], texts, (f"d{right}",), f"q{number}"))
    return made
