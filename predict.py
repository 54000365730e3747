"""The predictors, compiled: text to image (cog.yaml) and text generation (cog.text.yaml)."""

import logging
import os
import random
import sys
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any, List, Optional, Union

from cog import BaseRunner, ConcatenateIterator, Input, Path, Secret, streaming

import compile_cache
from compile_cache.key.model_version import split_revision
from models.image.settings import ImageSettings
from models.text.settings import TextSettings
from warmup import warm_up

# setup() imports torch and the models after it has started the restore.
# Cog's server refuses inputs outside the bounds of run()'s signature, and reads only literals there.

logging.basicConfig(level=logging.WARNING, format="%(message)s")
for name in ("compile_cache", "models"):
    logging.getLogger(name).setLevel(logging.INFO)
log = logging.getLogger("models")

PROJECT = os.path.dirname(os.path.abspath(__file__))
SOURCES = [os.path.join(PROJECT, name) for name in ("predict.py", "warmup.py", "models")]


def integers(*inputs: Any) -> Any:
    """Integer inputs as Python's: by Cog's schema, 1.0 and 1e3 are integers too."""
    return (value if value is None else int(value) for value in inputs)


class Served(BaseRunner):
    """What both predictors have."""

    boot: compile_cache.Boot

    def healthcheck(self) -> bool:
        """Healthy as long as CUDA reports no error, after which no later call of the process can succeed. Does not wait
        for queued work."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return True
        try:
            torch.cuda.current_stream().query()
        except RuntimeError as error:
            log.error("The GPU does not answer, and this process cannot use it again. Restart the container. %s", error)
            return False
        return True


class Predictor(Served):
    """Draws pictures with any diffusers text-to-image pipeline."""

    def setup(self) -> None:
        """Boot: restore while the weights load, compile, warm up; READY when it returns."""
        settings = ImageSettings.from_env(os.environ)
        model, revision = split_revision(settings.model)
        with compile_cache.boot(settings.model, sources=SOURCES, weights=True) as self.boot:
            with self.boot.importing():
                from models.image.lora_files import LoraFiles
                from models.image.pictures import PictureFiles
                from models.image.pipeline import DiffusionModel, import_pipeline

                import_pipeline(model, revision)
            self.lora_files = LoraFiles(FilePath(settings.lora_folder), settings.lora_bytes, local=settings.local_loras)
            self.thread = self.boot.model_thread()
            with self.boot.timed("weights"):
                self.model = DiffusionModel.load(model, revision, settings, self.boot)
            sizes = self.model.sizes if settings.warms_up_all else settings.warm_up_sizes
            for network, options in self.model.networks():
                self.boot.compile(network, **options)
            plan = self.model.warm_up_inputs(sizes, self.boot.compiles_in_background)
            self.thread.call(warm_up, self.boot, self.model.try_out, plan)
        self.files = PictureFiles()

    def run(
        self,
        prompt: str = Input(description="What to draw"),
        negative_prompt: str = Input(description="What not to draw, if the model takes a negative prompt", default=""),
        aspect_ratio: Optional[str] = Input(
            description="Width to height, if width and height are not given; the default is the model's first size",
            default=None,
            choices=["1:1", "16:9", "9:16", "3:2", "2:3", "4:3", "3:4", "5:4", "4:5", "21:9", "9:21"],
        ),
        megapixels: Optional[str] = Input(
            description="1: the model's own resolution; 0.25: a quarter of its pixels; match_input: as the image's",
            default=None,
            choices=["1", "0.25", "match_input"],
        ),
        width: Optional[int] = Input(description="Width in pixels, with height", default=None, ge=1),
        height: Optional[int] = Input(description="Height in pixels, with width", default=None, ge=1),
        image: Optional[Path] = Input(
            description="A picture to start from. Its shape decides the size, unless the model edits it",
            default=None,
            accept="image/*",
        ),
        image_2: Optional[Path] = Input(
            description="A second picture, for models that take two; with an image", default=None, accept="image/*"
        ),
        mask: Optional[Path] = Input(
            description="A picture that is white where the image may change, and black where it stays",
            default=None,
            accept="image/*",
        ),
        prompt_strength: float = Input(
            description="How much of the image the prompt may change: 1 keeps nothing of it", default=0.8, ge=0, le=1
        ),
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
        lora_weights: Optional[str] = Input(
            description="A LoRA: org/name of Hugging Face, or the https address of a .safetensors file", default=None
        ),
        lora_scale: float = Input(description="How strongly to apply the LoRA", default=1.0, ge=-1, le=3),
        extra_lora: Optional[str] = Input(description="A second LoRA, named like the first", default=None),
        extra_lora_scale: float = Input(description="How strongly to apply the second LoRA", default=1.0, ge=-1, le=3),
        hf_api_token: Optional[Secret] = Input(
            description="Hugging Face token, for a LoRA that needs it", default=None
        ),
        civitai_api_token: Optional[Secret] = Input(
            description="Civitai token, for a LoRA that needs it", default=None
        ),
        go_fast: Optional[bool] = Input(
            description="Draw faster, and a little less exactly (float8); by default, if this model offers it",
            default=None,
        ),
        seed: Optional[int] = Input(
            description="The same seed draws the same picture; random if not given", default=None, ge=0, le=4294967295
        ),
        output_format: str = Input(description="File format", default="webp", choices=["png", "webp", "jpg"]),
        output_quality: int = Input(description="Quality of webp and jpg files", default=80, ge=0, le=100),
    ) -> List[Path]:
        """Draw `num_outputs` pictures, one file each."""
        from models.image.inputs import inputs_of

        num_outputs, num_inference_steps, output_quality = integers(num_outputs, num_inference_steps, output_quality)
        width, height, seed = integers(width, height, random.getrandbits(32) if seed is None else seed)
        first = inputs_of(
            self.model.sizes,
            is_editing=self.model.is_editing,
            prompt=prompt,
            negative_prompt=negative_prompt,
            aspect_ratio=aspect_ratio,
            megapixels=megapixels,
            width=width,
            height=height,
            image=image,
            image_2=image_2,
            mask=mask,
            strength=prompt_strength,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            go_fast=self.model.chooses_fast(go_fast),
            seed=seed,
        )
        self.model.pipeline_for(first)  # a wrong request downloads no LoRA
        asked = ((lora_weights, lora_scale), (extra_lora, extra_lora_scale))
        loras = self.lora_files.loras(asked, hf_api_token, civitai_api_token)
        print(f"seed: {seed}")
        with self.boot.prediction() as prediction:
            paths = self.thread.call(self._draw, first, num_outputs, loras, output_format, output_quality)
        for name, value in {"seed": seed, "image_output_count": num_outputs, **prediction.metrics()}.items():
            self.record_metric(name, value)
        return [Path(path) for path in paths]

    def _draw(self, first: Any, number: int, loras: List[Any], *file_format: Any) -> List[str]:
        """The files of pictures with seeds from `first.seed` on."""
        self.model.loras.use(loras)
        numbered = (replace(first, seed=first.seed + more) for more in range(number))
        return self.files.save(map(self.model.run, numbered), *file_format)


class TextPredictor(Served):
    """Generates text with any transformers causal language model."""

    def setup(self) -> None:
        """Boot: restore while the weights load, compile, warm up; READY when it returns."""
        settings = TextSettings.from_env(os.environ)
        model, revision = split_revision(settings.model)
        with compile_cache.boot(settings.model, sources=SOURCES, weights=True) as self.boot:
            with self.boot.importing():
                from models.text.model import TextModel, import_model
                from models.text.steps import prepare_process

                import_model(model, revision)
            self.thread = self.boot.model_thread()
            self.boot.prepare(prepare_process)
            with self.boot.timed("weights"):
                self.model = TextModel.load(model, revision, settings, self.boot)
            # An answer calls the prefill once, so to load its code takes longer than the code saves.
            self.boot.compile(self.model.generator.prefill, whole=True, shares_weights=True, after_ready=True)
            self.boot.compile(self.model.generator.decode, whole=True, shares_weights=True)
            self.thread.call(warm_up, self.boot, self.model.run, self.model.warm_up_inputs())
            with self.boot.timed("record"), self.boot.prediction():  # so what is recorded is not new to the next one
                # Code for prompts that comes after READY would need another recording.
                self.thread.call(self.model.generator.record, self.boot, prompts=not self.boot.waiting)

    @streaming
    def run(
        self,
        prompt: Optional[str] = Input(
            description="The text to continue, or the message to answer if the model is made for chats", default=None
        ),
        messages: Optional[List[dict]] = Input(
            description="A chat, in place of a prompt: objects with role and content (text, or parts of type text)",
            default=None,
        ),
        system_prompt: str = Input(
            description="How to behave, if the model is made for chats; of messages, the first says it", default=""
        ),
        tools: Optional[List[dict]] = Input(
            description="Tools that the model may call, for its chat template", default=None
        ),
        chat_template_kwargs: Optional[dict] = Input(
            description="Variables of the model's chat template, such as enable_thinking", default=None
        ),
        max_tokens: Optional[int] = Input(
            description="The most tokens to generate; the default is 512, or less if the model's cache has less room",
            default=None,
            ge=1,
        ),
        max_new_tokens: Optional[int] = Input(description="Another name of max_tokens", default=None, ge=1),
        min_tokens: Optional[int] = Input(
            description="The least tokens to generate, before an end token or a stop sequence may end the answer",
            default=None,
            ge=0,
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
            description="Choose among this many of the likeliest tokens; 0 is all", default=None, ge=0
        ),
        repetition_penalty: Optional[float] = Input(
            description="Above 1, tokens that occurred before are less likely", default=None, ge=0.1, le=10
        ),
        presence_penalty: Optional[float] = Input(
            description="Above 0, tokens that the answer has already are less likely", default=None, ge=-2, le=2
        ),
        frequency_penalty: Optional[float] = Input(
            description="Above 0, tokens are less likely the more often the answer has them", default=None, ge=-2, le=2
        ),
        stop_sequences: Optional[Union[str, List[str]]] = Input(
            description="Texts that end the answer, and are not part of it; a text is split at its commas", default=None
        ),
        json_schema: Optional[Union[str, dict]] = Input(
            description="A JSON schema that the answer follows; of a text, its properties keep their order",
            default=None,
        ),
        seed: Optional[int] = Input(
            description="The same seed chooses the same tokens; random if not given", default=None, ge=0, le=4294967295
        ),
    ) -> ConcatenateIterator[str]:
        """Generate text, in pieces of whole characters."""
        from models.text.model import TextInputs

        seed = random.getrandbits(32) if seed is None else seed
        max_tokens, max_new_tokens, min_tokens, top_k, seed = integers(
            max_tokens, max_new_tokens, min_tokens, top_k, seed
        )
        inputs = TextInputs(
            prompt=prompt,
            messages=messages,
            system_prompt=system_prompt,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            max_tokens=max_tokens,
            max_new_tokens=max_new_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            stop_sequences=stop_sequences,
            json_schema=json_schema,
            seed=seed,
        )
        print(f"seed: {seed}")
        with self.boot.prediction() as prediction:
            if prediction.has_new_code:
                self.thread.call(self.model.generator.renew, self.boot)
            self.thread.call(self.model.generator.record, self.boot)
            prediction.count_from_now()
            answer = self.model.answer(inputs)
            try:
                yield from answer
            finally:
                self.record_metric("finish_reason", answer.finish_reason)
        counts = {"token_input_count": answer.prompt_tokens, "token_output_count": answer.new_tokens}
        for name, value in {"seed": seed, **counts, **prediction.metrics()}.items():
            self.record_metric(name, value)
