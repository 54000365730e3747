"""The demo model in a real Cog server: cold, restored, drawing what it is asked for; and what `make demo` says."""

from __future__ import annotations

import base64
import io
import itertools
import json
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from boots import python_path, settings
from cog_server import PROJECT, files
from families import LORA
from marked_processes import Marked, wait_for
from outcome import headline
from PIL import Image, ImageChops, ImageStat
from progress import Doing, stage, told
from read_digits import DIGIT_WORDS, share_read
from rich.console import Console
from side_by_side import largest_difference, side_by_side
from validating_server import ValidatingServer

SKETCH = {
    "prompt": "a handwritten seven",
    "seed": 7,
    "num_inference_steps": 1,
    "go_fast": False,
    "output_format": "png",
}
# Square, which is not the first size: only a size that was warmed up is drawn without compiling.
PICTURE = {**SKETCH, "num_inference_steps": 4, "aspect_ratio": "1:1"}
# Inputs that Cog's server refuses by the schema, and its reasons.
WRONG: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "missing": ({"seed": 7}, {"prompt": "Field required"}),
    "out of range": ({**SKETCH, "num_outputs": 9}, {"num_outputs": "9 is greater than the maximum of 8"}),
    "wrong type": ({**SKETCH, "width": "wide"}, {"width": '"wide" is not of type "integer"'}),
    "no choice": ({**SKETCH, "output_format": "gif"}, {"output_format": '"gif" is not one of ["png","webp","jpg"]'}),
    # The schema says nullable: such an input may be left out, and may not be null.
    "null": ({**SKETCH, "seed": None}, {"seed": 'null is not of type "integer"'}),
    "several": (
        {**SKETCH, "prompt": 7, "guidance_scale": -1},
        {"prompt": '7 is not of type "string"', "guidance_scale": "-1 is less than the minimum of 0"},
    ),
}


@dataclass(frozen=True)
class Served:
    """What one server answered, from its boot to its end."""

    report: dict[str, Any]
    first: dict[str, Any]
    foreign_lines: list[str]
    digits: tuple[bytes, ...]
    answers: dict[str, dict[str, Any]]
    refusals: dict[str, dict[str, str]]
    log: str


def serve(
    folder: Path, each_digit: int = 0, wrong: dict[str, dict[str, Any]] | None = None, **requests: dict[str, Any]
) -> Served:
    """Boot, draw the picture, `each_digit` pictures of every digit, and whatever else is asked; then stop."""
    environ = {
        **settings(folder, cold_start="block"),
        "MODEL": "demo/flux-digits",
        "IMAGE_SIZES": "96x64,64x64,64x96",
        "WARM_UP_SIZES": "64x64",
        "GO_FAST": "on",
        "LORA_LOCAL": str(LORA.parent),
        "HF_HUB_OFFLINE": "1",
    }
    with ValidatingServer("predict.py:Predictor", folder / "server.log", environ) as server:
        server.wait_ready()
        foreign_lines = server.foreign_lines()
        first = server.predict(**PICTURE)
        digits = []
        for word in DIGIT_WORDS if each_digit else ():
            inputs = {**PICTURE, "prompt": f"a handwritten {word}", "num_outputs": each_digit}
            digits += files(server.predict(**inputs))
        answers = {name: server.predict(**inputs) for name, inputs in requests.items()}
        refusals = {name: server.refuse(inputs) for name, inputs in (wrong or {}).items()}
    report, log = json.loads((folder / "report.json").read_text()), (folder / "server.log").read_text()
    return Served(report, first, foreign_lines, tuple(digits), answers, refusals, log)


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, serve(folder)


@pytest.fixture(scope="module")
def restored(cold):
    folder, _ = cold
    return serve(
        folder,
        each_digit=1,
        wrong={name: inputs for name, (inputs, _) in WRONG.items()},
        unknown={**PICTURE, "colour": "blue"},
        exact={**SKETCH, "width": 64, "height": 64},
        unavailable={**SKETCH, "width": 100, "height": 100},
        half={**SKETCH, "width": 64},
        steered={**PICTURE, "negative_prompt": "a handwritten one", "guidance_scale": 2.0},
        unseeded={name: value for name, value in PICTURE.items() if name != "seed"},
        webp={**PICTURE, "output_format": "webp", "output_quality": 50},
        jpg={**PICTURE, "output_format": "jpg"},
        several={**PICTURE, "num_outputs": 2},
        fast={**PICTURE, "go_fast": True},
        default={name: value for name, value in PICTURE.items() if name != "go_fast"},
        barely={**PICTURE, "image": data_uri(files(cold[1].first)[0]), "prompt_strength": 1e-9},
        local={**PICTURE, "lora_weights": str(LORA)},
        outside={**PICTURE, "lora_weights": str(shutil.copy(LORA, folder))},
    )


