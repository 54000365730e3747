"""Records the guards that torch cannot store with a compiled function, and checks them where it is loaded.

A guard names a value that must not change after tracing. torch stores guards on values below the function's inputs. It
drops guards on globals, and guards on an object's identity, which means nothing in another process. When it restores a
guard on a class or a module, it compares with the present value, not with the traced one. So each such guard is
recorded here as an expression and a description of its value, and compared again where the function is loaded. A
function with a guard that cannot be recorded is not stored.
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

import torch

from compile_cache.errors import NotPrecompilable
from compile_cache.inductor.adapter import NOT_STORED, GuardFilterEntry, guard_scope
from compile_cache.inductor.describe import Description, NotDescribedError, class_name, describe

_BUILTINS = "__builtins_dict__"  # the beginning of torch's name for them

# The kinds of guards by what they demand of their expression's value.
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
# Kinds that hold if torch and its modules are the same, or that demand nothing of a value.
_SAYS_NOTHING = frozenset({"WEAKREF_ALIVE"})
# The kinds of stored guards that are compared here too: their values may belong to a class.
_OF_STORED = _BY_VALUE | {"SEQUENCE_LENGTH"} | _BY_KEYS | {"DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS"}
# Kinds whose values nobody replaces between two calls. They are checked when a function is loaded, not in every call.
_NEVER_SET_AGAIN = frozenset({"MODULE_MATCH", "CLASS_MATCH", "DUPLICATE_INPUT", "NN_MODULE"})
# A guard on one key of a dictionary. Another guard covers all keys.
_KEY_OF_DICT = re.compile(r"list\(dict\.keys\(.*\)\)\[\d+\]$")
_NUMBERED_BUILTINS = re.compile(_BUILTINS + r"_*\d*")
# A guard on the hooks of a submodule. The call itself checks them (precompiled.py).
_HOOKS_OF_A_PART = re.compile(r"L\['module'\](\._modules\['[^']*'\])*\._(forward|backward)(_pre)?_hooks(_with_kwargs)?")
_ALIAS = re.compile(r"G\['[^']+'\]")
# A function's default, or the tuple of all defaults. If each default is immutable, only the whole tuple can change.
_DEFAULT = re.compile(r"(.*\.__defaults__)(\[\d+\])?$")
_UNCHANGING = (type(None), bool, int, float, complex, str, bytes, type, types.FunctionType, torch.dtype, torch.device)
# torch stores a function without its keyword defaults.
_NOT_STORED_PART = ".__kwdefaults__"


@dataclass(frozen=True, slots=True)
class RecordedGuard:
    """`expression`, over `L` (the call's module, args and kwargs) and `G` (modules by torch's alias), was `was`."""

    expression: str
    kind: str
    key: str | int | None
    was: Description
    is_stored: bool = False  # in every call, torch compares the value with its value at loading

    @property
    def is_local(self) -> bool:
        """Whether the guard is about a module or its inputs, and so must hold for each of them."""
        return "L[" in self.expression

    @property
    def is_checked_per_call(self) -> bool:
        """Whether the program may change the value at any time, and torch does not compare it. torch takes zeros of
        both signs for equal."""
        is_fixed = self.kind in _NEVER_SET_AGAIN or _BUILTINS in self.expression
        is_compared = self.is_stored and self.was not in (["float", "0.0"], ["float", "-0.0"])
        return not (is_compared or is_fixed or _KEY_OF_DICT.match(self.expression))


class Recorder:
    """A guard filter that keeps the guards that torch can store, and records the others.

    Two kinds are left out. precompiled.py checks the hooks of a module's parts, which have four guards a part. With
    `on_gpu`, torch's guard on its global state goes: it has the number of threads, and `switches` has the rest.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._left_out = {"GLOBAL_STATE"} if on_gpu else set()
        self._found: dict[str, RecordedGuard] = {}
        self._refusals: list[NotPrecompilable] = []

    def __call__(self, entries: Sequence[GuardFilterEntry]) -> Sequence[bool]:
        """torch's `guard_filter_fn`: True for each guard that torch shall store."""
        return [self._is_kept(entry) for entry in entries]

    def _is_kept(self, entry: GuardFilterEntry) -> bool:
        name, kind = entry.orig_guard.name, entry.guard_type
        if kind in self._left_out or (kind == "EMPTY_NN_MODULE_HOOKS_DICT" and _HOOKS_OF_A_PART.fullmatch(name)):
            return False
        kinds = {kind, *entry.derived_guard_types}
        is_stored = not entry.is_global and not kinds & NOT_STORED and _NOT_STORED_PART not in name
        if kind in (_OF_STORED if is_stored else _ALL - _SAYS_NOTHING):
            self._record(entry, is_stored)
        elif not is_stored and kind not in _SAYS_NOTHING:
            self._refusals.append(NotPrecompilable(f"a guard of the kind {kind} cannot be stored"))
        return is_stored

    def _record(self, entry: GuardFilterEntry, is_stored: bool) -> None:
        try:
            guard = _recorded(entry, is_stored)
            self._found[repr(guard)] = guard
        except NotPrecompilable as error:  # raised here, torch would wrap it
            if not is_stored:
                self._refusals.append(error)

    def guards(self) -> list[RecordedGuard]:
        """The recorded guards.

        Raises:
            NotPrecompilable: a guard can neither be stored nor recorded.
        """
        if self._refusals:
            raise self._refusals[0]
        return list(self._found.values())


