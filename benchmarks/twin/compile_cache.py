"""Stands in for the library, so that a predictor boots as its author would have written it without.

The weights move by `.to("cuda")`, the warm-up calls the model once, and nothing is compiled. At READY, it prints how
long imports took, and the most memory that the GPU held.
"""

import contextlib
import inspect
import sys
import time


class Boot(contextlib.AbstractContextManager):
    """The calls of `compile_cache.Boot` that examples and adopted predictors have."""

    def __exit__(self, *_):
        import torch

        peak_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        print(f"twin: imports {self.import_s:.2f} s, {peak_bytes} bytes", file=sys.stderr)

    @contextlib.contextmanager
    def importing(self):
        """Time the imports."""
        began = time.perf_counter()
        yield
        self.import_s = time.perf_counter() - began

    def timed(self, _):
        """Time nothing."""
        return contextlib.nullcontext()

    def to_gpu(self, model):
        """Move the model, if there is a GPU."""
        import torch

        return model.to("cuda") if torch.cuda.is_available() else model

    def compile(self, *_, **__):
        """Compile nothing."""

    def warm_up(self, call, /, **inputs):
        """Call the model once. Inputs that are not given have the defaults of Cog's `Input()`."""
        parameters = inspect.signature(call).parameters.values()
        defaults = {one.name: one.default.default for one in parameters if hasattr(one.default, "default")}
        result = call(**{**defaults, **inputs})
        if inspect.isgenerator(result):
            list(result)

    def call(self, function, *args, **kwargs):
        """Call `function`, as the model's thread would."""
        return function(*args, **kwargs)

    def model_thread(self):
        """This object, whose `call` calls."""
        return self

    @contextlib.contextmanager
    def prediction(self):
        """A prediction without metrics."""
        self.metrics = dict
        yield self


def boot(*_, **__):
    """A boot that restores nothing."""
    return Boot()
