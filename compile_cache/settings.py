"""The library's settings: read once from `COMPILE_CACHE_*` variables, strictly."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from compile_cache.errors import SettingsError

# The project's one version: pyproject.toml reads it, so that a copied folder has it too.
VERSION = "0.1.0"
PREFIX = "COMPILE_CACHE_"

STORE_SCHEMES = ("file", "s3", "gs", "az")
LAYER_SCHEMES = (*STORE_SCHEMES, "https", "http")

# Inductor calls the C++ compiler with one line of text. These characters would split it.
_NOT_IN_A_COMMAND = re.compile(r"[\s'\"\\]")
_LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a boot. The defaults suit `cog run` in a project folder. A variable's text is read by the type of
    its field."""

    store: str = ".compile-cache"
    layers: tuple[str, ...] = field(default=(), repr=False)  # a mirror's URL may have a password
    signing_key: str | None = field(default=None, repr=False)
    trusted_keys: tuple[str, ...] = ()
    dir: str = "/tmp/compile-cache"
    model_name: str | None = None
    model_version: str | None = None
    scope: Literal["regional", "whole", "off"] = "regional"
    # torch.compile's CUDA graphs belong to the thread that recorded them. Cog runs setup() and each run() on different
    # threads. Regional compilation also records one graph for each instance.
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    dynamic: bool | None = False
    cold_start: Literal["auto", "background", "block"] = "auto"
    unseen: Literal["auto", "background", "eager"] = "auto"
    setup_budget_s: float | None = None
    require: Literal["off", "hit"] = "off"
    leave_eager: tuple[str, ...] = ()
    graphs: tuple[str, ...] = ()
    publish: bool = True
    weights_timeout_s: float = 600.0
    restore_timeout_s: float = 60.0
    exit_budget_s: float = 7.0
    report: str | None = None

    def __post_init__(self) -> None:
        """Check that the settings can work together, and make paths absolute: the program may go to another folder.

        Raises:
            SettingsError: the directory's path cannot be used, or a store is invalid. The message names the variables.
        """
        problems = []
        if not os.path.isabs(self.dir):
            problems.append(
                f"{PREFIX}DIR={self.dir!r} is relative, but compiled code is looked up by its absolute path. "
                "Give an absolute path that is the same in every container."
            )
        if _NOT_IN_A_COMMAND.search(self.dir):
            problems.append(
                f"{PREFIX}DIR={self.dir!r} has a space, quote or backslash, and torch's C++ compiler commands fail "
                "with these. Give a path without them."
            )
        if not _is_store(self.store, STORE_SCHEMES):
            problems.append(
                f"{PREFIX}STORE={self.store!r}: give a local folder, s3://bucket/prefix, "
                "gs://bucket/prefix, az://container/prefix or off, without a user, a password or a query"
            )
        problems += [f"{PREFIX}LAYERS: {why}" for one in self.layers if (why := layer_problem(one, self.trusted_keys))]
        if self.report and (self.report.endswith("/") or os.path.isdir(self.report)):
            problems.append(f"{PREFIX}REPORT={self.report!r} is a folder: give a file's path")
        if problems:
            raise SettingsError("; ".join(problems))
        object.__setattr__(self, "store", _from_here(self.store))
        object.__setattr__(self, "layers", tuple(map(_from_here, self.layers)))
        object.__setattr__(self, "report", self.report and os.path.abspath(self.report))

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Read every `COMPILE_CACHE_*` variable. An empty variable counts as not set.

        Raises:
            SettingsError: a variable is unknown, or a value is invalid. One message names all of them.
        """
        given = {name: value for name, value in environ.items() if name.startswith(PREFIX) and value.strip()}
        kinds = get_type_hints(cls, include_extras=True)
        known = {PREFIX + name.upper(): name for name in kinds}
        values: dict[str, Any] = {}
        problems = [f"{name} is not a setting; did you mean {_nearest(name, known)}?" for name in given.keys() - known]
        for name in sorted(given.keys() & known.keys()):
            try:
                values[known[name]] = _parsed(given[name].strip(), kinds[known[name]])
            except ValueError as error:
                problems.append(f"{name}={given[name]!r}: {error}")
        try:
            settings = cls(**values)
            if settings.require == "hit" and not settings.enabled:
                problems.append(f"{PREFIX}REQUIRE=hit, but {PREFIX}SCOPE=off restores nothing. Unset one of them.")
            if settings.require == "hit" and settings.graphs:
                problems.append(
                    f"{PREFIX}REQUIRE=hit, but {PREFIX}GRAPHS names what is not precompiled. Unset one of them."
                )
        except SettingsError as error:
            problems.append(str(error))
        if problems:
            raise SettingsError("; ".join(sorted(problems)))
        return settings

    @property
    def may_publish(self) -> bool:
        """Whether a boot publishes. It does not if packs must be signed and there is no signing key."""
        return self.publish and self.store != "off" and not (self.trusted_keys and not self.signing_key)

    @property
    def enabled(self) -> bool:
        """Whether anything is compiled, restored or published. Nothing is if the scope is `off`."""
        return self.scope != "off"


def split_url(url: str) -> tuple[str, str]:
    """The scheme and the rest of a URL. A local path has the scheme `file`."""
    scheme, separator, rest = url.partition("://")
    return (scheme, rest) if separator else ("file", url)


def layer_problem(url: str, trusted_keys: Sequence[str]) -> str:
    """Why a layer that is read under these keys cannot have this URL; empty if it can."""
    scheme, rest = split_url(url)
    host = rest.partition("/")[0].rpartition("@")[2]
    if url == "off" or not _is_store(url, LAYER_SCHEMES):
        return f"{url!r} is neither a local folder nor the URL of a store or of a mirror"
    if scheme == "http" and not trusted_keys and not _LOOPBACK.fullmatch(host):
        return (
            f"anybody on the network can change code from {url!r}, which is executed here. "
            f"Use https://, or set {PREFIX}TRUSTED_KEYS."
        )
    return ""


def _from_here(url: str) -> str:
    """The absolute path of a local store; any other URL as it is."""
    return url if url == "off" or "://" in url else os.path.abspath(url)


def _is_store(url: str, schemes: tuple[str, ...]) -> bool:
    scheme, rest = split_url(url)
    if scheme not in schemes:
        return False
    if scheme == "file":
        return bool(rest.strip()) and not re.match(r"[a-z0-9]{2,}:/", rest)
    authority = rest.partition("/")[0].strip()
    # Buckets and containers have no user. The colon is that of a password with a slash in it.
    is_refused = {"?", "#"} & set(rest) or (scheme in STORE_SCHEMES and {"@", ":"} & set(authority))
    return bool(authority) and not is_refused


def _parsed(text: str, kind: Any) -> Any:
    """The value of a variable, of the type of its field.

    Raises:
        ValueError: it has no such value.
    """
    if get_origin(kind) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if (text, kind) == ("auto", bool | None):  # torch.compile's `dynamic=None`: dynamic once a second size appears
        return None
    import msgspec  # which takes longer than to import all that a boot begins with

    try:
        value = msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        named = ("true", "false") if bool in (kind, *get_args(kind)) else get_args(kind)
        choices = f"; give one of {', '.join(named)}" if str in map(type, named) else ""
        raise ValueError(f"{error}{choices}") from error
    if isinstance(value, float) and not 0 <= value < 86_400:
        raise ValueError("must be seconds between 0 and 86400")
    return value


def _nearest(name: str, known: Mapping[str, str]) -> str:
    from difflib import get_close_matches

    return get_close_matches(name, known, n=1, cutoff=0)[0]
