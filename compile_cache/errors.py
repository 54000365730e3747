"""Every error this library raises.

CompileCacheError
├── SettingsError            a setting is unknown or has an invalid value
├── CacheDirectoryError      the local cache directory cannot be made, locked or written
├── PackError                a pack is damaged, foreign or hostile; it counts as absent
├── NotPrecompilable         a region cannot be compiled ahead of time, or might be wrong in another process
├── ArtifactError            a precompiled region is damaged, or does not belong here
└── StoreError               a request to the object store failed
    ├── StoreUnavailable     it did not answer, or not in time
    ├── StoreAccessDenied    it answered that these credentials may not
    └── ObjectNotFound       the object, or the bucket itself, is not there

Each message says what happened, where, and what to do about it. A boot raises only `SettingsError`, because settings
are the user's own input. Every other error costs speed, not the boot.
"""


class CompileCacheError(Exception):
    """The root of the tree."""


class SettingsError(CompileCacheError, ValueError):
    """A setting is unknown or has an invalid value. The message names the variable."""


class CacheDirectoryError(CompileCacheError):
    """The local cache directory cannot be made, locked or written."""


class PackError(CompileCacheError):
    """A pack is damaged, foreign or hostile. Nothing of it has been used."""


class NotPrecompilable(CompileCacheError):
    """A region cannot be compiled ahead of time, or its artifact might be wrong in another process."""


class ArtifactError(CompileCacheError):
    """A precompiled region is damaged, or does not belong here. It has not been unpickled, or is not used."""


class StoreError(CompileCacheError):
    """A request to the object store failed."""


class StoreUnavailable(StoreError):
    """The store did not answer, or not in time."""


class StoreAccessDenied(StoreError):
    """The store answered that these credentials may not do this."""


class ObjectNotFound(StoreError):
    """The object, or the bucket itself, is not there."""
