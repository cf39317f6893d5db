"""PPO with artificial staleness on Procgen, in one file.  # STALE, 5 lines

Section 5.1: train on data --staleness iterations old, as asynchronous training does. Three losses:
"behavior" keeps pi near a policy that is out of date, "recent" corrects for one that did not sample
the data, "decoupled" makes neither mistake. With --staleness 0 this is ppo.py, bit for bit.

The algorithm comes first; a line after main() says where it ends. In a hurry, start at "# (1)".

Paper: "Batch size-invariance for policy optimization", Hilton, Cobbe and Schulman, 2021
(arXiv:2110.00641). Section and appendix numbers refer to it; "PPO equation" refers to
Schulman et al., 2017 (arXiv:1707.06347).

Five files, each a whole algorithm. All but the first differ from an earlier one in tagged lines:
  ppo.py        PPO. Its old policy, which sampled the data, does two jobs. As behaviour policy it
                corrects for the data's age. As proximal policy it limits how far pi may move.
  ppo_ewma.py   PPO-EWMA: two policies for the two jobs.                    Its tag is EWMA.
  staleness.py  PPO on deliberately stale data: why split the jobs.         Its tag is STALE.
  ppg.py        Phasic policy gradient, a stronger algorithm.               Its tag is PPG.
  ppg_ewma.py   PPG-EWMA, the paper's main algorithm: ppg.py with ppo_ewma.py's patch. Both tags.
grep -n "# TAG" finds what a file changes; "# TAG, 3 lines" means that line and the next two.

Deviations from the paper: (1) one process steps all environments, where the paper has 4 workers
with 64 each; (2) a minibatch goes through the network in pieces, which bounds memory and adds up
to the same gradient (--microbatch-size).
"""

import argparse
import ctypes
import fcntl
import hashlib
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # idle threads sleep: others may need the cores

try:
    import torch
    import torch.nn as nn
    from procgen import ProcgenGym3Env
    from procgen.env import ENV_NAMES
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams
except ImportError as error:
    print(f"{error}: use Python 3.10 to 3.12, pip install -r requirements.txt", file=sys.stderr)
    sys.exit(2)


def add_flags(parser):
    """Defaults are the paper's (appendix B), for 256 environments."""
    count, index = number(int, 1), number(int, 0, 2**31 - 1)
    fraction, nonnegative = number(float, 0, 1), number(float, 0)

    add = parser.add_argument_group("run").add_argument
    add("--seed", type=index, default=1, help="seeds network, sampling and Procgen")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA if present")
    add("--run-dir", help="where results go; None: runs/<env>__<script>__<seed>__<time>")
    add("--resume", metavar="RUN_DIR", help="resume a stopped run, with its original flags")
    add("--checkpoint-seconds", type=nonnegative, default=60, help="time between checkpoints")
    add("--microbatch-size", type=count, help="frames in a pass; None: 64 on a CPU, 2048 on a GPU")
    add("--compile", action="store_true", help="compile the network: slow start, faster on a GPU")
    add("--bf16", action="store_true", help="compute the convolutions in bfloat16")

    add = parser.add_argument_group("environment").add_argument
    add("--env-id", choices=ENV_NAMES, default="starpilot", help="Procgen game")
    add("--distribution-mode", choices=["easy", "hard"], default="hard", help="difficulty")
    add("--num-levels", type=index, default=0, help="size of the level set; 0: all levels")
    add("--start-level", type=index, default=0, help="first level of the set")
    add("--num-envs", type=count, default=256, help="parallel environments N: sets the batch size")
    add("--num-steps", type=count, default=256, help="steps T of each environment in an iteration")
    add("--total-timesteps", type=count, default=100_000_000, help="environment steps in all")
    add("--env-threads", type=count, default=os.cpu_count(), help="CPU threads that step the games")

    add = parser.add_argument_group("optimisation").add_argument
    add("--epochs", type=count, default=3, help="passes over the data, E; invariance needs 1")
    add("--learning-rate", type=nonnegative, default=5e-4, help="Adam step size")
    add("--num-minibatches", type=count, default=8, help="optimiser steps in an epoch")
    add("--gamma", type=fraction, default=0.999, help="discount")
    add("--gae-lambda", type=fraction, default=0.95, help="GAE: 0 trusts values, 1 trusts returns")
    add("--clip-coef", type=fraction, default=0.2, help="clip range epsilon; 0: no clipping")
    add("--kl-coef", type=nonnegative, default=0.0, help="KL penalty's weight; with no clip, try 1")
    add("--vf-coef", type=nonnegative, default=0.5, help="weight of the value loss")
    add("--ent-coef", type=nonnegative, default=0.01, help="weight of the entropy bonus")
    add("--reward-norm", action=argparse.BooleanOptionalAction, default=True, help="scale rewards")
    scopes = ["iteration", "minibatch", "none"]
    add("--adv-norm", choices=scopes, default="iteration", help="normalise advantages over this")
    add("--clip-vloss", action="store_true", help="not in the paper: clip the value loss, too")
    add("--target-kl", type=nonnegative, help="not in the paper: KL that ends the policy epochs")
    add("--channels", type=count, nargs=3, default=[16, 32, 32], help="network widths")

    add = parser.add_argument_group("staleness").add_argument  # STALE, 4 lines
    add("--staleness", type=number(int, 0), default=8, help="age of the data, in iterations")
    losses = ["decoupled", "behavior", "recent"]  # figures 1(b), 1(c), 1(a), spelt as there
    add("--staleness-loss", choices=losses, default="decoupled", help="who does which job, see (3)")

    add = parser.add_argument_group("batch size").add_argument
    add("--reference-num-envs", type=count, default=256, help="the N other flags were tuned at")
    names = adjustable(parser)  # those with a flag here: lr, adv-norm; with EWMA prox, in PPG n-pi
    add("--no-adjust", nargs="+", default=[], choices=names, help="leave these as given")
    add("--lr-rule", choices=["sqrt", "linear"], default="sqrt", help="linear: as SGD, appendix D")
    add("--adjust-betas", choices=["none", "beta2", "both"], default="none", help="see appendix E")


