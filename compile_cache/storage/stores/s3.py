"""A store in an S3 bucket, or in a service with S3's interface: R2, MinIO, Ceph, Google's interoperability."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, NoCredentialsError, PartialCredentialsError

from compile_cache.errors import ObjectNotFound, StoreAccessDenied, StoreError, StoreUnavailable, redacted
from compile_cache.settings import split_url
from compile_cache.storage.stores.base import ReopenedStore, StoredObject, oldest_first, translated
from compile_cache.storage.stores.transfer import within_limit

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_DENIED = frozenset({"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"})
_MISSING = frozenset({"404", "NoSuchKey", "NoSuchBucket"})
_BEYOND_THE_END = frozenset({"416", "InvalidRange"})
# The codes and texts of AWS, R2 and MinIO, and of botocore for a region that cannot be.
_WRONG_REGION = re.compile(r"region|Redirect|\(30[17]\)|recursion", re.IGNORECASE)
_OVERLOADED = frozenset({408, 429, 500, 502, 503, 504})

_READ_TIMEOUT_S = 10
_ATTEMPTS = 3


class S3Store:
    """Its objects are `<prefix>/<name>` in a bucket. boto3 finds endpoint, credentials and region in its usual ways."""

    def __init__(self, url: str) -> None:
        """Open `s3://bucket/prefix`. Connects to nothing yet.

        Raises:
            StoreError: the endpoint is not a URL.
        """
        self._bucket, _, prefix = split_url(url)[1].partition("/")
        self._prefix = f"{prefix.strip('/')}/".lstrip("/")
        with _translated(f"open s3://{self._bucket}"):
            self._client: S3Client = boto3.session.Session().client(
                "s3",
                config=Config(
                    connect_timeout=3,
                    read_timeout=_READ_TIMEOUT_S,
                    retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
                    # R2 and others refuse the checksums that boto3 ≥ 1.36 adds. A pack needs none: its name is one.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                    max_pool_connections=32,
                ),
            )
        self.location = f"s3://{self._bucket}/{self._prefix} at {redacted(self._client.meta.endpoint_url)}"

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process."""
        return ReopenedStore, (f"s3://{self._bucket}/{self._prefix}", self.location)

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects whose names begin with `prefix`, oldest first. One request per 1,000 objects."""
        what = f"list {self.location}"
        found = []
        with _translated(what):
            paginator = self._client.get_paginator("list_objects_v2")
            pages = iter(paginator.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix))
            while (page := within_limit(what, 0, lambda: next(pages, None))) is not None:
                # Every listing says whether it goes on. An empty body or a proxy's web page does not, and botocore
                # takes both for an empty listing.
                if "IsTruncated" not in page:
                    raise StoreUnavailable(f"cannot {what}: the answer is not a listing")
                for entry in page.get("Contents", ()):
                    name = entry["Key"].removeprefix(self._prefix)
                    found.append(StoredObject(name, entry["Size"], entry["LastModified"].timestamp()))
        return oldest_first(found, prefix)

    def read(self, name: str, start: int, size_bytes: int) -> bytes:
        """At most `size_bytes` of the object's bytes, from `start` on. One GET with a range."""
        what = f"get {name} from {self.location}"
        with _translated(what):
            return within_limit(what, size_bytes, lambda: self._read(what, name, start, size_bytes))

    def _read(self, what: str, name: str, start: int, size_bytes: int) -> bytes:
        end = start + size_bytes - 1
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name, Range=f"bytes={start}-{end}")
        except ClientError as error:
            if _code(error) in _BEYOND_THE_END:
                return b""
            raise
        with closing(answer["Body"]) as body:  # ends the connection if the server sends more than requested
            # Without this check, another part of the object would look like a damaged pack.
            if start and not answer.get("ContentRange", "").startswith(f"bytes {start}-"):
                raise StoreUnavailable(f"cannot {what}: the server answered with another range")
            content = body.read(size_bytes)
            if len(content) < size_bytes:
                body.read()  # at the end, botocore compares the length with the stated one
            return content

    def put(self, name: str, content: Path | bytes) -> None:
        """Upload in one PUT of up to 5 GB. A transfer manager would start threads, which fails at exit."""
        what = f"put {name} into {self.location}"
        with _translated(what), io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as body:
            size_bytes = body.seek(0, os.SEEK_END)
            body.seek(0)
            key = self._prefix + name
            within_limit(what, size_bytes, lambda: self._client.put_object(Bucket=self._bucket, Key=key, Body=body))

    def delete(self, name: str) -> None:
        """Remove an object. S3 accepts a missing object."""
        what = f"delete {name} from {self.location}"
        with _translated(what):
            within_limit(what, 0, lambda: self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name))


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _translated(what: str) -> AbstractContextManager[None]:
    # ValueError: an endpoint that is not a URL. RecursionError: botocore asks again for a region that is not named.
    return translated(what, (BotoCoreError, ClientError, ValueError, OSError, RecursionError), _meaning)


def _meaning(error: Exception) -> tuple[type[StoreError], str]:
    """The store's error for an error of botocore, and its text, with advice for the user."""
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return StoreAccessDenied, f"{error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if isinstance(error, ConnectionError):
        return StoreUnavailable, f"{error}; check AWS_ENDPOINT_URL_S3, AWS_DEFAULT_REGION and the network"
    code = _code(error) if isinstance(error, ClientError) else ""
    if code in _DENIED:
        return StoreAccessDenied, f"{code}; check the credentials and the bucket's policy"
    if code in _MISSING:
        return ObjectNotFound, f"{code}; check the bucket's name, or create it" if code == "NoSuchBucket" else code
    if _WRONG_REGION.search(str(error)):
        return StoreError, f"{error}; set AWS_DEFAULT_REGION to the bucket's region"
    if isinstance(error, ClientError):
        is_overloaded = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in _OVERLOADED
        return StoreUnavailable if is_overloaded else StoreError, str(error)
    if isinstance(error, BotoCoreError | OSError):
        return StoreUnavailable, str(error)
    return StoreError, f"{error}; check AWS_ENDPOINT_URL_S3"
