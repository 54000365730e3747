"""Imported by each Python that tests start, before its program: conftest.py puts this folder into PYTHONPATH.

Importing torch and its compiler makes a million objects that stay. Python's garbage collector looks at them again and
again during the imports, and once more at the exit: half of the 4 seconds that such a process takes before it does
anything. Here the collector looks less often, and at the exit not at all. Everything else of an exit stays.

And no process has a low priority: beside other tests on two CPUs, a compile would take minutes. KEEPS_PRIORITY in the
environment leaves that to the process.
"""

import atexit
import gc
import os

gc.set_threshold(500_000, 20, 100)
atexit.register(gc.freeze)
if "KEEPS_PRIORITY" not in os.environ:
    os.nice = lambda increment: 0
