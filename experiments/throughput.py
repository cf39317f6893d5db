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
  up_mb, down_mb     copied to the GPU and back in an iteration, and waits: how often the CPU waits for the GPU; on a
                     GPU counted in a third iteration, on a CPU computed: what a GPU would see
  gemm_gflops        speed of the matrix multiplication just before, in GFLOP/s
"""

import contextlib
import functools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in the scripts, for which it is too late after import torch
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler: nothing of its own on the terminal

import numpy as np
import torch
from procgen import ProcgenGym3Env
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from lab.common import Parser, check_writable, fail, load_script, number, written

PPG = ["--n-pi", "1", "--no-adjust", "n-pi"]
FRAME, GPU_MICROBATCH = 64 * 64 * 3, 2048  # bytes; frames in a pass, the scripts' choice on a GPU


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
    "up_mb": ("MB up", "{:.0f}"),
    "down_mb": ("MB down", "{:.0f}"),
    "waits": ("waits", "{:.0f}"),
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
# Published peaks: operations a second (dense, as convolutions do float32 by default; bfloat16), bytes a second of the
# memory, and of PCIe one way.
GPUS = {
    "RTX 4090": (82.6e12, 165.2e12, 1008e9, 32e9),  # NVIDIA Ada GPU Architecture, white paper, appendix A; TF32
    "A100": (156e12, 312e12, 2039e9, 32e9),  # NVIDIA A100 Tensor Core GPU, data sheet, 80 GB SXM; TF32
    "T4": (8.1e12, None, 320e9, 16e9),  # NVIDIA T4, data sheet; it has neither TF32 nor bfloat16
}
# What the model assumes: shares of the peaks (16 to 32 channels fill the matrix units badly), seconds, bytes a second.
ARITHMETIC, BANDWIDTH, LAUNCH, WAIT, HOST_MEMORY = 0.3, 0.75, 5e-6, 20e-6, 5e9


def say(text, end="\n"):
    print(text, end=end, file=sys.stderr, flush=True)


def synchronise():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


# A script, run with its phases watched.


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


def flags_of(name, num_envs, num_steps, iterations, args):
    flags = ["--env-id", "starpilot", "--num-envs", num_envs, "--num-steps", num_steps, "--device", args.device]
    flags += ["--total-timesteps", iterations * num_envs * num_steps, "--checkpoint-seconds", 10**9]
    flags += ["--channels", *args.channels, *["--bf16"] * args.bf16, *["--compile"] * args.compile]
    return [*map(str, flags), *CONFIGS[name].flags]


def parsed(name, num_envs, num_steps, args):
    """Flags and adjusted values as the script sees them; sizes that it cannot run with end here."""
    module = load_script(CONFIGS[name].script)
    sizes = f"--num-envs {args.num_envs} --num-steps {args.num_steps}"
    module.fail = lambda message: fail(f"{sizes}: {module.SCRIPT}.py says: {message}")
    with mock.patch.object(sys, "argv", [sys.argv[0], *flags_of(name, num_envs, num_steps, 1, args)]):
        script_args, _ = module.parse_args()
    return script_args, module.adjust_for_batch_size(script_args)


def anonymous_memory():
    """Bytes of memory that belong to no file, now; pages of PPG's buffer file do not count."""
    try:
        return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    except (OSError, TypeError):
        import resource  # elsewhere than on Linux: the most there has ever been, files included

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_script(script, chosen, flags):
    """Time a script's iteration of this number; on a GPU, count the copies of the one after it. Prints JSON."""
    iterations, peak, stop = [], [0], threading.Event()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if "cuda" in flags else None

    def at(phase):
        synchronise()
        if phase == "collect":
            iterations.append({"forward": 0})
        iterations[-1].setdefault(phase, time.time())
        if len(iterations) > chosen and phase in ("collect", "log"):
            profiler.start() if phase == "collect" else profiler.stop()

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
        while not stop.wait(0.02):
            peak[0] = max(peak[0], anonymous_memory())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    run_script(script, flags, at, change)
    stop.set()
    thread.join()
    timed = iterations[chosen - 1]
    result = {"first_step": iterations[0]["collect"], "forward": timed["forward"], "peak_anon_gb": peak[0] / 1e9}
    result |= {"rollout": timed["prepare"] - timed["collect"], "total": timed["log"] - timed["collect"]}
    if profiler:
        result["peak_device_gb"] = torch.cuda.max_memory_allocated() / 1e9
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiler.export_chrome_trace(file.name)
            result |= copies(json.loads(Path(file.name).read_text())["traceEvents"])
    print(json.dumps(result))


