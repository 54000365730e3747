"""Weights: taken to a device as `from_pretrained` takes them, bit for bit; what is unusual is left to it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging
from huggingface_hub import constants
from torch import nn

from models.early_weights import need_no_cast
from models.image.pipeline import load_pipeline
from models.weights import move

DEMO = Path(__file__).parents[1] / "demo" / "flux-digits"
CPU = torch.device("cpu")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[torch.dtype, Path]:
    """Saved pipelines in bf16 and fp16, with two components in several files each."""
    saved = {}
    for dtype in (torch.bfloat16, torch.float16):
        saved[dtype] = tmp_path_factory.mktemp("pipelines")
        pipeline = DiffusionPipeline.from_pretrained(DEMO).to(dtype)
        pipeline.save_pretrained(saved[dtype])
        for name in ("transformer", "text_encoder_2"):
            shutil.rmtree(saved[dtype] / name)
            getattr(pipeline, name).save_pretrained(saved[dtype] / name, max_shard_size="100KB")
    return saved


@pytest.fixture
def folder(folders, tmp_path) -> Path:
    """A copy of the one in bf16, to damage."""
    return Path(shutil.copytree(folders[torch.bfloat16], tmp_path / "pipeline"))


@pytest.fixture(autouse=True)
def no_progress_bars() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def parts(pipeline: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, each under all of its names."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def ties(module: nn.Module) -> set[frozenset[str]]:
    """The names of each tensor that has several."""
    names: dict[int, set[str]] = {}
    for name, tensor in tensors(module).items():
        names.setdefault(id(tensor), set()).add(name)
    return {frozenset(same) for same in names.values() if len(same) > 1}


def check_same(module: nn.Module, expected: nn.Module) -> None:
    """Every tensor is the same to the bit and in all that it has, and so is the module."""
    ours, theirs = tensors(module), tensors(expected)
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_pipeline_is_what_from_pretrained_loads(folders, dtype, device):
    """Shards, tied weights and computed buffers included; in fp16, T5 keeps some weights in fp32."""
    folder = folders[dtype]
    assert list(folder.glob("*/*.safetensors.index.json"))
    assert need_no_cast(folder, dtype)

    pipeline = load_pipeline(str(folder), None, dtype, torch.device(device, 0) if device == "cuda" else CPU)

    check_pipeline(pipeline, DiffusionPipeline.from_pretrained(str(folder), dtype=dtype, device_map=device))
    assert ties(pipeline.text_encoder_2)
    kept = {tensor.dtype for tensor in pipeline.text_encoder_2.parameters()}
    assert kept == ({dtype} if dtype is torch.bfloat16 else {dtype, torch.float32})


def test_weights_of_another_type_are_left_to_from_pretrained():
    """The demo model's text encoders are in fp32, the rest is in bf16."""
    assert not need_no_cast(DEMO, torch.bfloat16)

    pipeline = load_pipeline(str(DEMO), None, torch.bfloat16, CPU)

    check_pipeline(pipeline, DiffusionPipeline.from_pretrained(str(DEMO), dtype=torch.bfloat16))


def test_a_hub_id_loads_from_the_hubs_cache_alone(folder, tmp_path, monkeypatch):
    cache = tmp_path / "hub"
    repository = cache / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.copytree(folder, repository / "snapshots" / COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    pipeline = load_pipeline("org/name", None, torch.bfloat16, CPU)

    assert pipeline.config["_name_or_path"] == "org/name"
    check_same(pipeline.transformer, DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16).transformer)
    with pytest.raises(OSError, match="nowhere"):
        load_pipeline("org/nowhere", None, torch.bfloat16, CPU)


@pytest.mark.parametrize("name", ["quantized", "diffusion_pytorch_model.bin"])
def test_a_quantized_component_and_other_files_are_left_to_from_pretrained(folder, name):
    file, config = folder / "vae" / "diffusion_pytorch_model.safetensors", folder / "vae" / "config.json"
    if name == "quantized":
        config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "x"}}))
    else:
        file.rename(file.with_name(name))

    assert not need_no_cast(folder, torch.bfloat16)


def test_other_folders_of_a_model_are_not_read(folder):
    (folder / "vae" / "onnx").mkdir()
    (folder / "vae" / "onnx" / "config.json").write_text("{}")

    assert need_no_cast(folder / "vae", torch.bfloat16)


@pytest.mark.parametrize("kept_bytes", [0, 7, 100, -1, None])
def test_a_file_that_was_cut_short_or_is_missing_is_named(folder, kept_bytes):
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    if kept_bytes is None:
        path = next((folder / "transformer").glob("*.safetensors"))
    content = path.read_bytes()
    path.unlink()
    if kept_bytes is not None:
        path.write_bytes(content[:kept_bytes])

    with pytest.raises(OSError, match=path.name):
        load_pipeline(str(folder), None, torch.bfloat16, CPU)


class Odd(nn.Module):
    """Tensors of every kind that a module may have."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.large = nn.Parameter(torch.randn(1000, 37, generator=generator))
        self.tied = self.large
        self.transposed = nn.Parameter(torch.randn(5, 7, generator=generator).T)
        self.frozen = nn.Parameter(torch.randn(3, generator=generator).to(torch.bfloat16), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("counts", torch.arange(11))
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.register_buffer("nothing", None)


@pytest.mark.parametrize("piece_bytes", [1, 4096, 8 << 20])
def test_any_module_moves_as_it_is(piece_bytes, monkeypatch):
    """Tied, transposed, empty and frozen tensors, whatever the size of the pieces."""
    monkeypatch.setattr("models.weights._PIECE_BYTES", piece_bytes)
    module = Odd().eval()
    if piece_bytes == 1:
        module.large = module.tied = nn.Parameter(torch.randn(3))
    expected = copy.deepcopy(module)
    parameter = module.large

    move([module, module], CPU)

    assert module.large is parameter
    check_same(module, expected)


def test_an_error_on_a_thread_is_raised(monkeypatch):
    def fail(*args: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(numpy, "copyto", fail)

    with pytest.raises(OSError, match="the disk is gone"):
        move([nn.Linear(4, 4)], CPU)
