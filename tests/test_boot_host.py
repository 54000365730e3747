"""What the host and the caller do to a boot: mounts, users, logging, threads, names."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from boots import python_path, run_boot, settings
from namespaces import mounted
from programs import run_program

import compile_cache
from compile_cache.errors import SettingsError
from compile_cache.lifecycle.host import claim_workplace
from compile_cache.settings import Settings

ROOT = Path(__file__).parent.parent
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user, or a mount, needs root")

# The modules that `import compile_cache` added before the library had rooms: nothing may make it slower.
MOST_MODULES = 61
COUNT_MODULES = "import sys; before = set(sys.modules); import compile_cache; print(len(set(sys.modules) - before))"

# A user id that nobody has named, with root's rights to read this project.
BE_NOBODY = """
import os, sys
for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
    os.environ.pop(name, None)
os.setreuid(12345, 0)
"""
COMPILE_A_LAYER = """
import compile_cache
with compile_cache.boot("my-model") as boot:
    import torch
    boot.compile(torch.nn.Linear(4, 4))
assert boot.report.warnings == [], boot.report.warnings
import getpass
print(getpass.getuser())
"""
START_NO_THREAD = """
import threading
import compile_cache
start = threading.Thread.start
def fail(thread):
    if thread.name == "compile-cache-orders":
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = fail
with compile_cache.boot("my-model") as boot:
    import torch
    layer = torch.nn.Linear(4, 4)
    boot.compile(layer)
    with torch.inference_mode():
        boot.warm_up(lambda: layer(torch.ones(1, 4)))
print(boot.report.ready_s > 0, boot.waiting)
"""
FAIL_TO_IMPORT_THE_COMPILER = """
import sys
import compile_cache
with compile_cache.boot("my-model") as boot:
    import torch
    class Failing:
        begun = 0
        def find_spec(self, name, path=None, target=None):
            if name == "torch._dynamo.utils":
                Failing.begun += 1
                raise KeyError(f"failure number {Failing.begun}")
    sys.meta_path.insert(0, Failing())
    if "preload" in sys.argv:
        with boot.importing():
            pass
    for _ in range(2):
        layer = torch.nn.Linear(4, 4)
        boot.compile(layer)
        boot.warm_up(lambda: layer(torch.ones(1, 4)))
assert Failing.begun == 1
(warning,) = boot.report.warnings
assert "could not set up compilation; serving eager: KeyError('failure number 1')" in warning, warning
"""


def run(program: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    done = run_program(program, *arguments, folder=ROOT, **environ)
    assert done.returncode == 0, done.stderr
    return done


def run_forked(program: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The same in a process that has imported torch's compiler."""
    done = run_boot(environ, program, program="run_source")
    assert done.returncode == 0, done.stderr
    return done


def test_importing_the_library_imports_no_more_modules_than_it_did():
    assert int(run(COUNT_MODULES).stdout) <= MOST_MODULES


# Mounts


@needs_root
def test_a_cache_directory_mounted_noexec_serves_eager_at_once_and_names_the_setting(tmp_path):
    program = "import compile_cache\nwith compile_cache.boot('my-model') as boot: boot.compile(None)"
    noexec = tmp_path / "noexec"
    with mounted(noexec, "noexec"):
        run(program, **settings(tmp_path, dir=str(noexec)))
    report = json.loads((tmp_path / "report.json").read_text())
    (warning,) = report["warnings"]
    assert f"{noexec}/0 is mounted noexec" in warning
    assert "Set COMPILE_CACHE_DIR to a folder on another mount" in warning
    assert report["restore"]["outcome"] == "off"
    assert not (tmp_path / "store").exists()


# The working directory


def test_a_relative_report_is_written_where_the_boot_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with compile_cache.boot("my-model", environ=settings(tmp_path, scope="off", report="report.json")):
        monkeypatch.chdir("/")
    assert (tmp_path / "report.json").exists()


# Bytecode


