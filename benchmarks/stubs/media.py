"""In place of skimage, torchvision, ffmpeg and a video encoder: what predictors call of them."""

import wave

import numpy
from PIL import Image


def imread(path):
    """A picture as an array, as skimage.io has it."""
    with Image.open(path) as image:
        return numpy.array(image)


def normalize(pixels, mean, deviation):
    """All channels alike."""
    return (pixels - mean[0]) / deviation[0]


def read_sound(path):
    """A mono file of 16 bits, as transformers' pipelines take it."""
    with wave.open(path) as file:
        samples = numpy.frombuffer(file.readframes(file.getnframes()), numpy.int16)
        return {"raw": samples.astype(numpy.float32) / 32768, "sampling_rate": file.getframerate()}


def export_to_video(frames, path, fps):
    """The frames themselves, not as a video."""
    with open(path, "wb") as file:
        numpy.save(file, numpy.asarray(frames))
