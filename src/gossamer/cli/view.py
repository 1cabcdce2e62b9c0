"""`gossamer view`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer._version import __version__
from gossamer.cli._common import COMMON, Common, print_json, set_threads

if TYPE_CHECKING:
    from gossamer.attention import AttentionMaps

__all__ = ["run"]


def run(folder: Path, /, *, text: str, layers: str | None = None, common: Common = COMMON) -> None:
    """Show what each attention head reads, on one page that works offline.

    A run folder of gossamer train answers the text as a query, and the page shows both. A folder of
    transformers needs its tokenizer inside; an encoder-decoder model writes up to 32 tokens.

    Example: gossamer view runs/train --text "123+4567=" --layers 0,1

    Args:
        folder: A run folder of gossamer train, or a folder that save_pretrained of transformers
            wrote.
        text: What the model reads.
        layers: Numbers of the layers to show, such as 0,1. Default all.
    """
    from gossamer.cli._view_models import read_maps
    from gossamer.files import choose_folder
    from gossamer.report.viewer import check_size, write_attention_page
    from gossamer.train import pick_device

    began = time.perf_counter()
    set_threads(common)
    device = pick_device(common.device)
    maps = read_maps(folder, text, layers=_numbers(layers), device=device)
    check_size(maps)  # before there is a folder
    out = choose_folder("runs/view", common.out)
    page = write_attention_page(maps, out / "attention.html")
    arrays = out / "attention.npz"
    _write_arrays(maps, arrays)
    if common.json:
        print_json(
            {
                "command": "view",
                "version": __version__,
                "seconds": round(time.perf_counter() - began, 3),
                "files": [str(page), str(arrays)],
                **maps.to_dict(),
            }
        )
    else:
        print(f"page: {page.resolve()}")


def _numbers(layers: str | None) -> list[int] | None:
    from gossamer.errors import ConfigError

    if layers is None:
        return None
    try:
        return [int(part) for part in layers.split(",")]
    except ValueError:
        raise ConfigError(
            f"--layers must be numbers with commas between them, such as 0,1; got {layers!r}. "
            "Change it."
        ) from None


def _write_arrays(maps: AttentionMaps, path: Path) -> None:
    """Write weights `(H, T, S)` by layer, such as `layer_0`, and the tokens of each sequence."""
    import numpy as np

    from gossamer.files import replacing

    arrays: dict[str, Any] = {
        layer.name.replace(" ", "_"): layer.weights[0] for layer in maps.layers
    }
    for name, tokens in maps.tokens.items():
        arrays[f"{name}_tokens"] = np.array(tokens, dtype=np.str_)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
