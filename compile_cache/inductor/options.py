"""Reads the options of torch's compiler that the program has set, without importing the compiler.

Importing this module imports neither torch nor its compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

# An artifact's name has the versions of these packages, because they decide how a model is traced.
VERSIONED_PACKAGES = ("diffusers", "transformers", "triton")
# Some options of the first two are names for options of the last.
_CONFIGS = (
    "torch._inductor.config",
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
    "torch.compiler.config",
)
# Graphs of one function. Dynamo's own limit is 8; a class compiled for several image sizes and input strides needs
# more. So many artifacts and kinds of calls are kept as well.
RECOMPILE_LIMIT = 64
# torch and this library set these options while they load or make an artifact. In torch 2.11 options belong to all
# threads, so another thread would take them for the program's.
SET_WHILE_LOADING = ("enable_aot_compile", "enable_autograd_for_aot")
# Options that change how a process compiles, but not the compiled code.
_NOT_OF_CODE = ("compile_threads", "worker_start_method", *SET_WHILE_LOADING)


def changed_options() -> Iterator[tuple[str, str, Any]]:
    """The module, name and value of each option that the program or an environment variable changed in this thread.

    Modules that are not imported, or that another thread is importing, have their defaults. Takes under half a
    millisecond once the compiler is imported.

    Raises:
        AttributeError: this torch keeps its options in another way.
    """
    for module in _CONFIGS:
        config: Any = sys.modules.get(module)
        if config is not None and not getattr(config.__spec__, "_initializing", False):
            for name, entry in config._config.items():
                if not config._is_default(name) and name not in _NOT_OF_CODE:
                    value = getattr(config, name)
                    # An option that was set back to its default is unchanged, unless the environment sets it.
                    if value != entry.default or isinstance(entry.env_value_default, bool | str):
                        yield module, name, value
