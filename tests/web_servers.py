"""Web servers on the loopback: of a folder, with ranges or without; with given answers; with TLS before another."""

from __future__ import annotations

import datetime
import ipaddress
import re
import socket
import socketserver
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Certificates:
    """PEM files: the authority, for clients to trust, and what a server on the loopback presents, with its key."""

    authority: Path
    server: Path


def make_certificates(folder: Path, *hosts: str) -> Certificates:
    """An authority and a server's certificate by it, for 127.0.0.1 and these hosts: rustls, unlike OpenSSL, takes none
    that is both."""
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _sign("authority", authority_key.public_key(), "authority", authority_key)
    server = _sign("server", server_key.public_key(), "authority", authority_key, hosts)
    made = Certificates(folder / "authority.pem", folder / "server.pem")
    made.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    made.server.write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + server.public_bytes(serialization.Encoding.PEM)
    )
    return made


def _sign(
    name: str,
    key: ec.EllipticCurvePublicKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    hosts: tuple[str, ...] = (),
) -> x509.Certificate:
    """With all that Python 3.13 asks of a certificate (VERIFY_X509_STRICT)."""
    subject, by = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (name, issuer))
    now = datetime.datetime.now(datetime.UTC)
    is_authority = name == issuer
    unused = "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"
    uses = dict.fromkeys(unused, False)
    names = x509.IPAddress(ipaddress.ip_address("127.0.0.1")), *map(x509.DNSName, hosts)
    builder = (
        x509.CertificateBuilder(by, subject, key, x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True, key_cert_sign=is_authority, crl_sign=is_authority, decipher_only=False, **uses
            ),
            critical=True,
        )
    )
    if not is_authority:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def tls(certificates: Certificates) -> ssl.SSLContext:
    """A server's side of TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server)
    return context


@dataclass
class Served:
    """What a server saw: the head of each request, and how many bytes of bodies it sent."""

    url: str
    requests: list[str] = field(default_factory=list)
    sent_bytes: int = 0

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def serving_folder(folder: Path, *, ranges: bool, context: ssl.SSLContext | None = None) -> Iterator[Served]:
    """The folder's files: as `python -m http.server` serves them, or with ranges (RFC 9110, section 14)."""

    def find(head: str) -> bytes:
        path = folder / urllib.parse.unquote(head.split()[1]).lstrip("/")
        if not path.is_file():
            return answer("404 Not Found")
        content = path.read_bytes()
        wanted = re.search(r"(?im)^range: bytes=(\d+)-(\d*)", head)
        if not ranges or wanted is None:
            return answer("200 OK", content)
        start = int(wanted[1])
        part = content[start : int(wanted[2]) + 1 if wanted[2] else None]
        if not part:
            return answer("416 Range Not Satisfiable", Content_Range=f"bytes */{len(content)}")
        stated = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
        return answer("206 Partial Content", part, Content_Range=stated)

    with answering(find, context=context) as served:
        yield served


@contextmanager
def answering(
    *answers: bytes | Callable[[str], bytes] | None, context: ssl.SSLContext | None = None
) -> Iterator[Served]:
    """A server whose answers are these bytes, each on a connection of its own, the last one ever after. None: none.
    A function makes an answer of the request's head."""
    remaining = list(answers)
    over = threading.Event()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            lines = []
            while (line := self.rfile.readline()).strip():
                lines.append(line.decode())
            if not lines:
                return
            served.requests.append("".join(lines))
            answer = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            if answer is None:
                over.wait(300)
                return
            content = answer(served.requests[-1]) if callable(answer) else answer
            served.sent_bytes -= content.index(b"\r\n\r\n") + 4 if b"\r\n\r\n" in content else 0
            for start in range(0, len(content), 1 << 16):
                self.wfile.write(content[start : start + (1 << 16)])
                served.sent_bytes += len(content[start : start + (1 << 16)])

    with running(Handler, context) as served:
        try:
            yield served
        finally:
            over.set()


@contextmanager
def forwarding(port: int, context: ssl.SSLContext) -> Iterator[Served]:
    """TLS before a server on another port of the loopback."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", port)) as behind:
                threading.Thread(target=_pump, args=(behind, self.request), daemon=True).start()
                _pump(self.request, behind)

    with running(Handler, context) as served:
        yield served


def answer(status: str, body: bytes = b"", **headers: str) -> bytes:
    """The bytes of an answer, whose length is that of its body unless it is given."""
    lines = {"Content-Length": str(len(body)), "Connection": "close"}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up on purpose."""


@contextmanager
def running(
    handler: type[socketserver.BaseRequestHandler],
    context: ssl.SSLContext | None = None,
    kind: type[socketserver.ThreadingTCPServer] = Server,
) -> Iterator[Served]:
    """A server of this kind whose requests the handler answers."""
    with kind(("127.0.0.1", 0), handler) as server:
        if context is not None:
            # The handshake is left to the thread that handles the connection.
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Served(f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_address[1]}")
        finally:
            server.shutdown()
            thread.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
