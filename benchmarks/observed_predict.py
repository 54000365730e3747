"""The predictors of predict.py, in a process that is observed. Cog's server takes them from here, and so does a process
without a server."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from observations import observe

import predict


class Predictor(predict.Predictor):
    """Draws pictures."""

    def setup(self) -> None:
        """Boot, and begin to observe."""
        super().setup()
        observe(self.boot.report.to_json, lambda: self.boot.waiting)


class TextPredictor(predict.TextPredictor):
    """Generates text."""

    def setup(self) -> None:
        """Boot, and begin to observe."""
        super().setup()
        observe(self.boot.report.to_json, lambda: self.boot.waiting)
