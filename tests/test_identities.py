"""Whole runs compared: settings under which two programs must do the same."""

from unittest import mock

import pytest
import torch

from helpers import (
    EWMA,
    PPG,
    SCRIPTS,
    TINY,
    TINY_PPG,
    curves,
    differences,
    float64,
    largest_difference,
    load,
    tiny,
    train,
)

NOT_COMPARED = ("args", "script", "digest")
TIMES = "time/steps_per_second"


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_runs_with_one_seed_are_identical_and_with_two_seeds_are_not(script, tmp_path):
    a, b = (train(script, tmp_path / name, *tiny(script)) for name in "ab")
    assert a["agent"].keys() and differences(a, b, but=["args/run_dir", "digest"]) == []
    logs_a, logs_b = (curves(tmp_path / name) for name in "ab")
    assert {t: v for t, v in logs_a.items() if t != TIMES} == {t: v for t, v in logs_b.items() if t != TIMES}
    other = train(script, tmp_path / "c", *tiny(script), "--seed", "2")
    assert len(differences(a["agent"], other["agent"])) >= len(a["agent"]) / 2


@pytest.mark.parametrize("loss", ["decoupled", "behavior", "recent"])
def test_staleness_0_is_ppo_bit_for_bit_with_all_losses(loss, tmp_path):
    flags = [*TINY, "--kl-coef", "0.5", "--learning-rate", "0.01"]
    ppo = train("ppo", tmp_path / "ppo", *flags)
    stale = train("staleness", tmp_path / "stale", *flags, "--staleness", "0", "--staleness-loss", loss)
    assert stale.pop("queue") == []
    assert differences(ppo, stale, but=NOT_COMPARED) == []
    ppo, stale = curves(tmp_path / "ppo"), curves(tmp_path / "stale")
    assert {t: v for t, v in ppo.items() if t != TIMES} == {t: v for t, v in stale.items() if t != TIMES}


def test_with_staleness_the_first_iterations_only_collect(tmp_path):
    stale = train("staleness", tmp_path / "run", *TINY, "--staleness", "2")
    assert len(stale["queue"]) == 2
    logs = curves(tmp_path / "run")
    assert [step for step, _ in logs["time/environment_steps"]] == [32, 64, 96]
    assert [step for step, _ in logs["loss/policy"]] == [96]
    untrained = train("staleness", tmp_path / "only", *TINY, "--staleness", "3")
    torch.manual_seed(1)
    initial = load("staleness").Agent([2, 3, 4]).state_dict()
    assert differences(untrained["agent"], initial) == [] and untrained["optimizer"]["state"] == {}


@pytest.mark.parametrize("script", SCRIPTS)
def test_microbatching_changes_nothing(script, tmp_path):
    flags = [*tiny(script), "--total-timesteps", "64", "--adv-norm", "minibatch"]
    with float64():
        whole = train(script, tmp_path / "whole", *flags, "--microbatch-size", "1000")
        pieces = train(script, tmp_path / "pieces", *flags, "--microbatch-size", "7")  # does not divide 16: a rest of 2
    step = whole["optimizer"]["param_groups"][0]["lr"]
    assert 0 < largest_difference(whole["agent"], pieces["agent"]) < 1e-4 * step
    whole, pieces = curves(tmp_path / "whole"), curves(tmp_path / "pieces")
    for tag in whole.keys() - {TIMES}:
        assert [x for x, _ in whole[tag]] == [x for x, _ in pieces[tag]]
        assert all(abs(x - y) < 1e-5 for (_, x), (_, y) in zip(whole[tag], pieces[tag], strict=True)), tag


@pytest.mark.parametrize("base, ewma", [("ppo", "ppo_ewma"), ("ppg", "ppg_ewma")])
def test_without_clipping_and_kl_penalty_the_proximal_policy_does_not_matter(base, ewma, tmp_path):
    flags = [*tiny(base), "--clip-coef", "0", "--kl-coef", "0", "--total-timesteps", "64"]
    with float64():
        a, b = train(base, tmp_path / "a", *flags), train(ewma, tmp_path / "b", *flags)
        limited = train(ewma, tmp_path / "c", *flags, "--clip-coef", "0.001", "--kl-coef", "5")
    step = a["optimizer"]["param_groups"][0]["lr"]
    assert largest_difference(a["agent"], b["agent"]) < 1e-4 * step
    assert largest_difference(a["agent"], limited["agent"]) > step  # and otherwise it does


