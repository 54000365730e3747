"""LoRAs merged into the demo model's weights, and into a small SDXL's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline
from pipelines import SHAPES, build_pipeline
from safetensors.torch import save_file
from torch import nn

from models.image.lora import Lora, Loras
from models.image.lora_files import LoraError

DEMO = Path(__file__).parent.parent / "demo" / "flux-digits"
QUERY, KEY = "transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k"


@pytest.fixture(scope="module")
def loaded() -> Any:
    return DiffusionPipeline.from_pretrained(DEMO)


@pytest.fixture
def pipeline(loaded) -> Iterator[Any]:
    before = weights(loaded)
    yield loaded
    for name, weight in loaded.transformer.named_parameters():
        weight.data.copy_(before[name])


def weights(pipeline: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in pipeline.transformer.named_parameters()}


def changed(before: Mapping[str, torch.Tensor], pipeline: Any) -> set[str]:
    return {name for name, weight in weights(pipeline).items() if not torch.equal(weight, before[name])}


def factors(pipeline: Any, *layers: str, rank: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random factors as peft names them."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for layer in layers:
        out, size = pipeline.transformer.get_submodule(layer).weight.shape
        found[f"{layer}.lora_A.weight"] = torch.randn(rank, size, generator=generator) / 8
        found[f"{layer}.lora_B.weight"] = torch.randn(out, rank, generator=generator) / 8
    return found


def write(folder: Path, pipeline: Any, *layers: str, name: str = "lora", **options: Any) -> Path:
    """A file as diffusers' trainers write it."""
    FluxPipeline.save_lora_weights(folder / name, transformer_lora_layers=factors(pipeline, *layers, **options))
    return folder / name / "pytorch_lora_weights.safetensors"


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


def test_a_lora_of_scale_zero_is_none(tmp_path, pipeline):
    before = weights(pipeline)
    Loras(pipeline).use([Lora(write(tmp_path, pipeline, QUERY), 0.0)])
    assert not changed(before, pipeline)


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 8, "alpha_pattern": {"attn.to_q": 2}}, 0.5),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
    ],
)
def test_the_trainers_alpha_counts(tmp_path, pipeline, settings, factor):
    before, state = weights(pipeline), factors(pipeline, QUERY)
    FluxPipeline.save_lora_weights(
        tmp_path, transformer_lora_layers=state, transformer_lora_adapter_metadata={"r": 4, **settings}
    )
    Loras(pipeline).use([Lora(tmp_path / "pytorch_lora_weights.safetensors", 1.0)])
    expected = before[f"{QUERY}.weight"] + factor * product(state, QUERY)
    torch.testing.assert_close(pipeline.transformer.get_submodule(QUERY).weight, expected)


def test_kohyas_format_is_converted_with_its_alpha(tmp_path, pipeline):
    """Its query, key and value are one layer."""
    size = pipeline.transformer.get_submodule(QUERY).weight.shape[0]
    down, up = torch.randn(4, size) / 8, torch.randn(3 * size, 4) / 8
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    save_file(
        {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(2.0)},
        tmp_path / "kohya.safetensors",
    )
    before = weights(pipeline)
    Loras(pipeline).use([Lora(tmp_path / "kohya.safetensors", 1.0)])
    expected = before[f"{KEY}.weight"] + 0.5 * up[size : 2 * size] @ down
    torch.testing.assert_close(pipeline.transformer.get_submodule(KEY).weight, expected)


def test_xlabs_format_is_converted(tmp_path, pipeline):
    size = pipeline.transformer.get_submodule(QUERY).weight.shape[0]
    down, up = torch.randn(4, size) / 8, torch.randn(size, 4) / 8
    name = "double_blocks.0.processor.proj_lora1"
    save_file({f"{name}.down.weight": down, f"{name}.up.weight": up}, tmp_path / "xlabs.safetensors")
    before = weights(pipeline)
    Loras(pipeline).use([Lora(tmp_path / "xlabs.safetensors", 1.0)])
    assert changed(before, pipeline) == {"transformer_blocks.0.attn.to_out.0.weight"}


def refused(pipeline: Any, state: dict[str, torch.Tensor], folder: Path, pattern: str) -> None:
    before, loras = weights(pipeline), Loras(pipeline)
    save_file(state, folder / "bad.safetensors")
    with pytest.raises(LoraError, match=pattern):
        loras.use([Lora(folder / "bad.safetensors", 1.0)])
    assert not changed(before, pipeline)


def test_names_that_do_not_match_are_listed(tmp_path, pipeline):
    state = {f"transformer.{name}": tensor for name, tensor in factors(pipeline, QUERY).items()}
    extra = {f"transformer.blocks.{n}.to_q.lora_A.weight": torch.ones(4, 4) for n in range(7)}
    refused(pipeline, {**state, **extra}, tmp_path, r"FluxPipeline.*none of these: transformer\.blocks\.0.* and 2 more")


def test_a_part_for_a_network_that_the_pipeline_lacks_is_refused(tmp_path, pipeline):
    refused(pipeline, {"unet.down.to_q.lora_A.weight": torch.ones(4, 4)}, tmp_path, r"unet\.down\.to_q")


