"""The stores of packs: one module for each kind."""
