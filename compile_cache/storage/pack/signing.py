"""Signatures prove who made a pack: Ed25519 (RFC 8032) over the exact bytes of its header and its stored manifest.

A stored signature is the public key (32 bytes), then the signature (64 bytes). So it names the trusted key that
verifies it. A key is one line of text that begins with its kind, so a private key in place of a public one is refused.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from compile_cache.errors import PackForbidden, SettingsError
from compile_cache.settings import PREFIX

PRIVATE_PREFIX = "private-ed25519:"
PUBLIC_PREFIX = "public-ed25519:"
# What a key is, for messages: the variable with it, and its kind.
_WHAT = {PRIVATE_PREFIX: f"{PREFIX}SIGNING_KEY: a private", PUBLIC_PREFIX: f"{PREFIX}TRUSTED_KEYS: a public"}

_KEY_BYTES = 32
# A stored signature: with the key that made it.
SIGNATURE_BYTES = _KEY_BYTES + 64


class Signer:
    """Signs packs with one private key. Others trust `public_key`, a text."""

    def __init__(self, private_key: str) -> None:
        """Read a private key in the form of `generate_keys`.

        Raises:
            SettingsError: `private_key` is not a private key, or `cryptography` is not installed.
        """
        self._key = _ed25519().Ed25519PrivateKey.from_private_bytes(_key_bytes(private_key, PRIVATE_PREFIX))
        self._public: bytes = self._key.public_key().public_bytes_raw()
        self.public_key = _text(PUBLIC_PREFIX, self._public)

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process."""
        return Signer, (_text(PRIVATE_PREFIX, self._key.private_bytes_raw()),)

    def sign(self, content: bytes) -> bytes:
        """The public key and the signature: `SIGNATURE_BYTES`."""
        return self._public + bytes(self._key.sign(content))


def trusted_keys(public_keys: Iterable[str]) -> frozenset[str]:
    """These public keys, in the form of `generate_keys`, whose packs are used. Without keys, every pack is used.

    Raises:
        SettingsError: a text is not a public key, or `cryptography` is not installed.
    """
    keys = frozenset(_text(PUBLIC_PREFIX, _key_bytes(text, PUBLIC_PREFIX)) for text in public_keys)
    if keys:
        _ed25519()  # a missing package is reported now, not at the first pack
    return keys


def verify(content: bytes, signature: bytes, trusted: frozenset[str]) -> str | None:
    """The public key that signed `content`; None for an unsigned pack that may be used. `signature` is empty then, and
    has `SIGNATURE_BYTES` else.

    Without trusted keys, the result is the key that the signature names, unverified: then every pack is used, and
    `cryptography` may be missing.

    Raises:
        PackForbidden: no trusted key signed the content, or the signature does not match it.
        SettingsError: `cryptography` is not installed.
    """
    if not signature:
        if trusted:
            raise PackForbidden("it is not signed, but COMPILE_CACHE_TRUSTED_KEYS is set")
        return None
    public = signature[:_KEY_BYTES]
    named = _text(PUBLIC_PREFIX, public)
    if not trusted:
        return named
    if named not in trusted:
        raise PackForbidden(f"it is signed by {named}, which is not trusted")
    ed25519 = _ed25519()
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(signature[_KEY_BYTES:], content)
    except InvalidSignature as error:
        raise PackForbidden(f"its signature by {named} does not match its manifest") from error
    return named


def generate_keys() -> tuple[str, str]:
    """A new private key and its public key, each as a line of text.

    Raises:
        SettingsError: `cryptography` is not installed.
    """
    key = _ed25519().Ed25519PrivateKey.generate()
    return _text(PRIVATE_PREFIX, key.private_bytes_raw()), _text(PUBLIC_PREFIX, key.public_key().public_bytes_raw())


def _text(prefix: str, key: bytes) -> str:
    return prefix + base64.b64encode(key).decode()


def _key_bytes(text: str, prefix: str) -> bytes:
    """The 32 bytes of a key. No error shows the text, because it may be a private key in the wrong place."""
    if not text.startswith(prefix):
        raise SettingsError(f"{_WHAT[prefix]} key begins with {prefix!r}. Make a pair with `compile-cache keygen`.")
    try:
        key = base64.b64decode(text.removeprefix(prefix), validate=True)
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise SettingsError(
            f"{_WHAT[prefix]} key has {_KEY_BYTES} bytes in base64 after {prefix!r}. This key is cut off or damaged."
        )
    return key


def _ed25519() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise SettingsError(
            "signed packs need the package cryptography: pip install '.[signing]' in a checkout of cog-compile-cache"
        ) from error
    return ed25519
