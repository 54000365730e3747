"""A store that is a folder behind a web server, only read: a mirror, a content delivery network, a static site."""

from __future__ import annotations

import logging
import re
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urljoin
from urllib.request import getproxies, proxy_bypass

from urllib3 import BaseHTTPResponse, PoolManager, ProxyManager, Timeout, make_headers
from urllib3.exceptions import HTTPError, ProtocolError, ProxyError, SSLError, TimeoutError
from urllib3.util import Url, parse_url

from compile_cache.errors import ObjectNotFound, SettingsError, StoreAccessDenied, StoreError, StoreUnavailable
from compile_cache.store.base import StoredObject
from compile_cache.store.readonly import ReadOnly
from compile_cache.store.web_index import INDEX, MOST_INDEX_BYTES, parse_index
from compile_cache.store.web_index import write_index as write_index

log = logging.getLogger("compile_cache")

_T = TypeVar("_T")

_TIMEOUT = Timeout(connect=3, read=10)
_ATTEMPTS = 3
_FIRST_PAUSE_S = 0.1
_MOST_REDIRECTS = 3
_CHUNK_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class WebStore(ReadOnly):
    """Objects `<url>/<name>`, listed in `<url>/index.json`. A user and a password in the URL are sent as such."""

    def __init__(self, url: str) -> None:
        """Connects to nothing yet.

        Raises:
            SettingsError: it is no URL of a folder, or the environment's proxy is none.
        """
        try:
            parsed = parse_url(url)
            if parsed.scheme not in ("https", "http") or not parsed.host or parsed.query or parsed.fragment:
                raise ValueError
        except ValueError:  # its message could show a password
            raise SettingsError("a layer is no URL of a folder: give https://host/path, without ? and #") from None
        self._url = parsed._replace(auth=None, path=(parsed.path or "").rstrip("/") + "/").url
        self._pool = _open_pool(parsed)
        self._headers = make_headers(basic_auth=unquote(parsed.auth)) if parsed.auth else {}
        self._without_ranges = False

    @property
    def location(self) -> str:
        """The URL, without user and password."""
        return self._url

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects of the index whose name begins with `prefix`, oldest first."""
        content = self._get(INDEX, {}, lambda answer: _read_body(answer, 0, MOST_INDEX_BYTES + 1))
        try:
            found = [entry for entry in parse_index(content) if entry.name.startswith(prefix)]
        except ValueError as error:
            raise StoreError(f"cannot list {self._url}{INDEX}: {error}; make it again") from error
        return sorted(found, key=lambda entry: (entry.modified_s, entry.name))

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """The object's bytes from `start` on, at most `size_bytes` of them. From a server without ranges, what is
        before them is received as well, and dropped."""
        if size_bytes == 0:
            return b""  # not a range that HTTP can express (RFC 9110, section 14.1.2)
        end = "" if size_bytes is None else start + size_bytes - 1

        def take(answer: BaseHTTPResponse) -> bytes:
            if answer.status == 416:
                return b""
            if answer.status == 206:
                return _read_part(answer, start, size_bytes)
            if start:
                self._note_no_ranges()
            return _read_body(answer, start, size_bytes)

        return self._get(name, {"Range": f"bytes={start}-{end}"}, take)

    def _note_no_ranges(self) -> None:
        if not self._without_ranges:
            self._without_ranges = True
            log.warning("mirror.no_ranges url=%s: each part of a pack costs all that is before it", self._url)

    def _get(self, name: str, headers: dict[str, str], take: Callable[[BaseHTTPResponse], _T]) -> _T:
        """What `take` makes of the answer; tried again where the server or the network may do better next time."""
        what = f"get {self._url}{name}"
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                with _translated(what), self._request(self._url + quote(name), headers) as answer:
                    _check_status(answer.status, what, name)
                    return take(answer)
            except StoreUnavailable as error:
                failure = error
        raise failure

    def _request(self, url: str, headers: dict[str, str]) -> BaseHTTPResponse:
        """The answer, its body unread. Redirects are followed here: urllib3 would read theirs, however long, and go on
        to http://."""
        own = _origin(url)
        for _ in range(_MOST_REDIRECTS + 1):
            answer = self._pool.request(
                "GET",
                url,
                headers=self._headers | headers if _origin(url) == own else headers,
                preload_content=False,
                redirect=False,
                retries=False,
            )
            target = answer.get_redirect_location()
            if not target:
                return answer
            answer.close()
            url = urljoin(url, target)
            if own[0] == "https" and _origin(url)[0] != "https":
                raise StoreError(f"cannot get {self._url}: it leads from https:// to another scheme")
        raise StoreError(f"cannot get {self._url}: it leads on more than {_MOST_REDIRECTS} times")