def _recorded(entry: GuardFilterEntry, is_stored: bool) -> RecordedGuard:
    """The record of a guard. Raises NotPrecompilable if there can be none."""
    guard = entry.orig_guard
    # torch appends the number of compiles to this name.
    name = _NUMBERED_BUILTINS.sub(_BUILTINS, guard.name)
    if entry.guard_type == "DUPLICATE_INPUT":
        return RecordedGuard(f"{name} is {_other_name(guard)}", entry.guard_type, None, True)
    key = _parameter(entry)
    if not entry.has_value:
        raise NotPrecompilable(f"torch guards {guard.name}, which has no value ({entry.guard_type})")
    try:
        was = _description(entry.guard_type, entry.value, key)
    except NotDescribedError as error:
        raise NotPrecompilable(f"torch guards {guard.name} by identity, which is a {error}") from error
    return RecordedGuard(name, entry.guard_type, key, was, is_stored)


def _other_name(guard: Any) -> str:
    """The other expression for the same object."""
    return str(guard.create_fn.keywords["source_b"].name)


def _parameter(entry: GuardFilterEntry) -> str | int | None:
    """The attribute or the key that a guard asks for."""
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
    raise NotPrecompilable(f"a guard of the kind {kind} cannot be stored")


def _key_of(text: Any) -> Any:
    is_bytes = isinstance(text, str) and text.startswith(("b'", 'b"')) and text[-1:] == text[1]
    return text[2:-1].encode() if is_bytes else text


def global_scope(modules: Mapping[str, str]) -> dict[str, Any]:
    """The scope `G`: the modules by torch's aliases, and the builtins."""
    scope: dict[str, Any] = {alias: importlib.import_module(name) for alias, name in modules.items()}
    return {**scope, _BUILTINS: builtins.__dict__}


class Checks:
    """The recorded guards of one function in this process."""

    def __init__(self, guards: Sequence[RecordedGuard], scope: Mapping[str, Any]) -> None:
        self._modules = dict(scope)
        self._scope: dict[str, Any] = {**guard_scope(), "G": self._modules}
        self._global = [guard for guard in guards if not guard.is_local]
        self._local = [guard for guard in guards if guard.is_local]

    def difference(self) -> str:
        """The first changed global, in words; empty if none changed."""
        return next(filter(None, (self._difference(guard, {}) for guard in self._global)), "")

    def local_difference(self, inputs: Mapping[str, Any]) -> str:
        """The first change below a call's `inputs` (module, args and kwargs); empty if none changed."""
        return next(filter(None, (self._difference(guard, inputs) for guard in self._local)), "")

    def _difference(self, guard: RecordedGuard, inputs: Mapping[str, Any]) -> str:
        try:
            now = _description(guard.kind, self._evaluate(guard.expression, inputs), guard.key)
        except Exception as error:  # the expression may read any object
            return f"{guard.expression} cannot be read: {error!r}"
        return "" if now == guard.was else f"{guard.expression} is {_short(now)}, was {_short(guard.was)}"

    def _evaluate(self, expression: str, inputs: Mapping[str, Any]) -> Any:
        return eval(_compiled(expression), {**self._scope, "L": inputs})

    def per_call(self, inputs: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], bool]:
        """A function of a call's inputs: whether all values that a program may change are still as now.

        It compares objects by identity, numbers and text by type and value, containers by type, length and keys.
        """
        guards = [guard for guard in (*self._global, *self._local) if guard.is_checked_per_call]
        values = {guard.expression for guard in guards if guard.kind in _BY_VALUE}
        condition = _Condition(self._modules)
        # A function comes before its parts.
        for guard in sorted(guards, key=lambda guard: len(guard.expression)):
            if guard.kind in _BY_CONTENT and guard.expression in values:  # the whole value is compared
                continue
            value = self._evaluate(guard.expression, inputs)
            default = _DEFAULT.match(guard.expression)
            if default and (not default[2] or isinstance(value, _UNCHANGING)):
                condition.add_same(default[1], self._evaluate(default[1], inputs))
            else:
                condition.add(guard, value)
        check: Callable[[Mapping[str, Any]], bool] = eval(condition.source(), {**self._scope, **condition.values})
        return check


