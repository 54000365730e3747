"""The second process, which compiles while the first one serves eager."""
