"""The five algorithms once more, in the plainest form, against the scripts: the same seed must give the same weights.

The oracle shares the scripts' network (test_network.py checks it) and their order of random numbers. Returns,
advantages, objectives, averages and Adam are written anew from the papers, with loops. Both run in float64.
"""

import copy
import math

import numpy as np
import pytest
import torch
from procgen import ProcgenGym3Env

from helpers import EWMA, PPG, SCRIPTS, curves, float64, load, train

N, T, ITERATIONS = 4, 6, 4
GAMMA, LAMBDA, EPS, LR, AUX_LR = 0.97, 0.9, 0.02, 1e-3, 2e-3
FLAGS = f"""--distribution-mode easy --num-envs {N} --num-steps {T}
--total-timesteps {N * T * ITERATIONS} --gamma {GAMMA} --gae-lambda {LAMBDA} --clip-coef {EPS}
--learning-rate {LR} --channels 2 3 4 --reference-num-envs {2 * N} --no-adjust lr --device cpu""".split()
SEEDS = {"chaser": 5, "dodgeball": 19}  # in the one there are rewards, in the other an episode ends with the rollout
SPAN = 2  # c = 2 doubles the span of advantage normalisation


@pytest.fixture(autouse=True)
def in_float64():
    with float64():
        yield


class Adam:
    """Kingma and Ba, 2014, algorithm 1; parameters without a gradient are left alone."""

    def __init__(self, parameters, lr):
        self.lr, self.memory = lr, {p: [0, 0, 0] for p in parameters}

    def step(self, loss):
        used = list(self.memory)
        for p, g in zip(used, torch.autograd.grad(loss, used, allow_unused=True), strict=True):
            if g is not None:
                t, m, v = self.memory[p]
                t, m, v = t + 1, 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
                self.memory[p] = [t, m, v]
                m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.999**t)
                p.data -= self.lr * m_hat / (v_hat.sqrt() + 1e-8)


def kl(p, q):
    return (p.exp() * (p - q)).sum(-1).mean()


def play(agent, env):
    """[T][N] lists of what happened, and what the last step led to."""
    steps = []
    for _ in range(T):
        _, obs, first = env.observe()
        obs = torch.tensor(obs["rgb"])
        with torch.no_grad():
            logits, value = agent(obs)
        behav = logits.log_softmax(-1)
        action = torch.multinomial(behav.exp(), 1)[:, 0]
        env.act(action.numpy())
        steps.append((obs, first, behav, value, action, env.observe()[0]))
    _, obs, first = env.observe()
    return [*zip(*steps, strict=True)], torch.tensor(obs["rgb"]), first