def copies(events):
    """What a profile says about copies and waits. (Our own waits at the phases' ends go by another name.)"""
    moved = [(event["name"], event["args"]["bytes"] / 1e6) for event in events if event.get("cat") == "gpu_memcpy"]
    up, down = (sum(size for name, size in moved if direction in name) for direction in ("HtoD", "DtoH"))
    waits = sum(event.get("name") in ("cudaStreamSynchronize", "cudaEventSynchronize") for event in events)
    return {"up_mb": up, "down_mb": down, "waits": waits}


def expected_copies(args, use):
    """{what: (bytes up, bytes down, waits)}, for an iteration on a GPU, by arithmetic; args and use are a script's.

    A copy from ordinary memory is a wait, one from pinned memory is not.
    """
    envs, steps = args.num_envs, args.num_steps
    frames, epochs = envs * steps, vars(args).get("epochs") or args.policy_epochs
    outcomes = 4 * frames + envs * (steps + 1)  # reward, first
    result = {
        "frames": (frames * FRAME, 0, 0),
        "noise": (15 * 4 * frames, 0, 0),
        "actions": (0, 8 * frames, steps),
        "rewards, firsts, last frames": (outcomes + envs * FRAME, 0, 3),
        "order of minibatches": (8 * frames * epochs, 0, 0),
    }
    if hasattr(args, "staleness"):
        queued = frames * FRAME + envs * FRAME + outcomes + frames * (4 + 15 * 4 + 8)  # value, policy, action
        result["queue"] = (queued, queued, 14)
    if hasattr(args, "aux_epochs"):
        result["buffer"] = (4 * frames, frames * FRAME + 4 * frames, 3)
        result["frames, auxiliary phase"] = ((1 + args.aux_epochs) * frames * FRAME, 0, 0)
        result["indices, auxiliary phase"] = (args.aux_epochs * 8 * frames, 0, 0)
    return result


def totals(parts):
    up, down, waits = map(sum, zip(*parts.values(), strict=True))
    return {"up_mb": up / 1e6, "down_mb": down / 1e6, "waits": waits}


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
    return f"device {args.device} ({machine(args)}), {torch.get_num_threads()} CPU threads, {how}"


# The measurement.


