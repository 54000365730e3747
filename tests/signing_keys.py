"""Keys that are the same in every process: tests that are parametrized by a key keep their names."""

from __future__ import annotations

import base64
import hashlib

from compile_cache.storage.pack.signing import PRIVATE_PREFIX, Signer


def make_keys(name: str) -> tuple[str, str]:
    """A private key and its public one, for each name."""
    private = PRIVATE_PREFIX + base64.b64encode(hashlib.sha256(name.encode()).digest()).decode()
    return private, Signer(private).public_key
