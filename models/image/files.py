"""The files of a prediction's pictures."""

from __future__ import annotations

import shutil
import tempfile
from collections import deque

# Cog reads the files after run() has returned: this prediction's folder and the one before stay.
_KEPT_FOLDERS = 2


class PictureFolders:
    """One folder a prediction; each new one deletes the folder of the prediction before the last."""

    def __init__(self) -> None:
        self._folders: deque[str] = deque()

    def next(self) -> str:
        """A new empty folder."""
        while len(self._folders) >= _KEPT_FOLDERS:
            shutil.rmtree(self._folders.popleft(), ignore_errors=True)
        folder = tempfile.mkdtemp(prefix="pictures-")
        self._folders.append(folder)
        return folder
