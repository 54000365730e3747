"""Speech to text with Whisper: a recording of any length, in any format, by a model that boots compiled."""

import os

import compile_cache  # before torch
import numpy
from cog import BaseModel, BaseRunner, Input, Path

from sound import read

MODEL = os.environ.get("MODEL", "openai/whisper-large-v3")
RATE = 16000


class Output(BaseModel):
    text: str
    segments: list[dict]


class Predictor(BaseRunner):
    def setup(self) -> None:
        sources = [__file__, *map(Path(__file__).with_name, ("shared_layers.py", "recorded_layers.py"))]
        with compile_cache.boot(MODEL, sources=sources, weights=True) as self.boot:
            with self.boot.importing():
                import torch
                from transformers import MaxLengthCriteria, WhisperForConditionalGeneration, WhisperProcessor

                from recorded_layers import record_steps
                from shared_layers import share_code

            name, _, revision = MODEL.partition("@")
            source = {"pretrained_model_name_or_path": name, "revision": revision or "main"}
            dtype = torch.float16 if torch.cuda.is_available() else torch.float32
            self.model = self.boot.to_gpu(WhisperForConditionalGeneration.from_pretrained(**source, dtype=dtype))
            self.processor = WhisperProcessor.from_pretrained(**source)
            self.boot.compile(record_steps(share_code(self.model)))
            # A few tokens are enough: the cache has its full length from the first one on.
            few = {"stopping_criteria": [MaxLengthCriteria(8)], "task": "transcribe"}
            self.boot.warm_up(self.hear, sound=numpy.zeros(RATE, "f4"), **few)

    def run(
        self,
        audio: Path = Input(description="A recording, such as mp3, m4a or wav, or a video", accept="audio/*,video/*"),
        language: str = Input(description="The language spoken, such as en; detected if not given", default=""),
        task: str = Input(description="What to write", default="transcribe", choices=["transcribe", "translate"]),
    ) -> Output:
        """What is said, and when."""
        sound = read(audio, RATE)
        with self.boot.prediction() as prediction:
            heard = self.hear(sound, language=language or None, task=task)
        for name, value in {"audio_s": len(sound) / RATE, **prediction.metrics()}.items():
            self.record_metric(name, value)
        texts = self.processor.batch_decode([one["tokens"] for one in heard], skip_special_tokens=True)
        times = [{"start": float(one["start"]), "end": float(one["end"])} for one in heard]
        segments = [{**time, "text": text} for time, text in zip(times, texts, strict=True)]
        return Output(text="".join(texts).strip(), segments=segments)

    def hear(self, sound: numpy.ndarray, **options) -> list[dict]:
        """Whisper's segments, with times and tokens."""
        import torch

        torch.manual_seed(0)
        features = self.processor(sound, sampling_rate=RATE, return_tensors="pt", truncation=False).input_features
        if not self.model.generation_config.is_multilingual:
            options = {name: value for name, value in options.items() if name not in ("language", "task")}
        options |= {"compression_ratio_threshold": 1.35, "logprob_threshold": -1.0, "no_speech_threshold": 0.6}
        return self.model.generate(
            features.to(self.model.device, self.model.dtype),
            cache_implementation="static",  # of one length, if there is no `max_new_tokens`
            disable_compile=True,  # transformers' own
            temperature=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0),  # the next if a piece repeats itself, or is unlikely
            return_timestamps=True,
            return_segments=True,
            monitor_progress=lambda done: print("{:.0f} of {:.0f} s".format(*done[0] / 100)),
            **options,
        )["segments"][0]
