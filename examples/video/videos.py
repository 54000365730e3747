"""Kinds of pipelines, sizes of videos, their progress, and mp4 files."""

from typing import Any

import av
import numpy
from cog import Path

# The pipeline for a first picture, the frames of one latent, frames per second, and whether the VAE needs fp32.
KINDS = {
    "LTXPipeline": ("LTXImageToVideoPipeline", 8, 25, False),
    "WanPipeline": ("WanImageToVideoPipeline", 4, 24, True),
}


def read_videos(text: str) -> list[tuple[int, ...]]:
    """Width, height and frames of each video that is named as in `704x512x161,512x704x161`.

    Raises:
        ValueError: a side is no multiple of 32, so no request could ask for it.
    """
    videos = [tuple(map(int, video.split("x"))) for video in text.split(",")]
    if any(side % 32 for width, height, _ in videos for side in (width, height)):
        raise ValueError(f"VIDEOS={text}: give multiples of 32 for width and height")
    return videos


def rounded(asked: tuple[int | None, ...], default: tuple[int, ...], frames_a_latent: int) -> tuple[int, int, int]:
    """Width, height and frames as the models make them.

    Raises:
        ValueError: they do not make so many frames.
    """
    width, height, frames = (int(given or own) for given, own in zip(asked, default, strict=True))
    if past := (frames - 1) % frames_a_latent:
        raise ValueError(f"num_frames={frames}: give {frames - past} or {frames - past + frames_a_latent}")
    return round(width / 32) * 32, round(height / 32) * 32, frames


def tell(pipeline: Any, step: int, time: Any, values: Any) -> Any:
    """Log a step that has ended. Waits for the GPU, so that a cancel ends within a step."""
    values["latents"].flatten()[0].item()
    print(f"step {step + 1} of {pipeline.num_timesteps}", flush=True)
    return values


def write_mp4(frames: Any, file: Path, frames_per_second: int, crf: int) -> Path:
    """Encode frames, [frames, height, width, 3], from 0 to 1, with x264, which is in PyAV's wheel.

    Raises:
        ValueError: a number is not finite, and would be black.
    """
    if not numpy.isfinite(frames).all():
        raise ValueError("the video has numbers that are not finite; lower guidance_scale")
    pixels = (frames * 255).round().astype("uint8")
    height, width = pixels.shape[1:3]
    with av.open(str(file), "w") as video:
        stream = video.add_stream("libx264", frames_per_second, {"crf": str(int(crf))}, width=width, height=height)
        stream.pix_fmt = "yuv420p"  # what browsers play
        for picture in pixels:
            video.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        video.mux(stream.encode())
    return file