@pytest.mark.parametrize("writes", [True, False])
def test_a_package_whose_source_is_compiled_in_each_boot_is_named(tmp_path, writes):
    package = tmp_path / "site" / "diffusers" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    program = "import compile_cache, diffusers\nwith compile_cache.boot('my-model'): pass"
    environ = settings(tmp_path, scope="off") | {"PYTHONDONTWRITEBYTECODE": "" if writes else "1"}
    environ["PYTHONPATH"] = python_path(package.parent.parent)
    run(program, **environ)
    warnings = json.loads((tmp_path / "report.json").read_text())["warnings"]
    named = [warning for warning in warnings if "compiles the Python source of diffusers," in warning]
    assert len(named) == (not writes), warnings


# Users


@needs_root
@pytest.mark.parametrize("scope", ["regional", "off"])
def test_a_user_without_a_name_gets_one(tmp_path, scope):
    done = run(BE_NOBODY + COMPILE_A_LAYER, **settings(tmp_path, scope=scope))
    assert done.stdout == "uid-12345\n"


@pytest.mark.parametrize("arguments", [[], ["preload"]])
def test_an_import_of_the_compiler_that_failed_is_not_begun_again(tmp_path, arguments):
    run(FAIL_TO_IMPORT_THE_COMPILER, *arguments, **settings(tmp_path))


IMPORT_AND_FAIL = """
import contextlib, gc, importlib, sys
import compile_cache
importlib.import_module(sys.argv[1])
with contextlib.suppress(ZeroDivisionError), compile_cache.boot("my-model").importing():
    collects = gc.isenabled()
    1 / 0
print(collects, gc.isenabled(), gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize("before", ["json", "torch"])
def test_imports_run_without_the_collector_of_garbage_which_then_skips_what_is_no_model(tmp_path, before):
    done = run(IMPORT_AND_FAIL, before, **settings(tmp_path, store="off"))
    assert done.stdout == f"False True {before == 'json'}\n"


# Logging


def test_a_second_process_that_cannot_begin_costs_speed_and_not_the_boot(tmp_path):
    done = run_forked(START_NO_THREAD, environ=settings(tmp_path, cold_start="background"))
    assert done.stdout == "True 0\n"  # nothing waits
    assert "cannot be compiled in a second process: RuntimeError: can't start new thread" in done.stderr


@pytest.mark.parametrize(
    ("configured", "is_said"),
    [
        ("", True),
        ("import logging; logging.basicConfig(level=logging.INFO)", True),
        ("import logging; logging.basicConfig()", False),
        ("import logging; logging.getLogger('compile_cache').setLevel(logging.WARNING)", False),
    ],
    ids=["nothing", "all", "warnings", "the library's warnings"],
)
def test_the_report_is_seen_unless_the_program_says_otherwise(tmp_path, configured, is_said):
    program = f"{configured}\nimport compile_cache\nwith compile_cache.boot('my-model'): pass"
    done = run(program, **settings(tmp_path, scope="off"))
    assert ("ready after" in done.stderr) is is_said
    assert done.stdout == ""


def test_the_library_steps_back_once_the_program_configures_its_logging(tmp_path):
    program = """
import logging, sys, compile_cache
boot = compile_cache.boot("my-model")
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
for _ in range(2):
    logging.getLogger("compile_cache").warning("a warning")
    logging.getLogger("compile_cache").info("a line")
print(logging.getLogger("compile_cache").handlers)
"""
    done = run(program, **settings(tmp_path, scope="off"))
    assert done.stdout.splitlines() == ["WARNING:compile_cache:a warning"] * 2 + ["[]"]
    assert "a warning" not in done.stderr


@pytest.mark.parametrize("level", ["INFO", "ERROR"])
def test_a_level_that_the_program_sets_later_stays(tmp_path, level):
    program = f"""
