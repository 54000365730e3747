"""Pipelines that can and cannot be served: the demo model's parts in other pipelines of diffusers."""

from __future__ import annotations

import inspect
import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import numpy
import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, DiffusionPipeline, FluxPipeline
from diffusers.utils import BaseOutput
from PIL import Image
from pipelines import SHAPES, build_pipeline, check_picture, networks, save
from programs import run_program

from models.image.inputs import ImageInputs
from models.image.pictures import PictureFiles, open_picture
from models.image.pipeline import DiffusionModel, check_pipeline, find_pipeline, ignored_inputs
from models.image.settings import ImageSettings
from models.image.sizes import Size

DEMO = Path(__file__).parent.parent / "demo" / "flux-digits"
SIZES = [Size(64, 64), Size(96, 64)]
PICTURE = ImageInputs("a handwritten one", SIZES[0], seed=0, num_inference_steps=1)


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return DiffusionPipeline.from_pretrained(DEMO).components


@pytest.fixture
def model(parts) -> DiffusionModel:
    return DiffusionModel(FluxPipeline(**parts), SIZES)


def test_a_pipeline_without_a_known_network_is_named_with_what_it_has(parts):
    with pytest.raises(ValueError, match=r"FluxPipeline has no transformer, unet or prior.*it has .*text_encoder.*vae"):
        DiffusionModel(FluxPipeline(**{**parts, "transformer": None}), SIZES)


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("FluxImg2ImgPipeline", "strength"),
        ("FluxInpaintPipeline", "mask_image"),
        ("FluxFillPipeline", "mask_image"),
        ("FluxControlPipeline", "control_image"),
        ("Kandinsky5I2IPipeline", "image"),
        *((f"{name}Pipeline", None) for name in ("Flux", "FluxKontext", "QwenImage", "StableDiffusion")),
    ],
)
def test_a_pipeline_that_needs_more_than_a_prompt_is_refused_before_it_is_loaded_and_no_other(name, needed):
    refusal = pytest.raises(ValueError, match=rf"{name} needs more than a prompt .*{needed}")
    with refusal if needed else nullcontext():
        check_pipeline(getattr(diffusers, name))


def test_a_loaded_pipeline_that_needs_a_picture_or_has_no_prompt_is_refused(parts):
    """A pipeline of the repository's own code is known only once it is loaded."""
    with pytest.raises(ValueError, match=r"FluxImg2ImgPipeline .*strength"):
        DiffusionModel(diffusers.FluxImg2ImgPipeline(**parts), SIZES)
    with pytest.raises(ValueError, match="DDPMPipeline takes no prompt"):
        DiffusionModel(DDPMPipeline(None, DDPMScheduler()), SIZES)


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [
        ("FluxPipeline", "image", "FluxImg2ImgPipeline"),
        ("FluxPipeline", "mask", "FluxInpaintPipeline"),
        ("StableDiffusionXLPipeline", "image", "StableDiffusionXLImg2ImgPipeline"),
        ("StableDiffusion3Pipeline", "mask", "StableDiffusion3InpaintPipeline"),
        ("FluxKontextPipeline", "image", "FluxKontextPipeline"),
    ],
)
def test_the_pipeline_that_starts_from_a_picture_has_the_name_that_diffusers_gives_it(name, given, found):
    assert find_pipeline(getattr(diffusers, name), given) is getattr(diffusers, found)


def noise(width: int, height: int) -> Image.Image:
    return Image.effect_noise((width, height), 80)


def drawn(model: DiffusionModel, **changed: Any) -> numpy.ndarray[Any, Any]:
    picture = model.run(replace(PICTURE, num_inference_steps=4, shows_progress=False, **changed))
    assert picture.size == (64, 64)
    return numpy.asarray(picture, dtype=float)


def test_a_picture_to_start_from_is_kept_the_more_the_smaller_the_strength(model):
    start = noise(200, 120)
    little, half, all_of_it = (drawn(model, image=start, strength=strength) for strength in (0.25, 0.5, 1.0))
    assert abs(little - half).mean() < abs(little - all_of_it).mean()
    assert abs(little - half).mean() > 1


