"""Messages between a server and its compiling process, on one socket: a kind, a length and that many bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["setup", "job", "ready", "unready", "answer", "failed"]

_HEADER = struct.Struct("!BQ")
_KINDS: tuple[Kind, ...] = ("setup", "job", "ready", "unready", "answer", "failed")
# The most bytes of one read. Memory grows as bytes arrive, whatever length a header claims.
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    The server sends `setup` once, then `job` again and again. The process sends `ready` or `unready` once, then
    `answer` or `failed` for each job. The body of `setup` is the handler's name, a zero byte and the handler's
    argument. The body of `unready` and `failed` is JSON: the arguments of `JobFailed`.
    """

    kind: Kind
    body: bytes = b""


def encode(message: Message) -> bytes:
    """The message's bytes."""
    return _HEADER.pack(_KINDS.index(message.kind), len(message.body)) + message.body


def read_message(receive: Callable[[int], bytes]) -> Message:
    """The next message. `receive(n)` returns 1 to n bytes, and none at the end.

    Raises `EOFError` if the other side has ended, `ValueError` if the bytes are no message.
    """
    kind, size_bytes = _HEADER.unpack(_read(receive, _HEADER.size))
    if kind >= len(_KINDS):
        raise ValueError(f"{kind} is no kind of message")
    return Message(_KINDS[kind], _read(receive, size_bytes))


def _read(receive: Callable[[int], bytes], size_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < size_bytes:
        chunk = receive(min(size_bytes - len(content), _CHUNK_BYTES))
        if not chunk:
            raise EOFError("the other side has ended")
        content += chunk
    return bytes(content)
