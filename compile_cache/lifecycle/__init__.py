"""One boot in the order it happens: restore, preload, warm-up, report, publish."""
