"""The union of packs: which file wins, that no two chosen ones exclude each other, and that no logical key is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hostile_packs import KEY
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_cache.storage.fetch import choose
from compile_cache.storage.pack.manifest import Manifest, PackFile, check_paths


def file(path: str, content: str = "A", key: str | None = None) -> PackFile:
    return PackFile(path, path if key is None else key, 1, content)


def pack(*files: PackFile) -> Manifest:
    return Manifest(KEY, files, (), "", 0.0)


def contents(*packs: Manifest) -> dict[str, str]:
    """The content that wins, by path."""
    return {path: choice.file.sha256 for path, choice in choose(packs).items()}


def keys(packs: Sequence[Manifest]) -> set[str]:
    return {file.key for pack in packs for file in pack.files}


def chosen_keys(packs: Sequence[Manifest]) -> set[str]:
    return {choice.file.key for choice in choose(packs).values()}


def merge(packs: Sequence[Manifest]) -> Manifest:
    """One pack of all that is chosen from `packs`, as a compaction makes it."""
    return pack(*(choice.file for choice in choose(packs).values()))


# Who wins.


def test_packs_add_up_and_a_choice_says_which_pack_it_is_from():
    assert choose([]) == choose([pack(), pack()]) == {}
    assert contents(pack(file("a")), pack(file("b")), pack(file("c/d"))) == {"a": "A", "b": "A", "c/d": "A"}
    assert {path: choice.pack for path, choice in choose([pack(file("a")), pack(), pack(file("b"))]).items()} == {
        "a": 0,
        "b": 2,
    }


def test_of_one_logical_key_the_first_pack_wins_with_all_its_files():
    """Two cold compiles give files of different names for one key: one of them is enough."""
    assert contents(pack(file("k/one", key="k")), pack(file("k/other", key="k"))) == {"k/one": "A"}
    assert contents(pack(file("k/1", key="k"), file("k/2", key="k")), pack(file("k/3", key="k"))) == {
        "k/1": "A",
        "k/2": "A",
    }


def test_of_one_path_the_first_pack_wins():
    assert contents(pack(file("a", "A")), pack(file("a", "B"))) == {"a": "A"}


def test_a_key_whose_first_path_is_taken_is_chosen_from_a_later_pack():
    """Otherwise it would be in the store, and nobody would ever get it or publish it again."""
    packs = [pack(file("a", key="1")), pack(file("a/b", key="2")), pack(file("c", key="2"))]
    assert contents(*packs) == {"a": "A", "c": "A"}


# Paths that exclude each other.


@pytest.mark.parametrize(
    ("first", "second"), [("a", "a/b"), ("a/b", "a"), ("a/B", "A/b"), ("x", "X/y/z"), ("x/y/z", "X"), ("ß", "SS")]
)
def test_a_path_that_the_chosen_ones_exclude_is_left_out(first, second):
    assert contents(pack(file(first)), pack(file(second))) == {first: "A"}


def test_folders_that_differ_in_case_alone_may_both_be_there():
    assert set(contents(pack(file("a/b")), pack(file("A/c")))) == {"a/b", "A/c"}


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


@given(packs_of(own_files))
@settings(max_examples=2 * settings().max_examples)
def test_a_union_has_every_logical_key(packs):
    assert chosen_keys(packs) == keys(packs)


@given(packs_of(own_files), st.data())
@settings(max_examples=2 * settings().max_examples)
def test_merging_any_packs_into_one_loses_no_logical_key(packs, data):
    """Whichever packs a compaction has read: those published meanwhile stay, and the merged one is listed last."""
    merged = data.draw(st.sets(st.integers(0, len(packs) - 1))) if packs else set()
    rest = [pack for number, pack in enumerate(packs) if number not in merged]
    assert chosen_keys([*rest, merge([packs[number] for number in sorted(merged)])]) == keys(packs)


@given(packs_of(own_files) | packs_of(any_files))
@settings(max_examples=2 * settings().max_examples)
def test_merging_all_packs_changes_nothing(packs):
    before = {path: choice.file for path, choice in choose(packs).items()}
    assert {path: choice.file for path, choice in choose([merge(packs)]).items()} == before


@given(packs_of(any_files))
@settings(max_examples=2 * settings().max_examples)
def test_what_is_chosen_can_be_in_one_directory_and_is_what_its_pack_says(packs):
    chosen = choose(packs)
    check_paths(chosen)
    for path, choice in chosen.items():
        assert choice.file in packs[choice.pack].files
        assert choice.file.path == path


@given(packs_of(any_files), packs_of(any_files))
@settings(max_examples=2 * settings().max_examples)
def test_later_packs_take_no_path_away(packs, more):
    """A pack that is published later, by whomever, changes no file."""
    assert choose(packs).items() <= choose([*packs, *more]).items()


@given(packs_of(any_files))
def test_a_union_is_always_the_same(packs):
    assert list(choose(packs).items()) == list(choose(list(packs)).items())
