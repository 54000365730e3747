"""A read-only store: a folder behind a web server, such as a mirror or a content delivery network."""

from __future__ import annotations

import logging
import re
import ssl
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote, unquote, urljoin

import requests
from urllib3.exceptions import HTTPError, LocationValueError, ProtocolError
from urllib3.util import parse_url

from compile_cache.errors import ObjectNotFound, SettingsError, StoreAccessDenied, StoreError, StoreUnavailable
from compile_cache.store.base import ReadOnly, StoredObject
from compile_cache.store.deadline import within_limit
from compile_cache.store.web_index import INDEX, MOST_INDEX_BYTES, parse_index

log = logging.getLogger("compile_cache")

_CONNECT_TIMEOUT_S = 3.0
_READ_TIMEOUT_S = 10.0
_ATTEMPTS = 3
_FIRST_PAUSE_S = 0.1
_MOST_REDIRECTS = 3
_CHUNK_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class WebStore(ReadOnly):
    """Its objects are `<url>/<name>`, listed in `<url>/index.json`. Only the URL's host gets its user and password."""

    def __init__(self, url: str) -> None:
        """Connects to nothing yet.

        Raises:
            SettingsError: `url` is not the URL of a folder.
        """
        try:
            parsed = parse_url(url)
            if parsed.scheme not in ("https", "http") or not parsed.host or parsed.query or parsed.fragment:
                raise ValueError
        except ValueError:  # the message could show a password
            raise SettingsError("a layer is not the URL of a folder: give https://host/path, without ? and #") from None
        self._url = parsed._replace(auth=None, path=(parsed.path or "").rstrip("/") + "/").url
        self._session = _open_session()
        # Use SSL_CERT_FILE or the system's certificates. requests would use its own list.
        certificates = ssl.get_default_verify_paths()
        self._certificates = certificates.cafile or certificates.capath or True
        if parsed.auth:
            user, _, password = parsed.auth.partition(":")
            self._session.auth = (unquote(user), unquote(password))
        weakref.finalize(self, self._session.close).atexit = False
        self._without_ranges = False

    @property
    def location(self) -> str:
        """The URL, without user and password."""
        return self._url

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects of the index whose names begin with `prefix`, oldest first."""
        content = self._get(INDEX, {}, None, lambda answer: _read_body(answer, 0, MOST_INDEX_BYTES + 1))
        try:
            found = [entry for entry in parse_index(content) if entry.name.startswith(prefix)]
        except ValueError as error:
            raise StoreError(f"cannot list {self._url}{INDEX}: {error}; make it again") from error
        return sorted(found, key=lambda entry: (entry.modified_s, entry.name))

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """At most `size_bytes` of the object's bytes, from `start` on. A server without ranges also sends the bytes
        before `start`, which are dropped."""
        if size_bytes == 0:
            return b""  # not a range that HTTP can express (RFC 9110, section 14.1.2)
        end = "" if size_bytes is None else start + size_bytes - 1

        def take(answer: requests.Response) -> bytes:
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
            log.warning(
                "mirror.no_ranges url=%s Each read of a pack transfers all bytes before it. Use a server that knows "
                "ranges.",
                self._url,
            )

    def _get(
        self, name: str, headers: dict[str, str], size_bytes: int | None, take: Callable[[requests.Response], bytes]
    ) -> bytes:
        """The result of `take` for the answer. A request is repeated after a failure that may pass."""
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

    def _request(self, name: str, headers: dict[str, str]) -> requests.Response:
        """The answer, with its body unread."""
        return self._session.get(
            self._url + quote(name),
            headers=headers,
            timeout=(_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S),
            stream=True,
            verify=self._certificates,
        )


def _open_session() -> requests.Session:
    """A session that uses the environment's proxies. requests follows redirects, and sends the password to no other
    host."""
    session = requests.Session()
    session.max_redirects = _MOST_REDIRECTS
    session.headers["Accept-Encoding"] = "identity"

    def check_redirect(answer: requests.Response, **_: Any) -> None:
        target = session.get_redirect_target(answer)
        if target is None:
            return
        answer.close()  # requests would read the whole body
        if answer.url.startswith("https:") and not urljoin(answer.url, target).lower().startswith("https:"):
            url = answer.url.partition("?")[0]  # a query can have a signature
            raise StoreError(f"cannot get {url}: it is redirected from https:// to another scheme")

    session.hooks["response"].append(check_redirect)
    return session


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


def _read_part(answer: requests.Response, start: int, size_bytes: int | None) -> bytes:
    """The body of an answer with a range, checked against the request."""
    stated = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if stated is None or int(stated[1]) != start:
        raise ValueError(f"asked for bytes from {start} on, got {answer.headers.get('Content-Range')!r:.100}")
    end = int(stated[2]) + 1 if stated[3] == "*" else int(stated[3])
    expected = end - start if size_bytes is None else min(size_bytes, end - start)
    body = _read_body(answer, 0, size_bytes)
    if len(body) < expected:
        raise ProtocolError(f"got {len(body)} of {expected} bytes")
    return body


def _read_body(answer: requests.Response, skip_bytes: int, size_bytes: int | None) -> bytes:
    """At most `size_bytes` of the body after the first `skip_bytes`, which are read in pieces and dropped."""
    parts = []
    while size_bytes is None or size_bytes > 0:
        limit = _CHUNK_BYTES if size_bytes is None else min(_CHUNK_BYTES, skip_bytes + size_bytes)
        chunk = answer.raw.read(limit, decode_content=False)
        if not chunk:
            break
        part = chunk[skip_bytes:]
        skip_bytes -= len(chunk) - len(part)
        parts.append(part)
        size_bytes = None if size_bytes is None else size_bytes - len(part)
    return b"".join(parts)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn the errors of requests and urllib3 into the store's errors. Only here."""
    try:
        yield
    except (requests.exceptions.InvalidURL, LocationValueError):  # the message could show a password
        raise StoreError(
            f"cannot {what}: a proxy or redirect is not a URL; check http_proxy, https_proxy and all_proxy"
        ) from None
    except requests.TooManyRedirects as error:
        raise StoreError(f"cannot {what}: it is redirected more than {_MOST_REDIRECTS} times") from error
    except ValueError as error:  # also requests' InvalidSchema
        raise StoreError(f"cannot {what}: {error}") from error
    except (HTTPError, OSError) as error:  # OSError: all other errors of requests
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise StoreError(f"cannot {what}: {error}; name its authority's certificate in SSL_CERT_FILE") from error
        raise StoreUnavailable(f"cannot {what}: {error}; check the network and the server") from error
