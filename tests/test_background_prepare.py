"""Functions that a model family has the compiling process call first."""

from __future__ import annotations

import passes
import pytest
import torch
from state_process import StateProcess, facts
from torch._inductor import config

from compile_cache.errors import NotHandedOver
from compile_cache.inductor.state import ServerState, prepare_with
from compile_cache.inductor.toolchain import configure_torch
from models.text.steps import prepare_process


@pytest.fixture(autouse=True)
def _configured(monkeypatch):
    """A preparation that stayed registered would be part of every later test's state."""
    configure_torch()
    monkeypatch.setattr("compile_cache.inductor.state._registered", {})


def test_preparations_are_called_once_in_order_and_what_they_set_stays():
    before = ServerState.take(on_gpu=False).preparations
    for _ in range(2):
        prepare_with(passes.register)
    prepare_with(passes.set_pass)
    state = ServerState.take(on_gpu=False)
    assert state.preparations == (*before, "passes:register", "passes:set_pass")
    with StateProcess() as process:
        first, second = (process.ask("make_state", state) for _ in range(2))
    assert second["registered"] == ["registered"]
    with torch._inductor.config.patch(joint_custom_post_pass=passes.Versioned("of the family")):
        assert facts()["digest"] == first["within"]["digest"] == second["before"]["digest"]
    assert first["before"]["digest"] == facts()["digest"] != first["within"]["digest"]


@pytest.mark.parametrize("function", [lambda: None, passes.Versioned("first").method, len.__call__])
def test_preparation_that_no_other_process_can_import_is_refused(function):
    before = ServerState.take(on_gpu=False).preparations
    with pytest.raises(NotHandedOver, match="the compiling process cannot import"):
        prepare_with(function)
    assert ServerState.take(on_gpu=False).preparations == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="operators are joined on a GPU")
def test_preparing_the_compiling_process_leaves_options_as_the_servers_are_on_a_cpu():
    """Artifacts are found by their options: with another pass over graphs, the server would never find one."""
    prepare_process()
    assert config.post_grad_custom_pre_pass is None
