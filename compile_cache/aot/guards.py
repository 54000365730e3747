"""Stand-ins for the guards that torch cannot store with a compiled function, or not with what they compare with.

A guard says what must be as it was when the code was traced. torch stores those on values below the function's own
inputs, and drops a guard on an object's identity, which means nothing in another process, or on a global. And where it
makes a stored guard again, it takes what a class or a module has by then for what it had. So each of these is written
down here as an expression and a description of what it was, and compared again where the function is loaded. A guard
that nothing can stand in for makes the function one that is not stored.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._dynamo.guards import CheckFunctionManager, _get_closure_vars
from torch._dynamo.types import GuardFilterEntry

from compile_cache.aot.describe import Description, NotDescribedError, class_name, describe
from compile_cache.errors import NotPrecompilable

_UNSUPPORTED = frozenset(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
_BUILTINS = "__builtins_dict__"  # the beginning of torch's name for them

# What each kind of guard says of the value of its expression.
_BY_IDENTITY = frozenset(
    {"ID_MATCH", "FUNCTION_MATCH", "CLOSURE_MATCH", "CLASS_MATCH", "MODULE_MATCH", "BUILTIN_MATCH", "NN_MODULE"}
)
_BY_VALUE = frozenset({"CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH"})
_BY_LENGTH = frozenset({"SEQUENCE_LENGTH", "EMPTY_NN_MODULE_HOOKS_DICT"})
_BY_KEYS = frozenset({"DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"})
_BY_CONTENT: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "HASATTR": ("attr", lambda value, attr: hasattr(value, attr)),
    "NOT_PRESENT_IN_GENERIC_DICT": ("attr", lambda value, attr: attr in getattr(value, "__dict__", ())),
    "DICT_CONTAINS": ("key", lambda value, key: dict.__contains__(value, key)),
    "DICT_NOT_CONTAINS": ("key", lambda value, key: dict.__contains__(value, key)),
    "SET_CONTAINS": ("key", lambda value, key: key in value),
    "SET_NOT_CONTAINS": ("key", lambda value, key: key in value),
}
_ALL = _BY_IDENTITY | _BY_VALUE | _BY_LENGTH | _BY_KEYS | _BY_CONTENT.keys() | {"TYPE_MATCH", "DUPLICATE_INPUT"}
# Kinds that hold wherever torch and its modules are the same, or that say nothing of a value.
_SAYS_NOTHING = frozenset({"WEAKREF_ALIVE"})
# What is compared of a stored guard: values, which may be a class's.
_OF_STORED = _BY_VALUE | {"SEQUENCE_LENGTH"} | _BY_KEYS | {"DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS"}
# What nobody replaces between one call and the next; looked at when a function is loaded, and not in every call.
_NEVER_SET_AGAIN = frozenset({"MODULE_MATCH", "CLASS_MATCH", "DUPLICATE_INPUT", "NN_MODULE"})
_FIXED_PARTS = (".__defaults__", ".__code__", ".__closure__", _BUILTINS)
# A guard on each key of a dictionary, beside the one on all of them.
_KEY_OF_DICT = re.compile(r"list\(dict\.keys\(.*\)\)\[\d+\]$")
_NUMBERED_BUILTINS = re.compile(_BUILTINS + r"_*\d*")
# A guard on the hooks of a module below the one that is called: what calls it looks at them (adapter.py).
_HOOKS_OF_A_PART = re.compile(r"L\['module'\](\._modules\['[^']*'\])*\._(forward|backward)(_pre)?_hooks(_with_kwargs)?")
_ALIAS = re.compile(r"G\['[^']+'\]")


@dataclass(frozen=True, slots=True)
class StandIn:
    """`expression`, over `L` (the call's module, args and kwargs) and `G` (modules by torch's alias), was `was`."""

    expression: str
    kind: str
    key: str | int | None
    was: Description
    is_stored: bool = False  # torch compares it in every call, with what it was when the function was loaded

    @property
    def is_local(self) -> bool:
        """Whether it is about a module or its inputs, so that it has to hold for each by itself."""
        return "L[" in self.expression

    @property
    def is_checked_per_call(self) -> bool:
        """Whether it is about what a program may change at any time, and torch does not compare it."""
        is_fixed = self.kind in _NEVER_SET_AGAIN or any(part in self.expression for part in _FIXED_PARTS)
        return not self.is_stored and not is_fixed


class Recorder:
    """A guard filter that keeps what torch can store, and writes down the rest in `stand_ins`; but for the hooks of a
    module's parts, of which there are four guards a part."""

    def __init__(self) -> None:
        self._found: dict[str, StandIn] = {}
        self._refusals: list[NotPrecompilable] = []

    def __call__(self, entries: Sequence[GuardFilterEntry]) -> Sequence[bool]:
        """Torch's `guard_filter_fn`: True for each guard that it is to store."""
        kept = []
        for entry in entries:
            if entry.guard_type == "EMPTY_NN_MODULE_HOOKS_DICT" and _HOOKS_OF_A_PART.fullmatch(
                _text(entry.orig_guard.name)
            ):
                kept.append(False)
                continue
            kinds = {entry.guard_type, *entry.derived_guard_types}
            is_stored = not entry.is_global and not kinds & _UNSUPPORTED
            kept.append(is_stored)
            if entry.guard_type in (_OF_STORED if is_stored else _ALL - _SAYS_NOTHING):
                self._record(entry, is_stored)
            elif not is_stored and entry.guard_type not in _SAYS_NOTHING:
                self._refusals.append(
                    NotPrecompilable(f"nothing can stand in for a guard of the kind {entry.guard_type}")
                )
        return kept

    def _record(self, entry: GuardFilterEntry, is_stored: bool) -> None:
        try:
            stand_in = _stand_in(entry, is_stored)
            self._found[repr(stand_in)] = stand_in
        except NotPrecompilable as error:  # torch would wrap it, were it raised here
            if not is_stored:
                self._refusals.append(error)

    def stand_ins(self) -> list[StandIn]:
        """What was written down.

        Raises:
            NotPrecompilable: for one of the guards nothing can stand in.
        """
        if self._refusals:
            raise self._refusals[0]
        return list(self._found.values())