def test_a_mask_keeps_what_is_black_to_the_bit(model):
    start = noise(64, 64)
    original = numpy.asarray(start.convert("RGB"), dtype=float)
    kept = drawn(model, image=start, mask=Image.new("L", (64, 64), 0), strength=1.0)
    assert numpy.array_equal(kept, original)
    half = Image.new("L", (64, 64), 0)
    half.paste(255, (0, 0, 64, 32))
    changed = drawn(model, image=start, mask=half, strength=1.0) != original
    assert changed[:30].any()
    assert not changed[34:].any()


def test_a_mask_of_another_shape_is_cut_as_its_image(model):
    """Its upper part is that of the image."""
    start = noise(128, 64)
    mask = Image.new("L", (100, 100), 0)
    mask.paste(255, (0, 0, 100, 50))
    cut = numpy.asarray(start.crop((32, 0, 96, 64)).convert("RGB"))
    changed = drawn(model, image=start, mask=mask, strength=1.0) != cut
    assert changed[:28].any()
    assert not changed[36:].any()


def test_what_a_request_leaves_open_is_as_without_a_picture(model):
    """FLUX's pipelines for pictures have a guidance of their own."""
    kind = diffusers.FluxImg2ImgPipeline
    with mock.patch.object(kind, "__call__", autospec=True, side_effect=kind.__call__) as call:
        drawn(model, image=noise(64, 64), strength=0.5)
        assert call.call_args.kwargs["guidance_scale"] == model._parameters["guidance_scale"].default
        drawn(model, image=noise(64, 64), strength=0.1)
        assert call.call_args.kwargs["num_inference_steps"] == 10


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "CMYK"])
def test_transparent_parts_show_the_background(tmp_path, mode):
    picture = Image.new("RGBA", (4, 4), (10, 10, 10, 0)).convert(mode)
    file = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
    picture.save(file)
    if mode in ("RGBA", "LA"):
        assert open_picture(str(file), "white").getpixel((0, 0)) == (255, 255, 255)
        assert open_picture(str(file), "black").getpixel((0, 0)) == (0, 0, 0)
    assert open_picture(str(file), "white").mode == "RGB"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (Image.new("I;16", (4, 4)), "8 bits"),
        (Image.new("L", (8000, 7000)), "50 million pixels"),
        (SimpleNamespace(save=lambda path: path.write_text("text")), "no picture that Pillow can read"),
    ],
)
def test_files_that_would_be_read_wrong_or_fill_the_memory_are_refused(tmp_path, content, why):
    content.save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=why):
        open_picture(str(tmp_path / "a.png"), "white")


@pytest.mark.parametrize("name", ["FluxImg2Img", "FluxInpaint", "StableDiffusionImg2Img", "StableDiffusionXLInpaint"])
def test_below_1_a_picture_is_changed_by_one_step_at_least_and_one_is_left_out(model, name):
    """Whatever diffusers' rounding is, and however small or near 1 the strength: 200 steps are the most."""
    kind = getattr(diffusers, f"{name}Pipeline")
    parameters = inspect.signature(kind.__call__).parameters
    picture = replace(PICTURE, image=noise(8, 8))
    small = (5e-324, 1e-300, 1e-9, 0.003, *(1 / steps for steps in range(2, 201)))
    for steps in (2, 3, 4, 8, 28, 49, 98, 197, 200):
        for strength in (*small, 0.4, 0.75, 0.8, 0.97, 1 - 2**-53):
            inputs = replace(picture, num_inference_steps=steps, strength=strength)
            given, at = model._schedule(inputs, parameters)
            scheduler = SimpleNamespace(timesteps=range(given), order=1)
            timesteps, run = kind.get_timesteps(SimpleNamespace(scheduler=scheduler), given, at, None)
            assert len(timesteps) == run
            assert 1 <= run <= given - 1, (steps, strength)
            assert given <= max(steps, 200), (steps, strength)


@pytest.mark.parametrize(
    ("steps", "strength", "masked"),
    [
        *((4, 0.8, False), (2, 0.9, True), (3, 0.75, True), (8, 0.97, False), (2, 1e-9, False), (4, 1 - 2**-53, True)),
        (1, 1.0, False),
    ],
)
def test_another_picture_to_start_from_gives_another_result_but_with_a_strength_of_1(model, steps, strength, masked):
    mask = Image.new("L", (64, 64), 255) if masked else None
    inputs = replace(PICTURE, num_inference_steps=steps, strength=strength, mask=mask, shows_progress=False)
    red, blue = (model.run(replace(inputs, image=Image.new("RGB", (64, 64), colour))) for colour in ("red", "blue"))
    assert (red.tobytes() != blue.tobytes()) is (strength < 1)


