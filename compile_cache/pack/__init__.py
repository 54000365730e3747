"""The stored file: its format, manifest and signature, and reading it in parallel."""