def _text(name: Any) -> str:
    """A guard's name, or a source's: some of torch's versions have a method there."""
    return name() if callable(name) else str(name)


def _stand_in(entry: GuardFilterEntry, is_stored: bool) -> StandIn:
    """Raises NotPrecompilable where there is none."""
    guard = entry.orig_guard
    # torch numbers this name by how often it has compiled.
    name = _NUMBERED_BUILTINS.sub(_BUILTINS, guard.name)
    if entry.guard_type == "DUPLICATE_INPUT":
        return StandIn(f"{name} is {_other_name(guard)}", entry.guard_type, None, True)
    key = _parameter(entry)
    if not entry.has_value:
        raise NotPrecompilable(f"torch guards {guard.name}, which has no value ({entry.guard_type})")
    try:
        was = _description(entry.guard_type, entry.value, key)
    except NotDescribedError as error:
        raise NotPrecompilable(f"torch guards {guard.name} by identity, which is a {error}") from error
    return StandIn(name, entry.guard_type, key, was, is_stored)


def _other_name(guard: Any) -> str:
    """The second of two expressions for one object."""
    return _text(guard.create_fn.keywords["source_b"].name)


def _parameter(entry: GuardFilterEntry) -> str | int | None:
    """What a guard asks its value for: an attribute or a key."""
    if entry.guard_type not in _BY_CONTENT:
        return None
    create = entry.orig_guard.create_fn
    name, _ = _BY_CONTENT[entry.guard_type]
    given = create.keywords.get(name, *create.args[:1]) if isinstance(create, functools.partial) else None
    if isinstance(given, bytes):
        return repr(given)
    if not isinstance(given, str | int):
        raise NotPrecompilable(f"torch guards what {entry.orig_guard.name} contains: {given!r}")
    return given


def _description(kind: str, value: Any, key: Any) -> Description:
    if kind in _BY_CONTENT:
        _, contains = _BY_CONTENT[kind]
        return contains(value, _key_of(key))
    if kind in _BY_LENGTH:
        return [class_name(type(value)), len(value)]
    if kind in _BY_KEYS:
        return [class_name(type(value)), [describe(key) for key in value]]
    if kind == "DUPLICATE_INPUT":
        return bool(value)
    if kind == "TYPE_MATCH":
        return class_name(type(value))
    if kind in _BY_IDENTITY or kind in _BY_VALUE:
        return describe(value)
    raise NotPrecompilable(f"nothing can stand in for a guard of the kind {kind}")


def _key_of(text: Any) -> Any:
    is_bytes = isinstance(text, str) and text.startswith(("b'", 'b"')) and text[-1:] == text[1]
    return text[2:-1].encode() if is_bytes else text


def global_scope(modules: Mapping[str, str]) -> dict[str, Any]:
    """`G`: the modules that torch names by alias, and the builtins."""
    scope: dict[str, Any] = {alias: importlib.import_module(name) for alias, name in modules.items()}
    return {**scope, _BUILTINS: builtins.__dict__}