@pytest.mark.parametrize(
    ("steps", "strength", "why"),
    [
        (4, 0.0, "prompt_strength 0"),
        (4, -0.5, "prompt_strength 0"),
        (4, float("nan"), "prompt_strength 0"),
        (1, 0.8, "num_inference_steps 1"),
        (1, 1e-9, "num_inference_steps 1"),
    ],
)
def test_what_would_keep_all_or_nothing_of_the_picture_is_refused(parts, steps, strength, why):
    """Before a LoRA is downloaded."""
    inputs = replace(PICTURE, num_inference_steps=steps, image=noise(64, 64), strength=strength)
    DiffusionModel(diffusers.FluxKontextPipeline(**parts), SIZES).pipeline_for(inputs)  # it has no strength
    with pytest.raises(ValueError, match=why):
        DiffusionModel(FluxPipeline(**parts), SIZES).pipeline_for(inputs)


@pytest.mark.parametrize("name", ["prompt", "negative_prompt"])
def test_a_prompt_that_would_fill_the_memory_is_refused(model, name):
    model.pipeline_for(replace(PICTURE, **{name: "a" * 20_000}))
    with pytest.raises(ValueError, match="more than 20000 characters"):
        model.pipeline_for(replace(PICTURE, **{name: "a" * 20_001}))


def fails(self: Any, prompt: str, image: Any = None, **others: Any) -> Any:
    """As InstructPix2Pix: the picture is optional in its signature, and needed."""
    raise TypeError(f"image has incorrect format: {type(image)}")


def answers(**answer: Any) -> Any:
    return lambda self, prompt, **others: BaseOutput(**answer)


def made_of(parts: dict[str, Any], call: Any, name: str = "Other") -> FluxPipeline:
    """A pipeline of a class of its own, of which diffusers knows no relatives."""
    return type(name, (FluxPipeline,), {"__call__": call})(**parts)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (answers(images=numpy.full((1, 64, 64, 3), numpy.nan)), "Other drew what are no numbers; give a smaller lora_"),
        (answers(frames=[[Image.new("RGB", (64, 64))]]), "Other gives frames, and no images"),
    ],
)
def test_what_is_no_picture_is_an_error_that_says_so(parts, call, why):
    with pytest.raises(ValueError, match=why):
        DiffusionModel(made_of(parts, call), SIZES).run(PICTURE)


def test_pipelines_for_pictures_share_every_part(parts):
    pipeline = FluxPipeline(**parts)
    model = DiffusionModel(pipeline, SIZES)
    drawn(model, image=noise(64, 64), strength=0.5)
    _, other = model._pipelines.values()
    assert all(other.components[name] is part for name, part in pipeline.components.items())


def test_on_a_gpu_the_decoder_and_large_encoders_without_a_cache_are_compiled_too(parts, model, monkeypatch):
    denoiser = (parts["transformer"], {})
    assert list(model.networks()) == [denoiser], "the tests run on a CPU"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    decoder = (parts["vae"].decoder, {"whole": True, "after_ready": True})
    assert list(model.networks()) == [denoiser, decoder], "its encoders are small"
    monkeypatch.setattr("models.image.pipeline._LARGE_ENCODER", 0)
    encoders = [(parts[name], {"after_ready": True}) for name in ("text_encoder", "text_encoder_2")]
    assert list(model.networks()) == [denoiser, decoder, *encoders]


def test_a_mask_needs_an_image_and_a_picture_a_pipeline_that_takes_it(parts):
    model = DiffusionModel(made_of(parts, FluxPipeline.__call__), SIZES)
    with pytest.raises(ValueError, match="a mask needs an image"):
        model.run(replace(PICTURE, mask=noise(64, 64)))
    with pytest.raises(ValueError, match="no pipeline that takes image and has the parts of Other"):
        model.run(replace(PICTURE, image=noise(64, 64)))