class Oracle:
    n_pi, aux_rollouts, decay = 2, 4, 0.75

    def __init__(self, game, script, loss, staleness, policy_epochs, value_epochs, minibatches, kl_coef):
        self.__dict__.update({name: x for name, x in locals().items() if name != "self"})
        torch.manual_seed(SEEDS[game])
        self.agent = load(script).Agent([2, 3, 4], *(["dual"] if script in PPG else []))
        self.adam, self.aux_adam = Adam(self.agent.parameters(), LR), Adam(self.agent.parameters(), AUX_LR)
        self.env = ProcgenGym3Env(N, game, distribution_mode="easy", rand_seed=SEEDS[game], num_levels=0, start_level=0)
        self.returns, self.running, self.advantages, self.ended_at_the_end = [], np.zeros(N), [], 0
        self.history, self.queue, self.buffer = [self.policy_weights()], [], []
        self.clipped = []  # for every sample of every policy step, if the objective is flat there
        self.waited = []  # of each iteration: how far the policy moved since its data were sampled

    def policy_weights(self):
        return {k: v.clone() for k, v in self.agent.state_dict().items() if k.startswith(("trunk", "policy_head"))}

    def logprobs(self, agent, obs):
        with torch.no_grad():
            return agent(obs)[0].log_softmax(-1)

    def prepare(self, rollout):
        """Flat, environment by environment: observations, behaviour log-probs, actions, advantages, value targets."""
        (obs, first, behav, value, action, reward), last_obs, last_first = rollout
        self.ended_at_the_end += np.sum(last_first)
        for t in range(T):
            for n in range(N):
                self.running[n] = reward[t][n] + 0.99 * (not first[t][n]) * self.running[n]
                self.returns.append(self.running[n])
        count = len(self.returns) + 1e-4
        variance = (np.square(self.returns).sum() + 1e-4) / count - (np.sum(self.returns) / count) ** 2
        reward = np.clip(np.array(reward, dtype=np.float64) / math.sqrt(variance + 1e-8), -10, 10)
        with torch.no_grad():
            value = torch.stack([*value, self.agent(last_obs)[1]]).numpy()
        first = np.array([*first, last_first])
        advantage = np.zeros((N, T))
        for n in range(N):
            for t in reversed(range(T)):
                goes_on = not first[t + 1][n]
                td_error = reward[t][n] + GAMMA * goes_on * value[t + 1][n] - value[t][n]
                advantage[n, t] = td_error + (GAMMA * LAMBDA * goes_on * advantage[n, t + 1] if t + 1 < T else 0)
        target = advantage + value[:-1].T
        self.advantages.append(advantage)
        beta = (SPAN - 1) / (SPAN + 1)
        age = np.arange(len(self.advantages))[::-1, None, None]
        weight, x = np.broadcast_to(beta**age, (len(age), N, T)), np.array(self.advantages)
        mean = (weight * x).sum() / weight.sum()
        std = math.sqrt((weight * x**2).sum() / weight.sum() - mean**2)
        advantage = torch.tensor((advantage - mean) / (std + 1e-8))

        def flat(x):
            return torch.stack(list(x), dim=1).flatten(0, 1)

        return flat(obs), flat(behav), flat(action), advantage.flatten(), torch.tensor(target).flatten()

    def prox(self):
        """The explicit weighted mean of all networks so far, newest first."""
        shares = [self.decay**k for k in range(len(self.history))]
        average = copy.deepcopy(self.agent)
        for name in self.history[0]:
            terms = [share * w[name] for share, w in zip(shares, reversed(self.history), strict=True)]
            average.state_dict()[name].copy_(sum(terms) / sum(shares))
        return average

    def epoch(self):
        """Frames of each minibatch: those of a few environments, or a piece of one, in order."""
        order = torch.randperm(N).tolist()
        size, frames = N * T // self.minibatches, [n * T + t for n in order for t in range(T)]
        return [frames[k : k + size] for k in range(0, N * T, size)]

    def optimise(self, rollout):
        obs, behav, action, advantage, target = self.prepare(rollout)
        if self.script in PPG:
            self.buffer.append((obs.view(N, T, 64, 64, 3), target.view(N, T)))
        recent = self.logprobs(self.agent, obs)
        self.waited.append(kl(behav, recent).item())
        for epoch in range(self.policy_epochs):
            for i in self.epoch():
                logits, value = self.agent(obs[i])
                now = logits.log_softmax(-1)
                correcting = recent[i] if self.loss == "recent" else behav[i]
                limiting = {"ewma": lambda: self.logprobs(self.prox(), obs[i]), "behavior": lambda: behav[i]}  # noqa: B023
                limiting = limiting.get(self.loss, lambda: recent[i])()  # noqa: B023
                pi, pi_prox, pi_behav = (x[torch.arange(len(i)), action[i]].exp() for x in (now, limiting, correcting))
                r, a = pi / pi_prox, advantage[i]
                surrogate = pi_prox / pi_behav * torch.minimum(r * a, r.clip(1 - EPS, 1 + EPS) * a)
                self.clipped += torch.where(a > 0, r > 1 + EPS, r < 1 - EPS).tolist()
                entropy = -(now.exp() * now).sum(1).mean()
                loss = -surrogate.mean() + self.kl_coef * kl(limiting, now) - 0.01 * entropy
                if epoch < self.value_epochs:
                    loss = loss + 0.5 * ((value - target[i]) ** 2).mean()
                self.adam.step(loss)
                self.history.append(self.policy_weights())
        for _ in range(self.policy_epochs, self.value_epochs):
            for i in self.epoch():
                self.adam.step(0.5 * ((self.agent(obs[i])[1] - target[i]) ** 2).mean())

    def auxiliary_phase(self):
        obs, target = (torch.cat(x) for x in zip(*self.buffer, strict=True))
        stored = self.logprobs(self.agent, obs.flatten(0, 1)).view(*target.shape, 15)
        for _ in range(2):
            order = torch.randperm(len(obs)).tolist()
            for k in range(0, len(order), self.aux_rollouts):
                i = order[k : k + self.aux_rollouts]
                logits, value, aux_value = self.agent.with_aux_value(obs[i].flatten(0, 1))
                error = sum(0.5 * ((v - target[i].flatten()) ** 2).mean() for v in (value, aux_value))
                self.aux_adam.step(error + 0.7 * kl(stored[i].flatten(0, 1), logits.log_softmax(-1)))
        self.buffer, self.history = [], [self.policy_weights()]

    def run(self):
        for iteration in range(1, ITERATIONS + 1):
            self.queue.append(play(self.agent, self.env))
            if len(self.queue) > self.staleness:
                self.optimise(self.queue.pop(0))
            if self.script in PPG and iteration % self.n_pi == 0:
                self.auxiliary_phase()
        return self.agent.state_dict()