def data_uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def picture(answer: dict[str, Any], number: int = 0) -> Image.Image:
    return Image.open(io.BytesIO(files(answer)[number]))


def test_cold_boot_compiles_every_region_within_tolerance_of_eager(cold):
    _, served = cold
    assert {region["step"] for region in served.report["regions"]} == {"cold"}
    for region in served.report["regions"]:
        assert 0 < region["relative_error"] <= region["tolerance"]


def test_first_prediction_of_either_boot_compiles_nothing(cold, restored):
    assert cold[1].first["metrics"]["compile_cache"]["compiled_now"] == 0
    assert restored.first["metrics"]["compile_cache"]["compiled_now"] == 0


def test_restored_boot_is_fully_precompiled(restored):
    counts = restored.report["counts"]
    assert restored.report["fully_precompiled"], restored.report
    assert counts["precompiled_loaded"] >= len(restored.report["regions"]) > 0
    assert (counts["graphs"], counts["precompiled_made"]) == (0, 0)
    assert {region["step"] for region in restored.report["regions"]} == {"precompiled"}
    for region in restored.report["regions"]:
        assert 0 < region["relative_error"] <= region["tolerance"]


def test_same_seed_draws_the_same_picture_after_a_restart_from_the_cache(cold, restored):
    assert files(restored.first) == files(cold[1].first)


def test_compiled_model_draws_the_digits_it_is_asked_for(restored):
    pictures = [Image.open(io.BytesIO(content)) for content in restored.digits]
    assert share_read(pictures, list(range(10))) >= 0.9


def test_aspect_ratio_and_exact_size_choose_the_bucket(restored):
    assert picture(restored.first).size == (64, 64)
    assert picture(restored.answers["exact"]).size == (64, 64)


def test_size_that_the_model_cannot_draw_is_refused_with_those_it_can(restored):
    answer = restored.answers["unavailable"]
    assert answer["status"] == "failed"
    assert "96x64, 64x64, 64x96" in answer["error"]
    assert restored.answers["half"]["status"] == "failed"


def test_negative_prompt_changes_the_picture(restored):
    assert restored.answers["steered"]["status"] == "succeeded"
    assert files(restored.answers["steered"]) != files(restored.first)


def test_go_fast_draws_with_restored_code_too(restored):
    metrics = restored.answers["fast"]["metrics"]["compile_cache"]
    assert metrics["compiled_now"] == 0
    assert set(metrics["served"].values()) == {"precompiled"}
    assert files(restored.answers["fast"]) != files(restored.first)
    assert files(restored.answers["default"]) == files(restored.answers["fast"])


def test_a_strength_near_0_keeps_the_image_and_the_server(restored):
    answer = restored.answers["barely"]
    assert answer["status"] == "succeeded"
    difference = ImageChops.difference(picture(answer).convert("RGB"), picture(restored.first).convert("RGB"))
    assert ImageStat.Stat(difference).mean[0] < 20


def test_a_path_names_a_lora_below_the_local_folders_alone(restored):
    assert files(restored.answers["local"]) != files(restored.first)
    assert "in a folder of LORA_LOCAL" in restored.answers["outside"]["error"]


def test_omitted_seed_is_random_and_reported(restored):
    answer = restored.answers["unseeded"]
    assert f"seed: {answer['metrics']['seed']}" in answer["logs"]
    assert answer["metrics"]["seed"] != PICTURE["seed"]


@pytest.mark.parametrize(("name", "reasons"), [(name, reasons) for name, (_, reasons) in WRONG.items()])
def test_inputs_outside_the_schema_are_refused_by_name(restored, name, reasons):
    assert restored.refusals[name] == reasons


def test_unknown_input_is_ignored(restored):
    assert files(restored.answers["unknown"]) == files(restored.first)


@pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="torch warns that guards run slower there")
def test_setup_logs_nothing_of_other_libraries(cold, restored):
    assert not cold[1].foreign_lines
    assert not restored.foreign_lines


