"""experiments/throughput.py: that it counts the right operations, and from end to end at a tiny size."""

import itertools
import json
import re
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
from helpers import ROOT, command_line, load
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(ROOT / "experiments"))
import throughput  # noqa: E402


def operations_by_hand(channels):
    """Two for each weight of a 3 x 3 convolution and each place it is applied at; and of the three dense layers."""
    total, width, side = 0, 3, 64
    for out in channels:
        total += 2 * 9 * width * out * side**2
        side //= 2
        total += 4 * 2 * 9 * out * out * side**2
        width = out
    return total + 2 * (width * side**2 * 256 + 256 * 15 + 256)


@pytest.mark.parametrize("name", throughput.CONFIGS)
def test_the_ceiling_counts_the_passes_that_a_script_makes(name, tmp_path):
    config = throughput.CONFIGS[name]
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


def test_from_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(throughput, "CONFIGS", {name: throughput.CONFIGS[name] for name in ("ppo", "ppo_ewma")})
    monkeypatch.setattr(throughput, "OTHER_SIZES", {"ppo": [2]})
    flags = "--quick --num-envs 4 --num-steps 16 --channels 2 2 2 --device cpu".split()
    files = ["--csv", tmp_path / "table.csv", "--plot", tmp_path / "bars.png"]
    with command_line("throughput", [*flags, *files]):
        throughput.main()
    printed = capsys.readouterr().out
    assert "| ppo_ewma |" in printed and "ppo: 2 environments" in printed
    table = pd.read_csv(tmp_path / "table.csv").set_index("name")
    assert list(table.index) == ["ppo", "ppo_ewma"]
    assert (table > 0).all(axis=None) and table["time_over_base"]["ppo"] == 1
    ceiling = table["gemm_gflops"] * 1e9 / operations_by_hand([2, 2, 2]) / pd.Series({"ppo": 10, "ppo_ewma": 13})
    fraction = table["steps_per_second"] / ceiling
    assert fraction.to_list() == pytest.approx(table["ceiling_fraction"].to_list(), rel=1e-3)
    whole = 1 / (1 / table["rollout"] + 1 / table["update"])
    assert whole.to_list() == pytest.approx(table["steps_per_second"].to_list(), rel=0.01)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_last_iteration_is_timed(tmp_path, monkeypatch, capsys):
    """By a clock that counts how often it is looked at: as often in a rollout of one script as of another."""
    monkeypatch.setattr(throughput, "time", SimpleNamespace(time=itertools.count().__next__))
    noted = {}
    for name, iterations in [("ppo", 1), ("staleness", 2)]:
        flags = "--num-envs 2 --num-steps 16 --num-minibatches 2 --channels 2 2 2 --device cpu".split()
        flags += [*throughput.CONFIGS[name].flags, "--total-timesteps", str(32 * iterations)]
        with command_line(name, []):
            throughput.measure_script(name, [*flags, "--run-dir", str(tmp_path / name)])
        noted[name] = json.loads(capsys.readouterr().out)
    assert noted["ppo"]["rollout"] == noted["staleness"]["rollout"] > 2 * 16
    assert noted["ppo"]["rollout_forward"] == noted["staleness"]["rollout_forward"] == 16


def test_profile(capsys):
    with command_line("throughput", "--profile --quick --channels 8 16 16 --device cpu".split()):
        throughput.main()
    printed = capsys.readouterr().out
    rows = dict(re.findall(r"^\| (.*?) \| (.*) \|$", printed, re.MULTILINE))
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


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--rounds 0", "--rounds 0: must be 1 or more"),
        (
            "--num-envs 3",
            "--num-envs 3 --num-steps 256: 768 steps in all "
            "do not split into 8 minibatches with 3, 16, 256 environments",
        ),
        ("--channels 1 0 1", "--channels: must be 1 or more"),
        ("--csv /nowhere/table.csv", "--csv /nowhere/table.csv: cannot be written there"),
        ("--device cuda", "--device cuda: PyTorch finds no CUDA device; use cpu or auto"),
    ],
)
def test_bad_input(flags, message, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with command_line("throughput", flags.split()), pytest.raises(SystemExit) as end:
        throughput.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == f"throughput.py: error: {message}\n"