@pytest.mark.parametrize("script", PPG)
def test_without_auxiliary_epochs_the_policy_phase_is_left_alone(script, tmp_path):
    """No auxiliary phase, or one that is not reached yet: the same run, whatever the length of a phase."""
    runs = {
        "none": ["--n-pi", "1", "--no-adjust", "n-pi", "--aux-epochs", "0"],
        "none, longer": ["--n-pi", "2", "--no-adjust", "n-pi", "--aux-epochs", "0"],
        "not reached": ["--n-pi", "4", "--no-adjust", "n-pi", "--aux-epochs", "3"],
        "reached": ["--n-pi", "2", "--no-adjust", "n-pi", "--aux-epochs", "3"],
    }
    results = {name: train(script, tmp_path / name, *TINY, *flags) for name, flags in runs.items()}
    reference = results.pop("none")
    assert differences(reference["agent"], results["none, longer"]["agent"]) == []
    assert differences(reference["agent"], results["not reached"]["agent"]) == []
    assert differences(reference["agent"], results["reached"]["agent"]) != []


@pytest.mark.parametrize("script", PPG)
@pytest.mark.parametrize("arch", ["dual", "detach"])
def test_extra_epochs_train_only_the_one_that_has_more(script, arch, tmp_path):
    flags = [*TINY, "--total-timesteps", "32", "--arch", arch, "--aux-epochs", "0"]
    equal, value, policy = (
        train(script, tmp_path / f"{p}{v}", *flags, "--policy-epochs", p, "--value-epochs", v)["agent"]
        for p, v in [(1, 1), (1, 3), (3, 1)]
    )

    def parts(other):
        return {name.strip("/").split(".")[0] for name in differences(equal, other)}

    assert parts(value) == {"value_head"} | ({"value_trunk"} if arch == "dual" else set())
    assert parts(policy) == {"trunk", "policy_head"}


