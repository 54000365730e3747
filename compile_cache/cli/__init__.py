"""The command `compile-cache`: lists, verifies, copies and prunes stores, and explains what a boot would find."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command. The library itself needs none of the command's packages, so they may be missing."""
    try:
        from compile_cache.cli.app import app

        app()
    except ModuleNotFoundError as error:
        remedy = "pip install '.[cli]' in a checkout of cog-compile-cache"
        sys.exit(f"error: compile-cache needs the package {error.name}: {remedy}")
