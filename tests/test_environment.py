"""The environment: what is in it, and that it is right before torch is imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import run_program

from compile_cache.key.cache_key import key_for, object_name
from compile_cache.key.environment import FORMAT_VERSION, Environment, cpu_threads, detect_environment
from compile_cache.settings import Settings

PROJECT = Path(__file__).parent.parent
ASKED_THREADS = {"nothing asked": "", "one thread": "1", "more threads than cores": str(4 * (os.cpu_count() or 1))}

DETECT_AND_OBSERVE = """
import json, os, sys
from compile_cache.key.environment import detect_environment, observe_environment
detected = detect_environment("/tmp/compile-cache/0", "options", os.environ)
torch_was_imported = "torch" in sys.modules
observed = observe_environment(detected)
print(json.dumps([torch_was_imported, detected.differences(observed)]))
"""

DETECT_DEVICE = """
import json, os
from compile_cache.key.environment import detect_environment
found = detect_environment("/tmp/compile-cache/0", "options", os.environ)
print(json.dumps([found.gpu, found.capability, found.instructions, found.threads]))
"""
CUDA_DRIVER = """
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int) { *device = 0; return 0; }
int cuDeviceGetName(char* name, int, int) { __builtin_strcpy(name, "NVIDIA H100 80GB HBM3"); return 0; }
int cuDeviceGetAttribute(int* number, int attribute, int) { *number = attribute == 75 ? 9 : 0; return 0; }
}
"""


def detect(**environ: str) -> Environment:
    return detect_environment("/tmp/compile-cache/0", "options", environ)


def test_the_digest_of_a_record_is_the_same_in_every_release_of_this_format(environment):
    """If this fails, every stored pack is out of reach: raise FORMAT_VERSION, or keep the record as it was."""
    assert FORMAT_VERSION == 3
    assert environment.digest == "500587b74de839bf23a7abfcab72cdd9"


@pytest.mark.parametrize("name", [field.name for field in fields(Environment)])
def test_the_digest_changes_with_every_field(environment, name):
    another = {str: "another", int: 99, tuple: ("ANOTHER=1",)}[type(getattr(environment, name))]
    assert replace(environment, **{name: another}).digest != environment.digest


def test_differences_name_the_field_and_both_values(environment):
    assert environment.differences(replace(environment)) == ()
    other = replace(environment, torch="2.12.0", device_index=1)
    assert environment.differences(other) == ("torch 2.11.0+cu130 → 2.12.0", "device index 0 → 1")


def test_beside_a_gpu_the_processor_and_its_threads_do_not_count(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13'\ncuda = '13.0'\n")
    (tmp_path / "driver.cpp").write_text(CUDA_DRIVER)
    drivers = tmp_path / "drivers"
    drivers.mkdir()
    subprocess.run(["g++", "-shared", "-fPIC", tmp_path / "driver.cpp", "-o", drivers / "libcuda.so.1"], check=True)
    assert detect_beside(tmp_path, drivers, threads=2) == ["NVIDIA H100 80GB HBM3", "9.0", "", 0]
    gpu, capability, instructions, threads = detect_beside(tmp_path, tmp_path, threads=2)
    assert (gpu, capability, instructions != "", threads) == ("", "", True, 2)


def detect_beside(torch_folder: Path, drivers: Path, threads: int) -> list:
    """The GPU, its capability, the instructions and the threads that a process finds beside another torch."""
    variables = {"PYTHONPATH": str(torch_folder), "LD_LIBRARY_PATH": str(drivers)}
    variables |= {"OMP_NUM_THREADS": str(threads), "MKL_DYNAMIC": "false", "CUDA_VISIBLE_DEVICES": ""}
    return json.loads(run_program(DETECT_DEVICE, folder=PROJECT, **variables).stdout)


def test_a_stored_record_is_read_back_with_fields_of_a_later_version_too(environment):
    later = {**json.loads(environment.to_json()), "later": 1}
    assert msgspec.json.decode(environment.to_json(), type=Environment) == environment
    assert msgspec.convert(later, Environment) == environment


@pytest.fixture(scope="module")
def observed() -> dict[str, tuple[bool, list[str]]]:
    """For each number of threads asked for: whether detection imported torch, and how it differs from torch. In
    processes side by side, since each imports torch."""
    with ThreadPoolExecutor() as executor:
        return dict(zip(ASKED_THREADS, executor.map(detect_and_observe, ASKED_THREADS.values()), strict=True))


def detect_and_observe(asked: str) -> tuple[bool, list[str]]:
    done = run_program(DETECT_AND_OBSERVE, OMP_NUM_THREADS=asked or None, MKL_NUM_THREADS=None)
    return tuple(json.loads(done.stdout))


@pytest.mark.parametrize("asked", ASKED_THREADS)
def test_detection_does_not_import_torch_and_agrees_with_it(observed, asked):
    """A difference makes every boot throw its restore away."""
    assert observed[asked] == (False, [])


def test_of_threads_asked_for_in_several_levels_the_first_counts():
    """OpenMP 5.2, section 21.1.2: OMP_NUM_THREADS is a list, of which torch uses the outermost level."""
    assert cpu_threads({"OMP_NUM_THREADS": "1,4"}) == 1


@pytest.mark.parametrize("nonsense", ["", "many", "0", "-1", "²", "1.5"])
def test_a_number_of_threads_that_is_none_counts_as_not_set(nonsense):
    assert cpu_threads({"OMP_NUM_THREADS": nonsense}) == cpu_threads({})


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_MAX_AUTOTUNE", "TRITON_DEBUG", "INDUCTOR_X", "TORCH_COMPILE_X"])
def test_variables_that_change_code_are_in_the_record(name):
    assert detect(**{name: "1"}).variables == (f"{name}=1",)


@pytest.mark.parametrize(
    "name",
    [
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TRITON_PRINT_AUTOTUNING",
        "TORCH_COMPILE_DEBUG",
        "PATH",
        "TORCH_LOGS",
        "COMPILE_CACHE_STORE",
    ],
)
def test_variables_that_do_not_change_code_are_not(name):
    assert detect(**{name: "1"}).variables == ()


def test_a_value_that_may_be_a_secret_is_a_digest_that_two_machines_share():
    (one,) = detect(TRITON_URL="redis://user:password@host").variables
    assert one == detect(TRITON_URL="redis://user:password@host").variables[0]
    assert "password" not in one
    assert one != detect(TRITON_URL="redis://user:other@host").variables[0]
    assert one.partition(" ")[2] != detect(TRITON_X="redis://user:password@host").variables[0].partition(" ")[2]


def test_the_order_in_which_variables_are_set_does_not_matter():
    one = detect(TORCHINDUCTOR_A="1", TRITON_B="2")
    assert one == detect(TRITON_B="2", TORCHINDUCTOR_A="1")
    assert one.variables == ("TORCHINDUCTOR_A=1", "TRITON_B=2")


# The key: its parts make object paths, whatever a model is called.


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/FLUX.1-schnell", "org--FLUX.1-schnell"),
        ("plain", "plain"),
        ("a b\tc", "a--b--c-[0-9a-f]{12}"),
        ("../../etc/passwd", "etc--passwd-[0-9a-f]{12}"),
        *((text, "unnamed-[0-9a-f]{12}") for text in ("..", ".", "", "/", "모델", "\udcff")),
        (".hidden", "hidden-[0-9a-f]{12}"),
    ],
)
def test_a_name_becomes_one_readable_path_segment(text, name):
    assert re.fullmatch(name, object_name(text))


@given(st.text(max_size=150))
def test_any_text_becomes_a_safe_path_segment(text):
    name = object_name(text)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name)
    assert object_name(name) == name


@given(st.lists(st.text("aé模/-. \udcff", max_size=6) | st.text("m-", min_size=125, max_size=131), unique=True))
def test_two_names_share_a_segment_only_if_one_is_the_segment(texts):
    """`org/name` is stored as `org--name`, and is found by either."""
    for name in map(object_name, texts):
        assert len([text for text in texts if object_name(text) == name and text != name]) <= 1


def test_a_key_says_where_its_packs_are_and_the_environments_record_is_above(environment):
    key = key_for(Settings(model_version="7"), environment, "org/model", ())
    assert key.prefix == f"v3/{environment.digest}/org--model/7/"
    assert key.environment_prefix == f"v3/{environment.digest}/"