def test_prediction_logs_its_steps(restored):
    assert "4/4" in restored.first["logs"]


@pytest.mark.parametrize(("name", "file_format"), [("webp", "WEBP"), ("jpg", "JPEG"), ("exact", "PNG")])
def test_output_format_is_the_one_asked_for(restored, name, file_format):
    assert picture(restored.answers[name]).format == file_format


def test_several_outputs_count_up_from_the_seed(restored):
    first, second = files(restored.answers["several"])
    assert first == files(restored.first)[0]
    assert second != first


def stages(log: str) -> list[str]:
    """What the log says at each of its lines, without repetitions."""
    ends = itertools.accumulate(log.splitlines(keepends=True))
    return [said for said, _ in itertools.groupby(map(stage, ends))]


def test_the_log_of_a_cold_boot_says_which_region_is_being_compiled_and_that_of_a_restored_one_none(cold, restored):
    regions = [region["name"] for region in cold[1].report["regions"]]
    compiled = [text for name in regions for text in (f"compiling {name}", f"storing {name}, comparing it with eager")]
    compiled += [f"compiling {name}" for name in regions]  # without go_fast
    loading = "importing torch and the model, loading the weights"
    assert stages(cold[1].log) == ["starting the server", loading, *compiled, "ready"]
    assert not [said for said in stages(restored.log) if said.startswith("compiling")]


def test_a_demo_that_is_told_to_end_ends_its_server_too(tmp_path):
    code = "import pathlib, sys, run_demo; run_demo.OUTPUT = pathlib.Path(sys.argv[1]); sys.exit(run_demo.main())"
    marked, log = Marked(), tmp_path / "output" / "text-to-image" / "eager" / "server.log"
    environ = {**marked.environ, "PYTHONPATH": python_path(PROJECT / "demo", PROJECT)}
    command = [sys.executable, "-c", code, str(tmp_path / "output")]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as demo:
        wait_for(lambda: log.exists() and log.stat().st_size > 0)
        assert len(marked.pids()) > 1
        demo.terminate()
        assert demo.wait(60) == 128 + signal.SIGTERM
    wait_for(lambda: not marked.pids())


def test_progress_is_plain_lines_where_there_is_no_terminal():
    looked_twice, output = threading.Event(), io.StringIO()
    looks = itertools.count(1)

    def look() -> Doing:
        if next(looks) == 2:
            looked_twice.set()
        return Doing("compiling Block", 3)

    with told(Console(file=output), "cold boot", look):
        assert looked_twice.wait(30)
    first, *others = output.getvalue().splitlines()
    assert first.startswith("cold boot, ")
    assert first.endswith(" s: compiling Block, 3 kernels built")
    assert not others, "the same stage is not said again at once"
    assert "\x1b" not in first


@pytest.mark.parametrize(
    ("eager_s", "compared"),
    [(3.4, "as long as"), (3.2, "as long as"), (2.0, "1.4 s longer than"), (5.0, "1.6 s less than")],
)
def test_the_headline_compares_the_restored_boot_with_the_eager_one(eager_s, compared):
    assert headline("text to image", eager_s, 29.5, 3.4) == (
        f"text to image: a cold boot took 29.5 s, the restored one 3.4 s: {compared} an eager boot ({eager_s} s)"
    )


def test_pictures_side_by_side_are_enlarged_without_smoothing(tmp_path, restored):
    paths = {"cold": tmp_path / "cold.png", "restored": tmp_path / "restored.png"}
    paths["cold"].write_bytes(files(restored.first)[0])
    changed = picture(restored.first).convert("RGB")
    changed.putpixel((0, 0), (0, 0, 0))
    changed.save(paths["restored"])
    side_by_side(paths, {"cold": "after 9 s", "restored": "after 1 s"}, "seven", tmp_path / "both.png")
    with Image.open(tmp_path / "both.png") as sheet:
        corners = sheet.crop((24, 70, 344, 390)), sheet.crop((368, 70, 688, 390))
    for path, corner in zip(paths.values(), corners, strict=True):
        with Image.open(path) as small:
            assert corner.resize((64, 64), Image.Resampling.NEAREST).tobytes() == small.convert("RGB").tobytes()
    white = picture(restored.first).convert("RGB").getpixel((0, 0))
    assert largest_difference(paths["cold"], paths["restored"]) == max(white)
    assert largest_difference(paths["cold"], paths["cold"]) == 0
