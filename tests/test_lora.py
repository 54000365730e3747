"""LoRAs merged into the demo model's weights, and into a small SDXL's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline
from pipelines import SHAPES, build_pipeline
from safetensors.torch import save_file

from models.image.lora import Loras
from models.image.lora_files import Lora, LoraError

DEMO = Path(__file__).parent.parent / "demo" / "flux-digits"
QUERY, KEY = "transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k"


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, dict[str, torch.Tensor]]:
    """The pipeline and its weights."""
    pipeline = DiffusionPipeline.from_pretrained(DEMO)
    return pipeline, weights(pipeline)


@pytest.fixture
def pipeline(loaded) -> Iterator[Any]:
    pipeline, before = loaded
    yield pipeline
    for name, weight in pipeline.transformer.named_parameters():
        weight.data.copy_(before[name])


def weights(pipeline: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in pipeline.transformer.named_parameters()}


def changed(before: Mapping[str, torch.Tensor], pipeline: Any) -> set[str]:
    return {name for name, weight in pipeline.transformer.named_parameters() if not torch.equal(weight, before[name])}


def factors(pipeline: Any, *layers: str, rank: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random factors as peft names them."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for layer in layers:
        out, size = pipeline.transformer.get_submodule(layer).weight.shape
        found[f"{layer}.lora_A.weight"] = torch.randn(rank, size, generator=generator) / 8
        found[f"{layer}.lora_B.weight"] = torch.randn(out, rank, generator=generator) / 8
    return found


def write(folder: Path, pipeline: Any, *layers: str, name: str = "lora", settings: Any = None, **options: Any) -> Path:
    """A file as diffusers' trainers write it, with their settings."""
    FluxPipeline.save_lora_weights(
        folder / name,
        transformer_lora_layers=factors(pipeline, *layers, **options),
        transformer_lora_adapter_metadata=settings and {"r": 4, **settings},
    )
    return folder / name / "pytorch_lora_weights.safetensors"


def use(pipeline: Any, file: Path, scale: float = 1.0, name: str = "") -> set[str]:
    """The weights that merging a file changes."""
    before = weights(pipeline)
    Loras(pipeline).use([Lora(file, scale, name)])
    return changed(before, pipeline)


def saved(folder: Path, state: dict[str, torch.Tensor], name: str = "good", **metadata: str) -> Path:
    save_file(state, folder / f"{name}.safetensors", metadata or None)
    return folder / f"{name}.safetensors"


def product(state: Mapping[str, torch.Tensor], layer: str) -> torch.Tensor:
    return state[f"{layer}.lora_B.weight"] @ state[f"{layer}.lora_A.weight"]


def test_a_merged_weight_is_the_base_and_the_scaled_product_and_going_back_is_exact(tmp_path, pipeline):
    before, loras = weights(pipeline), Loras(pipeline)
    loras.use([Lora(write(tmp_path, pipeline, QUERY, KEY), 0.5)])
    assert changed(before, pipeline) == {f"{QUERY}.weight", f"{KEY}.weight"}
    expected = before[f"{QUERY}.weight"] + 0.5 * product(factors(pipeline, QUERY, KEY), QUERY)
    torch.testing.assert_close(pipeline.transformer.get_submodule(QUERY).weight, expected)
    loras.use([])
    assert not changed(before, pipeline)
    assert not use(pipeline, write(tmp_path, pipeline, QUERY), 0.0), "a scale of zero"


