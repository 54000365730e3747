"""One boot of one way, and what its server does then; prints one JSON line. peers.py starts it.

All ways load the model with the same code and serve with the same `run`. A peer's boot uses the library with the scope
`off`, where it only keeps the time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import BY_NAME, Asked, Way
from served import InProcess, describe_machine

import compile_cache
from compile_cache.key.model_version import split_revision
from models.early_weights import EarlyWeights, local_folder
from models.image.settings import ImageSettings
from predict import Predictor, TextPredictor

_PATIENCE_S = 300.0
_KERNEL_SUFFIXES = (".so", ".cubin", ".hsaco")


class Keeper:
    """How a peer keeps what it compiled: what its users would write, over a local folder. This one keeps nothing."""

    def restore(self) -> None:
        """Take what the store has; nothing if it is empty. Called before anything is compiled."""

    def save(self) -> None:
        """Store what was compiled. Called after the warm-up."""


class Zipped(Keeper):
    """The directory as one zip, stored again if it has other file names: fal's way, which compares names as well."""

    def __init__(self, store: Path) -> None:
        self._zip = store / "cache.zip"
        self._directory = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        self._restored: frozenset[str] = frozenset()

    def restore(self) -> None:
        """Unpack the zip into the directory."""
        if self._zip.exists():
            shutil.unpack_archive(self._zip, self._directory)
        self._restored = self._names()

    def save(self) -> None:
        """Replace the zip at once, so that no other boot reads a part of it."""
        if self._names() != self._restored:
            made = shutil.make_archive(str(self._zip.with_name("new")), "zip", self._directory)
            os.replace(made, self._zip)

    def _names(self) -> frozenset[str]:
        return frozenset(str(path) for path in self._directory.rglob("*") if path.is_file())


class MegaCache(Keeper):
    """torch's own archive of its caches in one file. `is_saved` is False for a container that only loads a file which a
    build step made."""

    def __init__(self, store: Path, is_saved: bool) -> None:
        self._file = store / "cache.ptcache"
        self._is_saved = is_saved

    def restore(self) -> None:
        """Load the file into the directory.

        Raises:
            RuntimeError: torch does not take it.
        """
        if self._file.exists():
            import torch

            if torch.compiler.load_cache_artifacts(self._file.read_bytes()) is None:
                raise RuntimeError(f"load_cache_artifacts takes nothing from {self._file.name}")

    def save(self) -> None:
        """Write the file, with what was loaded and what was compiled.

        Raises:
            RuntimeError: torch has nothing to store.
        """
        if self._is_saved:
            import torch

            artifacts = torch.compiler.save_cache_artifacts()
            if artifacts is None:
                raise RuntimeError("save_cache_artifacts has nothing to store")
            new = self._file.with_name("new")
            new.write_bytes(artifacts[0])
            os.replace(new, self._file)


def make_keeper(keeps: str, store: Path, is_build_step: bool) -> Keeper:
    """The keeper of a way, by its name."""
    if keeps == "zip":
        return Zipped(store)
    if keeps in ("mega", "committed"):
        return MegaCache(store, is_saved=keeps == "mega" or is_build_step)
    return Keeper()


class PicturePeer(Predictor):
    """Draws pictures; compiled and kept in a peer's way."""

    def __init__(self, way: Way, is_build_step: bool) -> None:
        super().__init__()
        self._way = way
        self._keeper = make_keeper(way.keeps, Path(os.environ["COMPILE_CACHE_STORE"]), is_build_step)

    def setup(self) -> None:
        """Restore, load, compile, warm up, save; READY when it returns."""
        settings = ImageSettings.from_env(os.environ)
        model, revision = split_revision(settings.model)
        self.thread = compile_cache.ModelThread()
        with compile_cache.boot(settings.model) as self.boot, EarlyWeights(local_folder(model, revision)) as early:
            with self.boot.importing():
                import torch

                early.begin(torch.device("cuda", 0))
                from models.image.lora_files import LoraFiles
                from models.image.pictures import PictureFiles
                from models.image.pipeline import DiffusionModel, import_pipeline

                import_pipeline(model, revision)
            with self.boot.timed("restore"):
                self._keeper.restore()
                restored = kernels()
            with self.boot.timed("weights"):
                self.model = DiffusionModel.load(model, revision, settings, early)
            with self.boot.timed("warm_up"):
                compile_network(self.model.denoiser, self._way.compiles)
                for inputs in self.model.warm_up_inputs(settings.warm_up_sizes):
                    self.thread.call(self.model.run, inputs)
            with self.boot.timed("save"):
                self._keeper.save()
            self.kernels_made = len(kernels() - restored)
        self.lora_files = LoraFiles(Path(settings.lora_folder))  # which `run` asks for none
        self.files = PictureFiles()


def kernels() -> set[Path]:
    """The machine code in a peer's cache directory."""
    directory = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    return {path for path in directory.rglob("*") if path.suffix in _KERNEL_SUFFIXES}


