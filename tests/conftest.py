"""What holds for all tests."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# Where the files of tests run side by side, each process, and the servers that it starts, compute on its share of the
# cores. Set before torch is imported.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(share))

# With AVX-512 MKL's sums differ in their last bit by where a tensor lies in memory; pictures are compared bit for bit.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

# SDNQ compiles its functions unless it is told not to before its first import. Transplant tells it; a test that imports
# sdnq first would not, and compiling takes minutes. Tests of compiled values run in processes of their own.
os.environ.setdefault("SDNQ_USE_TORCH_COMPILE", "0")

# A shell starts background jobs with SIGINT ignored, and programs started from there would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long random data take to be made says nothing on a machine that does something else beside.
settings.register_profile("transplant", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("transplant")
