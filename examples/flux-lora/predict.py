"""FLUX.1 and one LoRA a request: a predictor in the old form, as most authors on Replicate have it."""

import os
import random
from typing import Optional

import compile_cache
from cog import BasePredictor, Input, Path

MODEL = os.environ.get("MODEL", "black-forest-labs/FLUX.1-dev")
boot = compile_cache.boot(MODEL, sources=[__file__, Path(__file__).with_name("fused.py")], weights=True)
with boot.importing():  # torch comes first; then the weights travel while the rest is imported
    import numpy
    import torch
    from diffusers import FluxPipeline
    from PIL import Image

    import fused

PIXELS = int(os.environ.get("PIXELS", "1024"))  # along each side of a square picture
# Width and height of a picture, in parts of it. Each size has compiled code of its own.
SIZES = {"1:1": (1, 1), "16:9": (1.3125, 0.75), "9:16": (0.75, 1.3125)}


class Predictor(BasePredictor):
    """Draws one picture."""

    def setup(self) -> None:
        """READY when it returns."""
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        name, _, revision = MODEL.partition("@")
        self.pipe = boot.to_gpu(FluxPipeline.from_pretrained(name, revision=revision or None, torch_dtype=dtype))
        self.lora = fused.FusedLora(self.pipe)
        # The first LoRA freezes the network anyway, and code that was compiled before does not fit a frozen one.
        self.pipe.transformer.requires_grad_(False)
        with boot:
            boot.compile(self.pipe.transformer)
            # With most other pipelines, guidance above 1 makes batches of two: warm up both kinds.
            for ratio in SIZES:
                boot.warm_up(self.predict, prompt="a warm-up", aspect_ratio=ratio, num_inference_steps=2)

    def predict(
        self,
        prompt: str = Input(description="What to draw"),
        lora: Optional[Path] = Input(
            description="A LoRA for FLUX.1: a .safetensors file or its address", default=None, accept=".safetensors"
        ),
        lora_scale: float = Input(description="How strongly to apply the LoRA", default=1.0, ge=-1, le=3),
        aspect_ratio: str = Input(description="Width to height", default="1:1", choices=list(SIZES.keys())),
        num_inference_steps: int = Input(description="Denoising steps", default=28, ge=1, le=50),
        guidance_scale: float = Input(description="How closely to follow the prompt", default=3.5, ge=0, le=10),
        seed: Optional[int] = Input(
            description="The same seed draws the same picture", default=None, ge=0, le=4294967295
        ),
    ) -> Path:
        """Draw a picture."""
        seed = random.getrandbits(32) if seed is None else int(seed)  # by Cog's schema, 1.0 is an integer too
        print(f"seed: {seed}")
        noise = torch.Generator("cpu").manual_seed(seed)
        width, height = (round(PIXELS * part) for part in SIZES[aspect_ratio])
        with torch.inference_mode(), boot.prediction() as prediction:
            self.lora.use(lora, lora_scale)
            inputs = {"num_inference_steps": int(num_inference_steps), "guidance_scale": guidance_scale}
            inputs |= {"width": width, "height": height, "generator": noise, "output_type": "np"}
            pixels = self.pipe(prompt, **inputs).images[0]
        if not numpy.isfinite(pixels).all():
            raise ValueError("the picture has numbers that are not finite; lower guidance_scale or lora_scale")
        for name, value in prediction.metrics().items():
            self.record_metric(name, value)
        Image.fromarray((pixels * 255).round().astype("uint8")).save("/tmp/output.png")
        return Path("/tmp/output.png")