def _open_pool(url: Url) -> PoolManager:
    """Connections through the proxy that the environment names, checked against the certificates that it names."""
    options: dict[str, Any] = {"timeout": _TIMEOUT, "maxsize": 16, "ssl_context": ssl.create_default_context()}
    proxy = None if proxy_bypass(url.host or "") else getproxies().get(url.scheme or "")
    if not proxy:
        return PoolManager(**options)
    try:
        auth = parse_url(proxy).auth
        headers = make_headers(proxy_basic_auth=unquote(auth)) if auth else None
        return ProxyManager(proxy, proxy_headers=headers, **options)
    except (HTTPError, ValueError):  # its message could show a password
        raise SettingsError(f"{url.scheme}_proxy is no URL of a proxy: give http://host:port, or unset it") from None


def _origin(url: str) -> tuple[str | None, str | None, int | None]:
    parsed = parse_url(url)
    return parsed.scheme, parsed.host, parsed.port


def _check_status(status: int, what: str, name: str) -> None:
    if status in (200, 206) or (status == 416 and name != INDEX):
        return
    if status in (404, 410):
        advice = "; make it with compile_cache.store.web.write_index" if name == INDEX else ""
        raise ObjectNotFound(f"cannot {what}: it is not there{advice}")
    if status in (401, 403, 407):
        raise StoreAccessDenied(f"cannot {what}: {status}; check the user and password in its URL, or who may read it")
    if status in (408, 425, 429) or status >= 500:
        raise StoreUnavailable(f"cannot {what}: the server answered {status}")
    raise StoreError(f"cannot {what}: the server answered {status}")


def _read_part(answer: BaseHTTPResponse, start: int, size_bytes: int | None) -> bytes:
    """The body of an answer that says it is a part."""
    stated = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if stated is None or int(stated[1]) != start:
        raise ValueError(f"asked for bytes from {start} on, got {answer.headers.get('Content-Range')!r:.100}")
    end = int(stated[2]) + 1 if stated[3] == "*" else int(stated[3])
    expected = end - start if size_bytes is None else min(size_bytes, end - start)
    body = _read_body(answer, 0, size_bytes)
    if len(body) < expected:
        raise ProtocolError(f"got {len(body)} of {expected} bytes")
    return body


def _read_body(answer: BaseHTTPResponse, skip_bytes: int, size_bytes: int | None) -> bytes:
    """At most `size_bytes` of the body after the first `skip_bytes`, which are never in memory together."""
    parts = []
    while size_bytes is None or size_bytes > 0:
        limit = _CHUNK_BYTES if size_bytes is None else min(_CHUNK_BYTES, skip_bytes + size_bytes)
        chunk = answer.read(limit, decode_content=False)
        if not chunk:
            break
        part = chunk[skip_bytes:]
        skip_bytes -= len(chunk) - len(part)
        if part:
            parts.append(part)
            size_bytes = None if size_bytes is None else size_bytes - len(part)
    return b"".join(parts)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """The one place where urllib3's errors become the store's."""
    try:
        yield
    except SSLError as error:
        if isinstance(error.args[0] if error.args else None, ssl.SSLCertVerificationError):
            raise StoreError(f"cannot {what}: {error}; name its authority's certificate in SSL_CERT_FILE") from error
        raise StoreUnavailable(f"cannot {what}: {error}") from error
    except (TimeoutError, ProtocolError, ProxyError, OSError) as error:
        raise StoreUnavailable(f"cannot {what}: {error}; check the network and the server") from error
    except (HTTPError, ValueError) as error:
        raise StoreError(f"cannot {what}: {error}") from error
