"""Play a run's agent on levels it has never seen, and on those it was trained on; report how well it does, and film it.

python experiments/evaluate.py RUN_DIR
python experiments/evaluate.py RUN_DIR --random --video play.mp4

Takes the checkpoint of any of the five scripts, also while the run is still training. The policy is the network that
collects data in training, sampled unless --greedy. What is reported, each as a mean over episodes with a 95% interval,
by bootstrap (for shares: Wilson's, as none or all of a few episodes would leave a bootstrap without width):
  return             sum of the rewards of an episode
  normalised return  (return - min) / (max - min), with Procgen's constants for the game
  episode length     in steps; Procgen ends an episode after 1,000
  levels solved      share of episodes that end with the level complete, in Procgen's own sense: coinrun's coin
                     reached, bossfight's boss beaten, starpilot's finish passed
  generalisation gap return on training levels minus return on unseen ones

Counting the first episodes to end among parallel environments would favour short ones. Here every environment plays a
number of episodes that is fixed beforehand. Levels are drawn at random, so a small set's come up several times; a level
is the same each time, and --greedy then repeats itself on it, which the intervals do not know.
"""

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from lab.common import Parser, check_writable, fail, load_script, number, read_checkpoint, written  # checks packages

# isort: split
import numpy as np
import pandas as pd
import torch
from procgen import ProcgenGym3Env
from scipy.stats import binomtest
from tqdm import tqdm

from lab.catalogue import RANGES, return_range
from lab.inference import bootstrap_interval, mean_difference
from lab.video import Panel, film, save_video

ALL_LEVELS = 2**31 - 1  # Procgen's levels are numbered from 0 up to this
STEPS_PER_SECOND = 15  # at which Procgen's games are meant to be watched
VIDEO = {".mp4": (1, 1, 3600), ".gif": (0.375, 3, 8)}  # scale (1: 512 x 512), every how many steps, seconds at most


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="folder of a run, or a checkpoint file")
    add("--episodes", type=number(int, 1, 10**6), default=100, help="on each set of levels (100)")
    add("--num-envs", type=number(int, 1, 4096), default=20, help="environments in parallel (20)")
    add("--seed", type=number(int, 0, ALL_LEVELS), default=1, help="of levels, actions, bootstrap (1)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA if there is one")
    add("--greedy", action="store_true", help="take the likeliest action instead of sampling")
    add("--random", action="store_true", help="play the uniformly random policy, too, on the same levels")
    add("--json", metavar="FILE", type=Path, help="write all numbers, and every episode's, to this file")
    add = parser.add_argument_group("video").add_argument
    add("--video", metavar="FILE", type=Path, help="film the first episodes side by side: .mp4, or .gif, a small clip")
    add("--video-episodes", type=number(int, 1, 8), default=3, metavar="N", help="how many side by side (3)")
    add("--video-levels", choices=["unseen", "training"], default="unseen", help="which levels to film (unseen)")
    add("--video-seconds", type=number(float, 0.1, 3600), metavar="X", help="at most (3600, .gif: 8)")
    args = parser.parse_args()

    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: PyTorch finds no CUDA device; use cpu or auto")
    if args.video and args.video.suffix.lower() not in VIDEO:
        fail(f"--video {args.video}: the name must end in .mp4 or .gif")
    if not args.video and (given := [x.split("=")[0] for x in sys.argv[1:] if x.startswith("--video-")]):
        fail(f"{given[0]}: needs --video FILE")
    for flag, file in [("--video", args.video), ("--json", args.json)]:
        if file:
            check_writable(flag, file)
    return args


def load_run(run_dir, device):
    """The agent, its script, the flags and steps of its training."""
    saved = read_checkpoint(run_dir)
    script, args, module = saved["script"], SimpleNamespace(**saved["args"]), load_script(saved["script"])
    if saved["format"] != module.CHECKPOINT_FORMAT:
        fail(f"{run_dir}: has format {saved['format']}; this {script}.py writes format {module.CHECKPOINT_FORMAT}")
    try:
        # Procgen would abort the whole process over a wrong game or mode.
        if args.env_id not in RANGES or args.distribution_mode not in ("easy", "hard"):
            raise ValueError("no such game")
        if not all(type(x) is int and 0 <= x <= ALL_LEVELS for x in (args.num_levels, args.start_level, args.seed)):
            raise ValueError("no such levels")
        module.Impala.bf16 = args.bf16
        with torch.device("meta"):  # shapes without memory: a wrong --channels cannot fill it
            agent = module.Agent(args.channels, *([args.arch] if script.startswith("ppg") else []))
        agent.load_state_dict({name: x.float().clone() for name, x in saved["agent"].items()}, assign=True)
    except Exception as error:
        fail(f"{run_dir}: its flags or weights do not fit {script}.py ({type(error).__name__})")
    return agent.to(device, memory_format=torch.channels_last), script, args, saved["global_step"]


def level_sets(train):
    """What to play: {name: Procgen's options}. Unseen levels, and those of training if they were a limited set."""
    start, count = train.start_level, train.num_levels
    after = ALL_LEVELS - (start + count)
    ranges = {"unseen": (0, start) if start > after else (start + count, after), "training": (start, count)}
    if count == 0 or max(start, after) <= 0:
        ranges = {"all": (0, 0)}
    mode = {"distribution_mode": train.distribution_mode}
    return {name: mode | {"start_level": low, "num_levels": number} for name, (low, number) in ranges.items()}


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
        with torch.no_grad():
            logits = torch.cat([agent(x.to(device))[0] for x in torch.from_numpy(frames).split(256)])
        probabilities = logits.double().softmax(-1).cpu().numpy()
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
    return np.bincount(np.arange(episodes) % num_envs).tolist()


