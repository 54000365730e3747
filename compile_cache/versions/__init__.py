"""One key between store and cache directory: fetch, publish, compact, copy, prune."""
