"""The stored file: its format, manifest and signature, and parallel reading."""
