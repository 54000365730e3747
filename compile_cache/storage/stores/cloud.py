"""Stores in Google Cloud Storage, in Azure Blob Storage and behind a web server: all that obstore reaches."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import msgspec
from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, HTTPStore

from compile_cache.errors import ObjectNotFound, StoreAccessDenied, StoreError, StoreUnavailable, first_line, redacted
from compile_cache.settings import split_url
from compile_cache.storage.stores.base import ReopenedStore, StoredObject, oldest_first, translated
from compile_cache.storage.stores.local import INDEX, MOST_INDEX_BYTES, Index
from compile_cache.storage.stores.transfer import within_limit

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Objects

_READING: ClientConfig = {
    "connect_timeout": timedelta(seconds=3),
    "read_timeout": timedelta(seconds=10),
    "timeout": timedelta(seconds=60),
}
# Without a read timeout: reqwest's runs from the start of a request to the start of its answer, and would cut off long
# uploads. A call that its caller has given up ends after `timeout`.
_UPLOADING: ClientConfig = {"connect_timeout": timedelta(seconds=3), "timeout": timedelta(hours=1)}
_RETRIES: RetryConfig = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=1), "base": 2},
}

# Most failures are one class of obstore, `GenericError`, which has neither a status nor a cause: only its text tells a
# full server from a wrong bucket. Where obstore has a class, the class is asked.
_STATUS = re.compile(r"status code: (\d{3})")
# Errors of obstore's web store begin with "Generic HTTP error", whatever they are.
_NO_ANSWER = re.compile(r"(?<!Generic )HTTP error")
_NO_BUCKET = ("<Code>NoSuchBucket</Code>", "<Code>ContainerNotFound</Code>")
# Only the text before the first slash counts. URLs with names of objects follow it.
_NO_CREDENTIALS = re.compile(
    r"^Generic \w+ error: [^/]*(token request|credential|Account must|Access Key|service account)"
)


class CloudStore:
    """The objects of one of obstore's stores, which has its own prefix and credentials."""

    def __init__(self, objects: Objects, location: str, uploads: Objects | None = None, url: str = "") -> None:
        """`uploads` is the same store with timeouts for large uploads. A local store needs none. `url` has what
        `location` does not show."""
        self._objects = objects
        self._uploads = uploads or objects
        self.location = location
        self._url = url or location

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process."""
        return ReopenedStore, (self._url, self.location)

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects whose names begin with `prefix`, oldest first. obstore lists only whole folders."""
        what = f"list {self.location}"
        found = []
        with _translated(what):
            chunks = self._objects.list(prefix.rpartition("/")[0] or None, chunk_size=1000)
            while (chunk := within_limit(what, 0, lambda: next(chunks, None))) is not None:
                for entry in chunk:
                    found.append(StoredObject(entry["path"], entry["size"], entry["last_modified"].timestamp()))
        return oldest_first(found, prefix)

    def read(self, name: str, start: int, size_bytes: int) -> bytes:
        """At most `size_bytes` of the object's bytes, from `start` on. One GET with a range."""
        what = f"get {name} from {self.location}"
        with _translated(what):
            try:
                return within_limit(what, size_bytes, lambda: self._read(name, start, size_bytes))
            except BaseError as error:
                if _status(error) == 416 or "StartTooLarge" in str(error):  # beyond the object's end
                    return b""
                raise

    def _read(self, name: str, start: int, size_bytes: int) -> bytes:
        answer = self._objects.get(name, options={"range": (start, start + size_bytes)})
        # The first chunk has all the requested bytes, whatever else a server sends.
        return bytes(next(answer.stream(min_chunk_size=size_bytes), b""))[:size_bytes]

    def put(self, name: str, content: Path | bytes) -> None:
        """Upload in one PUT, with the whole file in memory: an upload in parts could leave parts behind."""
        what = f"put {name} into {self.location}"
        with _translated(what):
            size_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
            within_limit(what, size_bytes, lambda: self._uploads.put(name, content, use_multipart=False))

    def delete(self, name: str) -> None:
        """Remove an object. Some of obstore's stores raise an error for a missing object, others do not."""
        what = f"delete {name} from {self.location}"
        with _translated(what):
            try:
                within_limit(what, 0, lambda: self._objects.delete(name))
            except FileNotFoundError as error:
                if _is_of_bucket(error):
                    raise