def adjust_for_batch_size(args):
    """Section 4: make N environments learn, per environment step, as the reference number would.

    The paper claims this only with EWMA, small enough batches and one policy epoch: in a small
    iteration pi hardly moves, so a second epoch repeats the first, as a larger step size would.
    """
    c = args.reference_num_envs / args.num_envs  # iterations and minibatches are c times smaller
    by = {name: 1 if name in args.no_adjust else c for name in ADJUSTABLE}  # 1: not adjusted
    used = SimpleNamespace()

    # Minibatches c times smaller make c times as many steps, so each should go 1/c as far on
    # average. Adam divides by the gradient's root mean square: mostly noise, it grows by sqrt(c).
    # That shortens steps by sqrt(c); a step size smaller by sqrt(c) does the rest (appendix D).
    used.lr = args.learning_rate / (by["lr"] if args.lr_rule == "linear" else math.sqrt(by["lr"]))

    # A moving average should cover the same environment steps: c times as many terms. The length of
    # one that estimates is its span, 2 / (1 - decay) - 1: the equally weighted terms it is worth.
    # Of one that lags (ppo_ewma.py), the centre of mass, 1 / (1 - decay) - 1: its terms' mean age.
    used.adv_norm_span = max(1, by["adv-norm"])  # iterations; 1: no memory, as at the reference
    used.adv_norm_decay = (used.adv_norm_span - 1) / (used.adv_norm_span + 1)
    # Adam's own averages matter little (section 3.2); --adjust-betas keeps their decay per frame.
    used.beta1 = 0.9 ** (1 / c) if args.adjust_betas == "both" else 0.9
    used.beta2 = 0.999 ** (1 / c) if args.adjust_betas != "none" else 0.999
    return used


FRAME, ACTIONS = (64, 64, 3), 15  # what Procgen shows, and what it understands


def scaled(layer, norm):
    """Scale each output's initial weights to this L2 norm, the authors' choice; biases are 0."""
    with torch.no_grad():
        rows = layer.weight.flatten(1)  # a view
        rows *= norm / rows.norm(dim=1, keepdim=True)
        layer.bias.zero_()
    return layer


class ResidualBlock(nn.Module):
    def __init__(self, channels, norm):
        super().__init__()
        self.conv1 = scaled(nn.Conv2d(channels, channels, 3, padding=1), norm)
        self.conv2 = scaled(nn.Conv2d(channels, channels, 3, padding=1), norm)

    def forward(self, x):
        return self.conv2(self.conv1(x.relu()).relu_()).add_(x)  # in place: saves memory


class Impala(nn.Module):
    """The network of IMPALA (Espeholt et al., 2018): uint8 frames [B, 64, 64, 3] to [B, 256]."""

    bf16 = False  # --bf16 sets it

    def __init__(self, channels, blocks=2):
        super().__init__()
        norm = math.sqrt(1 / math.sqrt(len(channels) * blocks))  # the more blocks, the smaller each
        layers, width = [], 3
        for out in channels:
            layers += [scaled(nn.Conv2d(width, out, 3, padding=1), 1), nn.MaxPool2d(3, 2, 1)]
            layers += [ResidualBlock(out, norm) for _ in range(blocks)]
            width = out
        dense = scaled(nn.Linear(width * 8 * 8, 256), 1.4)
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.ReLU(), dense, nn.ReLU())

    def forward(self, obs):
        x = obs.permute(0, 3, 1, 2) / 255  # channels stay last in memory, the fast layout
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            y = self.layers[:-4](x)  # convolutions; with a dense layer in bfloat16, it learnt less
        return self.layers[-4:](y.to(x.dtype))


class Agent(nn.Module):
    """uint8 frames [B, 64, 64, 3] to logits [B, 15] and values [B]."""

    def __init__(self, channels):
        super().__init__()
        self.trunk = Impala(channels)
        self.policy_head = scaled(nn.Linear(256, ACTIONS), 0.1)
        self.value_head = scaled(nn.Linear(256, 1), 0.1)

    def forward(self, obs):
        features = self.trunk(obs)
        return self.policy_head(features), self.value_head(features).squeeze(-1)


def sample(logprobs):
    """An action for each state: p(a) / exponential noise is largest at a with probability p(a)."""
    noise = torch.empty(logprobs.shape).exponential_()  # from the CPU: the same on any device
    return (logprobs.exp() / upload(noise, logprobs.device)).argmax(-1)


def normalise_rewards(reward, first, discounted_return, return_stats):
    """Divide rewards [N, T] by the standard deviation of all discounted returns so far; clip at 10.

    discounted_return [N] looks back: an episode's rewards so far, discounted. Its discount of
    0.99, not gamma, is the authors' choice: it only sets a scale. return_stats: count, mean, var.
    """
    returns = []
    for t in range(reward.shape[1]):
        discounted_return = reward[:, t] + 0.99 * ~first[:, t] * discounted_return
        returns.append(discounted_return)
    returns = torch.stack(returns).double()
    (count, mean, var), new = return_stats, returns.numel()
    delta, total = returns.mean() - mean, count + new  # combine the old and the new variance
    new_var = returns.var(correction=0)
    var = (var * count + new_var * new + delta**2 * count * new / total) / total
    return_stats = torch.stack([total, mean + delta * new / total, var])
    return (reward / (var + 1e-8).sqrt()).clamp(-10, 10), discounted_return, return_stats


