"""The file of a LoRA that a request names: a local one, or one that is downloaded once and kept.

A name comes from anybody, and so does what a server answers. So local files are those of named folders; downloads are
limited in size and time, reach public hosts only, and are kept only if they are in the safetensors format, which holds
no code.
"""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import os
import re
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from safetensors import SafetensorError, safe_open

_CONNECT_S, _READ_S, _DOWNLOAD_S, _MOST_REDIRECTS = 10.0, 30.0, 1800.0, 5
_SUFFIX = ".safetensors"
# `org/name@revision/file` at the hub, or the address of the file or its page, where `resolve` or `blob` comes before
# the revision. Data sets and spaces are no models: their files are downloaded like those of any other address.
_HUB_NAME = re.compile(
    r"(?a)(?:(?:https://)?huggingface\.co/)?(?!datasets/|spaces/)(\w[\w.-]*/\w[\w.-]*(?<!\.safetensors))"
    r"(?:@([\w.-]+|refs/pr/\d+))?(?:/(?:(?:resolve|blob)/([^/?#]+)/)?([^?#]+\.safetensors))?/?"
)


class LoraError(ValueError):
    """A LoRA cannot be had, or does not fit the pipeline. The message names it and the reason, and holds no secret."""


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA's safetensors file, how strongly it is applied, and what errors call it: by default the file's name."""

    file: Path
    scale: float
    name: str = ""


class LoraFiles:
    """A folder of downloaded LoRAs, for one process, each named by the SHA-256 of its reference.

    The same name gives the same file until that is evicted, also if a branch or an address has newer content by then,
    and also to callers without a token: keep files that not every caller may use in another folder.
    """

    def __init__(
        self, folder: Path, most_bytes: int = 20 << 30, largest_bytes: int = 5 << 30, tls: Any = None, local: Any = ()
    ) -> None:
        """Keep `most_bytes` in `folder`, in files of at most `largest_bytes`; during a download, both together, and the
        files of one request, however large.

        `tls`, an `ssl.SSLContext`, verifies the servers of addresses. The default trusts the system's authorities.
        `local` are the folders whose files may be named by their paths.

        Raises:
            LoraError: the folder cannot be made.
        """
        self._folder, self._most_bytes, self._largest_bytes = folder, most_bytes, largest_bytes
        self._local = [Path(each).resolve() for each in local]
        # When a file was last used, in seconds since 1970. Before, it was downloaded.
        self._used_s: dict[Path, float] = {}
        self._tls = tls or ssl.create_default_context()
        self._tls.sslsocket_class = _Socket
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LoraError(_explain(error)) from error
        for left_by_killed_process in folder.glob("part-*"):
            shutil.rmtree(left_by_killed_process, ignore_errors=True)

    def loras(self, asked: Sequence[tuple[str | None, float]], *tokens: Any) -> list[Lora]:
        """A request's LoRAs, by name and scale; without a name, there is none. `tokens` are Cog's secrets: see `paths`.

        Raises:
            LoraError: as `paths`.
        """
        named = [(name, scale) for name, scale in asked if name]
        files = self.paths([name for name, _ in named], *(token and token.get_secret_value() for token in tokens))
        return [Lora(file, scale, shown(name)) for file, (name, scale) in zip(files, named, strict=True)]

    def paths(self, names: Sequence[str], hub_token: str | None = None, civitai_token: str | None = None) -> list[Path]:
        """The local paths of a request's LoRAs, `.safetensors` files; downloads those that are neither local nor kept.

        A later call may delete a downloaded file. A token is sent to its own site alone. Without `hub_token` none is
        sent: the machine's own token is not for whoever sends requests.

        | name | file |
        | --- | --- |
        | path of an existing `.safetensors` file in a local folder, links followed | this file |
        | `org/name`, `org/name@revision` of huggingface.co | `pytorch_lora_weights.safetensors`, or the only one |
        | `org/name/file.safetensors` of huggingface.co | this file |
        | `https://…/file.safetensors`, `https://civitai.com/api/download/models/…` | what the server sends |

        Raises:
            LoraError: there is no such file, or it is refused.
        """
        files = [self._file(name) for name in names]
        for name, file in zip(names, files, strict=True):
            with _naming(name):
                if not file.is_file():
                    self._fetch(_parse(name), file, {"huggingface.co": hub_token, "civitai.com": civitai_token})
                    self._evict_all_but(files)
            self._used_s[file] = time.time()
        return files

    def _file(self, name: str) -> Path:
        """Where the file of this name is, or will be."""
        with _naming(name):
            local = Path(name).resolve() if name.endswith(_SUFFIX) and os.path.isfile(name) else None
            if local and any(local.is_relative_to(folder) for folder in self._local):
                return local
            return self._folder / (hashlib.sha256(repr(_parse(name)).encode()).hexdigest() + _SUFFIX)

    def _fetch(self, wanted: tuple[str, str, str] | str, target: Path, tokens: dict[str, str | None]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="part-", dir=self._folder, ignore_cleanup_errors=True) as part:
            if isinstance(wanted, str):
                file = self._download(wanted, tokens, part)
            else:
                file = self._download_from_hub(*wanted, tokens["huggingface.co"], part)
            with safe_open(file, framework="numpy"):  # reads the header, whose claims have to fit the file's size
                os.replace(file, target)

    def _download(self, address: str, tokens: dict[str, str | None], folder: str) -> Path:
        host = urlsplit(address).hostname or ""
        token = tokens.get("civitai.com" if host.endswith(".civitai.com") else host)
        deadline_s = time.monotonic() + _DOWNLOAD_S
        for _ in range(_MOST_REDIRECTS + 1):
            parts = urlsplit(address)
            if parts.scheme != "https" or not parts.hostname or "@" in parts.netloc:
                raise LoraError("it is, or redirects to, no https:// address without a user name; give such an address")
            connection = http.client.HTTPSConnection(parts.hostname, parts.port or 443, context=self._tls)
            with _connect(parts.hostname, parts.port or 443, self._tls, deadline_s) as connection.sock:
                asked = quote(urlunsplit(("", "", parts.path or "/", parts.query, "")), "%/?:=&+,;!$'()*@[]~")
                headers = {"User-Agent": "cog-compile-cache"} | ({"Authorization": f"Bearer {token}"} if token else {})
                connection.request("GET", asked, headers=headers)
                with connection.getresponse() as response:
                    if response.status not in (301, 302, 303, 307, 308):
                        return self._write(response, Path(folder, "lora"))
                address = urljoin(address, response.headers.get("Location", ""))
            token = token if urlsplit(address).netloc == parts.netloc else None
        raise LoraError(f"the server redirects more than {_MOST_REDIRECTS} times; give the address of the file itself")

    def _write(self, response: http.client.HTTPResponse, target: Path) -> Path:
        if response.status != 200:
            raise OSError(0, f"status {response.status}")
        self._check_size(response.length or 0)
        with open(target, "wb") as file:
            while chunk := response.read1(1 << 18):
                self._check_size(file.tell() + len(chunk))
                file.write(chunk)
        return target

    def _download_from_hub(self, repository: str, revision: str, file: str, token: str | None, folder: str) -> Path:
        # The library has its own limit for each read (HF_HUB_DOWNLOAD_TIMEOUT), and none for a whole download.
        from huggingface_hub import HfApi, is_offline_mode

        if is_offline_mode():
            raise LoraError("HF_HUB_OFFLINE is set, so it cannot be downloaded; unset it, or give a local path")
        hub = HfApi(token=token or False)
        found = hub.model_info(repository, revision=revision, files_metadata=True, timeout=_READ_S)
        sizes = {each.rfilename: each.size or 0 for each in found.siblings or () if each.rfilename.endswith(_SUFFIX)}
        at_top = [each for each in sizes if "/" not in each]
        chosen = file or (at_top[0] if len(at_top) == 1 else "pytorch_lora_weights.safetensors")
        if chosen not in sizes:
            raise LoraError(f"the repository has {sorted(sizes)[:50]}; give one of these, as org/name/file.safetensors")
        self._check_size(sizes[chosen])
        return Path(hub.hf_hub_download(repository, chosen, revision=found.sha, local_dir=folder))

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._largest_bytes:
            raise LoraError(f"it is larger than {self._largest_bytes / 2**30:g} GiB; give a smaller file")

    def _evict_all_but(self, kept: Sequence[Path]) -> None:
        """Delete the least recently used files until the rest fits."""
        with suppress(FileNotFoundError):  # another thread evicts
            files = list(self._folder.glob("?" * 64 + _SUFFIX))
            files.sort(key=lambda file: (file in kept, self._used_s.get(file) or os.path.getmtime(file)))
            while files and files[0] not in kept and sum(map(os.path.getsize, files)) > self._most_bytes:
                files.pop(0).unlink()


class _Socket(ssl.SSLSocket):
    """Reads until the download's deadline: a server that sends a byte at a time does not hold it up."""

    deadline_s: float

    def recv_into(self, *arguments: Any, **named: Any) -> int:
        self.settimeout(_time_left(self.deadline_s, _READ_S))
        return super().recv_into(*arguments, **named)


