"""How fast the scripts are on this machine, against what its matrix multiplications allow.

python experiments/throughput.py            64 environments x 256 steps, 3 rounds: 1.8 hours on two cores
python experiments/throughput.py --quick    16 steps instead of 256, 1 round: minutes
python experiments/throughput.py --profile  where the time of a forward-backward pass goes: a minute

In each round everything is measured once, one after the other, so that a noisy moment of the machine hits all alike;
what is reported is the median over the rounds. Each script runs as it is, in a process of its own, for an iteration;
PPG for a phase of one iteration, with its auxiliary phase. The ceiling is the rate at which the floating point
operations of the network's passes alone could be done, at the speed of a large matrix multiplication, sustained for
seconds just before. A forward-backward pass counts as three forward passes, as in the paper (footnote 2).

Columns of the CSV, beside the name:
  steps_per_second   environment steps in an iteration, over its whole time
  ceiling_fraction   that, over the ceiling
  rollout, update    environment steps over the time of either part alone
  rollout_fraction   share of the rollout's time that its forward passes take; the rest is environments and all else
  peak_anon_gb       most memory that belonged to no file (RssAnon)
  set_up             seconds from the command to the first environment step
  gemm_gflops        speed of the matrix multiplication just before, in GFLOP/s
  time_over_base     time of an iteration over that of the script without EWMA
"""

import argparse
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
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from procgen import ProcgenGym3Env
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
PPG = ["--n-pi", "1", "--no-adjust", "n-pi"]


@dataclass
class Config:
    """A script to measure, and how many forward passes of one network it needs for each environment step."""

    script: str
    rollout: int
    update: int  # a forward-backward pass is three
    flags: list = field(default_factory=list)
    base: str = ""  # what its time is compared with


CONFIGS = {
    "ppo": Config("ppo", 1, 3 * 3),
    "ppo_ewma": Config("ppo_ewma", 1, 3 * 3 + 3, base="ppo"),
    # PPG: one policy epoch and six auxiliary ones; the pass that notes the policy before those is not counted
    "ppg_dual": Config("ppg", 2, 2 * 7 * 3, PPG),
    "ppg_detach": Config("ppg", 1, 7 * 3, [*PPG, "--arch", "detach"]),
    "ppg_ewma": Config("ppg_ewma", 2, 2 * 7 * 3 + 1, PPG, base="ppg_dual"),
    "staleness": Config("staleness", 1, 3 * 3 + 1, ["--staleness", "1"]),
}
# What PyTorch's profiler calls operations, and what we call them; the first that fits.
KINDS = [
    ("convolution_backward", "convolution, gradient"),
    ("convolution", "convolution"),
    ("mm|linear", "dense"),
    ("max_pool2d", "pooling"),
    ("fill_|zero_", "zeros to begin with"),
    ("relu|threshold|clamp", "ReLU"),
    ("add|sum", "sums"),
    ("copy_|div|mul", "frames to numbers, copies"),
]
OTHER_SIZES = {"ppo": [16, 256]}  # environments, with fewer or more steps each, to see whether cost is linear


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
    """Run a script in this process, and time the last of its iterations. Prints the result as JSON."""
    module = load(script)
    noted, stop = {"peak": 0}, threading.Event()

    class Bar(module.tqdm):  # the script names its phases to the progress bar
        def set_description(self, description, *args, **kwargs):
            if description == "collect":
                noted.update(begin=time.time(), forward=0)
            super().set_description(description, *args, **kwargs)

    class Environments(module.ProcgenGym3Env):
        def act(self, action):
            noted.setdefault("first_step", time.time())
            super().act(action)

        def observe(self):
            result = super().observe()
            noted["rollout"], noted["rollout_forward"] = time.time() - noted["begin"], noted["forward"]
            return result

    class Agent(module.Agent):
        def __call__(self, obs):
            start = time.time()
            result = super().__call__(obs)
            if obs.is_cuda:
                torch.cuda.synchronize()
            noted["forward"] += time.time() - start
            return result

    def watch():
        while not stop.wait(0.02):
            noted["peak"] = max(noted["peak"], anonymous_memory())

    module.tqdm, module.ProcgenGym3Env, module.Agent = Bar, Environments, Agent
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    sys.argv = [f"{script}.py", *flags]
    with open(os.devnull, "w") as devnull:
        sys.stdout, stdout = devnull, sys.stdout
        module.main()
        sys.stdout = stdout
    noted["total"] = time.time() - noted["begin"]
    stop.set()
    thread.join()
    print(json.dumps(noted))


def seconds(function, device, sustained):
    """Mean time of a call, over so many seconds: what the machine keeps up, as for the scripts, not its best moment."""
    for _ in range(3):
        function()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < sustained:
        function()
        calls += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def measure_machine(args):
    """Operations a second of a large matrix product; operations of the network's forward pass for a frame."""
    sustained = 1 if args.quick else 5
    a, b = (torch.randn(2048, 2048, device=args.device) for _ in range(2))
    peak = 2 * 2048**3 / seconds(lambda: a @ b, args.device, sustained)
    agent = load("ppo").Agent(args.channels).to(args.device, memory_format=torch.channels_last)
    obs = torch.randint(256, (args.num_envs, 64, 64, 3), dtype=torch.uint8, device=args.device)
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            agent(obs)
    return peak, counter.get_total_flops() / args.num_envs


