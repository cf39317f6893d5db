"""experiments/throughput.py: that it times and counts what it says, and from end to end at a tiny size."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from torch.autograd import DeviceType
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from helpers import ROOT, command_line, load

sys.path.insert(0, str(ROOT / "experiments"))
import throughput  # noqa: E402
from lab import gpu_model, timing  # noqa: E402

SMALL = "--num-envs 8 --num-steps 16 --channels 2 2 2 --device cpu"


def arguments(flags=SMALL):
    with command_line("throughput", flags.split()):
        return throughput.parse_args()


def operations_by_hand(channels):
    """Two for each weight of a 3 x 3 convolution and each place it is applied at; and of the three dense layers."""
    total, width, side = 0, 3, 64
    for out in channels:
        total += 2 * 9 * width * out * side**2
        side //= 2
        total += 4 * 2 * 9 * out * out * side**2
        width = out
    return total + 2 * (width * side**2 * 256 + 256 * 15 + 256)


def test_operations_of_a_forward_pass():
    assert throughput.forward_operations([4, 5, 6]) == operations_by_hand([4, 5, 6])


@pytest.mark.parametrize("name", timing.CONFIGS)
def test_the_ceiling_counts_the_passes_that_a_script_makes(name, tmp_path):
    config = timing.CONFIGS[name]
    flags = "--num-envs 2 --num-steps 16 --num-minibatches 2 --device cpu --checkpoint-seconds 1000".split()
    flags += [*config.flags, "--total-timesteps", "32" if name != "staleness" else "64", "--run-dir", tmp_path / "run"]
    with command_line(config.script, flags), FlopCounterMode(display=False) as counter:
        load(config.script).main()
    passes = counter.get_total_flops() / 32 / operations_by_hand([16, 32, 32])
    # Beside what is counted: the value of the last observation, 1/16 of a rollout; in PPG the pass that notes the
    # policy, for staleness the rollout of the iteration that only collects. The first layer has no gradient of its
    # input, which is 2% of a forward-backward pass less.
    beside = config.rollout / 16 + ("ppg" in name) + (name == "staleness") * (1 + 1 / 16)
    assert passes == pytest.approx(config.rollout + config.update + beside, rel=0.03)


def test_from_end_to_end(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(throughput, "CONFIGS", {name: timing.CONFIGS[name] for name in ("ppo", "ppo_ewma")})
    monkeypatch.setattr(throughput, "OTHER_SIZES", {"ppo": []})
    files = ["--csv", tmp_path / "table.csv", "--plot", tmp_path / "bars.png"]
    with command_line("throughput", ["--quick", *SMALL.split(), *files]):
        throughput.main()
    printed, progress = capfd.readouterr()
    assert "| ppo_ewma |" in printed and re.search(r"\nppo: 8 environments \d+ steps/s\n", printed)
    sizes = ["environments alone", "ppo, 8 x 16", "ppo_ewma, 8 x 16"]
    speed = r": [\d,]+ steps/s\n"
    hint = r"\nTo share this table, open an issue titled 'throughput on .+' and paste it\.\n"
    assert re.fullmatch("".join(f"round 1/1: {size}{speed}" for size in sizes) + hint, progress)

    table = pd.read_csv(tmp_path / "table.csv").set_index("name")
    assert list(table.index) == ["ppo", "ppo_ewma"]
    assert (table > 0).all(axis=None) and table["time_over_base"]["ppo"] == 1
    ceiling = table["gemm_gflops"] * 1e9 / operations_by_hand([2, 2, 2]) / pd.Series({"ppo": 10, "ppo_ewma": 13})
    fraction = table["steps_per_second"] / ceiling
    assert fraction.to_list() == pytest.approx(table["ceiling_fraction"].to_list(), rel=1e-3)
    whole = 1 / (1 / table["rollout"] + 1 / table["update"])
    assert whole.to_list() == pytest.approx(table["steps_per_second"].to_list(), rel=0.01)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["ppg_detach", "staleness"])
def test_phases_of_the_scripts(name, tmp_path):
    phases = []
    flags = timing.flags_of(name, 8, 1, 2, arguments())
    flags += ["--num-minibatches", 2, "--run-dir", tmp_path / "run"]
    timing.run_script(timing.CONFIGS[name].script, flags, phases.append)
    update = ["optimise"] + 7 * ["auxiliary"] if name == "ppg_detach" else 3 * ["optimise"]
    first = update if name == "ppg_detach" else []
    assert phases == ["collect", "prepare", *first, "log", "collect", "prepare", *update, "log"]


@pytest.mark.parametrize("name, training", [("ppo", [True, True]), ("staleness", [False, True, True])])
def test_what_is_timed_comes_after_a_warm_up(name, training, tmp_path, monkeypatch, capsys):
    """Of a made-up script, the first of whose iterations with an update takes longer, by a made-up clock."""
    clock, flags_seen = SimpleNamespace(now=0), []

    def run_script(script, flags, at, change):
        flags_seen.extend(flags)
        module = SimpleNamespace(Agent=type("Agent", (), {"__call__": lambda self, obs: wait(2)}))
        change(module)
        for i, trains in enumerate(training):
            duration = 1 if i == len(training) - 1 else 1000
            at("collect")
            module.Agent()(None)
            wait(5 * duration)
            at("prepare")
            module.Agent()(None)
            wait(7 * duration)
            if trains:
                at("optimise")
                wait(11 * duration)
            at("log")
            wait(10_000)

    def wait(time):
        clock.now += time

    def run(command, **_):
        timing.time_script(command[3], command[4:])
        return SimpleNamespace(returncode=0, stdout=capsys.readouterr().out)

    for module in (throughput, timing):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: clock.now))
    monkeypatch.setattr(timing, "run_script", run_script)
    monkeypatch.setattr(subprocess, "run", run)
    result = throughput.measure_run(name, 8, 16, arguments(), tmp_path)
    assert (result["rollout"], result["forward"], result["total"]) == (2 + 5, 2, 2 + 5 + 2 + 7 + 11)
    assert flags_seen[flags_seen.index("--total-timesteps") + 1] == str(len(training) * 8 * 16)


@pytest.mark.parametrize("policy, expected", [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_idle_threads_sleep_as_they_do_in_a_script(policy, expected):
    """PyTorch's threads look when torch is loaded: what do they see then?"""
    look = """if 1:
        import importlib.abc, os, sys
        class Look(importlib.abc.MetaPathFinder):
            def find_spec(self, name, *_):
                if name == "torch":
                    sys.exit(os.environ.get("GOMP_SPINCOUNT"))
        sys.meta_path.insert(0, Look())
        __import__(sys.argv[1])
    """
    without = {name: x for name, x in os.environ.items() if name != "GOMP_SPINCOUNT"}
    for name, folder in [("ppo", ROOT), ("throughput", ROOT / "experiments")]:
        command = [sys.executable, "-c", look, name]
        ended = subprocess.run(command, env={**without, **policy, "PYTHONPATH": folder}, capture_output=True, text=True)
        assert ended.stderr == f"{expected}\n", name


