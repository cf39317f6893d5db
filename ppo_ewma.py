"""Proximal policy optimisation (PPO) on Procgen, in one file.

Paper: "Batch size-invariance for policy optimization", Hilton, Cobbe and Schulman, 2021 (arXiv:2110.00641). Comments
name its sections; "PPO equation" is one of the PPO paper, Schulman et al., 2017 (arXiv:1707.06347).

Five files, each a whole algorithm, each a few tagged lines away from an earlier one. Read them in this order:
  ppo.py        PPO. Its old policy does two jobs: it corrects for the data's age, and it limits the update.
  ppo_ewma.py   PPO-EWMA: two policies for the two jobs.               diff ppo.py ppo_ewma.py;  grep EWMA ppo_ewma.py
  staleness.py  PPO on data made old on purpose: why the jobs differ.  diff ppo.py staleness.py; grep STALE staleness.py
  ppg.py        Phasic policy gradient, a stronger algorithm.          diff ppo.py ppg.py;       grep PPG ppg.py
  ppg_ewma.py   PPG-EWMA, the paper's main algorithm: to ppg.py what ppo_ewma.py is to ppo.py, by the very same patch.

Flags are stated for 256 environments (appendix B); another --num-envs adjusts them (section 4). That this preserves
learning is claimed by the paper for the EWMA files, one policy epoch and small enough batches.

Deviations from the paper:
  1. One process steps all environments; the paper has 4 workers of 64 environments and averages their gradients.
  2. A minibatch is processed in pieces (--microbatch-size), which bounds memory; their gradients add up to the same.

EWMA: here the proximal policy, which limits the update, is an exponentially weighted moving average of the network. The
behaviour policy only corrects for the data's age. How old the proximal policy is, in optimiser steps, is now a choice
(--prox-com), and no longer follows from the batch size.
"""

import argparse
import copy  # EWMA
import ctypes
import fcntl
import math
import os
import signal
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

try:
    import torch
    import torch.nn as nn
    from procgen import ProcgenGym3Env
    from procgen.env import ENV_NAMES, EXPLORATION_LEVEL_SEEDS
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm
except ImportError as error:
    needs = "Procgen has builds for Python 3.10, 3.11 and 3.12: with one of these, pip install -r requirements.txt"
    print(f"{error} in Python {sys.version.split()[0]}. {needs}", file=sys.stderr)
    sys.exit(2)

if sys.platform == "linux":  # let malloc keep what is freed: else every pass maps and unmaps its activations anew
    ctypes.CDLL(None).mallopt(-3, 2**25)  # M_MMAP_THRESHOLD
    ctypes.CDLL(None).mallopt(-1, 2**30)  # M_TRIM_THRESHOLD

SCRIPT = Path(__file__).stem
CHECKPOINT_FORMAT = 1
MODES = {  # and the games that have them; Procgen aborts the whole process if asked for another
    "easy": ENV_NAMES,
    "hard": ENV_NAMES,
    "extreme": ["chaser", "dodgeball", "leaper", "starpilot"],
    "memory": ["caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"],
    "exploration": list(EXPLORATION_LEVEL_SEEDS),
}


def fail(message, code=2):
    print(f"{SCRIPT}.py: error: {message}", file=sys.stderr)
    sys.exit(code)


def number(kind, low, high=math.inf):
    """An argparse type: an int or a float within bounds."""

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and math.isfinite(value)):
            bounds = f"{low} or more" if high == math.inf else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text}: must be a {'whole ' * (kind is int)}number, {bounds}")
        return value

    return parse


