"""Settings of the tests alone; benchmarks share those of the root's conftest.py. Read before torch is imported."""

import os

# The last bits of a result depend on the number of threads: the same here on every machine. One, because tests run side
# by side (make test), and tensors this small gain nothing from more.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
