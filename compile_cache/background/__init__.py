"""The second process, which compiles. Meanwhile the first one serves eager, or waits."""
