"""Where packs are kept: one class for each kind of store."""
