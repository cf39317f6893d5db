"""Is a run's batch small enough? Estimate the gradient noise scale at a checkpoint, and compare it with the minibatch.

python experiments/noise_scale.py RUN_DIR
python experiments/noise_scale.py EARLY_RUN LATER_RUN --frames 131072
python experiments/noise_scale.py RUN_DIR --script my_ppo_ewma.py    # for your own environment (patches/README.md)

Batch size-invariance holds for batches that are small enough, where noise dominates the gradient. The noise scale says
how small: B = tr(Sigma) / |G|^2 frames (McCandlish et al., 2018, arXiv:1812.06162), where G is the true gradient and
Sigma / n the covariance of a gradient over n frames. In a minibatch of B frames, noise is as large as signal, and a
frame is worth half of what it is worth in a tiny minibatch. B changes during training: look at early checkpoints, too.

The policy plays fresh frames on the levels of training; its weights stay as they are. Environments are recorded from
different times on, so that all parts of an episode come up. The script's own functions prepare the frames: rewards are
divided by the saved statistics; advantages are normalised over all frames collected, not over a minibatch or iteration.
All old policies are the current one, so ratios are 1, whatever --staleness or --prox-com. The losses:
  policy  the objective with its entropy bonus
  value   the value loss. PPG has a trunk for it; its auxiliary phases are left out
  total   policy + vf_coef * value, where one network is trained on both

Frames of a rollout are alike, and a minibatch holds whole rollouts, or a stretch of one. These are the small batches:
from the squares of their gradients, and their dot products between environments, |G|^2 and tr(Sigma) follow without
bias. The 90% interval is a jackknife over environments, of |G|^2 / tr(Sigma), inverted. The last column is B if every
frame came from an environment of its own; the difference is due to frames being alike.
It is a guide, not a law. On CartPole larger batches still learnt alike with SGD, and smaller ones did not with Adam,
which divides each weight's gradient by its size: see results/SMALL_ENOUGH.md.
"""

import math
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

from lab.common import Parser, fail, load_script, number, read_checkpoint  # checks packages

# isort: split
import numpy as np
import torch
from scipy import stats
from tqdm import tqdm

from evaluate import ALL_LEVELS, load_run
from lab.catalogue import RANGES

ENVIRONMENTS = 64  # at most; the gradients' dot products are taken between them
LATEST_START = 500  # environments start to record after 0 to so many steps; Procgen's longest episode has 1,000
MIXED, OF = 512, 4  # batches of so many frames from different environments, for the last column

Estimate = namedtuple("Estimate", "noise low high signal")  # noise scale, its 90% interval, |G|^2


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("run_dirs", metavar="RUN_DIR", nargs="+", help="folders of runs, or checkpoint files")
    add("--script", type=Path, metavar="FILE", help="that trained them, if it is a patched one")
    add("--frames", type=number(int, 1, 2**20), default=32768, help="to collect, 12 KB of memory each (32768)")
    add("--seed", type=number(int, 0, ALL_LEVELS), default=1, help="of levels and actions (1)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA if there is one")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: PyTorch finds no CUDA device; use cpu or auto")
    if args.script and not args.script.is_file():
        fail(f"--script {args.script}: there is no such file")
    return args


def estimate(gradients, square_norms, frames):
    """The noise scale in frames, from small batches of so many frames, some of them from each of E environments.

    gradients [E, P]: the mean over an environment's small batches; square_norms [E]: the mean of their |gradient|^2.
    """
    dots = sum(part.double() @ part.double().T for part in gradients.split(2**16, dim=1)).cpu().numpy()  # [E, E]
    np.fill_diagonal(dots, 0)  # within an environment, noise is in common
    norms, envs = np.asarray(square_norms, dtype=float), len(dots)

    def ratio(dots_sum, norms_sum, envs):
        signal = dots_sum / (envs * (envs - 1))  # |G|^2: noise of different environments averages to 0
        return signal / (norms_sum / envs - signal)  # to the trace of a small batch's covariance

    middle = ratio(dots.sum(), norms.sum(), envs)
    without = ratio(dots.sum() - 2 * dots.sum(1), norms.sum() - norms, envs - 1)  # each environment left out in turn
    error = math.sqrt((envs - 1) * np.var(without)) * stats.t.ppf(0.95, envs - 1)
    turned = [frames / x if x > 0 else math.inf for x in (middle, middle + error, middle - error)]
    return Estimate(*turned, dots.sum() / (envs * (envs - 1)))


def fresh_seed(train, seed):
    """A seed for games that are not those of training."""
    return ALL_LEVELS - seed if ALL_LEVELS - seed != train.seed else seed


