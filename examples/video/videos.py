"""Sizes of videos, their progress, and mp4 files."""

from typing import Any

import av
from cog import Path


def rounded(asked: tuple[int | None, ...], default: tuple[int, ...], frames_a_latent: int) -> tuple[int, int, int]:
    """Width, height and frames as the models make them.

    Raises:
        ValueError: they do not make so many frames.
    """
    width, height, frames = (given or own for given, own in zip(asked, default, strict=True))
    if past := (frames - 1) % frames_a_latent:
        raise ValueError(f"num_frames={frames}: give {frames - past} or {frames - past + frames_a_latent}")
    return round(width / 32) * 32, round(height / 32) * 32, frames


def tell(pipeline: Any, step: int, time: Any, values: Any) -> Any:
    """Log a step that has ended. Waits for the GPU, so that a cancel ends within a step."""
    values["latents"].flatten()[0].item()
    print(f"step {step + 1} of {pipeline.num_timesteps}", flush=True)
    return values


def write_mp4(frames: Any, file: Path, frames_per_second: int, crf: int) -> Path:
    """Encode frames, [frames, height, width, 3], from 0 to 1, with x264, which is in PyAV's wheel."""
    pixels = (frames * 255).round().astype("uint8")
    height, width = pixels.shape[1:3]
    with av.open(str(file), "w") as video:
        stream = video.add_stream("libx264", frames_per_second, {"crf": str(crf)}, width=width, height=height)
        stream.pix_fmt = "yuv420p"  # what browsers play
        for picture in pixels:
            video.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        video.mux(stream.encode())
    return file
