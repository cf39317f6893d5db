"""patches/gymnasium.patch turns each of the five scripts into one for Gymnasium, and that one trains."""

import contextlib
import io
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

import helpers
from helpers import PPG, ROOT, SCRIPTS, TINY_PPG, TINY_STALE, checkpoint, command_line, curves

PATCH = ROOT / "patches/gymnasium.patch"
TINY = "--num-envs 4 --num-steps 8 --num-minibatches 2 --channels 5 --device cpu --checkpoint-seconds 0"
TINY = [*TINY.split(), "--total-timesteps", "96"]


class Count(gym.Env):
    """Shows how many steps the episode has had, and rewards them; ends after 5, or is cut off after 7."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2, 1), np.float64)
    action_space = gym.spaces.Discrete(2, start=7)
    seeds = []

    def reset(self, seed=None, options=None):
        if seed is not None:
            Count.seeds.append(seed)
            self.cut_off = len(Count.seeds) % 2 == 0  # every other environment
        self.steps = 0
        return self.show(), {}

    def step(self, action):
        assert action in self.action_space
        self.steps += 1
        return self.show(), self.steps / 4, self.steps == 5 and not self.cut_off, self.steps == 7, {}

    def show(self):
        return np.array([[self.steps], [1 / 3]])


gym.register("Count-v0", Count)


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A folder with the five scripts, patched as a user does it; one that needs fuzz is refused."""
    folder = tmp_path_factory.mktemp("patched")
    for script in SCRIPTS:
        words = ["patch", "--fuzz=0", "-o", folder / f"{script}.py", ROOT / f"{script}.py", PATCH]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0 and "fuzz" not in done.stdout, f"{script}.py: {done.stdout}{done.stderr}"
    return folder


@pytest.fixture
def load(patched, monkeypatch):
    """helpers.load, for patched scripts. The module is new each time: its sizes are those of its environment."""
    monkeypatch.setattr(helpers, "ROOT", patched)
    return helpers.load.__wrapped__


def train(module, *flags):
    """Run a patched script in this process; returns what it prints."""
    with command_line(module.SCRIPT, flags), contextlib.redirect_stdout(io.StringIO()) as printed:
        module.main()
    return printed.getvalue()


def tiny(script):
    return TINY + (TINY_PPG if script in PPG else TINY_STALE if script == "staleness" else [])


def hunks():
    """For each of the patch's hunks the lines before, and those after."""
    parts = PATCH.read_text().split("\n@@ ")[1:]
    lines = [part.removesuffix("\n").split("\n")[1:] for part in parts]
    return [["\n".join(x[1:] for x in hunk if x[0] != sign) for sign in "+-"] for hunk in lines]


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_hunk_has_one_place(script, patched):
    before, after = (f"{folder}/{script}.py" for folder in (ROOT, patched))
    before, after = (open(path).read() for path in (before, after))
    for old, new in hunks():
        assert before.count(f"\n{old}\n") == 1, old
        assert after.count(f"\n{new}\n") == 1, new
        before, after = before.replace(f"\n{old}\n", "\n@@\n"), after.replace(f"\n{new}\n", "\n@@\n")
    assert before == after  # nothing else has changed


def test_no_name_is_left_without_a_definition(patched):
    words = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=100", "--select=E,F,W,B", patched]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for script in SCRIPTS:
        lines = (patched / f"{script}.py").read_text().splitlines()
        assert not [x for x in lines if "procgen" in x and "import" in x], script


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_trains_and_resumes(script, load, tmp_path):
    out, module = tmp_path / "run", load(script)
    assert "anew" not in train(module, "--env-id", "Count-v0", *tiny(script), "--run-dir", out)
    saved = checkpoint(out)
    assert saved["iteration"] == 3 and saved["games"] == {} and module.FRAME == (8,)
    assert saved["episodes"].min() > 0  # all are in the middle of an episode
    logs = curves(out)
    assert [step for step, _ in logs["episode/return"]] == [32, 64, 96]
    for tag in ["loss/aux_head", "loss/aux_value_head"] if script in PPG else []:  # a phase has 2 iterations
        assert [step for step, _ in logs[tag]] == [64] and np.isfinite(logs[tag]).all()

    Count.seeds.clear()
    printed = train(load(script), "--resume", out, "--total-timesteps", 192)
    assert "resumed    after iteration 3, 96 steps\n  but not exactly" in printed
    saved = checkpoint(out)
    assert saved["iteration"] == 6 and saved["games"] == {}
    assert {(x, y) for x, y in saved["recent"]} == {(3.75, 5.0), (7.0, 7.0)}  # whole episodes only, of either kind
    assert len(set(Count.seeds)) == 8  # of 4 environments: from the start, then from the checkpoint's generator
    assert Count.seeds[:4] != Count.seeds[4:]