def _connect(host: str, port: int, tls: Any, deadline_s: float) -> ssl.SSLSocket:
    """Connect to the first of the host's addresses, in the resolver's order; all of them must be public.

    Connects to an IP address that was checked: a second lookup could give another one (DNS rebinding).
    """
    found: Any = [address[:2] for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not all(_is_allowed(address) for address, _ in found):
        raise LoraError("its server, or one that this redirects to, is in a private network; give a public address")
    plain = socket.create_connection(found[0], _time_left(deadline_s, _CONNECT_S))
    secure: _Socket = tls.wrap_socket(plain, server_hostname=host)
    secure.deadline_s = deadline_s
    return secure


def _is_allowed(address: str) -> bool:
    """Whether an IP address is public, also where it is an IPv4 address inside an IPv6 one."""
    ip = ipaddress.ip_address(address)
    ip = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None) or ip
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or getattr(ip, "is_site_local", False))


def _parse(name: str) -> tuple[str, str, str] | str:
    """Repository, revision and file (perhaps empty) at the hub, or an address."""
    if (match := _HUB_NAME.fullmatch(name)) and ".." not in unquote(name):
        repository, revision, page_revision, file = match.groups("")
        return repository, revision or unquote(page_revision) or "main", unquote(file)
    if re.match(r"https://civitai\.com/api/download/models/|\w+://[^?#]+\.safetensors(?:[?#]|$)", name):
        return name
    raise LoraError(
        "give an existing .safetensors file in a folder of LORA_LOCAL, org/name[@revision][/file.safetensors] or an "
        "https:// address"
    )


def _time_left(deadline_s: float, most_s: float) -> float:
    if (left_s := deadline_s - time.monotonic()) <= 0:
        raise LoraError(f"it takes longer than {_DOWNLOAD_S / 60:g} minutes; try again, or give a smaller file")
    return min(left_s, most_s)


def shown(name: str) -> str:
    """The name, up to 200 characters, without what may be a secret: an address's query and user."""
    return repr(re.sub("//[^/]*@", "//", re.split("[?#]", name, maxsplit=1)[0])[:200])


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # those of huggingface_hub have no common base
        # Without its cause, whose text may have an address with its query, or a header with a token.
        raise LoraError(f"LoRA {shown(name)}: {_explain(error)}") from None


def _explain(error: Exception) -> str:
    if isinstance(error, LoraError):
        return str(error)
    if isinstance(error, SafetensorError):
        return "what came is no whole safetensors file; give a file of this format, or try again"
    if isinstance(error, OSError) and error.filename:
        return f"LORA_DIR cannot be used ({error.strerror}: {error.filename}); set it to a folder that can be written"
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__
    return f"it cannot be downloaded ({reason}); check the name, the token, the connection and the disk's free space"
