"""The load of two servers: when requests arrive, and its plot."""

from __future__ import annotations

from itertools import pairwise

import pytest
from load import Load, arrivals
from load_plot import Line, plot


@pytest.mark.parametrize("count", [30, 1000])
@pytest.mark.parametrize("part", [0.5, 0.9])
def test_an_open_loop_keeps_the_server_busy_for_its_part_of_the_time(count, part):
    coming = list(arrivals(Load(part=part), 0.2, count))
    assert len(coming) == count
    assert coming[-1] == pytest.approx(count * 0.2 / part)
    assert all(earlier <= later for earlier, later in pairwise([0.0, *coming]))


def test_arrivals_are_the_same_each_time_and_random():
    load = Load(part=0.5)
    coming = list(arrivals(load, 0.2, 1000))
    assert coming == list(arrivals(load, 0.2, 1000))
    gaps = [later - earlier for earlier, later in pairwise(coming)]
    assert min(gaps) < 0.01 < 1.0 < max(gaps), "exponential, 0.4 s in the mean"


def test_a_plot_has_a_line_and_a_name_for_each_series():
    lines = [Line("eager, p50", False, False, ((1.0, 100.0), (2.0, 900.0))), Line("p99", True, True, ((1.0, 2000.0),))]
    picture = plot(lines, "arrivals a second", "ms")
    assert picture.count("<polyline") == 2
    assert all(name in picture for name in ("eager, p50", "p99", "arrivals a second", ">100<", ">1000<", ">2000<"))
