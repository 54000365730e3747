"""Speech to text with Whisper, a recording of any length and format, by a model that boots compiled."""

import os

import av
import numpy
from cog import BaseModel, BaseRunner, Input, Path

import compile_cache  # before torch

MODEL = os.environ.get("MODEL", "openai/whisper-large-v3")
RATE = 16000
WINDOW_S = 30  # Whisper hears pieces of this length


class Output(BaseModel):
    text: str
    segments: list[dict]


class Predictor(BaseRunner):
    def setup(self) -> None:
        with compile_cache.boot(MODEL, sources=[__file__]) as self.boot:
            import torch
            from transformers import AutoProcessor, WhisperForConditionalGeneration

            self.boot.preload()
            name, _, revision = MODEL.partition("@")
            source = {"pretrained_model_name_or_path": name, "revision": revision or "main"}
            device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
            self.model = WhisperForConditionalGeneration.from_pretrained(**source, dtype=dtype).to(device).eval()
            self.processor = AutoProcessor.from_pretrained(**source)
            self.boot.compile(self.model)
            few = [lambda tokens, scores, **_: torch.full(tokens.shape[:1], tokens.shape[1] > 8, device=device)]
            self.boot.warm_up(self.hear, sound=numpy.zeros(RATE, "f4"), stopping_criteria=few)

    def run(
        self,
        audio: Path = Input(description="A recording: mp3, m4a, wav, or the sound of a video"),
        language: str = Input(description="Its language, such as en; detected if not given", default=""),
        task: str = Input(
            description="Write it down, or in English", default="transcribe", choices=["transcribe", "translate"]
        ),
    ) -> Output:
        """What was said, and when."""
        sound = read(audio)
        with self.boot.prediction() as prediction:
            heard = self.hear(sound, language=language or None, task=task)
        self.record_metric("audio_s", len(sound) / RATE)
        for name, value in prediction.metrics().items():
            self.record_metric(name, value)
        segments = [
            {
                "start": round(float(one["start"]), 2),
                "end": round(float(one["end"]), 2),
                "text": self.processor.decode(one["tokens"], skip_special_tokens=True),
            }
            for one in heard
        ]
        return Output(text="".join(one["text"] for one in segments).strip(), segments=segments)

    def hear(self, sound, **options) -> list[dict]:
        """The segments of a recording, from samples."""
        import torch

        torch.manual_seed(0)
        padded = numpy.pad(sound, (0, max(0, WINDOW_S * RATE - len(sound))))
        features = self.processor(padded, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest")
        with torch.inference_mode():
            return self.model.generate(
                features.input_features.to(self.model.device, self.model.dtype),
                cache_implementation="static",  # one length; without `max_new_tokens`, which would make others
                disable_compile=True,  # the library compiles
                return_timestamps=True,
                return_segments=True,
                temperature=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0),  # the next one where a piece repeats itself or is unlikely
                compression_ratio_threshold=1.35,
                logprob_threshold=-1.0,
                no_speech_threshold=0.6,
                monitor_progress=lambda done: print(f"{done[0, 0] / 100:.0f} of {done[0, 1] / 100:.0f} s"),
                **options,
            )["segments"][0]


def read(path: Path) -> numpy.ndarray:
    """The samples of a recording: one channel, float32."""
    with av.open(str(path)) as file:
        resampler = av.AudioResampler("fltp", "mono", RATE)
        frames = [part for frame in file.decode(audio=0) for part in resampler.resample(frame)] + resampler.resample(
            None
        )
    return numpy.concatenate([frame.to_ndarray()[0] for frame in frames])
