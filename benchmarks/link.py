"""A network namespace behind a link of limited rate, and a static S3 server that can fill it. Needs Linux and root."""

from __future__ import annotations

import http.server
import itertools
import os
import re
import socket
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.sax.saxutils import escape

# RFC 2544, appendix C: for benchmarks of networks, and nobody's address.
_SERVER, _CLIENT = "198.18.7.1", "198.18.7.2"
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Link:
    """Where a server has to listen, and what to put before a command that is to run on the other side."""

    server: str
    wrapper: tuple[str, ...]


@contextmanager
def limited_link(rate: str, burst: str = "1mb", latency: str = "20ms") -> Iterator[Link]:
    """A namespace that reaches this one through a link which carries `rate` (tc's words, such as `2gbit`) each way."""
    number = f"{os.getpid() % 100_000}-{next(_numbers)}"
    namespace, outside, inside = f"link-{number}", f"lo{number}", f"li{number}"
    _ip("netns", "add", namespace)
    try:
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", namespace)
        _ip("address", "add", f"{_SERVER}/30", "dev", outside)
        _ip("link", "set", outside, "up")
        _ip("-n", namespace, "address", "add", f"{_CLIENT}/30", "dev", inside)
        _ip("-n", namespace, "link", "set", inside, "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        limit = ("root", "tbf", "rate", rate, "burst", burst, "latency", latency)
        _run("tc", "qdisc", "add", "dev", outside, *limit)
        _run("tc", "-n", namespace, "qdisc", "add", "dev", inside, *limit)
        yield Link(_SERVER, ("ip", "netns", "exec", namespace))
    finally:
        _ip("netns", "delete", namespace)  # the link goes with it


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextmanager
def static_s3_server(folder: Path, host: str) -> Iterator[str]:
    """The URL of a server of `folder`'s files, `<bucket>/<name>`: ListObjectsV2 in one page, and GET with ranges by
    sendfile(2). It checks no signature, and takes no writes."""
    server = _Server((host, 0), _Handler)
    server.folder = folder
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    folder: Path


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        """A listing, or a part of an object."""
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        bucket, _, name = urllib.parse.unquote(url.path).lstrip("/").partition("/")
        if "list-type" in query:
            self._answer(200, _listing(self.server.folder / bucket, query.get("prefix", [""])[0]))
            return
        try:
            file = (self.server.folder / bucket / name).open("rb")
        except OSError:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        with file:
            size_bytes = os.fstat(file.fileno()).st_size
            asked = _RANGE.fullmatch(self.headers.get("Range", "bytes=0-"))
            start = int(asked[1]) if asked else 0
            end = min(int(asked[2]) + 1 if asked and asked[2] else size_bytes, size_bytes)
            self.send_response(206)
            self.send_header("Content-Length", str(end - start))
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size_bytes}")
            self.end_headers()
            self.connection.sendfile(file, start, end - start)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: a line for each request would cost more than the request."""


def _listing(bucket: Path, prefix: str) -> bytes:
    entries = []
    for path in sorted(path for path in bucket.rglob("*") if path.is_file()):
        name, stat = path.relative_to(bucket).as_posix(), path.stat()
        if name.startswith(prefix):
            modified = datetime.fromtimestamp(int(stat.st_mtime), UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
            entries.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{modified}</LastModified>"
                f'<ETag>"0"</ETag><Size>{stat.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>'
            )
    namespace = "http://s3.amazonaws.com/doc/2006-03-01/"
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="{namespace}"><Name>bucket</Name>'
        f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(entries)}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>"
    ).encode()


def run_inside(link: Link, command: Sequence[str | Path], environ: dict[str, str]) -> str:
    """What `command` prints, run on the other side of the link."""
    done = subprocess.run([*link.wrapper, *command], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout
