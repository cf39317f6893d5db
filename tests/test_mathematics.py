"""Every formula against a second derivation of it, in float64, written without looking at the scripts' way."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers import EWMA, SCRIPTS, load

all_scripts = pytest.mark.parametrize("module", [load(name) for name in SCRIPTS], ids=SCRIPTS)
ewma_scripts = pytest.mark.parametrize("module", [load(name) for name in EWMA], ids=EWMA)


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


@all_scripts
def test_gae_with_episode_starts_in_every_position(module):
    steps, gamma, lam = 5, 0.9, 0.8
    first = np.array(list(itertools.product([False, True], repeat=steps + 1)))  # all 64 patterns, an environment each
    rng = np.random.default_rng(0)
    reward, value = rng.normal(size=(64, steps)), rng.normal(size=(64, steps + 1))
    expected = np.zeros((64, steps))
    for env, t in np.ndindex(64, steps):
        # The definition: discounted TD errors, up to the end of the episode or of the rollout.
        for k in range(t, steps):
            ends = first[env, k + 1]
            td_error = reward[env, k] + (0 if ends else gamma * value[env, k + 1]) - value[env, k]
            expected[env, t] += (gamma * lam) ** (k - t) * td_error
            if ends:
                break
    arguments = (torch.tensor(reward).float(), torch.tensor(value).float(), torch.tensor(first))
    close(module.gae(*arguments, gamma, lam), expected)


@all_scripts
def test_reward_normalisation_across_iterations_and_episode_ends(module):
    rng = np.random.default_rng(1)
    envs, steps, iterations = 3, 7, 4
    reward = rng.normal(size=(iterations, envs, steps)) * 5
    first = rng.random(size=(iterations, envs, steps)) < 0.3
    state = (torch.zeros(envs), torch.tensor([1e-4, 0, 1], dtype=torch.float64))
    seen, running = [], np.zeros(envs)
    for i in range(iterations):
        for t in range(steps):
            for env in range(envs):
                running[env] = reward[i, env, t] + (0 if first[i, env, t] else 0.99 * running[env])
                seen.append(running[env])
        # A prior of 1e-4 observations with mean 0 and variance 1, pooled with everything seen so far.
        count = len(seen) + 1e-4
        mean = sum(seen) / count
        var = (sum(x**2 for x in seen) + 1e-4) / count - mean**2
        expected = np.clip(reward[i] / np.sqrt(var + 1e-8), -10, 10)
        result, *state = module.normalise_rewards(torch.tensor(reward[i]).float(), torch.tensor(first[i]), *state)
        close(result, expected)
        close(state[0], running)
        close(state[1], [count, mean, var])


@all_scripts
def test_normalised_rewards_are_clipped_at_10(module):
    reward = torch.zeros(1, 1000)
    reward[0, 500] = 1e6
    state = (torch.zeros(1), torch.tensor([1e-4, 0, 1], dtype=torch.float64))
    first = torch.ones(1, 1000, dtype=torch.bool)  # each step its own episode, so that the outlier counts once
    assert module.normalise_rewards(reward, first, *state)[0].max() == 10
    assert module.normalise_rewards(-reward, first, *state)[0].min() == -10


@all_scripts
@pytest.mark.parametrize("span", [1, 4, 16, 256])
def test_advantage_moments_are_weighted_by_count_and_age(module, span):
    rng = np.random.default_rng(2)
    batches = [rng.normal(loc=i, scale=1 + i, size=(2, 3 + i)) for i in range(5)]  # of different sizes
    beta = (span - 1) / (span + 1)
    moments = torch.zeros(3, dtype=torch.float64)
    for i, batch in enumerate(batches):
        moments, mean, std = module.update_moments(moments, torch.tensor(batch).float(), beta)
        weights = np.concatenate([np.full(b.size, beta ** (i - j)) for j, b in enumerate(batches[: i + 1])])
        x = np.concatenate([b.ravel() for b in batches[: i + 1]])
        expected_mean = (weights * x).sum() / weights.sum()
        expected_var = (weights * (x - expected_mean) ** 2).sum() / weights.sum()
        close(mean, expected_mean)
        close(std, np.sqrt(expected_var))
    if span == 1:
        close([mean, std], [batches[-1].mean(), batches[-1].std()])


def test_span_and_centre_of_mass_of_a_decay():
    """The conversions that the scripts rely on, from their definitions as sums over an infinite past."""
    for beta in [0, 0.5, 8 / 9, 0.99]:
        ages = np.arange(10_000)
        weights = beta**ages / (beta**ages).sum()
        com, span = (weights * ages).sum(), 1 / (weights**2).sum()  # mean age; effective sample size
        close(com / (com + 1), beta)
        close((span - 1) / (span + 1), beta)


def random_policies(count, states=50, actions=15, seed=3):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, states, actions, generator=generator, dtype=torch.float64)
    action = torch.randint(actions, (states,), generator=generator)
    advantage = torch.randn(states, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1), action, advantage


@all_scripts
@pytest.mark.parametrize("clip_coef", [0, 0.2, 0.7])
def test_clipped_objective_and_its_gradient(module, clip_coef):
    (new, old), action, advantage = random_policies(2)
    logp, logp_old = (module.logp_of(x, action) for x in (new, old))
    close(logp, [new[i, a] for i, a in enumerate(action)])
    logp.requires_grad_()
    loss, clip_fraction = module.policy_loss(logp, logp_old, advantage, clip_coef)
    loss.backward()
    objective, gradient, outside = [], [], []
    for lp, lo, a in zip(logp.tolist(), logp_old.tolist(), advantage.tolist(), strict=True):
        r = math.exp(lp) / math.exp(lo)
        limits = (1 - clip_coef, 1 + clip_coef) if clip_coef else (-math.inf, math.inf)
        objective.append(min(r * a, min(max(r, limits[0]), limits[1]) * a))
        # The gradient stops only where the ratio has already gone too far in the direction that the advantage favours.
        stopped = r > limits[1] if a > 0 else r < limits[0]
        gradient.append(0 if stopped else r * a)
        outside.append(not limits[0] <= r <= limits[1])
    close(loss.detach(), -np.mean(objective), 1e-10)
    close(logp.grad, -np.array(gradient) / len(gradient), 1e-10)
    close(clip_fraction, np.mean(outside))


@all_scripts
def test_kl_is_exact_and_differentiable(module):
    (new, old), _, _ = random_policies(2)
    p, q = old.exp().numpy(), new.exp().numpy()
    new.requires_grad_()
    kl = module.categorical_kl(old, new)
    kl.backward()
    close(kl.detach(), (p * np.log(p / q)).sum(1).mean(), 1e-10)
    close(new.grad, -p / len(p), 1e-10)
    assert module.categorical_kl(old, old) == 0


@all_scripts
def test_value_loss_with_and_without_clipping(module):
    value, old, target = torch.tensor([[1.0, 3.0, -2.0, 0.1], [0.9, 1.0, 1.0, 0.0], [2.0, 2.5, -3.0, 5.0]]).double()
    close(module.value_loss(value, old, target, 0), np.mean([1, 0.25, 1, 4.9**2]))
    clipped = [1.0, 1.2, 0.8, 0.1]  # at most 0.2 away from the old values
    expected = [max((v - t) ** 2, (c - t) ** 2) for v, c, t in zip(value, clipped, target, strict=True)]
    close(module.value_loss(value, old, target, 0.2), np.mean(expected))


@ewma_scripts
@pytest.mark.parametrize("decay", [0, 0.5, 8 / 9, 1])
def test_ewma_is_the_explicit_weighted_mean_from_the_first_step_on(module, decay):
    policy = torch.nn.Linear(3, 2).double()
    prox = torch.nn.Linear(3, 2).double().requires_grad_(False)
    prox.load_state_dict(policy.state_dict())
    state = SimpleNamespace(prox=prox, prox_weight=1.0, prox_age=0.0)
    history = [policy.weight.detach().clone()]
    for _ in range(12):
        with torch.no_grad():
            policy.weight.add_(torch.randn(2, 3).double())
        history.append(policy.weight.detach().clone())
        module.update_ewma(state, policy, decay)
        shares = np.array([float(decay) ** k for k in range(len(history))])  # newest first; 0 ** 0 is 1
        mean = sum(share * theta for share, theta in zip(shares, reversed(history), strict=True)) / shares.sum()
        close(prox.weight.detach(), mean, 1e-12)
        close(state.prox_weight, shares.sum(), 1e-12)
        close(state.prox_age, (shares * np.arange(len(shares))).sum() / shares.sum(), 1e-12)
    if decay == 0:
        assert torch.equal(prox.weight, policy.weight)


def decoupled_clip(logp, logp_prox, logp_behav, advantage, epsilon):
    """Section 2, as printed: pi_prox / pi_behav * min(r A, clip(r, 1 - eps, 1 + eps) A), r = pi / pi_prox."""
    r = logp.exp() / logp_prox.exp()
    clipped = torch.minimum(torch.maximum(r, r.new_tensor(1 - epsilon)), r.new_tensor(1 + epsilon))
    return -((logp_prox.exp() / logp_behav.exp()) * torch.minimum(r * advantage, clipped * advantage)).mean()


@all_scripts
def test_decoupled_objective_is_the_coupled_one_with_a_corrected_advantage(module):
    """The scripts write the decoupled objective as PPO's, against pi_prox, of advantages times pi_prox / pi_behav."""
    (new, prox, behav), action, advantage = random_policies(3)
    logp, logp_prox, logp_behav = (module.logp_of(x, action) for x in (new, prox, behav))
    gradients = []
    for loss in [
        lambda x: module.policy_loss(x, logp_prox, (logp_prox - logp_behav).exp() * advantage, 0.2)[0],
        lambda x: decoupled_clip(x, logp_prox, logp_behav, advantage, 0.2),
    ]:
        x = logp.clone().requires_grad_()
        loss(x).backward()
        gradients.append((loss(x).detach(), x.grad))
    close(gradients[0][0], gradients[1][0], 1e-12)
    close(gradients[0][1], gradients[1][1], 1e-12)
    # With no clipping nothing depends on pi_prox: what remains is the importance-weighted policy gradient.
    unclipped = module.policy_loss(logp, logp_prox, (logp_prox - logp_behav).exp() * advantage, 0)[0]
    close(unclipped, -((logp.exp() / logp_behav.exp()) * advantage).mean(), 1e-12)