class _Condition:
    """A Python condition over a call's inputs `L`, and the `values` of its names."""

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {f"module_{number}": found for number, found in enumerate(modules.values())}
        # Looking up a name is faster than a dictionary's item or a chain of attributes.
        self._names = {f"G['{alias}']": f"module_{number}" for number, alias in enumerate(modules)}
        self._terms: dict[str, None] = {}

    def source(self) -> str:
        """The condition as a function."""
        return f"lambda L: {' and '.join(self._terms) or True}"

    def add(self, guard: RecordedGuard, value: Any) -> None:
        """Demand that the guard's expression equals `value`, as far as the guard compares it."""
        expression = self._shortened(guard.expression)
        kind = f"type({expression}) is {self._constant(type(value))}"
        if guard.kind in _BY_CONTENT:
            _, contains = _BY_CONTENT[guard.kind]
            term = f"{self._constant(contains)}({expression}, {_key_of(guard.key)!r}) is {guard.was}"
        elif guard.kind in _BY_LENGTH:
            term = f"{kind} and len({expression}) == {len(value)}"
        elif guard.kind in _BY_KEYS:
            term = f"{kind} and list({expression}) == {self._constant(list(value))}"
        elif guard.kind == "TYPE_MATCH":
            term = kind
        elif type(value) in (float, complex):  # NaN is not equal to itself
            same = f"{expression} is {self._constant(value)}"
            term = f"({same} or {kind} and repr({expression}) == {self._constant(repr(value))})"
        elif type(value) in (int, str, bytes):
            term = f"{kind} and {expression} == {self._constant(value)}"
        elif type(value) in (tuple, list, set, frozenset) and all(type(part) is str for part in value):
            term = f"{kind} and {expression} == {self._constant(type(value)(value))}"
        elif isinstance(value, tuple | list | set | frozenset):
            term = f"{self._constant(describe)}({expression}) == {self._constant(describe(value))}"
        else:
            self.add_same(guard.expression, value)
            return
        self._terms[term] = None

    def add_same(self, expression: str, value: Any) -> None:
        """Demand that the expression is this very object, and that a function has the same code."""
        name = self._constant(value)
        self._terms[f"{self._shortened(expression)} is {name}"] = None
        if isinstance(value, types.FunctionType):
            self._terms[f"{name}.__code__ is {self._constant(value.__code__)}"] = None
            self._names.setdefault(expression, name)

    def _constant(self, value: Any) -> str:
        name = next((name for name, other in self.values.items() if other is value), f"was_{len(self.values)}")
        self.values[name] = value
        return name

    def _shortened(self, expression: str) -> str:
        """The same expression, shortened to begin at an object that an earlier term has checked."""
        ends = (end for end in range(len(expression) - 1, 0, -1) if expression[end] in ".[")
        known = next((end for end in ends if expression[:end] in self._names), 0)
        shortened = self._names[expression[:known]] + expression[known:] if known else expression
        return _ALIAS.sub(lambda found: self._names.get(found[0], found[0]), shortened)


@functools.cache
def _compiled(expression: str) -> types.CodeType:
    return compile(expression, "<guard>", "eval")


def _short(description: Description) -> str:
    return str(description)[:120]