def measure_run(name, num_envs, num_steps, args, folder):
    """One script in a process of its own: an iteration to warm up, and one that is timed."""
    chosen = 2 + (name == "staleness")  # stale: the first only collects
    flags = flags_of(name, num_envs, num_steps, chosen + (args.device == "cuda"), args)
    started = time.time()
    command = [sys.executable, __file__, "--measure", CONFIGS[name].script, str(chosen), *flags]
    command += ["--run-dir", f"{folder}/{name}-{started}"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        say("")
        fail(f"{name}: {(result.stderr.strip() or 'no message').splitlines()[-1]}", code=1)
    result = json.loads(result.stdout)
    result["set_up"] = result.pop("first_step") - started
    return result


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
            config, total, rollout = CONFIGS[name], result["total"], result["rollout"]
            speed = num_envs * num_steps / total
            if args.device == "cpu":
                result |= totals(expected_copies(*parsed(name, num_envs, num_steps, args)))
            result |= {
                "steps_per_second": speed,
                "ceiling_fraction": speed * (config.rollout + config.update) * operations / peak,
                "rollout": speed * total / rollout,
                "update": speed * total / (total - rollout),
                "rollout_fraction": result["forward"] / rollout,
                "gemm_gflops": peak / 1e9,
            }
            results[name, num_envs].append(result)
            say(f"{speed:,.0f} steps/s")
    return alone, results


def table_of(results, num_envs):
    """A row for each script, of medians over the rounds."""
    import pandas as pd  # not at the top: a script's start should not wait for it

    rounds, rows = {name: pd.DataFrame(results[name, num_envs]) for name in CONFIGS}, []
    for name, config in CONFIGS.items():
        row = {"name": name} | rounds[name].median().to_dict()
        row["time_over_base"] = (rounds[name]["total"] / rounds[config.base or name]["total"]).median()
        rows.append({column: row[column] for column in [*COLUMNS, "gemm_gflops"] if column in row})
    return pd.DataFrame(rows)


def markdown(rows):
    from lab.reporting import table

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
        rates = {n: [x["steps_per_second"] for x in results[name, n]] for n in sorted([*sizes, args.num_envs])}
        rates = [f"{n} environments {statistics.median(rate):.0f} steps/s" for n, rate in rates.items()]
        print(f"\n{name}: " + ", ".join(rates))
    if any(row["ceiling_fraction"] > 1 for row in rows):
        print("\nMore than 100% of the ceiling: it was measured on a busy machine, or this one convolves faster.")
    if args.device == "cuda":
        print("\nMB up, MB down, waits: in an iteration, as the profiler counts copies and synchronisations")
    else:
        print("\nMB up, MB down, waits: not measured, but computed: what a GPU would see in an iteration. For ppo:")
        for what, (up, down, waits) in expected_copies(*parsed("ppo", args.num_envs, args.num_steps, args)).items():
            print(f"  {what}: {up / 1e6:.1f} MB up, {down / 1e6:.1f} MB down, {waits} waits")


def plot(rows, args, file):
    import matplotlib.pyplot as plt

    from lab.drawing import COLOURS, STYLE, WIDTH

    names, speeds = [row["name"] for row in rows], [row["steps_per_second"] for row in rows]
    ceilings = [row["steps_per_second"] / row["ceiling_fraction"] for row in rows]
    with plt.rc_context(STYLE | {"axes.grid.axis": "y"}):
        figure, axes = plt.subplots(figsize=(WIDTH, 2.9), layout="constrained")
        bars = axes.bar(names, speeds, width=0.6, color=COLOURS[0])
        axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=1)
        marks = axes.errorbar(range(len(names)), ceilings, xerr=0.36, fmt="none", ecolor="black")
        for i, row in enumerate(rows):
            share = f"{row['ceiling_fraction']:.0%} of {ceilings[i]:,.0f}"
            axes.annotate(share, (i, ceilings[i]), (0, 2), textcoords="offset points", ha="center", color="0.3")
        axes.legend([bars, marks], ["measured", "ceiling: at the speed of a matrix multiplication"])
        axes.set(ylabel="environment steps/s", ylim=(0, 1.15 * max(ceilings)))
        axes.set_title(f"{args.num_envs} environments x {args.num_steps} steps; {about(args)}")
        axes.tick_params(axis="x", length=0)
        figure.savefig(file)


# The profile.


def profile(args):
    """Print which operations the time of a forward-backward pass goes to, and at what speed they compute."""
    module = load_script("ppo")
    agent = module.Agent(args.channels).to(args.device, memory_format=torch.channels_last)
    frames = 64 if args.device == "cpu" else GPU_MICROBATCH
    obs = torch.randint(256, (frames, 64, 64, 3), dtype=torch.uint8, device=args.device)

    def forward_backward():
        logits, value = agent(obs)
        (logits.sum() + value.sum()).backward()

    with FlopCounterMode(display=False) as counter:
        forward_backward()
    args.seed = 1
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
    print(f"A forward-backward pass of {frames} frames; {about(args)}")
    whole_pass = sum(operations.values()) / whole / peak
    print(f"matrix multiplication {peak / 1e9:,.0f} GFLOP/s; the whole pass {whole_pass:.0%} of it\n")
    print("| operation | ms | of the time | GFLOP/s | of the matrix multiplication |\n|---|---|---|---|---|")
    for kind, time_ in sorted(times.items(), key=lambda item: -item[1]):
        speed = operations.get(kind, 0) / time_ if time_ else 0
        speeds = f"{speed / 1e9:.0f} | {speed / peak:.0%}" if speed else "|"
        print(f"| {kind} | {1e3 * time_:.1f} | {time_ / sum(times.values()):.0%} | {speeds} |")
    products = sum(operations.values()) / sum(times[kind] for kind in operations)
    print(f"\nconvolutions and dense layers alone: {products / peak:.0%} of the matrix multiplication")