import logging, compile_cache
boot = compile_cache.boot("my-model")
logging.basicConfig()
logging.getLogger("compile_cache").setLevel(logging.{level})
logging.getLogger("compile_cache").error("an error")
assert logging.getLogger("compile_cache").level == logging.{level}
"""
    run(program, **settings(tmp_path, scope="off"))


# Names


@pytest.mark.parametrize(
    ("folder", "store", "named", "is_warned"),
    [
        ("weights", "s3://bucket", None, True),
        ("weights", "s3://bucket", "my-model", False),
        ("weights", "/a/store", None, False),
        ("my-model", "s3://bucket", None, False),
    ],
)
def test_a_folder_called_as_many_are_is_warned_of_where_the_store_is_shared(tmp_path, folder, store, named, is_warned):
    (tmp_path / folder).mkdir()
    told = Settings(dir=str(tmp_path / "cache"), store=store, model_name=named)
    warnings: list[str] = []
    claim_workplace(told, str(tmp_path / folder), warnings.append)
    assert [warning.endswith("Set COMPILE_CACHE_MODEL_NAME.") for warning in warnings] == [True] * is_warned


@pytest.mark.parametrize(("given", "said"), [(["missing.py"], "not exist: missing.py"), ("missing.py", "a list")])
def test_sources_that_are_not_there_or_no_list_are_named_before_anything_begins(tmp_path, given, said):
    with pytest.raises(SettingsError, match=said):
        compile_cache.boot("model", sources=given, environ={"COMPILE_CACHE_DIR": str(tmp_path / "cache")})
    assert not (tmp_path / "cache").exists()


def test_boots_without_their_usual_directory_each_have_one_of_this_user_and_publish_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "cache").write_text("no folder")
    warnings: list[str] = []
    claims = [claim_workplace(Settings(dir=str(tmp_path / "cache")), "model", warnings.append) for _ in range(2)]
    folder = tmp_path / f"compile-cache-{os.geteuid()}"
    assert [directory.path for directory, _ in claims] == [folder / "0", folder / "1"]
    for (_, told), warning in zip(claims, warnings, strict=True):
        assert (told.store, told.layers, told.publish) == ("off", (), False)
        assert "This boot compiles into a temporary folder" in warning


# Threads


def test_a_setup_in_an_event_loop_and_predictions_at_once_are_compiled_and_right(tmp_path):
    """Cog runs `async def setup()` in the event loop's thread. Predictions run there or on other threads."""
    done = run_forked(IN_AN_EVENT_LOOP, environ=settings(tmp_path))
    steps, largest_difference, compiled_now = json.loads(done.stdout.splitlines()[-1])
    assert (steps, compiled_now) == (["graphs"], 0)  # no other process has a class that a function made
    assert largest_difference < 1e-5


IN_AN_EVENT_LOOP = """
import asyncio, copy, json, threading
import compile_cache

async def serve():
    with compile_cache.boot("toy/model@" + "0" * 40) as boot:
        import torch
        class Model(torch.nn.Linear):
            def forward(self, inputs):
                return torch.nn.functional.gelu(super().forward(inputs))
        with boot.importing():
            pass
        model = Model(8, 8).eval()
        eager = copy.deepcopy(model)
        boot.compile(model, whole=True)
        predict = torch.inference_mode()(model)
        boot.warm_up(lambda: predict(torch.ones(4, 8)))

    async def run(inputs, in_a_thread):
        return await asyncio.to_thread(predict, inputs) if in_a_thread else predict(inputs)

    inputs = [torch.full((4, 8), number / 32) for number in range(32)]
    before = boot.counts()
    outputs = await asyncio.gather(*(run(one, number % 2) for number, one in enumerate(inputs)))
    with torch.inference_mode():
        differences = [(ours - eager(one)).abs().max().item() for ours, one in zip(outputs, inputs)]
    steps, compiled_now = [region.step for region in boot.report.regions], boot.counts().since(before)
    print(json.dumps([steps, max(differences), compiled_now.graphs + compiled_now.misses]))

thread = threading.Thread(target=lambda: asyncio.run(serve()))
thread.start()
thread.join()
"""


@pytest.mark.parametrize("is_cogs", [True, False])
def test_the_last_lines_go_to_the_stderr_that_cog_has_saved_and_to_no_other_file_of_that_number(tmp_path, is_cogs):
    """In a Cog worker, it is the server's."""
    program = f"""
import logging, os, sys
from compile_cache.lifecycle.host import container_log
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
os.dup2(2 if {is_cogs} else os.open("own", os.O_CREAT | os.O_WRONLY), 101)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
log = logging.getLogger("told")
log.addHandler(container_log())
log.warning("a last line")
log.handlers.clear()
os.fstat(101)  # it is Cog's, and stays open
"""
    done = run_program(program, folder=tmp_path)
    assert done.returncode == 0
    assert ("a last line" in done.stderr) == is_cogs
    assert is_cogs or not (tmp_path / "own").read_text()