def test_a_combination_gives_the_same_weights_whatever_was_merged_before(tmp_path, pipeline):
    one = Lora(write(tmp_path, pipeline, QUERY, name="one"), 1.0)
    two = Lora(write(tmp_path, pipeline, QUERY, KEY, name="two", rank=8, seed=1), -0.7)
    loras = Loras(pipeline)
    loras.use([one, two])
    both = weights(pipeline)
    for others in ([two], [], [one], [two, one]):
        loras.use(others)
        assert changed(both, pipeline)
        loras.use([one, two])
        assert not changed(both, pipeline)


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 8, "alpha_pattern": {"attn.to_q": 2}}, 0.5),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        # The first pattern that fits counts, as in peft's get_pattern_key; ^ is the name's start.
        ({"alpha_pattern": {"attn.to_q": 2, QUERY: 8}}, 0.5),
        ({"alpha_pattern": {"attn.to_q": 8, "to_q": 2}}, 2.0),
        ({"lora_alpha": 8, "alpha_pattern": {"^attn.to_q": 4, "q": 4}}, 2.0),
        ({"alpha_pattern": {f"^{QUERY}": 2, "to_q": 8}}, 0.5),
    ],
)
def test_the_trainers_alpha_counts(tmp_path, pipeline, settings, factor):
    before = weights(pipeline)
    use(pipeline, write(tmp_path, pipeline, QUERY, settings=settings))
    expected = before[f"{QUERY}.weight"] + factor * product(factors(pipeline, QUERY), QUERY)
    torch.testing.assert_close(pipeline.transformer.get_submodule(QUERY).weight, expected)


def test_kohyas_format_is_converted_with_its_alpha(tmp_path, pipeline):
    """Its query, key and value are one layer."""
    size = pipeline.transformer.get_submodule(QUERY).weight.shape[0]
    down, up = torch.randn(4, size) / 8, torch.randn(3 * size, 4) / 8
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    before = weights(pipeline)
    use(pipeline, saved(tmp_path, kohya(name, 2.0, down=down, up=up)))
    expected = before[f"{KEY}.weight"] + 0.5 * up[size : 2 * size] @ down
    torch.testing.assert_close(pipeline.transformer.get_submodule(KEY).weight, expected)


def test_xlabs_format_is_converted(tmp_path, pipeline):
    name = "double_blocks.0.processor.proj_lora1"
    down, up = torch.randn(4, WIDTH) / 8, torch.randn(WIDTH, 4) / 8
    file = saved(tmp_path, {f"{name}.down.weight": down, f"{name}.up.weight": up})
    assert use(pipeline, file) == {"transformer_blocks.0.attn.to_out.0.weight"}


def refused(pipeline: Any, state: dict[str, torch.Tensor], folder: Path, pattern: str, **metadata: str) -> None:
    before = weights(pipeline)
    with pytest.raises(LoraError, match=f"LoRA bad.safetensors: .*{pattern}") as caught:
        Loras(pipeline).use([Lora(saved(folder, state, "bad", **metadata), 1.0)])
    assert "Error" not in str(caught.value)
    assert len(str(caught.value)) < 1500
    assert not changed(before, pipeline)


def test_after_an_error_while_weights_change_all_are_made_right(tmp_path, pipeline, monkeypatch):
    before, loras = weights(pipeline), Loras(pipeline)
    one = Lora(write(tmp_path, pipeline, QUERY, KEY, name="one"), 1.0)
    answers = [torch.zeros(1)]
    monkeypatch.setattr("models.image.lora._merge", lambda base, updates: answers.pop())
    with pytest.raises(IndexError):
        loras.use([one])
    assert changed(before, pipeline)
    monkeypatch.undo()
    loras.use([])
    assert not changed(before, pipeline)


def test_a_pipeline_without_a_loader_is_named_and_a_lora_as_the_request_does(tmp_path):
    pipeline = diffusers.DDPMPipeline(None, diffusers.DDPMScheduler())
    with pytest.raises(LoraError, match="LoRA org/name: DDPMPipeline takes no LoRA"):
        Loras(pipeline).use([Lora(saved(tmp_path, {"any": torch.ones(1)}), 1.0, "org/name")])


@pytest.fixture(scope="module")
def sdxl() -> Any:
    return build_pipeline(SHAPES["tiny-sdxl"], DEMO, torch.device("cpu"))


