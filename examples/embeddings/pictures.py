"""Vectors of pictures and of the texts that describe them (SigLIP), by a model that boots compiled."""

import base64
import os
from typing import Optional

import compile_cache  # before torch
from cog import BaseRunner, Input, Path
from PIL import Image

from picture_files import read_picture

MODEL = os.environ.get("MODEL", "google/siglip-so400m-patch14-384")
BATCHES = [int(size) for size in os.environ.get("BATCHES", "1,8,32").split(",")]  # padded to, and compiled


class Predictor(BaseRunner):
    def setup(self) -> None:
        with compile_cache.boot(MODEL, sources=[__file__], weights=True) as self.boot:
            with self.boot.importing():
                import torch
                from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

            name, _, revision = MODEL.partition("@")
            source = {"pretrained_model_name_or_path": name, "revision": revision or "main"}
            dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
            self.model = self.boot.to_gpu(AutoModel.from_pretrained(**source, dtype=dtype))
            self.tokenizer = AutoTokenizer.from_pretrained(**source)
            longest = max(map(len, self.tokenizer.get_vocab()))
            self.most_characters = longest * self.model.config.text_config.max_position_embeddings
            self.processor = AutoImageProcessor.from_pretrained(**source)
            self.boot.compile(self.model)
            picture = Image.new("RGB", (64, 64))
            self.boot.warm_up(lambda: [self.embed(["a"] * size) + self.embed([picture] * size) for size in BATCHES])

    def run(
        self,
        images: Optional[list[Path]] = Input(description="Pictures to embed", default=None),
        texts: Optional[list[str]] = Input(description="Texts to embed, in lower case", default=None),
    ) -> list[str]:
        """The vector of each picture, then of each text: float32 as base64."""
        images, texts = images or [], texts or []
        if not (images or texts):
            raise ValueError("images and texts are empty: give one at least")
        if (longest := max(map(len, texts), default=0)) > self.most_characters:
            raise ValueError(f"a text has {longest} characters; it may have {self.most_characters}")
        pictures = [read_picture(path) for path in images]
        longest = self.model.config.text_config.max_position_embeddings
        if any(len(self.tokenizer(text)["input_ids"]) > longest for text in texts):
            raise ValueError(f"a text has more tokens than this model reads, {longest}; shorten it")
        with self.boot.prediction() as prediction:
            vectors = [vector for batch in batches(pictures) + batches(texts) for vector in self.embed(batch)]
        for name, value in prediction.metrics().items():
            self.record_metric(name, value)
        return [base64.b64encode(vector.tobytes()).decode() for vector in vectors]

    def embed(self, batch: list) -> list:
        """A vector of length 1 for each picture or text. Copies of the last one fill the batch."""
        import torch

        size = next(size for size in BATCHES if size >= len(batch))
        filled, device = batch + batch[-1:] * (size - len(batch)), self.model.device
        with torch.inference_mode():
            if isinstance(batch[0], str):
                length = self.model.config.text_config.max_position_embeddings  # trained with no other
                tokens = self.tokenizer(filled, padding="max_length", max_length=length)
                found = self.model.get_text_features(torch.tensor(tokens["input_ids"], device=device))
            else:
                pixels = self.processor(filled, return_tensors="pt")["pixel_values"]
                found = self.model.get_image_features(pixels.to(device, self.model.dtype))
            vectors = torch.nn.functional.normalize(found.pooler_output.float())
        return list(vectors[: len(batch)].cpu().numpy())


def batches(inputs: list) -> list[list]:
    """Parts of at most the largest size."""
    return [inputs[start : start + BATCHES[-1]] for start in range(0, len(inputs), BATCHES[-1])]
