"""What a sweep will cost, from a few iterations of the real scripts on this machine."""

import os
import shutil
import subprocess
import tempfile
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np

from lab.common import fail
from lab.logs import SPEED, read_scalars
from lab.running import hours, program

FRAME = 64 * 64 * 3  # bytes of an observation
Cost = namedtuple("Cost", "rate startup events checkpoint")  # steps/s, seconds, bytes an iteration, bytes


def measure(run, threads):
    """Run a few short iterations in a temporary folder. The cost of a step hardly depends on an iteration's length."""
    flags = dict(run.flags)
    if not shutil.which("nvidia-smi"):  # a GPU is fast only with full minibatches
        pieces = 8 // min(8, flags["num-envs"])  # that a rollout must split into, for 8 minibatches
        flags["num-steps"] = min(flags["num-steps"], max(pieces, 512 // flags["num-envs"]))
    iteration = flags["num-envs"] * flags["num-steps"]
    flags["total-timesteps"] = max(3 * iteration, 256)
    if "n-pi" in flags:  # an auxiliary phase each iteration: the same number of passes over every frame
        flags |= {"n-pi": 1, "no-adjust": [*flags.get("no-adjust", []), "n-pi"]}
    if "staleness" in flags:
        flags["staleness"] = 0  # its queue of frames is counted below
    words = replace(run, flags=flags).words()[1:]
    with tempfile.TemporaryDirectory() as folder, program(run) as (command, more):
        folder, started = Path(folder, "run"), time.time()
        command += [*words, "--run-dir", str(folder)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | more
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        seconds = time.time() - started
        if done.returncode:
            fail(f"{run.script} fails: {done.stderr.strip().splitlines()[-1]}")
        rates = read_scalars(folder, [SPEED])[0][SPEED][:, 1]
        events = sum(path.stat().st_size for path in folder.glob("events*")) / len(rates)
        rate = max(1, np.median(rates[1:]))  # the first iteration warms up
        startup = max(0, seconds - sum(iteration / x for x in rates))
        return Cost(rate, startup, events, (folder / "checkpoint.pt").stat().st_size)


def estimate(runs, threads, workers):
    """Measure each script at each batch size, and print what all runs will take."""
    costs, seconds, disk, buffers = {}, 0, 0, [0]
    for run in runs:
        kind = run.script, run.flags["num-envs"]
        if kind not in costs:
            costs[kind] = measure(run, threads)
            print(f"  {run.script:<13} {kind[1]:>4} environments: {costs[kind].rate:,.0f} steps/s measured", flush=True)
        cost, iteration = costs[kind], run.flags["num-envs"] * run.flags["num-steps"]
        seconds += cost.startup + run.steps / cost.rate
        queue = run.flags.get("staleness", 0) * iteration * FRAME  # is part of the checkpoint
        disk += cost.checkpoint + queue + run.steps / iteration * (cost.events + 80)  # and a line in the log
        if "n-pi" in run.flags:
            adjusted = "n-pi" not in run.flags.get("no-adjust", [])
            envs = run.flags["reference-num-envs" if adjusted else "num-envs"]
            buffers.append(run.flags["n-pi"] * envs * run.flags["num-steps"] * FRAME)
    buffer = max(buffers) * min(workers, len(runs))
    print(f"time: about {hours(seconds / workers)} with {workers} at a time ({hours(seconds)} of one)")
    print(f"disk: about {gigabytes(disk)}, and {gigabytes(buffer)} more for PPG's buffers while runs last")


def gigabytes(size):
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
