"""Data that a recipe needs and that is not installed with the library."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["outside_data", "outside_images"]


def outside_data(name: str) -> Path:
    """Return the folder of a data set: a path, or a name below `GOSSAMER_DATA`.

    Raises:
        DataError: If it is not there.
    """
    root = os.environ.get("GOSSAMER_DATA")
    for folder in (Path(name), Path(root) / name if root else Path(name)):
        if folder.is_dir():
            return folder
    raise DataError(
        f"this recipe needs the data set {name}, which is not shipped; got no such folder"
        f"{' in GOSSAMER_DATA' if root else ' and no GOSSAMER_DATA'}. Put it there, or name its "
        "folder in --config as `data`."
    )


def outside_images(name: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the images of a data set as rows between 0 and 1, and their classes.

    Raises:
        DataError: If it is not there, or its files are wrong.
    """
    from gossamer.tasks import read_images

    images, labels, _, _ = read_images(outside_data(name))
    return images.reshape(len(images), -1), labels
