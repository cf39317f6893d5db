"""Section 4: what is adjusted to the batch size, to what, and how to leave it."""

import math

import pytest

from helpers import EWMA, PPG, SCRIPTS, TINY, checkpoint, command_line, load, parse, tiny, train

ENVS = {1: 256, 4: 64, 16: 16, 64: 4, 256: 1, 1 / 2: 512}  # c: environments


def values(script, *flags):
    return vars(parse(script, *flags)[1])


@pytest.mark.parametrize("c", ENVS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_adjustment(script, c):
    use = values(script, "--num-envs", ENVS[c])
    assert math.isclose(use.pop("lr"), 5e-4 / math.sqrt(c))
    assert use.pop("adv_norm_span") == max(1, c)
    assert math.isclose(2 / (1 - use.pop("adv_norm_decay")) - 1, max(1, c))  # footnote 1
    assert (use.pop("beta1"), use.pop("beta2")) == (0.9, 0.999)
    if script in EWMA:
        assert math.isclose(use.pop("prox_com"), 8 * c)
        assert math.isclose(1 / (1 - use.pop("prox_decay")) - 1, 8 * c)  # section 4
    if script in PPG:
        assert use.pop("n_pi") == 32 * c
        rollouts = {1: 16, 4: 4, 16: 4, 64: 4, 256: 4, 1 / 2: 32}[c]
        assert use.pop("aux_rollouts") == rollouts
        assert math.isclose(use.pop("aux_lr"), 5e-4 * math.sqrt(rollouts / 16))
    assert not use, "an adjustment that this test does not know"


@pytest.mark.parametrize("script", PPG)
def test_the_phase_keeps_its_size_and_n_pi_is_rounded_and_at_least_1(script):
    for envs in (1, 3, 100, 256, 512, 8192, 20_000):
        n_pi = values(script, "--num-envs", envs, "--num-minibatches", 1, "--num-steps", 1)["n_pi"]
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
        assert math.isclose(linear["aux_lr"], 5e-4 * 4 / 16)
    assert values(script, "--num-envs", 16, "--reference-num-envs", 16) == values(script)


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_adjust_keeps_what_it_names_and_nothing_else(script):
    adjusted, stated = values(script, "--num-envs", 64), values(script)
    names = {"lr": ["lr"], "adv-norm": ["adv_norm_span", "adv_norm_decay"]}
    if script in EWMA:
        names["prox"] = ["prox_com", "prox_decay"]
    if script in PPG:
        names["n-pi"] = ["n_pi"]
        names["lr"].append("aux_lr")  # follows the step size
    for name, fields in names.items():
        kept = values(script, "--num-envs", 64, "--no-adjust", name)
        for field in fields:
            assert adjusted[field] != stated[field] == kept.pop(field)
        assert kept.items() <= adjusted.items()
    everything = values(script, "--num-envs", 64, "--no-adjust", *names)
    assert all(everything[field] == stated[field] for fields in names.values() for field in fields)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_table_is_announced_with_its_caveats(script, tmp_path, capsys):
    epochs = "--policy-epochs" if script in PPG else "--epochs"
    flags = [*tiny(script), "--num-envs", 8, "--reference-num-envs", 2, epochs, 2, "--total-timesteps", 64]
    flags += ["--n-pi", 4, "--run-dir", tmp_path / "run"] if script in PPG else ["--run-dir", tmp_path / "run"]
    with command_line(script, flags):
        load(script).main()
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines() if str(tmp_path) not in line)
    used = checkpoint(tmp_path / "run")["used"]
    stated = {"lr": 5e-4, "adv-norm": 1, "beta1": 0.9, "beta2": 0.999}
    fields = {"lr": "lr", "adv-norm": "adv_norm_span", "beta1": "beta1", "beta2": "beta2"}
    if script in EWMA:
        stated["prox"], fields["prox"] = 8, "prox_com"
    if script in PPG:
        stated |= {"n-pi": 4, "aux-rollouts": 3, "aux-lr": 5e-4}
        fields |= {"n-pi": "n_pi", "aux-rollouts": "aux_rollouts", "aux-lr": "aux_lr"}
    for name, field in fields.items():
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [name]]
        assert f" {stated[name]:.5g} " in line and f" {used[field]:.5g} " in line
        if (decay := used.get(f"{name.replace('-', '_')}_decay")) is not None:  # as other libraries state it
            assert f" {decay:.5g} " in line
    assert ("no EWMA: the paper claims invariance" in out) == (script not in EWMA)
    assert "for one policy epoch only" in out and "for small enough ones only" in out
    for number in (8 * 8 // 2, 8 * 8, sum(x.numel() for x in checkpoint(tmp_path / "run")["agent"].values())):
        assert f"{number:,}" in out
    if script in PPG:
        assert f"{4 * 64:,} steps" in out  # the phase
        assert "ends before its first auxiliary phase" in out


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_table_says_what_is_kept(script):
    """A rule where the value changes, "kept" where it does not."""
    for words in [[], ["--no-adjust", "lr"], ["--no-adjust", "adv-norm"], ["--adjust-betas", "beta2"]]:
        args, used = parse(script, "--num-envs", 64, *words)
        for name, _, stated, value, _, rule in load(script).adjustment_table(args, used):
            assert (rule == "kept") == (stated == value), name


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