def test_importance_cap_and_its_gradient():
    module = load("staleness")
    logp = torch.tensor([-0.1, -0.1, -3.0], dtype=torch.float64, requires_grad=True)
    logp_behav = torch.tensor([-20.0, -1.0, -20.0], dtype=torch.float64)
    ratio = (logp - module.cap_ratio(logp_behav, logp, 100)).exp()
    close(ratio.detach(), [100, math.exp(0.9), 100])
    ratio.sum().backward()
    assert torch.equal(module.cap_ratio(logp_behav, logp, math.inf), logp_behav)
    close(logp.grad, ratio.detach())  # d exp(logp - constant) / d logp: the cap stops the ratio, not the gradient


@all_scripts
@pytest.mark.parametrize(
    "envs, steps, count",
    [(8, 6, 4), (8, 6, 8), (16, 3, 2), (1, 256, 8), (4, 16, 8), (2, 8, 1), (1, 1, 1)],
)
def test_minibatches_hold_whole_rollouts_or_chunks_of_one(module, envs, steps, count):
    rows = module.minibatches(envs, steps, count)
    assert count in module.even_splits(envs, steps)
    assert sorted(rows.flatten().tolist()) == list(range(envs * steps))
    assert rows.shape == (count, envs * steps // count)
    for rollout in rows.view(envs, steps):  # one environment after the other, each with its steps in order
        assert rollout.tolist() == list(range(rollout[0], rollout[0] + steps)) and rollout[0] % steps == 0
    for row in rows.tolist():
        by_env = {}
        for index in row:
            by_env.setdefault(index // steps, []).append(index % steps)
        if envs >= count:
            assert len(by_env) == envs // count
            assert all(times == list(range(steps)) for times in by_env.values())
        else:
            length = envs * steps // count
            ((_, times),) = by_env.items()
            assert times == list(range(times[0], times[0] + length)) and times[0] % length == 0


@all_scripts
def test_minibatches_are_shuffled_anew_each_epoch(module):
    torch.manual_seed(0)
    orders = {tuple(module.minibatches(16, 2, 4).flatten().tolist()) for _ in range(5)}
    assert len(orders) == 5


@all_scripts
def test_which_splits_come_out_even(module):
    for envs, steps, count in itertools.product([1, 2, 3, 4, 6], [1, 4, 6], [1, 2, 3, 4, 6, 8]):
        whole = envs % count == 0
        chunks = count % envs == 0 and steps % (count // envs) == 0
        assert (count in module.even_splits(envs, steps)) == (whole or chunks), (envs, steps, count)
