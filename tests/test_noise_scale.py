"""experiments/noise_scale.py: on problems whose noise scale is known, on runs of all five scripts, on bad input."""

import math
import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from helpers import PPG, ROOT, SCRIPTS, call, checkpoint, load, run, tiny, train

sys.path.insert(0, str(ROOT / "experiments"))
import noise_scale  # noqa: E402
from noise_scale import Estimate  # noqa: E402

CPU, call = torch.device("cpu"), partial(call, noise_scale)
FRAMES = ["--frames", 260, "--device", "cpu"]  # 16 environments, two rollouts of 8 steps each


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of every script; and one of a single environment, whose minibatches are stretches of 2 frames."""
    folder = tmp_path_factory.mktemp("runs")
    for script in SCRIPTS:
        train(script, folder / script, *tiny(script))
    train("ppg", folder / "detach", *tiny("ppg"), "--arch", "detach")
    train("ppo", folder / "single", *tiny("ppo"), "--num-envs", 1, "--num-minibatches", 4)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(noise_scale, "ENVIRONMENTS", 16)
    monkeypatch.setattr(noise_scale, "LATEST_START", 20)
    monkeypatch.setattr(noise_scale, "MIXED", 8)


def rows(out):
    """{loss: cells} of a printed table."""
    lines = [re.split(r"\s{2,}", line) for line in out.splitlines()]
    return {name: cells for name, *cells in lines if name in ("policy", "value", "total")}


# Known noise scales. The loss is 0.5 |theta - x|^2, so that the gradient is theta - x. Here theta is 0, and x has mean
# mu, a part with variance `common` that all frames of a small batch have alike, and one with variance `own`.


def samples(rng, envs, batches, frames, mu, common, own):
    """x [envs, batches * frames, P]."""
    size = (envs, batches, frames, len(mu))
    x = mu + rng.normal(size=(envs, batches, 1, len(mu))) * np.sqrt(common) + rng.normal(size=size) * np.sqrt(own)
    return x.reshape(envs, batches * frames, len(mu))


PROBLEMS = {"independent": (0.0, 2.0), "correlated": (0.5, 1.5)}  # variances, in the mean over P


@pytest.mark.parametrize("common, own", PROBLEMS.values(), ids=PROBLEMS)
def test_a_quadratic_problem_with_known_noise(common, own):
    envs, batches, frames, mu = 16, 3, 8, np.full(40, 0.3)
    weights = np.linspace(0.2, 1.8, 40)  # a different variance in each direction
    signal, trace = (mu**2).sum(), (common * weights * frames + own * weights).sum()
    truth, rng, found = trace / signal, np.random.default_rng(3), []
    for _ in range(600):
        x = samples(rng, envs, batches, frames, mu, common * weights, own * weights)
        g = -x.reshape(envs, batches, frames, -1).mean(2)  # small batches' gradients
        found.append(noise_scale.estimate(torch.from_numpy(g.mean(1)), (g**2).sum(-1).mean(1), frames))

    signals, inverse = np.array([x.signal for x in found]), np.array([1 / x.noise for x in found])
    for estimates, expected in [(signals, signal), (inverse, 1 / truth)]:
        error = estimates.std() / math.sqrt(len(found))
        assert abs(estimates.mean() - expected) < 3.5 * error
        assert error < 0.02 * expected, "too coarse to see a bias"
    covered = np.mean([x.low <= truth <= x.high for x in found])
    assert 0.86 < covered < 0.94
    assert all(x.low < x.noise < x.high for x in found)


@pytest.mark.parametrize("common, own", PROBLEMS.values(), ids=PROBLEMS)
def test_the_same_by_way_of_autograd(common, own, monkeypatch):
    """From losses to the table's numbers, also as if frames were independent: there, common noise does not add up."""
    frames, mu, rng = 8, np.full(40, 0.3), np.random.default_rng(5)
    x = torch.from_numpy(samples(rng, 64, 4, frames, mu, common, own))
    agent = torch.nn.Module()
    agent.theta = torch.nn.Parameter(torch.zeros(40, dtype=torch.float64))
    agent.other = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))  # trained by "value" alone

    def losses(agent, module, train, piece):
        quadratic = 0.5 * ((agent.theta - piece["obs"]) ** 2).sum(-1).mean()
        return {"policy": quadratic, "value": 3 * quadratic + agent.other.sum()}

    monkeypatch.setattr(noise_scale, "losses", losses)
    monkeypatch.setattr(noise_scale, "MIXED", 400)
    settings = SimpleNamespace(microbatch_size=3, vf_coef=0.5)  # pieces of 3, 3 and 2 frames
    data = {"obs": x, "action": x[:, :, 0]}
    results = noise_scale.measure(agent, None, settings, data, frames, CPU, mock.Mock())
    signal, alike, single = 40 * 0.09, 40 * (common * frames + own), 40 * (common + own)
    for name, factor, other in [("policy", 1, 0), ("value", 3, 2), ("total", 2.5, 2 * 0.25)]:
        truth, independent = ((factor**2 * t) / (factor**2 * signal + other) for t in (alike, single))
        estimate, found = results[name]
        assert estimate.low < truth < estimate.high
        assert estimate.noise == pytest.approx(truth, rel=0.15)
        assert found == pytest.approx(independent, rel=0.15)


