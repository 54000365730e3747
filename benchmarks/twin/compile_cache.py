"""A predictor's plain twin: with this in place of the library, it does what its author would have written without it.

The weights move by `.to("cuda")`, the warm-up calls the model once, and nothing is compiled. At READY, the most memory
that the GPU held is printed.
"""

import contextlib
import inspect
import sys


class Boot(contextlib.AbstractContextManager):
    """The calls of `compile_cache.Boot` that examples and adopted predictors have."""

    importing = timed = lambda self, *_: contextlib.nullcontext()

    def __exit__(self, *_):
        import torch

        print(f"twin: {torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0} bytes", file=sys.stderr)

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

    def model_thread(self):
        """An object whose `call` calls."""
        self.call = lambda function, *args, **kwargs: function(*args, **kwargs)
        return self

    @contextlib.contextmanager
    def prediction(self):
        """A prediction without metrics."""
        self.metrics = dict
        yield self


def boot(*_, **__):
    """A boot that restores nothing."""
    return Boot()
