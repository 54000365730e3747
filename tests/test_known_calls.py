"""The call that an artifact was made of: described in its header, read without its function, and made again."""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
import time
from collections import OrderedDict, namedtuple
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from blocks import Batched, Block, Kind
from precompiling import activated, artifacts, boot, build, find, loaded, tensor, warm_up
from torch import nn

from compile_cache.aot import call_parser
from compile_cache.aot.call_inputs import describe_call, make_call
from compile_cache.aot.describe import signature
from compile_cache.aot.files import _LENGTH, _MAGIC, read_artifact, read_header, write_artifact
from compile_cache.aot.known_calls import known_calls
from compile_cache.errors import ArtifactError

Named = namedtuple("Named", ["x"])
TAGGED = {"dtype": "float32", "device": "cpu", "shape": [2], "stride": [1], "requires_grad": False}
PLAIN = {**TAGGED, "is_inference": False}


class Level(enum.IntEnum):
    HIGH = 2


def shared() -> tuple[torch.Tensor, list[torch.Tensor]]:
    one, other = torch.ones(2), torch.ones(2)
    return one, [other, one, other]


CALLS = {
    "nothing": lambda: ((), {}),
    "a tensor": lambda: ((torch.ones(2, 3),), {}),
    "an inference tensor": lambda: ((tensor(2, 3),), {}),
    "a tensor that wants a gradient": lambda: ((torch.ones(2, requires_grad=True),), {}),
    "a transposed tensor": lambda: ((torch.ones(2, 3).T, torch.ones(4, 6)[::2, ::3]), {}),
    "channels last": lambda: ((torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),), {}),
    "an expanded tensor": lambda: ((torch.ones(1, 3).expand(1000, 3),), {}),
    "no dimension, and no element": lambda: ((torch.tensor(1.0), torch.ones(0, 3)), {}),
    "dtypes": lambda: ((torch.ones(2).half(), torch.ones(2).bfloat16(), torch.ones(2).long(), torch.ones(2) > 0), {}),
    "a tensor of eight bits": lambda: ((torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.uint8)), {}),
    "complex numbers": lambda: ((torch.ones(2, dtype=torch.complex64),), {}),
    "another device": lambda: ((torch.ones(2, 2, device="meta"),), {}),
    "one tensor several times": lambda: (shared(), {"again": shared()}),
    "constants": lambda: ((None, True, False, 0, -1, 1 << 62, "text", "", b"\0bytes", torch.float16), {}),
    "numbers": lambda: ((0.1, -0.0, 1e300, float("inf"), float("nan"), 1.0), {}),
    "a device": lambda: ((torch.device("cpu"), torch.device("cuda", 1)), {}),
    "members": lambda: ((Kind.LARGE, Level.HIGH, Kind.SMALL), {}),
    "nested": lambda: (([(torch.ones(2), [1.0, {"x": ()}])],), {"b": {"z": 1, "a": (torch.ones(1),)}, "a": {2: None}}),
}
NOT_DESCRIBED = {
    "an object": lambda: SimpleNamespace(),
    "a parameter": lambda: nn.Parameter(torch.ones(2)),
    "a sparse tensor": lambda: torch.ones(2, 2).to_sparse(),
    "a conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "an ordered dictionary": lambda: OrderedDict(a=1),
    "a named tuple": lambda: Named(1),
    "a function": lambda: len,
    "a set": lambda: {1},
    "a complex number": lambda: 1j,
    "a key that is no constant": lambda: {(1, 2): 1},
    "an integer without end": lambda: 1 << 64,
    "a text without end": lambda: "x" * (2 << 20),
    "a list without end": lambda: [0] * 20_000,
    "an enumeration of a function": lambda: enum.Enum("Local", ["ONE"]).ONE,
    "a size without end": lambda: torch.empty(1, device="meta").expand(1 << 50),
}


def as_stored(description):
    return json.loads(json.dumps(description, sort_keys=True))


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_is_made_again_is_of_the_same_kind(what):
    args, kwargs = CALLS[what]()
    made_args, made_kwargs = make_call(as_stored(describe_call(args, kwargs)))
    assert signature(made_args, made_kwargs, True) == signature(args, kwargs, True)
    assert type(made_args) is tuple
    assert list(made_kwargs) == list(kwargs)


def test_a_tensor_that_is_made_has_zeros_all_its_strides_and_all_flags():
    one = torch.ones(1, 3, 1, requires_grad=True)
    whole, expanded = torch.full((4,), 7), torch.ones(3, 1).expand(3, 5)
    ((one_made, whole_made, expanded_made), _) = make_call(as_stored(describe_call((one, whole, expanded), {})))
    assert one_made.stride() == one.stride()
    assert one_made.requires_grad
    assert one_made.is_leaf
    assert whole_made.tolist() == [0, 0, 0, 0]
    assert (expanded_made.stride(), expanded_made.sum()) == ((1, 0), 0)


