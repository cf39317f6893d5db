"""How fast the scripts are on this machine, against what its matrix multiplications allow.

python experiments/throughput.py            all six scripts, 64 environments x 256 steps, 3 rounds
python experiments/throughput.py --quick    16 steps instead of 256

In each round everything is measured once, one after the other, so that a noisy moment of the machine hits all alike;
what is reported is the median over the rounds. Each script runs as it is, in a process of its own, for an iteration;
PPG for a phase of one iteration, with its auxiliary phase. The ceiling is the rate at which the floating point
operations of the network's passes alone could be done, at the speed of a large matrix multiplication measured in the
same round. A forward-backward pass counts as three forward passes, as in the paper (footnote 2).
"""

import argparse
import csv
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
NUM_ENVS = 64
PPG = ["--n-pi", "1", "--no-adjust", "n-pi"]
# name: (script, flags, forward passes of one network for each environment step, what it is compared with)
CONFIGS = {
    "ppo": ("ppo", [], 1 + 3 * 3, None),
    "ppo_ewma": ("ppo_ewma", [], 1 + 3 * 3 + 3, "ppo"),
    "ppg_dual": ("ppg", PPG, 2 * (1 + 7 * 3), None),
    "ppg_detach": ("ppg", [*PPG, "--arch", "detach"], 1 + 7 * 3, None),
    "ppg_ewma": ("ppg_ewma", PPG, 2 * (1 + 7 * 3) + 1, "ppg_dual"),
    "staleness": ("staleness", ["--staleness", "1"], 1 + 3 * 3 + 1, None),
}


def load(script):
    spec = importlib.util.spec_from_file_location(script, ROOT / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anonymous_memory():
    """Bytes of memory that belong to no file, now; pages of PPG's buffer file do not count."""
    try:
        return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    except (OSError, TypeError):
        import resource  # elsewhere than on Linux: the most there has ever been, files included

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_script(script, flags):
    """Run a script in this process, and note when each of its parts begins. Prints the result as JSON."""
    module = load(script)
    marks, peak, stop = [], [0], threading.Event()

    class Bar(module.tqdm):  # the script names its phases to the progress bar
        def set_description(self, description, *args, **kwargs):
            if not marks or marks[-1][1] != description:
                marks.append((time.time(), description))
            super().set_description(description, *args, **kwargs)

    class Environments(module.ProcgenGym3Env):
        def act(self, action):
            if len(marks) == 1:
                marks.insert(0, (time.time(), "first step"))
            super().act(action)

    def watch():
        while not stop.wait(0.02):
            peak[0] = max(peak[0], anonymous_memory())

    module.tqdm, module.ProcgenGym3Env = Bar, Environments
    thread = threading.Thread(target=watch)
    thread.start()
    sys.argv = [f"{script}.py", *flags]
    with open(os.devnull, "w") as devnull:
        sys.stdout, stdout = devnull, sys.stdout
        module.main()
        sys.stdout = stdout
    stop.set()
    thread.join()
    end = time.time()
    first_step, marks = marks[0][0], marks[1:]
    starts = [i for i, (_, description) in enumerate(marks) if description == "collect"]
    last = marks[starts[-1] :]
    print(
        json.dumps(
            {"first_step": first_step, "rollout": last[1][0] - last[0][0], "total": end - last[0][0], "peak": peak[0]}
        )
    )


def measure_machine(device):
    """Multiply-add operations a second of a large matrix product; frames a second of a forward pass; its operations."""

    def seconds(function, repeat):
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.time()
        for _ in range(repeat):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.time() - start) / repeat

    a, b = (torch.randn(2048, 2048, device=device) for _ in range(2))
    peak = 2 * 2048**3 / min(seconds(lambda: a @ b, 4) for _ in range(5))
    agent = load("ppo").Agent([16, 32, 32]).to(device, memory_format=torch.channels_last)
    obs = torch.randint(256, (NUM_ENVS, 64, 64, 3), dtype=torch.uint8, device=device)
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            agent(obs)
        forward = NUM_ENVS / min(seconds(lambda: agent(obs), 8) for _ in range(5))
    return peak, forward, counter.get_total_flops() / NUM_ENVS


def measure_environments():
    """Environment steps a second, without any network."""
    import numpy as np
    from procgen import ProcgenGym3Env

    envs = ProcgenGym3Env(NUM_ENVS, "starpilot", rand_seed=1)
    actions = np.random.default_rng(1).integers(15, size=(300, NUM_ENVS))
    start = time.time()
    for action in actions:
        envs.act(action)
        envs.observe()
    return actions.size / (time.time() - start)


def run(name, num_envs, num_steps, warm_up, device, folder):
    """One script in a process of its own. The iterations before the last are not timed."""
    script, flags, _, _ = CONFIGS[name]
    iterations = 1 + warm_up + (script == "staleness")  # whose first one only collects
    command = [sys.executable, __file__, "--measure", script, "--env-id", "starpilot", "--num-envs", num_envs]
    command += ["--num-steps", num_steps, "--total-timesteps", iterations * num_envs * num_steps, "--device", device]
    command += ["--checkpoint-seconds", 10**9, "--run-dir", Path(folder) / f"{name}-{time.time()}", *flags]
    started = time.time()
    result = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"throughput.py: {name} failed: {result.stderr.strip().splitlines()[-1]}")
    result = json.loads(result.stdout)
    result["set_up"] = result.pop("first_step") - started
    return result


