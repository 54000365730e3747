"""An example's predictor without a server and without compiled code. Prints a line of JSON: `answered` for each
request, or why it was refused.

    MODEL=… example_once.py FILE REQUESTS
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from compile_cache.lifecycle.prediction import call_as_cog


def main() -> None:
    file, requests = Path(sys.argv[1]), json.loads(sys.argv[2])
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
    print(json.dumps(told))


if __name__ == "__main__":
    main()
