"""A store in an S3 bucket, or in anything that speaks S3: R2, MinIO, Ceph, GCS interoperability."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, NoCredentialsError, PartialCredentialsError

from compile_cache.errors import ObjectNotFound, StoreAccessDenied, StoreError, StoreUnavailable
from compile_cache.store.base import StoredObject

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_DENIED = frozenset({"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"})
_MISSING = frozenset({"404", "NoSuchKey", "NoSuchBucket"})
_BEYOND_THE_END = frozenset({"416", "InvalidRange"})
_EXISTS = frozenset({"412", "PreconditionFailed", "409", "ConditionalRequestConflict"})
_OVERLOADED = frozenset({408, 429, 500, 502, 503, 504})
_UNCONDITIONAL = frozenset({"501", "NotImplemented", "400", "InvalidArgument", "InvalidRequest"})

# R2 and other look-alikes refuse the checksums that boto3 ≥ 1.36 adds; a pack is named by its own digest.
_CHECKSUMS: Literal["when_required"] = "when_required"
_CONNECT_TIMEOUT_S = 3
_READ_TIMEOUT_S = 10
_ATTEMPTS = 3


class S3Store:
    """Objects `<prefix>/<name>` in `bucket`. Credentials and region are found as boto3 always finds them."""

    def __init__(self, bucket: str, prefix: str, endpoint_url: str | None) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        with _translated(f"open s3://{bucket}"):
            session = boto3.session.Session()
            self._client: S3Client = session.client(
                "s3",
                endpoint_url=endpoint_url,
                # A bucket at an endpoint of one's own needs no region; S3 itself answers for the wrong one.
                region_name=session.region_name or ("auto" if endpoint_url else "us-east-1"),
                config=Config(
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    read_timeout=_READ_TIMEOUT_S,
                    retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
                    request_checksum_calculation=_CHECKSUMS,
                    response_checksum_validation=_CHECKSUMS,
                    max_pool_connections=32,
                    s3={"addressing_style": "path" if endpoint_url else "auto"},
                ),
            )

    @property
    def location(self) -> str:
        """The URL, with the endpoint where there is one."""
        return f"s3://{self._bucket}/{self._prefix} at {self._client.meta.endpoint_url}"

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects whose name begins with `prefix`, oldest first. One request per thousand."""
        found = []
        with _translated(f"list {self.location}{prefix}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            for page in pages:
                # Every listing says whether it goes on. An empty body, or a web page of something in the middle, does
                # not, and to botocore is a listing of nothing.
                if "IsTruncated" not in page:
                    raise StoreUnavailable(f"cannot list {self.location}{prefix}: what was answered is no listing")
                for entry in page.get("Contents", ()):
                    name = entry["Key"].removeprefix(self._prefix)
                    found.append(StoredObject(name, entry["Size"], entry["LastModified"].timestamp()))
        return sorted(found, key=lambda entry: (entry.modified_s, entry.name))

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """The object's bytes from `start` on, at most `size_bytes` of them: one ranged GET."""
        if size_bytes == 0:
            return b""  # not a range that HTTP can express (RFC 9110, section 14.1.2)
        end = "" if size_bytes is None else start + size_bytes - 1
        with _translated(f"get {name} from {self.location}"):
            try:
                answer = self._client.get_object(
                    Bucket=self._bucket, Key=self._prefix + name, Range=f"bytes={start}-{end}"
                )
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") in _BEYOND_THE_END:
                    return b""
                raise
            # Without this, other bytes of the object would be taken for those of a damaged pack.
            if start and not answer.get("ContentRange", "").startswith(f"bytes {start}-"):
                answer["Body"].close()
                raise StoreUnavailable(f"cannot get {name} from {self.location}: another range of it was answered")
            return answer["Body"].read()

    def put(self, name: str, content: Path | bytes) -> None:
        """One PUT, of up to 5 GB. Not a transfer manager's upload, which starts threads: at exit that fails."""
        with _translated(f"put {name} into {self.location}"):
            if isinstance(content, bytes):
                self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=content)
            else:
                with content.open("rb") as body:
                    self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=body)

    def put_if_absent(self, name: str, content: bytes) -> bool:
        """One PUT with `If-None-Match: *`; where the store does not know that, a look and then a PUT."""
        with _translated(f"put {name} into {self.location}"):
            try:
                self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=content, IfNoneMatch="*")
            except ClientError as error:
                code = str(error.response.get("Error", {}).get("Code", ""))
                if code in _EXISTS:
                    return False
                if code not in _UNCONDITIONAL:
                    raise
            else:
                return True
        if any(entry.name == name for entry in self.list(name)):
            return False
        self.put(name, content)
        return True

    def delete(self, name: str) -> None:
        """Remove an object; S3 does not mind one that is not there."""
        with _translated(f"delete {name} from {self.location}"):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """The one place where botocore's errors become the store's."""
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StoreAccessDenied(f"cannot {what}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in _DENIED:
            raise StoreAccessDenied(f"cannot {what}: {code}; check the credentials and the bucket's policy") from error
        if code in _MISSING:
            advice = "; check the bucket's name, or create it" if code == "NoSuchBucket" else ""
            raise ObjectNotFound(f"cannot {what}: {code}{advice}") from error
        if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in _OVERLOADED:
            raise StoreUnavailable(f"cannot {what}: {error}") from error
        raise StoreError(f"cannot {what}: {error}") from error
    except ConnectionError as error:
        raise StoreUnavailable(
            f"cannot {what}: {error}; check COMPILE_CACHE_S3_ENDPOINT_URL and the network"
        ) from error
    except BotoCoreError as error:
        raise StoreUnavailable(f"cannot {what}: {error}") from error
    except ValueError as error:  # botocore's own, for an endpoint that is no URL
        raise StoreError(f"cannot {what}: {error}; check COMPILE_CACHE_S3_ENDPOINT_URL") from error
    except OSError as error:
        raise StoreUnavailable(f"cannot {what}: {error}") from error
