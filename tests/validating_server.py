"""The Cog server that tests use: it validates its inputs, as in an image."""

from __future__ import annotations

import json
import re
import urllib.error
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from cog_schema import openapi_schema
from cog_server import CogServer, link_project, write_schema

# The lines of a boot's report, an event with its fields, and what a model says of its pipeline.
_OURS = re.compile(
    r"(restore|layer left out|warning|precompiled): |refused pack |region |ready after "
    r"|[a-z_]+\.[a-z_]+ [a-z_]+=|\w+Pipeline ignores "
)
# torch 2.11 says so where its build for CUDA runs without a GPU, as in no image that is served.
_NO_CUDA = "No CUDA runtime is found"


class ValidatingServer(CogServer):
    """A `CogServer` with the schema of its predictor in `project`, or beside its log in a folder of links to this one.

    Raises:
        SchemaError: Cog would refuse the predictor, or would drop a part of its signature.
    """

    def __init__(
        self,
        predictor: str,
        log: Path,
        environ: Mapping[str, str] | None = None,
        project: Path | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        folder = link_project(log.with_suffix(".project")) if project is None else project
        write_schema(folder, openapi_schema(predictor, folder))
        super().__init__(predictor, log, environ, folder, wrapper)

    def refuse(self, inputs: Mapping[str, Any]) -> dict[str, str]:
        """Ask for a prediction that is not let through to the predictor; the reasons, by the inputs at fault."""
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.predict(**inputs)
        assert caught.value.code == HTTPStatus.UNPROCESSABLE_ENTITY
        return {fault["loc"][-1]: fault["msg"] for fault in json.load(caught.value)["detail"]}

    def foreign_lines(self) -> list[str]:
        """Lines that the worker has written until now, and that are neither this project's nor Cog's."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        own = [line["fields"]["message"] for line in lines if line["target"] in ("coglet::setup", "coglet::user")]
        assert any(line.startswith("restore: ") for line in own), lines
        return [line for line in own if not _OURS.match(line) and _NO_CUDA not in line]
