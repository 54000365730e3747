"""What people write: a model loaded by its library and moved to the GPU, in the way that PLAIN names, and a warm-up."""

import os
import time

import torch
from cog import BasePredictor, Input

MODEL, WAY = os.environ["MODEL"], os.environ["PLAIN"]
PLACE = {"device_map": "cuda"} if WAY == "device_map" else {}


class Predictor(BasePredictor):
    """Draws a picture."""

    def setup(self) -> None:
        """READY when it returns."""
        from diffusers import DiffusionPipeline

        self.pipe = DiffusionPipeline.from_pretrained(MODEL, torch_dtype=torch.bfloat16, **PLACE)
        self.pipe.to("cuda")
        began = time.monotonic()
        self.pipe("a warm-up", num_inference_steps=2)
        print(f"plain: warm-up {time.monotonic() - began:.2f} s")

    def predict(self, prompt: str = Input(default="")) -> int:
        """How many pictures were drawn."""
        return len(self.pipe(prompt, num_inference_steps=2).images)


class TextPredictor(BasePredictor):
    """Continues a text."""

    def setup(self) -> None:
        """READY when it returns."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16, **PLACE)
        self.model.to("cuda")
        began = time.monotonic()
        self.generate("w1 w2")
        print(f"plain: warm-up {time.monotonic() - began:.2f} s")

    def generate(self, prompt: str) -> int:
        """How many tokens the prompt and its answer have."""
        inputs = self.tokenizer(prompt, return_tensors="pt").to("cuda")
        return self.model.generate(inputs["input_ids"], max_new_tokens=4).shape[1]

    def predict(self, prompt: str = Input(default="")) -> int:
        """How many tokens there are."""
        return self.generate(prompt)
