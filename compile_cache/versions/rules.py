"""The rules by which packs are used or refused, for boots and for the command `compile-cache`."""

from __future__ import annotations

from dataclasses import dataclass, field

from compile_cache.pack.manifest import Limits
from compile_cache.pack.signing import Signer, TrustedKeys
from compile_cache.settings import Settings


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits, the trusted keys (without any, every pack is used), and the signer of new packs.

    A signer without trusted keys trusts only itself. Otherwise compaction would re-sign packs that anybody uploaded.
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
            SettingsError: `cryptography` is needed, but not installed.
        """
        signer = Signer(settings.signing_key) if settings.signing_key else None
        return cls(Limits(size_bytes=settings.max_restore_bytes), TrustedKeys(settings.trusted_keys), signer)
