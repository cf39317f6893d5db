"""What several tests need: the scripts as modules, and ways to run them."""

import contextlib
import importlib.util
import io
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
SCRIPTS = ["ppo", "ppo_ewma", "ppg", "ppg_ewma", "staleness"]
EWMA = ["ppo_ewma", "ppg_ewma"]
PPG = ["ppg", "ppg_ewma"]

# Three iterations of 32 steps: small enough for a second or two, and still with all the parts.
TINY = "--env-id chaser --distribution-mode easy --num-envs 4 --num-steps 8 --num-minibatches 2 --channels 2 3 4"
TINY = [*TINY.split(), "--device", "cpu", "--total-timesteps", "96", "--checkpoint-seconds", "0"]
TINY_PPG = ["--n-pi", "2", "--no-adjust", "n-pi", "--aux-epochs", "2", "--aux-rollouts", "3"]
TINY_STALE = ["--staleness", "1"]


def tiny(script):
    return TINY + (TINY_PPG if script in PPG else TINY_STALE if script == "staleness" else [])


@cache
def load(script):
    spec = importlib.util.spec_from_file_location(script, ROOT / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def command_line(script, flags):
    """The given flags in sys.argv, and the signal handlers as they were afterwards."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with mock.patch.object(sys, "argv", [f"{script}.py", *map(str, flags)]):
            yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def parse(script, *flags, module=None):
    """The flags as the script sees them, or another module, and the values in use."""
    module = module or load(script)
    with command_line(script, flags):
        args = module.parse_args()[0]
    return args, module.adjust_for_batch_size(args)


def train(script, run_dir, *flags):
    """Run a script in this process (saves starting Python and torch) and return its final checkpoint."""
    with command_line(script, [*flags, "--run-dir", run_dir]), contextlib.redirect_stdout(io.StringIO()):
        load(script).main()
    return checkpoint(run_dir)


def call(program, *flags):
    """Exit code, standard output and standard error of a program's main(), in this process: saves its imports."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with command_line(program.__name__, flags), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            program.main()
        except SystemExit as end:
            code = end.code or 0
    return code, out.getvalue(), err.getvalue()


def start(script, *flags, **options):
    """Start a script as a user does, in a process of its own."""
    command = [sys.executable, str(ROOT / f"{script}.py"), *map(str, flags)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(command, **options)


def run(script, *flags, **options):
    """Run a script to its end in a process of its own: exit code, standard output, standard error."""
    process = start(script, *flags, **options)
    out, err = process.communicate()
    return process.returncode, out, err


def read_until(process, text):
    """What the process prints, up to the line that has this text."""
    seen = ""
    while text not in seen:
        line = process.stdout.readline()
        assert line, f"ended before {text!r}: {seen}"
        seen += line
    return seen


def checkpoint(run_dir):
    return torch.load(Path(run_dir) / "checkpoint.pt", weights_only=True)


def flatten(x, name=""):
    """Every leaf of nested dicts, lists and tuples, by its path."""
    if isinstance(x, dict):
        return {k: v for key in x for k, v in flatten(x[key], f"{name}/{key}").items()}
    if isinstance(x, (list, tuple)):
        return {k: v for i, item in enumerate(x) for k, v in flatten(item, f"{name}/{i}").items()}
    return {name: x}


def differences(a, b, but=()):
    """The paths at which two checkpoints are not exactly equal."""
    a, b = flatten(a), flatten(b)
    names = {name for name in a.keys() | b.keys() if not name.startswith(tuple(f"/{x}" for x in but))}

    def same(x, y):
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)
        return type(x) is type(y) and x == y

    return sorted(name for name in names if not (name in a and name in b and same(a[name], b[name])))


def largest_difference(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def curves(run_dir):
    """{tag: [(step, value), ...]} of a run's TensorBoard logs, as TensorBoard itself would show them."""
    logs = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    logs.Reload()
    return {tag: [(e.step, e.value) for e in logs.Scalars(tag)] for tag in logs.Tags()["scalars"]}


@contextlib.contextmanager
def float64():
    """Let a script compute in float64, so that rounding can neither hide an error nor look like one."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def environment(**changes):
    return {**os.environ, **changes}