def test_a_gradient_lost_in_noise_has_a_lower_bound_only():
    rng, bounded = np.random.default_rng(1), 0
    for _ in range(100):
        g = rng.normal(size=(16, 1, 50))
        x = noise_scale.estimate(torch.from_numpy(g[:, 0]), (g**2).sum(-1).mean(1), 4)
        assert x.low > 0 and (x.high == math.inf or x.high > x.low)
        bounded += x.high < math.inf
    assert bounded < 15, "5 in 100 are expected by chance"


# Runs


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_its_losses(script, runs):
    before = sorted((x.name, x.stat().st_mtime_ns) for x in (runs / script).iterdir())
    code, out, err = call(runs / script, *FRAMES)
    assert (code, err) == (0, "")
    assert sorted((x.name, x.stat().st_mtime_ns) for x in (runs / script).iterdir()) == before, "the run was touched"
    assert out.startswith(f"{script}.py on chaser, easy, seed 1, after 96 steps") and "256 fresh frames from 16" in out
    table = rows(out)
    assert list(table) == ["policy", "value"] + ["total"] * (script not in PPG)
    for noise, _interval, minibatch, ratio, num_envs, _independent in table.values():
        assert minibatch == "16"
        if noise != "unknown":
            noise = float(noise.replace(",", ""))
            assert float(ratio) == pytest.approx(16 / noise, abs=0.006 + 0.5 / (noise - 0.5) * 16 / noise)
            assert float(num_envs.replace(",", "")) == pytest.approx(noise * 2 / 8, abs=0.7)


def test_a_seed_repeats_itself(runs):
    first, again, other = (rows(call(runs / "ppo", "--frames", 128, "--seed", seed)[1]) for seed in (1, 1, 2))
    assert first == again != other


def test_several_as_a_user_would(runs):
    paths = [runs / "ppo", runs / "detach" / "checkpoint.pt"]
    code, out, err = run("experiments/noise_scale", *paths, "--frames", 64)
    assert (code, err) == (0, "")
    assert [text.count("policy") >= 1 for text in out.split("\n\n")] == [True, True]
    assert "ppo.py on" in out.split("\n\n")[0] and "ppg.py on" in out.split("\n\n")[1]


def test_a_patched_script_for_another_environment(tmp_path, runs):
    """On CartPole, whose patched script only the user has."""
    script = tmp_path / "my_ppg_ewma.py"
    words = ["patch", "--silent", "-o", script, ROOT / "ppg_ewma.py", ROOT / "patches/gymnasium.patch"]
    subprocess.run(words, check=True)
    flags = "--env-id CartPole-v1 --num-envs 4 --num-steps 8 --num-minibatches 2 --channels 8 --total-timesteps 64"
    words = [sys.executable, script, *flags.split(), *"--n-pi 1 --aux-rollouts 4 --device cpu --run-dir run".split()]
    subprocess.run(words, check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)
    code, out, err = call(tmp_path / "run", "--script", script, *FRAMES)
    assert (code, err) == (0, "") and out.startswith("my_ppg_ewma.py on CartPole-v1, seed 1, after 64 steps")
    assert list(rows(out)) == ["policy", "value"] and rows(out)["policy"][2] == "16"
    for flags, message in [
        ([tmp_path / "run"], "--script must name the script"),
        ([tmp_path / "run", "--script", tmp_path / "nowhere.py"], "there is no such file"),
        ([tmp_path / "run", "--script", ROOT / "README.md"], "does not fit --script"),
        ([runs / "ppo", "--script", script], "--env-id chaser"),
    ]:
        code, out, err = call(*flags)
        assert (code, out, err.count("\n")) == (2, "", 1) and message in err, (flags, err)


