"""One thread for torch, in this process and in those that tests start: tests run side by side, one on each core."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
