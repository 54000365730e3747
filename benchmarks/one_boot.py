"""One boot of predict.py in this process, as Cog's worker does it, and predictions; prints one JSON line, for boot.py.

The predictor is that of the checkout which comes first in PYTHONPATH. Until READY, nothing is imported for it.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

_STEPS, _PAIRS = (4, 12), 3


def ask(predictor: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The first answer, whatever predictions compiled, and the median of some measurements of a step or a token.

    A denoising step is the difference of two predictions that differ in their number of steps alone: text encoding, VAE
    and picture file cancel out. A token is the mean gap between pieces of text.
    """
    from served import InProcess

    served = InProcess(predictor)
    before = predictor.boot.counts()
    first = served.answer(**inputs)
    if not predictor.boot.wait_published(300.0) or predictor.boot.report.publish.failures:
        raise SystemExit(f"not published: {predictor.boot.report.publish.failures}")
    step_ms = []
    for _ in range(_PAIRS):
        if first.arrivals_s:
            gaps_s = served.answer(**inputs).gaps_s
            step_ms.append(sum(gaps_s) / len(gaps_s) * 1e3)
        else:
            few_s, many_s = (served.answer(**{**inputs, "num_inference_steps": n}).seconds for n in _STEPS)
            step_ms.append((many_s - few_s) / (_STEPS[1] - _STEPS[0]) * 1e3)
    return {
        "sha256": first.sha256,
        "step_ms": median(step_ms),
        "graphs_after_ready": predictor.boot.counts().since(before).graphs,
    }


def main() -> None:
    """Boot, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", help="JSON of a request")
    parser.add_argument("--text", action="store_true")
    args = parser.parse_args()

    from predict import Predictor, TextPredictor

    predictor = TextPredictor() if args.text else Predictor()
    predictor.setup()
    found = ask(predictor, json.loads(args.inputs))
    from served import describe_machine

    report = json.loads(predictor.boot.report.to_json())
    print(json.dumps({"report": report, "machine": describe_machine(), **found}), flush=True)


if __name__ == "__main__":
    main()