def measure(args, device, folder):
    """All rounds: {what: [a value for each round]}."""
    values = {}
    num_steps = 16 if args.quick else 256
    runs = [(name, NUM_ENVS) for name in CONFIGS] + [("ppo", 16), ("ppo", 256)]
    progress = tqdm(total=args.rounds * (2 + len(runs)), disable=not sys.stderr.isatty())

    def note(what, value):
        values.setdefault(what, []).append(value)

    def tell(what):
        progress.set_description(what)
        progress.update()

    for _ in range(args.rounds):
        tell("machine")
        peak, forward, operations = measure_machine(device)
        note("peak", peak)
        note("forward", forward)
        tell("environments")
        note("environments", measure_environments())
        for name, num_envs in runs:
            tell(name)
            # The same number of steps for every number of environments, so that all do the same work.
            result = run(name, num_envs, num_steps * NUM_ENVS // num_envs, args.quick, device.type, folder)
            key, steps = (name, num_envs), num_steps * NUM_ENVS
            note((*key, "total"), result["total"])
            note((*key, "steps_per_second"), steps / result["total"])
            note((*key, "rollout"), steps / result["rollout"])
            note((*key, "update"), steps / (result["total"] - result["rollout"]))
            note((*key, "ceiling_fraction"), steps / result["total"] * CONFIGS[name][2] * operations / peak)
            note((*key, "rollout_fraction"), steps / result["rollout"] / forward)
            note((*key, "peak_anon_gb"), result["peak"] / 1e9)
            note((*key, "set_up"), result["set_up"])
    progress.close()
    return values


def table(values):
    """A row for each script, of medians over the rounds."""
    rows = []
    for name, (_, _, _, base) in CONFIGS.items():
        columns = [
            "steps_per_second",
            "ceiling_fraction",
            "rollout",
            "update",
            "rollout_fraction",
            "peak_anon_gb",
            "set_up",
        ]
        row = {"name": name} | {x: statistics.median(values[name, NUM_ENVS, x]) for x in columns}
        pairs = zip(values[name, NUM_ENVS, "total"], values[base or name, NUM_ENVS, "total"], strict=True)
        row["time_over_base"] = statistics.median(mine / other for mine, other in pairs)
        rows.append(row)
    return rows


def report(values, rows, device):
    peaks = values["peak"]
    print(f"device {device}, {torch.get_num_threads()} threads; {len(peaks)} rounds, medians")
    low, middle, high = (f(peaks) / 1e9 for f in (min, statistics.median, max))
    print(f"matrix multiplication {middle:,.0f} GFLOP/s ({low:,.0f} to {high:,.0f})")
    print(f"environments alone {statistics.median(values['environments']):,.0f} steps/s")
    print(f"forward pass alone {statistics.median(values['forward']):,.0f} frames/s\n")
    headings = ["script", "steps/s", "of the ceiling", "rollout steps/s", "of the forward pass", "update steps/s"]
    headings += ["time / base", "peak memory", "first step after"]
    print(f"| {' | '.join(headings)} |")
    print("|---" * len(headings) + "|")
    for row in rows:
        # In the dual network and with a value network of its own, a rollout's forward pass is two.
        passes = 2 if row["name"] in ("ppg_dual", "ppg_ewma") else 1
        print(
            f"| {row['name']} | {row['steps_per_second']:.0f} | {row['ceiling_fraction']:.0%} | {row['rollout']:.0f} "
            f"| {passes * row['rollout_fraction']:.0%} | {row['update']:.0f} | {row['time_over_base']:.3f} "
            f"| {row['peak_anon_gb']:.2f} GB | {row['set_up']:.1f} s |"
        )
    rates = {n: statistics.median(values["ppo", n, "steps_per_second"]) for n in (16, 64, 256)}
    print("\nPPO at " + ", ".join(f"{n} environments {rate:.0f} steps/s" for n, rate in rates.items()))


def plot(rows, file):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    names = [row["name"] for row in rows]
    bars = axes.bar(names, [row["ceiling_fraction"] for row in rows], color="#0072B2")
    axes.bar_label(bars, [f"{row['steps_per_second']:.0f}\nsteps/s" for row in rows], fontsize=8, padding=2)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.text(len(names) - 0.4, 1.01, "ceiling", ha="right", va="bottom", fontsize=8)
    axes.set(ylabel="fraction of the GEMM ceiling", ylim=(0, 1.15))
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(file, dpi=200)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 steps instead of 256, after a warm-up iteration")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of everything (3)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA if there is one")
    parser.add_argument("--csv", metavar="FILE", help="write the table here")
    parser.add_argument("--plot", metavar="FILE", help="draw it as bars")
    args = parser.parse_args()
    for flag, file in (("--csv", args.csv), ("--plot", args.plot)):
        if file and not Path(file).parent.is_dir():
            parser.error(f"{flag} {file}: there is no folder {Path(file).parent}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be 1 or more")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device; use cpu or auto")
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        values = measure(args, device, folder)
    rows = table(values)
    report(values, rows, device)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure_script(sys.argv[2], sys.argv[3:])
    else:
        main()
