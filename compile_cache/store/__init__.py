"""Where packs are kept: one module for each kind of store."""
