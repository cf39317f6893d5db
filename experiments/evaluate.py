"""Play a run's agent on levels it has never seen, and on those it was trained on; report how well it does, and film it.

python experiments/evaluate.py RUN_DIR
python experiments/evaluate.py RUN_DIR --random --video play.mp4

Takes the checkpoint of any of the five scripts, also while the run is still training. The policy is the network that
collects data in training, sampled unless --greedy. What is reported, each as a mean over episodes with a 95% interval,
by bootstrap (for shares: Wilson's, as none or all of a few episodes would leave a bootstrap without width):
  return             sum of the rewards of an episode
  normalised return  (return - min) / (max - min), with Procgen's constants for the game (procgen_return_range.csv)
  episode length     in steps; Procgen ends an episode after 1,000
  levels solved      share of episodes that end with the level complete, in Procgen's own sense: coinrun's coin
                     reached, bossfight's boss beaten, starpilot's finish passed
  generalisation gap return on training levels minus return on unseen ones

Counting the first episodes to end among parallel environments would favour short ones. Here every environment plays a
number of episodes that is fixed beforehand. Levels are drawn at random, so a small set's come up several times; a level
is the same each time, and --greedy then repeats itself on it, which the intervals do not know.
"""

import argparse
import contextlib
import csv
import importlib.util
import itertools
import json
import math
import os
import sys
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent

try:
    import imageio.v3 as iio
    import numpy as np
    import torch
    from PIL import Image, ImageDraw, ImageFont
    from procgen import ProcgenGym3Env
    from procgen.env import ENV_NAMES, EXPLORATION_LEVEL_SEEDS
    from scipy.stats import binomtest, bootstrap
    from tqdm import tqdm
except ImportError as error:
    print(
        f"evaluate.py: error: {error}; pip install -r requirements.txt -r experiments/requirements.txt", file=sys.stderr
    )
    sys.exit(2)

SCRIPTS = ["ppo", "ppo_ewma", "ppg", "ppg_ewma", "staleness"]
ALL_LEVELS = 2**31 - 1  # Procgen's levels are numbered from 0 up to this
STEPS_PER_SECOND = 15  # at which Procgen's games are meant to be watched


def fail(message, code=2):
    print(f"evaluate.py: error: {message}", file=sys.stderr)
    sys.exit(code)


def number(kind, low, high):
    """An argparse type: an int or a float within bounds."""

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}: must be a {'whole ' * (kind is int)}number from {low} to {high}")
        return value

    return parse


def parse_args():
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description=__doc__,
        usage="python experiments/evaluate.py RUN_DIR [options]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = fail  # one line, without the usage
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of a run, or a checkpoint file")
    parser.add_argument("--episodes", type=number(int, 1, 10**6), default=100, help="on each set of levels (100)")
    parser.add_argument("--num-envs", type=number(int, 1, 4096), default=20, help="environments in parallel (20)")
    parser.add_argument("--seed", type=number(int, 0, ALL_LEVELS), default=1, help="of levels, actions, bootstrap (1)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA if there is one")
    parser.add_argument("--greedy", action="store_true", help="take the likeliest action instead of sampling")
    parser.add_argument(
        "--random", action="store_true", help="play the uniformly random policy, too, on the same levels"
    )
    parser.add_argument("--json", metavar="FILE", help="write all numbers, and every episode's, to this file")
    add = parser.add_argument_group("video").add_argument
    add("--video", metavar="FILE", help="film the first episodes side by side: .mp4, or .gif for a small clip")
    add("--video-episodes", type=number(int, 1, 8), default=3, metavar="N", help="how many side by side (3)")
    add("--video-levels", choices=["unseen", "training"], default="unseen", help="which levels to film (unseen)")
    add("--video-scale", type=number(float, 0.25, 1), metavar="X", help="1: pictures of 512x512 (1, .gif: 0.375)")
    add("--video-fps", type=number(int, 1, 15), metavar="N", help="pictures a second; no change of pace (15, .gif: 5)")
    add("--video-seconds", type=number(float, 0.1, 3600), metavar="X", help="at most (3600, .gif: 8)")
    args = parser.parse_args()

    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: PyTorch finds no CUDA device; use cpu or auto")
    if args.video:
        kind = Path(args.video).suffix.lower()
        if kind not in (".mp4", ".gif"):
            fail(f"--video {args.video}: the name must end in .mp4 or .gif")
        for name, mp4, gif in [("scale", 1, 0.375), ("fps", 15, 5), ("seconds", 3600, 8)]:
            if getattr(args, f"video_{name}") is None:
                setattr(args, f"video_{name}", gif if kind == ".gif" else mp4)
    elif given := [x.split("=")[0] for x in sys.argv[1:] if x.startswith("--video-")]:
        fail(f"{given[0]}: needs --video FILE")
    for flag, file in [("--video", args.video), ("--json", args.json)]:
        if file:
            check_writable(flag, Path(file))  # rather than after an hour of playing
    return args