def test_a_script_that_fails_is_one_line(tmp_path, monkeypatch, capsys):
    failed = SimpleNamespace(returncode=1, stdout="", stderr="a warning\nppo.py: error: no room\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit) as end:
        throughput.measure_run("ppo", 8, 16, arguments(), tmp_path)
    assert end.value.code == 1 and capsys.readouterr().err.endswith(": error: ppo: ppo.py: error: no room\n")


@pytest.mark.parametrize("flags, precision", [("", torch.float32), ("--bf16", torch.bfloat16)])
def test_the_ceiling_and_the_scripts_have_one_precision(flags, precision, monkeypatch):
    products, args = [], arguments(f"{SMALL} {flags}")
    monkeypatch.setattr(throughput, "seconds", lambda product, _: products.append(product()) or 1)
    throughput.matrix_multiplication(args)
    assert products[0].dtype == precision
    assert timing.parsed("ppo", 8, 16, args).bf16 == (precision == torch.bfloat16)
    assert timing.parsed("ppg_dual", 8, 16, arguments(f"{SMALL} --compile")).compile


class Border(TorchFunctionMode):
    """Counts what would cross to a GPU and back, in a script that runs on a CPU: results of what is there are there."""

    def __init__(self):
        super().__init__()
        self.up = self.down = self.waits = 0
        self.open = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for y in args for x in (y if isinstance(y, list | tuple) else [y]) if isinstance(x, torch.Tensor)]
        there = any(hasattr(x, "there") for x in tensors)
        if function is torch.Tensor.to and isinstance(args[1], torch.device) and not there:
            self.waits += self.open
            return self.upload(args[0], None)
        if function is torch.Tensor.cpu and there:
            self.waits += self.open
            self.down += self.open * args[0].nbytes
            with torch._C.DisableTorchFunction():
                return args[0].clone()
        result = function(*args, **kwargs)
        if there or kwargs.get("device") is not None:
            for x in result if isinstance(result, list | tuple) else [result]:
                if isinstance(x, torch.Tensor):
                    x.there = True
        return result

    def upload(self, x, _):
        self.up += self.open * x.nbytes
        with torch._C.DisableTorchFunction():
            x = x.clone()
        x.there = True
        return x


