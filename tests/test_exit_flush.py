"""A container that is stopped with packs staged, in a PID namespace as containers have: benchmarks/exit_flush.py."""

from __future__ import annotations

import os
import shutil

import pytest

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root"),
    pytest.mark.skipif(shutil.which("tini") is None, reason="tini is not installed"),
]


def test_sixteen_megabytes_are_stored_within_the_time_that_cog_run_allows(aws_variables):
    from exit_flush import small

    (stopped,) = small(1)
    assert not stopped.was_killed
    assert (stopped.graphs, stopped.others, stopped.problems) == (4, 12, ())