def profile(args, frames=64):
    """Print which operations the time of a forward-backward pass goes to, and at what speed they compute."""
    agent = load("ppo").Agent(args.channels).to(args.device, memory_format=torch.channels_last)
    obs = torch.randint(256, (frames, 64, 64, 3), dtype=torch.uint8, device=args.device)

    def forward_backward():
        logits, value = agent(obs)
        (logits.sum() + value.sum()).backward()

    with FlopCounterMode(display=False) as counter:
        forward_backward()
    counts = {str(operation): n for operation, n in counter.get_flop_counts()["Global"].items()}
    operations = {"convolution": counts["aten.convolution"]}
    operations["convolution, gradient"] = counts["aten.convolution_backward"]
    operations["dense"] = sum(counts.values()) - sum(operations.values())
    peak = measure_machine(args)[0]
    whole, passes = seconds(forward_backward, args.device, 1 if args.quick else 5), 10 if args.quick else 100
    with torch.profiler.profile() as profiler:
        for _ in range(passes):
            forward_backward()
        if args.device.type == "cuda":
            torch.cuda.synchronize()
    times = dict.fromkeys(operations, 0)
    for event in profiler.key_averages():
        kind = next((kind for pattern, kind in KINDS if re.search(pattern, event.key)), "other")
        own = event.self_device_time_total if args.device.type == "cuda" else event.self_cpu_time_total
        times[kind] = times.get(kind, 0) + own / 1e6 / passes
    print(f"A forward-backward pass of {frames} frames on {args.device}, {torch.get_num_threads()} CPU threads")
    whole_pass = sum(operations.values()) / whole / peak
    print(f"matrix multiplication {peak / 1e9:,.0f} GFLOP/s; the whole pass {whole_pass:.0%} of it\n")
    print("| operation | ms | of the time | GFLOP/s | of the matrix multiplication |\n|---|---|---|---|---|")
    for kind, time_ in sorted(times.items(), key=lambda item: -item[1]):
        speed = operations.get(kind, 0) / time_
        speeds = f"{speed / 1e9:.0f} | {speed / peak:.0%}" if speed else "|"
        print(f"| {kind} | {1e3 * time_:.1f} | {time_ / sum(times.values()):.0%} | {speeds} |")
    products = sum(operations.values()) / sum(times[kind] for kind in operations)
    print(f"\nconvolutions and dense layers alone: {products / peak:.0%} of the matrix multiplication")


def measure_environments(num_envs):
    """Environment steps a second, without any network."""
    envs = ProcgenGym3Env(num_envs, "starpilot", rand_seed=1)
    actions = np.random.default_rng(1).integers(15, size=(300, num_envs))
    start = time.perf_counter()
    for action in actions:
        envs.act(action)
        envs.observe()
    return actions.size / (time.perf_counter() - start)


def measure_run(name, num_envs, args, folder):
    """One script in a process of its own. Of several iterations the last is timed."""
    config, num_steps = CONFIGS[name], args.num_steps * args.num_envs // num_envs
    iterations = 1 + args.quick + (name == "staleness")  # quick: after a warm-up; stale: the first one only collects
    flags = ["--env-id", "starpilot", "--num-envs", num_envs, "--num-steps", num_steps, "--device", args.device.type]
    flags += ["--total-timesteps", iterations * num_envs * num_steps, "--channels", *args.channels]
    flags += ["--checkpoint-seconds", 10**9, "--run-dir", Path(folder) / f"{name}-{time.time()}", *config.flags]
    started = time.time()
    command = [sys.executable, __file__, "--measure", config.script, *map(str, flags)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"throughput.py: {name} failed: {result.stderr.strip().splitlines()[-1]}")
    result = json.loads(result.stdout)
    result["set_up"] = result.pop("first_step") - started
    return result


def measure(args, folder):
    """All rounds: {what: [a value for each round]}, where what is a word, or a name, environments and a column."""
    values = {}
    runs = [(name, args.num_envs) for name in CONFIGS]
    runs += [(name, num_envs) for name, sizes in OTHER_SIZES.items() for num_envs in sizes]
    progress = tqdm(total=args.rounds * (1 + len(runs)), disable=not sys.stderr.isatty())

    def note(what, value):
        values.setdefault(what, []).append(value)

    def tell(what):
        progress.set_description(what)
        progress.update()

    for _ in range(args.rounds):
        tell("environments")
        note("environments", measure_environments(args.num_envs))
        for name, num_envs in runs:
            tell(f"{name}, {num_envs} environments")
            peak, operations = measure_machine(args)  # again for each, since the machine's speed may drift
            note("peak", peak)
            result = measure_run(name, num_envs, args, folder)
            config, steps = CONFIGS[name], args.num_steps * args.num_envs  # the same work for any number of them
            columns = {
                "steps_per_second": steps / result["total"],
                "ceiling_fraction": steps / result["total"] * (config.rollout + config.update) * operations / peak,
                "rollout": steps / result["rollout"],
                "update": steps / (result["total"] - result["rollout"]),
                "rollout_fraction": result["rollout_forward"] / result["rollout"],
                "peak_anon_gb": result["peak"] / 1e9,
                "set_up": result["set_up"],
                "gemm_gflops": peak / 1e9,
                "total": result["total"],
            }
            for column, value in columns.items():
                note((name, num_envs, column), value)
    progress.close()
    return values