@pytest.mark.parametrize("is_taken", [False, True])
def test_guidance_is_in_the_log_of_the_setup_if_the_network_does_not_take_it(parts, caplog, is_taken):
    """The demo model's network takes none, as Qwen-Image's does not."""
    network = parts["transformer"]
    network = type(network).from_config({**network.config, "guidance_embeds": is_taken})
    with caplog.at_level(logging.INFO):
        DiffusionModel(FluxPipeline(**{**parts, "transformer": network}), SIZES)
    assert ("FluxPipeline ignores guidance_scale without a negative_prompt" in caplog.text) is not is_taken


def steers(
    self: Any, prompt: str, negative_prompt: str | None = None, true_cfg_scale: float = 2.0, **others: Any
) -> Any:
    """As Qwen-Image 2.1: `true_cfg_scale` alone."""
    return BaseOutput(images=[Image.new("L", (64, 64), round(true_cfg_scale))])


@pytest.mark.parametrize(("asked", "scale"), [(None, 2), (0, 0), (5.0, 5)])
def test_a_negative_prompt_uses_the_guidance_asked_for(parts, asked, scale):
    inputs = ImageInputs("a", SIZES[0], seed=0, negative_prompt="b", guidance_scale=asked)
    assert DiffusionModel(made_of(parts, steers), SIZES).run(inputs).getpixel((0, 0)) == scale


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("FluxKontextPipeline", "ignores prompt_strength"),
        ("QwenImageEditPipeline", "ignores prompt_strength"),
        ("QwenImagePipeline", "ignores guidance_scale without a negative_prompt"),
        ("HunyuanImagePipeline", "ignores guidance_scale: it has no such parameter"),
    ],
)
def test_inputs_that_a_pipeline_ignores_are_known_from_its_signature(parts, name, reason):
    pipeline = object.__new__(getattr(diffusers, name))  # its real parts are gigabytes
    assert any(reason in line for line in ignored_inputs(pipeline, parts["transformer"]))


def test_a_size_that_the_pipeline_does_not_draw_is_in_the_log_once(parts, caplog):
    """Kontext and HunyuanDiT have a size of their own for the one asked for."""
    model = DiffusionModel(made_of(parts, answers(images=[Image.new("RGB", (64, 64))])), SIZES)
    for size in (SIZES[0], SIZES[1], SIZES[1]):
        model.run(ImageInputs("a", size, seed=0))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "Other drew 64x64 where 96x64 was asked for" in warnings[0]


def edits(self: Any, prompt: str, width: int = 64, height: int = 64, image: Any = None, **others: Any) -> Any:
    """As Qwen-Image-Edit-Plus: the picture is optional in its signature, and needed; it takes two. Draws their widths
    in its first pixels."""
    widths = [one.width for one in (image if isinstance(image, list) else [image])]
    drawn = Image.new("RGB", (width, height))
    drawn.putdata([(each, 0, 0) for each in widths])
    return BaseOutput(images=[drawn])


def widths_of(model: DiffusionModel, **changed: Any) -> list[int]:
    inputs = replace(PICTURE, shows_progress=False, **changed)
    return [red for red, *_ in model.run(inputs).getdata() if red]


def test_a_pipeline_that_edits_gets_each_image_in_the_size_of_its_own_shape(parts):
    """Whatever size is drawn."""
    model = DiffusionModel(made_of(parts, edits), SIZES, images=2)
    assert widths_of(model, image=noise(300, 200)) == [96]
    assert widths_of(model, image=noise(30, 30), image_2=noise(90, 60), size=SIZES[1]) == [64, 96]


def test_the_warm_up_edits_as_many_images_as_requests_may_give(parts):
    def given(model: DiffusionModel) -> set[int]:
        return {(each.image is not None) + (each.image_2 is not None) for each in model.warm_up_inputs()}

    assert given(DiffusionModel(FluxPipeline(**parts), SIZES)) == {0}
    assert given(DiffusionModel(diffusers.FluxKontextPipeline(**parts), SIZES)) == {0, 1}
    assert given(DiffusionModel(made_of(parts, edits), SIZES, images=2)) == {0, 1, 2}


def test_that_a_pipeline_needs_an_image_is_found_in_the_warm_up(parts):
    model = DiffusionModel(made_of(parts, edits), SIZES)
    for inputs in model.warm_up_inputs() * 2:
        model.try_out(inputs)
    with pytest.raises(ValueError, match="Other edits an image; give one"):
        model.pipeline_for(PICTURE)
    assert widths_of(model, image=noise(64, 64)) == [64]


