"""The rules by which packs are used or refused, for boots and for the command `compile-cache`."""

from __future__ import annotations

from dataclasses import dataclass, field

from compile_cache.errors import SettingsError
from compile_cache.settings import PREFIX, Settings
from compile_cache.storage.pack.manifest import Limits
from compile_cache.storage.pack.signing import Signer, TrustedKeys


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits, the trusted keys (without any, every pack is used), and the signer of new packs.

    A signer without trusted keys trusts only itself. Otherwise a merge would re-sign packs that anybody uploaded.
    """

    limits: Limits = field(default_factory=Limits)
    trusted: TrustedKeys = field(default_factory=TrustedKeys)
    signer: Signer | None = None

    def __post_init__(self) -> None:
        """Let a signer without trusted keys trust itself."""
        if self.signer and not self.trusted:
            object.__setattr__(self, "trusted", TrustedKeys([self.signer.public_key]))

    @classmethod
    def of(cls, settings: Settings) -> Rules:
        """The rules of a boot with these settings.

        Raises:
            SettingsError: a key is invalid, the signing key is not trusted, or `cryptography` is needed, but not
                installed. The message names the variables.
        """
        signer, trusted, problems = None, TrustedKeys(), []
        try:
            signer = Signer(settings.signing_key) if settings.signing_key else None
        except SettingsError as error:
            problems.append(f"{PREFIX}SIGNING_KEY: {error}")
        try:
            trusted = TrustedKeys(settings.trusted_keys)
        except SettingsError as error:
            problems.append(f"{PREFIX}TRUSTED_KEYS: {error}")
        if signer and trusted and signer.public_key not in trusted.texts:
            problems.append(
                f"{PREFIX}SIGNING_KEY is not trusted here, so this boot would refuse its own packs: add "
                f"{signer.public_key} to {PREFIX}TRUSTED_KEYS"
            )
        if problems:
            raise SettingsError("; ".join(problems))
        return cls(trusted=trusted, signer=signer)
