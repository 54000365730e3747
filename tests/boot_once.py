"""One boot of the toy model in a process of its own. Prints a line of JSON: the report, and the model's output.

With `--thread-count N`, torch is told to use N threads after the boot has begun; with `--raise`, the caller's own code
fails in the middle; with `--again ROWS`, another input shape is predicted after READY; with `--restore-alone` nothing
is compiled; with `--code FOLDER`, the model is imported from there.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import compile_cache


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--thread-count", type=int)
    parser.add_argument("--raise", dest="fails", action="store_true")
    parser.add_argument("--again", type=int)
    parser.add_argument("--restore-alone", action="store_true")
    parser.add_argument("--code", default=str(Path(__file__).parent))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    with compile_cache.boot("toy/model@" + "0" * 40) as boot:
        with boot.importing():
            import torch

            sys.path.insert(0, arguments.code)
            from toy_model import ToyModel, run

            if arguments.thread_count:
                torch.set_num_threads(arguments.thread_count)
        model = ToyModel().eval()
        if not arguments.restore_alone:
            boot.compile(model)
            boot.warm_up(lambda: run(model))
        if arguments.fails:
            raise ValueError("the caller's own mistake")
    before = boot.counts()
    output = run(model)
    compiled_now = boot.counts().since(before).graphs
    if arguments.again:
        run(model, arguments.again)
        assert boot.wait_compiled(600)
        for _ in range(2):  # is compared, and served
            run(model, arguments.again)
    result = {"report": json.loads(boot.report.to_json()), "output": output, "compiled_now": compiled_now}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
