"""On a pretend GPU: the CPU's results, few copies and waits, and mistakes that it catches. See pretend_gpu.py."""

import contextlib
import functools
import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from helpers import EWMA, PPG, ROOT, SCRIPTS, checkpoint, command_line, differences, load, tiny, train

SERVER = [sys.executable, str(Path(__file__).parent / "pretend_gpu.py")]
OWN = ["args", "digest"]  # of a checkpoint: where it was computed
GPU, CPU = ["--device", "cuda"], ["--device", "cpu"]
STOP = ["--total-timesteps", 32]  # after one iteration of three; PPG's first phase has two
N, T = 4, 8  # environments and steps of helpers.TINY
FRAME, NOISE = 64 * 64 * 3, 15 * 4  # bytes

# Flags that lead through lines where the defaults do not go.
OTHER_PATHS = {
    "ppo": "--adv-norm minibatch --clip-vloss --target-kl 0 --kl-coef 1 --microbatch-size 5",
    "ppo_ewma": "--no-reward-norm --adv-norm none --clip-coef 0 --kl-coef 1 --epochs 1",
    "ppg": "--policy-epochs 2 --value-epochs 3 --target-kl 0 --arch detach --microbatch-size 5",
    "staleness": "--staleness-loss recent --microbatch-size 5",
}


@pytest.fixture(scope="module")
def pretend():
    """pretend(script, *flags): run it on the pretend GPU and return its counts, or see it end in this error."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        counts = Path(folder, "counts.json")

        def pretend(script, *flags, error=None):
            path = script if isinstance(script, Path) else ROOT / f"{script}.py"
            start = log.seek(0, io.SEEK_END)
            print(json.dumps([str(word) for word in (path, counts, *flags)]), file=server.stdin, flush=True)
            code = int(server.stdout.readline())
            log.seek(start)
            said = log.read()
            assert (code == 0) is (error is None) and (error or "") in said, f"exit code {code}:\n{said}"
            return json.loads(counts.read_text()) if code == 0 else None

        yield pretend
        server.communicate()
        assert server.returncode == 0


@pytest.fixture(scope="module")
def runs(pretend, tmp_path_factory):
    """runs(script): a folder with its runs "cpu" and "gpu", and the second one's counts."""

    @functools.cache
    def runs(script):
        folder = tmp_path_factory.mktemp(script)
        train(script, folder / "cpu", *tiny(script))
        return folder, pretend(script, *tiny(script), *GPU, "--run-dir", folder / "gpu")

    return runs


def resume_on_cpu(script, folder):
    with command_line(script, ["--resume", folder, "--total-timesteps", 96, *CPU]):
        with contextlib.redirect_stdout(io.StringIO()):
            load(script).main()


PROBE = """
import numpy
import torch

def refused(do):
    try:
        do()
    except (RuntimeError, TypeError):
        return
    raise AssertionError("not refused")

def main():
    cpu, device = torch.ones(2, 3), torch.device("cuda")
    a = cpu.to(device)  # up wait
    cpu.pin_memory().to(device, non_blocking=True)  # up
    cpu.pin_memory().to(device)  # up wait
    cpu.to(device, non_blocking=True)  # up wait
    a[0] = cpu[0]  # up wait
    cpu[0] = a[0]  # down wait
    a.cpu()  # down wait
    a.tolist()  # down wait
    a.sum().item()  # down wait
    float(a.sum())  # down wait
    bool(a.sum() > 0)  # down wait
    int(a.argmax())  # down wait
    a.nonzero()  # wait
    a[a > 0]  # wait
    torch.equal(a, a)  # wait
    torch.zeros_like(cpu, device=device).copy_(a)
    torch.tensor([1.0], device=device)  # up wait
    a[a > 0] = 1
    (2 * a + torch.tensor(2.0)).clamp(min=0)[1:, a.argmax(1)].sum(0)
    view = a.t()[1:]
    view += 3
    assert a.tolist() == [[1, 4, 4]] * 2 and a.T.stride() == (1, 3)  # down wait
    leaf = a.clone().requires_grad_()
    twice = 2 * leaf
    twice.register_hook(lambda gradient: print(gradient.sum().item()))
    twice.sum().backward()  # down wait
    assert leaf.grad.device == leaf.device == device
    refused(lambda: a + cpu)
    refused(lambda: cpu.add_(a))
    refused(lambda: torch.tensor(1.0).add_(a.sum()))
    refused(lambda: torch.stack([a[0, 0], cpu[0, 0]]))
    refused(lambda: a[torch.tensor([0])])
    refused(lambda: cpu[torch.zeros(1, dtype=int, device=device)])
    refused(lambda: a.numpy())
    refused(lambda: numpy.asarray(a))
    for random in ("normal_", "uniform_", "exponential_", "bernoulli_", "random_", "multinomial", "bernoulli"):
        refused(lambda: getattr(a, random)(*[2] * (random == "multinomial")))
    refused(lambda: torch.rand(2, device=device))
    refused(lambda: torch.randperm(2, device=device))
"""