def time_by_kind(events, device, passes):
    """Seconds of a pass. On a GPU a kernel has a line of its own beside that of its operation, which alone counts."""
    times = defaultdict(float)
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CPU:
            kind = next((kind for pattern, kind in KINDS if re.search(pattern, event.key)), "other")
            own = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
            times[kind] += own / 1e6 / passes
    return times


# The model.


class Counter(TorchDispatchMode):
    """Counts what PyTorch does: {(phase, operation, shape of an image): [kernels, operations, bytes in and out]}."""

    KERNELS = {"convolution": 2, "convolution_backward": 3}  # a bias is a kernel apart; all others are 1

    def __init__(self):
        super().__init__()
        self.phase, self.counts = None, defaultdict(lambda: np.zeros(3))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, name = function(*args, **kwargs or {}), function._schema.name.removeprefix("aten::")
        if self.phase and not function.is_view and not name.startswith(("empty", "detach", "_unsafe_view")):
            inputs, outputs = ([x for x in tree_leaves(y) if isinstance(x, torch.Tensor)] for y in (args, result))
            read, wrote = (sum(x.numel() * x.element_size() for x in y) for y in (inputs, outputs))
            read = min(read, wrote) if name.startswith(("index", "gather")) else read  # not all that it chooses from
            image = next((tuple(x.shape[1:]) for x in inputs if x.dim() == 4), ())
            rule = flop_registry.get(function.overloadpacket, lambda *_, **__: 0)
            operations = rule(*args, **kwargs or {}, out_val=result)
            self.counts[self.phase, name, image] += [self.KERNELS.get(name, 1), operations, read + wrote]
        return result


def count(name, num_steps, args, folder):
    """What an iteration of so many steps does, with as many passes through the network as a GPU would need."""
    counter, rollouts, last = Counter(), [], 1 + (name == "staleness")

    def at(phase):
        rollouts.extend([phase] * (phase == "collect"))
        counter.phase = phase if len(rollouts) == last and phase != "log" else None

    def change(module):
        module.Run.count_episodes = lambda *_: None  # the CPU's work

    flags = [*flags_of(name, args.num_envs, num_steps, last, args), "--run-dir", f"{folder}/{name}-{num_steps}"]
    flags += ["--microbatch-size", max(1, round(GPU_MICROBATCH * num_steps / args.num_steps))]
    adam = functools.partial(torch.optim.Adam, foreach=True)  # as on a GPU: all weights in a kernel
    with mock.patch.object(torch.optim, "Adam", adam), counter:
        run_script(CONFIGS[name].script, flags, at, change)
    return counter.counts


def count_iteration(name, args, folder):
    """What an iteration does. All counts are linear in the number of steps, so two short ones give the line."""
    short = 8 // math.gcd(args.num_envs, 8)
    one, two = (count(name, steps, args, folder) for steps in (short, 2 * short))
    return {key: one[key] + (two[key] - one[key]) * (args.num_steps / short - 1) for key in two}


