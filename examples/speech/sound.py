"""The sound of a file, by PyAV."""

import av
import numpy
from cog import Path


def read(path: Path, rate: int) -> numpy.ndarray:
    """One channel of `rate` numbers a second, [length].

    Raises:
        ValueError: the file has no sound.
    """
    with av.open(str(path)) as file:
        if not file.streams.audio:
            raise ValueError("the file has no sound")
        resampler = av.AudioResampler("fltp", "mono", rate)
        parts = [part for frame in [*file.decode(audio=0), None] for part in resampler.resample(frame)]
    if not parts:
        raise ValueError("the file's sound has no length")
    return numpy.concatenate([part.to_ndarray()[0] for part in parts])