def compile_network(network: Any, compiles: str) -> None:
    """Have torch compile the network, as the peer's documentation recommends it."""
    if compiles == "whole":
        network.compile()
    elif compiles == "dynamic":
        network.compile(dynamic=True)
    elif compiles == "regional":
        network.compile_repeated_blocks(fullgraph=True)


class TextPeer(TextPredictor):
    """Generates text with transformers' `generate`: eager, or with a static cache, where it compiles its own step."""

    def __init__(self, way: Way, is_build_step: bool, asked: Asked) -> None:
        super().__init__()
        self._way = way
        self._warm_up = asked.inputs
        self._keeper = make_keeper(way.keeps, Path(os.environ["COMPILE_CACHE_STORE"]), is_build_step)

    def setup(self) -> None:
        """Restore, load, warm up with a request like the later ones, save; READY when it returns."""
        model, revision = split_revision(os.environ["MODEL"])
        with compile_cache.boot(model) as self.boot, EarlyWeights(local_folder(model, revision)) as early:
            with self.boot.importing():
                import torch

                early.begin(torch.device("cuda", 0))
                from models.text.model import AutoTokenizer, import_model, load_model

                import_model(model, revision)
            with self.boot.timed("restore"):
                self._keeper.restore()
                restored = kernels()
            with self.boot.timed("weights"):
                self.network = load_model(model, revision, early)
                self._tokenizer = AutoTokenizer.from_pretrained(model, revision=revision)
            with self.boot.timed("warm_up"):
                self._arguments = generate_arguments(self._way.compiles)
                self._generate(self._warm_up["prompt"], self._warm_up["max_new_tokens"])
            with self.boot.timed("save"):
                self._keeper.save()
            self.kernels_made = len(kernels() - restored)

    def run(self, prompt: str, max_new_tokens: int, temperature: float = 0.0, seed: int = 0) -> Iterator[str]:
        """The whole text at once, chosen greedily."""
        with self.boot.prediction() as prediction:
            yield self._generate(prompt, max_new_tokens)
        for name, value in prediction.metrics().items():
            self.record_metric(name, value)

    def _generate(self, prompt: str, max_new_tokens: int) -> str:
        inputs = self._tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(self.network.device)
        found = self.network.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens, **self._arguments)
        text: str = self._tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return text


def generate_arguments(compiles: str) -> dict[str, Any]:
    """What makes `generate` compile. By itself it does so on a GPU only."""
    if not compiles:
        return {}
    from transformers import CompileConfig

    config = CompileConfig(dynamic=True if compiles == "dynamic" else None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def measure(asked: Asked) -> dict[str, Any]:
    """Boot, and ask: seconds, and until READY new files of machine code.

    `settled_s` is from READY until a second process has compiled everything.
    """
    predictor = make_predictor(asked)
    predictor.setup()
    report = predictor.boot.report
    served = InProcess(predictor)
    first = served.answer(**asked.inputs)
    return {
        "ready_s": report.process_s,
        "phases": dict(report.phases),
        "kernels_made": getattr(predictor, "kernels_made", report.counts.kernels_compiled),
        "first_s": first.seconds,
        "first_sha256": first.sha256,
        "settled_s": settle(predictor, served, asked) if asked.is_filling else None,
        "later_s": [served.answer(**asked.inputs).seconds for _ in range(asked.requests)],
        "machine": describe_machine(),
    }


def make_predictor(asked: Asked) -> Any:
    """The project's own predictor, or a peer's."""
    way = BY_NAME[asked.way]
    if way.is_ours:
        return TextPredictor() if asked.is_text else Predictor()
    if asked.is_text:
        return TextPeer(way, asked.is_filling, asked)
    return PicturePeer(way, asked.is_filling)


def settle(predictor: Any, served: InProcess, asked: Asked) -> float | None:
    """Seconds from READY until everything is compiled, if a second process compiles; then wait until it is stored."""
    begun_s = time.monotonic()
    settled_s = None
    if predictor.boot.waiting:  # in `block` too, if the setup budget was over
        if not predictor.boot.wait_compiled(_PATIENCE_S):
            raise SystemExit(f"not compiled {_PATIENCE_S:g} s after READY")
        settled_s = time.monotonic() - begun_s
        # Each answer compares a part of what has arrived, and only compared code is stored.
        while not served.answer(**asked.inputs).is_precompiled:
            if time.monotonic() - begun_s > _PATIENCE_S:
                raise SystemExit(f"not precompiled {_PATIENCE_S:g} s after READY")
    if not predictor.boot.wait_published(_PATIENCE_S) or predictor.boot.report.publish.failures:
        raise SystemExit(f"not published: {predictor.boot.report.publish.failures}")
    return settled_s


def main() -> None:
    """Boot, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("asked", help="JSON of `Asked`")
    print(json.dumps(measure(Asked(**json.loads(parser.parse_args().asked)))), flush=True)


if __name__ == "__main__":
    main()
