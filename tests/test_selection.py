"""The union of packs: which file wins, that no two chosen ones exclude each other, and that no logical key is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hostile_packs import KEY
from hypothesis import given
from hypothesis import strategies as st

from compile_cache.storage.fetch import choose
from compile_cache.storage.pack.manifest import Frame, Manifest, PackFile, check_paths


def file(path: str, content: str = "A", key: str | None = None) -> PackFile:
    return PackFile(path, path if key is None else key, 1, content)


def pack(*files: PackFile) -> Manifest:
    return Manifest(KEY, (Frame(1, files),), "", 0.0)


def chosen_of(packs: Sequence[Manifest]) -> dict[str, PackFile]:
    return {path: file for files in choose(packs) for path, file in files.items()}


def contents(*packs: Manifest) -> dict[str, str]:
    """The content that wins, by path."""
    return {path: file.sha256 for path, file in chosen_of(packs).items()}


def keys(packs: Sequence[Manifest]) -> set[str]:
    return {file.key for pack in packs for file in pack.files}


def merge(packs: Sequence[Manifest]) -> Manifest:
    """One pack of all that is chosen from `packs`, as a compaction makes it."""
    return pack(*chosen_of(packs).values())


# Who wins.


def test_packs_add_up_and_a_choice_says_which_pack_it_is_from():
    assert chosen_of([]) == chosen_of([pack(), pack()]) == {}
    assert contents(pack(file("a")), pack(file("b")), pack(file("c/d"))) == {"a": "A", "b": "A", "c/d": "A"}
    assert [*map(list, choose([pack(file("a")), pack(), pack(file("b"))]))] == [["a"], [], ["b"]]


# By what is shown: the files of each pack, and what is chosen.
CHOSEN = {
    "one key, other names": ([[file("k/one", key="k")], [file("k/other", key="k")]], {"k/one": "A"}),
    "all files of a key": ([[file("1", key="k"), file("2", key="k")], [file("3", key="k")]], {"1": "A", "2": "A"}),
    "one path": ([[file("a", "A")], [file("a", "B")]], {"a": "A"}),
    # Otherwise it would be in the store, and nobody would ever get it or publish it again.
    "a key whose first path is taken": (
        [[file("a", key="1")], [file("a/b", key="2")], [file("c", key="2")]],
        {"a": "A", "c": "A"},
    ),
    **{
        f"{first} excludes {second}": ([[file(first)], [file(second)]], {first: "A"})
        for first, second in (("a", "a/b"), ("a/b", "a"), ("a/B", "A/b"), ("x", "X/y/z"), ("x/y/z", "X"), ("ß", "SS"))
    },
    "folders that differ in case alone": ([[file("a/b")], [file("A/c")]], {"a/b": "A", "A/c": "A"}),
}


@pytest.mark.parametrize(("packs", "chosen"), CHOSEN.values(), ids=CHOSEN)
def test_the_first_pack_wins_where_two_have_a_key_or_paths_that_exclude_each_other(packs, chosen):
    assert contents(*(pack(*files) for files in packs)) == chosen


# Of any packs.

SHA256S = ["A", "B", "C", "D"]
# As the library names files: a path has one logical key, and a key may have several paths.
own_files = st.builds(
    lambda key, number, content: file(f"{key}/{number}", content, key),
    st.sampled_from(["fxgraph", "aotautograd", "triton", "so"]),
    st.integers(0, 2),
    st.sampled_from(SHA256S),
)
any_files = st.builds(
    file,
    st.lists(st.sampled_from("aAbß"), min_size=1, max_size=3).map("/".join),
    st.sampled_from(SHA256S),
    st.sampled_from("1234"),
)


def packs_of(files: st.SearchStrategy[PackFile]) -> st.SearchStrategy[list[Manifest]]:
    one = st.lists(files, max_size=6, unique_by=lambda file: file.path).map(lambda listed: pack(*listed))
    return st.lists(one, max_size=6)


@given(packs_of(own_files), st.data())
def test_merging_any_packs_into_one_loses_no_logical_key(packs, data):
    """Whichever packs a compaction has read: those published meanwhile stay, and the merged one is listed last."""
    merged = data.draw(st.sets(st.integers(0, len(packs) - 1))) if packs else set()
    rest = [pack for number, pack in enumerate(packs) if number not in merged]
    chosen = chosen_of([*rest, merge([packs[number] for number in sorted(merged)])]).values()
    assert {file.key for file in chosen} == keys(packs)


@given(packs_of(own_files) | packs_of(any_files))
def test_merging_all_packs_changes_nothing(packs):
    assert chosen_of([merge(packs)]) == chosen_of(packs)


@given(packs_of(any_files))
def test_what_is_chosen_can_be_in_one_directory_and_is_what_its_pack_says(packs):
    check_paths(chosen_of(packs))
    for pack, chosen in zip(packs, choose(packs), strict=True):
        assert set(chosen.values()) <= set(pack.files)
        assert [file.path for file in chosen.values()] == list(chosen)


@given(packs_of(any_files), packs_of(any_files))
def test_a_union_is_always_the_same_and_later_packs_take_no_path_away(packs, more):
    """A pack that is published later, by whomever, changes no file."""
    assert choose(packs) == choose(list(packs))
    assert choose(packs) == choose([*packs, *more])[: len(packs)]
