"""A store that is a folder behind a web server, only read: a mirror, a content delivery network, a static site."""

from __future__ import annotations

import logging
import re
import ssl
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from urllib.parse import quote

import httpx

from compile_cache.errors import ObjectNotFound, SettingsError, StoreAccessDenied, StoreError, StoreUnavailable
from compile_cache.store.base import ReadOnly, StoredObject
from compile_cache.store.deadline import within_limit
from compile_cache.store.web_index import INDEX, MOST_INDEX_BYTES, parse_index

log = logging.getLogger("compile_cache")

_TIMEOUT = httpx.Timeout(10, connect=3)
_ATTEMPTS = 3
_FIRST_PAUSE_S = 0.1
_MOST_REDIRECTS = 3
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class WebStore(ReadOnly):
    """Objects `<url>/<name>`, listed in `<url>/index.json`. User and password of the URL are sent to its host only."""

    def __init__(self, url: str) -> None:
        """Connects to nothing yet. The environment names proxies and certificates.

        Raises:
            SettingsError: `url` is not the URL of a folder, or the environment names a proxy that is not one.
        """
        try:
            parsed = httpx.URL(url)
            if parsed.scheme not in ("https", "http") or not parsed.host or parsed.query or parsed.fragment:
                raise ValueError
        except (httpx.InvalidURL, ValueError):  # its message could show a password
            raise SettingsError("a layer is not the URL of a folder: give https://host/path, without ? and #") from None
        self._url = str(parsed.copy_with(userinfo=b"", raw_path=parsed.raw_path.rstrip(b"/") + b"/"))
        self._auth = httpx.BasicAuth(parsed.username, parsed.password) if parsed.userinfo else None
        self._client = _open_client()
        weakref.finalize(self, self._client.close).atexit = False
        self._without_ranges = False

    @property
    def location(self) -> str:
        """The URL, without user and password."""
        return self._url

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects of the index whose name begins with `prefix`, oldest first."""
        content = self._get(INDEX, {}, None, lambda answer: _read_body(answer, 0, MOST_INDEX_BYTES + 1))
        try:
            found = [entry for entry in parse_index(content) if entry.name.startswith(prefix)]
        except ValueError as error:
            raise StoreError(f"cannot list {self._url}{INDEX}: {error}; make it again") from error
        return sorted(found, key=lambda entry: (entry.modified_s, entry.name))

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """The object's bytes from `start` on, at most `size_bytes` of them. A server without ranges sends the bytes
        before `start` as well; they are dropped."""
        if size_bytes == 0:
            return b""  # not a range that HTTP can express (RFC 9110, section 14.1.2)
        end = "" if size_bytes is None else start + size_bytes - 1

        def take(answer: httpx.Response) -> bytes:
            if answer.status_code == 416:
                return b""
            if answer.status_code == 206:
                return _read_part(answer, start, size_bytes)
            if start:
                self._note_no_ranges()
            return _read_body(answer, start, size_bytes)

        skipped_bytes = start if self._without_ranges else 0
        sent_bytes = None if size_bytes is None else skipped_bytes + size_bytes
        return self._get(name, {"Range": f"bytes={start}-{end}"}, sent_bytes, take)

    def _note_no_ranges(self) -> None:
        if not self._without_ranges:
            self._without_ranges = True
            log.warning("mirror.no_ranges url=%s: each read of a pack transfers all bytes before it", self._url)

    def _get(
        self, name: str, headers: dict[str, str], size_bytes: int | None, take: Callable[[httpx.Response], bytes]
    ) -> bytes:
        """What `take` makes of the answer. Tried again where the server or the network may do better next time."""
        what = f"get {self._url}{name}"

        def get() -> bytes:
            with _translated(what), closing(self._request(name, headers)) as answer:
                _check_status(answer.status_code, what, name)
                return take(answer)

        def get_at_last() -> bytes:
            for attempt in range(_ATTEMPTS - 1):
                try:
                    return get()
                except StoreUnavailable:
                    time.sleep(_FIRST_PAUSE_S * 2**attempt)
            return get()

        return within_limit(what, size_bytes, get_at_last)

    def _request(self, name: str, headers: dict[str, str]) -> httpx.Response:
        """The answer, its body unread. httpx makes the requests that redirects lead to, without the user's password for
        another host. It would follow them by itself as well, but reads their bodies whole, and goes on to http://."""
        request = self._client.build_request("GET", self._url + quote(name), headers=headers)
        answer = self._client.send(request, auth=self._auth, stream=True)
        for _ in range(_MOST_REDIRECTS):
            if answer.next_request is None:
                return answer
            answer.close()
            if answer.url.scheme == "https" and answer.next_request.url.scheme != "https":
                raise StoreError(f"cannot get {self._url}{name}: it is redirected from https:// to another scheme")
            answer = self._client.send(answer.next_request, stream=True)
        if answer.next_request is None:
            return answer
        answer.close()
        raise StoreError(f"cannot get {self._url}{name}: it is redirected more than {_MOST_REDIRECTS} times")