@pytest.mark.parametrize("name", timing.CONFIGS)
def test_copies_and_waits_are_those_of_the_script(name, tmp_path):
    border, iterations = Border(), 1 + (name == "staleness")
    flags = timing.flags_of(name, 8, 2, iterations, arguments())
    flags += ["--microbatch-size", "3", "--run-dir", str(tmp_path / "run")]
    rollouts = []

    def at(phase):
        rollouts.extend([phase] * (phase == "collect"))
        border.open = len(rollouts) == iterations and phase != "log"

    def change(module):
        module.upload = border.upload

    with border:
        timing.run_script(timing.CONFIGS[name].script, flags, at, change)
    module = load(timing.CONFIGS[name].script)
    with command_line(name, flags):
        args, _ = module.parse_args()
    assert gpu_model.copies(args) == (border.up, border.down, border.waits)


def test_ppo_copies_no_more_than_frames_and_little_else():
    up, _, _ = gpu_model.copies(timing.parsed("ppo", 64, 256, arguments("--device cpu")))
    assert up < 205e6


def test_profile(capfd):
    with command_line("throughput", "--profile --quick --channels 8 16 16 --device cpu".split()):
        throughput.main()
    printed, progress = capfd.readouterr()
    lines = ["a large matrix multiplication", "forward-backward passes of 64 frames, timed as a whole"]
    assert progress.splitlines() == [*lines, "5 passes, by operation"]  # and nothing of PyTorch's
    rows = dict(re.findall(r"^\| ([^-]*?) \| (.*) \|$", printed, re.MULTILINE))
    milliseconds, shares = ([float(rows[x].split(" | ")[i].strip("%")) for x in list(rows)[1:]] for i in (0, 1))
    assert sum(shares) == pytest.approx(100, abs=len(shares) / 2)
    assert shares == pytest.approx([100 * x / sum(milliseconds) for x in milliseconds], abs=1)
    dense, first = 2 * (16 * 8 * 8 * 256 + 256 * 15 + 256), 2 * 9 * 3 * 8 * 64**2
    forward = operations_by_hand([8, 16, 16]) - dense
    operations = {"convolution": forward, "convolution, gradient": 2 * forward - first}  # no gradient of the frames
    for name, number in operations.items():
        time, _, speed, _ = map(float, rows[name].replace("%", "").split(" | "))
        rounded = 0.05 / time + 0.5 / speed
        assert time * speed * 1e6 == pytest.approx(64 * number, rel=1.1 * rounded)
    assert {"dense", "pooling", "ReLU", "sums"} < rows.keys()


def test_a_profile_on_a_gpu_counts_a_kernel_once():
    def event(key, device, cpu, gpu):
        return SimpleNamespace(key=key, device_type=device, self_cpu_time_total=cpu, self_device_time_total=gpu)

    events = [
        event("aten::convolution_backward", DeviceType.CPU, 70, 900),
        event("aten::relu", DeviceType.CPU, 20, 100),
    ]
    events += [event("cudnn_relu_wgrad", DeviceType.CUDA, 0, 900), event("relu_kernel", DeviceType.CUDA, 0, 100)]
    on_gpu, on_cpu = (throughput.time_by_kind(events, device, passes=10) for device in ("cuda", "cpu"))
    assert on_gpu == pytest.approx({"convolution, gradient": 90e-6, "ReLU": 10e-6})
    assert on_cpu == pytest.approx({"convolution, gradient": 7e-6, "ReLU": 2e-6})


@pytest.mark.parametrize("name", ["ppo", "ppg_ewma", "staleness"])
def test_the_model_counts_an_iteration_from_two_short_ones(name, tmp_path):
    args, config = arguments("--num-envs 8 --num-steps 6 --channels 2 2 2 --model"), timing.CONFIGS[name]
    whole, extrapolated = gpu_model.count(name, 6, args, tmp_path), gpu_model.count_iteration(name, args, tmp_path)
    assert whole.keys() == extrapolated.keys()
    for key in whole:
        assert extrapolated[key] == pytest.approx(whole[key], rel=0.01), key
    kernels, operations, _ = sum(whole.values())
    passes = config.rollout * 7 / 6 + config.update + ("ppg" in name)
    trained = {"ppo": 3, "staleness": 3, "ppg_ewma": 2 * 7}[name] * 2 * 9 * 3 * 2 * 64**2  # no gradient of the frames
    assert operations == pytest.approx(8 * 6 * (passes * operations_by_hand([2, 2, 2]) - trained), rel=0.01)
    convolutions = sum(x[0] for (_, operation, _), x in whole.items() if operation == "convolution") / 2
    rollout = (6 + 1) * config.rollout
    update = {"ppo": 24, "staleness": 24 + 1, "ppg_ewma": 8 * 3 + 1 + 6 * 2 * 2}[name]
    assert convolutions == 15 * (rollout + update)
    assert kernels > 20 * convolutions / 15
    read = sum(x[2] for (phase, operation, _), x in whole.items() if (phase, operation) == ("optimise", "index"))
    epochs = 1 if name == "ppg_ewma" else 3  # a minibatch's frames are read and written, not the whole batch
    assert read == pytest.approx(epochs * 8 * 6 * 2 * 64 * 64 * 3, rel=0.03)


