"""The Cog server that tests use: it validates its inputs, as in an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cog_schema import openapi_schema
from cog_server import PROJECT, CogServer, project_with_schema


class ValidatingServer(CogServer):
    """A `CogServer` in a folder of links to the project, with the schema of its predictor; it is beside the log.

    Raises:
        SchemaError: Cog would refuse the predictor, or would drop a part of its signature.
    """

    def __init__(
        self, predictor: str, log: Path, environ: Mapping[str, str] | None = None, wrapper: Sequence[str] = ()
    ) -> None:
        project = project_with_schema(log.with_suffix(".project"), openapi_schema(predictor, PROJECT))
        super().__init__(predictor, log, environ, project, wrapper)