def test_kohyas_format_of_a_unet_and_its_text_encoders_is_converted_with_its_alpha(tmp_path, sdxl):
    """diffusers names the alphas of attention layers unlike others."""
    named = {
        "unet": ("attn1.to_q", "attn1.to_out.0", "ff.net.2", "proj_in"),
        "text_encoder": ("layers.0.self_attn.q_proj", "layers.0.self_attn.out_proj", "layers.0.mlp.fc1"),
    }
    state, layers = {}, {}
    for component, endings in named.items():
        for name, layer in getattr(sdxl, component).named_modules():
            if not name.endswith(endings) or not hasattr(layer, "weight"):
                continue
            prefix = "lora_unet_" if component == "unet" else "lora_te1_text_model_"
            flat = prefix + name.removeprefix("text_model.").replace(".", "_")
            down, up = torch.randn(4, *layer.weight.shape[1:]) / 8, torch.randn(layer.weight.shape[0], 4) / 8
            up = up.reshape(*up.shape, *(1,) * (down.dim() - 2))
            state |= kohya(flat, 1.0, down=down, up=up)
            product = (up.flatten(1) @ down.flatten(1)).view(layer.weight.shape)
            layers[component, name] = (layer.weight.detach().float() + 0.25 * product).to(layer.weight.dtype)
    assert len(layers) > 6
    loras = Loras(sdxl)
    loras.use([Lora(saved(tmp_path, state), 1.0)])
    for (component, name), expected in layers.items():
        torch.testing.assert_close(getattr(sdxl, component).get_submodule(name).weight.detach(), expected)
    loras.use([])


IMAGE_QKV, IMAGE_OUT = (f"lora_unet_double_blocks_0_img_attn_{part}" for part in ("qkv", "proj"))
T5 = "te2_encoder_block_0_layer_0_SelfAttention_q"
WIDTH = 128  # of the demo model