def table(values, num_envs):
    """A row for each script, of medians over the rounds."""
    rows = []
    for name, config in CONFIGS.items():
        columns = [column for key in values if key[:2] == (name, num_envs) for column in key[2:] if column != "total"]
        row = {"name": name} | {x: statistics.median(values[name, num_envs, x]) for x in columns}
        pairs = zip(values[name, num_envs, "total"], values[config.base or name, num_envs, "total"], strict=True)
        row["time_over_base"] = statistics.median(mine / other for mine, other in pairs)
        rows.append(row)
    return rows


def markdown(rows):
    headings = ["script", "steps/s", "of the ceiling", "rollout steps/s", "in forward passes", "update steps/s"]
    headings += ["time / base", "peak memory", "first step after"]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['steps_per_second']:.0f} | {row['ceiling_fraction']:.0%} | {row['rollout']:.0f} "
            f"| {row['rollout_fraction']:.0%} | {row['update']:.0f} | {row['time_over_base']:.3f} "
            f"| {row['peak_anon_gb']:.2f} GB | {row['set_up']:.1f} s |"
        )
    return "\n".join(lines)


def report(values, rows, args):
    def spread(name):
        low, middle, high = (f(values[name]) for f in (min, statistics.median, max))
        return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"

    values["gigaflops"] = [x / 1e9 for x in values["peak"]]
    rounds = "1 round" if args.rounds == 1 else f"{args.rounds} rounds, medians"
    print(f"device {args.device}, {torch.get_num_threads()} CPU threads; {rounds}")
    print(f"matrix multiplication {spread('gigaflops')} GFLOP/s")
    print(f"environments alone {spread('environments')} steps/s\n")
    print(markdown(rows))
    for name, sizes in OTHER_SIZES.items():
        rates = {n: statistics.median(values[name, n, "steps_per_second"]) for n in sorted([*sizes, args.num_envs])}
        print(f"\n{name}: " + ", ".join(f"{n} environments {rate:.0f} steps/s" for n, rate in rates.items()))


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


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--quick", action="store_true", help="16 steps instead of 256, after a warm-up; 1 round")
    parser.add_argument("--profile", action="store_true", help="only a forward-backward pass, by operation")
    parser.add_argument("--rounds", type=int, help="measurements of everything (3)")
    parser.add_argument("--num-envs", type=int, default=64, help="environments (64)")
    parser.add_argument("--num-steps", type=int, help="steps of each in an iteration (256)")
    parser.add_argument("--channels", type=int, nargs=3, default=[16, 32, 32], help="widths of the network (16 32 32)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA if there is one")
    parser.add_argument("--csv", metavar="FILE", help="write the table here")
    parser.add_argument("--plot", metavar="FILE", help="draw it as bars")
    args = parser.parse_args()
    args.rounds = args.rounds if args.rounds is not None else 1 if args.quick else 3
    args.num_steps = args.num_steps if args.num_steps is not None else 16 if args.quick else 256
    for flag, file in (("--csv", args.csv), ("--plot", args.plot)):
        if file and not os.access(Path(file).parent, os.W_OK):
            parser.error(f"{flag} {file}: cannot be written there")
    for flag in ("rounds", "num_envs", "num_steps"):
        if vars(args)[flag] < 1:
            parser.error(f"--{flag.replace('_', '-')} {vars(args)[flag]}: must be 1 or more")
    if min(args.channels) < 1:
        parser.error("--channels: must be 1 or more")
    total, sizes = args.num_envs * args.num_steps, [args.num_envs, *sum(OTHER_SIZES.values(), [])]
    if any(total % size or not load("ppo").splits_evenly(size, total // size, 8) for size in sizes):
        what = f"{total:,} steps in all do not split into 8 minibatches with {', '.join(map(str, sizes))} environments"
        parser.error(f"--num-envs {args.num_envs} --num-steps {args.num_steps}: {what}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device; use cpu or auto")
    args.device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    return args


def main():
    args = parse_args()
    if args.profile:
        return profile(args)
    with tempfile.TemporaryDirectory() as folder:
        values = measure(args, folder)
    rows = table(values, args.num_envs)
    report(values, rows, args)
    if args.csv:
        pd.DataFrame(rows).to_csv(args.csv, index=False, float_format="%.6g")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure_script(sys.argv[2], sys.argv[3:])
    else:
        main()