@pytest.mark.parametrize("script", EWMA)
def test_proximal_network_is_the_average_and_starts_anew_with_each_phase(script, tmp_path):
    module = load(script)
    history = []

    def recording(state, policy, decay):
        if state.prox_weight == 1.0:  # the first step of a phase, and theta_prox = theta_0 as yet
            history[:] = [[p.detach().clone() for p in state.prox.parameters()]]
        history.append([p.detach().clone() for p in policy.parameters()])
        update(state, policy, decay)

    update = module.update_ewma
    flags = [*TINY, *(TINY_PPG if script in PPG else []), "--prox-com", "0.25", "--learning-rate", "0.01"]
    with mock.patch.object(module, "update_ewma", recording):
        mid_phase = train(script, tmp_path / "mid", *flags)
    decay = 16 / 17  # 0.25 times c = 64
    shares = [decay**k for k in range(len(history))]
    assert len(history) == (3 if script in PPG else 19)  # steps since the phase began, and where it began
    for i, averaged in enumerate(mid_phase["prox"].values()):
        expected = sum(s * theta[i].double() for s, theta in zip(shares, reversed(history), strict=True)) / sum(shares)
        assert torch.allclose(averaged.double(), expected, atol=1e-6)
    com = curves(tmp_path / "mid")["policy/prox_age"][-1][1]
    assert abs(com - sum(k * s for k, s in enumerate(shares)) / sum(shares)) < 1e-4
    if script in PPG:
        phase_end = train(script, tmp_path / "end", *flags, "--total-timesteps", "128")
        assert (phase_end["prox_weight"], phase_end["prox_age"]) == (1.0, 0.0)
        policy = [w for name, w in phase_end["agent"].items() if name.startswith(("trunk", "policy_head"))]
        assert all(torch.equal(w, p) for w, p in zip(policy, phase_end["prox"].values(), strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_advantages_are_normalised_as_the_flag_says(script, tmp_path):
    module = load(script)
    seen = []

    def recording(logp, logp_old, advantage, clip_coef):
        seen.append(advantage.clone())
        return policy_loss(logp, logp_old, advantage, clip_coef)

    policy_loss = module.policy_loss
    flags = [*TINY, "--total-timesteps", "32", "--policy-epochs" if script in PPG else "--epochs", "1"]
    flags += ["--staleness", "0"] if script == "staleness" else []
    flags += ["--prox-com", "1e9"] if script in EWMA else []  # so old that pi_prox is pi_behav up to the first step
    for norm in ["iteration", "minibatch", "none"]:
        seen.clear()
        with mock.patch.object(module, "policy_loss", recording):
            train(script, tmp_path / norm, *flags, "--adv-norm", norm)
        first, everything = seen[0].double(), torch.cat(seen).double()
        logs = curves(tmp_path / norm)
        raw = logs["value/advantage_mean"][0][1], logs["value/advantage_std"][0][1]
        if norm == "minibatch":
            assert abs(first.mean()) < 1e-5 and abs(first.std(correction=0) - 1) < 1e-4
        elif script not in EWMA:  # there the second minibatch's are multiplied by pi_prox / pi_behav
            mean, std = (0, 1) if norm == "iteration" else raw
            assert abs(everything.mean() - mean) < 1e-5 and abs(everything.std(correction=0) - std) < 1e-4
        assert ("value/advantage_std_used" in logs) == (norm == "iteration")
        if norm == "iteration":  # the first iteration: the EWMA holds nothing else yet
            used = logs["value/advantage_mean_used"][0][1], logs["value/advantage_std_used"][0][1]
            assert all(abs(x - y) < 1e-6 for x, y in zip(raw, used, strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_switches_do_something(script, tmp_path):
    epochs = "--policy-epochs" if script in PPG else "--epochs"
    flags = [*TINY, "--total-timesteps", "64", "--learning-rate", "0.02", epochs, "3"]
    flags += ["--value-epochs", "3", "--aux-epochs", "0"] if script in PPG else []
    flags += ["--staleness", "0"] if script == "staleness" else []

    def result(*more):
        return train(script, tmp_path / "-".join(["run", *more]), *flags, *more)["agent"]

    plain = result()
    for more in [["--clip-vloss"], ["--no-reward-norm"], ["--kl-coef", "3"], ["--ent-coef", "0"], ["--vf-coef", "0.1"]]:
        assert differences(plain, result(*more)) != [], more
    # A target that any change of the policy exceeds ends the policy's epochs after the first.
    assert differences(result("--target-kl", "0"), result(epochs, "1")) == []
    kl = {more: curves(tmp_path / "-".join(["run", *more]))["policy/kl"][-1][1] for more in [(), ("--kl-coef", "3")]}
    assert kl["--kl-coef", "3"] < kl[()]


def test_the_ratio_is_capped_at_100_on_stale_data_only(tmp_path):
    module = load("staleness")
    for staleness, most in [(0, 1e26), (1, 100)]:
        with mock.patch.object(module, "cap_ratio", side_effect=module.cap_ratio) as cap:
            train("staleness", tmp_path / str(staleness), *TINY, "--staleness", staleness)
        capped = {call.args[2] for call in cap.call_args_list}
        assert min(capped) == most and max(capped) == 1e26  # of pi_corr; of pi_prox, so that float32 holds it


def test_minibatch_normalisation_is_of_the_advantages_as_estimated(tmp_path):
    """Not of those that an earlier epoch has normalised in other minibatches."""
    module, seen = load("ppo"), {"gae": [], "minibatches": [], "policy_loss": []}

    def recorded(name):
        original = getattr(module, name)

        def function(*args):
            result = original(*args)
            seen[name].append(args[2].clone() if name == "policy_loss" else result.clone())
            return result

        return mock.patch.object(module, name, function)

    flags = [*TINY, "--total-timesteps", "32", "--adv-norm", "minibatch", "--epochs", "3"]
    with recorded("gae"), recorded("minibatches"), recorded("policy_loss"):
        train("ppo", tmp_path, *flags)
    chosen = [seen["gae"][0].flatten()[rows].double() for epoch in seen["minibatches"] for rows in epoch]
    assert len(chosen) == len(seen["policy_loss"]) == 6
    for x, used in zip(chosen, seen["policy_loss"], strict=True):
        assert torch.allclose(used.double(), (x - x.mean()) / x.std(correction=0), atol=1e-5)