def parse_args():
    """The flags, and the checkpoint to go on from or None."""
    parser = argparse.ArgumentParser(
        description=f"{SCRIPT}.py: {__doc__.splitlines()[0]}",
        usage=argparse.SUPPRESS,  # forty flags; an error is one line
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    count, fraction, nonnegative = number(int, 1), number(float, 0, 1), number(float, 0)

    add = parser.add_argument_group("run").add_argument
    add("--seed", type=number(int, 0, 2**31 - 1), default=1, help="of the network, of sampling and of Procgen")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA if there is one")
    add("--run-dir", help="where results go; None: runs/<env>__<script>__<seed>__<time>")
    add("--resume", metavar="RUN_DIR", help="go on with a run that was stopped; its flags come with it")
    add("--checkpoint-seconds", type=nonnegative, default=60, help="least time between checkpoints; 0: every iteration")

    add = parser.add_argument_group("environment").add_argument
    add("--env-id", choices=ENV_NAMES, default="starpilot", help="Procgen game")
    add("--distribution-mode", choices=list(MODES), default="hard", help="difficulty; some games lack the last three")
    add("--num-levels", type=number(int, 0, 2**31 - 1), default=0, help="size of the level set; 0: all levels")
    add("--start-level", type=number(int, 0, 2**31 - 1), default=0, help="the first level of the set")
    add("--num-envs", type=count, default=256, help="parallel environments N; changes all batch sizes")
    add("--num-steps", type=count, default=256, help="steps of each environment in an iteration, T")
    add("--total-timesteps", type=count, default=100_000_000, help="environment steps in all")

    add = parser.add_argument_group("optimisation").add_argument
    add("--epochs", type=count, default=3, help="passes over the data of an iteration, E")
    add("--learning-rate", type=nonnegative, default=5e-4, help="Adam step size")
    add("--num-minibatches", type=count, default=8, help="optimiser steps in an epoch")
    add("--gamma", type=fraction, default=0.999, help="discount")
    add("--gae-lambda", type=fraction, default=0.95, help="GAE bootstrapping")
    add("--clip-coef", type=nonnegative, default=0.2, help="clip range epsilon; 0: no clipping")
    add("--kl-coef", type=nonnegative, default=0.0, help="KL penalty beta; the paper's is 1, with --clip-coef 0")
    add("--prox-com", type=nonnegative, default=8.0, help="centre of mass of the EWMA, in optimiser steps")  # EWMA
    add("--vf-coef", type=nonnegative, default=0.5, help="weight of the value loss")
    add("--ent-coef", type=nonnegative, default=0.01, help="weight of the entropy bonus")
    add("--clip-vloss", action="store_true", help="also limit the value update, to --clip-coef")
    add("--target-kl", type=nonnegative, help="no further policy epoch if the KL of the last minibatch exceeds this")
    add("--adv-norm", choices=["iteration", "minibatch", "none"], default="iteration", help="advantage normalisation")
    add("--reward-norm", action=argparse.BooleanOptionalAction, default=True, help="reward normalisation")
    add("--channels", type=count, nargs=3, default=[16, 32, 32], help="widths of the network; smaller for a CPU")
    add("--microbatch-size", type=count, help="frames in a pass, same gradient; None: 64 on a CPU, 2048 on a GPU")

    add = parser.add_argument_group("batch size").add_argument
    add("--reference-num-envs", type=count, default=256, help="number of environments that the flags are stated for")
    add("--no-adjust", nargs="+", default=[], metavar="NAME", help="leave as stated: lr, adv-norm, prox, n-pi")
    add("--lr-rule", choices=["sqrt", "linear"], default="sqrt", help="how the step size is adjusted (appendix D)")
    add("--adjust-betas", choices=["none", "beta2", "both"], default="none", help="Adam's betas, too (appendix E)")

    args, saved = parser.parse_args(), None
    if args.resume:
        given = {word.split("=")[0] for word in sys.argv[1:] if word.startswith("--")} - {"--resume"}
        if refused := given - {"--total-timesteps", "--device"}:
            fail(f"{', '.join(sorted(refused))}: with --resume only --total-timesteps and --device can be given")
        saved = load_checkpoint(Path(args.resume))
        changed = {name[2:].replace("-", "_") for name in given} | {"resume"}
        args = argparse.Namespace(**saved["args"] | {x: vars(args)[x] for x in changed} | {"run_dir": args.resume})
    if args.env_id not in MODES[args.distribution_mode]:
        having = [mode for mode in MODES if args.env_id in MODES[mode]]
        fail(f"--distribution-mode {args.distribution_mode}: {args.env_id} has only {', '.join(having)}")
    if args.distribution_mode == "exploration" and (args.num_levels or args.start_level):
        fail("--distribution-mode exploration: is one fixed level; leave out --num-levels and --start-level")
    if args.start_level and not 0 < args.num_levels < 2**31 - args.start_level:
        fail(f"--start-level {args.start_level}: needs --num-levels from 1 to {2**31 - 1 - args.start_level}")
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: PyTorch finds no CUDA device; use cpu or auto")
    if args.clip_vloss and args.clip_coef == 0:
        fail("--clip-vloss: needs --clip-coef above 0")
    if not splits_evenly(args.num_envs, args.num_steps, args.num_minibatches):
        even = [m for m in range(1, 4 * args.num_minibatches) if splits_evenly(args.num_envs, args.num_steps, m)]
        what = f"{args.num_envs} environments x {args.num_steps} steps"
        fail(f"--num-minibatches {args.num_minibatches}: {what} do not split evenly; {str(even)[1:-1]} would")
    args.run_dir = args.run_dir or f"runs/{args.env_id}__{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    return args, saved


def adjust_for_batch_size(args):
    """Section 4: what to change so that another number of environments learns the same per environment step.

    Returns a table of values, as stated for the reference and as used here.
    """
    c = args.reference_num_envs / args.num_envs  # batches are c times smaller than the reference's
    divisor, rule = (math.sqrt(c), "/ sqrt(c)") if args.lr_rule == "sqrt" else (c, "/ c")
    table = {
        # name: (what it is, stated, in use, rule)
        "prox": ("proximal policy's centre of mass (steps)", args.prox_com, args.prox_com * c, "* c"),  # EWMA
        "lr": ("Adam step size", args.learning_rate, args.learning_rate / divisor, rule),
        "adv-norm": ("advantage-normalisation span (iterations)", 1, max(1, c), "* c, at least 1"),
    }
    if args.adv_norm != "iteration":
        del table["adv-norm"]
    for name in args.no_adjust:
        if name not in table:
            fail(f"--no-adjust {name}: there are {', '.join(table)} to choose from")
        what, stated, _, _ = table[name]
        table[name] = (what, stated, stated, f"kept: --no-adjust {name}")
    for name, beta, adjusted in [("beta1", 0.9, ["both"]), ("beta2", 0.999, ["beta2", "both"])]:
        adjust = args.adjust_betas in adjusted
        table[name] = (f"Adam {name}", beta, beta ** (1 / c) if adjust else beta, "to the 1/c" if adjust else "kept")
    return table


def scaled(layer, norm):
    """PyTorch's initialisation, with the weights of each output scaled to have this L2 norm, and biases of 0."""
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
        return self.conv2(self.conv1(x.relu()).relu_()).add_(x)  # in place where nothing needs the old value


class Impala(nn.Module):
    """The convolutional network of IMPALA (Espeholt et al., 2018): uint8 frames [B, 64, 64, 3] to features [B, 256]."""

    def __init__(self, channels, blocks=2):
        super().__init__()
        norm = math.sqrt(1 / math.sqrt(len(channels)) / math.sqrt(blocks))  # more residual blocks: each starts smaller
        layers, width = [], 3
        for out in channels:
            layers += [scaled(nn.Conv2d(width, out, 3, padding=1), 1), nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [ResidualBlock(out, norm) for _ in range(blocks)]
            width = out
        dense = scaled(nn.Linear(width * 8 * 8, 256), 1.4)
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.ReLU(), dense, nn.ReLU())

    def forward(self, obs):
        return self.layers(obs.permute(0, 3, 1, 2).float() / 255)  # stays channels last in memory, the fast layout


class Agent(nn.Module):
    """uint8 frames [B, 64, 64, 3] to logits [B, 15] and values [B]."""

    def __init__(self, channels, actions=15):
        super().__init__()
        self.trunk = Impala(channels)
        self.policy_head = scaled(nn.Linear(256, actions), 0.1)
        self.value_head = scaled(nn.Linear(256, 1), 0.1)

    def forward(self, obs):
        features = self.trunk(obs)
        return self.policy_head(features), self.value_head(features).squeeze(-1)


def normalise_rewards(reward, first, discounted, moments):
    """Divide rewards [N, T] by the standard deviation of the discounted return over the run, this rollout included.

    discounted [N]: every environment's return so far, with a discount of its own, 0.99. moments: count, mean and
    variance of all such returns.
    """
    returns = []
    for t in range(reward.shape[1]):
        discounted = reward[:, t] + 0.99 * (1 - first[:, t].float()) * discounted  # a new episode starts at 0
        returns.append(discounted)
    returns = torch.stack(returns).double()
    (count, mean, var), new = moments, returns.numel()
    delta, total = returns.mean() - mean, count + new
    square_sum = var * count + returns.var(correction=0) * new + delta**2 * count * new / total
    moments = torch.stack([total, mean + delta * new / total, square_sum / total])
    return (reward / (moments[2] + 1e-8).sqrt().float()).clamp(-10, 10), discounted, moments


def gae(reward, value, first, gamma, gae_lambda):
    """Generalised advantage estimation. reward [N, T]; value, first [N, T + 1]: one more, after the last step."""
    advantage, running = torch.zeros_like(reward), torch.zeros(len(reward))
    for t in reversed(range(reward.shape[1])):
        alive = 1 - first[:, t + 1].float()  # 0 if step t ended its episode: nothing comes back from the next one
        delta = reward[:, t] + gamma * alive * value[:, t + 1] - value[:, t]
        running = delta + gamma * gae_lambda * alive * running
        advantage[:, t] = running
    return advantage


def update_moments(moments, x, span):
    """Mean and standard deviation of x over about `span` iterations (footnote 1), for advantage normalisation.

    moments: count, sum and sum of squares up to now, decayed once an iteration. Span 1 forgets all but this iteration.
    """
    decay = (span - 1) / (span + 1)
    x = x.double()
    moments = decay * moments + x.new_tensor([x.numel(), x.sum(), (x**2).sum()])
    mean, mean_square = moments[1] / moments[0], moments[2] / moments[0]
    return moments, mean.float(), (mean_square - mean**2).clamp(min=0).sqrt().float()


def splits_evenly(envs, steps, num_minibatches):
    chunks = max(1, num_minibatches // envs)
    return envs * chunks % num_minibatches == 0 and steps % chunks == 0


def minibatches(envs, steps, num_minibatches):
    """One epoch's minibatches: rows of indices into a batch of envs * steps frames.

    Environments are shuffled, time is not: a minibatch is whole rollouts of some environments, or, with fewer
    environments than minibatches, a part of one environment's rollout, and the next one goes on from there.
    """
    return torch.arange(envs * steps).view(envs, steps)[torch.randperm(envs)].view(num_minibatches, -1)


def logp_of(logprobs, action):
    """log pi(a|s) [B] out of the log-probabilities of all actions [B, 15]."""
    return logprobs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def categorical_kl(logprobs_p, logprobs_q):
    """KL[p, q] over the actions, averaged over states: the penalty of PPO equation (8)."""
    return (logprobs_p.exp() * (logprobs_p - logprobs_q)).sum(-1).mean()


def policy_loss(logp, logp_old, advantage, clip_coef):
    """The clipped objective, PPO equation (7), to be minimised; and the fraction of ratios outside the clip range."""
    ratio = (logp - logp_old).exp()
    objective = ratio * advantage
    if clip_coef == 0:
        return -objective.mean(), objective.new_zeros(())
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.min(objective, clipped * advantage).mean(), (clipped != ratio).float().mean()


def value_loss(value, old_value, value_target, clip):
    """Squared error; with clip > 0, of the value or of the value kept close to the old one, whichever is larger."""
    loss = (value - value_target) ** 2
    if clip > 0:
        loss = torch.max(loss, (old_value + (value - old_value).clamp(-clip, clip) - value_target) ** 2)
    return loss.mean()


def update_ewma(prox, policy, weight, com, decay):
    """EWMA: appendix A. Average the policy's parameters into prox, where what was averaged so far has this total weight
    and this mean age (com, its centre of mass) in steps. Returns both, updated."""
    new_weight = 1 + decay * weight
    with torch.no_grad():
        for p, q in zip(prox.parameters(), policy.parameters(), strict=True):
            p.lerp_(q, 1 / new_weight)  # q / new_weight + decay * weight / new_weight * p
    return new_weight, decay * weight / new_weight * (com + 1)


class Run:
    """The run's folder, its logs, progress and checkpoints. From here to main(), skip at a first reading."""

    def __init__(self, args, saved, state, envs):
        self.args, self.state, self.envs, self.folder, self.writer = args, state, envs, Path(args.run_dir), None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not saved and any(self.folder.iterdir()):
                fail(f"--run-dir {self.folder}: is not empty; take another, or --resume {self.folder} if it is a run")
            self.lock = open(self.folder / "lock", "w")  # the system lets go of it when the process ends, in any way
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"--run-dir {self.folder}: another process is writing there")
        except OSError as error:
            fail(f"--run-dir {self.folder}: cannot be written ({error.strerror})")
        if saved:
            for name, x in vars(state).items():
                if hasattr(x, "load_state_dict"):
                    x.load_state_dict(saved[name])
                else:
                    setattr(state, name, saved[name])
            torch.set_rng_state(saved["rng"])
            envs.callmethod("set_state", [x.numpy().tobytes() for x in saved["procgen"]])
        else:
            self.writer = SummaryWriter(self.folder)
            self.writer.add_text("flags", "\n".join(f"    {name}: {value}" for name, value in vars(args).items()))
            self.save()
        signal.signal(signal.SIGINT, self.stop)
        signal.signal(signal.SIGTERM, self.stop)

    def stop(self, signum, _):
        """Leave at once: files are safe at any moment, and an exception could get lost in what was interrupted."""
        print(f"\nstopped; to go on: python {SCRIPT}.py --resume {self.folder}", file=sys.stderr)
        (self.folder / "checkpoint.pt.tmp").unlink(missing_ok=True)
        os._exit(128 + signum)  # 130 for Ctrl-C, 143 for SIGTERM

    def start(self, num_iterations):
        """Returns the progress bar. Where there is no terminal it stays invisible, and iterations print a line."""
        self.steps = self.args.num_envs * self.args.num_steps
        self.total, self.resumed_at = num_iterations * self.steps, self.state.global_step
        look = {"unit": " steps", "unit_scale": True, "smoothing": 0, "dynamic_ncols": True, "file": sys.stdout}
        self.bar = tqdm(total=self.total, initial=self.resumed_at, disable=not sys.stdout.isatty(), **look)
        sys.stdout.flush()  # what was announced, also where it goes to a file
        self.started = self.last_iteration = self.last_save = time.time()
        return self.bar

    def end_iteration(self, iteration, stats, ended):
        """Log the stats, and return and length of the episodes that ended; checkpoint if it is time."""
        state, now = self.state, time.time()
        state.iteration, state.global_step = iteration, iteration * self.steps
        state.recent = (state.recent + ended)[-100:]
        for name, episodes in [("episodes", ended), ("last_100_episodes", state.recent)]:
            if episodes:
                stats[f"{name}/return"], stats[f"{name}/length"] = torch.tensor(episodes).mean(0)
        stats["time/environment_steps"] = state.global_step
        stats["time/steps_per_second"] = self.steps / (now - self.last_iteration)
        self.last_iteration = now
        state.unlogged.append((state.global_step, {name: float(x) for name, x in stats.items()}))
        self.write_logs()

        recent = f"return {stats['last_100_episodes/return']:.2f}" if state.recent else "no episode has ended yet"
        self.bar.set_postfix_str(recent)
        if self.bar.disable:
            left = (now - self.started) / (state.global_step - self.resumed_at) * (self.total - state.global_step)
            speed = f"{stats['time/steps_per_second']:.0f} steps/s, {tqdm.format_interval(left)} left"
            print(f"iteration {iteration}: {state.global_step:,} steps, {speed}, {recent}", flush=True)
        finished = state.global_step >= self.total
        if finished or now - self.last_save >= self.args.checkpoint_seconds:
            if self.save():
                self.last_save = time.time()
            elif finished:
                fail(f"the final checkpoint could not be written; make room and --resume {self.folder}", code=1)

    def write_logs(self):
        """Write to TensorBoard what is unlogged; if that fails (disk full), keep it for the next time."""
        unlogged = self.state.unlogged
        try:
            # purge_step: what a killed run logged after its last checkpoint is replaced, not doubled
            self.writer = self.writer or SummaryWriter(self.folder, purge_step=unlogged[0][0])
            for step, stats in unlogged:
                for name, value in stats.items():
                    self.writer.add_scalar(name, value, step)
            self.writer.flush()
            unlogged.clear()
        except OSError as error:
            self.writer = None
            tqdm.write(f"warning: TensorBoard log not written ({error}), trying again next iteration")

    def save(self):
        """Replace the checkpoint, in one instant. Returns whether it worked; if not (disk full), the old one stays."""
        saved = {"script": SCRIPT, "format": CHECKPOINT_FORMAT, "args": vars(self.args), "rng": torch.get_rng_state()}
        states = self.envs.callmethod("get_state")
        saved["procgen"] = [torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in states]
        temporary = self.folder / "checkpoint.pt.tmp"
        try:
            for name, x in vars(self.state).items():
                saved[name] = x.state_dict() if hasattr(x, "state_dict") else x
            with open(temporary, "wb") as file:
                torch.save(saved, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / "checkpoint.pt")
            return True
        except (OSError, RuntimeError) as error:
            tqdm.write(f"warning: checkpoint not written ({str(error).splitlines()[0]}), trying again next iteration")
            return False
        finally:
            temporary.unlink(missing_ok=True)


def load_checkpoint(folder):
    """Read a checkpoint; with weights_only, opening somebody else's never runs their code."""
    try:
        with zipfile.ZipFile(folder / "checkpoint.pt") as archive:
            if archive.testzip():  # compares the checksums, which torch.load does not
                raise ValueError("wrong checksum")
        saved = torch.load(folder / "checkpoint.pt", weights_only=True, map_location="cpu")
        origin = f"{saved['script']}.py, format {saved['format']}"
    except FileNotFoundError:
        fail(f"--resume {folder}: there is no checkpoint.pt")
    except Exception as error:
        fail(f"--resume {folder}: checkpoint.pt is damaged, or none of ours ({type(error).__name__})")
    if origin != f"{SCRIPT}.py, format {CHECKPOINT_FORMAT}":
        fail(f"--resume {folder}: was written by {origin}; this is {SCRIPT}.py, format {CHECKPOINT_FORMAT}")
    return saved


def announce(args, adjusted, agent, device, microbatch_size, num_iterations):
    """Print what will be done."""
    iteration_size, parameters = args.num_envs * args.num_steps, sum(p.numel() for p in agent.parameters())
    levels = 1 if args.distribution_mode == "exploration" else args.num_levels or "all"
    steps = num_iterations * iteration_size
    print(f"{SCRIPT}.py on {args.env_id}, {args.distribution_mode}, {levels} levels, seed {args.seed}")
    print(f"run        {num_iterations:,} iterations, {steps:,} steps; results in {args.run_dir}")
    print(f"device     {device}, {torch.get_num_threads()} CPU threads; {parameters:,} parameters")
    print(f"minibatch  {iteration_size // args.num_minibatches:,} steps, at most {microbatch_size:,} in one pass")
    print(f"iteration  {iteration_size:,} steps: {args.num_envs} environments x {args.num_steps}")
    print(f"adjusted to the batch size, c = {args.reference_num_envs}/{args.num_envs}:")
    for name, row in {"NAME": ("WHAT", "STATED", "IN USE", "RULE"), **adjusted}.items():
        what, stated, used, rule = (x if isinstance(x, str) else f"{x:.6g}" for x in row)
        print(f"  {name:<12} {what:<42} {stated:>8} {used:>10}  {rule}")
    if args.num_envs == args.reference_num_envs:
        return
    if args.epochs > 1:
        print(f"  but {args.epochs} epochs: the paper claims invariance for one policy epoch only (section 4)")
    if "prox" not in adjusted:
        print("  but no EWMA: the paper claims invariance for PPO-EWMA and PPG-EWMA (section 4)")
    if args.adv_norm == "minibatch":
        print("  but --adv-norm minibatch: its statistics depend on the batch size, and nothing makes up for that")
    if args.num_envs > args.reference_num_envs:
        print("  but a larger batch: the paper claims invariance for small enough ones only (section 4)")


def main():
    args, saved = parse_args()
    adjusted = adjust_for_batch_size(args)
    use = {name: used for name, (_, _, used, _) in adjusted.items()}
    num_iterations = math.ceil(args.total_timesteps / (args.num_envs * args.num_steps))
    if saved and saved["iteration"] >= num_iterations:
        print(f"{args.run_dir} is finished, at {saved['global_step']:,} steps; --total-timesteps can extend it")
        return
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    microbatch_size = args.microbatch_size or (2048 if device.type == "cuda" else 64)

    torch.manual_seed(args.seed)
    agent = Agent(args.channels).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(agent.parameters(), lr=use["lr"], betas=(use["beta1"], use["beta2"]), eps=1e-8)
    options = {"distribution_mode": args.distribution_mode, "rand_seed": args.seed}
    if args.distribution_mode != "exploration":  # which is one fixed level
        options |= {"num_levels": args.num_levels, "start_level": args.start_level}
    envs = ProcgenGym3Env(args.num_envs, args.env_id, **options)
    policy = nn.Sequential(agent.trunk, agent.policy_head)  # EWMA: the agent's own weights; their average is pi_prox
    decay = use["prox"] / (use["prox"] + 1)
    state = SimpleNamespace(  # all that changes from one iteration to the next: what a checkpoint holds
        iteration=0,
        global_step=0,
        agent=agent,
        optimizer=optimizer,
        discounted=torch.zeros(args.num_envs),
        reward_moments=torch.tensor([1e-4, 0, 1], dtype=torch.float64),
        advantage_moments=torch.zeros(3, dtype=torch.float64),
        episodes=torch.zeros(2, args.num_envs),  # return and length up to now of the episodes under way
        recent=[],  # return and length of the last 100 that ended
        unlogged=[],
        prox=copy.deepcopy(policy),  # EWMA
        prox_weights=(1.0, 0.0),  # the total weight and the mean age of what was averaged
    )
    run = Run(args, saved, state, envs)
    announce(args, adjusted, agent, device, microbatch_size, num_iterations)
    bar = run.start(num_iterations)

    for iteration in range(state.iteration + 1, num_iterations + 1):
        # (1) Collect: the current network plays and so becomes the behaviour policy of this rollout.
        bar.set_description("collect")
        obs = torch.empty(args.num_envs, args.num_steps, 64, 64, 3, dtype=torch.uint8)  # [N, T, ...]
        steps, ended = [], []
        _, frame, first = envs.observe()
        for t in range(args.num_steps):
            frames = torch.from_numpy(frame["rgb"])
            obs[:, t] = frames
            with torch.no_grad():
                logits, value = agent(frames.to(device))
            step = {"first": torch.from_numpy(first), "logprobs": logits.log_softmax(-1).cpu(), "value": value.cpu()}
            step["action"] = torch.multinomial(step["logprobs"].exp(), 1).squeeze(1)
            envs.act(step["action"].numpy())
            reward, frame, first = envs.observe()
            step["reward"] = torch.from_numpy(reward)
            steps.append(step)
            state.episodes += torch.stack([step["reward"], torch.ones(args.num_envs)])
            ended += state.episodes[:, first].T.tolist()
            state.episodes[:, first] = 0
            bar.update(args.num_envs)
        rollout = {name: torch.stack([step[name] for step in steps], dim=1) for name in steps[0]}  # [N, T, ...]
        rollout |= {"obs": obs, "next_obs": torch.from_numpy(frame["rgb"]), "next_first": torch.from_numpy(first)}
        stats = {}

        # (2) Prepare: normalise rewards, estimate advantages and value targets, normalise advantages.
        reward = rollout["reward"]
        if args.reward_norm:
            normalised = normalise_rewards(reward, rollout["first"], state.discounted, state.reward_moments)
            reward, state.discounted, state.reward_moments = normalised
        with torch.no_grad():
            next_value = agent(rollout["next_obs"].to(device))[1].cpu()
        value = torch.cat([rollout["value"], next_value.unsqueeze(1)], dim=1)
        first = torch.cat([rollout["first"], rollout["next_first"].unsqueeze(1)], dim=1)
        advantage = gae(reward, value, first, args.gamma, args.gae_lambda)
        value_target = advantage + rollout["value"]
        stats["value/explained_variance"] = 1 - advantage.var() / value_target.var()
        stats |= {"advantage/mean": advantage.mean(), "advantage/std": advantage.std(correction=0)}
        if args.adv_norm == "iteration":
            state.advantage_moments, mean, std = update_moments(state.advantage_moments, advantage, use["adv-norm"])
            advantage = (advantage - mean) / (std + 1e-8)
            stats |= {"advantage/mean_used": mean, "advantage/std_used": std}

        # (3) Optimise: epochs over the data in minibatches, each an optimiser step.
        batch = {name: rollout[name].flatten(0, 1) for name in ("obs", "action", "logprobs", "value")}  # [N * T, ...]
        batch |= {"value_target": value_target.flatten(), "advantage": advantage.flatten()}
        batch = {name: x.to(device) for name, x in batch.items()}  # once, so that no minibatch waits for a copy
        raw_advantage = batch["advantage"].clone()
        losses = []
        for epoch in range(args.epochs):
            bar.set_description(f"optimise, epoch {epoch + 1}")
            for minibatch in minibatches(args.num_envs, args.num_steps, args.num_minibatches).to(device):
                if args.adv_norm == "minibatch":  # of the advantages as they were, in each epoch anew
                    chosen = raw_advantage[minibatch]
                    batch["advantage"][minibatch] = (chosen - chosen.mean()) / (chosen.std(correction=0) + 1e-8)
                optimizer.zero_grad()
                means = 0
                for micro in minibatch.split(microbatch_size):
                    mb = {name: x[micro] for name, x in batch.items()}
                    logits, value = agent(mb["obs"])
                    with torch.no_grad():  # EWMA
                        logprobs_prox = state.prox(mb["obs"]).log_softmax(-1)
                    logprobs, logprobs_behav = logits.log_softmax(-1), mb["logprobs"]
                    logp, logp_behav = logp_of(logprobs, mb["action"]), logp_of(logprobs_behav, mb["action"])
                    logp_prox = logp_of(logprobs_prox, mb["action"])  # EWMA: the decoupled objectives of section 2
                    corrected = (logp_prox - logp_behav).exp() * mb["advantage"]
                    pg_loss, clip_fraction = policy_loss(logp, logp_prox, corrected, args.clip_coef)
                    kl = categorical_kl(logprobs_prox, logprobs)
                    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
                    v_loss = value_loss(value, mb["value"], mb["value_target"], args.clip_vloss * args.clip_coef)
                    loss = pg_loss + args.kl_coef * kl - args.ent_coef * entropy
                    loss = loss + args.vf_coef * v_loss
                    share = len(micro) / len(minibatch)  # the pieces' gradients add up to the minibatch's
                    (share * loss).backward()
                    means += share * torch.stack([pg_loss, v_loss, entropy, kl, clip_fraction]).detach()  # named in (4)
                optimizer.step()
                state.prox_weights = update_ewma(state.prox, policy, *state.prox_weights, decay)  # EWMA
                stats |= {"prox/com": state.prox_weights[1], "prox/kl": means[3]}  # of the iteration's last step
                losses.append(means)
            if args.target_kl is not None and losses[-1][3] > args.target_kl:
                break

        # (4) Log, and checkpoint if it is time.
        names = ["loss/policy", "loss/value", "loss/entropy", "policy/approx_kl", "policy/clip_fraction"]
        stats |= zip(names, torch.stack(losses).mean(0), strict=True)
        run.end_iteration(iteration, stats, ended)
    bar.close()
    print(f"finished: {args.run_dir}/checkpoint.pt")


if __name__ == "__main__":
    main()
