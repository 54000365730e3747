"""Weights on their way from files to the GPU, while Python imports."""