class Mirror(CloudStore):
    """A folder behind a web server or a content delivery network: the objects that its `index.json` lists."""

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects of the index whose names begin with `prefix`, oldest first."""
        try:
            content = self.read(INDEX, 0, MOST_INDEX_BYTES)  # what goes on after that cannot be decoded
            objects = msgspec.json.decode(content, type=Index).objects
        except ObjectNotFound as error:
            raise ObjectNotFound(f"{error}; make it with `compile-cache copy --to FOLDER`") from error
        except (ValueError, RecursionError) as error:
            raise StoreError(f"cannot list {self.location}{INDEX}: {error}; make it again") from error
        return oldest_first(objects, prefix)


def open_cloud(url: str) -> CloudStore:
    """The store at `gs://bucket/prefix` or `az://container/prefix`. Connects to nothing yet.

    obstore finds the credentials: `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_*`, or those of the machine.

    Raises:
        StoreError: the credentials cannot be read, or no Azure account is set.
    """
    scheme, rest = split_url(url)
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    kind = GCSStore if scheme == "gs" else AzureStore
    with _translated(f"open {url}"):
        objects, uploads = (
            kind(bucket, prefix=prefix or None, client_options=options, retry_config=_RETRIES)
            for options in (_READING, _UPLOADING)
        )
    return CloudStore(objects, f"{scheme}://{bucket}/{prefix}/" if prefix else f"{scheme}://{bucket}/", uploads)


def open_mirror(url: str) -> Mirror:
    """The mirror at `https://user:password@host/path`. Connects to nothing yet.

    Redirects from https:// lead to https:// only. A redirect to another host does not get the user and password.

    Raises:
        StoreError: the URL has no host, or an invalid port.
    """
    folder = redacted(url).rstrip("/")
    with _translated(f"open {folder}"):
        parts = urlsplit(url)
        options: ClientConfig = {**_READING, "allow_http": parts.scheme == "http"}
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            options["default_headers"] = {"authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
        objects = HTTPStore(folder, client_options=options, retry_config=_RETRIES)
    return Mirror(objects, f"{folder}/", url=url)


def _translated(what: str) -> AbstractContextManager[None]:
    # TypeError: a path to delete.
    return translated(what, (BaseError, OSError, ValueError, TypeError, NotImplementedError), _meaning)


def _status(error: Exception) -> int:
    """The status of a server's answer in an error; 0 without one."""
    return int(match[1]) if (match := _STATUS.search(str(error))) else 0


def _is_of_bucket(error: Exception) -> bool:
    return any(code in str(error) for code in _NO_BUCKET)


def _meaning(error: Exception) -> tuple[type[StoreError], str]:
    """The store's error for an error of obstore, and its text, with advice for the user."""
    text, status = str(error), _status(error)
    told = first_line(error).partition(": <")[0]  # without the answer's body and obstore's internals
    if _is_of_bucket(error):
        return ObjectNotFound, f"{told}; check the bucket's name, or create it"
    if _NO_CREDENTIALS.search(text):
        variables = "GOOGLE_APPLICATION_CREDENTIALS, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
        return StoreAccessDenied, f"{told}; set {variables}"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
        return StoreAccessDenied, f"{told}; check the credentials and what they may do"
    if isinstance(error, FileNotFoundError) or status == 404:
        return ObjectNotFound, told
    if isinstance(error, NotSupportedError):  # of ranges
        return StoreError, f"{told}; use a web server that answers requests for ranges"
    if "InvalidCertificate" in text:
        return StoreError, f"{told}; name its authority's certificate in SSL_CERT_FILE"
    if status in (408, 429) or status >= 500 or _NO_ANSWER.search(text):
        return StoreUnavailable, f"{told}; check the network"
    return StoreError, told
