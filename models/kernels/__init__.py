"""Operators of our own, in Triton."""
