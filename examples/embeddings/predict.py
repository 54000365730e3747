"""Vectors of texts, by a model that boots compiled: ModernBERT, E5 and others of their kind."""

import base64
import os
from pathlib import Path as Folder
from typing import Any

import compile_cache  # before torch
import numpy
from cog import BaseRunner, Input

from pooling import own_length, pooling

MODEL = os.environ.get("MODEL", "nomic-ai/modernbert-embed-base")
# Texts are padded to one of these lengths, and batches to one of these sizes. Each pair is compiled.
LENGTHS = [int(length) for length in os.environ.get("LENGTHS", "128,256,384,512").split(",")]
BATCHES = [int(size) for size in os.environ.get("BATCHES", "1,32").split(",")]


class Predictor(BaseRunner):
    def setup(self) -> None:
        with compile_cache.boot(MODEL, sources=[__file__], weights=True) as self.boot:
            with self.boot.importing():
                import torch
                from huggingface_hub import snapshot_download
                from transformers import AutoModel, AutoTokenizer

            name, _, revision = MODEL.partition("@")
            folder = Folder(MODEL if os.path.isdir(MODEL) else snapshot_download(name, revision=revision or None))
            dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
            self.model = self.boot.to_gpu(AutoModel.from_pretrained(folder, dtype=dtype))
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            self.most_characters = LENGTHS[-1] * max(map(len, self.tokenizer.get_vocab()))
            self.has_mean, self.has_norm = pooling(folder)
            self.longest = min(LENGTHS[-1] - 1, own_length(folder) or self.tokenizer.model_max_length)
            self.boot.compile(self.model)
            self.boot.warm_up(lambda: [self.embed([[0] * (n - 1)] * size) for n in LENGTHS for size in BATCHES])

    def run(self, texts: list[str] = Input(description="Texts, with the prefix that the model wants")) -> list[str]:
        """The vector of each text: float32 as base64."""
        if not texts:
            raise ValueError("texts is empty: give one text at least")
        if (longest := max(map(len, texts))) > self.most_characters:
            raise ValueError(f"a text has {longest} characters; it may have {self.most_characters} (LENGTHS)")
        tokens = []
        for start in range(0, len(texts), BATCHES[-1]):  # not all at once: each character takes 200 bytes
            tokens += self.tokenizer(texts[start : start + BATCHES[-1]])["input_ids"]
        for number, found in enumerate(tokens):
            if len(found) > self.longest:
                raise ValueError(f"text {number} has {len(found)} tokens, and this server reads {self.longest}")
        order = sorted(range(len(tokens)), key=lambda number: len(tokens[number]))  # so that little is padded
        with self.boot.prediction() as prediction:
            batches = [order[start : start + BATCHES[-1]] for start in range(0, len(order), BATCHES[-1])]
            found = [self.embed([tokens[number] for number in batch]) for batch in batches]
            vectors = dict(zip(order, [vector for part in found for vector in part.cpu().numpy()], strict=True))
        for name, value in {"token_input_count": sum(map(len, tokens)), **prediction.metrics()}.items():
            self.record_metric(name, value)
        return [base64.b64encode(vectors[number].tobytes()).decode() for number in range(len(tokens))]

    def embed(self, batch: list[list[int]]) -> Any:
        """The vectors of lists of tokens, [batch, width], on its device. Copies of the last one fill the batch."""
        import torch

        # Longer than all, so that each call has a mask: models leave out one of ones alone, which needs other code.
        length = next(length for length in LENGTHS if length > max(map(len, batch)))
        size = next(size for size in BATCHES if size >= len(batch))
        ids, mask = (numpy.full((size, length), value) for value in (self.tokenizer.pad_token_id, 0))
        for row, seen, tokens in zip(ids, mask, batch + batch[-1:] * (size - len(batch)), strict=True):
            row[: len(tokens)], seen[: len(tokens)] = tokens, 1
        ids, mask = (torch.from_numpy(numbers).to(self.model.device) for numbers in (ids, mask))
        with torch.inference_mode():
            states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            mask = mask.unsqueeze(-1)
            vectors = (states * mask).sum(1) / mask.sum(1) if self.has_mean else states[:, 0]
            return (torch.nn.functional.normalize(vectors) if self.has_norm else vectors)[: len(batch)]
