"""One boot that compiles in a second process. Prints a line of JSON: what the scene returns.

background_boot.py SCENE [ARGUMENT...]
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import background_fault_scenes
import background_scenes


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    scene, *arguments = sys.argv[1:]
    place = background_scenes if hasattr(background_scenes, scene) else background_fault_scenes
    print(json.dumps(getattr(place, scene)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
