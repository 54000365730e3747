"""The toy model in a Cog server, with an asynchronous setup and asynchronous predictions."""

import threading

from cog import BaseRunner, Input

import compile_cache


class Predictor(BaseRunner):
    async def setup(self) -> None:
        self.thread = threading.get_ident()
        with compile_cache.boot("toy/model@" + "0" * 40) as self.boot:
            with self.boot.importing():
                from toy_model import ToyModel
            self.model = ToyModel().eval()
            self.boot.compile(self.model)
            self.boot.warm_up(self.predict_once)

    def predict_once(self, rows: int = 4) -> list[float]:
        from toy_model import run

        return run(self.model, rows)

    async def run(self, rows: int = Input(description="Rows of the input", default=4)) -> str:
        with self.boot.prediction() as prediction:
            output = self.predict_once(rows)
        for name, value in prediction.metrics().items():
            self.record_metric(name, value)
        self.record_metric("is_setups_thread", threading.get_ident() == self.thread)
        return str(output)
