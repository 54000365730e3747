"""Public Cog predictors, and folders with tiny random weights that they load. real_predictors.py serves them.

A predictor is named by its repository and commit: none of its source is here. `replace` is what a machine without a GPU
and without the real weights asks for. It is no part of an adoption.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from llama import build_tokenizer
from PIL import Image
from pipelines import SHAPES, build_pipeline
from transformers import (
    ModernBertConfig,
    ModernBertForMaskedLM,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipProcessor,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

TOKENIZERS = Path(__file__).resolve().parents[1] / "demo/flux-digits"
_SEED = 0
_WORDS = 1000
_CPU = {'"cuda"': '"cpu"', "'cuda'": "'cpu'", "torch.float16": "torch.float32", 'variant="fp16",': ""}
# The widths of every tiny transformer.
_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_VISION: dict[str, Any] = {**_SMALL, "image_size": 32, "patch_size": 8}


@dataclass(frozen=True, slots=True)
class Public:
    """A public predictor.

    `build` writes its weights into the folder in which it is served. `replace` changes its files, `stubs` are modules
    of benchmarks/stubs. `requests` are the inputs of its predictions. `tolerance` is the largest
    ‖found − untouched‖ / ‖untouched‖ of an answer's numbers: pixels, or text that is one.
    """

    kind: str
    repository: str
    commit: str
    build: Callable[[Path], None]
    requests: tuple[dict[str, Any], ...]
    folder: str = ""
    files: tuple[str, ...] = ("predict.py",)
    replace: Mapping[str, str] = field(default_factory=dict)
    stubs: tuple[str, ...] = ()
    tolerance: float = 1e-2

    def text(self, source: str) -> str:
        """A file of it as it is served."""
        for old, new in {**_CPU, **self.replace}.items():
            source = source.replace(old, new)
        return source


def picture(width: int, height: int) -> str:
    """The data URL of a picture of noise."""
    pixels = numpy.random.default_rng(_SEED).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def build_classifier(folder: Path) -> None:
    """ViT."""
    labels = {0: "normal", 1: "nsfw"}
    model = ViTForImageClassification(ViTConfig(**_VISION, id2label=labels))
    model.save_pretrained(folder / "Falconsai/nsfw_image_detection")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "Falconsai/nsfw_image_detection")


def build_z_image(folder: Path) -> None:
    """As pipelines.py."""
    pipeline = build_pipeline(SHAPES["tiny-z-image"], TOKENIZERS, torch.device("cpu"))
    pipeline.save_pretrained(folder / "Tongyi-MAI/Z-Image-Turbo")


def build_siglip(folder: Path) -> None:
    """Two towers."""
    texts = {**_SMALL, "vocab_size": _WORDS, "max_position_embeddings": 64, "projection_size": 32}
    folder = folder / "google/siglip-base-patch16-224"
    SiglipModel(SiglipConfig(text_config=texts, vision_config=_VISION)).save_pretrained(folder)
    tokenizer = build_tokenizer(_WORDS)
    tokenizer.pad_token, tokenizer.model_max_length = "w1", 64
    SiglipProcessor(SiglipImageProcessor(size={"height": 32, "width": 32}), tokenizer).save_pretrained(folder)


def build_modernbert(folder: Path) -> None:
    """Four layers: one of three looks at all words."""
    tokenizer = build_tokenizer(_WORDS)
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    tokenizer.save_pretrained(folder / "checkpoints")
    special = {name: 1 for name in ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")}
    config = ModernBertConfig(**{**_SMALL, "num_hidden_layers": 4}, vocab_size=len(tokenizer), **special)
    ModernBertForMaskedLM(config).save_pretrained(folder / "checkpoints")


PREDICTORS = {
    "nsfw": Public(
        "classifier of pictures",
        "lucataco/cog-nsfw_image_detection",
        "8d4a26d230fb76759c122713a2d11676294557eb",
        build_classifier,
        ({"image": picture(64, 64)}, {"image": picture(48, 80)}),
        replace={"return output\n": "return str(logits.tolist())\n"},
        tolerance=1e-4,
    ),
    "z-image": Public(
        "text to image",
        "replicate/cog-examples",
        "84811a745b4b2e4f144349677831ecbb00dd7bbc",
        build_z_image,
        ({"prompt": "w3 w4"}, {"prompt": "w3 w4 w5 w6"}),
        folder="z-image-turbo",
        replace={"=1024": "=64", "steps=9": "steps=3"},
        tolerance=3e-2,
    ),
    "siglip": Public(
        "classifier by labels",
        "lucataco/cog-SigLip",
        "8aae7cad3dcfe9fc51a1dfe4cf37985d304ac01a",
        build_siglip,
        ({"image": picture(64, 64), "candidate_labels": "w1,w2 w3,w4"},),
        replace={"return str(result)": 'return str([found["score"] for found in result])', ", 4)": ", 6)"},
        tolerance=1e-3,
    ),
    "modernbert": Public(
        "text encoder",
        "lucataco/cog-ModernBERT-large",
        "c2ad88303fe06ef647f69a5d75cfff876e47fcc4",
        build_modernbert,
        ({"prompt": "w3 w4 [MASK]"}, {"prompt": "w3 w4 w5 w6 [MASK]"}),
        replace={"return predicted_token": "return str(outputs.logits[0, masked_index].tolist())"},
        tolerance=3e-2,
    ),
}