def gae(reward, values, first, gamma, gae_lambda):
    """Generalised advantage estimation. reward [N, T]; values, first [N, T + 1]: one step more."""
    advantage, running = torch.empty_like(values[:, 1:]), 0
    for t in reversed(range(reward.shape[1])):
        alive = ~first[:, t + 1]  # false if step t ended its episode: nothing comes after it
        delta = reward[:, t] + gamma * alive * values[:, t + 1] - values[:, t]
        running = delta + gamma * gae_lambda * alive * running
        advantage[:, t] = running
    return advantage


def update_moments(sums, x, decay):
    """For advantage normalisation: the updated sums, and mean and standard deviation from them.

    sums: count, sum, sum of squares, decayed once an iteration. Decay 0: this iteration alone.
    """
    y = x.double()
    sums = decay * sums + torch.stack([torch.ones_like(y).sum(), y.sum(), (y**2).sum()])
    mean, mean_square = sums[1] / sums[0], sums[2] / sums[0]
    return sums, mean.to(x.dtype), (mean_square - mean**2).clamp(min=0).sqrt().to(x.dtype)


def minibatches(envs, steps, num_minibatches):
    """One epoch's minibatches: rows of indices into envs * steps frames. Each holds whole rollouts
    (a rollout: the T steps of one environment), or, if there are more minibatches than rollouts, a
    stretch of one. The authors keep rollouts whole, too; many other PPOs shuffle all frames."""
    rollouts = torch.arange(envs * steps).view(envs, steps)
    return rollouts[torch.randperm(envs)].view(num_minibatches, -1)


def logp_of(logprobs, action):
    """log pi(a|s) [B] out of the log-probabilities of all actions [B, 15]."""
    return logprobs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def categorical_kl(logprobs_p, logprobs_q):
    """KL[p, q] over the actions, averaged over states: the penalty of PPO equation (8)."""
    return (logprobs_p.exp() * (logprobs_p - logprobs_q)).sum(-1).mean()


def policy_loss(logp, logp_prox, advantage, clip_coef):
    """PPO equation (7), negated: mean of min(r A, clip(r, 1 - eps, 1 + eps) A), r = pi / pi_prox.

    In PPO, pi_prox is pi_old. Also returns the fraction of ratios outside the clip range.
    """
    ratio = (logp - logp_prox).exp()
    objective = ratio * advantage
    if clip_coef == 0:
        return -objective.mean(), objective.new_zeros(())
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    objective = torch.min(objective, clipped * advantage)  # no gradient once r is too far A's way
    return -objective.mean(), (clipped != ratio).float().mean()


def value_loss(value, value_old, value_target, clip):
    """Squared error. With clip > 0, moving further than clip from value_old gains nothing."""
    loss = (value - value_target) ** 2
    if clip > 0:
        clipped = value_old + (value - value_old).clamp(-clip, clip)
        loss = torch.max(loss, (clipped - value_target) ** 2)
    return loss.mean()


def cap_ratio(logp_old, logp, max_ratio):  # STALE, 4 lines
    """Raise pi_old until pi / pi_old is at most max_ratio. The bound is detached, so that a capped
    ratio still has a gradient: max_ratio times that of log pi."""
    return torch.max(logp_old, logp.detach() - math.log(max_ratio))


