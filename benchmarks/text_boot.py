"""A boot of a text model as `predict.TextPredictor` does it, and what all benchmarks of one have in common.

Imports no torch: a boot does, after the restore has started.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fresh_boot import ROOT, boot_environment

sys.path.append(str(ROOT))

import compile_cache
from compile_cache.key.model_version import split_revision
from models.text.settings import TextSettings
from predict import SOURCES, without_collection
from warmup import warm_up

if TYPE_CHECKING:
    from models.text.model import TextModel

# Of all boots; the caller's own variables come first.
SIZES = {"CACHE_TOKENS": "2304", "PROMPT_BUCKETS": "128,2048"}
TUNED = {"TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"}


@dataclass(frozen=True, slots=True)
class Booted:
    """A model that is READY, and the boot that made it so."""

    boot: compile_cache.Boot
    model: TextModel

    @property
    def is_recorded(self) -> bool:
        """Whether the step of decoding is replayed as a CUDA graph. Where it cannot be, a boot only warns."""
        return self.model.generator.is_recorded


def boot_text(settings: TextSettings) -> Booted:
    """`TextPredictor.setup`, line by line."""
    model, revision = split_revision(settings.model)
    with compile_cache.boot(settings.model, sources=SOURCES) as boot:
        with boot.timed("import"), without_collection():
            from models.text.compiling import prepare_process
            from models.text.model import TextModel, import_model

            import_model(model, revision)
        boot.prepare(prepare_process)
        boot.preload()
        with boot.timed("weights"):
            text = TextModel.load(model, revision, settings)
        for step in text.steps:
            boot.compile(step, whole=True, until_swap=True, shares_weights=True)
        warm_up(boot, text, text.warm_up_inputs())
        with boot.timed("record"):
            text.generator.record(boot)
    return Booted(boot, text)


def text_settings(model: str) -> TextSettings:
    """Of a model in a folder, with the sizes of all boots."""
    return TextSettings.from_env({**SIZES, **os.environ, "MODEL": model})


@dataclass(frozen=True, slots=True)
class Timing:
    """When the consumer of one answer had its tokens: seconds from the request, one for each."""

    arrivals_s: tuple[float, ...]

    @classmethod
    def of(cls, tokens: Iterable[Any]) -> Timing:
        """Take all of them. Generation is asked for here, and not before."""
        started = time.perf_counter()
        return cls(tuple([time.perf_counter() - started for _ in tokens]))

    @property
    def first_s(self) -> float:
        """From the request to the first token."""
        return self.arrivals_s[0]

    @property
    def total_s(self) -> float:
        """From the request to the last token."""
        return self.arrivals_s[-1]

    @property
    def gaps_s(self) -> list[float]:
        """Between consecutive tokens: one less than there are tokens."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    @property
    def token_ms(self) -> float:
        """A token after the first: the mean of all gaps."""
        return (self.total_s - self.first_s) / (len(self.arrivals_s) - 1) * 1e3

    @property
    def median_gap_ms(self) -> float:
        """A gap in the middle of all: one that nothing unusual has made longer."""
        return median(self.gaps_s) * 1e3


def weight_bytes(model: Any) -> int:
    """What one token reads of the weights: all but the input embedding, of which it reads a row; that one as well where
    the logits are made with it."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    is_tied = output is not None and output.weight is embedding
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return total - (0 if is_tied else embedding.numel() * embedding.element_size())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a benchmark that boots in its own process is told."""
    parser.add_argument("--model", type=Path, required=True, help="a folder that llama_boot.py --write wrote")
    parser.add_argument("--store", type=Path, required=True, help="folder of the store and the cache directory")
    parser.add_argument("--tuned", action="store_true", help="with Inductor's coordinate descent tuning")
    parser.add_argument("--out", type=Path, help="file to which the result is added as a JSON line")


def set_environment(work: Path, is_tuned: bool) -> None:
    """Let this process boot with the store in the folder `work`, which may have one from before."""
    work.mkdir(parents=True, exist_ok=True)
    work = work.resolve()
    os.environ.update(text_environment(work, "warm", work / "store", is_tuned))


def text_environment(work: Path, kind: str, store: Path, is_tuned: bool) -> dict[str, str]:
    """The variables of a boot, whose cache directory is in the folder `work`."""
    environ = boot_environment(work, kind, store, "regional")
    return {**SIZES, **environ, "HF_HUB_OFFLINE": "1", **(TUNED if is_tuned else {})}


def describe_boot(booted: Booted) -> str:
    """A line on how a boot came by its compiled steps."""
    report = booted.boot.report
    regions = ", ".join(f"{region.name} {region.step}" for region in report.regions)
    warnings = "".join(f"; warning: {warning}" for warning in report.warnings)
    recorded = "recorded" if booted.is_recorded else "not recorded"
    return f"booted in {report.process_s:.1f} s: restore {report.restore.outcome}, {regions}, {recorded}{warnings}"
