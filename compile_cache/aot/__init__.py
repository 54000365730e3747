"""Functions compiled ahead of time: the files, how one is made and loaded, and whether it fits a call.

`adapter.py`, `imports.py`, `options.py` and `switches.py` alone use torch's private names.
"""
