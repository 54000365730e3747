"""After READY, a thread orders the calls that stored artifacts name in their headers."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import TYPE_CHECKING

from compile_cache.aot.known_calls import KnownCall, known_calls
from compile_cache.errors import CompileCacheError
from compile_cache.settings import Settings
from compile_cache.torch_threads import end_at_exit
from compile_cache.versions.cache import CompileCache
from compile_cache.versions.directory import CacheDirectory

if TYPE_CHECKING:
    from compile_cache.lifecycle.restore import Restored
    from compile_cache.regions.compiler import Compiler

log = logging.getLogger("compile_cache")

# After these outcomes of the restore, this version may lack artifacts of known calls on this GPU.
_INCOMPLETE = ("miss", "seeded")


def start_compiling(
    compiler: Compiler, settings: Settings, directory: CacheDirectory | None, restored: Restored | None
) -> None:
    """Let the second process begin: first with the warm-up's calls, then with known calls. Called at READY."""
    compiler.release()
    if settings.cold_start == "background" and directory is not None and restored is not None:
        _plan_ahead(compiler, directory, restored.cache, restored.report.outcome)


def _plan_ahead(compiler: Compiler, directory: CacheDirectory, cache: CompileCache | None, outcome: str) -> None:
    """On a thread, order the calls that stored artifacts name, if this version has no artifacts in this environment.

    The artifacts are those in the cache directory, and those of the model's other versions and environments. A failure
    costs nothing.
    """
    if outcome not in _INCOMPLETE:
        return

    ending = threading.Event()

    def run() -> None:
        try:
            if calls := _known(directory, cache):
                compiler.plan(itertools.takewhile(lambda _: not ending.is_set(), calls))
        except (CompileCacheError, OSError) as error:
            log.info("plan.failed error=%s", error)

    thread = threading.Thread(target=run, name="compile-cache-plan", daemon=True)
    end_at_exit(thread, ending.set)
    thread.start()


def _known(directory: CacheDirectory, cache: CompileCache | None) -> list[KnownCall]:
    from compile_cache.versions.relatives import calls_of_relatives

    own = known_calls(directory.path)
    relatives = calls_of_relatives(cache) if cache is not None else []
    return list({call.name: call for call in (*own, *relatives)}.values())
