"""experiments/fresh_returns.py: on games whose returns are known, on runs on Procgen and on CartPole, on bad input."""

import csv
import math
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from helpers import ROOT, call, checkpoint, curves, load, run, tiny, train

sys.path.insert(0, str(ROOT / "experiments"))
import fresh_returns  # noqa: E402

CPU = torch.device("cpu")


class Games:
    """Environment i's episodes take i + 1 steps, each with a reward of 10."""

    def __init__(self, args):
        self.length, self.step = torch.arange(args.num_envs) + 1, 0
        assert args.seed != 1, "the games of training"

    def observe(self):
        first = self.step % self.length == 0
        return torch.full((len(first),), 10.0), torch.zeros(len(first), 64, 64, 3, dtype=torch.uint8), first

    def act(self, action):
        self.step += 1


@pytest.mark.parametrize("episodes", [5, 64, 128, 130])
def test_each_environment_plays_its_number_of_episodes(episodes):
    """The first to end would be short ones: of 128 at 64 environments, on average less than half as long."""
    module = SimpleNamespace(Games=Games, sample=load("ppo").sample)
    agent, train = lambda obs: (torch.zeros(len(obs), 15),), SimpleNamespace(seed=1)
    returns, lengths = fresh_returns.play(agent, module, train, episodes, 1, CPU, mock.Mock())
    assert returns == [10 * x for x in lengths]
    assert Counter(lengths) == Counter(i % 64 + 1 for i in range(episodes))


def read(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_a_run_on_procgen(tmp_path):
    """The same from its folder and from its checkpoint file. And bad input."""
    train("ppg", tmp_path / "one", *tiny("ppg"))
    paths, table = [tmp_path / "one", tmp_path / "one/checkpoint.pt"], tmp_path / "returns.csv"
    code, out, err = call(fresh_returns, *paths, "--episodes", 3, "--csv", table, "--device", "cpu")
    assert (code, err) == (0, "")
    first, again = read(table)
    assert (first.pop("run"), again.pop("run")) == ("one", "checkpoint.pt") and first == again
    assert int(first["step"]) == checkpoint(tmp_path / "one")["global_step"] and first["episodes"] == "3"
    assert float(first["length"]) > 10 and f"{float(first['return']):.2f}" in out

    saved = checkpoint(tmp_path / "one")
    saved["agent"] = {name: x * math.nan for name, x in saved["agent"].items()}
    saved.pop("digest")
    torch.save(saved | {"digest": load("ppg").digest(saved)}, tmp_path / "nan.pt")
    for flags, expected, message in [
        ([tmp_path / "nowhere"], 2, "there is no such folder"),
        ([tmp_path / "one", "--episodes", 0], 2, "--episodes"),
        ([tmp_path / "one", "--csv", tmp_path / "no/such/x.csv"], 2, "--csv"),
        ([tmp_path / "one", "--script", tmp_path / "x.py"], 2, "there is no such file"),
        ([tmp_path / "nan.pt", "--episodes", 1], 1, "not finite"),
    ]:
        code, out, err = call(fresh_returns, *flags)
        assert (code, out, err.count("\n")) == (expected, "", 1) and message in err, (flags, err)


def test_a_patched_script(tmp_path):
    """On CartPole every step is worth 1, so returns are lengths; one who has learnt nothing falls over soon."""
    script = tmp_path / "my_ppo.py"
    subprocess.run(["patch", "-s", "-o", script, ROOT / "ppo.py", ROOT / "patches/gymnasium.patch"], check=True)
    flags = "--env-id CartPole-v1 --num-envs 4 --num-steps 8 --num-minibatches 2 --channels 8 --total-timesteps 256"
    words = [sys.executable, script, *flags.split(), "--device", "cpu", "--run-dir", tmp_path / "run"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    words = [tmp_path / "run", "--script", script, "--csv", tmp_path / "returns.csv"]
    code, _, err = run("experiments/fresh_returns", *words)
    assert (code, err) == (0, "")
    (row,) = read(tmp_path / "returns.csv")
    assert row["step"] == "256" and float(row["return"]) == pytest.approx(float(row["length"]), abs=0.06)
    assert 10 < float(row["return"]) < 60
    assert float(row["on the curve"]) == pytest.approx(
        curves(tmp_path / "run")["episode/return_last_100"][-1][1], abs=1e-3
    )
