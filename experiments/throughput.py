"""How fast the scripts are on this machine, against what its matrix multiplications allow.

python experiments/throughput.py            64 environments x 256 steps, 3 rounds: about 3.5 hours on two cores
python experiments/throughput.py --quick    16 steps instead of 256, 1 round: minutes
python experiments/throughput.py --profile  where the time of a forward-backward pass goes: half a minute
python experiments/throughput.py --model    what to expect of some GPUs: a minute or two, no GPU needed

In each round everything is measured once, one after the other, so that a noisy moment of the machine hits all alike;
what is reported is the median over the rounds. Each script runs as it is, in a process of its own, for two iterations,
and the second is timed, without its logs and checkpoint; PPG with phases of one iteration, each with an auxiliary one.
The ceiling is the rate at which the floating point operations of the network's passes alone could be done, at the speed
of a large matrix multiplication in the precision of the convolutions (on a GPU TF32, with --bf16 bfloat16), sustained
for seconds just before. A forward-backward pass counts as three forward passes, as in the paper (footnote 2).

Columns of the CSV that do not speak for themselves:
  ceiling_fraction   steps_per_second over the ceiling
  rollout, update    environment steps over the time of either part alone
  rollout_fraction   share of the rollout's time that its forward passes take; the rest is environments and all else
  time_over_base     time of an iteration over that of the script without EWMA
  peak_anon_gb       most memory that belonged to no file (RssAnon); peak_device_gb: most on the GPU
  set_up             seconds from the command to the first environment step
  gemm_gflops        speed of the matrix multiplication just before, in GFLOP/s
"""

import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in the scripts, for which it is too late after import torch
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler: nothing of its own on the terminal

import lab  # noqa: F401  checks packages

# isort: split
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from procgen import ProcgenGym3Env
from torch.utils.flop_counter import FlopCounterMode

from lab.common import ROOT, Parser, check_writable, fail, load_script, number, written
from lab.drawing import COLOURS, STYLE, WIDTH
from lab.gpu_model import MICROBATCH, model
from lab.reporting import table
from lab.timing import CONFIGS, flags_of, parsed, synchronise