def test_the_pretend_gpu_itself(pretend, tmp_path):
    """What it refuses, and that it counts, at every line, just what the comment there says."""
    path = tmp_path / "probe.py"
    path.write_text(PROBE)
    [counts] = pretend(path)
    found = {}
    for name in counts:
        _, kind, line = name.split(" | ", 2)
        found.setdefault(int(line.partition(":")[0]), set()).add(kind)
    lines = enumerate(path.read_text().splitlines(), start=1)
    assert found == {i: set(x.split("  # ")[1].split()) for i, x in lines if "  # " in x}


@pytest.mark.parametrize("script", SCRIPTS)
def test_ends_in_the_cpus_checkpoint(script, runs):
    folder, counts = runs(script)
    assert len(counts) == 4 and totals(counts[0])["start", "up"][0] > 30  # it has really been there
    assert differences(checkpoint(folder / "gpu"), checkpoint(folder / "cpu"), but=OWN) == []
    assert checkpoint(folder / "gpu")["args"]["device"] == "cuda"


@pytest.mark.parametrize("script", OTHER_PATHS)
def test_ends_in_the_cpus_checkpoint_on_other_paths(script, pretend, tmp_path):
    flags = [*tiny(script), *OTHER_PATHS[script].split()]
    counts = pretend(script, *flags, *GPU, "--run-dir", tmp_path / "gpu")
    assert differences(checkpoint(tmp_path / "gpu"), train(script, tmp_path / "cpu", *flags), but=OWN) == []
    for iteration in counts:
        assert totals(iteration).get(("optimise", "wait")) is None


@pytest.mark.parametrize("script", SCRIPTS)
def test_stopped_and_resumed(script, runs, pretend, tmp_path):
    """From the pretend GPU to itself, to the CPU, and from the CPU to it."""
    expected = checkpoint(runs(script)[0] / "cpu")
    there, here, back = tmp_path / "there", tmp_path / "here", tmp_path / "back"
    pretend(script, *tiny(script), *STOP, *GPU, "--run-dir", there)
    train(script, back, *tiny(script), *STOP)
    shutil.copytree(there, here)
    for folder in (there, back):
        pretend(script, "--resume", folder, "--total-timesteps", 96, *GPU)
    resume_on_cpu(script, here)
    for folder in (there, here, back):
        assert differences(checkpoint(folder), expected, but=OWN) == [], folder.name


def totals(counts):
    """{(phase, kind): [number, bytes]} of an iteration, over its lines."""
    found = {}
    for name, (number, size) in counts.items():
        entry = found.setdefault(tuple(name.split(" | ")[:2]), [0, 0])
        entry[:] = entry[0] + number, entry[1] + size
    return found


