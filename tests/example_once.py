"""Examples' predictors without a server and without compiled code. Prints a line of JSON: for each a list that has, for
each request, `answered` or why it was refused.

    example_once.py JOBS: each one's file, variables and requests, as JSON
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from compile_cache.lifecycle.warm_up_call import call_as_cog


def main() -> None:
    print(json.dumps([asked(Path(file), environ, requests) for file, environ, requests in json.loads(sys.argv[1])]))


def asked(file: Path, environ: dict[str, str], requests: list[dict[str, Any]]) -> list[str]:
    os.environ.update(environ)
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location("example", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    predictor, told = module.Predictor(), []
    predictor.record_metric = lambda *_: None
    predictor.setup()
    call = predictor.predict if "predict" in vars(module.Predictor) else predictor.run
    for request in requests:
        try:
            call_as_cog(call, request)
            told.append("answered")
        except ValueError as error:
            told.append(f"refused: {error}")
    return told


if __name__ == "__main__":
    main()
