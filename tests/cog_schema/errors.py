"""The one error of this package."""

from __future__ import annotations


class SchemaError(ValueError):
    """Cog would refuse a signature, or would drop a part of it without a word. The message has a line each."""
