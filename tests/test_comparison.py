"""Comparing with eager: what counts as equal, as a rounding difference, and as wrong."""

from __future__ import annotations

import pytest
import torch

from compile_cache.serving.comparison import compare


def test_complex_outputs_may_round_as_real_ones_do():
    reference = torch.complex(torch.ones(8), torch.ones(8))
    assert compare((reference * (1 + 1e-5),), (reference,)).passed
    assert not compare((reference * 1.1,), (reference,)).passed


@pytest.mark.parametrize("infinity", [float("inf"), float("-inf")])
def test_infinities_that_are_the_same_are_equal_and_the_rest_is_compared(infinity):
    reference = torch.tensor([infinity, 1.0, 2.0])
    assert compare((reference.clone(),), (reference,)).error == 0.0
    assert compare((torch.tensor([infinity, 1.0, 2.2]),), (reference,)).error == pytest.approx(0.2 / 5**0.5)
    assert not compare((torch.tensor([infinity, infinity, 2.0]),), (reference,)).passed
