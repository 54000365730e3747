"""This project's predictors in a Cog server that validates its inputs, as in an image."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from cog_server import PROJECT, CogServer

# The documents that Cog's own command derived.
_FOLDER = Path(__file__).parent / "cog_schema"
SCHEMAS = {"predict.py:Predictor": _FOLDER / "image.json", "predict.py:TextPredictor": _FOLDER / "text.json"}

# The lines of a boot's report, an event with its fields, and what a model says of its pipeline.
_OURS = re.compile(
    r"(restore|layer left out|warning|precompiled): |(refused|unread) pack |region |ready after "
    r"|[a-z_]+\.[a-z_]+ [a-z_]+=|\w+Pipeline ignores "
)
# torch 2.11 says so where its build for CUDA runs without a GPU, as in no image that is served.
_NO_CUDA = "No CUDA runtime is found"


class ValidatingServer(CogServer):
    """A `CogServer` of `predict.py:Predictor` or `predict.py:TextPredictor`.

    It runs beside its log, in a folder of links to this project and with the predictor's schema. Without a schema,
    Cog's server validates no input and streams nothing.
    """

    def __init__(self, predictor: str, log: Path, environ: Mapping[str, str] | None = None) -> None:
        folder = log.with_suffix(".project")
        (folder / ".cog").mkdir(parents=True, exist_ok=True)
        shutil.copy(SCHEMAS[predictor], folder / ".cog" / "openapi_schema.json")
        for path in PROJECT.iterdir():
            if not path.name.startswith(".") and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
        super().__init__(predictor, log, environ, folder)

    def foreign_lines(self) -> list[str]:
        """Lines that the worker has written until now, and that are neither this project's nor Cog's."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        own = [line["fields"]["message"] for line in lines if line["target"] in ("coglet::setup", "coglet::user")]
        assert any(line.startswith("restore: ") for line in own), lines
        return [line for line in own if not _OURS.match(line) and _NO_CUDA not in line]