def kohya(name: str, alpha: Any = None, **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """A layer in kohya's format, or with other factors, `down` and `up`."""
    width = 3 * WIDTH if name == IMAGE_QKV else WIDTH
    parts = {"lora_down": torch.ones(4, WIDTH), "lora_up": torch.ones(width, 4)}
    parts |= {f"lora_{part}": tensor for part, tensor in changed.items()}
    state = {f"{name}.{part}.weight": tensor for part, tensor in parts.items()}
    return state if alpha is None else {**state, f"{name}.alpha": torch.as_tensor(alpha)}


DOWN, UP = torch.ones(4, WIDTH), torch.ones(WIDTH, 4)


def peft(down: torch.Tensor = DOWN, up: torch.Tensor = UP, alpha: Any = None) -> dict[str, torch.Tensor]:
    state = {f"transformer.{QUERY}.lora_A.weight": down, f"transformer.{QUERY}.lora_B.weight": up}
    return state if alpha is None else {**state, f"transformer.{QUERY}.alpha": torch.as_tensor(alpha)}


ALPHAS = [-2.0, -1e-30, 0.0, float("nan"), float("inf"), [1.0, 2.0], 1j, -1]
LAYERS = [
    IMAGE_OUT,
    "lora_te1_text_model_encoder_layers_0_mlp_fc1",
    "lora_transformer_transformer_blocks_0_attn_to_q",
    QUERY,
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("layer", "alpha"),
    [*((IMAGE_QKV, alpha) for alpha in ALPHAS), *zip(LAYERS * 2, ALPHAS, strict=True)],
    ids=str,
)
def test_an_alpha_that_is_no_positive_number_is_refused_and_ends(tmp_path, pipeline, layer, alpha):
    state = peft(alpha=alpha) if layer == QUERY else kohya(layer, alpha)
    refused(pipeline, state, tmp_path, f"{layer}.alpha is no positive number")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("alpha", [-2.0, 0.0, 1e308])
def test_an_alpha_of_a_unet_that_is_no_number_to_multiply_by_is_refused(tmp_path, sdxl, alpha):
    name = "lora_unet_down_blocks_1_attentions_0_proj_in"
    state = kohya(name, torch.tensor(alpha, dtype=torch.float64), down=torch.ones(4, 8), up=torch.ones(8, 4))
    with pytest.raises(LoraError, match=f"bad.safetensors: .*{name}|down_blocks.1.attentions.0.proj_in"):
        Loras(sdxl).use([Lora(saved(tmp_path, state, "bad"), 1.0)])


@pytest.mark.parametrize(
    ("state", "pattern"),
    [
        *(
            (kohya(layer, 1.0, down=torch.ones(4, WIDTH).to(kind)), f"{layer}.lora_down.weight is of type torch.{name}")
            for layer in (IMAGE_QKV, IMAGE_OUT)
            for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "int32", "bool", "complex64")
            for kind in (getattr(torch, name),)
        ),
        (kohya(IMAGE_OUT, down=(0 * DOWN).byte().view(torch.float4_e2m1fn_x2)), "lora_down.weight is of type torch.fl"),
        (kohya(IMAGE_QKV, torch.tensor(1e308, dtype=torch.float64)), f"{IMAGE_QKV}.lora_up.* not finite, or too large"),
        (peft(1e20 * DOWN, 1e20 * UP), "to_q.lora_A.weight, .*not finite, or too"),
        (peft(1e4 * DOWN, 1e4 * UP), "not finite, or too large"),
        (peft(1e30 * DOWN.bfloat16(), 1e30 * UP.bfloat16()), "not finite, or too large"),
        (peft(1e300 * DOWN.double(), 1e-300 * UP.double()), "not finite, or too large"),
        (peft(float("nan") * DOWN), "not finite, or too large"),
        (kohya(IMAGE_QKV, 1.0, up=torch.ones(3 * WIDTH + 1, 4)), f"{IMAGE_QKV}.lora_up.weight"),
        (kohya(IMAGE_QKV, 1.0, up=torch.ones(3 * WIDTH, 5)), "to_q has up .*5.* and down"),
        (kohya(IMAGE_OUT, 1.0, up=torch.ones(WIDTH)), f"{IMAGE_OUT}.lora_up.weight has less than two dimensions"),
        (kohya(IMAGE_OUT, 1.0, down=torch.tensor(1.0)), "lora_down.weight has less than two dimensions"),
        (kohya(IMAGE_OUT, 1.0, down=torch.ones(0, WIDTH), up=torch.ones(WIDTH, 0)), "lora_down.weight has no elements"),
        (kohya("lora_unet_single_blocks_0_linear1", 1.0), "lora_unet_single_blocks_0_linear1.lora_up.weight"),
        (kohya("lora_transformer_transformer_blocks_0_attn_to_q"), "lora_transformer_.*lora_down"),
        (kohya("lora_unet_double_blocks_999999999_img_attn_proj"), "over three digits"),
        ({f"{IMAGE_OUT}.lora_down.weight": DOWN}, f"{IMAGE_OUT}.lora_up"),
        (
            {f"transformer.{QUERY.replace('to_q', 'norm_q')}.lora_{part}.weight": torch.ones(32, 32) for part in "AB"},
            "norm_q",
        ),
        ({str(number): torch.ones(1, 1) for number in range(-10_001, 10_001)}, "20002 tensors"),
        ({}, "0 tensors"),
        ({"transformer." + "x" * 5000: torch.ones(1)}, "xxx"),
        (
            {**peft(), **{f"transformer.blocks.{n}.to_q.lora_A.weight": torch.ones(4, 4) for n in range(7)}},
            r"FluxPipeline.*none of these: transformer\.blocks\.0.* and 2 more",
        ),
        ({"unet.down.to_q.lora_A.weight": torch.ones(4, 4)}, r"unet\.down\.to_q"),
        (peft(torch.ones(4, 3), torch.ones(WIDTH, 3)), rf"{QUERY} has up .* down"),
        ({f"transformer.{QUERY}.lora_A.weight": DOWN}, QUERY),
        ({"conv.weight": torch.ones(4, 4)}, "fit|convert"),
        ({**peft(), f"transformer.{QUERY}.dora_scale": torch.ones(1)}, "DoRA"),
        ({**peft(), f"transformer.{KEY}.alpha": torch.tensor(1.0)}, f"{KEY}.alpha"),
        *(
            (
                dict(zip([f"{name}.{part}.weight" for part in parts], kohya(IMAGE_QKV).values(), strict=True)),
                "double_blocks.0.img",
            )
            for start in ("", "base_model.model.", "model.")  # which diffusers does not know
            for name in (f"{start}double_blocks.0.img_attn.qkv",)
            for parts in (("lora_down", "lora_up"), ("lora_A", "lora_B"))
        ),
    ],
)
def test_what_diffusers_and_torch_cannot_take_is_named(tmp_path, pipeline, state, pattern):
    refused(pipeline, state, tmp_path, pattern)


