"""Functions compiled ahead of time: the artifacts, the adapter to torch, guards and descriptions."""