@pytest.mark.parametrize("is_inference", [True, False])
def test_an_inference_tensor_is_made_as_one_whatever_mode_is_on(is_inference):
    with torch.inference_mode(is_inference):
        one = torch.ones(2)
    for mode in (True, False):
        with torch.inference_mode(mode):
            ((made,), _) = make_call(describe_call((one,), {}))
        assert made.is_inference() == is_inference


@pytest.mark.parametrize("what", NOT_DESCRIBED)
def test_a_call_with_something_else_is_not_described(what):
    value = NOT_DESCRIBED[what]()
    assert describe_call((value,), {}) is None
    assert describe_call((), {"name": [value]}) is None


def test_a_call_that_contains_itself_is_not_described():
    endless = []
    endless.append(endless)
    assert describe_call((endless,), {}) is None
    doubled = [1]
    for _ in range(30):
        doubled = [doubled, doubled]
    assert describe_call((doubled,), {}) is None


# Hostile descriptions.


def deep(depth):
    node = 1
    for _ in range(depth):
        node = ["list", [node]]
    return node


def a_tensor(**changed):
    return ["tensor", {**PLAIN, **changed}]


HOSTILE_NODES = {
    "a size of 2**60": (a_tensor(shape=[1 << 60]), "take more than"),
    "a stride of 2**60": (a_tensor(stride=[1 << 60]), "take more than"),
    "a size beyond all integers": (a_tensor(shape=[1 << 4000]), "no whole number"),
    "an expanded size of 2**60": (a_tensor(shape=[1 << 60], stride=[0]), "take more than"),
    "sizes whose product has no end": (a_tensor(shape=[1 << 62] * 32, stride=[0] * 32), "take more than"),
    "many tensors": (["list", [a_tensor(shape=[1 << 20])] * 1000], "take more than"),
    "many dimensions": (a_tensor(shape=[1] * 1000, stride=[1] * 1000), "no list of at most"),
    "a negative size": (a_tensor(shape=[-1]), "no whole number"),
    "a negative stride": (a_tensor(stride=[-1]), "no whole number"),
    "a size that is a truth": (a_tensor(shape=[True]), "no whole number"),
    "a size that is a text": (a_tensor(shape=["2"]), "no whole number"),
    "a size that is no integer": (a_tensor(shape=[2.5]), "no whole number"),
    "sizes without strides": (a_tensor(stride=[]), "different numbers of sizes and strides"),
    "a shape that is no list": (a_tensor(shape=2), "no list"),
    "a dtype that is none": (a_tensor(dtype="nn"), "no dtype"),
    "a dtype that is a number": (a_tensor(dtype=5), "no text"),
    "a device that is none": (a_tensor(device="nowhere"), "no device"),
    "a device with a path": (a_tensor(device="cpu:/etc"), "no device"),
    "a device that is not here": (a_tensor(device="cuda:99"), "cannot make"),
    "a flag that is a number": (a_tensor(requires_grad=1), "neither true nor false"),
    "a gradient of integers": (a_tensor(dtype="int64", requires_grad=True), "no gradient"),
    "a tensor without a flag": (["tensor", TAGGED], "not described by"),
    "a tensor with more": (a_tensor(data="00"), "not described by"),
    "a tensor that is a list": (["tensor", [1]], "not described by"),
    "a tensor that is not there": (["same", 0], "no whole number"),
    "depth": (deep(10_000), "nested more"),
    "many parts": (["list", [None] * 20_000], "more than 10000 parts"),
    "long texts": (["list", ["x" * 100_000] * 100], "characters"),
    "an object": ({"a": 1}, "no value"),
    "a number outside of its place": (0.5, "no value"),
    "an empty list": ([], "no value"),
    "an unknown kind": (["pickle", "80"], "no kind of value"),
    "a kind that is a list": ([[], 1], "no value"),
    "a kind with escapes": (["\x1b[2J", 1], "no kind of value"),
    "a kind without a value": (["float"], "has 0 values"),
    "a list that is a text": (["list", "abc"], "not described by a list"),
    "a pair that is none": (["dict", [[1]]], "no key with its value"),
    "a key twice": (["dict", [["a", 1], ["a", 2]]], "occurs twice"),
    "a key that is a list": (["dict", [[["list", []], 1]]], "no constant"),
    "bytes that are none": (["bytes", "zz"], "hexadecimal"),
    "a float that is none": (["float", "x"], "could not convert"),
    "a float that is long": (["float", "1" * 1000], "no number"),
    "an integer without end": (1 << 70, "no whole number"),
    "a member of a class": (["member", "os", "environ", "HOME"], "no member"),
    "a member of nothing": (["member", "", "", ""], "no member"),
    "a member with fewer names": (["member", "blocks"], "module, class and name"),
    "a member that is a method": (["member", "blocks", "Kind", "mro"], "no member"),
}