def collect(agent, module, train, envs, steps, seed, device, bar):
    """Play, and keep `steps` successive steps of each environment, and one more frame: {name: [envs, steps, ...]}."""
    torch.manual_seed(seed)
    games = module.Games(SimpleNamespace(**vars(train) | {"num_envs": envs, "seed": fresh_seed(train, seed)}))
    start, row, kept = torch.randint(LATEST_START + 1, (envs,)), torch.arange(envs), {}
    _, frames, first = games.observe()
    for step in range(int(start.max()) + steps + 1):
        with torch.no_grad():
            outputs = [agent(x.to(device)) for x in frames.split(256)]
        logits, value = (torch.cat(x).float().cpu() for x in zip(*outputs, strict=True))
        if not (logits.isfinite().all() and value.isfinite().all()):
            fail("the network's outputs are not finite: the run diverged", code=1)
        now = {"obs": frames, "first": first, "value_old": value, "logprobs_behav": logits.log_softmax(-1)}
        now["action"] = module.sample(now["logprobs_behav"])
        games.act(now["action"])
        now["reward"], frames, first = games.observe()
        here = (start <= step) & (step <= start + steps)
        for name, x in now.items():
            if name not in kept:
                kept[name] = torch.empty(envs, steps + 1, *x.shape[1:], dtype=x.dtype)
            kept[name][row[here], step - start[here]] = x[here]
        bar.update(envs)
    return kept


def prepare(module, train, kept, return_stats):
    """Step (2) of the scripts, for environments that made several rollouts: a dict of [environments, steps, ...]."""
    envs, steps = kept["reward"].shape[0], kept["reward"].shape[1] - 1
    reward = kept["reward"][:, :-1]
    if train.reward_norm:
        if return_stats[0] > 1:  # a checkpoint from before the first iteration has none: these frames make them
            return_stats = return_stats * torch.tensor([1e12, 1, 1])  # so many that these frames do not change them
        reward, *_ = module.normalise_rewards(reward, kept["first"], torch.zeros(envs), return_stats)
    values, first = (kept[x].unfold(1, train.num_steps + 1, train.num_steps) for x in ("value_old", "first"))
    rollouts = [reward.reshape(-1, train.num_steps), values.flatten(0, 1), first.flatten(0, 1)]
    advantage = module.gae(*rollouts, train.gamma, train.gae_lambda).view(envs, steps)
    data = {name: kept[name][:, :-1] for name in ("obs", "action", "logprobs_behav", "value_old")}
    data["value_target"] = advantage + data["value_old"]
    if train.adv_norm != "none":
        _, mean, std = module.update_moments(torch.zeros(3, dtype=torch.float64), advantage, 0)
        advantage = (advantage - mean) / (std + 1e-8)
    return data | {"advantage": advantage}


def losses(agent, module, train, piece):
    """Step (3) of the scripts, where all old policies are the current one: what policy and value are trained on."""
    logits, value = agent(piece["obs"])
    logprobs = logits.log_softmax(-1)
    logp, logp_prox = (module.logp_of(x, piece["action"]) for x in (logprobs, piece["logprobs_behav"]))
    pg_loss, _ = module.policy_loss(logp, logp_prox, piece["advantage"], train.clip_coef)
    kl = module.categorical_kl(piece["logprobs_behav"], logprobs)
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    clip = train.clip_coef if train.clip_vloss else 0
    v_loss = module.value_loss(value, piece["value_old"], piece["value_target"], clip)
    return {"policy": pg_loss + train.kl_coef * kl - train.ent_coef * entropy, "value": v_loss}


def gradients(agent, module, train, batch, device):
    """{loss: its gradient [P]} over a batch of frames."""
    parameters, frames = list(agent.parameters()), len(batch["obs"])
    size = train.microbatch_size or (64 if device.type == "cpu" else 2048)
    found = {}
    for i in range(0, frames, size):
        piece = {name: x[i : i + size].to(device) for name, x in batch.items()}
        share = len(piece["obs"]) / frames
        for name, loss in losses(agent, module, train, piece).items():
            parts = torch.autograd.grad(share * loss, parameters, retain_graph=True, materialize_grads=True)
            found[name] = found.get(name, 0) + torch.cat([x.flatten() for x in parts])
    if not hasattr(agent, "aux_head"):  # PPG never trains one weight on both
        found["total"] = found["policy"] + train.vf_coef * found["value"]
    return found


def measure(agent, module, train, data, small, device, bar):
    """{loss: (its Estimate, the noise scale if frames were independent)}. small: frames in a small batch."""
    envs, steps = data["action"].shape
    means, norms, mixed = {}, {}, {}
    for env in range(envs):
        for i in range(0, steps, small):
            batch = {name: x[env, i : i + small] for name, x in data.items()}
            for name, x in gradients(agent, module, train, batch, device).items():
                if name not in means:
                    means[name], norms[name] = x.new_zeros(envs, len(x)), np.zeros(envs)
                means[name][env] += x * (small / steps)
                norms[name][env] += float(x @ x) * (small / steps)
            bar.update(small)
    for _ in range(MIXED):
        chosen = torch.randperm(envs)[:OF], torch.randint(steps, (OF,))
        batch = {name: x[chosen] for name, x in data.items()}
        for name, x in gradients(agent, module, train, batch, device).items():
            mixed[name] = mixed.get(name, 0) + float(x @ x) / MIXED
        bar.update(OF)
    results = {name: estimate(means[name], norms[name], small) for name in means}
    return {name: (x, max(0, OF * (mixed[name] / x.signal - 1))) for name, x in results.items()}


