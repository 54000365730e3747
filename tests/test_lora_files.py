"""LoRAs by name: what is downloaded, kept, evicted and refused. Servers are real, with TLS, on the loopback."""

from __future__ import annotations

import ipaddress
import json
import os
import pickle
import re
import shutil
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from machines import write_files
from marked_processes import PATIENCE_S
from safetensors.numpy import save
from web_servers import Certificates, answer, answering, make_certificates, running, tls

from models.image import lora_files
from models.image.lora_files import LoraError, LoraFiles

HOSTS = ("loras.example", "other.example", "civitai.com", "files.civitai.com", "huggingface.co")
LORA = save({"up": np.arange(64, dtype=np.float32)})
ADDRESS = "https://loras.example/lora.safetensors"
CIVITAI = "https://civitai.com/api/download/models/12"
PICKLE = pickle.dumps({"up": [1.0] * 64})


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The certificates of HOSTS and 127.0.0.1."""
    return make_certificates(tmp_path_factory.mktemp("certificates"), *HOSTS)


@pytest.fixture
def files(tmp_path: Path, certified: Certificates) -> LoraFiles:
    return made_files(tmp_path / "loras", certified)


def made_files(folder: Path, certified: Certificates, **limits: Any) -> LoraFiles:
    return LoraFiles(folder, tls=ssl.create_default_context(cafile=certified.authority), **limits)


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The loopback's port of each host: what stands in for the DNS. The loopback counts as public, and nothing else."""
    found: dict[str, int] = {}
    look_up, is_allowed = socket.getaddrinfo, lora_files._is_allowed

    def getaddrinfo(host: Any, *arguments: Any, **named: Any) -> Any:
        if host in found:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", found[host]))]
        assert ipaddress.ip_address(host), "a test looks up a real name"
        return look_up(host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(lora_files, "_is_allowed", lambda address: address == "127.0.0.1" or is_allowed(address))
    return found


Serve = Callable[..., Any]


@pytest.fixture
def serve(ports: dict[str, int], certified: Certificates) -> Iterator[Serve]:
    """Start a server of a host that gives these answers."""
    with ExitStack() as stack:

        def start(host: str, *answers: bytes | None) -> Any:
            served = stack.enter_context(answering(*answers, context=tls(certified)))
            ports[host] = served.port
            return served

        yield start


@pytest.fixture
def served(serve: Serve) -> Any:
    """A server that gives the LoRA at ADDRESS, and at every other path."""
    return serve("loras.example", answer("200 OK", LORA))


def redirect(address: str) -> bytes:
    return answer("302 Found", Location=address)


def without_length(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body


def path_of(files: LoraFiles, name: str, *tokens: str | None) -> Path:
    return files.paths([name], *tokens)[0]


def refusal(files: LoraFiles, name: str, *tokens: str | None) -> str:
    with pytest.raises(LoraError) as caught:
        files.paths([name], *tokens)
    return str(caught.value)


def left_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*"))


@contextmanager
def handling(certified: Certificates, handle: Callable[[ssl.SSLSocket], None]) -> Iterator[int]:
    """A server that handles connections by hand; its port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            with suppress(OSError):  # the client hangs up
                handle(self.request)

    with running(Handler, tls(certified)) as served:
        yield served.port


# Local files


@pytest.fixture
def local(tmp_path: Path, certified: Certificates) -> LoraFiles:
    """With two local folders, of which one is a link."""
    for name in ("mine", "mine/sub", "real", "others"):
        write_files(tmp_path / name, {"a.safetensors": LORA})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    return made_files(tmp_path / "loras", certified, local=[tmp_path / "mine", tmp_path / "link"])


@pytest.mark.parametrize("name", ["mine/a", "mine/sub/a", "mine/sub/../a", "link/a", "real/a", "others/../mine/a"])
def test_a_file_of_a_local_folder_is_given_as_it_is(local, tmp_path, name):
    path = f"{tmp_path}/{name}.safetensors"
    assert path_of(local, path).samefile(path)
    assert left_in(tmp_path / "loras") == []


@pytest.mark.parametrize(
    "name", ["others/a", "mine/../others/a", "mine/out", "mine/folder/a", "link/../others/a", "none"]
)
def test_a_file_outside_of_the_local_folders_is_not_read_whether_there_or_not(local, tmp_path, name):
    """Nor through a link inside of one. Its error is that of a file that does not exist."""
    (tmp_path / "mine/out.safetensors").symlink_to(tmp_path / "others/a.safetensors")
    (tmp_path / "mine/folder").symlink_to(tmp_path / "others")
    path = f"{tmp_path}/{name}.safetensors"
    assert refusal(local, path) == f"LoRA {path!r}: give an existing .safetensors file in a folder of LORA_LOCAL, " + (
        "org/name[@revision][/file.safetensors] or an https:// address"
    )


def test_without_local_folders_no_path_is_read(files, tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(LORA)
    monkeypatch.chdir(tmp_path)
    for name in ("a.safetensors", "./a.safetensors", str(tmp_path / "a.safetensors")):
        assert "LORA_LOCAL" in refusal(files, name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../../x.safetensors",
        "org/../x.safetensors",
        "org/name/../../x.safetensors",
        "org/name/%2e%2e/x.safetensors",
        "org/..",
        "org/name@..",
        "no/such.safetensors",
        "file:///etc/x.txt",
        "https://loras.example/page.html",
        "https://civitai.com/models/12",
        "a\0b.safetensors",
        *(start + "x" * 100_000 + ".txt" for start in ("", "/", "https://loras.example/")),
    ],
)
def test_other_names_are_refused(files, tmp_path, name):
    """And none becomes a path, or a request."""
    message = refusal(files, name)
    assert "give an existing .safetensors file" in message
    assert len(message) < 400, "it has 200 characters of the name"
    assert left_in(tmp_path) == [tmp_path / "loras"]


# Addresses


def test_an_address_is_downloaded_once_and_a_kept_file_needs_no_network(files, tmp_path, certified, serve, ports):
    """Also in the next process, and with another token."""
    served = serve("civitai.com", answer("200 OK", LORA))
    path = path_of(files, CIVITAI, None, "one")
    assert path.read_bytes() == LORA
    assert re.fullmatch("[0-9a-f]{64}", path.stem), "a digest"
    assert path_of(files, CIVITAI, None, "one") == path
    assert len(served.requests) == 1
    assert left_in(tmp_path / "loras") == [path]
    ports.clear()
    assert path_of(made_files(tmp_path / "loras", certified), CIVITAI, None, "another") == path


def test_the_query_is_sent_and_distinguishes(files, served):
    assert path_of(files, ADDRESS + "?key=a%20b") != path_of(files, ADDRESS + "?key=c d")
    asked = [request.split()[1] for request in served.requests]
    assert asked == ["/lora.safetensors?key=a%20b", "/lora.safetensors?key=c%20d"]


CHUNKS = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (LORA[:100], LORA[100:])) + b"0\r\n\r\n"
TAKEN = {
    "no length": [without_length(LORA)],
    "chunks": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS],
    # The header of the format says where the file ends.
    "one byte less than promised": [answer("200 OK", LORA, Content_Length=str(len(LORA) + 1))],
    "a negative length": [answer("200 OK", LORA, Content_Length="-1")],
    "redirects": [redirect("/next?a=b"), redirect("https://other.example/file")],
    "five redirects": [*[redirect(ADDRESS)] * 5, answer("200 OK", LORA)],
}


@pytest.mark.parametrize("answers", TAKEN.values(), ids=TAKEN)
def test_a_whole_file_is_taken_however_it_comes(files, serve, answers):
    serve("other.example", answer("200 OK", LORA))
    serve("loras.example", *answers)
    assert path_of(files, ADDRESS).read_bytes() == LORA


NO_LORAS = {
    "empty": b"",
    "pickle": PICKLE,
    "zip": b"PK\3\4" + bytes(500),
    "html": b"<!DOCTYPE html><html>Log in</html>",
    "truncated": LORA[:-1],
    "header cut": LORA[:20],
    "longer": LORA + b"0",
    "100 GB": struct.pack("<Q", 100 * 10**9) + b"{}",
}
REFUSED = {
    **{f"{name}, length": (answer("200 OK", body), "no whole safetensors file") for name, body in NO_LORAS.items()},
    **{f"{name}, no length": (without_length(body), "no whole safetensors file") for name, body in NO_LORAS.items()},
    "a length of 1": (answer("200 OK", LORA, Content_Length="1"), "no whole safetensors file"),
    # Before the body: none follows that is as long.
    "a length of 10^30": (answer("200 OK", LORA, Content_Length=str(10**30)), "larger than"),
    "401": (answer("401 Unauthorized", LORA), "status 401"),
    "404": (answer("404 Not Found", LORA), "status 404"),
    "500": (answer("500 Error", LORA), "status 500"),
    "204": (answer("204 No Content", LORA), "status 204"),
    "no HTTP": (b"220 mail.example ESMTP\r\n", "BadStatusLine"),
    "to http": (redirect("http://loras.example/a.safetensors"), "no https:// address"),
    "to ftp": (redirect("ftp://loras.example/a.safetensors"), "no https:// address"),
    "to a private address": (redirect("https://10.0.0.1/lora.safetensors"), "private network"),
    "to itself": (redirect(ADDRESS), "redirects more than 5 times"),
}


@pytest.mark.parametrize(("answered", "reason"), REFUSED.values(), ids=REFUSED)
def test_other_answers_are_refused_and_leave_nothing(files, tmp_path, serve, answered, reason):
    served = serve("loras.example", answered)
    assert reason in refusal(files, ADDRESS)
    assert left_in(tmp_path / "loras") == []
    assert len(served.requests) <= 6


@pytest.mark.parametrize("form", [lambda body: answer("200 OK", body), without_length], ids=["length", "no length"])
def test_a_file_of_the_largest_size_is_taken_and_no_larger_one(tmp_path, certified, serve, form):
    serve("loras.example", form(LORA))
    assert "larger than" in refusal(made_files(tmp_path, certified, largest_bytes=len(LORA) - 1), ADDRESS)
    assert left_in(tmp_path) == []
    assert path_of(made_files(tmp_path, certified, largest_bytes=len(LORA)), ADDRESS).exists()


# Who is asked


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "127.0.0.1", "127.1", "0x7f000001", "2130706433", "0.0.0.0", "10.1.2.3", "192.168.0.1"),
        *("169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255", "[::1]", "[::ffff:127.0.0.1]", "[fd00::1]"),
        *("[fe80::1]", "[fec0::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[::7f00:1]", "[ff0e::1]"),
    ],
)
def test_private_addresses_are_refused(files, host):
    assert "private network" in refusal(files, f"https://{host}/lora.safetensors")


@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8"])
def test_public_addresses_are_allowed(address):
    assert lora_files._is_allowed(address)


def test_one_private_address_of_a_host_is_enough(files, monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("it connects"))
    assert "private network" in refusal(files, ADDRESS)


def test_the_connection_is_to_the_address_that_was_checked_and_to_no_proxy(files, served, monkeypatch):
    """The host is looked up once, whatever a second look-up would give, and the environment names a proxy."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    look_up = socket.getaddrinfo
    asked: list[str] = []

    def getaddrinfo(host: str, *arguments: Any, **named: Any) -> Any:
        asked.append(host)
        return look_up(host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    path_of(files, ADDRESS)
    assert asked.count("loras.example") == 1
    assert set(asked) <= {"loras.example", "127.0.0.1"}


def test_a_certificate_of_another_host_or_of_an_unknown_authority_is_refused(files, tmp_path, serve, served):
    serve("wrong.example", answer("200 OK", LORA))
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(files, "https://wrong.example/lora.safetensors")
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(LoraFiles(tmp_path), ADDRESS)


@pytest.mark.parametrize("start", ["http://", "ftp://", "https://user:secret@"])
def test_only_https_without_a_user_is_asked_and_no_error_has_a_password(files, start):
    message = refusal(files, f"{start}loras.example/a.safetensors")
    assert "no https:// address without a user name" in message
    assert "secret" not in message


# Tokens


def test_a_token_goes_to_its_own_site(files, serve):
    hosts = ("loras.example", "civitai.com", "files.civitai.com")
    served = [serve(host, answer("200 OK", LORA)) for host in hosts]
    for address in (ADDRESS, CIVITAI, "https://files.civitai.com/a.safetensors"):
        path_of(files, address, "hub-secret", "civitai-secret")
    sent = ["Bearer civitai-secret" in each.requests[0] for each in served]
    assert sent == [False, True, True]
    assert not any("hub-secret" in each.requests[0] for each in served)


@pytest.mark.parametrize("host", ["evilcivitai.com", "civitai.com.example", "huggingface.co.example"])
def test_a_token_goes_to_no_host_of_a_similar_name(files, serve, host):
    served = serve(host, answer("200 OK", LORA))
    files._tls.check_hostname = False
    path_of(files, f"https://{host}/a.safetensors", "hub-secret", "civitai-secret")
    assert "secret" not in served.requests[0]


def test_a_token_does_not_follow_to_another_host(files, serve):
    """Nor comes back from there."""
    first = serve("civitai.com", redirect("/second"), redirect("https://other.example/x"), answer("200 OK", LORA))
    other = serve("other.example", redirect("https://civitai.com/back"))
    path_of(files, CIVITAI, "hub-secret", "civitai-secret")
    assert ["civitai-secret" in request for request in (*first.requests, *other.requests)] == [True, True, False, False]


@pytest.mark.parametrize(
    "answered",
    [
        answer("404 Not Found"),
        answer("200 OK", PICKLE),
        redirect("https://10.0.0.1/?token=query-secret"),
        redirect("http://other.example/?token=query-secret"),
        redirect("https://user:query-secret@other.example/"),
        redirect("https://other.example:query-secret/"),
        redirect("https://[query-secret/"),
        redirect("/?query-secret\x01"),
        b"query-secret",
    ],
)
@pytest.mark.parametrize("token", ["civitai-secret", "civitai-secret\n", "civitai-secret\u20ac"])
def test_no_error_has_a_token_or_a_query(files, serve, caplog, answered, token):
    """Neither its words, nor a traceback, nor the log."""
    serve("civitai.com", answered)
    name = CIVITAI + "?token=query-secret#secret"
    with pytest.raises(LoraError) as caught:
        path_of(files, name, None, token)  # the traceback has this line
    text = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert "civitai.com" in text
    assert "secret" not in text


# Limits of time and space


def test_a_server_that_says_nothing_is_left(files, serve, monkeypatch):
    monkeypatch.setattr(lora_files, "_READ_S", 0.05)
    serve("loras.example", None)
    assert "TimeoutError" in refusal(files, ADDRESS)


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["header", "body"])
def test_a_server_that_sends_a_byte_at_a_time_is_left(files, tmp_path, certified, ports, monkeypatch, start):
    """After the limit of the whole download: each read of this clock takes 20 of its 1,800 seconds."""
    now_s = iter(range(0, 10**6, 20))
    monkeypatch.setattr(lora_files, "time", SimpleNamespace(monotonic=lambda: float(next(now_s))))

    def handle(connection: ssl.SSLSocket) -> None:
        for byte in start + b"x" * 500:
            connection.send(bytes([byte]))

    with handling(certified, handle) as port:
        ports["loras.example"] = port
        assert "longer than 30 minutes" in refusal(files, ADDRESS)
    assert left_in(tmp_path / "loras") == []


def test_a_full_disk_is_an_error_in_words(files, tmp_path, served, monkeypatch):
    write = Path.open
    monkeypatch.setattr(lora_files, "open", lambda _, mode: write(Path("/dev/full"), mode), raising=False)
    assert "No space left on device" in refusal(files, ADDRESS)
    assert left_in(tmp_path / "loras") == []


def test_the_least_recently_used_files_are_evicted(tmp_path, certified, served):
    """And no other files of the folder."""
    folder = tmp_path / "loras"
    files = made_files(folder, certified, most_bytes=3 * len(LORA))
    (folder / "mine.safetensors").write_bytes(LORA)
    addresses = [f"https://loras.example/{number}.safetensors" for number in range(4)]
    first, _, third = (path_of(files, address) for address in addresses[:3])
    before = first.stat().st_ctime_ns
    assert path_of(files, addresses[0]) == first  # now the last used
    assert first.stat().st_ctime_ns == before, "a file that changes is merged again"
    fourth = path_of(files, addresses[3])
    assert set(folder.iterdir()) == {first, third, fourth, folder / "mine.safetensors"}


def test_the_files_of_one_request_are_kept_however_large_they_are(tmp_path, certified, served):
    """Also one that was there before the other came, and the only one of a request."""
    files = made_files(tmp_path, certified, most_bytes=1)
    first, second, third = (f"https://loras.example/{number}.safetensors" for number in range(3))
    assert all(path.exists() for path in files.paths([first, second]))
    assert {*files.paths([third, second])} == set(left_in(tmp_path))
    assert files.paths([first]) == left_in(tmp_path)


def test_a_folder_that_was_deleted_is_made_again(files, tmp_path, served):
    path_of(files, ADDRESS)
    shutil.rmtree(tmp_path / "loras")
    assert path_of(files, ADDRESS).read_bytes() == LORA


@pytest.fixture
def read_only(certified: Certificates, served: Any) -> Iterator[LoraFiles]:
    """A folder with the LoRA of ADDRESS, which everybody may read and nobody write."""
    with TemporaryDirectory() as folder:
        path_of(made_files(Path(folder), certified), ADDRESS)
        os.chmod(folder, 0o555)
        yield made_files(Path(folder), certified)


def test_a_folder_that_cannot_be_written_gives_the_files_that_it_has(read_only, not_root):
    assert path_of(read_only, ADDRESS).read_bytes() == LORA
    message = refusal(read_only, "https://loras.example/another.safetensors")
    assert re.search("LORA_DIR cannot be used .Permission denied: .*set it to a folder that can be written", message)
    assert "token" not in message


def test_a_folder_that_cannot_be_entered_is_named_with_the_setting(files, tmp_path, request):
    (tmp_path / "loras").chmod(0)
    request.getfixturevalue("not_root")
    assert "LORA_DIR cannot be used (Permission denied: " in refusal(files, ADDRESS)


@pytest.mark.parametrize("folder", ["/proc/loras", "/dev/null", "/dev/null/loras", "/proc/version/a/b"])
def test_a_folder_that_cannot_be_made_is_named_with_the_setting(folder):
    with pytest.raises(LoraError, match=rf"LORA_DIR cannot be used \(.+: {folder}.*\); set it to a folder that can be"):
        LoraFiles(Path(folder))


KILLED = """
import ssl, sys
from pathlib import Path
from models.image import lora_files
lora_files._is_allowed = lambda address: True
folder, certificate, address = sys.argv[1:]
lora_files.LoraFiles(Path(folder), tls=ssl.create_default_context(cafile=certificate)).paths([address])
"""


def test_a_killed_download_leaves_nothing_that_is_used(tmp_path, certified, served):
    folder = tmp_path / "loras"
    is_half_sent, is_killed = threading.Event(), threading.Event()

    def handle(connection: ssl.SSLSocket) -> None:
        connection.sendall(answer("200 OK", LORA)[: -len(LORA) // 2])
        is_half_sent.set()
        is_killed.wait(PATIENCE_S)

    with handling(certified, handle) as port:
        arguments = (str(folder), str(certified.authority), f"https://127.0.0.1:{port}/lora.safetensors")
        process = subprocess.Popen([sys.executable, "-c", KILLED, *arguments], cwd=Path(__file__).parents[1])
        assert is_half_sent.wait(PATIENCE_S)
        process.kill()
        process.wait()
        is_killed.set()
    assert [path.name[:5] for path in folder.iterdir()] == ["part-"]
    files = made_files(folder, certified)
    assert path_of(files, ADDRESS).read_bytes() == LORA
    assert left_in(folder) == [path_of(files, ADDRESS)]


# Hugging Face


class Hub:
    """A server of the hub's protocol: the listing with sizes, and files by commit."""

    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self) -> None:
        self.files = {"README.md": b"", "pytorch_lora_weights.safetensors": LORA}
        self.revision = "main"
        self.requests: list[str] = []

    def answer(self, request: str) -> bytes:
        self.requests.append(request)
        method, path, _ = request.split(maxsplit=2)
        file = path.removeprefix(f"/org/name/resolve/{self.commit}/")
        if path == f"/api/models/org/name/revision/{self.revision}?blobs=true":
            siblings = [{"rfilename": name, "size": len(body)} for name, body in self.files.items()]
            body = json.dumps({"id": "org/name", "sha": self.commit, "siblings": siblings}).encode()
        elif file in self.files:
            body = self.files[file]
        else:
            return answer("404 Not Found", X_Error_Code="RepoNotFound")
        stated = {"X_Repo_Commit": self.commit, "ETag": '"tag"', "Content_Length": str(len(body))}
        return answer("200 OK", body if method == "GET" else b"", **stated)

    @property
    def tokens(self) -> set[str]:
        """What requests were authorized with."""
        return set(re.findall(r"(?im)^authorization: (.*?)\r?$", "\n".join(self.requests)))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    with answering(made.answer) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "machine-secret")
        yield made


@pytest.mark.parametrize("start", ["", "huggingface.co/", "https://huggingface.co/"])
def test_a_repository_is_downloaded_once(files, tmp_path, hub, start):
    path = path_of(files, start + "org/name")
    assert path.read_bytes() == LORA
    asked = len(hub.requests)
    assert path_of(files, "org/name") == path_of(files, "org/name@main") == path
    assert len(hub.requests) == asked
    assert left_in(tmp_path / "loras") == [path]


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1"])
def test_a_revision_is_another_file(files, hub, revision):
    main = path_of(files, "org/name")
    hub.revision = revision.replace("/", "%2F")
    assert path_of(files, f"org/name@{revision}") != main


@pytest.mark.parametrize(
    "name",
    [
        "org/name/a b/x.safetensors",
        "https://huggingface.co/org/name/resolve/main/a%20b/x.safetensors",
        "https://huggingface.co/org/name/blob/main/a b/x.safetensors",
        "org/name",
    ],
)
def test_a_file_of_a_repository_or_its_only_one_is_taken(files, hub, name):
    """Also by the address of its page."""
    other = save({"down": np.zeros(3)})
    named = {"a%20b/x.safetensors": other, "a b/x.safetensors": other}
    hub.files = {"style.safetensors": other, "old/style.safetensors": b""} if name == "org/name" else named
    assert path_of(files, name).read_bytes() == other


@pytest.mark.parametrize("name", ["org/name", "org/name/c.safetensors"])
def test_an_unclear_file_is_an_error_that_lists_the_files(files, hub, name):
    hub.files = {"a.safetensors": LORA, "b.safetensors": LORA, "c.bin": b""}
    assert "['a.safetensors', 'b.safetensors']" in refusal(files, name)


def test_a_missing_repository_is_an_error_in_words_with_200_characters_of_the_name(files, hub):
    message = refusal(files, "org/other", "hub-secret")
    assert "org/other" in message
    assert "RepositoryNotFoundError" in message
    assert "secret" not in message
    assert refusal(files, "org/" + "x" * 100_000).count("x") < 220


def test_a_larger_file_of_a_repository_is_not_downloaded_and_a_pickle_is_refused(tmp_path, certified, hub):
    assert "larger than" in refusal(made_files(tmp_path, certified, largest_bytes=len(LORA) - 1), "org/name")
    assert len(hub.requests) == 1
    hub.files = {"a.safetensors": PICKLE}
    assert "no whole safetensors file" in refusal(made_files(tmp_path, certified), "org/name")
    assert left_in(tmp_path) == []


def test_the_hub_gets_the_tokens_of_the_request_alone(files, hub):
    """Not the machine's own."""
    path_of(files, "org/name")
    assert hub.tokens == set()
    hub.requests.clear()
    hub.revision = "v1"
    path_of(files, "org/name@v1", "hub-secret", "civitai-secret")
    assert hub.tokens == {"Bearer hub-secret"}


def test_offline_is_said(files, hub, monkeypatch):
    kept = path_of(files, "org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal(files, "org/name@v1")
    assert path_of(files, "org/name") == kept
