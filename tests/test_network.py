"""The IMPALA network: its size, its initial scale, and what its parts see."""

import math

import pytest
import torch
import torch.nn.functional as F

from helpers import PPG, SCRIPTS, float64, load


def agent_of(script, channels=(16, 32, 32), arch="dual"):
    return load(script).Agent(channels, *([arch] if script in PPG else []))


@pytest.mark.parametrize("script", SCRIPTS)
def test_parameter_count(script):
    """626,256 with a policy head of 15 actions and a value head, counted layer by layer."""

    def conv(i, o):
        return 9 * i * o + o

    trunk = sum(conv(i, o) + 4 * conv(o, o) for i, o in [(3, 16), (16, 32), (32, 32)]) + 32 * 8 * 8 * 256 + 256
    policy_head, value_head = 256 * 15 + 15, 256 + 1
    assert trunk + policy_head + value_head == 626_256
    count = {arch: sum(p.numel() for p in agent_of(script, arch=arch).parameters()) for arch in ("dual", "detach")}
    if script in PPG:
        assert count["dual"] == 2 * trunk + policy_head + 2 * value_head
        assert count["detach"] == trunk + policy_head + 2 * value_head
    else:
        assert count["dual"] == 626_256


@pytest.mark.parametrize("script", SCRIPTS)
def test_initial_norms(script):
    block = (1 / math.sqrt(3) / math.sqrt(2)) ** 0.5
    assert round(block, 3) == 0.639
    seen = set()
    for name, weight in agent_of(script).named_parameters():
        if name.endswith("bias"):
            assert (weight == 0).all()
            continue
        norm = 0.1 if "head" in name else block if "conv" in name else 1.4 if weight.dim() == 2 else 1.0
        seen.add(norm)
        norms = weight.detach().double().flatten(1).pow(2).sum(1).sqrt()
        assert torch.allclose(norms, torch.full_like(norms, norm), atol=1e-5), name
    assert len(seen) == 4


@pytest.mark.parametrize("script", SCRIPTS)
def test_forward_pass_against_the_functional_form(script):
    """The same network once more, from its parameters and torch.nn.functional, in float64."""
    torch.manual_seed(0)
    agent = agent_of(script, (4, 5, 6)).double()
    for parameter in agent.parameters():  # biases too, so that a missing one would show
        torch.nn.init.normal_(parameter, std=0.1)
    obs = torch.randint(256, (3, 64, 64, 3), dtype=torch.uint8)

    def trunk(weights):
        weights = iter(weights)
        x = obs.double().permute(0, 3, 1, 2) / 255

        def conv(x):
            return F.conv2d(x, next(weights), next(weights), padding=1)

        for _ in range(3):
            x = F.max_pool2d(conv(x), 3, stride=2, padding=1)
            for _ in range(2):
                x = x + conv(F.relu(conv(F.relu(x))))
        return F.relu(F.linear(F.relu(x.reshape(3, -1)), next(weights), next(weights)))

    with float64(), torch.no_grad():
        logits, value = agent(obs)
        features = trunk(agent.trunk.parameters())
        value_features = trunk(agent.value_trunk.parameters()) if script in PPG else features
        assert torch.allclose(logits, F.linear(features, *agent.policy_head.parameters()), atol=1e-12)
        assert torch.allclose(value, F.linear(value_features, *agent.value_head.parameters())[:, 0], atol=1e-12)


@pytest.mark.parametrize("script", PPG)
@pytest.mark.parametrize("arch", ["dual", "detach"])
def test_value_loss_leaves_the_policy_alone_and_the_auxiliary_head_does_not(script, arch):
    agent = agent_of(script, (2, 3, 4), arch)
    obs = torch.randint(256, (2, 64, 64, 3), dtype=torch.uint8)
    logits, value, aux_value = agent.with_aux_value(obs)
    assert torch.equal(logits, agent(obs)[0]) and torch.equal(value, agent(obs)[1])

    def touched(loss):
        agent.zero_grad()
        loss.backward(retain_graph=True)
        return {name.split(".")[0] for name, p in agent.named_parameters() if p.grad is not None}

    assert touched(value.sum()) == {"value_head"} | ({"value_trunk"} if arch == "dual" else set())
    assert touched(aux_value.sum()) == {"trunk", "aux_head"}
    assert touched(logits.sum()) == {"trunk", "policy_head"}
