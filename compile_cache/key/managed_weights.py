"""Cog's managed weights (`weights:` in cog.yaml): the set of files that a model's folder belongs to, and its arrival.

As in https://github.com/replicate/cog/blob/main/specs/draft-weights.md, section 3: the image has `.cog/weights.json` in
the project's folder. Who brings the files leaves `ready` or `failed` in `<target>/.cog`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from compile_cache.errors import WeightsError, log
from compile_cache.settings import PREFIX

_MANIFEST = Path(".cog", "weights.json")
_LOOK_S = 0.1


class _Entry(TypedDict):
    target: str
    setDigest: str


class _Manifest(TypedDict):
    weights: list[_Entry]


@dataclass(frozen=True, slots=True)
class ManagedWeights:
    """The set of files in which a model's folder lies, at `place`. The digest is of all contents and names."""

    target: Path
    place: str
    set_digest: str

    def wait(self, timeout_s: float) -> None:
        """Wait until the files are there. Cog's own server does not wait yet.

        Raises:
            WeightsError: they could not be brought, or not in time.
        """
        markers, until_s = self.target / _MANIFEST.parent, time.monotonic() + timeout_s
        if markers == _MANIFEST.parent.resolve():  # the project's own, where Cog keeps other files
            return
        lacking = f"Cog's managed weights did not arrive in {self.target}"
        if markers.is_dir() and not (markers / "ready").exists():
            log.info("weights.waiting target=%s The setup waits for at most %g s.", self.target, timeout_s)
        while markers.is_dir() and not (markers / "ready").exists():
            if (markers / "failed").exists():
                with suppress(OSError):
                    lacking += f": {(markers / 'failed').read_text(errors='replace').strip()}"
                raise WeightsError(lacking)
            if time.monotonic() >= until_s:
                raise WeightsError(
                    f"{lacking}: there is no {markers / 'ready'} after {timeout_s:g} s. If they only take longer, "
                    f"raise {PREFIX}WEIGHTS_TIMEOUT_S."
                )
            time.sleep(_LOOK_S)


def managed_weights(model: str) -> ManagedWeights | None:
    """The managed weights whose target contains the model's folder, which need not exist yet. Of several, it is the
    innermost; without any, None.

    Raises:
        WeightsError: Cog's file cannot be read, or is damaged.
    """
    if not _MANIFEST.is_file():
        return None
    import msgspec

    try:
        entries = msgspec.json.decode(_MANIFEST.read_bytes(), type=_Manifest)["weights"]
        sets = {Path(entry["target"]).resolve(): entry["setDigest"] for entry in entries}
    except (OSError, ValueError) as error:  # msgspec's are ValueErrors, and so is that of a path with a NUL
        raise WeightsError(f"{_MANIFEST.absolute()} cannot be used: {error}. Build the image again.") from error
    folder = Path(model).resolve()
    if found := [target for target in sets if folder.is_relative_to(target)]:
        target = max(found, key=lambda each: len(each.parts))
        return ManagedWeights(target, folder.relative_to(target).as_posix(), sets[target])
    return None
