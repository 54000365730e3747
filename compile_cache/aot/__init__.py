"""Functions compiled ahead of time: the files, how one is made and loaded, and whether it fits a call.

`adapter.py` and `imports.py` alone use torch's private names.
"""
