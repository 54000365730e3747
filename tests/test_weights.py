"""Early copies of weights: each weight takes the one that its own bytes were copied from, or stays as it was loaded.

And pipelines that are loaded with them: as `from_pretrained` loads them, bit for bit.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers import DiffusionPipeline, ZImageTransformer2DModel
from huggingface_hub import constants
from machines import write_files
from marked_processes import open_files
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

import compile_cache
from compile_cache.key.model_version import hub_folder
from compile_cache.weights import early_weights
from compile_cache.weights.early_weights import EarlyWeights
from compile_cache.weights.weight_files import Weights, find_files, read_header
from models.image.pipeline import load_pipeline

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
DECODER = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A pipeline in bf16, with two components in several files each."""
    folder = tmp_path_factory.mktemp("pipelines") / "model"
    pipeline = DiffusionPipeline.from_pretrained(ROOT / "demo/flux-digits").to(torch.bfloat16)
    pipeline.save_pretrained(folder)
    for name in ("transformer", "text_encoder_2"):
        shutil.rmtree(folder / name)
        getattr(pipeline, name).save_pretrained(folder / name, max_shard_size="100KB")
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy, to change."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def early_of(weights: Weights, **options: int) -> EarlyWeights:
    return EarlyWeights("org/name", weights, **options)


@contextmanager
def begun(weights: Weights, device: torch.device = CPU, **options: int) -> Iterator[EarlyWeights]:
    """Early copies of weights, which have begun."""
    early = early_of(weights, **options)
    try:
        early.begin(device)
        yield early
    finally:
        early.drop()


def load(folder: Path) -> list[nn.Module]:
    return [*parts(DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)).values()]


def tensors(modules: list[nn.Module]) -> list[torch.Tensor]:
    """Parameters and buffers, each once."""
    return list({id(one): one for module in modules for one in (*module.parameters(), *module.buffers())}.values())


def mapped(found: list[torch.Tensor]) -> int:
    """How many tensors' memory is a file's."""
    place_of = early_weights._mappings()
    return sum(place_of(one.data_ptr(), one.nbytes) is not None for one in found)


def taken(early: EarlyWeights, modules: list[nn.Module]) -> int:
    """How many weights have taken a copy. All are what they were."""
    before = [(tensor.data_ptr(), tensor.clone()) for tensor in tensors(modules)]
    early.give(modules)
    after = tensors(modules)
    assert all(torch.equal(old, new) for (_, old), new in zip(before, after, strict=True))
    return sum(address != new.data_ptr() for (address, _), new in zip(before, after, strict=True))


@pytest.mark.parametrize("chunk_bytes", [1000, 100_000, 1 << 30])
@pytest.mark.parametrize(
    "device", ["cpu", *(pytest.param(device, marks=pytest.mark.gpu) for device in ("cuda:0", "unpinned"))]
)
def test_each_weight_takes_its_copy(saved, chunk_bytes, device, monkeypatch):
    """Tied, sharded, larger than a chunk, and where no file can be pinned. Only a computed buffer has no copy."""
    if device == "unpinned":
        device, cudart = "cuda:0", torch.cuda.cudart()
        refusing = mock.Mock(wraps=cudart, cudaHostRegister=lambda *_: cudart.cudaHostRegister(0, 0, 0))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    with begun(saved, torch.device(device), chunk_bytes=chunk_bytes) as early:
        early.begin(torch.device(device))
        modules = load(saved)
        assert mapped(tensors(modules)) == len(tensors(modules)) - 1
        early.give([None, object(), *modules])  # as a pipeline's components

        found = tensors(modules)
        assert mapped(found) == 0
        assert [str(one.device) for one in found].count(device) >= len(found) - 1
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in found)  # freed one by one
        for ours, theirs in zip(modules, load(saved), strict=True):
            check_same(ours.cpu(), theirs)
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in maps if str(saved) in line and "s 0" in line]


