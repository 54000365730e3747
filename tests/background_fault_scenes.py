"""Scenes of boots whose regions fail in the second process. background_boot.py plays one."""

from __future__ import annotations

import threading
import time
from typing import Any

from background_scenes import MODEL, PATIENCE_S, begun, report, served_alone, told_of

import compile_cache


def faulty() -> dict[str, Any]:
    """Regions that fail in the second process, and two that do not."""
    from compile_cache.background import orders

    with compile_cache.boot(MODEL) as boot:
        from background_blocks import Model, Other, Wide
        from faulty_blocks import Cheating, Crashing, Devouring, Dropping, Hanging

        early = (Wide, Dropping, Cheating, Crashing)
        model, late = begun(boot, early), Model(Other, Hanging, Devouring)
        boot.compile(late)
    assert boot.wait_compiled(PATIENCE_S)
    told = {"first": told_of(boot, model, early)}
    orders._ATTEMPTS = 1
    for kind in (Other, Hanging, Devouring):
        # A process that is there answers, or hangs; one that has to start gets its time.
        boot._regions.supply.orders.queue._limit_s = 3.0 if kind is Hanging else PATIENCE_S
        served_alone(boot, late, kind)
        assert boot.wait_compiled(PATIENCE_S)
        served_alone(boot, late, kind)
    told["late"] = told_of(boot, late, (Other, Hanging, Devouring))
    told["second"] = told_of(boot, model, early)
    return told | {"report": report(boot)}


def faulty_again(*names: str) -> dict[str, Any]:
    """The next boot, of these blocks."""
    from compile_cache.background import orders

    orders._ATTEMPTS = 1
    with compile_cache.boot(MODEL) as boot:
        import background_blocks
        import faulty_blocks

        classes = tuple(getattr(faulty_blocks, name, None) or getattr(background_blocks, name) for name in names)
        model = begun(boot, classes)
    told = {"ready": report(boot), "waiting": boot.waiting}
    assert boot.wait_compiled(PATIENCE_S)
    told_of(boot, model, classes)  # the prediction that compares
    return told | {"regions": told_of(boot, model, classes), "report": report(boot)}


def ends_while(work: str) -> dict[str, Any]:
    """The program ends while a thread of the boot calls torch to `pack` a call, `take` an artifact, or `preload`."""
    from compile_cache.inductor.stored_functions import Artifacts
    from compile_cache.serving.supply import Supply

    places: dict[str, tuple[type, str]] = {"take": (Supply, "received"), "preload": (Artifacts, "prefetch")}
    begun_work = calls_torch_longer(*places[work])
    with compile_cache.boot(MODEL) as boot:
        from background_blocks import Wide

        if work == "preload":
            assert boot._restore._fetching.done.wait(PATIENCE_S)
            with boot.importing():
                pass
        else:
            begun(boot, (Wide,))
    assert begun_work.wait(PATIENCE_S)
    return {}


def calls_torch_longer(owner: type, name: str) -> threading.Event:
    """Let a method call torch for half a second more, except on this thread; an event at its begin."""
    import torch

    method, entered, main = getattr(owner, name), threading.Event(), threading.current_thread()

    def longer(*arguments: Any) -> Any:
        if threading.current_thread() is not main:
            numbers, until = torch.ones(100), time.monotonic() + 0.5
            entered.set()
            while time.monotonic() < until:
                numbers.add(numbers)
        return method(*arguments)

    setattr(owner, name, longer)
    return entered


def killed() -> dict[str, Any]:
    """Predicts until it is killed."""
    with compile_cache.boot(MODEL) as boot:
        from background_blocks import Wide, predict
        from faulty_blocks import Hanging

        model = begun(boot, (Wide, Hanging))
    while True:
        predict(model)
        boot.wait_compiled(0.05)
