"""Compares new code with eager, and changes nothing.

A call that compares is answered by eager, on the real module. The new code runs on a shadow of the call. The comparison
is of the two answers, and of what each run changed in the inputs and in the module.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compile_cache.calls.overlaps import slots_of
from compile_cache.calls.shadow import OF_PROCESS, Shadow, state_of
from compile_cache.calls.torch_call import COMPILED_CALL, Call, pytree
from compile_cache.errors import ArtifactError, Failure, NotHandedOver, attempt
from compile_cache.serving.moment import Moment

# The largest allowed ‖compiled − eager‖ / ‖eager‖ of one tensor. A compiled block rounds less often than eager; a wrong
# block is off by orders of magnitude. The half types allow a few units in the last place (2⁻⁸, 2⁻¹¹), which grow in a
# block's products.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_PLACES = ("its answer", "what it wrote into its inputs", "what it wrote into its module")
_CONTAINERS = (dict, OrderedDict, list, tuple)
_SIMPLE = (str, int, float, complex, bool, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Check:
    """The largest error of all tensors against eager, and the tolerance for its type. `where` names the value."""

    error: float
    tolerance: float
    where: str = "its answer"

    @property
    def passed(self) -> bool:
        """Whether the code may serve."""
        return self.error <= self.tolerance

    @property
    def difference(self) -> str:
        """The error in words; empty if the check passed."""
        if self.passed:
            return ""
        return f"{self.where} differs from eager by {self.error:.1e}; {self.tolerance:.0e} is allowed"


class Unended(NamedTuple):
    """Why a comparison did not end, and whether none can ever end."""

    error: BaseException
    is_final: bool = False


# What a comparison found: a check; why it did not end; or the error of the code.
Outcome = Check | Unended | Exception


def answer_and_compare(
    call: Call,
    eager: Callable[[], Any],
    code: Callable[..., Any],
    moment: Moment,
    conclude: Callable[[Outcome], None],
) -> Any:
    """The answer of `eager()` to a call, which `code(module, args, kwargs)` answers on a copy. `conclude` gets what was
    found, unless a CUDA graph is being recorded: then nothing is compared.

    A comparison does not end if memory runs out. With other predictions open, it does not end if the call draws random
    numbers, or if there is a difference: one of their calls may have written into the same module.

    Raises:
        BaseException: any error of `eager`.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return eager()
    comparison = attempt(Comparison, call)
    if isinstance(comparison, Failure):  # no memory, or a mode of torch in which nothing can be copied
        conclude(Unended(comparison.error, isinstance(comparison.error, NotHandedOver)))
        return eager()
    stays_alone = moment.stays_alone()
    try:
        answer = eager()
    except BaseException as error:
        is_of_model = isinstance(error, Exception) and not isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_of_model:  # a cancel, or no memory beside the copy
            conclude(Unended(error))
        raise
    conclude(comparison.outcome(answer, code, moment, stays_alone))
    return answer


class Comparison:
    """A call that eager answers, and that other code is run with.

    `pristine` is the call as it was before eager ran. `generators` has the states of torch's global generators of
    random numbers then, and is empty if the call did not advance them. If it did, other threads must not draw from them
    while the call is compared.
    """

    def __init__(self, call: Call) -> None:
        """Copy the call.

        Raises:
            NotHandedOver: it cannot be copied.
            torch.OutOfMemoryError: the copies do not fit.
        """
        self._call = call
        self.pristine = Shadow(call)
        self.generators = _generator_states()
        self._reference: Any = None

    def outcome(
        self, answer: Any, code: Callable[..., Any], moment: Moment, stays_alone: Callable[[], bool]
    ) -> Outcome:
        """What the comparison with eager's answer finds."""
        try:
            self.expect(answer)
        except Exception as error:
            return Unended(error)
        try:
            with moment.alone() if self.generators else contextlib.nullcontext():
                if self.generators and not stays_alone():
                    raise ArtifactError("other predictions would see the generators of random numbers set back")
                check = self.check(code)
        except (MemoryError, torch.OutOfMemoryError, ArtifactError) as error:
            return Unended(error)
        except Exception as error:
            return error
        if check.passed or stays_alone():
            return check
        return Unended(ArtifactError(f"while other predictions were open, {check.difference}"))

    def expect(self, answer: Any) -> None:
        """Take the answer that eager has just given, on the real module.

        Raises:
            NotHandedOver: the call has changed what its copies share.
            torch.OutOfMemoryError: a copy of the answer does not fit.
        """
        if _generator_states() == self.generators:
            self.generators = ()
        if name := self.pristine.changed():
            raise NotHandedOver(f"a call writes into {name}, which copies of the call share. Use a buffer")
        for name, value, before in self.pristine.named:
            if compare((state_of(value),), (before,)).error:
                raise NotHandedOver(f"a call changes {name}, which is one object for the whole program")
        self._reference = pytree.tree_map_only(Tensor, torch.clone, answer)

    def check(self, function: Callable[..., Any]) -> Check:
        """Run `function(module, args, kwargs)` on the copy, once, and compare.

        Raises:
            Exception: the function failed, or the memory is full.
        """
        (module, *inputs), (copy, *inputs_of_copy) = self._call, self.pristine.call
        with generators_at(self.generators) if self.generators else contextlib.nullcontext():
            answer = function(*self.pristine.call)
        return compare((answer, inputs_of_copy, copy), (self._reference, inputs, module))