@pytest.fixture
def snapshot(folder, tmp_path, monkeypatch) -> Path:
    """The same as `org/name` in the hub's cache."""
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(folder, snapshot)
    (repository / "blobs").mkdir()
    for number, path in enumerate(snapshot.rglob("*.safetensors")):
        path.rename(repository / "blobs" / str(number))
        path.symlink_to(repository / "blobs" / str(number))
    write_files(repository, {"refs/main": COMMIT.encode()})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_model_in_the_hubs_cache_is_found_behind_its_links(folder, snapshot):
    assert hub_folder("org/name", None) == hub_folder("org/name", COMMIT) == snapshot
    assert find_files("org/name", True) == find_files("org/other", f"org/name@{COMMIT}") == find_files("", snapshot)
    assert find_files("org/nowhere", True) == []
    with begun(True) as early:
        modules = load(snapshot)
        assert taken(early, modules) == len(tensors(modules)) - 1


def test_each_copy_is_taken_once(saved):
    """Two loads of one file are two mappings of it."""
    with begun(saved) as early:
        first, second = load(saved), load(saved)
        assert taken(early, [*first, *second]) == len(tensors(first)) - 1


def test_one_model_is_found_without_a_pipeline(tmp_path):
    model = LlamaForCausalLM.from_pretrained(ROOT / "demo/llama-adder", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    with begun(tmp_path) as early:
        loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert taken(early, [loaded]) == len(list(model.parameters()))


@pytest.mark.parametrize("in_place", [True, False])
def test_weights_of_a_file_that_changed_are_loaded_as_ever(folder, in_place, caplog):
    """Written in place with its old time, or replaced."""
    caplog.set_level(logging.INFO)
    path = folder / DECODER
    with begun(folder) as early:
        early._finish()
        status, content = path.stat(), path.read_bytes()
        if in_place:
            with path.open("r+b") as file:
                file.seek(-100, os.SEEK_END)
                file.write(bytes(100))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        else:
            path.with_name("new").write_bytes(content[:-100] + bytes(100))
            path.with_name("new").replace(path)
        assert taken(early, load(folder)) == 0
    assert f"{path} has changed" in caplog.text
    assert "weights.early_failed Could not use early copies" in caplog.text


def test_a_weight_that_was_changed_in_memory_keeps_its_value(saved):
    """It lies in a mapping of its file, and is no more what the file has."""
    with begun(saved) as early:
        modules = load(saved)
        changed = next(modules[0].parameters())
        with torch.no_grad():
            changed.add_(1)
        value = changed.detach().clone()
        assert 0 < taken(early, modules) < len(tensors(modules)) - 1
    assert torch.equal(changed, value)


def test_a_weight_that_lies_in_two_mappings_keeps_its_value(tmp_path):
    """Advice splits a mapping, and one part of it is written to."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"large": torch.ones(1 << 17, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with begun(tmp_path) as early:
        module = nn.Module()
        module.large = nn.Parameter(load_file(tmp_path / "model.safetensors")["large"])
        middle = (module.large.data_ptr() + module.large.nbytes // 2) // mmap.PAGESIZE * mmap.PAGESIZE
        libc = ctypes.CDLL(None)
        assert libc.madvise(ctypes.c_void_p(middle), ctypes.c_size_t(mmap.PAGESIZE), mmap.MADV_DONTFORK) == 0
        ctypes.memset(middle, 0, 2)
        assert taken(early, [module]) == 0


def test_a_path_that_the_system_writes_in_another_way_is_not_taken(saved, tmp_path):
    """smaps has \\012 for the end of a line, which is also a name."""
    for name in ("a\\012b", "a\nb", "a b"):
        shutil.copytree(saved, tmp_path / name)
    for name, is_found in (("a\\012b", False), ("a\nb", False), ("a b", True)):
        with begun(tmp_path / name) as early:
            assert bool(taken(early, load(tmp_path / name))) is is_found


def entries(*offsets: list[Any]) -> bytes:
    """The header of tensors with these offsets."""
    found = {str(number): {"dtype": "BF16", "shape": [1], "data_offsets": one} for number, one in enumerate(offsets)}
    return json.dumps(found).encode()


DAMAGED = {
    "a list": b"[]",
    "nothing": b"{}",
    "a number": b'{"a": 1}',
    "no offsets": b'{"a": {"dtype": "BF16"}}',
    "no text": b"\xff",
    "deep": b"[" * 100_000,
    "a gap": entries([0, 2], [4, 20]),
    "an overlap": entries([0, 8], [4, 12], [16, 20]),
    "negative": entries([-(2**60), 20]),
    "reversed": entries([0, 24], [24, 20]),
    "strings": entries(["a", "b"]),
    "beyond the end": entries([0, 2**60]),
}


@pytest.mark.parametrize("kept", [0, 7, 100, -1, *DAMAGED])
def test_a_file_that_is_cut_short_or_has_a_damaged_header_is_named_and_not_copied(folder, kept):
    path = folder / DECODER
    header = DAMAGED.get(kept, b"")
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(20) if header else path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"{path}.*download it again"):
        read_header(path)
    with begun(folder) as early:
        assert not early._chunks


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(file)), file)


def with_one_in_fp32(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = next(iter(weights))
    return {**weights, first: weights[first].float()}


def quantize(file: Path) -> None:
    config = json.loads(file.with_name("config.json").read_text())
    file.with_name("config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "x"}}))


# Changes of a folder, told by the decoder's weights, and the part that has no copies then.
EDITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "quantized": (quantize, "vae"),
    "a missing shard": (
        lambda file: next((file.parents[1] / "transformer").glob("*.safetensors")).unlink(),
        "transformer",
    ),
    "no safetensors": (lambda file: file.rename(file.with_suffix(".bin")), "vae"),
    "a file and an index": (
        lambda file: file.with_suffix(".safetensors.index.json").write_text('{"weight_map": {}}'),
        "vae",
    ),
    "experts": (
        lambda file: rewrite(file, lambda weights: {f"a.experts.{name}": one for name, one in weights.items()}),
        "vae",
    ),
    "fp32": (lambda file: rewrite(file, lambda weights: {name: one.float() for name, one in weights.items()}), "vae"),
}


@pytest.mark.parametrize(("edit", "part"), EDITS.values(), ids=EDITS)
def test_a_part_that_from_pretrained_makes_otherwise_or_is_nowhere_is_not_copied(folder, edit, part):
    edit(folder / DECODER)
    with begun(folder) as early:
        early._finish()
        assert {Path(path).parent.name for path, _ in early._copies} == {*parts_of(folder)} - {part}


def parts_of(folder: Path) -> list[str]:
    return sorted({path.parent.name for path in folder.glob("*/*.safetensors*")} | {"vae"})


@pytest.mark.parametrize("weights", [[], "nowhere", "org/nowhere", Path("/nowhere")])
def test_what_is_nowhere_has_no_copies(weights, caplog):
    caplog.set_level(logging.INFO)
    with begun(weights) as early:
        early.give([nn.Linear(2, 2)])
        early.give([nn.Linear(2, 2)])
    assert caplog.text.count("weights.not_early No copies were made early: boot(weights=…) names no") == 1


def test_of_files_with_several_types_only_those_that_need_no_cast_are_copied(folder, caplog):
    """Also in fp16. The first weight of a file is in fp32: what lies between two copied ones is left out."""
    caplog.set_level(logging.INFO)
    rewrite(folder / DECODER, with_one_in_fp32)
    rewrite(folder / "text_encoder/model.safetensors", lambda all_: {name: one.half() for name, one in all_.items()})
    with begun(folder) as early:
        vae, text_encoder = (load_file(folder / name) for name in (DECODER, "text_encoder/model.safetensors"))
        modules = [module_of(vae), module_of(text_encoder)]
        assert taken(early, modules) == len(vae) - 1 + len(text_encoder)
    assert "weights.cast" not in caplog.text, "it is a small part"


def module_of(weights: dict[str, torch.Tensor]) -> nn.Module:
    """A module with these weights, under other names."""
    module = nn.Module()
    for number, weight in enumerate(weights.values()):
        module.register_parameter(f"weight_{number}", nn.Parameter(weight, weight.is_floating_point()))
    return module


def test_weights_that_were_cast_free_the_copies_that_they_do_not_take(tmp_path, caplog):
    """So both sets are never on the GPU at once. Those that another model will take stay."""
    sizes = {"first": 1 << 20, "second": 1 << 19}
    for name, count in sizes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({"large": torch.ones(count, dtype=torch.bfloat16)}, tmp_path / name / "model.safetensors")
    with begun([tmp_path / name for name in sizes]) as early:
        first, second = (module_of(load_file(tmp_path / name / "model.safetensors")) for name in sizes)
        early.give([first.float()])
        assert [copy.nbytes for copy in early._copies.values()] == [1 << 20]
        assert taken(early, [second]) == 1
        early.end()
    assert "weights.early_unused Only 0.001 of 0.003 GB" in caplog.text


def test_a_checkpoint_of_one_file_is_copied_and_its_attentions_take_parts_of_what_is_one_there(tmp_path):
    """As Z-Image's authors publish it. diffusers cuts one weight of an attention into three."""
    torch.manual_seed(0)
    shape = {"dim": 48, "n_heads": 3, "n_kv_heads": 3, "axes_dims": [4, 6, 6], "cap_feat_dim": 32}
    model = ZImageTransformer2DModel(n_layers=2, n_refiner_layers=1, **shape).bfloat16().eval()
    model.save_config(tmp_path)
    original, cut = {}, ("to_q", "to_k", "to_v")
    for name, weight in model.state_dict().items():
        if (start := name.removesuffix("to_q.weight")) != name:
            weight = torch.cat([model.get_parameter(f"{start}{part}.weight").data for part in cut])
        for ours, theirs in ((".2-1.", "."), ("all_", ""), ("to_q", "qkv"), ("to_out.0", "out"), ("norm_q", "q_norm")):
            name = name.replace(ours, theirs)
        if not name.endswith(("to_k.weight", "to_v.weight")):
            original[name.replace("norm_k", "k_norm")] = weight
    file = tmp_path / "z_image.safetensors"
    save_file(original, file)
    with begun(file) as early:
        loaded = ZImageTransformer2DModel.from_single_file(file, config=str(tmp_path), torch_dtype=torch.bfloat16)
        check_same(loaded, model)
        assert taken(early, [loaded]) == len(tensors([loaded]))
        assert not early._copies
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in loaded.parameters())


