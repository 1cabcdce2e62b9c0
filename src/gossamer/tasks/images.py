"""Labelled images: a folder for each class, an `.npz` file, or the files of MNIST."""

from __future__ import annotations

import gzip
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gossamer.checks import check_range
from gossamer.errors import DataError
from gossamer.tasks.labelled import LabelledTask

__all__ = ["ImageTask", "read_flat_images", "read_images"]

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_MAGIC = {"images": 2051, "labels": 2049}
_AS = "a folder with one folder of images for each class, an .npz with images and labels, or a folder with IDX files"  # noqa: E501


class ImageTask(LabelledTask):
    """Classes of images.

    A share of the images is kept for tests, drawn once by a fixed seed.

    Args:
        path: A folder with one folder of images for each class; an `.npz` file with `images`
            `(N, H, W)` or `(N, H, W, C)` and `labels` `(N,)`; or a folder with a pair of IDX
            files, such as `train-images-idx3-ubyte.gz` and `train-labels-idx1-ubyte.gz`.
        test_share: Range: > 0, < 1. Default 0.2.

    Raises:
        ConfigError: If the share is out of range.
        DataError: If there are no images, they differ in size, one cannot be read, numbers are out
            of range, or there is one class alone; the message names the file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "squares.npz"
        >>> np.savez(path, images=np.zeros((10, 4, 4), np.uint8), labels=np.arange(10) % 2)
        >>> ImageTask(path).shape
        (1, 4, 4)

    Source: the library's own; IDX: LeCun et al., the MNIST database.
    Deviations: none
    """

    def __init__(self, path: str | os.PathLike[str], *, test_share: float = 0.2) -> None:
        check_range(test_share, "test_share", low=0.0, high=1.0, open_low=True)
        self.path, self.test_share = str(path), test_share
        images, labels, self.classes, self.lines = read_images(path)
        self.x = torch.from_numpy(images)
        self.labels = torch.from_numpy(labels)
        count = min(max(1, round(test_share * len(images))), len(images) - 1)
        if count < 1:
            raise DataError(f"{path} must hold at least two images; got {len(images)}. Add some.")
        if len(self.classes) < 2:
            raise DataError(
                f"{path} must hold images of at least two classes; got {self.classes[0]!r} alone. "
                "Add others."
            )
        order = np.random.default_rng(0).permutation(len(images))
        self.test_rows = torch.zeros(len(images), dtype=torch.bool)
        self.test_rows[torch.from_numpy(order[:count])] = True

    @property
    def config(self) -> dict[str, Any]:
        """Name and options, with the classes that were found."""
        own = {"name": "images", "path": self.path, "test_share": self.test_share}
        return {**own, "facts": {"classes": list(self.classes)}}


def read_images(
    path: str | os.PathLike[str],
) -> tuple[NDArray[np.float32], NDArray[np.int64], tuple[str, ...], tuple[str, ...]]:
    """Return images `(N, C, H, W)`, labels, names of classes, and where each lies.

    Whole numbers are divided by 255; floats of an `.npz` stay as they are, 0 to 1 as a rule.

    Args:
        path: As for `ImageTask`.

    Raises:
        DataError: If there are no images, they differ in size, one cannot be read, or numbers are
            not finite or not from 0 to 255.
    """
    found = Path(path)
    if found.is_file():
        images, labels = _read_npz(found)
    elif _idx_file(found, "images"):
        images, labels = _read_idx(found)
    else:
        return _read_folder(found)
    if len(images) == 0 or len(images) != len(labels):
        raise DataError(
            f"{path} must hold as many labels as images, at least one; got {len(labels)} and "
            f"{len(images)}. Look how it was written."
        )
    images = images[..., None] if images.ndim == 3 else images
    _check_numbers(images, labels, path)
    named, numbers = np.unique(labels, return_inverse=True)
    lines = tuple(f"{path}, image {n}" for n in range(len(images)))
    return _as_floats(images), numbers.astype(np.int64), tuple(map(str, named.tolist())), lines


def _check_numbers(
    images: NDArray[Any], labels: NDArray[Any], path: str | os.PathLike[str]
) -> None:
    whole = images.dtype.kind in "iu"
    if images.dtype.kind not in "iubf" or not np.isfinite(images).all():
        got = images.dtype if images.dtype.kind not in "iubf" else "NaN or infinite ones"
        raise DataError(f"{path}: images must be finite numbers; got {got}. Mend them.")
    if whole and (images.min() < 0 or images.max() > 255):
        raise DataError(
            f"{path}: images of whole numbers must lie in 0 to 255; got {images.min()} to "
            f"{images.max()}. Save floats from 0 to 1."
        )
    if labels.dtype.kind not in "iubU":
        raise DataError(
            f"{path}: labels must be whole numbers or text; got {labels.dtype}. Convert them."
        )


