"""The predictors, compiled: text to image (cog.yaml) and text generation (cog.text.yaml)."""

import contextlib
import gc
import logging
import os
import random
import tempfile
from typing import Any, Dict, Iterator, List, Optional

from cog import BaseRunner, ConcatenateIterator, Input, Path, streaming

import compile_cache
from compile_cache.model_version import split_revision
from models.settings import ModelSettings, TextSettings
from warmup import warm_up

# torch and the models are imported in setup(), after the restore has started.

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
            with self.boot.timed("import"), without_collection():
                from models.diffusion import DiffusionModel, import_pipeline

                import_pipeline(model, revision)
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
        for name, value in metrics(self.boot, seed, before).items():
            self.record_metric(name, value)
        return paths


class TextPredictor(BaseRunner):
    """Generates text with any transformers causal language model."""

    def setup(self) -> None:
        """Boot: restore while the weights load, compile, warm up; READY when it returns."""
        settings = TextSettings.from_env(os.environ)
        model, revision = split_revision(settings.model)
        with compile_cache.boot(settings.model, sources=SOURCES) as self.boot:
            with self.boot.timed("import"), without_collection():
                from models.text import TextModel, import_model

                import_model(model, revision)
            self.boot.preload()
            with self.boot.timed("weights"):
                self.model = TextModel.load(model, revision, settings)
            for step in self.model.steps:
                self.boot.compile(step, whole=True)
            warm_up(self.boot, self.model, self.model.warm_up_inputs())
            with self.boot.timed("record"):
                self.model.generator.record()

    @streaming
    def run(
        self,
        prompt: str = Input(description="What to go on from, or what to answer if the model is one for chats"),
        system_prompt: str = Input(description="How to behave, for a model for chats", default=""),
        max_new_tokens: Optional[int] = Input(
            description="The most tokens to generate; 512 if not given, or what is left of the model's cache",
            default=None,
            ge=1,
        ),
        temperature: Optional[float] = Input(
            description="How freely to choose: 0 takes the likeliest token; the model's own value if not given",
            default=None,
            ge=0,
            le=5,
        ),
        top_p: Optional[float] = Input(
            description="Choose among the likeliest tokens that have this probability together",
            default=None,
            ge=0,
            le=1,
        ),
        top_k: Optional[int] = Input(
            description="Choose among so many of the likeliest tokens; 0 is all of them", default=None, ge=0
        ),
        repetition_penalty: Optional[float] = Input(
            description="Above 1, tokens that were there before are less likely", default=None, ge=0.1, le=10
        ),
        stop_sequences: Optional[List[str]] = Input(
            description="Texts that end the answer, and are not part of it", default=None
        ),
        seed: Optional[int] = Input(
            description="The same seed chooses the same tokens; random if not given", default=None, ge=0, le=4294967295
        ),
    ) -> ConcatenateIterator[str]:
        """Generate text, in pieces of whole characters."""
        from models.text import TextInputs

        before = self.boot.counts()
        seed = random.randint(0, LARGEST_SEED) if seed is None else seed
        print(f"seed: {seed}")
        inputs = TextInputs(
            prompt,
            system_prompt,
            max_new_tokens,
            temperature,
            top_p,
            top_k,
            repetition_penalty,
            tuple(stop_sequences or ()),
            seed,
        )
        answer = self.model.answer(inputs)
        yield from answer
        counts = {"input_token_count": answer.prompt_tokens, "output_token_count": answer.new_tokens}
        for name, value in {**counts, **metrics(self.boot, seed, before)}.items():
            self.record_metric(name, value)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Imports without the cyclic garbage collector: it finds nothing among them, and takes an eighth of their time.
    Later collections pass over what they made."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def metrics(boot: compile_cache.Boot, seed: int, before: compile_cache.CompileCounts) -> Dict[str, Any]:
    """Metrics of a prediction: its seed, what the boot did, and what the prediction itself compiled."""
    during = boot.counts().since(before)
    return {"seed": seed, "compile_cache.compiled_now": during.graphs, **boot.report.metrics()}
