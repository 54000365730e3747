"""The call of a warm-up, made as Cog makes a prediction: with the inputs' defaults, and to the end of a stream."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any


def call_as_cog(call: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    """Call `call` with `inputs`, and with the default of each other parameter that Cog's `Input()` declares. Take all
    pieces of a stream, and await what is asynchronous, on a thread of its own if the caller's runs an event loop.

    Raises:
        Exception: any error of `call`, with a note if an input that was not given may be the cause.
    """
    defaults = {name: default for name, default in _declared(call).items() if name not in inputs}
    try:
        answer = call(**defaults, **inputs)
        if inspect.isgenerator(answer):
            for _ in answer:
                pass
        elif inspect.iscoroutine(answer) or inspect.isasyncgen(answer):
            import asyncio
            from concurrent.futures import ThreadPoolExecutor

            from compile_cache.calls.caller import Caller

            if asyncio._get_running_loop() is None:
                with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # the thread keeps its own loop
                    runner.run(_end(answer))
            else:
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(Caller().run, partial(asyncio.run, _end(answer))).result()
    except Exception as error:
        if missing := [name for name, default in defaults.items() if default is None]:
            error.add_note(
                f"The warm-up called it with {'=None, '.join(missing)}=None. If it needs one of them, give it: "
                f"boot.warm_up(self.{getattr(call, '__name__', 'run')}, {missing[0]}=…)."
            )
        if (kind := _input_class()) and kind.__name__ in str(error):
            error.add_note(
                "The warm-up called it without all inputs, which are Cog's Input() objects then. Write "
                'boot.warm_up(self.run, prompt="…"), which gives the other inputs their defaults.'
            )
        raise


def _declared(call: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of the parameters that Cog's `Input()` declares."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return {}
    kind = _input_class()
    return {p.name: p.default.default for p in parameters if kind and isinstance(p.default, kind)}


def _input_class() -> Any:
    """The class of what Cog's `Input()` returns, which has no public name; None without Cog."""
    cog: Any = sys.modules.get("cog")
    return type(cog.Input()) if hasattr(cog, "Input") else None


async def _end(answer: Any) -> None:
    if inspect.isasyncgen(answer):
        async for _ in answer:
            pass
    else:
        await answer