def check_writable(flag, path):
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        temporary = temporary_name(path)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        fail(f"{flag} {path}: cannot be written ({error.strerror})")


def temporary_name(path):
    return path.with_name(f".unfinished-{os.getpid()}-{path.name}")


@contextlib.contextmanager
def written(flag, path):
    """A temporary name to write to, which becomes path once complete: an interruption spoils no older file."""
    temporary = temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        fail(f"{flag} {path}: cannot be written ({error.strerror or error})", code=1)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def load_run(run_dir, device):
    """The agent, its script, the flags and steps of its training. weights_only: a checkpoint's code is never run."""
    path = Path(run_dir) if Path(run_dir).is_file() else Path(run_dir) / "checkpoint.pt"
    if not path.exists():
        fail(f"{run_dir}: " + ("there is no checkpoint.pt" if Path(run_dir).is_dir() else "there is no such folder"))
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():  # compares the checksums, which torch.load does not
                raise ValueError("wrong checksum")
        # mmap: checkpoints of staleness.py and of PPG hold a lot that is of no use here.
        saved = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        script, version, args = saved["script"], saved["format"], SimpleNamespace(**saved["args"])
        global_step = int(saved["global_step"])
        if not isinstance(script, str) or not isinstance(version, int):
            raise ValueError("no names of script and format")
    except Exception as error:
        fail(f"{path}: is damaged, or no checkpoint of ours ({type(error).__name__})")
    if script not in SCRIPTS:
        fail(f"{path}: was written by {script!r:.40}, which is none of {', '.join(SCRIPTS)}")
    spec = importlib.util.spec_from_file_location(script, ROOT / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if version != module.CHECKPOINT_FORMAT:
        fail(f"{path}: has format {version!r:.40}; this {script}.py writes format {module.CHECKPOINT_FORMAT}")
    try:
        # Procgen would abort the whole process over a wrong game or mode.
        if args.env_id not in ENV_NAMES or args.env_id not in module.MODES[args.distribution_mode]:
            raise ValueError("no such game")
        if not all(type(x) is int and 0 <= x <= ALL_LEVELS for x in (args.num_levels, args.start_level, args.seed)):
            raise ValueError("no such levels")
        with torch.device("meta"):  # shapes without memory: a wrong --channels cannot fill it
            agent = module.Agent(args.channels, *([args.arch] if script.startswith("ppg") else []))
        agent.load_state_dict({name: x.float().clone() for name, x in saved["agent"].items()}, assign=True)
    except Exception as error:
        fail(f"{path}: its flags or weights do not fit {script}.py ({type(error).__name__})")
    return agent.to(device, memory_format=torch.channels_last), script, args, global_step


def level_sets(train):
    """What to play: {name: Procgen's options}. Unseen levels, and those of training if they were a limited set."""
    mode, start, count = train.distribution_mode, train.start_level, train.num_levels
    if mode == "exploration":  # Procgen's name for one hard level of its choice
        mode, start, count = "hard", EXPLORATION_LEVEL_SEEDS[train.env_id], 1
    after = ALL_LEVELS - (start + count)
    if count == 0 or max(start, after) <= 0:
        return {"all": {"distribution_mode": mode, "start_level": 0, "num_levels": 0}}
    unseen = (0, start) if start > after else (start + count, after)  # the larger of the two sides
    ranges = {"unseen": unseen, "training": (start, count)}
    return {x: {"distribution_mode": mode, "start_level": s, "num_levels": n} for x, (s, n) in ranges.items()}


def make_envs(train, options, num, seed, **more):
    # Procgen draws an environment's levels from this seed, whatever is played: all policies get the same ones. Were it
    # the seed of training on all levels, they would be just those that training began with.
    rand_seed = ALL_LEVELS - seed
    if rand_seed == train.seed:
        rand_seed = seed  # never equal: ALL_LEVELS is odd
    return ProcgenGym3Env(num, train.env_id, rand_seed=rand_seed, **options, **more)


def agent_policy(agent, device):
    """A policy maps frames [B, 64, 64, 3] to probabilities [B, 15]."""

    def policy(frames):
        with torch.no_grad():  # without the value function, which in PPG has a network of its own
            pieces = [agent.policy_head(agent.trunk(x.to(device))) for x in torch.from_numpy(frames).split(256)]
        probabilities = torch.cat(pieces).double().softmax(-1).cpu().numpy()
        if not np.isfinite(probabilities).all():
            fail("the network's outputs are not finite: the run diverged", code=1)
        return probabilities

    return policy


def random_policy(frames):
    return np.full((len(frames), 15), 1 / 15)


def play(policy, envs, quota, seed, greedy=False, render=False):
    """Play quota[i] episodes in environment i. A generator of steps: what was done, and {i: episode} that it ended."""
    # Each environment has random numbers of its own: filming some of them again gives the same episodes.
    generators = [np.random.default_rng([seed, i]) for i in range(envs.num)]
    returns, lengths = np.zeros(envs.num), np.zeros(envs.num, dtype=int)
    left = np.array(quota)
    _, frames, _ = envs.observe()
    while left.any():
        active = np.flatnonzero(left)
        probabilities, action = np.zeros((envs.num, 15)), np.zeros(envs.num, dtype=int)
        probabilities[active] = policy(frames["rgb"][active])
        for i in active:
            if greedy:
                action[i] = probabilities[i].argmax()
            else:
                action[i] = min(np.searchsorted(probabilities[i].cumsum(), generators[i].random(), "right"), 14)
        step = SimpleNamespace(active=active, probabilities=probabilities, action=action, ended={})
        if render:
            step.info, step.returns, step.lengths = envs.get_info(), returns.copy(), lengths.copy()
        envs.act(action)
        reward, frames, first = envs.observe()
        returns, lengths = returns + reward, lengths + 1
        if first.any():
            info = envs.get_info()
            for i in np.flatnonzero(first):
                if left[i]:
                    solved, level = bool(info[i]["prev_level_complete"]), int(info[i]["prev_level_seed"])
                    score, length = round(float(returns[i]), 4), int(lengths[i])  # float32 sums of such as 0.04
                    step.ended[i] = {"level": level, "return": score, "length": length, "solved": solved, "env": int(i)}
                    left[i] -= 1
                returns[i], lengths[i] = 0, 0
        yield step


def spread(episodes, num_envs):
    """How many episodes each environment plays."""
    num_envs = min(episodes, num_envs)
    return [episodes // num_envs + (i < episodes % num_envs) for i in range(num_envs)]


def interval(seed, *samples):
    """The mean of a sample, or the difference of two samples' means, with a 95% bootstrap interval."""
    samples = [np.asarray(x, dtype=float) for x in samples]

    def statistic(x, y=None, axis=-1):
        return x.mean(axis) if y is None else x.mean(axis) - y.mean(axis)

    low = high = value = float(statistic(*samples))
    if min(map(len, samples)) < 2:
        low = high = None  # nothing to resample
    elif any(np.ptp(x) > 0 for x in samples):  # if all are equal, the interval is a point
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"vectorized": True, "axis": -1, "batch": 100}
            for method in ("BCa", "percentile"):  # the first fails for some degenerate samples
                result = bootstrap(samples, statistic, method=method, rng=np.random.default_rng(seed), **options)
                low, high = map(float, result.confidence_interval)
                if math.isfinite(low) and math.isfinite(high):
                    break
    return {"mean": value, "low": low, "high": high}


def rescale(result, low, high):
    return {name: None if x is None else (x - low) / (high - low) for name, x in result.items()}


def return_range(train):
    """Procgen's constants for the game, which exist for two of the modes only: (min, max), or None."""
    if train.distribution_mode not in ("easy", "hard"):
        return None
    with open(Path(__file__).parent / "procgen_return_range.csv", newline="") as file:
        table = csv.DictReader(line for line in file if not line.startswith("#"))
        row = next(row for row in table if row["game"] == train.env_id)
    return tuple(float(row[f"{train.distribution_mode}_{end}"]) for end in ("min", "max"))


def summarise(episodes, constants, seed):
    summary = {x: interval(seed, [e[x] for e in episodes]) for x in ("return", "length")}
    share = binomtest(sum(e["solved"] for e in episodes), len(episodes))
    low, high = share.proportion_ci(method="wilson")
    summary["solved"] = {"mean": share.statistic, "low": low, "high": high}
    summary["normalised"] = rescale(summary["return"], *constants) if constants else None
    return summary | {"episodes": episodes}


def evaluate(policies, train, sets, args):
    """{(policy, set): summary}, with one bar for all that is played."""
    constants, results = return_range(train), {}
    quota = spread(args.episodes, args.num_envs)
    total = args.episodes * len(policies) * len(sets)
    with tqdm(total=total, unit=" episodes", dynamic_ncols=True, disable=None) as bar:
        for (policy, decide), (levels, options) in itertools.product(policies.items(), sets.items()):
            bar.set_description(f"{policy}, {levels} levels")
            envs, episodes = make_envs(train, options, len(quota), args.seed), []
            for step in play(decide, envs, quota, args.seed, args.greedy and policy != "random"):
                episodes += step.ended.values()
                bar.update(len(step.ended))
            envs.close()
            episodes.sort(key=lambda e: e["env"])
            results[policy, levels] = summarise(episodes, constants, args.seed)
    return results


def gaps(results, constants, seed):
    """{policy: generalisation gap}, where there are training levels to compare with."""
    found = {}
    for policy in {policy: 0 for policy, levels in results if levels == "training"}:
        samples = [[e["return"] for e in results[policy, x]["episodes"]] for x in ("training", "unseen")]
        gap = interval(seed, *samples)
        span = constants and constants[1] - constants[0]
        found[policy] = {"return": gap, "normalised": rescale(gap, 0, span) if constants else None}
    return found


def text(result, digits, scale=1):
    if result is None:
        return "-"
    mean, low, high = (None if x is None else f"{x * scale:.{digits}f}" for x in result.values())
    return mean if low is None else f"{mean} [{low}, {high}]"


def describe_levels(options):
    start, count = options["start_level"], options["num_levels"]
    return "all" if count == 0 else f"{start}" if count == 1 else f"{start} to {start + count - 1}"


def report(results, found_gaps, sets, args, script, train, global_step):
    print(f"{script}.py on {train.env_id}, {train.distribution_mode}, seed {train.seed}, after {global_step:,} steps")
    how = "the likeliest action" if args.greedy else "actions sampled"
    each = sorted(set(spread(args.episodes, args.num_envs)))
    number_each = " or ".join(map(str, each))
    print(f"{args.episodes} episodes, {number_each} in every environment; {how}; mean [95% interval]")
    if "all" in sets:
        print("The run trains on all levels: these are drawn afresh from the same distribution, and there is no gap.")
    width = 24
    print("\n" + " " * 19 + "".join(f"{f'{policy}, {levels}':>{width}}" for policy, levels in results))
    rows = {"levels": [describe_levels(sets[levels]) for _, levels in results]}
    rows["different ones"] = [str(len({e["level"] for e in x["episodes"]})) for x in results.values()]
    rows["return"] = [text(x["return"], 2) for x in results.values()]
    rows["normalised return"] = [text(x["normalised"], 3) for x in results.values()]
    rows["episode length"] = [text(x["length"], 1) for x in results.values()]
    rows["levels solved (%)"] = [text(x["solved"], 1, scale=100) for x in results.values()]
    for name, cells in rows.items():
        print(f"{name:<19}" + "".join(f"{cell:>{width}}" for cell in cells))
    for policy, gap in found_gaps.items():
        normalised = f"; normalised {text(gap['normalised'], 3)}" if gap["normalised"] else ""
        print(f"generalisation gap, {policy}: {text(gap['return'], 2)}{normalised}")
    if return_range(train) is None:
        print(
            f"no normalised return: Procgen gives constants for easy and hard only, not for {train.distribution_mode}"
        )
    if args.episodes == 1:
        print("no bootstrap intervals: they need at least 2 episodes")


# The video: a panel for every episode, which is Procgen's picture with the return and the action probabilities below.
KEYS = "DAWSQE"  # Procgen's names of actions 9 to 14; the first nine are directions
BACKGROUND, TEXT, FAINT, BAR, CHOSEN = (16, 18, 24), (240, 240, 240), (150, 156, 168), (86, 118, 168), (255, 176, 32)
SOLVED, UNSOLVED = (96, 220, 120), (255, 120, 100)


class Panel:
    """One episode's place in the video."""

    def __init__(self, title, scale):
        self.title, self.size = title, round(512 * scale / 16) * 16  # H.264 works in blocks of 16 pixels
        self.big, self.small = (ImageFont.load_default(max(least, self.size // n)) for least, n in ((13, 20), (9, 30)))
        self.strip = math.ceil((self.big.size + 4 * self.small.size + 0.24 * self.size) / 16) * 16
        self.picture, self.outcome = None, None

    def draw(self, picture, level, score, length, probabilities, action):
        size = self.size
        self.picture = Image.new("RGB", (size, size + self.strip), BACKGROUND)
        game = Image.fromarray(picture)
        self.picture.paste(game if size == 512 else game.resize((size, size), Image.Resampling.LANCZOS))
        pen, pad = ImageDraw.Draw(self.picture), size // 40
        self.caption(pen, level, score, length)
        font, cell = self.small, (size - 2 * pad) / 15
        pen.text((pad, size + 2 * pad + self.big.size + font.size), "action probabilities (%)", FAINT, font)
        bottom = size + self.strip - font.size - pad
        top = size + 2 * pad + self.big.size + 3 * font.size  # room for the captions, and a number on a full bar
        for i, p in enumerate(probabilities):
            middle, colour = pad + (i + 0.5) * cell, CHOSEN if i == action else BAR
            height = (bottom - top) * p
            left, right = middle - 0.38 * cell, middle + 0.38 * cell
            pen.rectangle([left, bottom - max(1, height), right, bottom], fill=colour)
            if p >= 0.005:
                pen.text((middle, bottom - height - size / 200), f"{100 * p:.0f}", TEXT, font, anchor="mb")
            self.label(pen, i, middle, bottom + (font.size + pad) / 2, 0.3 * min(cell, font.size), font)
        self.frame(pen)

    def frame(self, pen):
        """Keeps panels apart where their pictures look alike."""
        pen.rectangle(
            [0, 0, self.size - 1, self.size + self.strip - 1], outline=BACKGROUND, width=max(1, self.size // 128)
        )

    def caption(self, pen, level, score, length):
        size, pad = self.size, self.size // 40
        pen.rectangle([0, size, size, size + pad + self.small.size + self.big.size], fill=BACKGROUND)
        pen.text((pad, size + pad // 2), self.title, FAINT, self.small)
        pen.text((size - pad, size + pad // 2), f"level {level}", FAINT, self.small, anchor="ra")
        y = size + pad + self.small.size
        pen.text((pad, y), f"return {score:.4g}", TEXT, self.big)
        pen.text((size - pad, y), f"step {length}", TEXT, self.big, anchor="ra")

    def label(self, pen, i, x, y, r, font):
        """The action's name: an arrow, a dot for none, or a letter. The fonts at hand have no arrows."""
        if i > 8:
            pen.text((x, y), KEYS[i - 9], FAINT, font, anchor="mm")
            return
        dx, dy = i // 3 - 1, 1 - i % 3  # left to right, then down to up
        if (dx, dy) == (0, 0):
            pen.ellipse([x - 1.5, y - 1.5, x + 1.5, y + 1.5], fill=FAINT)
            return
        norm = r / math.hypot(dx, dy)
        dx, dy = dx * norm, dy * norm
        line = max(1, self.size // 256)
        pen.line([x - dx, y - dy, x + dx, y + dy], FAINT, line)
        for turn in (0.75 * math.pi, -0.75 * math.pi):
            c, s = 0.8 * math.cos(turn), 0.8 * math.sin(turn)
            pen.line([x + dx, y + dy, x + dx + dx * c - dy * s, y + dy + dx * s + dy * c], FAINT, line)

    def end(self, episode):
        """Keep the last picture, with the outcome on it."""
        size, word = self.size, "solved" if episode["solved"] else "not solved"
        game = self.picture.crop((0, 0, size, size)).point(lambda x: int(0.4 * x))
        self.picture.paste(game)
        pen = ImageDraw.Draw(self.picture)
        pen.text((size / 2, size / 2), word, SOLVED if episode["solved"] else UNSOLVED, self.big, anchor="mm")
        self.caption(pen, episode["level"], episode["return"], episode["length"])
        self.frame(pen)


def film(policies, titles, train, options, args):
    """Pictures of the first episodes of the first environments, as evaluated: one row of panels a policy."""
    num, rows = args.video_episodes, []
    for name, decide in policies.items():
        envs = make_envs(train, options, num, args.seed, render_mode="rgb_array")
        steps = play(decide, envs, [1] * num, args.seed, args.greedy and name != "random", render=True)
        rows.append((steps, [Panel(titles[name], args.video_scale) for _ in range(num)]))
    skip = STEPS_PER_SECOND / args.video_fps
    shown = 0
    for t in itertools.count():
        over = True
        for steps, panels in rows:
            step = next(steps, None)
            if step is None:
                continue
            over = False
            for i in step.active:
                if t >= shown * skip or i in step.ended:
                    info = step.info[i]
                    state = int(info["level_seed"]), step.returns[i], int(step.lengths[i])
                    panels[i].draw(info["rgb"], *state, step.probabilities[i], step.action[i])
                if i in step.ended:
                    panels[i].end(step.ended[i])
        if over or t >= args.video_seconds * STEPS_PER_SECOND:
            break
        if t >= shown * skip:
            shown += 1
            yield join(panels for _, panels in rows)
    for _ in range(args.video_fps):  # a second to read the outcome
        yield join(panels for _, panels in rows)


def join(rows):
    rows = [np.concatenate([np.asarray(x.picture) for x in panels], axis=1) for panels in rows]
    return np.concatenate(rows)


def save_video(frames, path, fps):
    frames = tqdm(frames, desc="video", unit=" pictures", dynamic_ncols=True, disable=None)
    with written("--video", path) as temporary:
        if path.suffix.lower() == ".mp4":
            with iio.imopen(temporary, "w", plugin="pyav", extension=".mp4") as file:
                file.init_video_stream("libx264", fps=fps)
                for frame in frames:
                    file.write_frame(frame)
        else:
            save_gif(frames, temporary, fps)


def save_gif(frames, path, fps):
    # One palette for all and no dithering: what does not change costs next to nothing.
    beginning = list(itertools.islice(frames, 60))
    some = Image.fromarray(np.concatenate(beginning[:: max(1, len(beginning) // 8)])).quantize(
        57, Image.Quantize.FASTOCTREE
    )
    palette, fixed = Image.new("P", (1, 1)), [BACKGROUND, TEXT, FAINT, BAR, CHOSEN, SOLVED, UNSOLVED]
    palette.putpalette(some.getpalette()[: 3 * 57] + list(itertools.chain(*fixed)))
    frames = (Image.fromarray(frame) for frame in itertools.chain(beginning, frames))
    first, *rest = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
    first.save(path, "GIF", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)


def main():
    args = parse_args()
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    agent, script, train, global_step = load_run(args.run_dir, device)
    sets = level_sets(train)
    if args.video_levels == "training" and "training" not in sets:
        fail("--video-levels training: the run trains on all levels, there are no others to tell them from")
    policies = {"agent": agent_policy(agent, device)} | ({"random": random_policy} if args.random else {})
    results = evaluate(policies, train, sets, args)
    found_gaps = gaps(results, return_range(train), args.seed)
    report(results, found_gaps, sets, args, script, train, global_step)
    if args.json:
        run = {"run": str(args.run_dir), "script": script, "global_step": global_step, "levels": sets}
        run |= {"args": vars(args), "training_args": vars(train), "generalisation_gap": found_gaps}
        run["results"] = [{"policy": p, "levels": x, **summary} for (p, x), summary in results.items()]
        with written("--json", Path(args.json)) as temporary:
            temporary.write_text(json.dumps(run, indent=1, default=str) + "\n")
    if args.video:
        titles = {"agent": f"{script}.py, {global_step:,} steps", "random": "random policy"}
        options = sets.get(args.video_levels) or sets["all"]
        path = Path(args.video)
        save_video(film(policies, titles, train, options, args), path, args.video_fps)
        print(f"video: {path}, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
