"""Records the guards that torch cannot store with a compiled function, and checks them where it is loaded.

A guard names a value that must not change after tracing. torch stores guards on values below the function's inputs. It
drops guards on globals, and guards on an object's identity, which means nothing in another process. When it restores a
guard on a class or a module, it compares with the present value, not with the traced one. So each such guard is
recorded here as an expression and a description of its value, and compared again where the function is loaded. A
function with a guard that cannot be recorded is not stored.

torch has no guard on `x is y`. So the record says which of the objects that the traced code read are one object.

A text may be a secret. So all guards on texts are recorded here, with the digest of the text in place of it.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import operator
import re
import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compile_cache.calls.description import Description, NotDescribedError, class_name, describe
from compile_cache.calls.torch_call import call_region
from compile_cache.errors import ArtifactError
from compile_cache.inductor.aot import NOT_STORED, guard_scope, without_texts
from compile_cache.key.environment import digest

# torch's `GuardFilterEntry` (torch/_dynamo/types.py): a guard, its kind, and the value of its expression.
GuardFilterEntry = Any

# A call's module, args and kwargs by these names, and a check of them.
Inputs = Mapping[str, Any]
Check = Callable[[Inputs], bool]

# The kinds of guards by what they demand of their expression's value.
_BY_IDENTITY = frozenset(
    {"ID_MATCH", "FUNCTION_MATCH", "CLOSURE_MATCH", "CLASS_MATCH", "MODULE_MATCH", "BUILTIN_MATCH", "NN_MODULE"}
)
_BY_VALUE = frozenset({"CONSTANT_MATCH", "CONSTANT_SUBCLASS_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH"})
_BY_LENGTH = frozenset({"SEQUENCE_LENGTH", "EMPTY_NN_MODULE_HOOKS_DICT"})
_BY_KEYS = frozenset({"DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"})
_BY_CONTENT: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "HASATTR": ("attr", hasattr),
    "NOT_PRESENT_IN_GENERIC_DICT": ("attr", lambda value, attr: attr in getattr(value, "__dict__", ())),
    "DICT_CONTAINS": ("key", dict.__contains__),
    "DICT_NOT_CONTAINS": ("key", dict.__contains__),
    "SET_CONTAINS": ("key", operator.contains),
    "SET_NOT_CONTAINS": ("key", operator.contains),
}
_ALL = _BY_IDENTITY | _BY_VALUE | _BY_LENGTH | _BY_KEYS | _BY_CONTENT.keys() | {"TYPE_MATCH"}
# A kind of this library: which of several objects are one.
_SAME_OBJECTS = "SAME_OBJECTS"
# Kinds that demand nothing of a value, or that `_SAME_OBJECTS` includes.
_SAYS_NOTHING = frozenset({"WEAKREF_ALIVE", "DUPLICATE_INPUT"})
# The kinds of stored guards that are compared here too: their values may belong to a class.
_OF_STORED = _BY_VALUE | {"SEQUENCE_LENGTH"} | _BY_KEYS | {"DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS"}
# Kinds whose values nobody replaces between two calls. They are checked when a function is loaded, not in every call.
_NEVER_SET_AGAIN = frozenset({"MODULE_MATCH", "CLASS_MATCH", "NN_MODULE"})
_KEY_BY_PLACE = "list(dict.keys("
# A guard on one key of a dictionary. Another guard covers all keys.
_KEY_OF_DICT = re.compile(r"list\(dict\.keys\(.*\)\)\[\d+\]$")
# A call's own containers, a module's dictionaries of parts and hooks, and expressions that make an object: nobody asks
# which object these are.
_WITHOUT_IDENTITY = re.compile(r"L\['k?w?args'\]|.*(\)|\b_(modules|parameters|buffers|\w*_hooks\w*)('\])?)")
# An item of a class's dictionary, which torch copies for it. The copy takes most of a microsecond.
_CLASS_DICT = re.compile(r"dict\((type\((?:(?!__dict__).)*\)(?:\.__mro__\[\d+\])?\.__dict__)\)\[")
# The module, or a part of it; and the hooks of one.
_PART = re.compile(r"L\['module'\](\._modules\['[^']*'\])*")
_HOOKS_OF_A_PART = re.compile(rf"{_PART.pattern}\._(forward|backward)(_pre)?_hooks(_with_kwargs)?")
# torch's name for a module or another scope; in a record, a module's own name.
_GLOBAL = re.compile(r"\bG\['([^']+)'\]")
_NO_MODULE = "___unnamed_scope"
_BUILTINS = "G['builtins']"
# A function's default, or the tuple of all defaults. If each default is immutable, only the whole tuple can change.
_DEFAULT = re.compile(r"(.*\.__defaults__)(\[\d+\])?$")
_UNCHANGING = (type(None), bool, int, float, complex, str, bytes, type, types.FunctionType, torch.dtype, torch.device)
# torch stores a function without its keyword defaults.
_NOT_STORED_PART = ".__kwdefaults__"


@dataclass(frozen=True, slots=True)
class RecordedGuard:
    """A value of `expression`, over `L` (the call's module, args and kwargs) and `G` (modules by name). `was` is the
    digest of its description."""

    expression: str
    kind: str
    key: Any  # for which attribute or key it asks: a text, a number or bytes
    was: str
    is_stored: bool = False  # in every call, torch compares the value with its value at loading

    @property
    def is_local(self) -> bool:
        """Whether the guard is about a module or its inputs, and so must hold for each of them."""
        return "L[" in self.expression

    @property
    def is_checked_per_call(self) -> bool:
        """Whether the program may change the value at any time, and torch does not compare it."""
        is_fixed = self.kind in _NEVER_SET_AGAIN or _BUILTINS in self.expression
        return not self.is_stored and not is_fixed and not _KEY_OF_DICT.match(self.expression)


class Recorder:
    """A guard filter that keeps the guards that torch can store, and records the others.

    What is checked anyway is left out, a third of a whole model's guards. `Parts` (calls/module_state.py) checks in
    each call that no part has a hook or a `forward` of its own. Of guards that demand the same, one is kept. That two
    names are one object is recorded here; torch guards it for tensors alone. With `on_gpu`, torch's guard on its global
    state goes: it has the number of threads, and `switches` has the rest.
    """

    def __init__(self, on_gpu: bool, salt: str) -> None:
        self._left_out = {"GLOBAL_STATE"} if on_gpu else set()
        self._salt = salt
        self._found: dict[RecordedGuard, None] = {}
        self._refusals: list[ArtifactError] = []
        self._aliases: dict[str, str] = {}
        self._compared: set[str] = set()
        self._met: set[tuple[Any, ...]] = set()
        # By the identity of a function's globals, the expression for the function.
        self._functions: dict[int, str] = {}
        # By torch's expression for a key by its place in a dictionary: the dictionary's expression, it, and the key.
        self._keys: dict[str, tuple[str, Any, Any]] = {}

    def alias_guard(self, make_guard: Callable[..., Any], source: Any, other: Any) -> Any:
        """torch's guard on an object that has two sources, which are noted. torch makes one only if both are inputs, or
        both globals."""
        if other and other != source:
            self._aliases[source.name] = other.name
        return make_guard(source, other)

    def __call__(self, entries: Sequence[GuardFilterEntry]) -> Sequence[bool]:
        """torch's `guard_filter_fn`: True for each guard that torch shall store."""
        values = {entry.orig_guard.name: entry.value for entry in entries if entry.has_value}
        functions = {name: value for name, value in values.items() if isinstance(value, types.FunctionType)}
        self._functions = {id(f.__globals__): name for name, f in functions.items() if _NO_MODULE not in name}
        self._keys = {}
        by_place = " ".join(name for name in values if _KEY_BY_PLACE in name)
        for name, value in values.items():
            if f"{_KEY_BY_PLACE}{name}))" in by_place and _has_plain_keys(value):
                for number, key in enumerate(value):
                    self._keys[f"{_KEY_BY_PLACE}{name}))[{number}]"] = name, value, key
        aliases = {name: values[other] for name, other in self._aliases.items() if other in values}
        asked = {*aliases, *(self._aliases[name] for name in aliases)}
        alike = defaultdict[type, dict[str, Any]](dict)
        for name, value in {**aliases, **values}.items():
            is_asked = name in asked and isinstance(value, nn.Module)
            if (is_asked or _has_identity(value)) and not _WITHOUT_IDENTITY.fullmatch(name):
                alike[type(value)][name] = value
        for objects in alike.values():
            if len(objects) > 1:
                self._record(names := f"({', '.join(objects)})", _SAME_OBJECTS, tuple(objects.values()))
                self._compared.update(objects if _BUILTINS not in names else ())
        return [self._is_kept(entry) for entry in entries]

    def _is_kept(self, entry: GuardFilterEntry) -> bool:
        name, kind = entry.orig_guard.name, entry.guard_type
        if kind in self._left_out or self._is_checked_anyway(name, kind, entry):
            return False
        kinds = {kind, *entry.derived_guard_types}
        is_stored = not entry.is_global and not kinds & NOT_STORED and _NOT_STORED_PART not in name
        if kind == "SEQUENCE_LENGTH" and not is_stored and _has_plain_keys(entry.value):
            return False  # torch counts the keys because it finds them by their places
        if kind in _BY_VALUE:  # a text may be a secret, and torch takes for equal what `==` does
            is_stored = is_stored and not _has_equals(entry.value) and without_texts(entry.value) == entry.value
        if kind in (_OF_STORED if is_stored else _ALL):
            self._record(name, kind, entry.value, entry, is_stored)
        elif not is_stored and kind not in _SAYS_NOTHING:
            self._refusals.append(ArtifactError(f"a guard of the kind {kind} cannot be stored"))
        return is_stored

    def _is_checked_anyway(self, name: str, kind: str, entry: GuardFilterEntry) -> bool:
        if kind == "EMPTY_NN_MODULE_HOOKS_DICT":
            return _HOOKS_OF_A_PART.fullmatch(name) is not None
        if kind == "DUPLICATE_INPUT":
            other = getattr(entry.orig_guard.create_fn, "keywords", {}).get("source_b")
            return {name, getattr(other, "name", None)} <= self._compared
        if kind not in _BY_CONTENT and kind not in _BY_VALUE:
            return False
        given = _given(entry)
        demand = (name, kind, type(given), given) if kind in _BY_CONTENT else (name,)
        is_met = demand in self._met
        self._met.add(demand)
        return is_met or ((kind, given) == ("NOT_PRESENT_IN_GENERIC_DICT", "forward") and bool(_PART.fullmatch(name)))

    def _record(
        self, name: str, kind: str, value: Any, entry: GuardFilterEntry | None = None, is_stored: bool = False
    ) -> None:
        try:
            key = _given(entry) if entry else None
            if name in self._keys:
                (name, value, key), kind = self._keys[name], "DICT_CONTAINS"
            if kind in _BY_CONTENT and not isinstance(key, str | int | bytes):
                raise ArtifactError(f"torch guards what {name} contains: {key!r}")
            expression = self._in_modules(name)
            was = digest([self._salt, expression, _description(kind, value, key)])
            self._found[RecordedGuard(expression, kind, key, was, is_stored)] = None
        except (NotDescribedError, ArtifactError) as error:  # raised here, torch would wrap it
            is_told = isinstance(error, ArtifactError)
            reason = str(error) if is_told else f"torch guards {name} by identity, which is a {error}"
            self._refusals += [] if is_stored else [ArtifactError(reason)]

    def _in_modules(self, expression: str) -> str:
        """The expression with the names of modules, and with keys in place of their places in a dictionary, which other
        code may fill too. torch's names for scopes have numbers of this process."""
        for place in sorted(self._keys, key=len, reverse=True):  # a key's dictionary may be named by another key
            expression = expression.replace(place, repr(self._keys[place][-1]))
        return _GLOBAL.sub(lambda found: self._scope(call_region.__globals__.get(found[1])), expression)

    def _scope(self, scope: Any) -> str:
        """The expression for a scope: a module, Python's builtins, or the globals of a function that `exec` made, such
        as a named tuple's."""
        if isinstance(scope, types.ModuleType):
            return f"G['{scope.__name__}']"
        if scope is vars(builtins):
            return f"{_BUILTINS}.__dict__"
        if name := self._functions.get(id(scope)):
            return f"{self._in_modules(name)}.__globals__"
        raise ArtifactError("it reads a global variable of code that belongs to no module")

    def guards(self) -> list[RecordedGuard]:
        """The recorded guards.

        Raises:
            ArtifactError: a guard can neither be stored nor recorded.
        """
        if self._refusals:
            raise self._refusals[0]
        return list(self._found)


def _has_plain_keys(value: Any) -> bool:
    return isinstance(value, dict) and all(type(key) in (str, int) for key in value)


def _has_equals(value: Any) -> bool:
    """Whether another value is equal to this one and not the same: a zero of the other sign, or in a tuple a number of
    another type. Tuples of integers are left to torch: a module of convolutions has hundreds."""
    if type(value) in (tuple, list, set, frozenset):
        return any(type(part) in (bool, float, complex) or _has_equals(part) for part in value)
    return type(value) in (float, complex) and value == 0


def _given(entry: GuardFilterEntry) -> Any:
    """The attribute or the key that a guard asks for; None for other kinds of guards."""
    name, _ = _BY_CONTENT.get(entry.guard_type, ("", None))
    create = entry.orig_guard.create_fn
    return create.keywords.get(name, *create.args[:1]) if name and isinstance(create, functools.partial) else None


def _description(kind: str, value: Any, key: Any) -> Description:
    if kind in _BY_CONTENT:
        _, contains = _BY_CONTENT[kind]
        return contains(value, key)
    if kind in _BY_LENGTH:
        return [class_name(type(value)), len(value)]
    if kind in _BY_KEYS:
        return [class_name(type(value)), [describe(key) for key in value]]
    if kind == _SAME_OBJECTS:
        return _numbers(value)
    if kind == "TYPE_MATCH":
        return class_name(type(value))
    return describe(value)


def _numbers(values: tuple[Any, ...]) -> list[int]:
    """For each value, the number of the first that is the same object."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(id(value), number) for number, value in enumerate(values)]


def _has_identity(value: Any) -> bool:
    """Whether code may ask which object this is, besides a module's part and a tensor."""
    try:
        return describe(value) is None or isinstance(value, list | set)
    except NotDescribedError:
        return not isinstance(value, nn.Module | torch.Tensor)


def modules_of(guards: Sequence[RecordedGuard]) -> set[str]:
    """The names of the modules whose values the guards compare."""
    return {name for guard in guards for name in _GLOBAL.findall(guard.expression)}


class Checks:
    """The recorded guards of one function in this process."""

    def __init__(self, guards: Sequence[RecordedGuard], salt: str) -> None:
        self._salt = salt
        self._modules = {name: importlib.import_module(name) for name in sorted(modules_of(guards))}
        self._scope: dict[str, Any] = {**guard_scope(), "G": self._modules}
        self._global = [guard for guard in guards if not guard.is_local]
        self._local = [guard for guard in guards if guard.is_local]
        # By the identity of a guard, the description that it met: the digest of an equal one need not be made.
        self._met: dict[int, Description] = {}

    def difference(self, inputs: Inputs | None = None) -> str:
        """The first change below a call's `inputs` (module, args and kwargs), or without them the first changed global;
        empty if none changed."""
        scope = {**self._scope, "L": inputs}
        for guard in self._global if inputs is None else self._local:
            try:
                now = _description(guard.kind, eval(_compiled(guard.expression), scope), guard.key)
            except Exception as error:  # the expression may read any object
                return f"{guard.expression} cannot be read: {error!r}"
            known = self._met.get(id(guard))
            if known is None or known != now:
                if digest([self._salt, guard.expression, now]) != guard.was:
                    return f"{guard.expression} has changed"
                self._met[id(guard)] = now
        return ""

    def per_call(self, inputs: Inputs) -> Check:
        """A function of a call's inputs: whether all values that a program may change are still as now.

        It compares objects by identity, numbers and text by type and value, containers by type, length and keys.
        """
        guards = [guard for guard in (*self._global, *self._local) if guard.is_checked_per_call]
        values = {guard.expression for guard in guards if guard.kind in _BY_VALUE}
        condition, scope = _Condition(self._modules), {**self._scope, "L": inputs}
        # A function comes before its parts.
        for guard in sorted(guards, key=lambda guard: len(guard.expression)):
            if guard.kind in _BY_CONTENT and guard.expression in values:  # the whole value is compared
                continue
            value = eval(_compiled(guard.expression), scope)
            default = _DEFAULT.match(guard.expression)
            if default and (not default[2] or isinstance(value, _UNCHANGING)):
                condition.add_same(default[1], eval(_compiled(default[1]), scope))
            else:
                condition.add(guard, value)
        check: Check = eval(condition.source(), {**self._scope, **condition.values})
        return check


class _Condition:
    """A Python condition over a call's inputs `L`, and the `values` of its names."""

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {f"module_{number}": found for number, found in enumerate(modules.values())}
        # Looking up a name is faster than a dictionary's item or a chain of attributes.
        self._names = {f"G['{name}']": f"module_{number}" for number, name in enumerate(modules)}
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
            term = f"{self._constant(contains)}({expression}, {guard.key!r}) is {contains(value, guard.key)}"
        elif guard.kind == _SAME_OBJECTS:
            term = f"{self._constant(_numbers)}({expression}) == {_numbers(value)}"
        elif guard.kind in _BY_LENGTH:
            term = f"{kind} and len({expression}) == {len(value)}"
        elif guard.kind in _BY_KEYS:
            term = f"{kind} and list({expression}) == {self._constant(list(value))}"
        elif guard.kind == "TYPE_MATCH":
            term = kind
        elif type(value) in (float, complex):  # NaN is not equal to itself
            same = f"{expression} is {self._constant(value)}"
            term = f"({same} or {kind} and repr({expression}) == {self._constant(repr(value))})"
        elif type(value) is int or isinstance(value, str | bytes):
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
        return _CLASS_DICT.sub(r"\1[", _GLOBAL.sub(lambda found: self._names.get(found[0], found[0]), shortened))


@functools.cache
def _compiled(expression: str) -> types.CodeType:
    return compile(expression, "<guard>", "eval")
