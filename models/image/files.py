"""The files of a prediction's pictures."""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # predict.py imports this module before the restore starts
    from PIL import Image

# Cog reads the files after run() has returned. So the folders of this prediction and of the one before stay.
_KEPT_FOLDERS = 2


class PictureFiles:
    """A folder for each prediction. A new prediction deletes the folders older than its predecessor's."""

    def __init__(self) -> None:
        self._folders: deque[str] = deque()

    def save(self, pictures: Iterable[Image.Image], file_format: str, quality: int) -> list[Path]:
        """Write the pictures of one prediction. Pillow ignores the quality of a png."""
        folder = self._new_folder()
        paths = []
        for number, picture in enumerate(pictures):
            paths.append(folder / f"{number}.{file_format}")
            picture.save(paths[-1], quality=quality)
        return paths

    def _new_folder(self) -> Path:
        while len(self._folders) >= _KEPT_FOLDERS:
            shutil.rmtree(self._folders.popleft(), ignore_errors=True)
        self._folders.append(tempfile.mkdtemp(prefix="pictures-"))
        return Path(self._folders[-1])
