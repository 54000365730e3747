"""Chooses the pack from which each file is taken: all packs of a key add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compile_cache.storage.pack.manifest import Manifest, PackFile, folders_of


@dataclass(frozen=True, slots=True)
class Choice:
    """A file, and the number of the pack from which it is taken."""

    pack: int
    file: PackFile


def choose(manifests: Sequence[Manifest]) -> dict[str, Choice]:
    """The chosen file for each path. The packs are in the order of their listing.

    For each logical key, the first pack that has it wins. Then the first file that replaces the winner wins, and so on:
    a store's clock is too coarse to list every successor after its predecessor. Paths that clash with a chosen one
    (file against folder, case) are skipped.
    """
    chosen: dict[str, Choice] = {}
    owners: dict[str, int] = {}
    folded: set[str] = set()
    folders: set[str] = set()
    # Keep each folded path in memory once, because there may be many long paths.
    paths = {path: path for manifest in manifests for file in manifest.files for path in (file.path.casefold(),)}
    successors: dict[tuple[str, str | None], list[Choice]] = {}
    for number, manifest in enumerate(manifests):
        for file in manifest.files:
            path = paths[file.path.casefold()]
            parents = {paths[folder] for folder in folders_of(path) if folder in paths}
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
