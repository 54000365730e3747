"""Functions compiled ahead of time: makes, stores and loads them, and tells whether one fits a call.

Only `adapter.py`, `imports.py`, `options.py` and `switches.py` use torch's private names.
"""