def main():
    args, saved = parse_args()
    used = adjust_for_batch_size(args)
    device, microbatch_size = set_up_torch(args)
    agent = Agent(args.channels).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(agent.parameters(), used.lr, (used.beta1, used.beta2), eps=1e-8)
    envs = Games(args)
    state = SimpleNamespace(  # what one iteration leaves to the next, and a checkpoint holds
        iteration=0,
        agent=agent,
        optimizer=optimizer,
        discounted_return=torch.zeros(args.num_envs, device=device),
        return_stats=torch.tensor([1e-4, 0, 1], dtype=torch.float64, device=device),  # count ~ 0
        advantage_sums=torch.zeros(3, dtype=torch.float64, device=device),
    )
    state.queue = []  # STALE: collected, not yet trained on
    run = Run(args, used, saved, state, envs, device)  # folder, logs; loads state to --resume

    for iteration in range(state.iteration + 1, run.num_iterations + 1):
        # (1) Collect T steps from N environments. The network as it is now is the behaviour policy.
        size = (args.num_envs, args.num_steps, *FRAME)
        obs, steps = torch.empty(size, dtype=torch.uint8, device=device), []
        _, frames, first = envs.observe()  # does not step; first [N]: the frame starts an episode
        for t in run.each(range(args.num_steps), "collect, step"):
            frames = upload(frames, device)
            obs[:, t] = frames
            with torch.no_grad():
                logits, value_old = agent(frames)
            step = {"first": first, "value_old": value_old}
            step["logprobs_behav"] = logits.log_softmax(-1)
            step["action"] = sample(step["logprobs_behav"])
            envs.act(step["action"].cpu())
            step["reward"], frames, first = envs.observe()
            run.count_episodes(step["reward"], first)
            steps.append(step)
        data = {name: torch.stack([step[name] for step in steps], dim=1) for name in steps[0]}
        data |= {"obs": obs, "next_obs": frames}  # [N, T, ...], [N, ...]
        data["first"] = torch.cat([data["first"], first[:, None]], dim=1)  # [N, T + 1]
        data = {name: x.to(device) for name, x in data.items()}

        # STALE, 7 lines: train on the oldest data; the first --staleness iterations only collect.
        # value_old is as old as the data; next_value, below, is new. The authors do the same.
        state.queue.append({name: x.cpu() for name, x in data.items()})
        if len(state.queue) <= args.staleness:
            run.end_iteration(iteration, {})
            continue
        data = {name: x.to(device) for name, x in state.queue.pop(0).items()}

        # (2) Prepare: normalise rewards; estimate advantages, value targets; normalise advantages.
        reward = data["reward"]
        if args.reward_norm:
            reward, state.discounted_return, state.return_stats = normalise_rewards(
                reward, data["first"], state.discounted_return, state.return_stats
            )
        with torch.no_grad():
            next_value = agent(data["next_obs"])[1]
        values = torch.cat([data["value_old"], next_value[:, None]], dim=1)  # [N, T + 1]
        advantage = gae(reward, values, data["first"], args.gamma, args.gae_lambda)
        value_target = advantage + data["value_old"]
        stats = {"value/explained_variance": 1 - advantage.var() / value_target.var()}
        stats["value/advantage_mean"] = advantage.mean()
        stats["value/advantage_std"] = advantage.std(correction=0)
        if args.adv_norm == "iteration":
            state.advantage_sums, mean, std = update_moments(
                state.advantage_sums, advantage, used.adv_norm_decay
            )
            advantage = (advantage - mean) / (std + 1e-8)
            stats |= {"value/advantage_mean_used": mean, "value/advantage_std_used": std}

        # (3) Optimise: epochs over the data; each minibatch is one optimiser step.
        names = ["obs", "action", "logprobs_behav", "value_old"]
        batch = {name: data[name].flatten(0, 1) for name in names}  # [N * T, ...]
        batch |= {"value_target": value_target.flatten(), "advantage": advantage.flatten()}
        raw_advantage = batch["advantage"].clone()  # kept: --adv-norm minibatch overwrites that
        # STALE, 12 lines: who does which job. pi_recent: the network before (3) changes it.
        #   --staleness-loss            decoupled   behavior    recent
        #   pi_corr, corrects for age   behaviour   behaviour   recent (wrong: not its data)
        #   pi_prox, limits the update  recent      behaviour   recent
        behav = recent = batch["logprobs_behav"]
        if args.staleness > 0:  # at 0 they are equal; recomputing would only add rounding
            with torch.no_grad():
                pieces = batch["obs"].split(microbatch_size)
                recent = torch.cat([agent(obs)[0].log_softmax(-1) for obs in pieces])
            stats["policy/stale_kl"] = categorical_kl(behav, recent)  # pi moved while data waited
        batch["logprobs_corr"] = recent if args.staleness_loss == "recent" else behav
        batch["logprobs_prox"] = behav if args.staleness_loss == "behavior" else recent
        value_clip = args.clip_coef if args.clip_vloss else 0
        minibatch_stats = []
        for epoch in range(args.epochs):
            order = upload(minibatches(args.num_envs, args.num_steps, args.num_minibatches), device)
            for minibatch in run.each(order, f"optimise, epoch {epoch + 1}, minibatch"):
                if args.adv_norm == "minibatch":
                    chosen = raw_advantage[minibatch]
                    chosen = (chosen - chosen.mean()) / (chosen.std(correction=0) + 1e-8)
                    batch["advantage"][minibatch] = chosen
                optimizer.zero_grad()
                minibatch_stats.append({})
                for micro in minibatch.split(microbatch_size):
                    piece = {name: x[micro] for name, x in batch.items()}
                    logits, value = agent(piece["obs"])
                    logprobs = logits.log_softmax(-1)
                    # The two jobs of PPO's old policy. Dividing by it corrects for the data's age:
                    # pi_behav sampled it, pi has moved since. Clipping the ratio, or penalising the
                    # KL, limits the update: pi stays near pi_prox. In PPO the two are one policy.
                    logprobs_prox = piece["logprobs_prox"]  # STALE
                    logp = logp_of(logprobs, piece["action"])
                    logp_prox = logp_of(logprobs_prox, piece["action"])
                    adv = piece["advantage"]
                    # STALE, 8 lines: pi_prox/pi_corr * min(r A, clip(r, 1 - eps, 1 + eps) A), where
                    # r = pi/pi_prox (section 2). Unclipped, pi_prox cancels: pi/pi_corr A.
                    # The front factor is positive, so A may absorb it.
                    logp_prox = cap_ratio(logp_prox, logp, 1e26)  # r: no overflow
                    logp_corr = logp_of(piece["logprobs_corr"], piece["action"])
                    if args.staleness > 0:
                        logp_corr = cap_ratio(logp_corr, logp, 100)  # appendix B; ppo.py has no cap
                    adv = (logp_prox - logp_corr).exp() * adv
                    pg_loss, clip_fraction = policy_loss(logp, logp_prox, adv, args.clip_coef)
                    kl = categorical_kl(logprobs_prox, logprobs)
                    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
                    old, target = piece["value_old"], piece["value_target"]
                    v_loss = value_loss(value, old, target, value_clip)
                    loss = pg_loss + args.kl_coef * kl - args.ent_coef * entropy
                    loss = loss + args.vf_coef * v_loss
                    share = len(micro) / len(minibatch)  # the pieces' gradients add up
                    (share * loss).backward()
                    logged = {"loss/policy": pg_loss, "loss/value": v_loss, "policy/kl": kl}
                    logged |= {"policy/entropy": entropy, "policy/clip_fraction": clip_fraction}
                    accumulate(minibatch_stats[-1], share, logged)
                optimizer.step()
            if args.target_kl is not None and minibatch_stats[-1]["policy/kl"] > args.target_kl:
                break

        # (4) Log, and save if it is time.
        stats |= average(minibatch_stats)
        run.end_iteration(iteration, stats)
    run.finish()


# ==== The algorithm is complete. What follows handles flags, folders, logs, and saving a run. ====

# What this file needs. uv reads it: "uv run" and the file's name install and start everything.
# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = [
#   "torch==2.13.0",
#   "procgen==0.10.7; python_version == '3.10'",
#   "procgen-mirror==0.10.7; python_version >= '3.11'",
#   "gym==0.26.2",
#   "gym-notices==0.0.8",
#   "numpy==1.26.4",
#   "tensorboard==2.21.0",
# ]
# ///

