"""Signatures: who made a pack. Ed25519 (RFC 8032) over the exact bytes of a manifest.

A stored signature is the public key (32 bytes), then the signature (64 bytes). So it names the trusted key that
verifies it. A key is one line of text that begins with its kind: a private key where a public one belongs is refused.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from types import ModuleType

from compile_cache.errors import PackError, SettingsError

PRIVATE_PREFIX = "private-ed25519:"
PUBLIC_PREFIX = "public-ed25519:"

_KEY_BYTES = 32
_SIGNATURE_BYTES = 64


class Signer:
    """Signs manifests with one private key."""

    def __init__(self, private_key: str) -> None:
        """Read a private key, as `generate_keys` writes it.

        Raises:
            SettingsError: it is not a private key, or `cryptography` is not installed.
        """
        self._key = _ed25519().Ed25519PrivateKey.from_private_bytes(_key_bytes(private_key, PRIVATE_PREFIX))

    @property
    def public_key(self) -> str:
        """The key that others trust, as text."""
        return _text(PUBLIC_PREFIX, self._key.public_key().public_bytes_raw())

    def sign(self, manifest: bytes) -> bytes:
        """Public key and signature: 96 bytes."""
        return bytes(self._key.public_key().public_bytes_raw() + self._key.sign(manifest))


class TrustedKeys:
    """The public keys whose packs are used. Without keys, every pack is used."""

    def __init__(self, public_keys: Iterable[str] = ()) -> None:
        """Read public keys, as `generate_keys` writes them.

        Raises:
            SettingsError: one is not a public key, or `cryptography` is not installed.
        """
        self._keys = frozenset(_key_bytes(text, PUBLIC_PREFIX) for text in public_keys)
        if self._keys:
            _ed25519()  # a missing package is reported now, not at the first pack

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def texts(self) -> tuple[str, ...]:
        """The keys as text, sorted."""
        return tuple(sorted(_text(PUBLIC_PREFIX, key) for key in self._keys))

    def verify(self, manifest: bytes, signature: bytes) -> str | None:
        """The public key that signed `manifest`, or None if it is not signed and needs no signature.

        Without trusted keys nothing is verified: the key is the one that the signature names. `cryptography` may not be
        installed then.

        Raises:
            PackError: `manifest` is not signed by a trusted key, or the signature does not fit.
            SettingsError: `cryptography` is not installed.
        """
        if not signature and not self._keys:
            return None
        if not signature:
            raise PackError("it is not signed, and COMPILE_CACHE_TRUSTED_KEYS is set")
        if len(signature) != _KEY_BYTES + _SIGNATURE_BYTES:
            raise PackError(f"its signature has {len(signature)} bytes, not {_KEY_BYTES + _SIGNATURE_BYTES}")
        public, signed = signature[:_KEY_BYTES], signature[_KEY_BYTES:]
        if self._keys and public not in self._keys:
            raise PackError(f"it is signed by {_text(PUBLIC_PREFIX, public)}, which is not trusted")
        if not self._keys:
            return _text(PUBLIC_PREFIX, public)
        ed25519 = _ed25519()
        from cryptography.exceptions import InvalidSignature

        try:
            ed25519.Ed25519PublicKey.from_public_bytes(public).verify(signed, manifest)
        except InvalidSignature as error:
            raise PackError(f"its signature by {_text(PUBLIC_PREFIX, public)} does not fit its manifest") from error
        return _text(PUBLIC_PREFIX, public)


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
    """The 32 bytes of a key. No error shows them: the text may be a private key in the wrong place."""
    kind = prefix.partition("-")[0]
    if not text.startswith(prefix):
        raise SettingsError(f"a {kind} key begins with {prefix!r}: make a pair with `compile-cache keygen`")
    try:
        key = base64.b64decode(text.removeprefix(prefix), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise SettingsError(f"a {kind} key has {_KEY_BYTES} bytes in base64 after {prefix!r}: it is cut or damaged")
    return key


def _ed25519() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise SettingsError(
            "signed packs need the package cryptography: pip install 'cog-compile-cache[signing]'"
        ) from error
    return ed25519