@pytest.mark.parametrize("what", HOSTILE_NODES)
def test_a_hostile_description_is_a_value_error_that_says_what(what):
    node, message = HOSTILE_NODES[what]
    for description in ([["tuple", [node]], ["dict", []]], [["tuple", []], ["dict", [["name", node]]]]):
        with pytest.raises(ValueError, match=message) as caught:
            make_call(description)
        assert len(str(caught.value)) < 400
        assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "description",
    [None, {}, [], [1, 2], [["tuple", []]], [["list", []], ["dict", []]], [["tuple", []], ["dict", [[1, 1]]]], "text"],
)
def test_a_description_that_is_no_call_is_a_value_error(description):
    with pytest.raises(ValueError, match=r"args|keyword|value"):
        make_call(description)


def test_nothing_is_made_before_all_of_a_description_was_checked(monkeypatch):
    made = []
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **kwargs: made.append(args))
    with pytest.raises(ValueError, match="no kind"):
        make_call([["tuple", [a_tensor(), ["pickle", ""]]], ["dict", []]])
    assert made == []


def test_the_bytes_that_a_call_may_take_can_be_set():
    description = [["tuple", [a_tensor(shape=[1000])]], ["dict", []]]
    make_call(description, most_bytes=4000)
    with pytest.raises(ValueError, match="more than 3999 bytes"):
        make_call(description, most_bytes=3999)


def test_a_member_is_looked_up_without_importing_anything():
    module = "xmlrpc.server"
    assert module not in sys.modules
    with pytest.raises(ValueError, match="imported here"):
        call_parser._parse_member([module, "SimpleXMLRPCServer", "x"])
    assert module not in sys.modules


