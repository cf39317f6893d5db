"""Section 4: what is adjusted to the batch size, to what, and how to leave it."""

import math

import pytest
from helpers import EWMA, PPG, SCRIPTS, TINY, checkpoint, load, parse, train

ENVS = {1: 256, 4: 64, 16: 16, 64: 4, 256: 1, 1 / 2: 512}  # c: environments


def values(script, *flags):
    return {name: used for name, (_, _, used, _) in parse(script, *flags)[1].items()}


@pytest.mark.parametrize("c", ENVS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_adjustment(script, c):
    use = values(script, "--num-envs", ENVS[c])
    assert math.isclose(use.pop("lr"), 5e-4 / math.sqrt(c))
    assert use.pop("adv-norm") == max(1, c)
    assert (use.pop("beta1"), use.pop("beta2")) == (0.9, 0.999)
    if script in EWMA:
        assert math.isclose(use.pop("prox"), 8 * c)
    if script in PPG:
        assert use.pop("n-pi") == 32 * c
        rollouts = {1: 16, 4: 4, 16: 4, 64: 4, 256: 4, 1 / 2: 32}[c]
        assert use.pop("aux-rollouts") == rollouts
        assert math.isclose(use.pop("aux-lr"), 5e-4 * math.sqrt(rollouts / 16))
    assert not use, "an adjustment that this test does not know"


@pytest.mark.parametrize("script", PPG)
def test_the_phase_keeps_its_size_and_n_pi_is_rounded_and_at_least_1(script):
    for envs in (1, 3, 100, 256, 512, 8192, 100_000):
        n_pi = values(script, "--num-envs", envs, "--num-minibatches", 1)["n-pi"]
        assert n_pi == max(1, round(32 * 256 / envs)) and isinstance(n_pi, int)


@pytest.mark.parametrize("script", SCRIPTS)
def test_linear_rule_betas_and_reference(script):
    linear = values(script, "--num-envs", 16, "--lr-rule", "linear")
    assert math.isclose(linear["lr"], 5e-4 / 16)
    both = values(script, "--num-envs", 64, "--adjust-betas", "both")
    assert math.isclose(both["beta1"] ** 4, 0.9) and math.isclose(both["beta2"] ** 4, 0.999)
    one = values(script, "--num-envs", 64, "--adjust-betas", "beta2")
    assert one["beta1"] == 0.9 and math.isclose(one["beta2"] ** 4, 0.999)
    if script in PPG:
        assert math.isclose(linear["aux-lr"], 5e-4 * 4 / 16)
    assert values(script, "--num-envs", 16, "--reference-num-envs", 16) == values(script)


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_adjust_keeps_what_it_names_and_nothing_else(script):
    adjusted, stated = values(script, "--num-envs", 64), values(script)
    names = ["lr", "adv-norm"] + ["prox"] * (script in EWMA) + ["n-pi"] * (script in PPG)
    for name in names:
        kept = values(script, "--num-envs", 64, "--no-adjust", name)
        assert adjusted[name] != stated[name] == kept.pop(name)
        if name == "lr" and script in PPG:  # the auxiliary step size follows it
            assert kept.pop("aux-lr") == stated["aux-lr"]
        assert kept.items() <= adjusted.items()
    everything = values(script, "--num-envs", 64, "--no-adjust", *names)
    assert all(everything[name] == stated[name] for name in names)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_table_is_printed_with_its_caveats(script, capsys):
    args, table = parse(script, "--num-envs", 512, "--policy-epochs" if script in PPG else "--epochs", 2)
    module = load(script)
    agent = module.Agent(args.channels, *([args.arch] if script in PPG else []))
    module.announce(args, table, agent, "cpu", 64, 10)
    out = capsys.readouterr().out
    for name, (what, stated, used, rule) in table.items():
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [name]]
        assert what in line and rule in line and f" {stated:.6g} " in line and f" {used:.6g} " in line
    assert ("no EWMA: the paper claims invariance" in out) == (script not in EWMA)
    assert "2 epochs: the paper claims invariance for one policy epoch only" in out
    assert "a larger batch: the paper claims invariance for small enough ones only" in out
    for number in (512 * 256 // 8, 512 * 256, sum(p.numel() for p in agent.parameters())):
        assert f"{number:,}" in out
    if script in PPG:
        assert f"{16 * 512 * 256:,}" in out  # the phase
        assert "ends before its first auxiliary phase" in out


@pytest.mark.parametrize("script", SCRIPTS)
def test_adjusted_values_reach_the_optimiser(script, tmp_path):
    flags = [*TINY, "--total-timesteps", "32", "--adjust-betas", "both", "--learning-rate", "1e-3"]
    train(script, tmp_path, *flags, *(["--aux-learning-rate", "2e-3"] if script in PPG else []))
    saved = checkpoint(tmp_path)
    (group,) = saved["optimizer"]["param_groups"]
    assert math.isclose(group["lr"], 1e-3 / 8) and math.isclose(group["betas"][0], 0.9 ** (1 / 64))
    assert math.isclose(group["betas"][1], 0.999 ** (1 / 64)) and group["eps"] == 1e-8
    if script in PPG:
        (group,) = saved["aux_optimizer"]["param_groups"]
        assert math.isclose(group["lr"], 2e-3 / 2) and tuple(group["betas"]) == (0.9, 0.999)