def compare(found: tuple[Any, ...], expected: tuple[Any, ...]) -> Check:
    """Compare what code answered, and what it left in its inputs and in its module, with what eager did. Tensors may
    differ by rounding; everything else has to be equal.

    Raises:
        ArtifactError: a tensor of the answer has no number in it, in both.
    """
    walk = _Walk()
    for where, one, other in zip(_PLACES, found, expected, strict=False):
        walk.compare(where, one, other)
    return walk.worst


class _Walk:
    """Walks two object graphs side by side, and keeps the worst difference."""

    def __init__(self) -> None:
        self.worst = Check(0.0, _TOLERANCES[torch.float32])
        # Pairs by identity. They are kept, so that no other object gets the identity of one that the walk made.
        self._seen: dict[tuple[int, int], tuple[Any, Any]] = {}
        # By identity, the counterpart of an object that has no parts.
        self._twins: dict[int, Any] = {}

    def compare(self, where: str, found: Any, expected: Any) -> None:
        """Compare a value and everything below it."""
        kind = type(expected)
        if type(found) is not kind:
            self._differ(where)
        elif kind in _CONTAINERS and not (found or expected or _attributes(found) or _attributes(expected)):
            return  # as most that a module has
        elif isinstance(expected, _SIMPLE):
            if found != expected and not (found != found and expected != expected):  # NaN is NaN
                self._differ(where)
        elif (pair := (id(found), id(expected))) not in self._seen and self.worst.passed:
            self._seen[pair] = found, expected
            self._compare_objects(where, found, expected)

    def _compare_objects(self, where: str, found: Any, expected: Any) -> None:
        if isinstance(expected, Tensor):
            tolerance = _TOLERANCES.get(expected.dtype.to_real(), 0.0)
            check = Check(_relative_error(found, expected), tolerance, where)
            self.worst = max(self.worst, check, key=_severity)
            if where == _PLACES[0] and check.passed and expected.numel() and bool(expected.isnan().all()):
                raise ArtifactError("its answer is NaN everywhere, which shows nothing")
        elif isinstance(expected, torch.Generator):
            if not torch.equal(found.get_state(), expected.get_state()):
                self._differ(where)
        elif isinstance(expected, OF_PROCESS):  # copies share it
            if found is not expected:
                self._differ(where)
        elif isinstance(expected, set | frozenset):
            self._compare_sets(where, found, expected)
        elif not (isinstance(expected, _Keys) and _are_equal(found, expected)):
            self._compare_parts(where, found, expected)

    def _compare_parts(self, where: str, found: Any, expected: Any) -> None:
        some, others = _parts(found), _parts(expected)
        # Nothing tells an object without parts from another, but that it is the copy of one object alone.
        twins = self._twins.setdefault(id(found), expected), self._twins.setdefault(id(expected), found)
        if len(some) != len(others) or not (others or (twins[0] is expected and twins[1] is found)):
            self._differ(where)
        else:
            for one, other in zip(some, others, strict=True):
                if one is not other:
                    self.compare(where, one, other)

    def _compare_sets(self, where: str, found: Any, expected: Any) -> None:
        """Compare each element with one that is equal, or else with one that has equal parts."""
        rest = [other for other in expected if other not in found]
        for one in [one for one in found if one not in expected]:
            twin = next((other for other in rest if self._are_alike(one, other)), rest)
            if twin is rest:
                break
            rest = [other for other in rest if other is not twin]
        if rest or len(found) != len(expected):
            self._differ(where)

    def _are_alike(self, one: Any, other: Any) -> bool:
        walk = _Walk()
        walk.compare(_PLACES[1], one, other)
        return walk.worst.passed

    def _differ(self, where: str) -> None:
        self.worst = Check(math.inf, 0.0, where)


