"""Signatures: who made a pack is known for sure, or the pack is refused."""

from __future__ import annotations

import pytest
from programs import run_program
from signing_keys import make_keys

from compile_cache.errors import PackError, SettingsError
from compile_cache.settings import PREFIX, Settings
from compile_cache.storage.pack.signing import PRIVATE_PREFIX, PUBLIC_PREFIX, Signer, trusted_keys, verify
from compile_cache.storage.rules import Rules

MANIFEST = b'{"format": 1, "files": []}'
PRIVATE, PUBLIC = make_keys("one")
OTHER_PRIVATE, OTHER_PUBLIC = make_keys("other")
SIGNATURE = Signer(PRIVATE).sign(MANIFEST)

WITHOUT_CRYPTOGRAPHY = """
import sys
sys.modules["cryptography"] = None
from compile_cache.errors import SettingsError
from compile_cache.settings import Settings
from compile_cache.storage.pack.signing import Signer, generate_keys, trusted_keys, verify
from compile_cache.storage.rules import Rules
Rules.of(Settings())
assert verify(b"manifest", b"", frozenset()) is None
try:
    {}
except SettingsError as error:
    print(error)
"""
NEEDING_CRYPTOGRAPHY = {
    "generate": "generate_keys()",
    "sign": f"Signer({PRIVATE!r})",
    "settings": f"Rules.of(Settings(signing_key={PRIVATE!r}))",
    "verify": f"verify({MANIFEST!r}, {SIGNATURE!r}, trusted_keys([{PUBLIC!r}]))",
}


def refused(manifest: bytes, signature: bytes, *keys: str) -> str:
    with pytest.raises(PackError) as caught:
        verify(manifest, signature, trusted_keys(keys or (PUBLIC,)))
    return str(caught.value)


def test_any_of_the_trusted_keys_will_do_and_without_any_every_pack():
    assert len(SIGNATURE) == 96
    assert verify(MANIFEST, b"", frozenset()) is None
    keys = trusted_keys([OTHER_PUBLIC, PUBLIC])
    assert verify(MANIFEST, SIGNATURE, keys) == PUBLIC
    assert verify(MANIFEST, Signer(OTHER_PRIVATE).sign(MANIFEST), keys) == OTHER_PUBLIC
    assert refused(MANIFEST[:-1], SIGNATURE)


def test_signing_twice_gives_the_same_signature():
    """Ed25519 is deterministic (RFC 8032): a pack of the same content has the same name."""
    assert Signer(PRIVATE).sign(MANIFEST) == SIGNATURE


# What is no key. No message shows one: it may be a private key in the wrong place.


def test_a_private_key_with_the_name_of_a_public_one_trusts_nothing_that_its_pair_signed():
    """Nobody can tell: both are 32 bytes. Packs are then refused."""
    swapped = PUBLIC_PREFIX + PRIVATE.removeprefix(PRIVATE_PREFIX)
    assert "not trusted" in refused(MANIFEST, SIGNATURE, swapped)


# Without `cryptography`


@pytest.mark.parametrize("statement", NEEDING_CRYPTOGRAPHY.values(), ids=NEEDING_CRYPTOGRAPHY)
def test_without_cryptography_only_what_needs_it_is_refused_with_the_remedy(statement):
    done = run_program(WITHOUT_CRYPTOGRAPHY.format(statement))
    assert (done.returncode, done.stderr) == (0, "")
    assert "pip install '.[signing]' in a checkout of cog-compile-cache" in done.stdout


# The keys of a boot.


def rules_of(**variables: str) -> Rules:
    return Rules.of(Settings.from_env({PREFIX + name: value for name, value in variables.items()}))


def test_a_signing_key_that_is_not_trusted_is_refused_with_the_key_to_add():
    with pytest.raises(SettingsError, match="would refuse its own packs") as caught:
        rules_of(SIGNING_KEY=PRIVATE, TRUSTED_KEYS=OTHER_PUBLIC)
    assert f"add {PUBLIC} to {PREFIX}TRUSTED_KEYS" in str(caught.value)
    assert rules_of(SIGNING_KEY=PRIVATE, TRUSTED_KEYS=f"{OTHER_PUBLIC},{PUBLIC}").signer.public_key == PUBLIC


DAMAGED = ["", "AAAA", "A" * 42, "A" * 44, "A" * 42 + "~=", "A" * 40 + " =", "é" * 44, "A" * 86 + "=="]
NO_KEYS = ["", " ", "ed25519:", "secret", PRIVATE.upper(), " " + PRIVATE, PRIVATE.replace("ed25519", "rsa")]
NO_PUBLIC_KEYS = ["public", PRIVATE, PRIVATE[8:], PRIVATE_PREFIX, *NO_KEYS]


@pytest.mark.parametrize("key", [PUBLIC, *NO_KEYS[1:], *(PRIVATE_PREFIX + text for text in DAMAGED)])
def test_a_bad_signing_key_is_refused_by_the_name_of_its_variable_with_how_to_make_one_and_not_shown(key):
    said = refused_key(f"{PREFIX}SIGNING_KEY: a private key", key, PRIVATE_PREFIX, Settings(signing_key=key))
    shown = key.removeprefix(PRIVATE_PREFIX).strip()
    assert shown not in said or len(shown) < len("secret") or shown == "ed25519:"


@pytest.mark.parametrize("key", [*NO_PUBLIC_KEYS, *(PUBLIC_PREFIX + text for text in DAMAGED)])
def test_a_bad_trusted_key_is_refused_by_the_name_of_its_variable_and_a_private_one_is_not_shown(key):
    said = refused_key(f"{PREFIX}TRUSTED_KEYS: a public key", key, PUBLIC_PREFIX, Settings(trusted_keys=(PUBLIC, key)))
    assert PRIVATE.removeprefix(PRIVATE_PREFIX).lower() not in said.lower()


def refused_key(start: str, key: str, prefix: str, settings: Settings) -> str:
    reason = "has 32 bytes .* cut off or damaged" if key.startswith(prefix) else "begins with .* `compile-cache keygen`"
    with pytest.raises(SettingsError, match=f"{start} {reason}") as caught:
        Rules.of(settings)
    return str(caught.value)