@pytest.mark.parametrize(
    "left_out",
    [
        kohya(f"lora_{T5}", 1.0),
        kohya(f"lora_{T5.replace('te2', 'te3')}"),
        kohya("lora_te_text_projection"),
        {f"{IMAGE_OUT}.diff_b": torch.ones(WIDTH)},
        {f"{IMAGE_OUT}.dora_scale": torch.ones(WIDTH)},
        {"lora_te1_text_model_embeddings_position_embedding.diff": torch.ones(WIDTH)},
        {"text_encoders.t5xxl.transformer.encoder.block.0.lora_up.weight": torch.ones(4, 4)},
        peft(),
    ],
    ids=lambda state: next(iter(state)),
)
def test_what_diffusers_leaves_out_of_a_file_is_refused_by_name(tmp_path, pipeline, left_out):
    """Unless it is zero, and so changes nothing."""
    names = list(left_out) if QUERY not in next(iter(left_out)) else [IMAGE_OUT]
    refused(pipeline, {**kohya(IMAGE_OUT), **left_out}, tmp_path, f"has none of these: .*{names[0]}")
    zero = {name: torch.zeros_like(tensor) for name, tensor in left_out.items() if not name.endswith(".alpha")}
    if names[0] in zero:
        file = saved(tmp_path, {**kohya(IMAGE_OUT), **zero})
        assert use(pipeline, file) == {"transformer_blocks.0.attn.to_out.0.weight"}


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"alpha_pattern": {"to_q|to_k": 8}}, "an expression"),
        ({"alpha_pattern": {"(a+)+": 8}}, "an expression"),
        ({"alpha_pattern": ["to_q"]}, "alpha_pattern is no table"),
        *(({"lora_alpha": bad}, f"{QUERY} in the file's settings is no positive") for bad in ("x", [], -1, 10**400)),
        ({"lora_alpha": float("nan")}, "no positive number"),
        ({"lora_alpha": 1e308}, "not finite, or too large"),
        ({"use_dora": True}, "DoRA"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(tmp_path, pipeline, settings, pattern):
    with pytest.raises(LoraError, match=pattern):
        use(pipeline, write(tmp_path, pipeline, QUERY, settings={"lora_alpha": 4, **settings}))


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000, "7"])
def test_settings_that_are_no_object_are_refused(tmp_path, pipeline, text):
    refused(pipeline, peft(), tmp_path, "the file's lora_adapter_metadata is no JSON", lora_adapter_metadata=text)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_that_has_become_another_is_merged(tmp_path, pipeline, in_place):
    """Also one that was written in place, with the same size, and with its former time of modification."""
    loras, file = Loras(pipeline), write(tmp_path, pipeline, QUERY)
    loras.use([Lora(file, 1.0)])
    before, former = weights(pipeline), file.stat()
    other = write(tmp_path, pipeline, QUERY, name="other", seed=1)
    if in_place:
        file.write_bytes(other.read_bytes())
        os.utime(file, ns=(former.st_atime_ns, former.st_mtime_ns))
        assert (file.stat().st_ino, file.stat().st_size) == (former.st_ino, former.st_size)
    else:
        other.replace(file)
    loras.use([Lora(file, 1.0)])
    assert changed(before, pipeline)
