"""The records of a boot: for a kind of call, functions compiled ahead of time, or a note that its graphs are stored.

A group is one kind of call of a class with everything else that is known before a call: the class, its structure,
options, versions, torch's switches. A function of a group also depends on the traced code and its guards. It may fit
only some of the group's modules.

Importing this module fails if importing `aot.py` fails.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from compile_cache.calls.description import Description, NotDescribedError, class_name, structure_digest
from compile_cache.calls.spec import RECOMPILE_LIMIT, CallSpec, on_gpu
from compile_cache.calls.torch_call import Call
from compile_cache.errors import ArtifactError, log
from compile_cache.files import replacing
from compile_cache.inductor.function import Precompiled, Record, compile_ahead, sources_digest, why_not_ahead
from compile_cache.inductor.function_file import (
    GRAPHS,
    PRECOMPILED,
    SUFFIX,
    Mark,
    marks_of,
    read_artifact,
    write_artifact,
)
from compile_cache.inductor.torch_state import describe_switches, modes_of, options_digest, switches
from compile_cache.key.environment import digest, installed_version
from compile_cache.settings import Settings

_MOST_PREFETCHED = 256
# Records of graphs of one kind of call. Each but the last did not hold.
_MOST_RECORDS = 8


@dataclass(frozen=True, slots=True)
class GraphsRecord:
    """The record of a kind that cannot be compiled ahead of time: its graphs are in Inductor's files.

    `seconds` is the time to trace them again. `reason` says why nothing better was made.
    """

    path: str
    seconds: float
    reason: str


class Artifacts:
    """All records of a boot. A record is named by its path inside the cache directory.

    A function is loaded once, by whichever comes first: `prefetch`, before a call is known; `arrive`, when another
    process has made it; or `find`.

    `marks` has those of earlier boots of this very version, by the path of their function.
    """

    def __init__(self, settings: Settings, directory: Path, marks: Mapping[str, Mark] | None = None) -> None:
        self._marks = {**(marks or {})}
        self._settings = settings
        self._directory = directory
        # By path, a loaded function, or why a record is not used.
        self._known: dict[str, Precompiled | str] = {}

    def prefetch(self, late: Collection[str] = ()) -> None:
        """Load every stored function of the present code that is not `late`.

        While another thread loads the weights, this costs the boot no time. It imports none of the caller's modules,
        because another thread may be importing them.
        """
        present = [self._fixed_key(dynamic).items() for dynamic in (self._settings.dynamic, None)]
        for path in [path for path in self._paths("*", SUFFIX) if path not in late][:_MOST_PREFETCHED]:
            try:
                key, record, payload = self._read(path)
                if any(key.items() >= fixed for fixed in present) and record.is_imported:
                    self._keep(_load(path, key, record, payload))
            except (ArtifactError, OSError) as error:  # `find` meets the error again, and reports it
                log.info("precompiled.not_loaded_ahead artifact=%s error=%r", path, error)

    def arrive(self, path: str) -> Precompiled:
        """Load a function that has just arrived in the cache directory, unless it is loaded. `find` finds it from now
        on.

        Raises:
            ArtifactError: the artifact is damaged, or does not belong here.
        """
        if isinstance(self._known.get(path), str):  # it was made anew
            self._known.pop(path, None)
        found = self.load(path)
        if isinstance(found, str):
            raise ArtifactError(found)
        if difference := found.outdated():
            raise ArtifactError(difference)
        return found

    def graphs(self, spec: CallSpec, call: Call) -> GraphsRecord | None:
        """The record of graphs for calls like this. None if there is none, if it is damaged or does
        not hold, or if earlier ones did not hold too often: then the graphs are others in each boot."""
        try:
            key = self._key(spec, call, self._settings.dynamic)
            path = self._paths(_group(key), GRAPHS)[-1]
            found = json.loads((self._directory / path).read_bytes())
            if found["key"] != key or path in self._known or path.endswith(f"{_MOST_RECORDS - 1}{GRAPHS}"):
                return None
            return GraphsRecord(path, float(found["seconds"]), str(found["reason"]))
        except (ArtifactError, OSError, ValueError, KeyError, TypeError, IndexError):
            return None

    def has_functions(self, spec: CallSpec, module: nn.Module) -> bool:
        """Whether a function is stored for any calls of modules with this class, sources and structure."""
        wanted = self._of_class(spec, module).items()
        for path in self._paths("*", SUFFIX):
            with contextlib.suppress(ArtifactError, OSError):  # it serves nothing
                if self._read(path)[0].items() >= wanted:
                    return True
        return False

    def write_graphs(self, call: Call, seconds: float, reason: str) -> str:
        """Write the record of graphs for calls like this, which take `seconds` to trace. Returns its path.

        Raises:
            ArtifactError: the call cannot be described, or its graphs are others in each boot.
            OSError: it cannot be written.
        """
        key = self._key(CallSpec.of(call), call, self._settings.dynamic)
        number = len(self._paths(group := _group(key), GRAPHS))  # each came after one that did not hold
        if number == _MOST_RECORDS:
            raise ArtifactError("its graphs are others in each boot")
        path = f"{group}/{number}{GRAPHS}"
        record = {"key": key, "seconds": seconds, "reason": reason}
        with replacing(self._directory / path) as file:
            file.write(json.dumps(record, sort_keys=True).encode())
        return path

    def find(self, spec: CallSpec, call: Call) -> Precompiled | str:
        """The function for calls like this, after the full check; else why there is none.

        A function for these sizes comes before a function that leaves sizes open.
        """
        reasons: list[str] = []
        try:
            groups = self._groups(spec, call)
        except ArtifactError as error:
            return str(error)
        for group in groups:
            for path in self._paths(group, SUFFIX)[:RECOMPILE_LIMIT]:
                found = self.load(path)
                if isinstance(found, str):
                    reasons.append(found)
                elif misfit := found.misfit(call):
                    reasons.append(misfit)
                else:
                    return found
        return "; ".join(dict.fromkeys(reasons)) or "none is stored for these inputs and this code"

    def unloaded(self, spec: CallSpec, call: Call) -> list[str]:
        """The stored functions for calls like this. Empty if one of them is loaded or refused, or if graphs are stored
        for such calls too, which this boot traces.

        Raises:
            ArtifactError: no function can serve such a call.
        """
        groups = self._groups(spec, call)
        paths = [path for group in groups for path in self._paths(group, SUFFIX)]
        is_met = not self._known.keys().isdisjoint(paths)
        return [] if is_met or any(self._paths(group, GRAPHS) for group in groups) else paths

    def _groups(self, spec: CallSpec, call: Call) -> dict[str, dict[str, Description]]:
        """The groups in which functions for a call are stored, with their keys: those for its sizes come first.

        Raises:
            ArtifactError: no function can serve such a call.
        """
        if reason := why_not_ahead(call[0]):
            raise ArtifactError(reason)
        keys = [self._key(spec, call, dynamic) for dynamic in dict.fromkeys((self._settings.dynamic, None))]
        return {_group(key): key for key in keys}

    def load(self, path: str) -> Precompiled | str:
        """A stored function, which `find` finds from now on; else why it is not used."""
        if (known := self._known.get(path)) is not None:
            return known
        try:
            return self._keep(_load(path, *self._read(path)))
        except (ArtifactError, OSError) as error:
            log.info("precompiled.refused artifact=%s reason=%s", path, error)
            return self._known.setdefault(path, str(error))

    def _keep(self, function: Precompiled) -> Precompiled | str:
        if mark := self._marks.get(function.path):
            function.compared_on = mark.places
        return self._known.setdefault(function.path, function)  # another thread may have been first

    def make(self, call: Call) -> Precompiled:
        """Compile a call ahead of time, write the artifact, and load it as another boot would. This traces, and runs
        nothing.

        Make it after `torch.compile` has run the call: only then is autotuning's choice known.

        Raises:
            ArtifactError: no function can serve this call in another process, or none is wanted.
            OSError: the cache directory cannot be written.
        """
        if type(call[0]).__name__ in self._settings.graphs:
            raise ArtifactError("COMPILE_CACHE_GRAPHS asks for graphs")
        group, key = next(iter(self._groups(spec := CallSpec.of(call), call).items()))
        if len(self._paths(group, SUFFIX)) >= RECOMPILE_LIMIT:
            raise ArtifactError(f"there are {RECOMPILE_LIMIT} artifacts of this region and these inputs")
        with self._without_leftovers():
            record, payload = compile_ahead(call, self._settings.mode, self._settings.dynamic, group)
        record = replace(record, sizes=() if self._settings.dynamic is False else spec.sizes)
        path = f"{group}/{write_artifact(self._directory / group, key, asdict(record), payload)}"
        return Precompiled(path, record, payload)

    @contextlib.contextmanager
    def _without_leftovers(self) -> Iterator[None]:
        """Remove the entries that torch meanwhile adds to its AOTAutograd cache. Nothing looks up their keys."""
        folder = self._directory / "aotautograd"
        before = set(folder.iterdir()) if folder.is_dir() else set()
        try:
            yield
        finally:
            for entry in set(folder.iterdir()) - before if folder.is_dir() else ():
                shutil.rmtree(entry, ignore_errors=True)

    def reject(self, path: str, reason: str) -> None:
        """Stop using a record in this process, and remove its marks."""
        self._known[path] = reason
        self._marks.pop(path, None)
        for mark in marks_of(self._directory, path):
            (self._directory / mark).unlink(missing_ok=True)

    def _key(self, spec: CallSpec, call: Call, dynamic: bool | None) -> dict[str, Description]:
        """The key of a call's group. `dynamic` has torch.compile's meaning: with False, the key has the tensors' sizes.

        Raises:
            ArtifactError: the inputs or the options cannot be described.
        """
        try:
            return {
                **self._fixed_key(dynamic),
                **self._of_class(spec, call[0]),
                "options": options_digest(),
                "inputs": (spec if dynamic is False else spec.without_sizes).stored,
                "switches": describe_switches(switches(on_gpu(call))),
            }
        except NotDescribedError as error:
            raise ArtifactError(f"this call cannot be described: {error}") from error

    def _of_class(self, spec: CallSpec, module: nn.Module) -> dict[str, Description]:
        return {
            "class": class_name(type(module)),
            "code": sources_digest(module),
            "structure": structure_digest(spec.structure),
            # Boots that do not ask for graphs find none of these.
            **({"asked": "graphs"} if type(module).__name__ in self._settings.graphs else {}),
        }

    def _fixed_key(self, dynamic: bool | None) -> dict[str, Description]:
        return {"mode": self._settings.mode, "dynamic": str(dynamic), "versions": versions()}

    def _paths(self, group: str, suffix: str) -> list[str]:
        """The files of a group with this suffix, or those of all groups for `*`, in order."""
        folder = self._directory / PRECOMPILED
        found = folder.glob(f"{group.rpartition('/')[2]}/*{suffix}")
        return sorted(path.relative_to(self._directory).as_posix() for path in found)

    def _read(self, path: str) -> tuple[Mapping[str, Any], Record, bytes]:
        """The key, the record and the pickled function of an artifact.

        Raises:
            ArtifactError: it is damaged, or in a folder of another key.
            OSError: it cannot be read.
        """
        key, record, payload = read_artifact(self._directory / path)
        if not path.startswith(f"{_group(key)}/"):
            raise ArtifactError("it belongs to another group")
        return key, Record.from_json(record), payload


def _group(key: Mapping[str, Description]) -> str:
    """The path of a group's folder inside the cache directory, which the digest of the group's key names."""
    return f"{PRECOMPILED}/{digest(key)}"


def _load(path: str, key: Mapping[str, Any], record: Record, payload: bytes) -> Precompiled:
    """Compare a record with this process, and unpickle its function.

    Raises:
        ArtifactError: a thing that the function depends on has changed, or the function cannot be loaded.
    """
    if difference := record.difference():
        raise ArtifactError(difference)
    with modes_of(key["switches"]):  # guards are made for the modes of the thread that loads
        return Precompiled(path, record, payload)


@functools.cache
def versions() -> Mapping[str, str]:
    """The versions of the packages that decide how a model is traced. Those of torch, Triton and Python are in the
    environment's key."""
    return {name: installed_version(name) for name in ("diffusers", "transformers")}
