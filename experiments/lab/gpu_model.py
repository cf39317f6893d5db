"""What speed to expect of a GPU, without having one: operations and bytes of an iteration, counted on a CPU."""

import functools
import math
import os
import sys
from collections import defaultdict
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lab.reporting import table
from lab.timing import CONFIGS, flags_of, parsed, run_script

FRAME, MICROBATCH = 64 * 64 * 3, 2048  # bytes; frames in a pass, the scripts' choice on a GPU
# Published peaks: operations a second (dense, as convolutions do float32 by default; bfloat16), bytes a second of the
# memory, and of PCIe one way.
GPUS = {
    "RTX 4090": (82.6e12, 165.2e12, 1008e9, 32e9),  # NVIDIA Ada GPU Architecture, white paper, appendix A; TF32
    "A100": (156e12, 312e12, 2039e9, 32e9),  # NVIDIA A100 Tensor Core GPU, data sheet, 80 GB SXM; TF32
    "T4": (8.1e12, None, 320e9, 16e9),  # NVIDIA T4, data sheet; it has neither TF32 nor bfloat16
}
# What is assumed: shares of the peaks (16 to 32 channels fill the matrix units badly), seconds, bytes a second.
ARITHMETIC, BANDWIDTH, LAUNCH, WAIT, HOST_MEMORY = 0.3, 0.75, 5e-6, 20e-6, 5e9


def copies(args):
    """Bytes up, bytes down and waits in an iteration on a GPU, by arithmetic, for a script's flags.

    A copy from ordinary memory is a wait, one from pinned memory is not.
    """
    envs, steps = args.num_envs, args.num_steps
    frames, epochs = envs * steps, vars(args).get("epochs") or args.policy_epochs
    outcomes = 4 * frames + envs * (steps + 1)  # reward, first
    parts = [
        (frames * FRAME, 0, 0),
        (15 * 4 * frames, 0, 0),  # noise, to choose actions
        (0, 8 * frames, steps),  # actions
        (outcomes + envs * FRAME, 0, 3),  # and the last frames
        (8 * frames * epochs, 0, 0),  # the order of minibatches
    ]
    if hasattr(args, "staleness"):
        queued = frames * FRAME + envs * FRAME + outcomes + frames * (4 + 15 * 4 + 8)  # value, policy, action
        parts.append((queued, queued, 14))
    if hasattr(args, "aux_epochs"):
        parts.append((4 * frames, frames * FRAME + 4 * frames, 3))  # the buffer
        parts.append(((1 + args.aux_epochs) * frames * FRAME, 0, 0))
        parts.append((args.aux_epochs * 8 * frames, 0, 0))  # indices
    return tuple(map(sum, zip(*parts, strict=True)))


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
    counter, rollouts, config = Counter(), [], CONFIGS[name]

    def at(phase):
        rollouts.extend([phase] * (phase == "collect"))
        counter.phase = phase if len(rollouts) == config.first and phase != "log" else None

    def change(module):
        module.Run.count_episodes = lambda *_: None  # the CPU's work

    flags = [*flags_of(name, args.num_envs, num_steps, config.first, args), "--run-dir", f"{folder}/{name}-{num_steps}"]
    flags += ["--microbatch-size", max(1, round(MICROBATCH * num_steps / args.num_steps))]
    adam = functools.partial(torch.optim.Adam, foreach=True)  # as on a GPU: all weights in a kernel
    with mock.patch.object(torch.optim, "Adam", adam), counter:
        run_script(config.script, flags, at, change)
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
    up, down, waits = copied
    return parts | {"copies": (up + down) * (1 / pcie + 1 / HOST_MEMORY) + WAIT * waits}, least


def model(args, rate, folder):
    """Print what to expect of some GPUs, if the environments alone make this many steps a second."""
    steps, counted, expected = args.num_envs * args.num_steps, [], []
    order = ["environments", "collect", "copies", "prepare", "optimise", "auxiliary"]
    for name in CONFIGS:
        print(f"count what {name} does", file=sys.stderr, flush=True)
        counts = count_iteration(name, args, folder)
        up, down, waits = copied = copies(parsed(name, args.num_envs, args.num_steps, args))
        kernels, operations, moved = sum(counts.values())
        row = [f"{kernels:,.0f}", f"{operations / 1e12:.1f}", f"{moved / 1e9:,.0f}"]
        counted.append([name, *row, f"{up / 1e6:,.1f}", f"{down / 1e6:,.1f}", f"{waits:,}"])
        for gpu in GPUS:
            if args.bf16 and not GPUS[gpu][1]:
                continue
            parts, least = predict(counts, copied, gpu, args.bf16)
            parts["environments"] = steps / rate
            row = [f"{parts[x]:.2f}" if x in parts else "" for x in order]
            expected.append([name, gpu, f"{steps / sum(parts.values()):,.0f}", *row, f"{steps / least:,.0f}"])
    precision = "bfloat16 in the trunk" if args.bf16 else "float32, computed as TF32 where the GPU can"
    order[1:3] = ["network in the rollout", "copies and waits"]
    print(f"""A model, not a measurement.
An iteration of {args.num_envs} environments x {args.num_steps} steps, {precision}

Counted:

{table(["script", "kernels", "TFLOP", "GB in memory", "MB up", "MB down", "waits"], counted)}

Expected steps/s, and the seconds of an iteration by part:

{table(["script", "GPU", "steps/s", *order, "at the peaks, steps/s"], expected)}

Counted: PyTorch's operations, as kernels; bytes in and out of each, as if there were no caches.
MB up, MB down and waits are computed.
Assumed: {ARITHMETIC:.0%} of the published peak for arithmetic, {BANDWIDTH:.0%} for memory, for an operation the slower;
{1e6 * LAUNCH:.0f} us to launch a kernel, while earlier ones compute; {1e6 * WAIT:.0f} us for a wait;
{HOST_MEMORY / 1e9:.0f} GB/s in host memory for what is copied; no part overlaps another;
Procgen at {rate:,.0f} steps/s, as on this machine ({os.cpu_count()} cores).
At the peaks: 100% of both; no launches, waits, copies or environments.
For comparison: the authors' earlier code is on record with a median of 4,556 steps/s (PPO, GPU not named).""")