# Headers of artifacts.


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A cache directory in which a cold boot has made two artifacts. Tests leave it as it is."""
    with activated(tmp_path_factory.mktemp("made")) as directory:
        make_two(directory)
        yield directory


def make_two(directory):
    block, batched = build(Block), build(Batched)
    compiler = boot(directory, block, batched)
    warm_up(compiler, lambda: [block(tensor(), by=2.0), batched(tensor(1, 4, 16))])
    assert len(artifacts(directory)) == 2


def test_known_calls_name_class_structure_inputs_and_switches(made):
    calls = {call.class_name: call for call in known_calls(made.path)}
    assert set(calls) == {"blocks.Block", "blocks.Batched"}
    call = calls["blocks.Block"]
    (key,) = [read_header(p).key for p in artifacts(made) if read_header(p).key["class"] == "blocks.Block"]
    assert (call.structure, call.switches, call.mode, call.dynamic) == (
        key["structure"],
        key["switches"],
        "default",
        False,
    )
    assert call.switches["inference mode"] == "True"
    args, kwargs = make_call(call.call)
    assert signature(args, kwargs, True) == signature((tensor(),), {"by": 2.0}, True) == key["inputs"]


def test_a_call_that_is_made_of_a_header_finds_the_artifact_and_makes_one_of_the_same_name(made, tmp_path):
    (call,) = [call for call in known_calls(made.path) if call.class_name == "blocks.Block"]
    block, (args, kwargs) = build(Block), make_call(call.call)
    found = find(made, block, *args, **kwargs)
    assert not isinstance(found, str), found
    with activated(tmp_path) as directory, torch.inference_mode():
        again = loaded(directory).make(block, args, kwargs)
    assert again.path == found.path


def test_two_cold_boots_give_the_same_names_with_their_calls(made, tmp_path):
    with activated(tmp_path) as directory:
        make_two(directory)
        assert [path.name for path in artifacts(directory)] == [path.name for path in artifacts(made)]
        assert [read_header(p).call for p in artifacts(directory)] == [read_header(p).call for p in artifacts(made)]


def test_the_name_does_not_depend_on_the_call(made, tmp_path):
    (path, _) = artifacts(made)
    key, record, payload = read_artifact(path)
    assert write_artifact(tmp_path, key, record, payload, ["another call"]) == path.name
    assert read_artifact(tmp_path / path.name) == (key, record, payload)


class Holder:
    by = 2.0


class Held(Block):
    def forward(self, x, holder):
        return super().forward(x, holder.by)


def test_an_artifact_of_inputs_that_cannot_be_described_is_in_no_plan(tmp_path):
    with activated(tmp_path) as directory:
        block = build(Held)
        warm_up(boot(directory, block), lambda: block(tensor(), Holder()))
        assert [read_header(path).call for path in artifacts(directory)] == [None]
        assert known_calls(directory.path) == []


def older(path):
    """As an earlier version of the library has written it: without a call."""
    content = path.read_bytes()
    (length,) = _LENGTH.unpack(content[len(_MAGIC) :][: _LENGTH.size])
    start = len(_MAGIC) + _LENGTH.size
    header = json.loads(content[start : start + length])
    assert header.pop("call")
    return with_header(json.dumps(header, sort_keys=True).encode(), content[start + length :])


def with_header(encoded: bytes, payload: bytes = b"") -> bytes:
    return _MAGIC + _LENGTH.pack(len(encoded)) + encoded + payload


def test_an_artifact_without_a_call_is_read_and_is_in_no_plan(made, tmp_path):
    (path, _) = artifacts(made)
    copy = tmp_path / "precompiled" / path.parent.name / path.name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(older(path))
    assert read_artifact(copy) == read_artifact(path)
    assert known_calls(tmp_path) == []


def test_the_function_is_not_read(made, tmp_path):
    (path, _) = artifacts(made)
    content = path.read_bytes()
    copy = tmp_path / "precompiled" / path.parent.name / path.name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(content[: -len(read_artifact(path)[2])])
    assert len(known_calls(tmp_path)) == 1
    with pytest.raises(ArtifactError, match="damaged"):
        read_artifact(copy)


def stored_calls(made, folder, *ages_s):
    """Artifacts of as many calls, so many seconds old."""
    (path, _) = artifacts(made)
    key, record, payload = read_artifact(path)
    for number, age_s in enumerate(ages_s):
        group = folder / "precompiled" / f"{number:032x}"
        name = write_artifact(group, {**key, "class": f"a.Class{number}"}, record, payload, [number])
        os.utime(group / name, (time.time() - age_s,) * 2)


def test_the_newest_artifact_comes_first(made, tmp_path):
    stored_calls(made, tmp_path, 20, 10, 30)
    assert [call.call for call in known_calls(tmp_path)] == [[1], [0], [2]]


def test_a_call_of_two_artifacts_is_there_once(made, tmp_path):
    (path, _) = artifacts(made)
    key, record, payload = read_artifact(path)
    for host in ("one", "other"):
        write_artifact(tmp_path / "precompiled" / ("0" * 32), key, {**record, "host": {"name": host}}, payload, [1])
    (call,) = known_calls(tmp_path)
    assert call.name != replace(call, call=[2]).name


HOSTILE_HEADERS = {
    "nothing": b"",
    "no JSON": with_header(b"{"),
    "depth": with_header(b"[" * 100_000),
    "a deep key": with_header(b'{"sha256": "", "record": {}, "key": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}"),
    "a long header": _MAGIC + _LENGTH.pack((1 << 32) - 1) + b"{}",
    "a list": with_header(b"[]"),
    "a key that is a text": with_header(b'{"key": "", "record": {}, "sha256": ""}'),
    "a checksum that is none": with_header(b'{"key": {}, "record": {}, "sha256": 5}'),
    "an integer without end": with_header(b'{"key": {"a": ' + b"9" * 10_000 + b'}, "record": {}, "sha256": ""}'),
    "no text": with_header(b"\xff\xfe"),
    "another name": with_header(b'{"key": {}, "record": {}, "sha256": ""}'),
}


@pytest.mark.parametrize("what", HOSTILE_HEADERS)
def test_a_hostile_header_is_skipped_with_a_line_in_the_log(made, tmp_path, caplog, what):
    caplog.set_level("INFO", "compile_cache")
    stored_calls(made, tmp_path, 0)
    path = tmp_path / "precompiled" / ("f" * 32) / ("f" * 32 + ".aot")
    path.parent.mkdir()
    path.write_bytes(HOSTILE_HEADERS[what])
    assert [call.call for call in known_calls(tmp_path)] == [[0]]
    assert f"artifact={path}" in caplog.text
    for read in (read_header, read_artifact):
        with pytest.raises(ArtifactError):
            read(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"class": 5},
        {"class": "x" * 5000},
        {"structure": None},
        {"switches": []},
        {"switches": {"a": 1}},
        {"dynamic": "?"},
    ],
)
def test_a_key_that_is_not_one_of_a_call_is_skipped(made, tmp_path, changed):
    (path, _) = artifacts(made)
    key, record, payload = read_artifact(path)
    write_artifact(tmp_path / "precompiled" / ("0" * 32), {**key, **changed}, record, payload, [1])
    assert known_calls(tmp_path) == []


def test_known_calls_are_read_without_torch(made):
    program = (
        "import sys, pathlib; from compile_cache.aot.known_calls import known_calls\n"
        f"print(len(known_calls(pathlib.Path({str(made.path)!r}))), 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60).stdout == (
        "2 False\n"
    )
