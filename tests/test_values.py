"""No variable's value is in a pack, in a record, in a report, or in what a command prints."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import boots
import pytest
import zstandard
from boots import run_boot, settings, stored
from commands import run_command

# Names as torch, its servers, clouds and databases have them. torch reads some of the first as options.
NAMES = """
TORCHINDUCTOR_REDIS_URL TORCHINDUCTOR_PROFILE_TOKEN TORCHINDUCTOR_WORKER_LOGPATH TORCHINDUCTOR_CK_DIR
TORCHINDUCTOR_AUTOHEURISTIC_LOG_PATH TORCHINDUCTOR_CUTLASS_DIR TORCHINDUCTOR_UPLOAD_TOKEN TORCH_COMPILE_JOB_ID
AOT_INDUCTOR_FILTERED_KERNELS_TO_PRINT INDUCTOR_DOT_GRAPH_SHAPE_SVG TORCH_COMPILE_CACHE_KEY_TAG TRITON_CLOUD_KEY
TORCH_COMPILE_STICKY_PGO_READ TRITON_SERVER_TOKEN TRITON_INFERENCE_PASSWORD TORCHSERVE_KEY TORCHELASTIC_RUN_ID
PYTORCH_HUB_TOKEN MY_PYTORCH_API_KEY TORCHDYNAMO_UPLOAD_KEY DYNAMODB_SECRET_KEY DYNAMODB_SESSION_TOKEN
AWS_DYNAMODB_ENDPOINT DYNAMO_DB_PASSWORD NVIDIA_DYNAMO_TOKEN AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN GOOGLE_API_KEY
AZURE_STORAGE_KEY DATABASE_URL REDIS_URL MONGODB_URI POSTGRES_PASSWORD MYSQL_PWD HF_TOKEN OPENAI_API_KEY
WANDB_API_KEY SENTRY_DSN SECRET_KEY JWT_SIGNING_KEY
"""
# Line ends and quotes break texts that repeat a value.
VALUES = {name: f"zq{number:02}-it's\n\"é{name[::-1]}" for number, name in enumerate(NAMES.split())}
# A forward that reads one, and the user's own torch.compile, before and after READY.
MODEL = """
import os, torch
class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.f = torch.nn.Linear(8, 8)
    def forward(self, x):
        return torch.relu(self.f(x)) if os.environ.get("DYNAMODB_SECRET_KEY") != "off" else x
"""
BOOT = """
import sys, compile_cache
with compile_cache.boot("org/reader", sources=[sys.argv[1]]) as boot:
    import torch
    from secret_model import Reader
    with boot.importing():
        pass
    own = torch.compile(lambda x: torch.nn.functional.gelu(x) * 2)
    own(torch.ones(3))
    net = Reader().eval().requires_grad_(False)
    boot.compile(net, whole=True)
    def call():
        with torch.inference_mode():
            net(torch.ones(2, 8))
    boot.warm_up(call)
own(torch.ones(5, 5, 5))
call()
assert boot.wait_compiled(100)
call()
assert boot.wait_published(60), boot.report
print({region.name: region.step for region in boot.report.regions}, boot.counts().hits)
"""


def unpacked(content: bytes) -> bytes:
    """A pack's manifest and files: the whole is one zstd stream."""
    return zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True).read()


def found_in(content: bytes) -> set[str]:
    """The variables of which any telling part is in these bytes."""
    return {name for name in VALUES if name[::-1].encode() in content or VALUES[name][:5].encode() in content}


@pytest.fixture(scope="module")
def variables_of_imports() -> Iterator[None]:
    """Boots are forked from a process that has these variables while it imports torch."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VALUES.items():
            patch.setenv(name, value)
        patch.setattr(boots, "forking_process", functools.cache(boots.forking_process.__wrapped__))
        yield


def test_no_value_leaves_a_boot(variables_of_imports, tmp_path, monkeypatch):
    source = str(tmp_path / "secret_model.py")
    (tmp_path / "secret_model.py").write_text(MODEL)
    environ, told = settings(tmp_path, cold_start="background"), []
    for _ in range(2):
        done = run_boot(environ, BOOT, source, program="run_source", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.strip())
        (tmp_path / f"report-{len(told)}.json").write_text((tmp_path / "report.json").read_text())
    assert "precompiled" in told[-1]
    objects = stored(tmp_path / "store")
    texts = [unpacked(content) if name.endswith(".pack") else content for name, content in objects.items()]
    assert b"fxgraph/" in b"".join(texts)
    assert not {name: found for name, text in zip(objects, texts, strict=True) if (found := found_in(text))}
    for report in tmp_path.glob("report*.json"):
        assert not found_in(report.read_bytes())
    for name in [name for name in os.environ if name.startswith("COMPILE_CACHE_")]:
        monkeypatch.delenv(name)
    for name in [name for name in environ if name.startswith("COMPILE_CACHE_")]:
        monkeypatch.setenv(name, environ[name])
    pack = next(name for name in objects if name.endswith(".pack")).rpartition("/")[2]
    explain = ("explain", "org/reader", "--source", source)
    for arguments in (("ls", "--json"), ("ls",), ("show", pack, "--files"), explain):
        printed = run_command(*arguments)
        assert printed.code == 0, printed
        assert not found_in(f"{printed.out}{printed.err}".encode()), arguments
    monkeypatch.setenv("TRITON_CLOUD_KEY", "another")
    assert "+TRITON_CLOUD_KEY (digest " in run_command(*explain).out, "the variable that differs is named"
