"""Moves a key's artifacts between store and cache directory: fetch, publish, merge, copy, prune."""