def test_models_of_several_folders_take_their_copies_one_after_another(folder):
    with begun([folder / "vae", folder / "transformer", *(folder / "text_encoder_2").glob("*.safetensors")]) as early:
        modules = dict(parts(DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)))
        for name in ("vae", "transformer", "text_encoder_2"):
            assert taken(early, [modules[name]]) >= len(tensors([modules[name]])) - 1
        assert taken(early, [modules["text_encoder"]]) == 0
        assert not early._copies


def test_weights_that_are_downloaded_after_the_boot_began_are_found(saved, tmp_path):
    early = early_of(tmp_path / "later")
    shutil.copytree(saved, tmp_path / "later")
    early.begin(CPU)
    modules = load(tmp_path / "later")
    assert taken(early, modules) == len(tensors(modules)) - 1
    early.drop()


def with_variant(folder: Path, variant: str, dtype: torch.dtype, shard_size: str = "1GB") -> None:
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=dtype)
    for name, part in parts(pipeline).items():
        part.save_pretrained(folder / name, variant=variant, max_shard_size=shard_size)


@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_the_only_variant_is_copied_or_the_only_one_that_is_in_half_precision(folder, shard_size, caplog):
    caplog.set_level(logging.INFO)
    with_variant(folder, "fp16", torch.float16, shard_size)
    assert find_files(str(folder), True) == []
    assert caplog.text.count("it has several sets of weights: name their files in boot(weights=[…])") == len(
        parts_of(folder)
    )

    for file in [*folder.glob("*/*.safetensors*")]:
        if "fp16" not in file.name and not file.name.endswith(".json"):
            rewrite(file, lambda weights: {name: one.float() for name, one in weights.items()})
    check_variant(folder)
    for file in [*folder.glob("*/*.safetensors*")]:
        if "fp16" not in file.name:
            file.unlink()
    check_variant(folder)


