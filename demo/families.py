"""The two families of models that the demo boots, and what it asks each."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cog_server import PROJECT, CogServer, files
from PIL import Image
from read_digits import read_digits
from sums import answer, prompt, unseen_sums

SUMS = unseen_sums(50)
LORA = PROJECT / "demo" / "next-digit.safetensors"


@dataclass(frozen=True, slots=True)
class Prediction:
    """A model's answer, the same after every compiled boot. `shown` describes it in a line.

    `seconds` is the time of a part, `Family.timed`. `metrics` are those of the first prediction after READY.
    """

    answer: bytes
    is_right: bool
    shown: str
    seconds: float
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: its predictor and settings, what to ask it, and which part of an answer is timed. `ask_more`
    is for what needs no code of its own, so it is asked after a restored boot alone."""

    name: str
    predictor: str
    environment: dict[str, str]
    ask: Callable[[CogServer, Path], Prediction]
    timed: str
    ask_more: Callable[[CogServer, Path], list[Prediction]] = lambda server, folder: []


def predict(server: CogServer, **inputs: Any) -> dict[str, Any]:
    """One prediction.

    Raises:
        RuntimeError: it failed.
    """
    prediction = server.predict(**inputs)
    if prediction["status"] != "succeeded":
        raise RuntimeError(f"the prediction failed: {prediction.get('error')}; see {server.log}")
    return prediction


def draw(server: CogServer, folder: Path) -> Prediction:
    """Draw a seven, and save it in the folder."""
    prediction = predict(server, prompt="a handwritten seven", seed=7, num_inference_steps=8, output_format="png")
    picture = files(prediction)[0]
    (folder / "picture.png").write_bytes(picture)
    metrics = prediction["metrics"]
    return Prediction(picture, True, "a handwritten seven", metrics["predict_time"], metrics["compile_cache"])


def draw_more(server: CogServer, folder: Path) -> list[Prediction]:
    """Draw with a LoRA, which makes an eight of a seven, and from a picture."""
    seven = "data:image/png;base64," + base64.b64encode((folder / "picture.png").read_bytes()).decode()
    asked = {
        "with a LoRA, the seven becomes an eight": (8, {"lora_weights": str(LORA)}),
        "from a picture of a seven": (7, {"image": seven, "prompt_strength": 0.6}),
    }
    return [_draw_digit(server, shown, digit, inputs) for shown, (digit, inputs) in asked.items()]


def _draw_digit(server: CogServer, shown: str, digit: int, inputs: dict[str, Any]) -> Prediction:
    common = {"prompt": "a handwritten seven", "seed": 7, "num_inference_steps": 8, "output_format": "png"}
    prediction = predict(server, **common, **inputs)
    picture, metrics = files(prediction)[0], prediction["metrics"]
    with Image.open(io.BytesIO(picture)) as image:
        (read,) = read_digits([image])
    is_right = read == digit and not metrics["compile_cache"]["compiled_now"]
    shown = f"{shown} (the reader of digits sees {read})"
    return Prediction(picture, is_right, shown, metrics["predict_time"], metrics["compile_cache"])


def add(server: CogServer, folder: Path) -> Prediction:
    """Ask for sums that the model was not trained on, and save them in the folder."""
    predictions = [predict(server, prompt=prompt(a, b)) for a, b in SUMS]
    answers = ["".join(prediction["output"]) for prediction in predictions]
    lines = [prompt(a, b) + found for (a, b), found in zip(SUMS, answers, strict=True)]
    (folder / "sums.txt").write_text("\n".join(lines) + "\n")
    right = sum(found == answer(a, b) for (a, b), found in zip(SUMS, answers, strict=True))
    metrics = [prediction["metrics"] for prediction in predictions]
    tokens = sum(entry["token_output_count"] for entry in metrics)
    seconds = sum(entry["predict_time"] for entry in metrics) / tokens
    shown = f"{right} of {len(SUMS)} unseen sums right, such as {lines[0]}"
    return Prediction(
        "\n".join(answers).encode(), right >= 0.99 * len(SUMS), shown, seconds, metrics[0]["compile_cache"]
    )


FAMILIES = (
    Family(
        "text to image",
        "predict.py:Predictor",
        {"MODEL": "demo/flux-digits", "IMAGE_SIZES": "64x64,96x64,64x96", "LORA_LOCAL": str(LORA.parent)},
        draw,
        "picture",
        draw_more,
    ),
    Family(
        "text generation",
        "predict.py:TextPredictor",
        {"MODEL": "demo/llama-adder", "CACHE_TOKENS": "64", "PROMPT_BUCKETS": "16"},
        add,
        "token",
    ),
)