def test_shapes_that_do_not_fit_are_named(tmp_path, pipeline):
    state = {f"transformer.{name}": tensor[:, :3] for name, tensor in factors(pipeline, QUERY).items()}
    refused(
        pipeline, {name: tensor.contiguous() for name, tensor in state.items()}, tmp_path, rf"{QUERY} has up .* down"
    )


def test_a_factor_without_the_other_is_refused(tmp_path, pipeline):
    (name, tensor), *_ = factors(pipeline, QUERY).items()
    refused(pipeline, {f"transformer.{name}": tensor}, tmp_path, QUERY)


def test_a_file_of_other_weights_is_refused(tmp_path, pipeline):
    refused(pipeline, {"conv.weight": torch.ones(4, 4)}, tmp_path, "fit|convert")


def test_a_dora_is_refused(tmp_path, pipeline):
    FluxPipeline.save_lora_weights(
        tmp_path,
        transformer_lora_layers=factors(pipeline, QUERY),
        transformer_lora_adapter_metadata={"r": 4, "lora_alpha": 4, "use_dora": True},
    )
    with pytest.raises(LoraError, match="DoRA"):
        Loras(pipeline).use([Lora(tmp_path / "pytorch_lora_weights.safetensors", 1.0)])


def test_quantized_weights_are_refused(tmp_path, pipeline):
    file = write(tmp_path, pipeline, QUERY)
    layer = pipeline.transformer.get_submodule(QUERY)
    weight = layer.weight
    layer.weight = nn.Parameter(weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    try:
        with pytest.raises(LoraError, match="quantized"):
            Loras(pipeline).use([Lora(file, 1.0)])
    finally:
        layer.weight = weight


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


def test_a_pipeline_without_a_loader_is_named(tmp_path):
    with pytest.raises(LoraError, match="DDPMPipeline takes no LoRA"):
        Loras(diffusers.DDPMPipeline(None, diffusers.DDPMScheduler())).use([Lora(any_file(tmp_path), 1.0)])


def any_file(folder: Path) -> Path:
    save_file({"any": torch.ones(1)}, folder / "any.safetensors")
    return folder / "any.safetensors"


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
            kohya = prefix + name.removeprefix("text_model.").replace(".", "_")
            down, up = torch.randn(4, *layer.weight.shape[1:]) / 8, torch.randn(layer.weight.shape[0], 4) / 8
            up = up.reshape(*up.shape, *(1,) * (down.dim() - 2))
            state |= {f"{kohya}.lora_down.weight": down, f"{kohya}.lora_up.weight": up}
            state[f"{kohya}.alpha"] = torch.tensor(1.0)
            product = (up.flatten(1) @ down.flatten(1)).view(layer.weight.shape)
            layers[component, name] = (layer.weight.detach().float() + 0.25 * product).to(layer.weight.dtype)
    assert len(layers) > 6
    save_file(state, tmp_path / "kohya.safetensors")
    loras = Loras(sdxl)
    loras.use([Lora(tmp_path / "kohya.safetensors", 1.0)])
    for (component, name), expected in layers.items():
        torch.testing.assert_close(getattr(sdxl, component).get_submodule(name).weight.detach(), expected)
    loras.use([])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_factors_that_are_not_finite_are_refused(tmp_path, pipeline, wrong):
    state = {f"transformer.{name}": tensor * wrong for name, tensor in factors(pipeline, QUERY).items()}
    refused(pipeline, state, tmp_path, "not finite")


def test_a_dora_of_kohya_is_refused(tmp_path, pipeline):
    state = {f"transformer.{name}": tensor for name, tensor in factors(pipeline, QUERY).items()}
    refused(pipeline, {**state, f"transformer.{QUERY}.dora_scale": torch.ones(1)}, tmp_path, "DoRA")


def test_an_alpha_of_no_layer_is_refused(tmp_path, pipeline):
    state = {f"transformer.{name}": tensor for name, tensor in factors(pipeline, QUERY).items()}
    refused(pipeline, {**state, f"transformer.{KEY}.alpha": torch.tensor(1.0)}, tmp_path, f"{KEY}.alpha")


def test_names_in_errors_are_cut(tmp_path, pipeline):
    save_file({"transformer." + "x" * 5000: torch.ones(1)}, tmp_path / "bad.safetensors")
    with pytest.raises(LoraError) as caught:
        Loras(pipeline).use([Lora(tmp_path / "bad.safetensors", 1.0)])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [({"alpha_pattern": {"to_q|to_k": 8}}, "an expression"), ({"lora_alpha": "x"}, "settings is no positive number")],
)
def test_settings_that_cannot_be_followed_are_refused(tmp_path, pipeline, settings, pattern):
    FluxPipeline.save_lora_weights(
        tmp_path,
        transformer_lora_layers=factors(pipeline, QUERY),
        transformer_lora_adapter_metadata={"r": 4, "lora_alpha": 4, **settings},
    )
    with pytest.raises(LoraError, match=pattern):
        Loras(pipeline).use([Lora(tmp_path / "pytorch_lora_weights.safetensors", 1.0)])


def test_another_file_of_the_same_path_is_merged(tmp_path, pipeline):
    loras, file = Loras(pipeline), write(tmp_path, pipeline, QUERY)
    loras.use([Lora(file, 1.0)])
    before = weights(pipeline)
    write(tmp_path, pipeline, QUERY, name="other", rank=8).replace(file)
    loras.use([Lora(file, 1.0)])
    assert changed(before, pipeline)