def check_variant(folder: Path) -> None:
    with begun(folder) as early:
        pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.float16, variant="fp16")
        modules = [*parts(pipeline).values()]
        in_half = [one for one in tensors(modules) if one.dtype == torch.float16]  # without T5's, which is kept in fp32
        assert taken(early, modules) == len(in_half)


def test_a_cache_of_the_hub_of_the_callers_own_has_the_model(folder, snapshot, tmp_path, monkeypatch):
    cache = tmp_path / "own"
    (tmp_path / "hub").rename(cache)
    for link in cache.rglob("*.safetensors"):
        blob = cache / "models--org--name" / "blobs" / link.readlink().name
        link.unlink()
        link.symlink_to(blob)
    assert find_files("org/name", True) == []
    assert [path.parent.name for path in find_files("org/name", cache)] == [
        path.parent.name for path in find_files(str(folder), True)
    ]


def test_files_that_no_part_reads_are_not_copied(folder):
    """A file for another program, a variant, and a part that the pipeline does not load."""
    file = folder / DECODER
    shutil.copy(file, folder / "flux.safetensors")
    save_file({"in_fp32": torch.zeros(1)}, file.with_name("diffusion_pytorch_model.fp32.safetensors"))
    shutil.copytree(folder / "vae", folder / "safety_checker")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "safety_checker": [None, None]}))

    found = {path.relative_to(folder).as_posix() for path in find_files(str(folder), True)}

    assert DECODER in found
    assert not {"flux.safetensors", "vae/diffusion_pytorch_model.fp32.safetensors"} & found
    assert not any(path.startswith("safety_checker") for path in found)


