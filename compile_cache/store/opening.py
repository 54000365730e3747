"""Opens stores by URL."""

from __future__ import annotations

from pathlib import Path

from compile_cache.errors import SettingsError
from compile_cache.settings import PREFIX, Settings, split_url, without_user
from compile_cache.store.base import ObjectStore, Stores
from compile_cache.store.layered import LayeredStore
from compile_cache.store.local import LocalStore

_EXTRAS = {"s3": "s3", "gs": "clouds", "az": "clouds", "https": "clouds", "http": "clouds"}


def open_stores(settings: Settings) -> Stores:
    """The layers and the store that `settings` name. Connects to nothing yet.

    Raises:
        StoreError: an endpoint is not a URL, or credentials cannot be read.
        SettingsError: the scheme of a URL is unknown, or the scheme's package is not installed.
    """
    writing = None if settings.store == "off" else open_url(settings.store)
    layers = [open_url(layer) for layer in settings.layers]
    if not layers and writing is not None:
        return Stores(writing, writing)
    return Stores(LayeredStore([*layers, writing] if writing is not None else layers), writing)


def open_url(url: str) -> ObjectStore:
    """The store at a local folder, `file://`, `s3://`, `gs://`, `az://`, `https://` or `http://`.

    Raises:
        StoreError: the endpoint is not a URL, or credentials cannot be read.
        SettingsError: the scheme is unknown, or the scheme's package is not installed.
    """
    scheme, rest = split_url(url)
    try:
        return _open(scheme, rest, url)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise SettingsError(
            f"{scheme}:// needs the package {package}: "
            f"pip install '.[{_EXTRAS[scheme]}]' in a checkout of cog-compile-cache"
        ) from error


def _open(scheme: str, rest: str, url: str) -> ObjectStore:
    if scheme == "file":
        return LocalStore(Path(rest).absolute())
    if scheme == "s3":
        from compile_cache.store.s3 import S3Store

        bucket, _, prefix = rest.partition("/")
        return S3Store(bucket, prefix.strip("/"))
    if scheme in ("gs", "az"):
        from compile_cache.store.cloud import open_cloud

        return open_cloud(url)
    if scheme in ("https", "http"):
        from compile_cache.store.cloud import open_web
        from compile_cache.store.mirror import Mirror

        return Mirror(open_web(url))
    raise SettingsError(
        f"{PREFIX}STORE={without_user(url)!r}: give a local folder, s3://bucket/prefix, gs://, az:// or off"
    )