def test_a_gpu_without_memory_fails_the_warm_up_and_does_not_mean_that_an_image_is_needed(parts):
    def runs_out(self: Any, prompt: str, image: Any = None, **others: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = DiffusionModel(made_of(parts, runs_out), SIZES)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            model.try_out(next(iter(model.warm_up_inputs())))


def test_a_pipeline_that_fails_with_an_image_too_fails_the_warm_up(parts):
    model = DiffusionModel(made_of(parts, fails), SIZES)
    with pytest.raises(TypeError, match="incorrect format"):
        [model.try_out(inputs) for inputs in model.warm_up_inputs()]


def as_two_prompts(self: Any, prompt: str, image: Any = None, **others: Any) -> Any:
    return BaseOutput(images=[Image.new("RGB", (64, 64))] * (len(image) if isinstance(image, list) else 1))


@pytest.mark.parametrize("call", [None, as_two_prompts])
def test_a_pipeline_that_takes_one_image_fails_the_setup_with_two(parts, call, monkeypatch):
    """FLUX.1-Kontext, which here scales what it starts from to a small size, and one that draws a picture of each."""
    monkeypatch.setattr("diffusers.pipelines.flux.pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS", [(64, 64)])
    pipeline = made_of(parts, call) if call else diffusers.FluxKontextPipeline(**parts)
    model = DiffusionModel(pipeline, SIZES, images=2)
    (inputs,) = [each for each in model.warm_up_inputs() if each.image_2]
    with pytest.raises(ValueError, match=r"IMAGES is 2, but \w+ failed with two images; set IMAGES=1"):
        model.try_out(inputs)


def test_two_images_are_for_pipelines_that_take_images_themselves(parts):
    with pytest.raises(ValueError, match="IMAGES is 2, but FluxPipeline itself takes no image"):
        DiffusionModel(FluxPipeline(**parts), SIZES, images=2)


@pytest.mark.parametrize("given", [{"image_2"}, {"image", "image_2"}, {"image", "image_2", "mask"}])
def test_a_second_image_is_refused_where_it_would_be_ignored(parts, given):
    images = 1 if given == {"image", "image_2"} else 2
    model = DiffusionModel(made_of(parts, edits), SIZES, images=images)
    with pytest.raises(ValueError, match="image_2 needs an image and no mask, and a model that runs with IMAGES=2"):
        model.pipeline_for(replace(PICTURE, **dict.fromkeys(given, noise(64, 64))))


def test_pictures_are_gone_when_the_process_has_ended(tmp_path):
    program = "import sys, models.image.pictures as p; p.PictureFiles().save([], 'png', 90); sys.exit(3)"
    assert run_program(program, folder=DEMO.parent.parent, TMPDIR=str(tmp_path)).returncode == 3
    assert not list(tmp_path.glob("pictures-*"))


def test_folders_of_pictures_do_not_pile_up(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files = PictureFiles()
    for _ in range(4):
        paths = files.save([Image.new("L", (8, 8)), Image.new("L", (8, 8))], "png", 90)
        assert len(paths) == 2
        assert all(path.stat().st_size for path in paths)
    assert len(list(tmp_path.iterdir())) == 2
    for folder in files._folders:
        folder.cleanup()


TINY = SHAPES["tiny-sdxl"]


def test_saved_sdxl_pipeline_loads_with_its_weights_and_draws_with_guidance_and_without(tmp_path):
    written = build_pipeline(TINY, DEMO, torch.device("cpu"))
    check_picture(written, TINY.checked_size)
    save(written, tmp_path, TINY.max_shard_size)
    model = DiffusionModel.load(str(tmp_path), None, ImageSettings(image_sizes=(Size(64, 64),)))
    for name, network in networks(written).items():
        loaded = networks(model._pipeline)[name].state_dict()
        assert all(torch.equal(loaded[key], value.float()) for key, value in network.state_dict().items()), name
    inputs = ImageInputs("a check", Size(64, 64), seed=0, num_inference_steps=2)
    assert len(model.run(inputs).getcolors(maxcolors=64 * 64)) > 1
    planned = [[inputs.guidance_scale for inputs in model.warm_up_inputs((), is_so)] for is_so in (False, True)]
    assert planned == [[None, 1.0], [None]]
