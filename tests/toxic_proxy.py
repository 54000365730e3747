"""An HTTP proxy on real sockets that passes everything on, but for the requests that it is told to spoil, and how."""

from __future__ import annotations

import http.client
import socket
import socketserver
import struct
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from web_servers import Server, running

_UPSTREAM_TIMEOUT_S = 30
_HOP_BY_HOP = frozenset({"connection", "content-length", "expect", "keep-alive", "transfer-encoding"})
_ERROR_PAGE = b"<html><head><title>Something</title></head><body>is wrong in the middle.<hr></body></html>"
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset instead of a farewell


@dataclass(frozen=True)
class Request:
    """The head of a request; header names are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        return urllib.parse.unquote(self.target.partition("?")[0])

    @property
    def start(self) -> int:
        """The first byte of an object that it asks for."""
        return int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0])

    @property
    def body_bytes(self) -> int:
        return int(self.headers.get("content-length", 0))


@dataclass(frozen=True)
class Answer:
    """What the server answered, whole."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def head(self, stated_bytes: int) -> bytes:
        """Status line and headers, with this length of the body."""
        lines = {**self.headers, "Content-Length": str(stated_bytes)}
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"HTTP/1.1 {self.status} {http.client.responses[self.status]}\r\n{text}\r\n".encode()


