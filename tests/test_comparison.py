"""Comparing with eager: what counts as equal, as a rounding difference, and as wrong."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from precompiling import FIRST
from torch import nn

from compile_cache.errors import ArtifactError
from compile_cache.serving.comparison import Comparison, Outcome, Unended, answer_and_compare, compare, generators_at
from compile_cache.serving.moment import Moment


def test_complex_outputs_may_round_as_real_ones_do():
    reference = torch.complex(torch.ones(8), torch.ones(8))
    assert compare((reference * (1 + 1e-5),), (reference,)).passed
    assert not compare((reference * 1.1,), (reference,)).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_error_is_that_of_the_norms(dtype):
    reference = torch.full((1000,), 2.0, dtype=dtype)
    assert compare((reference * 1.5,), (reference,)).error == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("output", "reference"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), (torch.zeros(2),)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
    ],
)
def test_what_cannot_be_compared_is_infinitely_wrong(output, reference):
    assert compare((output,), (reference,)).error == float("inf")


def test_the_largest_error_of_several_outputs_counts():
    reference = (torch.ones(4), {"a": torch.ones(4)})
    output = (torch.ones(4), {"a": torch.full((4,), 1.1)})
    assert compare((output,), (reference,)).error == pytest.approx(0.1)


class Switch:
    """Only the function with which pickle makes it tells whether it is on."""

    def __reduce__(self):
        return (switched_on if self in ON else Switch), ()


def switched_on() -> Switch:
    ON.append(one := Switch())
    return one


ON: list[Switch] = []


def test_objects_that_pickle_makes_in_two_ways_differ():
    on, off = switched_on(), Switch()
    assert compare((switched_on(), Switch()), (on, off)).passed
    assert not compare((off,), (on,)).passed


NAN, INF = float("nan"), float("inf")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nans_are_equal_in_the_same_places_alone_and_the_rest_is_compared(dtype):
    reference = torch.tensor([NAN, 1.0, 2.0]).to(dtype)
    assert compare((reference.clone(),), (reference,)).error == 0.0
    with pytest.raises(ArtifactError, match="NaN everywhere"):
        compare((reference[:1].clone(),), (reference[:1],))
    assert compare((1, reference[:1].clone()), (1, reference[:1])).passed, "what the call wrote"
    for other in ([NAN, 1.0, 3.0], [NAN, NAN, 2.0], [0.0, 1.0, 2.0], [1.0, NAN, 2.0]):
        assert not compare((torch.tensor(other).to(dtype),), (reference,)).passed
        assert not compare((reference,), (torch.tensor(other).to(dtype),)).passed


def test_a_nan_is_no_infinity():
    for one, other in ((NAN, INF), (INF, -INF), (INF, 3e38)):
        assert not compare((torch.tensor([one, 1.0]),), (torch.tensor([other, 1.0]),)).passed
        assert not compare((torch.tensor([other, 1.0]),), (torch.tensor([one, 1.0]),)).passed


@pytest.mark.parametrize("infinity", [float("inf"), float("-inf")])
def test_infinities_that_are_the_same_are_equal_and_the_rest_is_compared(infinity):
    reference = torch.tensor([infinity, 1.0, 2.0])
    assert compare((reference.clone(),), (reference,)).error == 0.0
    assert compare((torch.tensor([infinity, 1.0, 2.2]),), (reference,)).error == pytest.approx(0.2 / 5**0.5)
    assert not compare((torch.tensor([infinity, infinity, 2.0]),), (reference,)).passed


def test_a_difference_shows_nothing_if_a_prediction_began_while_eager_answered():
    moment, found, x = Moment(), list[Outcome](), torch.ones(2)
    call = nn.Identity(), (x,), {}
    answer_and_compare(call, lambda: (moment.begin(FIRST), x)[1], lambda *_: x + 1, moment, found.append)
    assert isinstance(found[0], Unended)


def test_a_request_does_not_fail_because_its_answer_cannot_be_copied(monkeypatch):
    comparison = Comparison((nn.Identity(), (torch.ones(2),), {}))

    def lacking(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "clone", lacking)
    with pytest.raises(torch.OutOfMemoryError):
        comparison.expect(torch.ones(2))


def test_keys_of_other_types_and_attributes_of_an_empty_dictionary_are_differences():
    one, other = OrderedDict[str, int](), OrderedDict[str, int]()
    one.version, other.version = 1, 2  # type: ignore[attr-defined]
    assert not compare(({1: "a"},), ({True: "a"},)).passed
    assert not compare((one,), (other,)).passed


class Scale(ModelMixin, ConfigMixin):
    """Its configuration is a dictionary whose copy has its attributes in another order."""

    @register_to_config
    def __init__(self, by: float = 2.0, name: str = "scale") -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.by


def test_a_model_of_diffusers_is_equal_to_itself():
    scale = Scale()
    comparison = Comparison((scale, (torch.ones(2),), {}))
    comparison.expect(scale(torch.ones(2)))
    assert comparison.check(lambda module, args, kwargs: module.forward(*args)).passed


def test_a_difference_of_8_bits_is_not_hidden_by_a_rounding_error_beside_it():
    eager = torch.ones(64, dtype=torch.bfloat16), torch.ones(64).to(torch.float8_e4m3fn)
    rounded, wrong = eager[0].clone(), eager[1].float()
    rounded[:2] *= 1.0625
    wrong[0] *= 1.125
    for found in ((rounded, wrong.to(torch.float8_e4m3fn)), (wrong.to(torch.float8_e4m3fn), rounded)):
        expected = eager if found[0] is rounded else eager[::-1]
        assert not compare((found,), (expected,)).passed
    assert compare(((rounded, eager[1]),), (eager,)).passed


def test_generators_from_which_another_prediction_has_drawn_are_not_set_back():
    with generators_at(is_alone=lambda: False):
        torch.rand(1)
        state = torch.get_rng_state()
    assert torch.equal(torch.get_rng_state(), state)
