"""The scripts as throughput.py runs them: with which flags, watched phase by phase; as a program, one of them timed."""

import contextlib
import json
import os
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

from lab.common import fail, load_script

PPG = ["--n-pi", "1", "--no-adjust", "n-pi"]


@dataclass
class Config:
    """A script to measure, and how many forward passes of one network it needs for each environment step."""

    script: str
    rollout: int
    update: int  # a forward-backward pass is three
    flags: list = field(default_factory=list)
    base: str = ""  # what its time is compared with
    first: int = 1  # the first iteration that trains


CONFIGS = {
    "ppo": Config("ppo", 1, 3 * 3),
    "ppo_ewma": Config("ppo_ewma", 1, 3 * 3 + 3, base="ppo"),
    # PPG: one policy epoch and six auxiliary ones; the pass that notes the policy before those is not counted
    "ppg_dual": Config("ppg", 2, 2 * 7 * 3, PPG),
    "ppg_detach": Config("ppg", 1, 7 * 3, [*PPG, "--arch", "detach"]),
    "ppg_ewma": Config("ppg_ewma", 2, 2 * 7 * 3 + 1, PPG, base="ppg_dual"),
    "staleness": Config("staleness", 1, 3 * 3 + 1, ["--staleness", "1"], first=2),
}


def flags_of(name, num_envs, num_steps, iterations, args):
    flags = ["--env-id", "starpilot", "--num-envs", num_envs, "--num-steps", num_steps, "--device", args.device]
    flags += ["--total-timesteps", iterations * num_envs * num_steps, "--checkpoint-seconds", 10**9]
    flags += ["--channels", *args.channels, *["--bf16"] * args.bf16, *["--compile"] * args.compile]
    return [*map(str, flags), *CONFIGS[name].flags]


def parsed(name, num_envs, num_steps, args):
    """The flags as the script sees them; sizes that it cannot run with end here."""
    module = load_script(CONFIGS[name].script)
    sizes = f"--num-envs {args.num_envs} --num-steps {args.num_steps}"
    module.fail = lambda message: fail(f"{sizes}: {module.SCRIPT}.py says: {message}")
    with mock.patch.object(sys, "argv", [sys.argv[0], *flags_of(name, num_envs, num_steps, 1, args)]):
        return module.parse_args()[0]


def run_script(script, flags, at, change=lambda module: None):
    """Run a script in this process; at(phase) is called as collect, prepare, optimise, auxiliary and log begin."""
    module = load_script(script)

    class Run(module.Run):
        def each(self, items, label):
            at(re.match(r"\w+", label)[0])
            yield from super().each(items, label)
            if label.startswith("collect"):
                at("prepare")

        def end_iteration(self, iteration, stats):
            at("log")
            super().end_iteration(iteration, stats)

    module.Run = Run
    change(module)
    command = mock.patch.object(sys, "argv", [f"{script}.py", *map(str, flags)])
    with command, open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
        module.main()


def synchronise():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def time_script(script, flags):
    """Time a script's last iteration, and print that as JSON."""
    iterations, peak, stop = [], [0], threading.Event()

    def at(phase):
        synchronise()
        if phase == "collect":
            iterations.append({"forward": 0})
        iterations[-1].setdefault(phase, time.time())

    def change(module):
        class Agent(module.Agent):
            def __call__(self, obs):
                start, result = time.time(), super().__call__(obs)
                if "prepare" not in iterations[-1]:  # in the rollout
                    synchronise()
                    iterations[-1]["forward"] += time.time() - start
                return result

        module.Agent = Agent

    def watch():
        """Memory that belongs to no file: pages of PPG's buffer file do not count."""
        while not stop.wait(0.02):
            kilobytes = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]
            peak[0] = max(peak[0], 1024 * int(kilobytes))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    run_script(script, flags, at, change)
    stop.set()
    thread.join()
    timed = iterations[-1]
    result = {"first_step": iterations[0]["collect"], "forward": timed["forward"], "peak_anon_gb": peak[0] / 1e9}
    result |= {"rollout": timed["prepare"] - timed["collect"], "total": timed["log"] - timed["collect"]}
    if torch.cuda.is_initialized():
        result["peak_device_gb"] = torch.cuda.max_memory_allocated() / 1e9
    print(json.dumps(result))


if __name__ == "__main__":
    time_script(sys.argv[1], sys.argv[2:])
