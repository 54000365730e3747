"""A picture, changed as a prompt says: FLUX.1-Kontext, and Qwen-Image-Edit."""

import math
import os
import random
from typing import Optional

import compile_cache  # before torch
import numpy
from cog import BaseRunner, Input, Path
from PIL import Image, ImageOps

from picture_files import read_picture

MODEL = os.environ.get("MODEL", "black-forest-labs/FLUX.1-Kontext-dev")
# Pictures are cut to the shape of one of these. Each has code of its own.
SIZES = [tuple(map(int, size.split("x"))) for size in os.environ.get("SIZES", "1024x1024,1392x752,752x1392").split(",")]


class Predictor(BaseRunner):
    def setup(self) -> None:
        with compile_cache.boot(MODEL, sources=[__file__], weights=True) as self.boot:
            with self.boot.importing():
                import torch
                from diffusers import DiffusionPipeline

            name, _, revision = MODEL.partition("@")
            dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
            pipe = DiffusionPipeline.from_pretrained(name, revision=revision or None, torch_dtype=dtype)
            self.pipe = self.boot.to_gpu(pipe)
            self.is_kontext = type(self.pipe).__name__ == "FluxKontextPipeline"
            self.noise = torch.Generator("cpu")
            self.boot.compile(self.pipe.transformer)
            # Qwen-Image-Edit does not pad prompts. Each length is compiled; the third one, for all lengths. Its
            # negative prompt has a length too. Of one step alone, its schedule makes NaN.
            plan = [(Image.new("RGB", size), prompt) for size in SIZES for prompt in ("a warm-up", "a longer warm-up")]
            self.boot.warm_up(lambda: [self.edit(*one, num_inference_steps=2) for one in plan])

    def edit(self, picture: Image.Image, prompt: str, **inputs) -> Image.Image:
        shape = picture.width / picture.height
        width, height = min(SIZES, key=lambda size: abs(math.log(size[0] / size[1] / shape)))
        inputs |= {"image": ImageOps.fit(picture, (width, height)), "width": width, "height": height}
        inputs |= {"max_area": width * height} if self.is_kontext else {"negative_prompt": " "}
        pixels = self.pipe(prompt=prompt, output_type="np", **inputs).images[0]
        if not numpy.isfinite(pixels).all():
            raise ValueError("the edited picture has numbers that are not finite")
        return Image.fromarray((pixels * 255).round().astype("uint8"))

    def run(
        self,
        image: Path = Input(description="The picture to change; its sides are cut to fit", accept="image/*"),
        prompt: str = Input(description="What to change"),
        num_inference_steps: int = Input(description="Denoising steps", default=28, ge=2, le=100),
        seed: Optional[int] = Input(
            description="The same seed makes the same picture", default=None, ge=0, le=4294967295
        ),
    ) -> Path:
        picture = read_picture(image)
        seed = random.getrandbits(32) if seed is None else int(seed)  # by Cog's schema, 1.0 is an integer too
        print(f"seed: {seed}")
        noise = self.noise.manual_seed(seed)
        with self.boot.prediction() as prediction:
            edited = self.edit(picture, prompt, num_inference_steps=int(num_inference_steps), generator=noise)
        for name, value in prediction.metrics().items():
            self.record_metric(name, value)
        edited.save("/tmp/edited.png")
        return Path("/tmp/edited.png")