def test_a_boot_without_a_gpu_loads_as_ever(saved, caplog):
    with begun(saved, torch.device("meta" if torch.cuda.is_available() else "cuda:0")) as early:
        assert taken(early, load(saved)) == 0
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_setup_that_fails_ends_the_copying(saved, monkeypatch):
    """The thread is in the middle of it, and nothing stays mapped or open."""
    begun, go = threading.Event(), threading.Event()
    copy = early_weights._Chunk.copy

    def wait(self: Any, targets: list[torch.Tensor]) -> None:
        begun.set()
        go.wait(60)
        copy(self, targets)

    monkeypatch.setattr(early_weights._Chunk, "copy", wait)
    before = open_files()
    early = early_of(saved, chunk_bytes=1000)
    early.begin(CPU)
    assert begun.wait(60)
    threading.Timer(0.1, go.set).start()
    early.drop()
    assert not early._copies
    assert "early weights" not in [thread.name for thread in threading.enumerate()]
    assert not open_files() - before


def test_copying_that_fails_costs_only_speed(saved, monkeypatch, caplog):
    caplog.set_level(logging.INFO)

    monkeypatch.setattr(early_weights._Chunk, "copy", mock.Mock(side_effect=RuntimeError("CUDA error: unknown")))
    with begun(saved) as early:
        assert taken(early, load(saved)) == 0
    assert "so they load later. RuntimeError: CUDA error: unknown" in caplog.text