def predict(counts, copied, gpu, bf16):
    """Seconds of an iteration by part, environments left out, and how many the peaks alone would allow."""
    peak, memory, pcie = GPUS[gpu][1 if bf16 else 0], *GPUS[gpu][2:]
    computing, launching, least = defaultdict(float), defaultdict(float), 0
    for (phase, _, _), (kernels, operations, moved) in counts.items():
        computing[phase] += max(operations / (ARITHMETIC * peak), moved / (BANDWIDTH * memory))
        launching[phase] += LAUNCH * kernels
        least += max(operations / peak, moved / memory)
    parts = {phase: max(computing[phase], launching[phase]) for phase in computing}
    megabytes = copied["up_mb"] + copied["down_mb"]
    parts["copies"] = megabytes * 1e6 * (1 / pcie + 1 / HOST_MEMORY) + WAIT * copied["waits"]
    return parts, least


def model(args, folder):
    """Print what to expect of some GPUs."""
    from lab.reporting import table

    say("environments alone")
    rate, steps = measure_environments(args.num_envs), args.num_envs * args.num_steps
    counted, expected, order = [], [], ["environments", "collect", "copies", "prepare", "optimise", "auxiliary"]
    for name in CONFIGS:
        say(f"count what {name} does")
        counts = count_iteration(name, args, folder)
        copied = totals(expected_copies(*parsed(name, args.num_envs, args.num_steps, args)))
        numbers = [*sum(counts.values()) / [1, 1e12, 1e9], *copied.values()]
        formats = ["{:,.0f}", "{:.1f}", "{:,.0f}", "{:,.1f}", "{:,.1f}", "{:,}"]
        counted.append([name, *(form.format(x) for form, x in zip(formats, numbers, strict=True))])
        for gpu in GPUS:
            if args.bf16 and not GPUS[gpu][1]:
                continue
            parts, least = predict(counts, copied, gpu, args.bf16)
            parts["environments"] = steps / rate
            row = [f"{parts[x]:.2f}" if x in parts else "" for x in order]
            expected.append([name, gpu, f"{steps / sum(parts.values()):,.0f}", *row, f"{steps / least:,.0f}"])
    precision = "bfloat16 in the trunk" if args.bf16 else "float32, computed as TF32 where the GPU can"
    print("A model, not a measurement.")
    print(f"An iteration of {args.num_envs} environments x {args.num_steps} steps, {precision}\n\nCounted:\n")
    print(table(["script", "kernels", "TFLOP", "GB in memory", "MB up", "MB down", "waits"], counted))
    print("\nExpected steps/s, and the seconds of an iteration by part:\n")
    order[1:3] = ["network in the rollout", "copies and waits"]
    print(table(["script", "GPU", "steps/s", *order, "at the peaks, steps/s"], expected))
    print(f"""
Counted: PyTorch's operations, as kernels; bytes in and out of each, as if there were no caches.
MB up, MB down and waits are computed.
Assumed: {ARITHMETIC:.0%} of the published peak for arithmetic, {BANDWIDTH:.0%} for memory, for an operation the slower;
{1e6 * LAUNCH:.0f} us to launch a kernel, while earlier ones compute; {1e6 * WAIT:.0f} us for a wait;
{HOST_MEMORY / 1e9:.0f} GB/s in host memory for what is copied; no part overlaps another;
Procgen at {rate:,.0f} steps/s, as on this machine ({os.cpu_count()} cores).
At the peaks: 100% of both; no launches, waits, copies or environments.
For comparison: the authors' earlier code is on record with a median of 4,556 steps/s (PPO, GPU not named).""")


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
    args.microbatch_size = None
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
            return model(args, folder)
        alone, results = measure(args, runs, folder)
    table = table_of(results, args.num_envs)
    rows = table.to_dict("records")
    report(alone, results, rows, args)
    if args.csv:
        with written("--csv", args.csv) as file:
            table.to_csv(file, index=False, float_format="%.6g")
    if args.plot:
        with written("--plot", args.plot) as file:
            plot(rows, args, file)
    say(f"\nTo share this table, open an issue titled 'throughput on {machine(args)}' and paste it.")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure_script(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        with contextlib.suppress(KeyboardInterrupt):
            sys.exit(main())
        sys.exit(130)
