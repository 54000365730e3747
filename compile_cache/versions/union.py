"""The state of a key is the union of its packs: which pack each file is taken from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compile_cache.pack.manifest import Manifest, PackFile, folders_of


@dataclass(frozen=True, slots=True)
class Choice:
    """A file, and the number of the pack that it is taken from."""

    pack: int
    file: PackFile


def choose(manifests: Sequence[Manifest]) -> dict[str, Choice]:
    """Of each path the file that wins, from packs in the order of their listing.

    For each logical key the first pack wins that has a path for it, then, step by step, the first that replaces what
    has won: a store's clock is too coarse to list every successor after what it replaces. A path that the paths chosen
    before it exclude, or that differs from one of them in case alone, is left out.
    """
    chosen: dict[str, Choice] = {}
    owners: dict[str, int] = {}
    folded: set[str] = set()
    folders: set[str] = set()
    paths = {file.path.casefold() for manifest in manifests for file in manifest.files}
    successors: dict[tuple[str, str | None], list[Choice]] = {}
    for number, manifest in enumerate(manifests):
        for file in manifest.files:
            path = file.path.casefold()
            parents = {folder for folder in folders_of(path) if folder in paths}
            is_free = path not in folded and path not in folders and not parents & folded
            if is_free and owners.setdefault(file.key, number) == number:
                chosen[file.path] = Choice(number, file)
                folded.add(path)
                folders |= parents
            else:
                successors.setdefault((file.path, file.replaces), []).append(Choice(number, file))
    for path in chosen:
        while following := successors.get((path, chosen[path].file.sha256)):
            chosen[path] = following.pop(0)
    return chosen