class _Keys(tuple[Any, ...]):
    """The keys of a dictionary and their types: 1 and True are equal. Most are texts, and compared all at once."""


def _parts(value: Any) -> list[Any]:
    """An object's items, attributes and slots, with their keys and names, and what pickle makes it of if its class says
    that. Empty if it has none of these."""
    parts: list[Any] = []
    if attributes := _attributes(value):  # their order means nothing, and a copy may have another one
        # A module's has its compiled call, which its shadow has not.
        parts = _parts({name: part for name, part in sorted(attributes.items()) if name != COMPILED_CALL})
    if isinstance(value, dict):
        parts += [_Keys((*value, *map(type, value))), *value.values()]
    elif isinstance(value, list | tuple | deque):
        parts += value
    elif _says_how_it_is_made(type(value)):
        parts += state_of(value)
    names = [name for name in slots_of(type(value)) if hasattr(value, name)]  # type: ignore[arg-type]
    return [*parts, *names, *(getattr(value, name) for name in names)]


def _says_how_it_is_made(kind: Any) -> bool:
    return kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__


def _attributes(value: Any) -> dict[str, Any] | None:
    return vars(value) if type(value).__dictoffset__ else None  # no `__getattr__` of its own is asked


def _are_equal(found: Any, expected: Any) -> bool:
    try:
        same = found == expected
        return bool(same.all() if hasattr(same, "all") else same)  # an array's answer is an array
    except Exception:  # of the object's own code
        return False


def _severity(check: Check) -> float:
    """The error in tolerances: above 1, the check failed."""
    if check.tolerance:
        return check.error / check.tolerance
    return math.inf if check.error else 0.0


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; infinite if shapes, types, integers, or places of infinities or NaNs differ."""
    if found.shape != expected.shape or found.dtype != expected.dtype or found.device != expected.device:
        return math.inf
    if expected.is_complex():
        found, expected = torch.view_as_real(found.resolve_conj()), torch.view_as_real(expected.resolve_conj())
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else math.inf
    if expected.itemsize == 1:  # torch computes nothing in float8
        found, expected = found.float(), expected.float()
    error = _norm_error(found, expected)
    if not math.isfinite(error):
        finite = expected.isfinite()
        if not torch.allclose(found[~finite], expected[~finite], 0, 0, equal_nan=True):
            return math.inf
        error = _norm_error(found[finite], expected[finite])
    return error if math.isfinite(error) else math.inf


def _norm_error(found: Tensor, expected: Tensor) -> float:
    wide = torch.float64 if expected.dtype in (torch.float32, torch.float64) else torch.float32
    norms = torch.linalg.vector_norm(found.to(wide) - expected.to(wide)), torch.linalg.vector_norm(expected, dtype=wide)
    difference, norm = torch.stack(norms).tolist()
    return float(difference / norm if norm else difference)


def _generator_states() -> tuple[bytes, ...]:
    """The states of torch's global generators of random numbers."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    return tuple(bytes(state.numpy()) for state in states)


def _set_generators(states: tuple[bytes, ...]) -> None:
    first, *others = (torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states)
    torch.set_rng_state(first)
    if others:
        torch.cuda.set_rng_state_all(others)


@contextlib.contextmanager
def generators_at(states: tuple[bytes, ...] = (), is_alone: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Set torch's global generators to these states, if any, for the context, and afterwards to where they were, unless
    another prediction draws from them by then."""
    now = _generator_states()
    if states and now != states:
        _set_generators(states)
    try:
        yield
    finally:
        if is_alone() and _generator_states() != now:
            _set_generators(now)