def allowed(script, iteration, n=N, t=T):
    """{(phase, kind): (number, bytes)}: the most that an iteration of a tiny run may copy and wait.

    Phases are the labels of the script's loops; "between" is outside of them. Not listed: none at all. So there is no
    copy and no wait in "optimise", the loop over minibatches, and no wait in the auxiliary phase's.
    """
    ewma, epochs = script in EWMA, 1 if script in PPG else 3
    table = {
        ("collect", "up"): (2 * t, n * t * (FRAME + NOISE)),  # a step's frames, and noise to sample actions with
        ("collect", "down"): (t, n * t * 8),  # actions
        ("collect", "wait"): (t, 0),  # actions
    }
    # Rewards, starts of episodes, next_obs; the order of minibatches; one statistic that is no tensor.
    up = (3 + epochs + ewma, n * t * 4 + n * (t + 1) + n * FRAME + epochs * n * t * 8 + ewma * 4)
    down = (2, 14 * 8 + 1)  # statistics, all at once; whether the weights are finite
    waits = 3 + ewma  # copies up that wait: all of these but the order
    if script in PPG:
        down = (down[0] + 2, down[1] + n * t * (FRAME + 4))  # to the buffer: frames and value targets
        if iteration == 2:
            frames, epochs, pieces = 2 * n * t, 2, 3  # in a phase; auxiliary epochs; minibatches of 3, 3 and 2 rollouts
            up, waits = (up[0] + 1, up[1] + frames * 4), waits + 1  # value targets
            table["auxiliary phase", "up"] = (1, frames * FRAME)
            table["auxiliary epoch", "up"] = (epochs * pieces * 2, epochs * frames * (FRAME + 8))  # and their index
    if script == "staleness":
        size = n * t * (FRAME + 4 + 4 + 8 + 60) + n * (t + 1) + n * FRAME  # all that was collected, 7 tensors
        down = (down[0] + 7, down[1] + size)  # to the queue, and from it
        up, waits = ((3, up[1]), waits) if iteration == 1 else ((up[0] + 7, up[1] + size), waits + 7)
    return table | {("between", "up"): up, ("between", "down"): down, ("between", "wait"): (waits + down[0], 0)}


def excess(script, counts):
    """Where the iterations of a run copy or wait more than is allowed, with the lines that do."""
    found = {}
    for i, lines in enumerate(counts[:-1], start=1):
        most = allowed(script, i)
        for (phase, kind), (number, size) in totals(lines).items():
            limit = most.get((phase, kind), (0, 0))
            if phase not in ("start", "checkpoint") and (number > limit[0] or size > limit[1]):
                where = {name: x for name, x in lines.items() if name.startswith(f"{phase} | {kind} |")}
                found[i, phase, kind] = ((number, size), limit, where)
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_copies_and_waits(script, runs):
    assert excess(script, runs(script)[1]) == {}


def bytes_up(n, t, epochs):
    """In an iteration of PPO: frames, noise, rewards and starts of episodes, next_obs, the order of minibatches."""
    return n * t * (FRAME + NOISE) + n * t * 4 + n * (t + 1) + n * FRAME + epochs * n * t * 8


@pytest.mark.parametrize(("n", "t", "epochs"), [(4, 8, 3), (2, 12, 2)])
def test_frames_of_ppo_go_up_once(n, t, epochs, pretend, tmp_path):
    sizes = ["--num-envs", n, "--num-steps", t, "--epochs", epochs, "--total-timesteps", n * t]
    counts = pretend("ppo", *tiny("ppo"), *sizes, *GPU, "--run-dir", tmp_path / "run")[0]
    up = sum(size for (phase, kind), (_, size) in totals(counts).items() if kind == "up" and phase != "start")
    assert up == bytes_up(n, t, epochs)
    assert bytes_up(64, 256, 3) == 203_571_264  # at most 205 MB; the frames alone are 201.3


