"""One boot that compiles in a second process. Prints a line of JSON: what the scene returns.

background_boot.py SCENE [ARGUMENT...]
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import background_fault_scenes
import background_scenes


class Hurry(logging.Handler):
    """Raises the priority of each second process: beside other tests, it would wait for minutes."""

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("background.started"):
            threading.Thread(target=self._raise, args=record.args, daemon=True).start()

    def _raise(self, pid: int) -> None:
        with contextlib.suppress(OSError):  # it has ended, or this user may not
            while os.getpriority(os.PRIO_PROCESS, pid) == 0:
                time.sleep(0.01)
            time.sleep(0.5)  # it lowers that of its group too
            os.setpriority(os.PRIO_PROCESS, pid, 0)
            Path(f"/proc/{pid}/autogroup").write_text("0")


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    logging.getLogger("compile_cache").addHandler(Hurry())
    if code := os.environ.get("BACKGROUND_CODE"):
        sys.path.insert(0, code)
    scene, *arguments = sys.argv[1:]
    place = background_scenes if hasattr(background_scenes, scene) else background_fault_scenes
    print(json.dumps(getattr(place, scene)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