SCRIPT = Path(__file__).stem
CHECKPOINT_FORMAT = 2
ADJUSTABLE = {"lr": "learning_rate", "adv-norm": "adv_norm", "prox": "prox_com", "n-pi": "n_pi"}
LAPTOP = "--distribution-mode easy --num-levels 1 --num-envs 16 --num-steps 64 --channels 8 16 16"
LAPTOP += " --reference-num-envs 16 --total-timesteps 120000"


def adjustable(parser):
    """What --no-adjust can name: the adjustments of flags that this file has."""
    return [name for name, flag in ADJUSTABLE.items() if parser.get_default(flag) is not None]


def fail(message, code=2):
    Run.showing = False  # the status line must not come after this one
    erase = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{erase}{SCRIPT}.py: error: {message}", file=sys.stderr)
    sys.exit(code)


def number(kind, low, high=2**53):
    """An argparse type: an int or a float within bounds."""

    def parse(text):
        try:
            x = kind(text)
        except ValueError:
            x = math.nan
        if not low <= x <= high:
            what = "a whole number" if kind is int else "a number"
            bounds = f"from {low} to {high}" if x > low or high < 2**53 else f"{low} or more"
            raise argparse.ArgumentTypeError(f"{text:.20}: must be {what}, {bounds}")
        return x

    return parse