def test_what_the_scripts_see_of_an_environment(load):
    """Episodes of 5 steps in the first environment, and of 7, where a time limit ends them, in the second."""
    module = load("ppg")
    Count.seeds.clear()
    with command_line("ppg", ["--env-id", "Count-v0", "--num-envs", 2, "--num-minibatches", 2]):
        args = module.parse_args()[0]
    assert module.ACTIONS == 2
    games = module.Games(args)
    seen = [games.observe()]
    for _ in range(8):
        games.act(torch.tensor([0, 1]))
        seen.append(games.observe())
    reward, obs, first = (torch.stack(x) for x in zip(*seen, strict=True))
    assert (reward.dtype, obs.dtype, first.dtype) == (torch.float32, torch.uint8, torch.bool)
    assert (4 * reward).T.tolist() == [[0, 1, 2, 3, 4, 5, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 1]]
    assert first.T.int().tolist() == [[1, 0, 0, 0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 1, 0]]
    numbers = obs.view(torch.float32)  # as the network does
    assert numbers[..., 0].T.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 0, 1]]
    assert (numbers[..., 1] == torch.tensor(1 / 3)).all()


def test_the_auxiliary_phase_gets_the_numbers_back(load, tmp_path):
    module = load("ppg")
    with command_line("ppg", ["--env-id", "Count-v0", *tiny("ppg"), "--run-dir", tmp_path]):
        buffer = module.AuxiliaryBuffer(module.parse_args()[0])
    numbers = torch.randn(2, 4, 8, 2)
    for part in numbers:
        buffer.add(part.view(torch.uint8), torch.zeros(4, 8))
    assert torch.equal(buffer.read()[0].view(torch.float32), numbers.flatten(0, 2))


@pytest.mark.parametrize(
    "name, message",
    [
        ("CartPol-v1", "doesn't exist. Did you mean: `CartPole`?"),
        ("no_such_package:Name-v0", "No module named 'no_such_package'"),
        ("Pendulum-v1", "its observations must be a Box, its actions Discrete"),
        ("FrozenLake-v1", "its observations must be a Box, its actions Discrete"),
    ],
)
def test_an_environment_that_will_not_do(name, message, load, capsys):
    with command_line("ppo", ["--env-id", name]), pytest.raises(SystemExit) as stopped:
        load("ppo").parse_args()
    printed = capsys.readouterr().err
    assert stopped.value.code == 2
    assert printed.startswith(f"ppo.py: error: --env-id {name}: ") and message in printed and printed.count("\n") == 1


def test_there_are_no_convolutions(load, capsys):
    with command_line("ppo", ["--bf16"]), pytest.raises(SystemExit) as stopped:
        load("ppo").parse_args()
    assert (stopped.value.code, capsys.readouterr().err.count("--bf16: is for convolutions")) == (2, 1)


def test_cartpole(load, patched, tmp_path):
    """The command that a patched script suggests reaches a return of 300."""
    flags = load("ppo_ewma").LAPTOP.split()
    words = [sys.executable, patched / "ppo_ewma.py", *flags, "--device", "cpu", "--run-dir", tmp_path / "run"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ppo_ewma.py on CartPole-v1, seed 1" in done.stdout
    assert len(checkpoint(tmp_path / "run")["recent"]) == 100
    assert curves(tmp_path / "run")["episode/return_last_100"][-1][1] >= 300