class Checks:
    """The stand-ins of one function in this process."""

    def __init__(self, stand_ins: Sequence[StandIn], scope: Mapping[str, Any]) -> None:
        self._modules = dict(scope)
        self._scope: dict[str, Any] = {**_get_closure_vars(), "G": self._modules}
        self._global = [stand_in for stand_in in stand_ins if not stand_in.is_local]
        self._local = [stand_in for stand_in in stand_ins if stand_in.is_local]

    def difference(self) -> str:
        """The first global that is not as it was, in words; empty if all are."""
        return next(filter(None, (self._difference(stand_in, {}) for stand_in in self._global)), "")

    def local_difference(self, inputs: Mapping[str, Any]) -> str:
        """The same for what is below a call's `inputs`: module, args and kwargs."""
        return next(filter(None, (self._difference(stand_in, inputs) for stand_in in self._local)), "")

    def _difference(self, stand_in: StandIn, inputs: Mapping[str, Any]) -> str:
        try:
            value = self._evaluate(stand_in, inputs)
            now = _description(stand_in.kind, value, stand_in.key)
        except Exception as error:  # the expression is over any object there is
            return f"{stand_in.expression} cannot be read: {error!r}"
        return "" if now == stand_in.was else f"{stand_in.expression} is {_short(now)}, was {_short(stand_in.was)}"

    def _evaluate(self, stand_in: StandIn, inputs: Mapping[str, Any]) -> Any:
        return eval(_compiled(stand_in.expression), {**self._scope, "L": inputs})

    def per_call(self, inputs: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], bool]:
        """A function of a call's inputs that says whether all that a program may change is still what it is now.

        Objects are compared by identity, numbers and text by type and value, containers by type, length and keys.
        """
        # A name is found faster than an item of a dictionary.
        names = {f"G['{alias}']": f"module_{number}" for number, alias in enumerate(self._modules)}
        values: dict[str, Any] = {f"module_{number}": found for number, found in enumerate(self._modules.values())}
        terms: dict[str, None] = {}
        for stand_in in (*self._global, *self._local):
            if stand_in.is_checked_per_call and not _KEY_OF_DICT.match(stand_in.expression):
                direct = _ALIAS.sub(lambda found: names.get(found[0], found[0]), stand_in.expression)
                value = self._evaluate(stand_in, inputs)
                terms[_term(stand_in, direct, value, values)] = None
        source = f"lambda L: {' and '.join(terms) or True}"
        check: Callable[[Mapping[str, Any]], bool] = eval(source, {**self._scope, **values})
        return check


def _term(stand_in: StandIn, expression: str, value: Any, values: dict[str, Any]) -> str:
    """A condition in Python: that `expression` is, as far as `stand_in` says, what `value` is. Adds to `values`."""

    def constant(what: Any) -> str:
        name = next((name for name, other in values.items() if other is what), f"was_{len(values)}")
        values[name] = what
        return name

    kind = f"type({expression}) is {constant(type(value))}"
    if stand_in.kind in _BY_CONTENT:
        _, contains = _BY_CONTENT[stand_in.kind]
        return f"{constant(contains)}({expression}, {_key_of(stand_in.key)!r}) is {stand_in.was}"
    if stand_in.kind in _BY_LENGTH:
        return f"{kind} and len({expression}) == {len(value)}"
    if stand_in.kind in _BY_KEYS:
        return f"{kind} and list({expression}) == {constant(list(value))}"
    if stand_in.kind == "TYPE_MATCH":
        return kind
    if type(value) in (float, complex):  # not a number is not equal to itself
        return f"{kind} and repr({expression}) == {constant(repr(value))}"
    if type(value) in (int, str, bytes):
        return f"{kind} and {expression} == {constant(value)}"
    if isinstance(value, tuple | list | set | frozenset):
        return f"{constant(describe)}({expression}) == {constant(describe(value))}"
    return f"{expression} is {constant(value)}"


@functools.cache
def _compiled(expression: str) -> types.CodeType:
    return compile(expression, "<guard>", "eval")


def _short(description: Description) -> str:
    return str(description)[:120]


def importable(value: Any) -> tuple[str, str]:
    """Module and qualified name under which another process finds the same object.

    Raises:
        NotPrecompilable: there is no such name.
    """
    if isinstance(value, types.ModuleType):
        return value.__name__, ""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and resolve(module, name) is value:
        return module, name
    raise NotPrecompilable(f"the compiled function uses {value!r}, which cannot be imported")


def resolve(module: str, name: str) -> Any:
    """What `importable` has named; None if it is not there."""
    try:
        found: Any = importlib.import_module(module)
        for part in filter(None, name.split(".")):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found
