"""The sound of a file, by PyAV."""

import av
import numpy
from cog import Path

LOUDEST = 1e5  # also where numbers are those of 16 bits


def read(path: Path, rate: int) -> numpy.ndarray:
    """One channel of `rate` numbers a second, [length].

    Raises:
        ValueError: the file has no sound, or numbers that are no sound.
    """
    try:
        with av.open(str(path)) as file:
            if not file.streams.audio:
                raise ValueError("the file has no sound")
            resampler = av.AudioResampler("fltp", "mono", rate)
            parts = [part for frame in [*file.decode(audio=0), None] for part in resampler.resample(frame)]
    except av.FFmpegError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from error
    sound = numpy.concatenate([numpy.zeros(0, "f4"), *(part.to_ndarray()[0] for part in parts)])
    if not len(sound):
        raise ValueError("the file's sound has no length")
    if not numpy.abs(sound).max() <= LOUDEST:
        raise ValueError(f"the file's sound has numbers that are not finite, or above {LOUDEST}; 1 is loud")
    return sound
