"""The toy model in a Cog server: what the tests of signals and kills boot."""

import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

from cog import BaseRunner, Input

import compile_cache
from compile_cache.lifecycle import publisher

if "TOY_PUBLISHES_SOON" in os.environ:  # without waiting for other containers
    publisher._QUIET_S = publisher._SPREAD_S = 0.1


class Predictor(BaseRunner):
    def setup(self) -> None:
        with compile_cache.boot("toy/model@" + "0" * 40) as self.boot:
            from toy_model import ToyModel

            self.model = ToyModel().eval()
            self.boot.compile(self.model)
            self.boot.warm_up(self.predict_once)

    def predict_once(self, rows: int = 4) -> list[float]:
        from toy_model import run

        return run(self.model, rows)

    def run(
        self,
        rows: int = Input(description="Rows of the input", default=4),
        sleep_s: float = Input(description="Seconds to take", default=0.0),
    ) -> str:
        before = self.boot.counts()
        output = self.predict_once(rows)
        time.sleep(sleep_s)
        self.record_metric("compiled_now", self.boot.counts().since(before).graphs)
        return str(output)
