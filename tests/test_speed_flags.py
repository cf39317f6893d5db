"""--compile, --bf16 and the threads: what they may change, and what not."""

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from helpers import EWMA, PPG, SCRIPTS, checkpoint, differences, environment, largest_difference, load, tiny, train


@pytest.fixture
def impala(request):
    """The network's class as it was, afterwards: --compile and --bf16 change it for the whole process."""
    module = load(request.param)
    with mock.patch.object(module.Impala, "forward", module.Impala.forward), mock.patch.object(module.Impala, "bf16"):
        yield request.param
    torch._dynamo.reset()


def compiled_with(backend, calls):
    """torch.compile with another backend; notes what it was asked for."""
    original = torch.compile

    def compile_(function, **options):
        calls.append(options)
        return original(function, backend=backend, **options)

    return mock.patch.object(torch, "compile", compile_)


@pytest.mark.parametrize("impala", SCRIPTS, indirect=True)
def test_compiled_in_whole_graphs_of_fixed_shape_a_run_is_the_same(impala, tmp_path):
    """aot_eager traces forward and backward as inductor does, and computes with the same kernels as without."""
    calls, flags = [], [*tiny(impala), "--total-timesteps", "64", "--microbatch-size", "7"]
    plain = train(impala, tmp_path / "plain", *flags)
    with compiled_with("aot_eager", calls):
        compiled = train(impala, tmp_path / "compiled", *flags, "--compile")
    assert calls == [{"fullgraph": True, "dynamic": False}]
    assert differences(plain, compiled, but=["args", "digest"]) == []  # the weights' names, too


@pytest.mark.parametrize("impala", ["ppo"], indirect=True)
def test_compiled_by_inductor_the_weights_agree(impala, tmp_path):
    flags = [*tiny(impala), "--total-timesteps", "32"]
    plain = train(impala, tmp_path / "plain", *flags)
    compiled = train(impala, tmp_path / "compiled", *flags, "--compile")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2  # with gradients and without
    step = plain["optimizer"]["param_groups"][0]["lr"]
    assert largest_difference(plain["agent"], compiled["agent"]) < 0.05 * step


@pytest.mark.parametrize("impala", SCRIPTS, indirect=True)
def test_bf16_is_for_the_trunk_alone_and_ratios_start_at_1(impala, tmp_path):
    module, first = load(impala), {}

    def recording(logp, logp_prox, advantage, clip_coef):
        first.setdefault("ratio", (logp - logp_prox).exp().detach())
        first.setdefault("dtypes", {x.dtype for x in (logp, logp_prox, advantage)})
        return policy_loss(logp, logp_prox, advantage, clip_coef)

    policy_loss = module.policy_loss
    flags = [*tiny(impala), "--channels", "16", "32", "32", "--total-timesteps", "64"]
    flags += ["--staleness", "0"] if impala == "staleness" else []
    with mock.patch.object(module, "policy_loss", recording):
        saved = train(impala, tmp_path / "bf16", *flags, "--bf16")
    assert first["dtypes"] == {torch.float32}
    assert (first["ratio"] - 1).abs().max() < 1e-3  # as rollout and update round alike
    assert {x.dtype for x in saved["agent"].values()} == {torch.float32}
    agent = module.Agent([2, 3, 4], *(["dual"] if impala in PPG else []))
    inside = []
    agent.trunk.layers[0].register_forward_hook(lambda _, __, out: inside.append(out.dtype))
    obs = torch.zeros(2, 64, 64, 3, dtype=torch.uint8)
    outputs = agent(obs)
    assert inside == [torch.bfloat16] and all(x.dtype == torch.float32 for x in outputs)
    sum(x.sum() for x in outputs).backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in agent.parameters())
    if impala in EWMA:
        assert all(x.dtype == torch.float32 for x in saved["prox"].values())


@pytest.mark.parametrize("impala", ["ppo"], indirect=True)
def test_a_resumed_run_keeps_its_precision_and_says_so(impala, tmp_path, capsys):
    from helpers import command_line

    module = load(impala)
    flags = [*tiny(impala), "--bf16"]
    whole = train(impala, tmp_path / "whole", *flags)
    train(impala, tmp_path / "run", *flags, "--total-timesteps", "32")
    capsys.readouterr()
    module.Impala.bf16 = False  # as in a new process
    with command_line(impala, ["--resume", tmp_path / "run", "--total-timesteps", "96"]):
        module.main()
    assert "bfloat16" in capsys.readouterr().out
    assert differences(whole, checkpoint(tmp_path / "run"), but=["args", "digest"]) == []


@pytest.mark.parametrize("impala", ["ppo"], indirect=True)
@pytest.mark.parametrize("able", [{"amx_bf16": True}, {"avx512_bf16": True}, {}])
def test_a_cpu_without_bfloat16_is_told(impala, able, tmp_path, capsys):
    module = load(impala)
    with mock.patch.object(torch.cpu, "get_capabilities", lambda: able):
        with mock.patch.object(sys, "argv", ["ppo.py", *tiny(impala), "--bf16", "--run-dir", str(tmp_path / "run")]):
            module.main()
    assert ("slower here" in capsys.readouterr().out) == (not able)


@pytest.mark.parametrize("script", SCRIPTS)
def test_idle_threads_sleep_soon_unless_told_otherwise(script):
    """Set before PyTorch is imported, as its OpenMP reads it then; what the user has set stays."""
    head = Path(load(script).__file__).read_text().split("try:")[0]
    code = f"{head}\nprint(os.environ['GOMP_SPINCOUNT'])"
    for given, expected in [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")]:
        command = {"args": [sys.executable, "-c", code], "env": environment(**given)}
        assert subprocess.run(**command, capture_output=True, text=True).stdout.strip() == expected
    assert "import torch" not in head