def _as_floats(images: NDArray[Any]) -> NDArray[np.float32]:
    scaled = images.astype(np.float32)
    if np.issubdtype(images.dtype, np.integer):
        scaled = scaled / np.float32(255)
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


def _read_npz(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in ("images", "labels") if name not in arrays]
            if missing:
                raise DataError(
                    f"{path} must hold the arrays images and labels; got {list(arrays)}. Save it "
                    "by numpy.savez(path, images=..., labels=...)."
                )
            images, labels = arrays["images"], arrays["labels"]
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        # NumPy takes what it cannot read for pickled data, and advises to load that
        pickled = isinstance(error, ValueError) and "pickle" in str(error)
        got = "a file of another kind" if pickled else str(error)
        raise DataError(f"{path} must be {_AS}; got {got}. Check the path.") from None
    if images.ndim not in (3, 4) or labels.ndim != 1:
        raise DataError(
            f"{path} must hold images (N, H, W) or (N, H, W, C) and labels (N,); got "
            f"{images.shape} and {labels.shape}. Put the channels last."
        )
    return images, labels


def _idx_file(folder: Path, what: str) -> Path | None:
    pattern = f"*{what}*idx*ubyte*" if folder.is_dir() else ""
    return next(iter(sorted(folder.glob(pattern))), None) if pattern else None


def _read_idx(folder: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    found: list[NDArray[Any]] = []
    for what, axes in (("images", 3), ("labels", 1)):
        path = _idx_file(folder, what)
        if path is None:
            raise DataError(
                f"{folder} must hold an IDX file of {what}, such as t10k-{what}-idx{axes}-ubyte.gz;"
                " got none. Put it there."
            )
        try:
            content = path.read_bytes()
            content = gzip.decompress(content) if path.suffix == ".gz" else content
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} must be an IDX file; got {error}. Get it again.") from None
        sizes = [int.from_bytes(content[4 * k : 4 * k + 4], "big") for k in range(axes + 1)]
        body = content[4 * (axes + 1) :]
        if sizes[0] != _MAGIC[what] or int(np.prod(sizes[1:])) != len(body):
            raise DataError(
                f"{path} must be an IDX file with the number {_MAGIC[what]} and as many bytes as "
                f"its sizes say; got {sizes[0]} and {len(body)} bytes. Get it again."
            )
        found.append(np.frombuffer(body, np.uint8).reshape(sizes[1:]))
    return found[0], found[1]


def _read_folder(
    folder: Path,
) -> tuple[NDArray[np.float32], NDArray[np.int64], tuple[str, ...], tuple[str, ...]]:
    places = sorted(p for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    files = [
        (number, file)
        for number, place in enumerate(places)
        for file in sorted(place.rglob("*"))
        if file.suffix.lower() in _SUFFIXES
    ]
    if not files:
        raise DataError(f"{folder} must be {_AS}; got no image. Check the path.")
    stacked = _read_files([file for _, file in files])
    labels = np.array([number for number, _ in files], np.int64)
    names = tuple(place.name for place in places)
    return _as_floats(stacked), labels, names, tuple(str(file) for _, file in files)


def read_flat_images(
    folder: str | os.PathLike[str],
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """Return the images that lie in a folder itself, without classes, and where each lies.

    Args:
        folder: With images of one size.

    Raises:
        DataError: If there are none, they differ in size, or one cannot be read.
    """
    place = Path(folder)
    found = sorted(place.iterdir()) if place.is_dir() else []
    files = [file for file in found if file.suffix.lower() in _SUFFIXES]
    if not files:
        raise DataError(f"{folder} must be a folder of images; got none. Check the path.")
    return _as_floats(_read_files(files)), tuple(str(file) for file in files)


def _read_files(files: Sequence[Path]) -> NDArray[np.uint8]:
    """Return images `(N, H, W, C)`: one channel where all are grey, three else."""
    from PIL import Image, UnidentifiedImageError

    grey = True
    images = []
    for file in files:
        try:
            with Image.open(file) as image:
                if image.mode[0] in "IF":  # 16 bits and more, which a conversion would clip
                    raise DataError(
                        f"{file}: expected 8 bits for each channel; got the mode {image.mode}. "
                        "Convert it, or give the arrays as an .npz."
                    )
                grey = grey and image.mode in ("1", "L")
                images.append(np.asarray(image.convert("RGB")))
        except (OSError, UnidentifiedImageError) as error:
            raise DataError(f"{file}: expected an image; got {error}. Remove it.") from None
        if images[-1].shape != images[0].shape:
            raise DataError(
                f"{file}: expected {images[0].shape[1]} x {images[0].shape[0]} pixels as in "
                f"{files[0]}; got {images[-1].shape[1]} x {images[-1].shape[0]}. Bring all "
                "images to one size first."
            )
    return np.stack(images)[..., : 1 if grey else 3]
