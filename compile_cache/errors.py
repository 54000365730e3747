"""Every error this library raises.

CompileCacheError
├── SettingsError            a setting has a value it cannot have
├── NotAModuleError          boot.compile() was given something that is no torch.nn.Module
├── CacheDirectoryError      the local cache directory cannot be made, locked or written
├── PackError                a pack is damaged, foreign or hostile; it counts as absent
│   └── PackForbidden        a pack may be intact, but these settings, or its place, forbid its use
│       ├── ManifestTooLarge it names more than the limits allow
│       └── TooManyPacks     the other packs of its key leave no room for it
├── NotPrecompilable         a region cannot be compiled ahead of time, or not so that it is surely right elsewhere
├── ArtifactError            a precompiled region is damaged, or does not belong here
└── StoreError               the object store did not do what was asked
    ├── StoreUnavailable     it did not answer, or not in time
    ├── StoreAccessDenied    it answered that these credentials may not
    └── ObjectNotFound       the object, or the bucket itself, is not there

Each message says what happened, where, and what to do about it. A boot lets only `SettingsError` through: it is the
user's own input. Every other one costs speed, not the boot.
"""


class CompileCacheError(Exception):
    """The root of the tree."""


class SettingsError(CompileCacheError, ValueError):
    """A setting has a value it cannot have. The message names the variable."""


class NotAModuleError(CompileCacheError, TypeError):
    """`boot.compile()` was given something that is no `torch.nn.Module`. The boot serves it eager."""


class CacheDirectoryError(CompileCacheError):
    """The local cache directory cannot be made, locked or written."""


class PackError(CompileCacheError):
    """A pack is damaged, foreign or hostile. Nothing of it has been used."""


class PackForbidden(PackError):
    """A pack may be intact, but these settings, or its place in the store, forbid its use."""


class ManifestTooLarge(PackForbidden):
    """A pack's manifest is longer, or names more files, than the limits allow."""


class TooManyPacks(PackForbidden):
    """The other packs of its key leave no room for it within the limits."""


class NotPrecompilable(CompileCacheError):
    """A region cannot be compiled ahead of time, or not so that it is surely right in another process."""


class ArtifactError(CompileCacheError):
    """A precompiled region is damaged, or does not belong here. It has not been unpickled, or is not used."""


class StoreError(CompileCacheError):
    """The object store did not do what was asked."""


class StoreUnavailable(StoreError):
    """The store did not answer, or not in time."""


class StoreAccessDenied(StoreError):
    """The store answered that these credentials may not do this."""


class ObjectNotFound(StoreError):
    """The object, or the bucket itself, is not there."""
