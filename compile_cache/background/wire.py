"""What a server and its compiling process say to each other: a kind, a length and that many bytes, on one socket."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["setup", "job", "ready", "unready", "answer", "failed"]

_HEADER = struct.Struct("!BQ")
_KINDS: tuple[Kind, ...] = ("setup", "job", "ready", "unready", "answer", "failed")
# One read's most bytes: memory is taken as bytes arrive, whatever length a header claims.
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Message:
    """The server says `setup` once, then `job` again and again. The process says `ready` or `unready` once, then for
    each job `answer` or `failed`. The body of `setup` is the handler's name, a zero byte and what the handler is made
    from; that of `unready` and `failed` is JSON, the arguments of `JobFailed`."""

    kind: Kind
    body: bytes = b""


def encode(message: Message) -> bytes:
    """The message's bytes."""
    return _HEADER.pack(_KINDS.index(message.kind), len(message.body)) + message.body


def read_message(receive: Callable[[int], bytes]) -> Message:
    """The next message. `receive(n)` returns 1 to n bytes, none at the end.

    Raises `EOFError` where the other side has ended, `ValueError` for what is no message.
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