def _open_client() -> httpx.Client:
    requests_log = logging.getLogger("httpx")
    if not requests_log.level:  # each request is an INFO line, and the URL of a redirect can hold a signature
        requests_log.setLevel(logging.WARNING)
    try:
        # Certificates: those of the system and of SSL_CERT_FILE. httpx takes a list of its own by default.
        return httpx.Client(
            verify=ssl.create_default_context(), timeout=_TIMEOUT, headers={"Accept-Encoding": "identity"}
        )
    except (httpx.InvalidURL, ValueError, ImportError):  # its message could show a password
        raise SettingsError(
            "http_proxy, https_proxy or all_proxy is not the URL of a proxy: give http://host:port, or unset it"
        ) from None


def _check_status(status: int, what: str, name: str) -> None:
    if status in (200, 206) or (status == 416 and name != INDEX):
        return
    if status in (404, 410):
        advice = "; make it with compile_cache.store.web_index.write_index" if name == INDEX else ""
        raise ObjectNotFound(f"cannot {what}: it is not there{advice}")
    if status in (401, 403, 407):
        raise StoreAccessDenied(f"cannot {what}: {status}; check the user and password in its URL, or who may read it")
    if status in (408, 425, 429) or status >= 500:
        raise StoreUnavailable(f"cannot {what}: the server answered {status}")
    raise StoreError(f"cannot {what}: the server answered {status}")


def _read_part(answer: httpx.Response, start: int, size_bytes: int | None) -> bytes:
    """The body of an answer that says which part of the object it is."""
    stated = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if stated is None or int(stated[1]) != start:
        raise ValueError(f"asked for bytes from {start} on, got {answer.headers.get('Content-Range')!r:.100}")
    end = int(stated[2]) + 1 if stated[3] == "*" else int(stated[3])
    expected = end - start if size_bytes is None else min(size_bytes, end - start)
    body = _read_body(answer, 0, size_bytes)
    if len(body) < expected:
        raise httpx.ReadError(f"got {len(body)} of {expected} bytes")
    return body


def _read_body(answer: httpx.Response, skip_bytes: int, size_bytes: int | None) -> bytes:
    """At most `size_bytes` of the body after the first `skip_bytes`, which are never in memory together."""
    body = bytearray()
    for chunk in answer.iter_raw():
        body += chunk[skip_bytes:]
        skip_bytes = max(0, skip_bytes - len(chunk))
        if size_bytes is not None and len(body) > size_bytes:
            break  # and not before: only a body that was read to its end leaves its connection to the next request
    return bytes(body[:size_bytes])


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """The one place where httpx's errors become the store's."""
    try:
        yield
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, ValueError) as error:
        raise StoreError(f"cannot {what}: {error}") from error
    except (httpx.HTTPError, httpx.StreamError, OSError) as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise StoreError(f"cannot {what}: {error}; name its authority's certificate in SSL_CERT_FILE") from error
        reason = str(error) or type(error).__name__
        raise StoreUnavailable(f"cannot {what}: {reason}; check the network and the server") from error
