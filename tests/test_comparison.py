"""Comparing with eager: what counts as equal, as a rounding difference, and as wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_cache.serving.comparison import Comparison, compare


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


class Full(nn.Module):
    """Finds no memory once, before or after it has written into its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor, writes_first: bool) -> torch.Tensor:
        if writes_first:
            self.count += 1
        if FAULTS:
            raise FAULTS.pop()
        return x + self.count


# Not a part of the module, whose state is compared.
FAULTS: list[Exception] = []


def test_eager_without_memory_runs_again_without_the_copy():
    FAULTS.append(torch.OutOfMemoryError("no memory"))
    comparison = Comparison(Full(), (torch.ones(2), False), {})
    assert comparison.eager().tolist() == [1.0, 1.0]
    with pytest.raises(torch.OutOfMemoryError):
        comparison.check(lambda *call: None)


def test_eager_does_not_run_again_once_it_has_changed_its_module():
    FAULTS.append(torch.OutOfMemoryError("no memory"))
    with pytest.raises(torch.OutOfMemoryError):
        Comparison(Full(), (torch.ones(2), True), {}).eager()