# What is replaced in a script, and how it shows: an error, or too many copies or waits in a phase, at a line.
MISTAKES = {
    "EWMA left on the CPU": (
        "ppo_ewma",
        "copy.deepcopy(policy).requires_grad_(False)",
        "copy.deepcopy(policy).cpu().requires_grad_(False)",
        "convolution.default: tensors on both devices",
    ),
    "EWMA of PPG left on the CPU": (
        "ppg_ewma",
        "copy.deepcopy(policy).requires_grad_(False)",
        "copy.deepcopy(policy).cpu().requires_grad_(False)",
        "convolution.default: tensors on both devices",
    ),
    "statistics left on the CPU": (
        "ppo",
        "torch.zeros(args.num_envs, device=device)",
        "torch.zeros(args.num_envs)",
        "mul.Tensor: tensors on both devices",
    ),
    "index on the CPU, data on the device": (
        "ppo",
        'run.each(order, f"optimise',
        'run.each(order.cpu(), f"optimise',
        "index.Tensor: tensors on both devices",
    ),
    "index on the device, data on the CPU": (
        "ppg",
        "frames.index_select(0, micro)",
        "frames.index_select(0, micro.to(device))",
        "index_select.default: tensors on both devices",
    ),
    "numpy of a device tensor": (
        "ppo",
        'envs.act(step["action"].cpu())',
        'envs.act(step["action"])',
        "numpy of a tensor on the device",
    ),
    "frames for the buffer not brought down": (
        "ppg",
        'state.buffer.add(data["obs"].cpu(), ',
        'state.buffer.add(data["obs"], ',
        "numpy of a tensor on the device",
    ),
    "noise drawn on the device": (
        "ppo",
        "torch.empty(logprobs.shape).exponential_()",
        "torch.empty_like(logprobs).exponential_()",
        "random numbers drawn on the device",
    ),
    "order drawn on the device": (
        "ppo",
        "torch.randperm(envs)",
        'torch.randperm(envs, device=torch.device("cuda"))',
        "random numbers drawn on the device",
    ),
    "frames uploaded twice": (
        "ppo",
        "obs[:, t] = frames",
        "obs[:, t] = frames.cpu()",
        ("collect", "up", "obs[:, t] = frames.cpu()"),
    ),
    "frames uploaded once more for the loss": (
        "ppo",
        'data |= {"obs": obs, ',
        'data |= {"obs": obs.cpu(), ',
        ("between", "up", "data = {name: x.to(device)"),
    ),
    "frames of the auxiliary phase uploaded for each loss": (
        "ppg",
        "state.aux_optimizer.zero_grad()",
        "state.aux_optimizer.zero_grad(), upload(frames[minibatch.flatten()], device)",
        ("auxiliary epoch", "up", "x.pin_memory()"),
    ),
    "frames not from pinned memory": (
        "ppo",
        "x.pin_memory().to(device, non_blocking=True)",
        "x.to(device, non_blocking=True)",
        ("collect", "wait", "x.to(device, non_blocking=True)"),
    ),
    "a stray item": (
        "ppo",
        "optimizer.step()",
        "optimizer.step(), loss.item()",
        ("optimise", "wait", "loss.item()"),
    ),
    "a stray truth value": (
        "ppo",
        "optimizer.step()",
        "loss.isfinite() and optimizer.step()",
        ("optimise", "wait", "loss.isfinite()"),
    ),
    "a stray mask": (
        "ppo_ewma",
        "(clipped != ratio).float().mean()",
        "ratio[clipped != ratio].sum()",
        ("optimise", "wait", "ratio[clipped != ratio]"),
    ),
}


def mutate(folder, script, old, new):
    text = (ROOT / f"{script}.py").read_text()
    assert text.count(old) == 1, f"{script}.py has {text.count(old)} times {old}"
    path = folder / f"{script}.py"
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(mistake, pretend, tmp_path):
    script, old, new, sign = MISTAKES[mistake]
    path = mutate(tmp_path, script, old, new)
    flags = [*tiny(script), "--total-timesteps", 64, *GPU, "--run-dir", tmp_path / "run"]
    if isinstance(sign, str):
        pretend(path, *flags, error=sign)
    else:
        phase, kind, line = sign
        lines = [x for _, _, where in excess(script, pretend(path, *flags)).values() for x in where]
        assert any(x.startswith(f"{phase} | {kind} |") and line in x for x in lines), lines


def test_a_resumed_run_left_on_the_cpu_is_caught(runs, pretend, tmp_path):
    path = mutate(tmp_path, "ppo", "saved[name].to(x.device)", "saved[name]")
    shutil.copytree(runs("ppo")[0] / "gpu", tmp_path / "run")
    pretend(path, "--resume", tmp_path / "run", "--total-timesteps", 128, error="tensors on both devices")


def test_evaluate(runs, pretend, tmp_path):
    """The same episodes on both devices."""
    found = []
    for flags in (GPU, CPU):
        more = ["--episodes", 3, "--num-envs", 2, "--json", tmp_path / "numbers.json"]
        [counts] = pretend("experiments/evaluate", runs("ppg_ewma")[0] / "cpu", *more, *flags)
        numbers = json.loads((tmp_path / "numbers.json").read_text())
        found.append((numbers["results"], numbers["generalisation_gap"]))
        assert bool(counts) is (flags is GPU)
    assert found[0] == found[1]