def interval(seed, first, second=(0, 0)):
    """The mean of a sample, or the difference of two samples' means, with a 95% bootstrap interval."""
    samples = [np.asarray(x, dtype=float) for x in (first, second)]
    low, high = bootstrap_interval(samples, mean_difference, seed=seed) or (None, None)
    return {"mean": float(mean_difference(*samples)), "low": low, "high": high}


def rescale(result, low, high):
    return {name: None if x is None else (x - low) / (high - low) for name, x in result.items()}


def summarise(episodes, constants, seed):
    summary = {x: interval(seed, [e[x] for e in episodes]) for x in ("return", "length")}
    share = binomtest(sum(e["solved"] for e in episodes), len(episodes))
    low, high = share.proportion_ci(method="wilson")
    summary["solved"] = {"mean": share.statistic, "low": low, "high": high}
    return summary | {"normalised": rescale(summary["return"], *constants), "episodes": episodes}


def evaluate(policies, train, sets, args):
    """{(policy, set): summary}, with one bar for all that is played."""
    constants, results = return_range(train.env_id, train.distribution_mode), {}
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
        found[policy] = {"return": gap, "normalised": rescale(gap, 0, constants[1] - constants[0])}
    return found


def text(result, digits, scale=1):
    mean, low, high = (None if x is None else f"{x * scale:.{digits}f}" for x in result.values())
    return mean if low is None else f"{mean} [{low}, {high}]"


def cells(options, result):
    """A column of what is printed: one policy on one set of levels."""
    start, count = options["start_level"], options["num_levels"]
    return {
        "levels": "all" if count == 0 else f"{start}" if count == 1 else f"{start} to {start + count - 1}",
        "different ones": len({e["level"] for e in result["episodes"]}),
        "return": text(result["return"], 2),
        "normalised return": text(result["normalised"], 3),
        "episode length": text(result["length"], 1),
        "levels solved (%)": text(result["solved"], 1, scale=100),
    }


def print_results(results, found_gaps, sets, args, script, train, global_step):
    print(f"{script}.py on {train.env_id}, {train.distribution_mode}, seed {train.seed}, after {global_step:,} steps")
    how = "the likeliest action" if args.greedy else "actions sampled"
    each = " or ".join(map(str, sorted(set(spread(args.episodes, args.num_envs)))))
    print(f"{args.episodes} episodes, {each} in every environment; {how}; mean [95% interval]")
    if "all" in sets:
        print("The run trains on all levels: these are drawn afresh from the same distribution, and there is no gap.")
    table = {f"{policy}, {levels}": cells(sets[levels], x) for (policy, levels), x in results.items()}
    print("\n" + pd.DataFrame(table).to_string())
    for policy, gap in found_gaps.items():
        print(f"generalisation gap, {policy}: {text(gap['return'], 2)}; normalised {text(gap['normalised'], 3)}")
    if args.episodes == 1:
        print("no bootstrap intervals: they need at least 2 episodes")


def film_episodes(policies, titles, train, options, args):
    """The first episodes of the first environments, as evaluated: a row of panels for each policy."""
    num, rows, (scale, every, seconds) = args.video_episodes, [], VIDEO[args.video.suffix.lower()]
    for name, decide in policies.items():
        envs = make_envs(train, options, num, args.seed, render_mode="rgb_array")
        steps = play(decide, envs, [1] * num, args.seed, args.greedy and name != "random", render=True)
        rows.append((steps, [Panel(titles[name], scale) for _ in range(num)]))
    frames = film(rows, every, round((args.video_seconds or seconds) * STEPS_PER_SECOND))
    save_video(frames, args.video, STEPS_PER_SECOND / every)
    print(f"video: {args.video}, {args.video.stat().st_size / 1e6:.2f} MB")


def main():
    args = parse_args()
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    agent, script, train, global_step = load_run(args.run_dir, device)
    sets = level_sets(train)
    if args.video_levels == "training" and "training" not in sets:
        fail("--video-levels training: the run trains on all levels, there are no others to tell them from")
    policies = {"agent": agent_policy(agent, device)} | ({"random": random_policy} if args.random else {})
    results = evaluate(policies, train, sets, args)
    found_gaps = gaps(results, return_range(train.env_id, train.distribution_mode), args.seed)
    print_results(results, found_gaps, sets, args, script, train, global_step)
    if args.json:
        run = {"run": str(args.run_dir), "script": script, "global_step": global_step, "levels": sets}
        run |= {"args": vars(args), "training_args": vars(train), "generalisation_gap": found_gaps}
        run["results"] = [{"policy": p, "levels": x, **summary} for (p, x), summary in results.items()]
        with written("--json", args.json) as temporary:
            temporary.write_text(json.dumps(run, indent=1, default=str) + "\n")
    if args.video:
        titles = {"agent": f"{script}.py, {global_step:,} steps", "random": "random policy"}
        options = sets.get(args.video_levels) or sets["all"]
        film_episodes(policies, titles, train, options, args)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