@dataclass(frozen=True)
class Exchange:
    """One request: the client that sent it, and the server that it is meant for."""

    request: Request
    client: socket.socket
    _reader: BinaryIO
    _upstream: tuple[str, int]
    _over: threading.Event

    def read_body(self, size_bytes: int) -> bytes:
        """The first bytes of the request's body; those that follow are never read."""
        if "100-continue" in self.request.headers.get("expect", "").lower():
            self.client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return self._reader.read(size_bytes)

    def answer(self) -> Answer:
        """What the server answers to the request, which is passed on whole."""
        request, body = self.request, self.read_body(self.request.body_bytes)
        headers = {name: value for name, value in request.headers.items() if name not in _HOP_BY_HOP}
        with closing(http.client.HTTPConnection(*self._upstream, timeout=_UPSTREAM_TIMEOUT_S)) as connection:
            connection.request(request.method, request.target, body or None, headers)
            got = connection.getresponse()
            kept = {name: value for name, value in got.getheaders() if name.lower() not in _HOP_BY_HOP}
            return Answer(got.status, got.read(), kept)

    def pass_on_half(self) -> None:
        """Half of the request's body reaches the server, and then its client is gone."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in self.request.headers.items() if name != "expect")
        half = self.read_body(self.request.body_bytes // 2)
        with socket.create_connection(self._upstream) as server:
            server.sendall(f"{self.request.method} {self.request.target} HTTP/1.1\r\n{lines}\r\n".encode() + half)

    def send(self, answer: Answer, *, stated_bytes: int | None = None, sent_bytes: int | None = None) -> None:
        """Its whole body with its true length, where no others are given."""
        stated_bytes = len(answer.body) if stated_bytes is None else stated_bytes
        self.client.sendall(answer.head(stated_bytes) + answer.body[:sent_bytes])

    def pause(self, seconds: float | None = None) -> bool:
        """Whether the toxin is still to act after `seconds`; without, wait until it is not."""
        return not self._over.wait(seconds)

    def reset(self) -> None:
        """Have the connection end in a reset."""
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)


# Spoils one exchange; the connection lives on if it returns True.
Toxin = Callable[[Exchange], bool]


def harmless(exchange: Exchange) -> bool:
    """As if there were no proxy."""
    exchange.send(exchange.answer())
    return True


def trickle(exchange: Exchange) -> bool:
    """A byte a second, of the request's body if it has one, else of the answer's."""
    if exchange.request.body_bytes:
        while exchange.read_body(1) and exchange.pause(1):
            pass
        return False
    answer = exchange.answer()
    if not answer.body:
        return _send_slowly(exchange, answer.head(0))
    exchange.client.sendall(answer.head(len(answer.body)))
    return _send_slowly(exchange, answer.body)


def trickle_the_answer(exchange: Exchange) -> bool:
    """The request is served, and then even the head of the answer comes a byte a second."""
    answer = exchange.answer()
    return _send_slowly(exchange, answer.head(len(answer.body)) + answer.body)


def stall(exchange: Exchange) -> bool:
    """Read nothing more, and say nothing."""
    exchange.pause()
    return False


def stall_in_the_body(exchange: Exchange) -> bool:
    """Half of a body, and then nothing more."""
    _send_half(exchange)
    exchange.pause()
    return False


def reset(exchange: Exchange) -> bool:
    """Half of a body, and then a reset."""
    _send_half(exchange)
    exchange.reset()
    return False


def close_early(exchange: Exchange) -> bool:
    """Half of a body, and then a farewell as if that were all."""
    _send_half(exchange)
    exchange.client.shutdown(socket.SHUT_WR)
    return False


def lose_answer(exchange: Exchange) -> bool:
    """The server does what was asked, and its client is never told."""
    exchange.answer()
    exchange.reset()
    return False


def overstate(exchange: Exchange) -> bool:
    """State more than is sent."""
    answer = exchange.answer()
    exchange.send(answer, stated_bytes=len(answer.body) + 100)
    return False


def understate(exchange: Exchange) -> bool:
    """State half of what is sent; the connection is kept, with the other half on it."""
    answer = exchange.answer()
    exchange.send(answer, stated_bytes=len(answer.body) // 2)
    return True


def send_nothing(exchange: Exchange) -> bool:
    """The right status, and an empty body."""
    exchange.send(replace(exchange.answer(), body=b""))
    return True


def page(status: int, text: bytes = _ERROR_PAGE) -> Toxin:
    """This status with a web page, as from something in the middle that speaks no S3. The server does not get the
    request."""

    def toxin(exchange: Exchange) -> bool:
        exchange.read_body(exchange.request.body_bytes)
        exchange.send(Answer(status, text, {"Content-Type": "text/html"}))
        return True

    return toxin


def _send_slowly(exchange: Exchange, content: bytes) -> bool:
    for value in content:
        exchange.client.sendall(bytes([value]))
        if not exchange.pause(1):
            break
    return False


def _send_half(exchange: Exchange) -> None:
    if exchange.request.body_bytes:
        exchange.pass_on_half()
    else:
        answer = exchange.answer()
        exchange.send(answer, sent_bytes=len(answer.body) // 2)


class ToxicProxy:
    """A proxy before the server at `upstream_url`. `toxic_proxy` runs one."""

    def __init__(self, upstream_url: str) -> None:
        upstream = urllib.parse.urlsplit(upstream_url)
        assert upstream.hostname is not None
        assert upstream.port is not None
        self._upstream = upstream.hostname, upstream.port
        self._toxin: Toxin = harmless
        self._applies: Callable[[Request], bool] = lambda request: False
        self._over = threading.Event()
        self.url = ""
        self.spoiled: list[Request] = []

    def poison(self, toxin: Toxin, applies: Callable[[Request], bool] = lambda request: True) -> None:
        """Spoil the requests to which it applies, from now on."""
        self.heal()
        self.spoiled = []
        self._toxin, self._applies, self._over = toxin, applies, threading.Event()

    def heal(self) -> None:
        """Spoil no more, and end what was being spoiled."""
        self._applies = lambda request: False
        self._over.set()

    def serve(self, client: socket.socket, reader: BinaryIO) -> None:
        """One connection, until its end."""
        with suppress(OSError):  # clients hang up on purpose
            while (request := _read_request(reader)) is not None:
                toxin = harmless
                if self._applies(request):
                    self.spoiled.append(request)
                    toxin = self._toxin
                if not toxin(Exchange(request, client, reader, self._upstream, self._over)):
                    return


@contextmanager
def toxic_proxy(upstream_url: str) -> Iterator[ToxicProxy]:
    """A proxy that is healthy at first."""
    proxy = ToxicProxy(upstream_url)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            proxy.serve(self.request, self.rfile)

    with running(Handler, kind=_Abrupt) as served:
        proxy.url = served.url
        try:
            yield proxy
        finally:
            proxy.heal()


class _Abrupt(Server):
    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """Without the farewell that socketserver sends first: it would make an orderly end of every reset."""
        self.close_request(request)


def _read_request(reader: BinaryIO) -> Request | None:
    line = reader.readline().decode("latin-1").split()
    if len(line) != 3:
        return None
    headers = http.client.parse_headers(reader)
    return Request(line[0], line[1], {name.lower(): value for name, value in headers.items()})