def verdict(results, train, minibatch):
    """One sentence, by the loss whose noise scale might be the smallest."""
    name, x = min(((name, x) for name, (x, _) in results.items()), key=lambda pair: (pair[1].low, pair[1].noise))
    known = x.low if x.noise == math.inf else x.noise
    if known == math.inf:
        return "Nothing can be said of invariance: the gradients are lost in noise."
    if minibatch < x.low:
        start = f"Invariance can be expected: minibatches of {minibatch:,} frames are below every noise scale"
    elif minibatch > x.high:
        start = f"Do not expect invariance: minibatches of {minibatch:,} frames are above the {name} loss's noise scale"
    else:
        start = f"Invariance is in doubt: minibatches of {minibatch:,} frames are near the {name} loss's noise scale"
    reach, least = known * train.num_minibatches / train.num_steps, " or more" if x.high == math.inf else ""
    if reach < 1:
        return f"{start}, and even one environment's are; more --num-minibatches make them smaller."
    return f"{start}; they reach it at about --num-envs {reach:,.0f}{least}."


def report(results, train, minibatch):
    """The lines of the table, and the sentence below it."""
    row = "{:<8}{:>12}{:>20}{:>11}{:>9}{:>20}{:>20}".format
    yield row("loss", "noise scale", "90% interval", "minibatch", "ratio", "reached at num-envs", "independent frames")
    for name, (x, independent) in results.items():
        cells = [f"{x.noise:,.0f}", f"{x.low:,.0f} to {x.high:,.0f}", f"{minibatch:,}", f"{minibatch / x.noise:.2f}"]
        cells += [f"{x.noise * train.num_minibatches / train.num_steps:,.0f}", f"{independent:,.0f}"]
        if x.high == math.inf:
            cells[1] = f"above {x.low:,.0f}" if x.low < math.inf else "none"
        if x.noise == math.inf:
            cells[0] = cells[3] = cells[4] = cells[5] = "unknown"
        yield row(name, *cells)
    if any(x.high == math.inf for x, _ in results.values()):
        yield "Where the gradient cannot be told from 0, only a lower bound can be given: try more --frames."
    yield verdict(results, train, minibatch)


def load_patched(run_dir, path, device):
    """As load_run, for a script that is none of the five."""
    saved = read_checkpoint(run_dir, scripts=None)
    train = SimpleNamespace(**saved["args"])
    try:
        module = load_script(path.stem, path)
        if saved["format"] != module.CHECKPOINT_FORMAT:
            raise ValueError("another format")
        module.check_flags(train)  # finds out about the environment, too
        agent = module.Agent(train.channels, *([train.arch] if hasattr(train, "arch") else []))
        agent.load_state_dict(saved["agent"])
    except Exception as error:
        fail(f"{run_dir}: does not fit --script {path} ({type(error).__name__})")
    return agent.to(device), module, train, saved


def load(run_dir, script, device):
    """A run's agent, the module and the flags that it was trained with, and its checkpoint. All is checked."""
    if script:
        agent, module, train, saved = load_patched(run_dir, script, device)
    else:
        saved = read_checkpoint(run_dir, scripts=None)
        if (game := saved["args"].get("env_id")) not in RANGES:
            fail(f"{run_dir}: {game!r:.40} is no game of Procgen; --script must name the script that trained it")
        agent, name, train, _ = load_run(run_dir, device)
        module = load_script(name)
    if saved.pop("digest", None) != module.digest(saved):
        fail(f"{run_dir}: is damaged, or was changed after it was written")
    return agent, module, train, saved


def main():
    args = parse_args()
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    runs = [load(run_dir, args.script, device) for run_dir in args.run_dirs]
    for run_dir, (_, _, train, _) in zip(args.run_dirs, runs, strict=True):
        if args.frames < 8 * train.num_steps:
            fail(f"--frames {args.frames}: must be {8 * train.num_steps} or more, 8 rollouts of {run_dir}")
    for place, (run_dir, (agent, module, train, saved)) in enumerate(zip(args.run_dirs, runs, strict=True)):
        rollouts, minibatch = args.frames // train.num_steps, train.num_envs * train.num_steps // train.num_minibatches
        envs = min(ENVIRONMENTS, rollouts)
        steps = rollouts // envs * train.num_steps
        total = envs * (LATEST_START + 2 * steps) + MIXED * OF
        with tqdm(total=total, unit=" frames", dynamic_ncols=True, disable=None, leave=False) as bar:
            bar.set_description("play")
            kept = collect(agent, module, train, envs, steps, args.seed, device, bar)
            data = prepare(module, train, kept, saved["return_stats"])
            bar.set_description("gradients")
            results = measure(agent, module, train, data, min(train.num_steps, minibatch), device, bar)
        game = ", ".join([train.env_id, *([] if args.script else [train.distribution_mode]), f"seed {train.seed}"])
        title = f"{saved['script']}.py on {game}, after {saved['global_step']:,} steps: {run_dir}"
        print("\n" * (place > 0) + title)
        print(f"{envs * steps:,} fresh frames from {envs} environments; all sizes in frames")
        print("\n".join(report(results, train, minibatch)), flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
