"""`boot.warm_up` calls a predictor's own `run` as Cog does."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from boots import settings
from cog import BaseRunner, Input
from torch import nn

import compile_cache


def untouched(call: Any) -> Any:
    """A decorator as `torch.inference_mode()` is one."""
    return functools.wraps(call)(lambda *args, **kwargs: call(*args, **kwargs))


class Predictor(BaseRunner):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @untouched
    def predict(
        self,
        prompt: str = Input(description="What to draw"),
        steps: int = Input(default=4, ge=1),
        seed: int | None = Input(default=None),
        scale: float = 0.5,
    ) -> None:
        self.calls.append((range(steps), prompt, seed, scale))
        if prompt == "none":
            raise ValueError(f"{seed} is no seed")

    def stream(self, count: int = Input(default=2)) -> Iterator[str]:
        for number in range(count):
            self.calls.append((number,))
            yield str(number)

    async def wait(self, count: int = Input(default=2)) -> None:
        self.calls.append((count,))

    async def stream_later(self, count: int = Input(default=2)) -> AsyncIterator[str]:
        for number in range(count):
            self.calls.append((number,))
            yield str(number)


def test_a_boot_without_with_says_so(tmp_path):
    boot = compile_cache.boot("my-model", environ=settings(tmp_path, cold_start="background"))
    boot.compile(nn.Identity())
    boot.warm_up(lambda: None)
    assert "without `with`" in boot.report.warnings[0]


def test_without_a_warm_up_no_class_is_said_to_be_unused(tmp_path):
    with compile_cache.boot("my-model", environ=settings(tmp_path)) as boot:
        boot.compile(nn.Identity())
    assert [region.reason for region in boot.report.regions] == [""]


def test_a_warm_up_leaves_no_call_out_if_graphs_were_restored_which_it_alone_traces(tmp_path):
    environ = settings(tmp_path, cold_start="background", unseen="background")
    boot = compile_cache.boot("my-model", environ=environ)
    assert boot.compiles_in_background
    boot._restored_files = frozenset({"precompiled/group/0.graphs"})
    assert not boot.compiles_in_background


@pytest.fixture
def boot(tmp_path):
    with compile_cache.boot("my-model", environ=settings(tmp_path, scope="off")) as boot:
        yield boot


def test_inputs_that_are_not_given_have_their_defaults(boot):
    predictor = Predictor()
    boot.warm_up(predictor.predict, prompt="an otter")
    assert predictor.calls == [(range(4), "an otter", None, 0.5)]


@pytest.mark.parametrize(
    ("name", "calls"), [("stream", [(0,), (1,)]), ("wait", [(2,)]), ("stream_later", [(0,), (1,)])]
)
def test_a_stream_is_taken_to_its_end_and_what_is_asynchronous_is_awaited(boot, name, calls):
    predictor = Predictor()
    boot.warm_up(getattr(predictor, name))
    assert predictor.calls == calls


@pytest.mark.timeout(120)
def test_a_warm_up_on_the_models_thread_may_await_what_calls_there_but_in_no_loop(boot):
    thread, calls = compile_cache.ModelThread(), list[str]()

    async def run() -> None:
        thread.call(calls.append, "called")

    async def in_loop() -> None:
        boot.warm_up(run)

    thread.call(boot.warm_up, run)
    with pytest.raises(RuntimeError, match=r"append cannot begin .*<lambda> runs there"):
        thread.call(lambda: asyncio.run(in_loop()))
    assert calls == ["called"]


@pytest.mark.parametrize("has_loop", [False, True])
def test_what_is_asynchronous_has_the_callers_modes(boot, has_loop):
    seen = list[bool]()

    async def run() -> None:
        seen.append(torch.is_inference_mode_enabled())

    async def in_loop() -> None:
        boot.warm_up(run)

    with torch.inference_mode():
        asyncio.run(in_loop()) if has_loop else boot.warm_up(run)
    assert seen == [True]


def test_a_warm_up_of_a_lambda_that_leaves_inputs_out_says_what_to_write(boot):
    predictor = Predictor()
    with pytest.raises(TypeError, match="FieldInfo") as caught:
        boot.warm_up(lambda: predictor.predict(prompt="an otter"))
    assert 'boot.warm_up(self.run, prompt="…")' in caught.value.__notes__[0]


def test_an_input_without_a_default_is_named_if_the_call_fails(boot):
    with pytest.raises(ValueError, match="no seed") as caught:
        boot.warm_up(Predictor().predict, prompt="none")
    assert "boot.warm_up(self.predict, seed=…)" in caught.value.__notes__[0]