def parse_args():
    """The flags, and the checkpoint to resume from or None."""
    name = SCRIPT.upper().replace("_", "-")
    parser = argparse.ArgumentParser(
        description=f"{name} on Procgen.",
        epilog=f"For example: python {SCRIPT}.py --env-id heist --num-envs 64",
        usage=argparse.SUPPRESS,  # forty flags; an error is one line
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_flags(parser)
    args, saved = parser.parse_args(), None
    if args.resume is not None:
        given = {word.split("=")[0] for word in sys.argv[1:] if word.startswith("--")}
        if refused := given - {"--resume", "--total-timesteps", "--device"}:
            names = ", ".join(sorted(refused))
            fail(f"{names}: with --resume only --total-timesteps and --device can be given")
        saved = load_checkpoint(args.resume)
        parser.set_defaults(**saved["args"] | {"run_dir": args.resume})
        args = parser.parse_args()
    check_flags(args)
    name = f"{args.env_id}__{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    args.run_dir = args.run_dir or f"runs/{name}"
    return args, saved


def check_flags(args):
    """What argparse cannot see: flags that do not go together, and sizes that do not fit."""
    if args.start_level and not 0 < args.num_levels < 2**31 - args.start_level:
        most = 2**31 - 1 - args.start_level
        fail(f"--start-level {args.start_level}: needs --num-levels from 1 to {most}")
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: PyTorch finds no CUDA device; use cpu or auto")
    if args.clip_coef == 1:
        fail("--clip-coef 1: must be below 1; 0 switches clipping off")
    if args.clip_vloss and args.clip_coef == 0:
        fail("--clip-vloss: needs --clip-coef above 0")
    if "adv-norm" in args.no_adjust and args.adv_norm != "iteration":
        fail(f"--no-adjust adv-norm: --adv-norm {args.adv_norm} has nothing to adjust")

    # PyTorch and Procgen would abort in the middle of what does not fit into memory.
    envs, steps, rollouts = args.num_envs, args.num_steps, 1 + vars(args).get("staleness", 0)
    frames = envs * (steps * rollouts * math.prod(FRAME) + 2**18)  # Procgen takes 1/4 MB for each
    with torch.device("meta"):  # counts the weights without making them
        network = 16 * sum(p.numel() for p in Impala(args.channels).parameters())
    widths = [(width, 64 // 2**i) for i, width in enumerate(args.channels)]
    network += 4 * 64 * sum(width * (side**2 + 7 * (side // 2) ** 2) for width, side in widths)
    free = math.inf
    if Path("/proc/meminfo").exists():  # on Linux
        free = 1024 * int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0])
    if frames + network > free:
        flags = "--num-envs and --num-steps" if frames > network else "--channels"
        needed, free = f"{(frames + network) / 1e9:,.0f}", f"{free / 1e9:,.0f}"
        fail(f"{flags}: about {needed} GB of memory needed, {free} GB free; make them smaller")

    fitting = even_splits(envs, steps)
    if args.num_minibatches not in fitting:
        nearest = sorted(fitting, key=lambda m: abs(m - args.num_minibatches))[:5]
        hint = f"{envs} x {steps} frames do not split evenly; {str(sorted(nearest))[1:-1]} would"
        fail(f"--num-minibatches {args.num_minibatches}: {hint}")


def even_splits(envs, steps):
    """The numbers of minibatches that an iteration splits into: of whole rollouts, or of one."""
    whole = [m for m in range(1, envs + 1) if envs % m == 0]
    return whole + [envs * m for m in range(2, steps + 1) if steps % m == 0]


def set_up_torch(args):
    """Seed; returns the device, and how many frames go through the network at a time."""
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True  # shapes are fixed: it may try which kernels are fastest
    if sys.platform == "linux":  # let malloc keep what is freed: mapping it again is slow
        ctypes.CDLL(None).mallopt(-3, 2**25)  # M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
    Impala.bf16 = args.bf16
    if args.compile:
        torch._dynamo.config.recompile_limit = 64  # one graph a shape, with and without gradient
        Impala.forward = torch.compile(Impala.forward, fullgraph=True, dynamic=False)
    return device, args.microbatch_size or (64 if device.type == "cpu" else 2048)


class Games:
    """N games of Procgen. Besides, only flags, FRAME, ACTIONS and network know about Procgen."""

    def __init__(self, args):
        options = {"distribution_mode": args.distribution_mode, "num_threads": args.env_threads}
        options |= {"num_levels": args.num_levels, "start_level": args.start_level}
        self.envs = ProcgenGym3Env(args.num_envs, args.env_id, rand_seed=args.seed, **options)

    def observe(self):
        """Rewards of the last actions [N], frames [N, 64, 64, 3], if they start an episode [N]."""
        reward, obs, first = self.envs.observe()
        return torch.from_numpy(reward), torch.from_numpy(obs["rgb"]), torch.from_numpy(first)

    def act(self, action):
        self.envs.act(action.numpy())

    def state_dict(self):
        states = self.envs.callmethod("get_state")
        return [torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in states]

    def load_state_dict(self, states):
        self.envs.callmethod("set_state", [x.numpy().tobytes() for x in states])


def upload(x, device):
    """To a GPU from pinned memory: so the next piece is prepared while this one is computed."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def accumulate(sums, share, stats):
    for name, x in stats.items():
        sums[name] = sums.get(name, 0) + share * x.detach()


def average(dicts):
    return {name: torch.stack([x[name] for x in dicts]).mean() for name in dicts[0]}


def episode_stats(ended, recent):
    """Means over the episodes that ended in this iteration, and over the last 100."""
    stats = {}
    for suffix, episodes in [("", ended), ("_last_100", recent)]:
        if episodes:
            means = torch.tensor(episodes).mean(0).tolist()
            stats[f"episode/return{suffix}"], stats[f"episode/steps{suffix}"] = means
    return stats


def duration(seconds):
    for unit, size in [("days", 86400), ("h", 3600), ("min", 60)]:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


class Run:
    """The run's folder with its lock, logs and checkpoints, and what the terminal shows."""

    showing = True

    def __init__(self, args, used, saved, state, envs, device):
        self.args, self.used, self.state, self.envs, self.device = args, used, state, envs, device
        self.folder, self.writer, self.terminal = Path(args.run_dir), None, sys.stdout.isatty()
        self.steps = args.num_envs * args.num_steps  # in an iteration
        self.num_iterations = math.ceil(args.total_timesteps / self.steps)
        state.global_step = 0
        state.episodes = torch.zeros(2, args.num_envs)  # return and length so far, in each env
        state.recent = []  # return and length of the last 100 episodes that ended
        state.unlogged = []  # what could not be written to TensorBoard yet
        self.ended = []  # return and length of the episodes that ended in this iteration
        self.returns, self.doing, self.resumed = [], "start", saved is not None
        self.last_save, self.iteration_ends = time.monotonic(), [time.monotonic()]
        self.saved_iteration = 0
        self.lock_folder(resumed=saved is not None)
        if saved:
            self.restore(load_checkpoint(self.folder))  # it may have changed until the lock was had
            self.returns = list(episode_stats([], state.recent).values())[:1]
            self.saved_iteration = state.iteration
        if hasattr(sys.stdout, "reconfigure"):  # a path may have letters that a terminal lacks
            sys.stdout.reconfigure(errors="backslashreplace")
        for line in announcement(self):
            self.say(line)
        if not saved or saved["args"]["total_timesteps"] != args.total_timesteps:  # new or extended
            self.attempt(self.save, "checkpoint")
        if saved:
            self.last_save = -math.inf  # so that even a short stint leaves a checkpoint
        signal.signal(signal.SIGINT, self.stop)
        signal.signal(signal.SIGTERM, self.stop)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(signal.SIGHUP, self.stop)
        if self.terminal:
            threading.Thread(target=self.refresh, daemon=True).start()

    def lock_folder(self, resumed):
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not resumed and any(self.folder.iterdir()):
                hint = f"choose another, or --resume {self.folder} if it is a run"
                fail(f"--run-dir {self.folder}: is not empty; {hint}")
            self.lock = open(self.folder / "lock", "w")  # unlocked when the process ends, anyhow
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"--run-dir {self.folder}: another process is writing there")
        except OSError as error:
            fail(f"{error.filename or self.folder}: cannot be written ({error.strerror})")

    def restore(self, saved):
        try:
            for name, x in vars(self.state).items():
                if hasattr(x, "load_state_dict"):
                    x.load_state_dict(saved[name])
                elif isinstance(x, torch.Tensor):
                    setattr(self.state, name, saved[name].to(x.device))
                else:
                    setattr(self.state, name, saved[name])
            torch.set_rng_state(saved["rng"])
            self.envs.load_state_dict(saved["games"])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            fail(f"--resume {self.folder}: checkpoint.pt does not fit ({type(error).__name__})")

    def each(self, items, label):
        """Go through items; the terminal counts them."""
        for i, item in enumerate(items, start=1):
            self.doing = f"{label} {i}/{len(items)}"
            yield item

    def count_episodes(self, reward, first):
        """Add up a step's rewards [N]; first [N] is true where the step ended an episode."""
        self.state.episodes += torch.stack([reward, torch.ones_like(reward)])
        self.ended += self.state.episodes[:, first].T.tolist()
        self.state.episodes[:, first] = 0

    def end_iteration(self, iteration, stats):
        """Log the stats, and write a checkpoint if it is time."""
        state, now = self.state, time.monotonic()
        values = [torch.as_tensor(x, device=self.device).double() for x in stats.values()]
        values = torch.stack(values).tolist() if values else []  # from the device, all at once
        stats = dict(zip(stats, values, strict=True))
        self.check_finite(iteration, stats)
        state.iteration, state.global_step = iteration, iteration * self.steps
        state.recent = (state.recent + self.ended)[-100:]
        stats = episode_stats(self.ended, state.recent) | stats
        stats["time/environment_steps"] = float(state.global_step)
        stats["time/steps_per_second"] = self.steps / (now - self.iteration_ends[-1])
        state.unlogged.append((state.global_step, stats))
        self.ended = []
        self.returns += [stats["episode/return_last_100"]] if state.recent else []
        self.iteration_ends.append(now)
        if not self.terminal or iteration % math.ceil(self.num_iterations / 10) == 0:
            self.say(", ".join(self.status(iteration)))

        finished = iteration == self.num_iterations
        must_save = finished
        logged = self.attempt(self.write_logs, "TensorBoard log")
        due = must_save or now - self.last_save >= self.args.checkpoint_seconds
        saved = self.attempt(self.save, "checkpoint") if due else True
        if (finished and not logged) or (must_save and not saved):
            self.give_up()

    def check_finite(self, iteration, stats):
        """A run that diverges stops here, before it replaces its last good checkpoint."""
        stats = {name: x for name, x in stats.items() if name.startswith(("loss/", "policy/"))}
        bad = [name for name, x in stats.items() if not math.isfinite(x)]
        if not torch.stack([p.isfinite().all() for p in self.state.agent.parameters()]).all():
            bad.append("weights")
        if bad:
            hint = "try a new run with a smaller --learning-rate; the last good checkpoint is kept"
            fail(f"iteration {iteration} diverged, not finite: {', '.join(bad)}; {hint}", code=1)

    def attempt(self, write, what):
        """Write; if that fails, as on a full disk, say so: the next iteration tries again."""
        try:
            write()
            return True
        except (OSError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            self.say(f"warning: {what} not written ({reason}), trying again next iteration")
            return False

    def give_up(self):
        hint = f"make room, then --resume {self.folder}"
        fail(f"iteration {self.state.iteration} could not be written; {hint}", code=1)

    def write_logs(self):
        unlogged, (writer, self.writer) = self.state.unlogged, (self.writer, None)
        if writer is None:  # the first, or after an error; purge_step: what is logged again
            writer = SummaryWriter(self.folder, purge_step=unlogged[0][0])
            flags = {name: str(x) for name, x in vars(self.args).items()}
            flags |= {f"used_{name}": x for name, x in vars(self.used).items()}
            writer.add_text("flags", "\n".join(f"    {name}: {x}" for name, x in flags.items()))
            for summary in hparams(flags, {"episode/return_last_100": 0}):
                writer.file_writer.add_summary(summary)
        for step, stats in unlogged:
            for name, x in stats.items():
                writer.add_scalar(name, x, step)
        writer.flush()
        unlogged.clear()
        self.writer = writer

    def save(self):
        """Replace the checkpoint, in one instant. If that fails, the old one stays."""
        saved = {"script": SCRIPT, "format": CHECKPOINT_FORMAT, "args": vars(self.args)}
        saved |= {"used": vars(self.used), "rng": torch.get_rng_state()}
        saved["games"] = self.envs.state_dict()
        temporary, self.last_save = self.folder / "checkpoint.pt.tmp", -math.inf
        try:
            for name, x in vars(self.state).items():
                saved[name] = x.state_dict() if hasattr(x, "state_dict") else x
            saved["digest"] = digest(saved)
            with open(temporary, "wb") as file:
                torch.save(saved, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / "checkpoint.pt")
            folder = os.open(self.folder, os.O_RDONLY)
            os.fsync(folder)  # so that the new name survives a power cut, too
            os.close(folder)
            self.last_save, self.saved_iteration = time.monotonic(), self.state.iteration
        finally:
            temporary.unlink(missing_ok=True)

    def stop(self, signum, _):
        self.leave("stopped", 128 + signum)  # 130 for Ctrl-C, 143 for SIGTERM

    def leave(self, why, code):
        """Leave at once. Files are safe at any moment; an exception could get lost in C++ code."""
        try:
            (self.folder / "checkpoint.pt.tmp").unlink(missing_ok=True)
            resume = f"to resume after iteration {self.saved_iteration:,}: python {SCRIPT}.py"
            print(f"\n{why}; {resume} --resume {self.folder}", file=sys.stderr)
        finally:
            os._exit(code)

    def say(self, text, end="\n"):
        try:
            print("\r\x1b[K" * self.terminal + text, end=end, flush=True)
        except OSError as error:  # a pipe that was closed, a full disk
            self.leave(f"standard output cannot be written ({error.strerror})", 1)

    def status(self, iteration):
        """Return and its change over ten iterations, place, speed, time left."""
        parts, ends = ["no episode has ended yet"], self.iteration_ends
        if self.returns:
            change = self.returns[-1] - self.returns[-11:][0]
            parts = [f"return {self.returns[-1]:.2f} ({change:+.2f})"]
        parts.append(f"iteration {iteration:,}/{self.num_iterations:,}")
        if len(ends) > 1:
            parts.append(f"{self.steps / (ends[-1] - ends[-2]):,.0f} steps/s")
        if len(ends) > 2:  # the first iteration is a warm-up, and does not count
            an_iteration = (ends[-1] - ends[1]) / (len(ends) - 2)
            left = an_iteration * (self.num_iterations - self.state.iteration)
            parts.append(f"{duration(left)} left")
        return parts

    def refresh(self):
        """On a terminal: keep the status in its last line up to date, whatever the run is doing."""
        while self.showing and self.state.iteration < self.num_iterations:
            status = self.status(self.state.iteration + 1)
            clock = duration(time.monotonic() - self.iteration_ends[-1])
            status.insert(2, f"{self.doing}, for {clock}")
            self.say(" | ".join(status)[: os.get_terminal_size().columns - 1], end="")
            time.sleep(0.5)

    def finish(self):
        if self.state.unlogged:  # the last iteration's, and this is the resumed run
            logged = self.attempt(self.write_logs, "TensorBoard log")
            if not (logged and self.attempt(self.save, "checkpoint")):
                self.give_up()
        step, what = self.state.global_step, ", ".join(self.status(self.state.iteration)[:1])
        self.say(f"finished at {step:,} steps, {what}: {self.folder}/checkpoint.pt")
        more = f"--total-timesteps {2 * step}"
        self.say(f"look at it: tensorboard --logdir {self.folder}")
        self.say(f"watch it:   python experiments/evaluate.py {self.folder} --video play.mp4")
        self.say(f"extend it:  python {SCRIPT}.py --resume {self.folder} {more}")


def digest(x, sha=None):
    """A checksum of all that is in a checkpoint: on a damaged state, Procgen aborts."""
    sha = sha or hashlib.sha256()
    if isinstance(x, torch.Tensor):
        sha.update(f"{x.dtype}, {tuple(x.shape)}".encode())
        sha.update(x.detach().cpu().contiguous().numpy())
    elif isinstance(x, dict | list | tuple):
        sha.update(f"{len(x)} items".encode())
        for item in x.items() if isinstance(x, dict) else x:
            digest(item, sha)
    else:
        sha.update(repr(x).encode())
    return sha.hexdigest()


def load_checkpoint(folder):
    """Read a checkpoint; with weights_only, opening somebody else's never runs their code."""
    path, own = Path(folder) / "checkpoint.pt", f"{SCRIPT}.py, format {CHECKPOINT_FORMAT}"
    if folder == "":
        fail("--resume: needs the folder of a run")
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
        origin = f"{saved['script']}.py, format {saved['format']}"
    except FileNotFoundError:
        fail(f"--resume {folder}: there is no checkpoint.pt")
    except Exception as error:
        fail(f"--resume {folder}: checkpoint.pt is damaged, or not ours ({type(error).__name__})")
    if origin != own:
        fail(f"--resume {folder}: was written by {origin}; this is {own}")
    if saved.pop("digest", None) != digest(saved):
        fail(f"--resume {folder}: checkpoint.pt is damaged, or was changed after it was written")
    return saved


def adjustment_table(args, used):
    """Rows of name, meaning, value stated, value in use, its decay rate, rule."""
    root = "/ c" if args.lr_rule == "linear" else "/ sqrt(c)"
    rows = [("lr", "Adam step size", args.learning_rate, used.lr, root)]
    if args.adv_norm == "iteration":
        what = "advantage statistics' span, iterations"
        rows += [("adv-norm", what, 1, used.adv_norm_span, "* c, at least 1")]
    for name, stated, value in [("beta1", 0.9, used.beta1), ("beta2", 0.999, used.beta2)]:
        rule = "to the 1/c" if args.adjust_betas in ("both", name) else "kept"
        rows += [(name, f"Adam {name}", stated, value, rule)]
    for name, what, stated, value, rule in rows:
        decay = vars(used).get(f"{name.replace('-', '_')}_decay", "")
        yield name, what, stated, value, decay, "kept" if name in args.no_adjust else rule


def announcement(run):
    """The lines to print before the first step: what will be done, and what might surprise."""
    args, used, state, device = run.args, run.used, run.state, run.device
    precision = "bfloat16 convolutions" if args.bf16 else "float32"
    game = f"{args.env_id}, {args.distribution_mode}, levels: {args.num_levels or 'all'}"
    yield f"{SCRIPT}.py on {game}, seed {args.seed}"
    yield f"run        {run.num_iterations:,} iterations, {run.num_iterations * run.steps:,} steps"
    yield f"folder     {run.folder}"
    if run.resumed:
        yield f"resumed    after iteration {state.iteration:,}, {state.global_step:,} steps"
    weights = sum(p.numel() for p in state.agent.parameters())
    threads = f"CPU threads: {torch.get_num_threads()}"
    yield f"network    {weights:,} weights, {precision}, on {device}, {threads}"
    yield f"minibatch  {run.steps // args.num_minibatches:,} steps"
    yield f"iteration  {run.steps:,} steps: {args.num_envs} environments x {args.num_steps}"
    size = args.staleness * run.steps * math.prod(FRAME)  # STALE, 2 lines
    yield f"queue      {size / 1e9:.1f} GB of frames, in memory and in each checkpoint"
    yield f"adjusted to the batch size, c = {args.reference_num_envs}/{args.num_envs}:"
    header = ("NAME", "WHAT", "STATED", "IN USE", "DECAY", "RULE")
    for row in [header, *adjustment_table(args, used)]:
        cells = [x if isinstance(x, str) else f"{x:.5g}" for x in row]
        yield "  {:<12} {:<38} {:>7} {:>9} {:>8}  {}".format(*cells)
    if args.num_envs != args.reference_num_envs:
        if (vars(args).get("policy_epochs") or args.epochs) > 1:
            yield "  but several epochs: the paper claims invariance for one policy epoch only"
        if not hasattr(used, "prox_com"):
            yield "  but no EWMA: the paper claims invariance for PPO-EWMA and PPG-EWMA"
        if args.adv_norm == "minibatch":
            yield "  but --adv-norm minibatch: its statistics depend on the batch size"
        if args.num_envs > args.reference_num_envs:
            yield "  but a larger batch: the paper claims invariance for small enough ones only"
    if args.clip_coef == 0 and args.kl_coef == 0:
        yield "note: with --clip-coef 0 and --kl-coef 0, nothing limits the update"
    if device.type == "cpu" and run.num_iterations * run.steps > 10_000_000:
        yield "note: on a CPU this takes weeks. A run for a laptop, some minutes long:"
        yield f"  python {SCRIPT}.py {LAPTOP}"
    if device.type == "cpu" and args.bf16:
        able = torch.cpu.get_capabilities()
        if not (able.get("amx_bf16") or able.get("avx512_bf16")):
            yield "note: this CPU has no bfloat16 arithmetic: --bf16 is slower here"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("stopped before the first step", code=130)
