"""The command `compile-cache`: lists, verifies, copies and prunes stores, and explains what a boot would find."""

from __future__ import annotations

import sys

_NEEDED = ("typer", "rich", "jinja2", "msgspec")


def main() -> None:
    """Run the command. The library itself needs none of the command's packages, so they may be missing."""
    try:
        from compile_cache.cli.app import app

        app()
    except KeyboardInterrupt:  # during the imports; later, the command handles it
        sys.exit(130)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        remedy = "pip install '.[cli]' in a checkout of cog-compile-cache"
        sys.exit(f"error: compile-cache needs the package {error.name}: {remedy}")