OTHER_SIZES = {"ppo": [16, 256]}  # environments, with fewer or more steps each, to see whether cost is linear
COLUMNS = {  # of the table: heading and format
    "name": ("script", "{}"),
    "steps_per_second": ("steps/s", "{:.0f}"),
    "ceiling_fraction": ("of the ceiling", "{:.0%}"),
    "rollout": ("rollout steps/s", "{:.0f}"),
    "rollout_fraction": ("in forward passes", "{:.0%}"),
    "update": ("update steps/s", "{:.0f}"),
    "time_over_base": ("time / base", "{:.3f}"),
    "peak_anon_gb": ("peak memory", "{:.2f} GB"),
    "peak_device_gb": ("on the GPU", "{:.2f} GB"),
    "set_up": ("first step after", "{:.1f} s"),
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


def say(text, end="\n"):
    print(text, end=end, file=sys.stderr, flush=True)


# The machine.


def seconds(function, sustained):
    """Mean time of a call, over so many seconds: what the machine keeps up, as for the scripts, not its best moment."""
    for _ in range(3):
        function()
    synchronise()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < sustained:
        function()
        calls += 1
        synchronise()
    return (time.perf_counter() - start) / calls


def matrix_multiplication(args):
    """Operations a second of a large matrix product, in the precision that the convolutions use."""
    size, dtype = 2048 if args.device == "cpu" else 8192, torch.bfloat16 if args.bf16 else torch.float32
    if args.device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as cuDNN computes convolutions by default
    a, b = (torch.randn(size, size, device=args.device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, 1 if args.quick else 5)


def forward_operations(channels):
    """Operations of the network's forward pass for a frame."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        load_script("ppo").Agent(channels)(torch.zeros(1, 64, 64, 3, dtype=torch.uint8))
    return counter.get_total_flops()


def measure_environments(num_envs):
    """Environment steps a second, without any network."""
    envs = ProcgenGym3Env(num_envs, "starpilot", rand_seed=1, num_threads=os.cpu_count())
    actions = np.random.default_rng(1).integers(15, size=(300, num_envs))
    start = time.perf_counter()
    for action in actions:
        envs.act(action)
        envs.observe()
    return actions.size / (time.perf_counter() - start)


def machine(args):
    if args.device == "cuda":
        return torch.cuda.get_device_name()
    return torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or "CPU"


def about(args):
    how = ("bfloat16" if args.bf16 else "float32") + ", compiled" * args.compile
    threads = torch.get_num_threads()
    return f"device {args.device} ({machine(args)}), {threads} CPU thread{'s' * (threads != 1)}, {how}"


# The measurement.


def measure_run(name, num_envs, num_steps, args, folder):
    """One script in a process of its own: an iteration to warm up, and one that is timed."""
    started, iterations = time.time(), CONFIGS[name].first + 1
    command = [sys.executable, "-m", "lab.timing", CONFIGS[name].script]
    command += flags_of(name, num_envs, num_steps, iterations, args) + ["--run-dir", f"{folder}/{name}-{started}"]
    result = subprocess.run(command, cwd=ROOT / "experiments", capture_output=True, text=True)
    if result.returncode:
        say("")
        fail(f"{name}: {(result.stderr.strip() or 'no message').splitlines()[-1]}", code=1)
    result = json.loads(result.stdout)
    return result | {"set_up": result["first_step"] - started}


def measure(args, runs, folder):
    """All rounds: speeds of the environments alone, and {(name, environments): [the columns, for each round]}."""
    alone, results, operations = [], defaultdict(list), forward_operations(args.channels)
    for i in range(args.rounds):
        say(f"round {i + 1}/{args.rounds}: environments alone: ", end="")
        alone.append(measure_environments(args.num_envs))
        say(f"{alone[-1]:,.0f} steps/s")
        for name, num_envs, num_steps in runs:
            say(f"round {i + 1}/{args.rounds}: {name}, {num_envs} x {num_steps}: ", end="")
            peak = matrix_multiplication(args)  # again for each, since the machine's speed may drift
            result = measure_run(name, num_envs, num_steps, args, folder)
            total, rollout, steps = result["total"], result["rollout"], num_envs * num_steps
            passes = CONFIGS[name].rollout + CONFIGS[name].update
            result |= {
                "steps_per_second": steps / total,
                "ceiling_fraction": steps / total * passes * operations / peak,
                "rollout": steps / rollout,
                "update": steps / (total - rollout),
                "rollout_fraction": result["forward"] / rollout,
                "gemm_gflops": peak / 1e9,
            }
            results[name, num_envs].append(result)
            say(f"{steps / total:,.0f} steps/s")
    return alone, results


def table_of(results, num_envs):
    """A row for each script, of medians over the rounds."""
    rounds, rows = {name: pd.DataFrame(results[name, num_envs]) for name in CONFIGS}, []
    for name, config in CONFIGS.items():
        row = {"name": name} | rounds[name].median().to_dict()
        row["time_over_base"] = (rounds[name]["total"] / rounds[config.base or name]["total"]).median()
        rows.append({column: row[column] for column in [*COLUMNS, "gemm_gflops"] if column in row})
    return rows


def markdown(rows):
    columns = [column for column in COLUMNS if column in rows[0]]
    cells = [[COLUMNS[column][1].format(row[column]) for column in columns] for row in rows]
    return table([COLUMNS[column][0] for column in columns], cells)


def report(alone, results, rows, args):
    def spread(values):
        return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"

    print(f"{about(args)}; " + ("1 round" if args.rounds == 1 else f"{args.rounds} rounds, medians"))
    print(f"matrix multiplication {spread([x['gemm_gflops'] for y in results.values() for x in y])} GFLOP/s")
    print(f"environments alone {spread(alone)} steps/s\n")
    print(markdown(rows))
    for name, sizes in OTHER_SIZES.items():
        rates = {n: [x["steps_per_second"] for x in results[name, n]] for n in sorted({*sizes, args.num_envs})}
        rates = [f"{n} environments {statistics.median(rate):.0f} steps/s" for n, rate in rates.items()]
        print(f"\n{name}: " + ", ".join(rates))
    if any(row["ceiling_fraction"] > 1 for row in rows):
        print("\nMore than 100% of the ceiling: it was measured on a busy machine, or this one convolves faster.")


def plot(rows, title, file):
    names, speeds = [row["name"] for row in rows], [row["steps_per_second"] for row in rows]
    ceilings = [row["steps_per_second"] / row["ceiling_fraction"] for row in rows]
    with plt.rc_context({"axes.grid.axis": "y"}, fname=STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 2.9), layout="constrained")
        bars = axes.bar(names, speeds, width=0.6, color=COLOURS[0])
        axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=1)
        marks = axes.errorbar(range(len(names)), ceilings, xerr=0.36, fmt="none", ecolor="black")
        for i, row in enumerate(rows):
            share = f"{row['ceiling_fraction']:.0%} of {ceilings[i]:,.0f}"
            axes.annotate(share, (i, ceilings[i]), (0, 2), textcoords="offset points", ha="center", color="0.3")
        axes.legend([bars, marks], ["measured", "ceiling: at the speed of a matrix multiplication"])
        axes.set(ylabel="environment steps/s", ylim=(0, 1.15 * max(ceilings)))
        axes.set_title(title)
        axes.tick_params(axis="x", length=0)
        figure.savefig(file)


# The profile.


def profile(args):
    """Print which operations the time of a forward-backward pass goes to, and at what speed they compute."""
    module = load_script("ppo")
    agent = module.Agent(args.channels).to(args.device, memory_format=torch.channels_last)
    frames = 64 if args.device == "cpu" else MICROBATCH
    obs = torch.randint(256, (frames, 64, 64, 3), dtype=torch.uint8, device=args.device)

    def forward_backward():
        logits, value = agent(obs)
        (logits.sum() + value.sum()).backward()

    with FlopCounterMode(display=False) as counter:
        forward_backward()
    args.seed, args.microbatch_size = 1, None
    module.set_up_torch(args)  # after counting, for which nothing may be compiled
    counts = {str(operation): n for operation, n in counter.get_flop_counts()["Global"].items()}
    operations = {"convolution": counts["aten.convolution"]}
    operations["convolution, gradient"] = counts["aten.convolution_backward"]
    operations["dense"] = sum(counts.values()) - sum(operations.values())
    say("a large matrix multiplication")
    peak, passes = matrix_multiplication(args), 5 if args.quick else 30
    say(f"forward-backward passes of {frames} frames, timed as a whole")
    whole = seconds(forward_backward, 1 if args.quick else 5)
    say(f"{passes} passes, by operation")
    with torch.profiler.profile() as profiler:
        for _ in range(passes):
            forward_backward()
        synchronise()
    times = dict.fromkeys(operations, 0) | time_by_kind(profiler.key_averages(), args.device, passes)
    rows = []
    for kind, taken in sorted(times.items(), key=lambda item: -item[1]):
        speed = operations.get(kind, 0) / taken if taken else 0
        speeds = [f"{speed / 1e9:.0f}", f"{speed / peak:.0%}"] if speed else ["", ""]
        rows.append([kind, f"{1e3 * taken:.1f}", f"{taken / sum(times.values()):.0%}", *speeds])
    whole_pass = sum(operations.values()) / whole / peak
    products = sum(operations.values()) / sum(times[kind] for kind in operations) / peak
    print(f"A forward-backward pass of {frames} frames; {about(args)}")
    print(f"matrix multiplication {peak / 1e9:,.0f} GFLOP/s; the whole pass {whole_pass:.0%} of it\n")
    print(table(["operation", "ms", "of the time", "GFLOP/s", "of the matrix multiplication"], rows))
    print(f"\nconvolutions and dense layers alone: {products:.0%} of the matrix multiplication")


def time_by_kind(events, device, passes):
    """Seconds of a pass. On a GPU a kernel has a line of its own beside that of its operation, which alone counts."""
    times = defaultdict(float)
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CPU:
            kind = next((kind for pattern, kind in KINDS if re.search(pattern, event.key)), "other")
            own = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
            times[kind] += own / 1e6 / passes
    return times


# The command.


def parse_args():
    parser = Parser(description=__doc__)
    add, whole = parser.add_argument, number(int, 1)
    add("--quick", action="store_true", help="16 steps instead of 256; 1 round")
    add("--profile", action="store_true", help="only a forward-backward pass, by operation")
    add("--model", action="store_true", help="only what to expect of some GPUs, from counting; no GPU needed")
    add("--rounds", type=whole, help="measurements of everything (3)")
    add("--num-envs", type=whole, default=64, help="environments (64)")
    add("--num-steps", type=whole, help="steps of each in an iteration (256)")
    add("--channels", type=whole, nargs=3, default=[16, 32, 32], help="widths of the network (16 32 32)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA if there is one")
    add("--bf16", action="store_true", help="the scripts' --bf16, and the ceiling in bfloat16")
    add("--compile", action="store_true", help="the scripts' --compile")
    add("--csv", metavar="FILE", help="write the table here")
    add("--plot", metavar="FILE", help="draw it as bars: .png, .svg or .pdf")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.num_steps = args.num_steps or (16 if args.quick and not args.model else 256)
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: PyTorch finds no CUDA device; use cpu or auto")
    if args.model and args.compile:
        fail("--model: counts kernels as they are without --compile")
    args.device = "cuda" if args.device != "cpu" and torch.cuda.is_available() and not args.model else "cpu"
    for flag, file in [("--csv", args.csv), ("--plot", args.plot)]:
        if file and (args.profile or args.model):
            fail(f"{flag}: --profile and --model only print")
        if file:
            check_writable(flag, file)
    if args.plot and Path(args.plot).suffix not in (".png", ".svg", ".pdf"):
        fail(f"--plot {args.plot}: must end in .png, .svg or .pdf")
    return args


def plan(args):
    """(name, environments, steps) of all runs: as many steps in all whatever the number of environments."""
    runs, total = [(name, args.num_envs) for name in CONFIGS], args.num_envs * args.num_steps
    runs += [(name, n) for name, sizes in OTHER_SIZES.items() for n in sizes if not args.model]
    for name, num_envs in runs:
        if total % num_envs:
            what = f"{total:,} steps in all do not split evenly over {num_envs} environments, which are measured, too"
            fail(f"--num-envs {args.num_envs} --num-steps {args.num_steps}: {what}")
        parsed(name, num_envs, total // num_envs, args)
    return [(name, num_envs, total // num_envs) for name, num_envs in dict.fromkeys(runs)]


def main():
    args = parse_args()
    if args.profile:
        return profile(args)
    runs = plan(args)
    with tempfile.TemporaryDirectory() as folder:
        if args.model:
            say("environments alone")
            return model(args, measure_environments(args.num_envs), folder)
        alone, results = measure(args, runs, folder)
    rows = table_of(results, args.num_envs)
    report(alone, results, rows, args)
    if args.csv:
        with written("--csv", args.csv) as file:
            pd.DataFrame(rows).to_csv(file, index=False, float_format="%.6g")
    if args.plot:
        with written("--plot", args.plot) as file:
            plot(rows, f"{args.num_envs} environments x {args.num_steps} steps; {about(args)}", file)
    say(f"\nTo share this table, open an issue titled 'throughput on {machine(args)}' and paste it.")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