CASES = [  # script, loss, staleness, policy epochs, value epochs, minibatches, KL penalty
    ("ppo", "behavior", 0, 2, 2, 2, 0.3),
    ("ppo", "behavior", 0, 1, 1, 2, 0.3),
    ("ppo_ewma", "ewma", 0, 2, 2, 2, 0.3),
    ("ppo_ewma", "ewma", 0, 1, 1, 8, 0),  # fewer environments than minibatches; the clip alone limits the update
    ("ppg", "behavior", 0, 2, 1, 2, 0.3),
    ("ppg", "behavior", 0, 1, 2, 2, 0.3),
    ("ppg_ewma", "ewma", 0, 2, 3, 2, 0.3),
    ("ppg_ewma", "ewma", 0, 2, 2, 2, 0),
    ("staleness", "decoupled", 2, 2, 2, 2, 0),
    ("staleness", "behavior", 2, 2, 2, 2, 0.3),
    ("staleness", "recent", 2, 2, 2, 2, 0.3),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_oracle_ends_with_the_same_weights(case, tmp_path):
    script, loss, staleness, policy_epochs, value_epochs, minibatches, kl_coef = case
    game = "dodgeball" if policy_epochs == 1 else "chaser"
    flags = [*FLAGS, "--env-id", game, "--seed", SEEDS[game], "--num-minibatches", minibatches, "--kl-coef", kl_coef]
    if script in EWMA:
        flags += ["--prox-com", "1.5"]  # times c = 2: beta = 3/4
    if script in PPG:  # n_pi: times c, 2; rollouts: 6 / c = 3, kept at 4; --no-adjust lr: both step sizes as stated
        flags += ["--policy-epochs", policy_epochs, "--value-epochs", value_epochs, "--n-pi", 1, "--aux-epochs", 2]
        flags += ["--aux-rollouts", 6, "--aux-learning-rate", AUX_LR, "--beta-clone", 0.7]
    else:
        flags += ["--epochs", policy_epochs]
    if script == "staleness":
        flags += ["--staleness", staleness, "--staleness-loss", loss]
    result = train(script, tmp_path, *flags)["agent"]
    oracle = Oracle(game, *case)
    expected = oracle.run()
    assert oracle.ended_at_the_end if game == "dodgeball" else any(oracle.returns), "the rollouts show too little"
    assert 0.02 < np.mean(oracle.clipped) < 0.5, "clipping shows too little"
    errors = torch.cat([(w - expected[name]).abs().flatten() for name, w in result.items()])
    assert errors.max() < 0.01 * LR, (errors.max(), errors.mean())
    if script == "staleness":
        logged = [value for _, value in curves(tmp_path)["policy/stale_kl"]]
        assert logged == pytest.approx(oracle.waited, rel=1e-3) and max(logged) > 1e-4


@pytest.mark.parametrize("kl_coef", [0, 0.3])
def test_the_cases_differ(kl_coef):
    """The check above means something only if the oracle can tell the algorithms apart, by clipping alone, too."""
    losses = ("decoupled", "behavior", "recent", "ewma")
    results = [Oracle("chaser", "ppo", loss, 2, 2, 2, 2, kl_coef).run() for loss in losses]
    for i, a in enumerate(results):
        for b in results[:i]:
            errors = torch.cat([(a[name] - b[name]).abs().flatten() for name in a])
            assert errors.max() > LR


def test_every_script_has_a_case():
    assert {case[0] for case in CASES} == set(SCRIPTS)