def test_what_the_model_predicts():
    copied = 320e6, 0, 100
    counts = {("optimise", "convolution", (3,)): (10, 82.6e12, 1e9), ("optimise", "relu", (3,)): (10, 0, 1008e9)}
    counts["collect", "relu", ()] = (1000, 0, 10)
    parts, least = gpu_model.predict(counts, copied, "RTX 4090", bf16=False)
    copies = 320e6 / 32e9 + 320e6 / 5e9 + 100 * 20e-6
    assert parts == pytest.approx({"optimise": 1 / 0.3 + 1 / 0.75, "collect": 1000 * 5e-6, "copies": copies})
    assert least == pytest.approx(2, rel=1e-6)
    halved, _ = gpu_model.predict(counts, copied, "RTX 4090", bf16=True)
    assert halved["optimise"] == pytest.approx(0.5 / 0.3 + 1 / 0.75)


@pytest.mark.parametrize("flags, gpus", [("", {"RTX 4090", "A100", "T4"}), ("--bf16", {"RTX 4090", "A100"})])
def test_model(flags, gpus, monkeypatch, capsys):
    for module in (throughput, gpu_model):
        monkeypatch.setattr(module, "CONFIGS", {"ppo": timing.CONFIGS["ppo"]})
    monkeypatch.setattr(throughput, "measure_environments", lambda _: 4096)
    with command_line("throughput", f"--model --num-envs 8 --channels 2 2 2 {flags}".split()):
        throughput.main()
    printed, progress = capsys.readouterr()
    assert progress == "environments alone\ncount what ppo does\n"
    assert printed.startswith("A model, not a measurement.\nAn iteration of 8 environments x 256 steps, ")
    assert "Procgen at 4,096 steps/s" in printed and "30% of the published peak" in printed
    rows = [row.strip("| ").split(" | ") for row in printed.splitlines() if row.startswith("| ppo |")]
    assert Counter(len(row) for row in rows) == {7: 1, 10: len(gpus)} and {row[1] for row in rows[1:]} == gpus
    for _, _, speed, *seconds, peak in rows[1:]:
        assert seconds[0] == "0.50"  # the environments' share
        whole, rounding = sum(float(x) for x in seconds if x), 6 * 0.005
        speed, peak = (float(x.replace(",", "")) for x in (speed, peak))
        assert 8 * 256 / (whole + rounding) < speed < 8 * 256 / (whole - rounding) and speed < peak


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--rounds 0", "argument --rounds: 0: must be a whole number, 1 or more"),
        ("--num-envs 6 --num-steps 100", "--num-envs 6 --num-steps 100: ppo.py says: --num-minibatches 8: .*evenly.*"),
        ("--num-envs 8 --num-steps 3", "--num-envs 8 --num-steps 3: 24 steps in all do not split evenly over 16 .*"),
        ("--num-envs 8 --num-steps 8000000", "--num-envs 8 .*: ppo.py says: .* GB of memory needed, .*"),
        ("--channels 1 0 1", "argument --channels: 0: must be a whole number, 1 or more"),
        ("--quic", "unrecognized arguments: --quic"),
        ("--device cuda", "--device cuda: PyTorch finds no CUDA device; use cpu or auto"),
        ("--model --compile", "--model: counts kernels as they are without --compile"),
        ("--csv /nowhere/table.csv", r"--csv /nowhere/table.csv: cannot be written \(No such file or directory\)"),
        ("--plot /", r"--plot /: cannot be written \(it is a folder\)"),
        ("--plot bars.jpeg2", "--plot bars.jpeg2: must end in .png, .svg or .pdf"),
        ("--profile --csv table.csv", "--csv: --profile and --model only print"),
    ],
)
def test_bad_input_ends_before_anything_is_measured(flags, message, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("measure", "profile", "model", "measure_environments"):
        monkeypatch.setattr(throughput, name, lambda *_: pytest.fail("something was measured"))
    with command_line("throughput", flags.split()), pytest.raises(SystemExit) as end:
        throughput.main()
    assert end.value.code == 2
    printed, error = capsys.readouterr()
    assert not printed and re.fullmatch(f"throughput.py: error: {message}\n", error)


def test_the_process_that_measures(tmp_path, capsys):
    """In this process: what it prints is JSON, with all that measure() needs."""
    flags = timing.flags_of("ppo", 8, 1, 2, arguments()) + ["--run-dir", str(tmp_path / "run")]
    with command_line("ppo", []):
        timing.time_script("ppo", flags)
    result = json.loads(capsys.readouterr().out)
    assert result.keys() == {"first_step", "forward", "peak_anon_gb", "rollout", "total"}
    assert 0 < result["forward"] < result["rollout"] < result["total"]