@pytest.mark.parametrize("at", ["plan", "begin"])
def test_a_host_without_another_thread_loads_as_ever(saved, at, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    refuse = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    with monkeypatch.context() as patched:
        if at == "plan":
            patched.setattr(threading.Thread, "start", refuse)
        early = early_of(saved)
        patched.setattr(threading.Thread, "start", refuse)
        early.begin(CPU)
    assert taken(early, load(saved)) == 0
    assert "can't start new thread" in caplog.text


def test_a_file_that_cannot_be_read_stops_the_plan(folder, monkeypatch, caplog):
    """Also for the files before it. No file stays open."""
    caplog.set_level(logging.INFO)
    before, read = open_files(), early_weights.read_header
    paths = find_files(str(folder), True)

    def fail(path: Path) -> Any:
        if path == paths[-1]:
            raise PermissionError(path)
        return read(path)

    monkeypatch.setattr(early_weights, "read_header", fail)
    with begun(folder) as early:
        assert not early._chunks
        assert not open_files() - before
    assert "PermissionError" in caplog.text


@pytest.mark.parametrize("revision", ["../..", "/tmp", "y" * 300, "", ".."])
def test_odd_revisions_have_no_folder(tmp_path, monkeypatch, revision):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--name" / "snapshots").mkdir(parents=True)
    write_files(tmp_path, {"models--org--name/refs/main": b"\xff"})

    assert hub_folder("org/name", revision) is None
    assert hub_folder("x" * 300, revision) is None


# What `from_pretrained` loads.


def parts(pipeline: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, each under all of its names."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def ties(module: nn.Module) -> set[frozenset[str]]:
    """The names of each tensor that has several."""
    names: dict[int, set[str]] = {}
    for name, tensor in named_tensors(module).items():
        names.setdefault(id(tensor), set()).add(name)
    return {frozenset(same) for same in names.values() if len(same) > 1}


def check_same(module: nn.Module, expected: nn.Module) -> None:
    """Every tensor is the same to the bit and in all that it has, and so is the module."""
    ours, theirs = named_tensors(module), named_tensors(expected)
    assert list(ours) == list(theirs)
    assert list(module.state_dict()) == list(expected.state_dict())
    assert ties(module) == ties(expected)
    assert [part.training for part in module.modules()] == [part.training for part in expected.modules()]
    for name, tensor in ours.items():
        other = theirs[name]
        assert type(tensor) is type(other), name
        for attribute in ("dtype", "device", "shape", "requires_grad"):
            assert getattr(tensor, attribute) == getattr(other, attribute), name
        assert tensor.stride() == other.stride(), name
        ours_bytes, theirs_bytes = (one.detach().flatten().view(torch.uint8) for one in (tensor, other))
        assert torch.equal(ours_bytes, theirs_bytes), name


def check_pipeline(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert ours.components.keys() == theirs.components.keys()
    assert dict(ours.config) == dict(theirs.config)
    for name, part in parts(ours).items():
        check_same(part, parts(theirs)[name])


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_a_pipeline_is_what_from_pretrained_loads(folder, variant, tmp_path):
    """Shards, tied weights and computed buffers included."""
    assert list(folder.glob("*/*.safetensors.index.json"))
    options = {"dtype": torch.bfloat16}
    if variant:
        with_variant(folder, variant, torch.float16)
        options = {"dtype": torch.float16, "variant": variant}
    weights = [*folder.glob(f"*/*.{variant}.safetensors")] if variant else True
    environ = {"COMPILE_CACHE_DIR": str(tmp_path / "cache"), "COMPILE_CACHE_STORE": "off"}
    with compile_cache.boot(str(folder), weights=weights, environ=environ) as boot:
        with boot.importing():
            pass
        assert boot.weights.has_copies
        pipeline = DiffusionPipeline.from_pretrained(str(folder), **options)
        assert mapped(tensors([*parts(pipeline).values()]))
        assert boot.to_gpu(pipeline) is pipeline
        assert not boot.weights._copies
    assert boot.weights._taken_bytes > 0
    check_pipeline(pipeline, DiffusionPipeline.from_pretrained(str(folder), **options).to("cuda"))
    assert ties(pipeline.text_encoder_2)


def test_without_a_gpu_a_model_stays_where_it_is(saved, tmp_path):
    environ = {"COMPILE_CACHE_DIR": str(tmp_path / "cache"), "COMPILE_CACHE_STORE": "off"}
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        compile_cache.boot(str(saved), weights=True, environ=environ) as boot,
    ):
        with boot.importing():
            pass
        assert not boot.weights.has_copies
        model = nn.Linear(2, 2)
        assert boot.to_gpu(model) is model
    assert model.weight.is_cpu


def test_weights_of_another_type_are_left_to_from_pretrained():
    """The demo model's text encoders are in fp32, the rest is in bf16."""
    folder = ROOT / "demo/flux-digits"
    with begun(folder) as early:
        pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
        early.give(pipeline.components.values())

    assert mapped(tensors([*parts(pipeline).values()])) == 0
    check_pipeline(pipeline, DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16))


def test_a_hub_id_loads_from_the_hubs_cache_alone(folder, snapshot, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    with begun(True) as early:
        pipeline = load_pipeline("org/name", None)
        early.give(pipeline.components.values())

    assert pipeline.config["_name_or_path"] == "org/name"
    check_same(pipeline.transformer, DiffusionPipeline.from_pretrained(folder, dtype=torch.float32).transformer)
    with pytest.raises(OSError, match="nowhere"):
        load_pipeline("org/nowhere", None)


def test_other_folders_of_a_model_are_not_read(folder):
    write_files(folder, {"vae/onnx/config.json": b"{}"})

    assert find_files(str(folder / "vae"), True) == [folder / DECODER]


# What a weight, a module or a host may be besides.


def save_one(folder: Path, **weights: torch.Tensor) -> Path:
    file = folder / "one.safetensors"
    save_file(weights, file)
    return file


def test_copies_that_cannot_be_given_are_freed_before_the_weights_are_moved(tmp_path, caplog):
    """Else both sets would be on the GPU: here the file is gone."""
    caplog.set_level(logging.INFO)
    file = save_one(tmp_path, large=torch.ones(1000, dtype=torch.bfloat16))
    with begun(file) as early:
        module = module_of(load_file(file))
        early._finish()
        file.unlink()
        assert taken(early, [module]) == 0
        assert not early._copies
    assert "weights.early_failed Could not use early copies of weights" in caplog.text


@pytest.mark.parametrize("odd", [torch.eye(4).to_sparse(), torch.nn.parameter.UninitializedBuffer()])
def test_a_sparse_or_lazy_tensor_does_not_keep_the_others_from_their_copies(tmp_path, odd):
    file = save_one(tmp_path, weight=torch.ones(4).half())
    with begun(file) as early:
        module, other = module_of(load_file(file)), nn.Module()
        other.register_buffer("odd", odd)
        early.give([other, module])
        assert mapped([module.weight_0]) == 0


def test_a_weight_keeps_its_strides(tmp_path):
    """A column that was transposed is contiguous in whichever strides."""
    file = save_one(tmp_path, column=torch.ones(5, 1).half())
    with begun(file) as early:
        module = module_of({"row": load_file(file)["column"].T})
        assert taken(early, [module]) == 1
    assert module.weight_0.stride() == (1, 1)


def test_weights_that_come_after_the_warm_up_are_not_said_to_have_no_files(saved, caplog):
    """The copies were there, or were still on their way."""
    caplog.set_level(logging.INFO)
    for finish in (EarlyWeights._finish, EarlyWeights.drop):
        with begun(saved) as early:
            finish(early)
            early.end()
            early.give(load(saved))
    assert "boot(weights=…) names no safetensors files" not in caplog.text


def test_a_failure_is_told_once(tmp_path, caplog):
    """Not again at the imports, nor when the model is moved."""
    caplog.set_level(logging.INFO)
    (tmp_path / "damaged.safetensors").write_bytes(b"x")
    with begun(tmp_path / "damaged.safetensors") as early:
        early.begin(CPU)
        early.give([])
    assert len(caplog.records) == 1


def test_a_chunk_whose_reader_could_not_begin_is_not_copied(saved, monkeypatch, caplog):
    """Its memory is not mapped, so the process would end. Threads start again before the copying begins."""
    caplog.set_level(logging.INFO)
    submit, calls = early_weights.ThreadPoolExecutor.submit, iter(range(1000))

    def refuse_the_third(*args: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("can't start new thread")
        return submit(*args)

    monkeypatch.setattr(early_weights.ThreadPoolExecutor, "submit", refuse_the_third)
    with begun(saved, chunk_bytes=1000) as early:
        assert len(early._chunks) > early_weights._AHEAD + 1
        assert taken(early, load(saved)) == 0
    assert "weights.early_failed Could not copy weights early" in caplog.text


def test_a_gpu_that_fails_at_the_first_question_costs_only_speed(saved, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(early_weights, "has_gpu", lambda: True)
    monkeypatch.setattr(early_weights, "_current_gpu", mock.Mock(side_effect=RuntimeError("CUDA in a forked process")))
    early = early_of(saved)
    early.begin()
    early.drop()
    assert "CUDA in a forked process" in caplog.text


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda parts: nn.ModuleDict({"only": parts[0]}), list])
def test_a_module_with_components_of_its_own_is_no_pipeline(tmp_path, kind, monkeypatch):
    file = save_one(tmp_path, first=torch.ones(4).half(), second=torch.ones(4).half())
    monkeypatch.setattr(early_weights, "has_gpu", lambda: True)
    monkeypatch.setattr(early_weights, "_current_gpu", lambda: CPU)
    environ = {"COMPILE_CACHE_DIR": str(tmp_path / "cache"), "COMPILE_CACHE_STORE": "off"}
    with compile_cache.boot("org/name", weights=[file], environ=environ) as boot:
        first, second = (module_of({"only": weight}) for weight in load_file(file).values())
        first.components = kind([second])
        monkeypatch.setattr(first, "to", lambda _device: first)
        boot.to_gpu(first)
    assert mapped([first.weight_0]) == 0
