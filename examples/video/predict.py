"""Text, and a first picture if one is given, to video: LTX-Video, and Wan2.2-TI2V-5B."""

import os
import random
from typing import Any, Optional

import compile_cache  # before torch
from cog import BaseRunner, Input, Path
from PIL import Image, ImageOps

from picture_files import read_picture
from videos import KINDS, read_videos, rounded, tell, write_mp4

MODEL = os.environ.get("MODEL", "Lightricks/LTX-Video")
# Width x height x frames of the videos that are warmed up: each has code of its own. The first is the default, also in
# cog.yaml.
VIDEOS = read_videos(os.environ.get("VIDEOS", "704x512x161"))


class Predictor(BaseRunner):
    def setup(self) -> None:
        with compile_cache.boot(MODEL, sources=[__file__], weights=True) as self.boot:
            with self.boot.importing():
                import diffusers
                import torch

            name, _, revision = MODEL.partition("@")
            model = {"pretrained_model_name_or_path": name, "revision": revision or None}
            kind, self.step, self.rate, exact = KINDS[diffusers.DiffusionPipeline.load_config(**model)["_class_name"]]
            dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
            dtypes = {"default": dtype, "vae": torch.float32 if exact else dtype}
            self.text = self.boot.to_gpu(diffusers.DiffusionPipeline.from_pretrained(**model, torch_dtype=dtypes))
            self.image = getattr(diffusers, kind)(**self.text.components)  # from_pipe would cast all weights
            self.image.register_to_config(**self.text.config)
            self.noise = torch.Generator("cpu")
            self.boot.compile(self.text.transformer)
            # For LTX-Video, guidance makes a batch of two, and a picture makes a time for each token.
            rest = {"prompt": "", "num_inference_steps": 2, "output_type": "latent"}
            kinds = [(picture, scale) for picture in (None, Image.new("RGB", (64, 64))) for scale in (1.0, 5.0)]
            self.boot.warm_up(lambda: [self.draw(video, *kind, **rest) for video in VIDEOS for kind in kinds])

    def draw(self, video: Any, picture: Any, scale: float, **inputs: Any) -> Any:
        inputs |= dict(zip(("width", "height", "num_frames"), video, strict=True))
        pipeline, start = (self.image, {"image": ImageOps.fit(picture, video[:2])}) if picture else (self.text, {})
        return pipeline(**start, **inputs, guidance_scale=scale, callback_on_step_end=tell).frames[0]

    def run(
        self,
        prompt: str = Input(description="What happens"),
        image: Optional[Path] = Input(
            description="The first picture; its sides are cut to fit", default=None, accept="image/*"
        ),
        negative_prompt: str = Input(description="What not to show", default=""),
        width: Optional[int] = Input(description="In pixels, rounded to 32", default=None, ge=64, le=2048),
        height: Optional[int] = Input(description="In pixels, rounded to 32", default=None, ge=64, le=2048),
        num_frames: Optional[int] = Input(description="LTX-Video: 8k + 1, Wan: 4k + 1", default=None, ge=1, le=1001),
        num_inference_steps: int = Input(description="Denoising steps", default=40, ge=2, le=100),
        guidance_scale: float = Input(description="Above 1: how close to the prompt", default=5.0, ge=1, le=50),
        crf: int = Input(description="How much x264 may lose; browsers refuse 0", default=18, ge=0, le=40),
        seed: Optional[int] = Input(description="Same seed, same video", default=None, ge=0, le=4294967295),
    ) -> Path:
        video = rounded((width, height, num_frames), VIDEOS[0], self.step)
        seed = random.getrandbits(32) if seed is None else int(seed)  # by Cog's schema, 1.0 is an integer too
        print(f"seed {seed}, {'x'.join(map(str, video))}{'' if video in VIDEOS else ', not warmed up'}")
        picture = read_picture(image) if image else None
        inputs = {"prompt": prompt, "negative_prompt": negative_prompt, "num_inference_steps": int(num_inference_steps)}
        noise = self.noise.manual_seed(seed)
        with self.boot.prediction() as prediction:
            pictures = self.draw(video, picture, guidance_scale, generator=noise, output_type="np", **inputs)
        for name, value in prediction.metrics().items():
            self.record_metric(name, value)
        return write_mp4(pictures, Path("/tmp/video.mp4"), self.rate, crf)