def plain_gradients(agent, saved, kept, shared):
    """Loss and {weight: gradient} over all frames once more, from what was recorded, written out."""
    args, T = saved["args"], saved["args"]["num_steps"]
    envs, steps = kept["reward"].shape[0], kept["reward"].shape[1] - 1
    scale = math.sqrt(float(saved["return_stats"][2]) + 1e-8)
    advantage = np.zeros((envs, steps))
    for env in range(envs):
        for t in range(steps):  # the sum over what follows in the same rollout and episode
            for s in range(t, (t // T + 1) * T):
                alive = not kept["first"][env, s + 1]
                reward = np.clip(float(kept["reward"][env, s]) / scale, -10, 10)
                next_value = args["gamma"] * alive * float(kept["value_old"][env, s + 1])
                delta = reward + next_value - float(kept["value_old"][env, s])
                advantage[env, t] += (args["gamma"] * args["gae_lambda"]) ** (s - t) * delta
                if not alive:
                    break
    obs, action = kept["obs"][:, :-1].flatten(0, 1), kept["action"][:, :-1].flatten()
    target = torch.from_numpy(advantage).flatten() + kept["value_old"][:, :-1].flatten()
    normal = torch.from_numpy((advantage - advantage.mean()) / advantage.std()).flatten()
    logits, value = agent(obs)
    policy = Categorical(logits=logits)
    log_prob = policy.log_prob(action)
    ratio = log_prob.exp() / log_prob.exp().detach()
    losses = {"policy": -(ratio * normal).mean() - args["ent_coef"] * policy.entropy().mean()}
    losses["value"] = ((value - target) ** 2).mean()
    if shared:
        losses["total"] = losses["policy"] + args["vf_coef"] * losses["value"]
    for name, loss in losses.items():
        agent.zero_grad()
        loss.backward(retain_graph=True)
        grads = {key: p.grad for key, p in agent.named_parameters() if p.grad is not None}
        yield name, grads


@pytest.mark.parametrize("name", ["ppo", "ppg", "detach", "staleness", "single"])
def test_small_batches_add_up_to_the_gradient_over_all_frames(name, runs, monkeypatch):
    seen, real = {}, {"collect": noise_scale.collect, "estimate": noise_scale.estimate}

    def collect(agent, *rest):
        seen["agent"], seen["kept"] = agent, real["collect"](agent, *rest)
        seen["kept"]["first"][::3, 5] = True  # episodes that end within a rollout
        return seen["kept"]

    def estimate(gradients, square_norms, frames):
        seen.setdefault("estimates", []).append((gradients, square_norms, frames))
        return real["estimate"](gradients, square_norms, frames)

    monkeypatch.setattr(noise_scale, "collect", collect)
    monkeypatch.setattr(noise_scale, "estimate", estimate)
    assert call(runs / name, *FRAMES)[0] == 0
    assert seen["kept"]["reward"].shape == (16, 17) and seen["kept"]["reward"].any()
    saved = checkpoint(runs / name)
    expected = list(plain_gradients(seen["agent"], saved, seen["kept"], name not in ("ppg", "detach")))
    weights = list(seen["agent"].named_parameters())
    trained = {"policy": {"trunk", "policy_head"}, "value": {"trunk", "value_head"}}
    trained["value"] = {"ppg": {"value_trunk", "value_head"}, "detach": {"value_head"}}.get(name, trained["value"])
    for (loss, grads), (gradients, square_norms, frames) in zip(expected, seen["estimates"], strict=True):
        assert {key.split(".")[0] for key in grads} == trained.get(loss, trained["policy"] | trained["value"])
        gradient = torch.cat([grads.get(key, torch.zeros_like(p)).flatten() for key, p in weights])
        assert frames == (2 if name == "single" else 8)
        assert torch.allclose(gradients.mean(0), gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))
        assert (square_norms >= (gradients.double() ** 2).sum(1).numpy() * (1 - 1e-5)).all()


def test_what_is_recorded_fits_together():
    """Games whose frames, rewards and episodes tell their environment and step."""

    class Games:
        def __init__(self, args):
            self.envs, self.step, self.action = args.num_envs, 0, torch.zeros(args.num_envs)
            assert args.seed != 1, "the games of training"

        def observe(self):
            frames = torch.zeros(self.envs, 64, 64, 3, dtype=torch.uint8)
            frames[:, 0, 0, 0], frames[:, 0, 0, 1] = torch.arange(self.envs), self.step
            first = (torch.arange(self.envs) + self.step) % 7 == 0
            return 1000 * self.action + self.step, frames, first

        def act(self, action):
            self.step, self.action = self.step + 1, action.float()

    def agent(obs):
        return torch.zeros(len(obs), 15), 100.0 * obs[:, 0, 0, 0] + obs[:, 0, 0, 1]

    module = SimpleNamespace(Games=Games, sample=load("ppo").sample)
    kept = noise_scale.collect(agent, module, SimpleNamespace(seed=1), 9, 12, 1, CPU, mock.Mock())
    env, step = kept["obs"][:, :, 0, 0, 0].long(), kept["obs"][:, :, 0, 0, 1].long()
    assert (env == torch.arange(9)[:, None]).all() and env.shape == (9, 13)
    assert (step.diff(dim=1) == 1).all() and len(step[:, 0].unique()) > 3 and step.max() <= 20 + 12
    assert torch.equal(kept["value_old"], (100 * env + step).float())
    assert torch.equal(kept["first"], (env + step) % 7 == 0)
    assert torch.equal(kept["reward"], (1000 * kept["action"] + step + 1).float())


# The sentence


@pytest.mark.parametrize(
    "estimate, words, num_envs",
    [
        (Estimate(1000, 700, 2000, 1), "can be expected", "500"),
        (Estimate(1000, 512, math.inf, 1), "in doubt", "500 or more"),
        (Estimate(400, 300, 600, 1), "in doubt", "200"),
        (Estimate(200, 100, 300, 1), "Do not expect", "100"),
        (Estimate(math.inf, 700, math.inf, -1), "can be expected", "350 or more"),
        (Estimate(1.5, 1, 1.9, 1), "Do not expect", None),
        (Estimate(math.inf, math.inf, math.inf, -1), "Nothing can be said", None),
    ],
)
def test_the_sentence_follows_from_the_smallest(estimate, words, num_envs):
    settings = SimpleNamespace(num_minibatches=8, num_steps=16, num_envs=256)
    largest = Estimate(math.inf, math.inf, math.inf, -1)
    *table, sentence = noise_scale.report({"policy": (largest, 0), "value": (estimate, 7)}, settings, 512)
    assert words in sentence and (num_envs is None or sentence.endswith(f"--num-envs {num_envs}."))
    assert any("lower bound" in line for line in table), "policy has no upper end"
    assert rows("\n".join(table))["policy"] == ["unknown", "none", "512", "unknown", "unknown", "unknown"]


def test_the_sentence_minds_the_least_certain():
    """A larger estimate whose interval begins below the minibatch must not go unsaid."""
    settings = SimpleNamespace(num_minibatches=8, num_steps=16, num_envs=256)
    results = {"policy": (Estimate(2000, 300, math.inf, 1), 0), "value": (Estimate(1000, 700, 2000, 1), 0)}
    *_, sentence = noise_scale.report(results, settings, 512)
    assert "in doubt" in sentence and "policy" in sentence


# Bad input


def forge(folder, tmp_path, sign, **changes):
    saved = checkpoint(folder)
    saved.pop("digest")
    saved |= changes
    saved["digest"] = load("ppo").digest(saved) if sign else "0"
    torch.save(saved, tmp_path / "checkpoint.pt")
    return tmp_path


def test_bad_input_is_one_line(runs, tmp_path):
    ppo, nan = runs / "ppo", {name: x * math.nan for name, x in checkpoint(runs / "ppo")["agent"].items()}
    (tmp_path / "text").write_text("no checkpoint")
    cases = [
        ([tmp_path / "nowhere"], 2, "there is no such folder"),
        ([ppo, tmp_path], 2, "there is no checkpoint.pt"),
        ([tmp_path / "text"], 2, "is damaged"),
        ([ppo, "--frames", 63], 2, "--frames 63: must be 64 or more"),
        ([ppo, "--frames", 0], 2, "--frames"),
        ([ppo, "--seed", -1], 2, "--seed"),
        ([], 2, "RUN_DIR"),
    ]
    if not torch.cuda.is_available():
        cases.append(([ppo, "--device", "cuda"], 2, "finds no CUDA device"))
    for flags, expected, message in cases:
        code, _, err = call(*flags)
        assert (code, err.count("\n")) == (expected, 1) and message in err, (flags, err)
    for sign, changes, expected, message in [
        (False, {}, 2, "was changed after it was written"),
        (True, {"format": 1}, 2, "has format 1"),
        (True, {"agent": nan}, 1, "not finite"),
    ]:
        code, out, err = call(forge(ppo, tmp_path, sign, **changes), *FRAMES)
        assert (code, out, err.count("\n")) == (expected, "", 1) and message in err, (changes, err)
