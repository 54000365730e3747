"""Text to image, compiled: the predictor of cog.yaml."""

import gc
import logging
import os
import random
import tempfile
from typing import List, Optional

from cog import BaseRunner, Input, Path

import compile_cache
from compile_cache.model_version import split_revision
from models.settings import ModelSettings
from warmup import warm_up

# torch, diffusers and models.diffusion are imported in setup(), after the restore has started.

logging.basicConfig(level=logging.WARNING, format="%(message)s")
logging.getLogger("compile_cache").setLevel(logging.INFO)

PROJECT = os.path.dirname(os.path.abspath(__file__))
SOURCES = [os.path.join(PROJECT, name) for name in ("predict.py", "warmup.py", "models")]
LARGEST_SEED = 4294967295


class Predictor(BaseRunner):
    """Draws pictures with any diffusers text-to-image pipeline."""

    def setup(self) -> None:
        """Boot: restore while the weights load, compile, warm up; READY when it returns."""
        settings = ModelSettings.from_env(os.environ)
        model, revision = split_revision(settings.model)
        with compile_cache.boot(settings.model, sources=SOURCES) as self.boot:
            with self.boot.timed("import"):
                gc.disable()  # it finds nothing among imports, and takes an eighth of their time
                from models.diffusion import DiffusionModel, import_pipeline

                import_pipeline(model, revision)
                gc.freeze()  # later collections pass over what is imported now
                gc.enable()
            self.boot.preload()
            with self.boot.timed("weights"):
                self.model = DiffusionModel.load(model, revision, settings.image_sizes)
            self.boot.compile(self.model.denoiser)
            warm_up(self.boot, self.model, self.model.warm_up_inputs(settings.warm_up_sizes))

    def run(
        self,
        prompt: str = Input(description="What to draw"),
        negative_prompt: str = Input(description="What not to draw, if the model takes it", default=""),
        aspect_ratio: Optional[str] = Input(
            description="Width to height, if width and height are not given; the model's first size by default",
            default=None,
            choices=["1:1", "16:9", "9:16", "3:2", "2:3", "4:3", "3:4", "5:4", "4:5", "21:9", "9:21"],
        ),
        width: Optional[int] = Input(description="Width in pixels, with height", default=None, ge=1),
        height: Optional[int] = Input(description="Height in pixels, with width", default=None, ge=1),
        num_outputs: int = Input(description="How many pictures, with seeds counting up", default=1, ge=1, le=8),
        num_inference_steps: Optional[int] = Input(
            description="Denoising steps; the model's own number if not given", default=None, ge=1, le=200
        ),
        guidance_scale: Optional[float] = Input(
            description="How closely to follow the prompt; the model's own value if not given",
            default=None,
            ge=0,
            le=50,
        ),
        seed: Optional[int] = Input(
            description="The same seed draws the same picture; random if not given", default=None, ge=0, le=4294967295
        ),
        output_format: str = Input(description="File format", default="webp", choices=["png", "webp", "jpg"]),
        output_quality: int = Input(description="Quality of webp and jpg files", default=90, ge=1, le=100),
    ) -> List[Path]:
        """Draw `num_outputs` pictures, one file each."""
        from models.diffusion import ImageInputs
        from models.sizes import choose_size

        before = self.boot.counts()
        size = choose_size(self.model.sizes, aspect_ratio, width, height)
        seed = random.randint(0, LARGEST_SEED) if seed is None else seed
        print(f"seed: {seed}")
        paths = []
        for number in range(num_outputs):
            inputs = ImageInputs(
                prompt, size, (seed + number) % (LARGEST_SEED + 1), negative_prompt, num_inference_steps, guidance_scale
            )
            path = os.path.join(tempfile.mkdtemp(), f"{number}.{output_format}")
            # Pillow knows jpg as JPEG; png ignores the quality.
            self.model.run(inputs).save(path, quality=output_quality)
            paths.append(Path(path))
        self.record(seed, before)
        return paths

    def record(self, seed: int, before: compile_cache.CompileCounts) -> None:
        """Metrics of this prediction: its seed, what the boot did, and what this prediction itself compiled."""
        during = self.boot.counts().since(before)
        metrics = {"seed": seed, "compile_cache.compiled_now": during.graphs, **self.boot.report.metrics()}
        for name, value in metrics.items():
            self.record_metric(name, value)
