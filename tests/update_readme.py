"""Compute what the Markdown files quote, and put it there: python tests/update_readme.py

Two marks in the text say what is quoted; words around them are free:
  <!-- quote: NAME -->   the lines up to <!-- end --> are BLOCKS[NAME]()
  0.6<!-- NAME -->       the number before the mark is numbers()[NAME]
test_texts.py checks that nothing would change.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd

from helpers import ROOT, SCRIPTS, load, parse

sys.path.insert(0, str(ROOT / "experiments"))
import lab.minatar  # noqa: E402
from lab.catalogue import ABLATIONS, runs_of  # noqa: E402
from lab.inference import bootstrap_interval, mean_difference, within  # noqa: E402
from lab.reporting import apart, bands, difference_cells, differences, overview, same, strata_of, table  # noqa: E402
from lab.runs import Results  # noqa: E402

FILES = ["README.md", "REFERENCE.md", "experiments/README.md"]
FILES += [f"results/{name}.md" for name in ("README", "SMALL_ENOUGH", "SPEED", "FIRST")]
FILES = [ROOT / name for name in FILES]
RESULTS = ROOT / "results"
BLOCK = re.compile(r"(<!-- quote: ([\w -]+) -->\n)((?:(?!<!-- ).)*)(<!-- end -->)", re.S)
BOOKKEEPING = r'\s*($|"""|stats\[|state.prox_age = )'  # in the idea, left out
NUMBER = re.compile(r"([-\d][\d.,e%-]*)<!-- ([\w ,-]+) -->")

results = cache(lambda name, folder="": Results.of_csv(name, RESULTS / folder))


# The scripts


def diff(*flags):
    command = ["diff", *flags, "--label", "ppo.py", "--label", "ppo_ewma.py", "ppo.py", "ppo_ewma.py"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.rstrip("\n")


def fenced(text, language=""):
    return f"```{language}\n{text}\n```"


def idea():
    """The hunks that carry the idea, each without its indentation."""
    hunks = [x.split("\n", 1)[1] for x in ("\n" + diff("-U0")).split("\n@@ ")[1:]]
    parts = []
    for key in ("-logprobs_prox = ", "+logp_behav = ", "+update_ewma(state, policy, ", "+def update_ewma("):
        for hunk in hunks:
            lines = [line for line in hunk.split("\n") if not re.match(BOOKKEEPING, line[1:])]
            code = textwrap.dedent("\n".join(line[1:] for line in lines)).split("\n")
            shown = [line[0] + text for line, text in zip(lines, code, strict=True)]
            if any(line.startswith(key) for line in shown):
                parts.append("\n".join(shown))
    return fenced("\n\n".join(parts), "diff")


def adjustments():
    """What a run prints about the batch size."""
    script, words = "ppg_ewma", ["--env-id", "heist", "--num-envs", "64", "--run-dir", str(ROOT)]
    module, (args, used) = load(script), parse(script, *words)
    agent = module.Agent(args.channels, args.arch)
    state = SimpleNamespace(iteration=0, agent=agent, buffer=module.AuxiliaryBuffer(args))
    steps = args.num_envs * args.num_steps
    run = {"args": args, "used": used, "state": state, "folder": args.run_dir, "steps": steps, "resumed": False}
    run |= {"device": next(agent.parameters()).device, "num_iterations": -(-args.total_timesteps // steps)}
    lines = list(module.announcement(SimpleNamespace(**run)))
    start = next(n for n, line in enumerate(lines) if line.startswith("adjusted to the batch size"))
    end = next(n for n, line in enumerate(lines) if n > start and not line.startswith("  "))
    return fenced("\n".join(lines[start:end]))


def parser_of(script):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    load(script).add_flags(parser)
    return parser


def flags():
    """All flags of the five scripts, by group; a flag that not all have names those that have it."""
    rows, parsers = {}, {script: parser_of(script) for script in SCRIPTS}
    for script, parser in parsers.items():
        for group in parser._action_groups[2:]:
            for action in group._group_actions:
                name = action.option_strings[0]
                default = action.default
                if name == "--env-threads":
                    default = "number of cores"
                elif isinstance(default, list):
                    default = " ".join(map(str, default))
                elif action.nargs == 0:
                    default = "on" if default else "off"
                choices = "" if action.choices is None or len(action.choices) > 10 else ", ".join(action.choices)
                row = rows.setdefault((group.title, name), [[], default, set(), action.help])
                row[0].append(script)
                row[2] |= set(choices.split(", ")) - {""}
    parts = []
    for title in dict.fromkeys(title for title, _ in rows):
        lines = []
        for (group, name), (scripts, default, choices, text) in rows.items():
            if group == title:
                default = "" if default in (None, "") else f"`{default}`"
                offered = ", ".join(f"`{x}`" for x in sorted(choices))
                where = "all" if len(scripts) == len(SCRIPTS) else ", ".join(f"`{x}.py`" for x in scripts)
                lines.append([f"`{name}`", default, offered, text.replace("|", "\\|").replace("<", "&lt;"), where])
        parts.append(
            f"### {title[0].upper()}{title[1:]}\n\n" + table(["flag", "default", "choices", "what", "in"], lines)
        )
    return "\n\n".join(parts)


# The results


def learning():
    return (RESULTS / "learning.md").read_text().strip()


def play():
    rows = []
    for played in json.loads((RESULTS / "play.json").read_text())["results"]:
        mean = np.mean([episode["return"] for episode in played["episodes"]])
        interval = f"{played['return']['low']:.1f} to {played['return']['high']:.1f}"
        rows.append([played["policy"], played["levels"], len(played["episodes"]), f"{mean:.1f}", interval])
    return table(["policy", "levels", "episodes", "mean return", "95% interval"], rows)


def staleness_differences(folder=""):
    rows, runs = [], results("staleness", folder)
    for other in ("recent", "behavior"):
        cells = [f"decoupled minus {other}"]
        for column in ("final_return", "mean_return"):
            strata = []
            for age in runs.values("decoupled")[1:]:
                strata += strata_of(runs.final("decoupled", age, column), runs.final(other, age, column))
            cells += difference_cells(strata, 1)
        rows.append(cells)
    header = ["staleness 1 to 16 together", "at the end", "95% interval", "over the whole run", "95% interval"]
    return table(header, rows)


def batch_size_differences():
    runs, sizes = results("batch-size"), ("all", "no-step-size", "no-adv-norm", "no-ewma-adjustment", "no-ewma")
    pairs = [([f"{x}: 64 minus 1"], (x, "64"), (x, "1")) for x in sizes]
    pairs += [(["1 env. without the age adjusted, minus same-age"], ("no-ewma-adjustment", "1"), ("same-age", "1"))]
    pairs += [(["ppg-ewma: 64 minus 4"], ("ppg-ewma", "64"), ("ppg-ewma", "4"))]
    pairs += [(["ppg-ewma minus ppg-ewma-no-n-pi: 4"], ("ppg-ewma", "4"), ("ppg-ewma-no-n-pi", "4"))]
    return differences(runs, ["environments"], pairs, ("final_return", "mean_return"), 1)


def ranges(folder):
    """How far apart the sizes end, and if that is further than with all adjustments, of the same seeds."""
    runs = results("batch-size", folder)
    means = runs.rows.groupby(["variant", "value"])["final_return"].mean()
    tests = same(runs, runs.of_this_scale(list(ABLATIONS)))[2].splitlines()[2:]
    rows = [["nothing", f"{np.ptp(means['all']):.1f}", "", ""]]
    left_out = runs.rows.query("variant in @ABLATIONS and value == '1'")["seed"].max()
    if left_out < runs.rows["seed"].max():
        same_seeds = runs.rows.query("variant == 'all' and seed <= @left_out").groupby("value")["final_return"].mean()
        rows.append([f"nothing, seeds 1 to {left_out}", f"{np.ptp(same_seeds):.1f}", "", ""])
    tests = [line.strip("| ").split(" | ") for line in tests]
    rows += [[name, f"{np.ptp(means[name]):.1f}", gain, p] for name, _, gain, _, p in tests]
    return table(["left out", "sizes are apart by", "more than with all adjustments", "p, corrected"], rows)


def noise_scales():
    """As noise_scale.py printed them."""
    rows = []
    for game, file in [("CartPole", "cartpole_noise_scale.txt"), ("Space Invaders", "minatar/noise_scale.txt")]:
        for text in (RESULTS / file).read_text().split("\n\n"):
            steps = re.search(r"after ([\d,]+) steps", text)[1]
            losses = re.findall(r"^(?:policy|value) +([\d,]+) +(\S+ to \S+|above \S+)", text, re.M)
            rows.append([game, steps, *(f"{noise} ({interval})" for noise, interval in losses)])
    return table(["game", "after steps", "policy loss", "value loss"], rows)


def ends(name, since=0.9, column="return"):
    """{label: final returns} of curves that no sweep made."""
    curves = pd.read_csv(RESULTS / f"{name}.csv", dtype={"label": str})
    late = curves[curves["step"] > since * curves.groupby("run")["step"].transform("max")]
    late = late.groupby(["label", "run"], sort=False)[column].mean().groupby("label", sort=False)
    return {label: x.to_numpy() for label, x in late}


def lost(stale, fresh, axis=-1):
    return 1 - np.mean(stale, axis=axis) / np.mean(fresh, axis=axis)


def fresh(name):
    """What fresh_returns.py wrote: {(steps as asked for, environments): rows}, from runs named ..._ENVS_STEPS_SEED."""
    rows = pd.read_csv(RESULTS / f"{name}.csv")
    envs, steps = (rows["run"].str.split("_").str[-i].astype(int) for i in (3, 2))
    return dict(iter(rows.groupby([steps, envs])))


def fresh_returns(**files):
    """Returns of agents and on their curves, halfway or earlier, and at the end; a column for each size."""
    found = {name: fresh(file) for name, file in files.items()}
    times, sizes = (sorted({key[i] for rows in found.values() for key in rows}) for i in (0, 1))
    rows = []
    for (name, runs), when, what in itertools.product(found.items(), times, ("return", "on the curve")):
        label = f"after {when:,} steps" if when < times[-1] else "at the end"
        cells = [runs[when, size][what] for size in reversed(sizes)]
        digits = 0 if max(x.mean() for x in cells) > 50 else 1
        cells = [f"{x.mean():.{digits}f} ± {x.std():.{digits}f}" for x in cells]
        rows.append([f"{name}, {label}".strip(", "), {"return": "agents"}.get(what, "curves"), *cells])
    return table(["environments", "", *reversed(sizes)], rows)


def fresh_of_sweep(name):
    """The same of runs that a sweep made: {environments: rows}, the most first."""
    rows = pd.read_csv(RESULTS / f"{name}.csv")
    return dict(sorted(rows.groupby(rows["run"].str.split("__").str[2].astype(int)), reverse=True))


def agents_and_curves(name):
    found = fresh_of_sweep(name)
    lines = []
    for label, column in [("agents", "return"), ("curves", "on the curve")]:
        cells = [rows[column] for rows in found.values()]
        lines.append([label, *(f"{x.mean():.1f} ± {x.std():.1f}" for x in cells)])
    return table(["environments", *found], lines)


def small_seeds():
    """Each seed's returns with all adjustments, at the end and over the whole run."""
    runs, rows = results("batch-size", "small"), []
    sizes = runs.values("all")
    for label, column in [("at the end", "final_return"), ("over the whole run", "mean_return")]:
        cells = [runs.final("all", size, column).groupby("seed").mean() for size in sizes]
        rows.append([label, *(" / ".join(f"{x:.1f}" for x in cell) for cell in cells)])
    return table(["environments", *sizes], rows)


def smaller_steps():
    """What stale data cost the decoupled objective on MinAtar, by step size and age, and how far the policy moves."""
    runs, columns = results("staleness", "minatar"), ("final_return", "mean_return")
    returns = {
        ("5e-4", age): [runs.final("decoupled", age, x).to_numpy() for x in columns] for age in runs.values("decoupled")
    }
    for rate, name in [("1.25e-4", "slow"), ("3.125e-5", "slower")]:
        more = [ends(f"minatar/{name}", since) for since in (0.9, 0)]
        returns |= {(rate, "0"): [x["fresh"] for x in more], (rate, "8"): [x["decoupled, 8"] for x in more]}
    moved, rows = ends("minatar/stale_kl", since=0, column="policy/stale_kl"), []
    for (rate, age), stale in returns.items():
        if age != "0":
            row = [rate, age, f"{moved[f'{rate}, {age}'].mean():.2g}"]
            for x, fresh in zip(stale, returns[rate, "0"], strict=True):
                low, high = bootstrap_interval([x, fresh], lost)
                row += [f"{lost(x, fresh):.0%}", f"{low:.0%} to {high:.0%}"]
            rows.append(row)
    return table(["step size", "staleness", "KL", "lost at the end", "95%", "over the whole run", "95%"], rows)


def small_staleness():
    """The decoupled objective's returns, at the end and over the whole run."""
    runs, rows = results("staleness", "small"), []
    for label, column in [("at the end", "final_return"), ("over the whole run", "mean_return")]:
        rows.append([label, *(f"{runs.final('decoupled', x, column).mean():.1f}" for x in runs.values("decoupled"))])
    return table(["staleness", *runs.values("decoupled")], rows)


def procgen_at_one():
    """What one environment ends with on Procgen, and in brackets 64 of the same seeds: new runs, and the first."""
    names = [
        "nothing",
        "the step size",
        "advantage normalisation",
        "the EWMA's age",
        "EWMA itself",
        "the phase's length",
    ]
    rows = [[name] for name in names]
    for runs in (results("batch-size", "small"), results("batch-size")):
        for row, variant in zip(rows, ["all", *ABLATIONS], strict=True):
            one, many = (runs.final(variant, size, "final_return") for size in ("1", "64"))
            seeds = f"{len(one)} seed{'s' * (len(one) > 1)}"
            row.append(f"{one.mean():.1f} ({many[one.index].mean():.1f}), {seeds}" if len(one) else "")
    return table(["left out", "new runs, PPG-EWMA", "first runs, PPO-EWMA"], rows)


def cartpole_returns():
    rows = []
    for name, file in [("Adam", "cartpole"), ("SGD", "cartpole_sgd")]:
        found = ends(file)
        rows.append([f"{name}, {len(found['1 environment'])} seeds"])
        rows[-1] += [f"{x.mean():.0f} ± {x.std(ddof=1):.0f}" for x in found.values()]
    sizes = [int(label.split()[0]) for label in found]
    return table(["environments", *sizes], [["frames of a minibatch", *(4 * size for size in sizes)], *rows])


CURVES = ["bf16", "dial", "learning"]
GAINS = [("ppo-ewma", "ppo"), ("ppg-ewma", "ppg")]


def ewma_differences():
    old, pairs = ("as-old-as-ppo", "ppo-ewma"), []
    for first, second in GAINS:
        pairs.append(([f"{first} minus {second}"], ("algorithms", first), ("algorithms", second)))
    for other in ("ppo", "ppo-ewma"):
        pairs.append(([f"ppo-ewma as-old-as-ppo, minus {other}"], old, ("algorithms", other)))
    columns = ("final_normalised_return", "mean_normalised_return")
    return differences(results("ewma"), ["normalised return"], pairs, columns)


def minatar_ewma_differences():
    pairs = [([f"{x} minus {y}"], ("algorithms", x), ("algorithms", y)) for x, y in GAINS]
    (x, y), eight = GAINS[0], "eight-minibatches"
    pairs.append(([f"{x} minus {y}, 8 minibatches"], (eight, x), (eight, y)))
    return differences(results("ewma", "minatar"), ["return"], pairs, ("final_return", "mean_return"), 1)


def linear_differences():
    """The linear rule minus the square root rule, at each size but the reference."""
    runs = results("linear-lr", "minatar")
    pairs = [([size], ("linear", size), ("sqrt", size)) for size in runs.values("sqrt")[1:]]
    return differences(runs, ["environments"], pairs, ("final_return", "mean_return"), 1)


def betas_differences():
    """One environment minus 64, for each way to adjust the betas."""
    runs, names = results("adam-betas", "minatar"), {"none": "none", "beta2": "beta2", "both": "beta1 and beta2"}
    pairs = [([names[x]], (x, "1"), (x, "64")) for x in names]
    return differences(runs, ["betas adjusted"], pairs, ("final_return", "mean_return"), 1)


def speed():
    return (RESULTS / "throughput.md").read_text().split("\n\n")[1]


BLOCKS = {
    "diff": lambda: fenced(diff("-U0"), "diff"),
    "idea": idea,
    "adjustments": adjustments,
    "flags": flags,
    "learning": learning,
    "play": play,
    "dial": lambda: (RESULTS / "dial.md").read_text().strip(),
    "staleness returns": lambda: overview(results("staleness"), "final_return"),
    "staleness over the whole run": lambda: overview(results("staleness"), "mean_return"),
    "staleness differences": staleness_differences,
    "batch-size returns": lambda: overview(results("batch-size"), "final_return"),
    "batch-size distances": lambda: apart(
        results("batch-size"), ["all", "no-step-size", "no-adv-norm", "no-ewma-adjustment", "no-ewma"]
    )[1],
    "batch-size differences": batch_size_differences,
    "minatar returns": lambda: overview(results("batch-size", "minatar"), "final_return"),
    "minatar ranges": lambda: ranges("minatar"),
    "minatar-ppg returns": lambda: overview(results("batch-size", "minatar-ppg"), "final_return"),
    "minatar-ppg ranges": lambda: ranges("minatar-ppg"),
    "minatar-ppg agents": lambda: agents_and_curves("minatar-ppg/fresh"),
    "noise scales": noise_scales,
    "cartpole fresh": lambda: fresh_returns(SGD="cartpole_fresh_sgd", Adam="cartpole_fresh_adam"),
    "cartpole returns": cartpole_returns,
    "minatar fresh": lambda: fresh_returns(**{"": "minatar/fresh"}),
    "minatar staleness returns": lambda: overview(results("staleness", "minatar"), "final_return"),
    "minatar staleness over the whole run": lambda: overview(results("staleness", "minatar"), "mean_return"),
    "minatar staleness differences": lambda: staleness_differences("minatar"),
    "minatar ewma returns": lambda: overview(results("ewma", "minatar"), "final_return"),
    "minatar ewma differences": minatar_ewma_differences,
    "minatar linear returns": lambda: overview(results("linear-lr", "minatar"), "final_return"),
    "minatar linear differences": linear_differences,
    "minatar betas returns": lambda: overview(results("adam-betas", "minatar"), "final_return"),
    "minatar betas differences": betas_differences,
    "grid returns": lambda: overview(results("com-vs-kl", "minatar-ppg"), "final_return"),
    "grid shares": lambda: bands(results("com-vs-kl", "minatar-ppg"), ("age", "penalty"))[1],
    "small returns": lambda: overview(results("batch-size", "small"), "final_return"),
    "small seeds": small_seeds,
    "procgen at one": procgen_at_one,
    "minatar smaller steps": smaller_steps,
    "small staleness": small_staleness,
    "ewma returns": lambda: overview(results("ewma"), "final_return"),
    "ewma differences": ewma_differences,
    "speed": speed,
}


@cache
def random_return(game, episodes=500):
    """Of MinAtar."""
    env, returns = lab.minatar.gym.make(game), []
    env.action_space.seed(1)
    for seed in range(episodes):
        env.reset(seed=seed)
        returns.append(0)
        ended = False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            returns[-1] += reward
            ended = terminated or truncated
    return np.mean(returns)


def batch_size_numbers(folder):
    """Of the runs on a game of MinAtar."""
    runs = results("batch-size", folder)
    found = {"runs": len(runs.runs), "hours": f"{runs.hours:.1f}"}
    found["steps"] = f"{runs.runs[0].flags['total-timesteps']:,}"
    every = [runs.final("all", size, "final_return") for size in runs.values("all")]
    found |= {"within": f"{within(every):.1f}", "seeds": min(map(len, every))}
    found["apart"] = f"{np.ptp([x.mean() for x in every]):.1f}"
    largest, smallest = every[0].mean(), every[-1].mean()
    found |= {"below 1": f"{1 - smallest / largest:.0%}", "fifth": f"{largest / 5:.1f}"}
    found["about"] = f"{np.mean([x.mean() for x in every]):.0f}"
    found["within share"] = f"{within(every) / largest:.0%}"
    means = [runs.final("all", size, "mean_return") for size in runs.values("all")]
    found["within whole"] = f"{within(means) / means[0].mean():.0%}"
    single = runs.final("no-ewma", "1", "final_return")
    found |= {f"no-ewma {end}": f"{f(single):.0f}" for end, f in (("from", min), ("to", max))}
    found["within but for 1"] = f"{within(every[:-1]):.1f}"
    rows = runs.rows.groupby(["variant", "value"])
    found["seeds left out"] = rows.size().drop("floor")["no-step-size", "1"]
    clipped = rows["clip_fraction"].median()
    for variant, size in [("all", "64"), ("all", "1"), ("no-ewma-adjustment", "1"), ("no-ewma", "1"), ("no-n-pi", "1")]:
        if (variant, size) in clipped:
            found[f"clipped {variant} {size}"] = f"{clipped[variant, size]:.0%}"
    final, whole = rows["final_return"].mean(), rows["mean_return"].mean()
    for variant in ("no-step-size", "no-ewma-adjustment", "no-ewma", "no-n-pi"):
        if (variant, "1") in final:
            found[f"left {variant}"] = f"{final[variant, '1']:.1f}"
    for variant in ("no-ewma-adjustment", "no-ewma", "no-n-pi"):
        if (variant, "1") in final:
            found[f"of 64 {variant}"] = f"{final[variant, '1'] / final[variant, '64']:.0%}"
    for size in runs.values("all")[1:]:
        found[f"behind {size}"] = f"{1 - whole['all', size] / whole['all', '64']:.0%}"
    found["loss at 64"] = f"{whole['no-ewma', '64'] - whole['all', '64']:.1f}"
    found["adv-norm behind 1"] = f"{1 - whole['no-adv-norm', '1'] / whole['all', '1']:.0%}"
    found["gain at 64"] = f"{final['all', '64'] - final['no-ewma', '64']:.1f}"
    found["swing"] = f"{rows['advantage_swing'].median()['no-adv-norm', '1']:.0f}"
    return found


def mean_age(prox_com, steps):
    """Of an average that restarts every so many optimiser steps."""
    weight, age, ages = 1.0, 0.0, []
    for _ in range(steps):
        ages.append(age)
        weight = 1 + prox_com / (prox_com + 1) * weight
        age = (age + 1) * (1 - 1 / weight)
    return np.mean(ages)


def more_of(size):
    """Final returns of PPG-EWMA's seeds 1 to 10, and 11 to 20."""
    first = results("batch-size", "minatar-ppg").final("all", size, "final_return").to_numpy()
    return first, ends("minatar-ppg/more")[f"{size} environment{'s' * (size != '1')}"]


def more_gain():
    """PPG-EWMA and PPG with 64 environments, seeds 6 to 20."""
    first, later = more_of("64")
    return np.concatenate([first[5:], later]), ends("minatar-ppg/more")["PPG, 64 environments"]


def more_numbers():
    """Of the runs that followed those of PPG-EWMA on MinAtar."""
    found = {f"ppg age {label}": f"{x.mean():.1f}" for label, x in ends("minatar-ppg/age").items()}
    used = ends("minatar-ppg/age")["EWMA 16 steps old"]
    found |= {f"ppg age {end}": f"{f(used):.0f}" for end, f in (("from", min), ("to", max))}
    found["ppg age short"] = f"{mean_age(8 * 64, 16 * 4):.0f}"
    found["ppg age long"] = f"{mean_age(8 * 64, 16 * 64 * 4):.0f}"
    first, later = zip(*(more_of(size) for size in ("64", "16", "4", "1")), strict=True)
    every = [np.concatenate(pair) for pair in zip(first, later, strict=True)]
    for name, samples in (("more", later), ("twenty", every)):
        found |= {f"ppg {name} within": f"{within(samples):.1f}", f"ppg {name} seeds": min(map(len, samples))}
        found[f"ppg {name} apart"] = f"{np.ptp([x.mean() for x in samples]):.1f}"
        found[f"ppg {name} share"] = f"{within(samples) / samples[0].mean():.0%}"
    found["ppo less at 1"] = f"{-float(betas_differences().splitlines()[2].split(' | ')[1]):.1f}"
    gain, interval = mean_difference(*more_gain()), bootstrap_interval(more_gain(), mean_difference)
    found["ppg gain"], found["ppg gain share"] = f"{gain:.1f}", f"{gain / more_gain()[1].mean():.0%}"
    return found | {f"ppg gain {end}": f"{x:.1f}" for end, x in zip(("from", "to"), interval, strict=True)}


@cache
def numbers():
    """What sentences quote, by name."""
    found, names = {}, ("staleness", "batch-size", "ewma")
    for name in names:
        found |= {f"{name} runs": len(results(name).runs), f"{name} hours": f"{results(name).hours:.1f}"}
    hours = sum(results(name).hours for name in names)
    found |= {"all runs": sum(len(results(name).runs) for name in names)}
    found |= {"all hours": f"{hours:.1f}", "all hours on two": f"{hours / 2:.1f}"}

    ours, paper = (results("staleness").runs[0].flags, runs_of("staleness", "paper")[0].flags)
    found["steps"] = f"{ours['total-timesteps']:,}"
    found["times shorter"] = f"{paper['total-timesteps'] / ours['total-timesteps']:.0f}"
    stale = [8 * x["num-envs"] * x["num-steps"] / x["total-timesteps"] for x in (ours, paper)]
    found |= {"staleness 8 here": f"{stale[0]:.0%}", "staleness 8 in the paper": f"{stale[1]:.1%}"}

    runs = results("staleness").rows.astype({"value": int}).groupby(["variant", "value"])
    final, clipped = runs["final_return"].mean(), runs["clip_fraction"].median()
    for age in (1, 2, 4):
        found[f"staleness lost {age}"] = f"{1 - final['decoupled', age] / final['decoupled', 0]:.0%}"
    aged = clipped["behavior"].drop(0)
    found |= {"behavior clipped from": f"{aged.min():.0%}", "behavior clipped to": f"{aged.max():.0%}"}
    found["fresh clipped"] = f"{clipped['decoupled', 0]:.0%}"

    steps = [x.flags["num-envs"] * x.flags["num-steps"] for x in results("batch-size").runs if x.variant == "all"]
    total, minibatches = results("batch-size").runs[0].flags["total-timesteps"], parse("ppo")[0].num_minibatches
    found |= {"most steps": f"{max(steps):,}", "fewest steps": min(steps)}
    found["fewest updates"] = f"{minibatches * total // max(steps):,}"
    found["most updates"] = f"{minibatches * total // min(steps):,}"
    runs = results("batch-size").rows.astype({"value": int}).groupby(["variant", "value"])
    whole, clipped = runs["mean_return"].mean(), runs["clip_fraction"].median()
    swing = runs["advantage_swing"].median()
    later = results("batch-size").rows.query("seed > 1").groupby(["variant", "value"])["final_return"].mean()
    later = later.groupby("variant").agg(np.ptp)
    others = later[["no-step-size", "no-adv-norm", "no-ewma-adjustment", "no-ewma"]]
    found |= {"apart later all": f"{later['all']:.1f}"}
    found |= {"apart later least": f"{others.min():.1f}", "apart later most": f"{others.max():.1f}"}
    for size in (4, 1):
        found[f"behind {size}"] = f"{1 - whole['all', size] / whole['all', 64]:.0%}"
    for variant, size in [("all", 1), ("no-ewma-adjustment", 1), ("no-step-size", 1)]:
        found[f"clipped {variant} {size}"] = f"{clipped[variant, size]:.0%}"
    found["clipped no-ewma 1"] = f"{clipped['no-ewma', 1]:.1%}"
    found["swing"] = f"{swing['no-adv-norm', 1]:.0f}"
    rows = BLOCKS["batch-size distances"]().split("\n")[2:]
    found |= {f"p {row.split(' | ')[0][2:]}": row.split(" | ")[2] for row in rows}

    for folder in ("minatar", "minatar-ppg"):
        found |= {f"{folder} {name}": text for name, text in batch_size_numbers(folder).items()}
    found |= more_numbers()
    agents = [rows["return"] for rows in fresh_of_sweep("minatar-ppg/fresh").values()]
    found |= {"minatar-ppg agents within": f"{within(agents):.1f}", "minatar-ppg agents seeds": min(map(len, agents))}
    found |= {
        f"minatar-ppg agents {end}": f"{f(x.mean() for x in agents):.1f}" for end, f in (("from", min), ("to", max))
    }
    runs = results("batch-size", "minatar")
    found |= {f"why {label}": f"{x.mean():.1f}" for label, x in ends("minatar/why").items()}
    largest, smallest = ends("minatar/sgd").values()
    found |= {"sgd 64": f"{largest.mean():.1f}", "sgd 1": f"{smallest.mean():.1f}"}
    found["sgd below"] = f"{lost(smallest, largest):.0%}"
    low, high = bootstrap_interval([smallest, largest], lost)
    found |= {"sgd below from": f"{low:.0%}", "sgd below to": f"{high:.0%}"}
    curve = runs.points[runs.points["variant"] == "all"].groupby(["value", "step"])["return"].mean()
    step = np.interp(largest.mean(), curve["64"], curve["64"].index)  # when 64 environments with Adam are as far
    found["adam 1 then"] = f"{np.interp(step, curve['1'].index, curve['1']):.1f}"
    for loss in ("policy", "value"):
        text = (RESULTS / "cartpole_noise_scale.txt").read_text()  # the first is of the earlier checkpoint
        found[f"cartpole noise {loss}"] = re.search(rf"^{loss} +([\d,]+)", text, re.M)[1]
    early = [rows["return"] for (steps, _), rows in fresh("cartpole_fresh_sgd").items() if steps == 25_600]
    found["cartpole fresh sgd within"], means = f"{within(early):.0f}", [x.mean() for x in early]
    found["cartpole fresh sgd apart"] = f"{max(means) / min(means) - 1:.0%}"
    iteration = 256 * 16
    found["cartpole more steps"] = f"{-(-25_600 // iteration) * iteration / 25_600 - 1:.0%}"
    adam = {key: rows["return"].mean() for key, rows in fresh("cartpole_fresh_adam").items()}
    for when, steps in [("early", 25_600), ("late", 102_400)]:
        found[f"cartpole fresh adam 1 {when}"] = f"{adam[steps, 1] / adam[steps, 16] - 1:.0%}"
    for label, x in ends("cartpole_betas").items():
        found[f"cartpole betas {label.split()[0]}"] = f"{x.mean():.0f}"
    slow, whole = ends("minatar/slow"), ends("minatar/slow", since=0)
    found["slow lost"] = f"{lost(slow['decoupled, 8'], slow['fresh']):.0%}"
    low, high = bootstrap_interval([slow["decoupled, 8"], slow["fresh"]], lost)
    found |= {"slow lost from": f"{low:.0%}", "slow lost to": f"{high:.0%}"}
    found["slow recent lost"] = f"{lost(slow['recent, 8'], slow['fresh']):.0%}"
    found["slow behavior lost"] = f"{lost(slow['behavior, 8'], slow['fresh']):.0%}"
    found["slow behavior lost on the way"] = f"{lost(whole['behavior, 8'], whole['fresh']):.0%}"
    found["slow lost on the way"] = f"{lost(whole['decoupled, 8'], whole['fresh']):.0%}"
    for since, when in [(0.9, ""), (0, " on the way")]:
        slower = ends("minatar/slower", since)
        for label in ("decoupled", "behavior", "recent"):
            found[f"slower {label} runs"] = len(slower[f"{label}, 8"])
            found[f"slower {label} lost{when}"] = f"{lost(slower[f'{label}, 8'], slower['fresh']):.0%}"
        low, high = bootstrap_interval([slower["decoupled, 8"], slower["fresh"]], lost)
        found |= {f"slower lost{when} from": f"{low:.0%}", f"slower lost{when} to": f"{high:.0%}"}
    for label, x in ends("minatar/stale_kl", since=0, column="policy/stale_kl").items():
        found[f"stale kl {label.replace(',', '')}"] = f"{x.mean():.2g}"

    runs = results("com-vs-kl", "minatar-ppg")
    found |= {"grid runs": len(runs.runs), "grid hours": f"{runs.hours:.1f}"}
    cells = runs.rows.groupby(["variant", "value"])["final_return"].mean()
    found |= {
        f"grid {com} {kl}": f"{cells[f'kl-{kl}', f'com-{com}']:.1f}" for com, kl in [(8, 8), (8, 1), (1, 8), (1, 1)]
    }
    clip = results("batch-size", "minatar-ppg").final("all", "1", "final_return")
    found |= {"grid best": f"{cells.max():.1f}", "grid clip": f"{clip.mean():.1f}"}
    runs, planned = results("batch-size", "small"), len(runs_of("batch-size", "small"))
    found |= {"small done": runs.finished, "small planned": planned, "small hours": f"{runs.hours:.0f}"}
    every = {size: runs.final("all", size, "final_return").to_numpy() for size in ("64", "16", "4", "1")}
    found |= {"small seeds": len(every["1"]), "small within": f"{within([*every.values()]):.1f}"}
    found |= {f"small all {size}": f"{x.mean():.1f}" for size, x in every.items()}
    cells = runs.rows.query("finished").set_index(["variant", "value", "seed"])["final_return"]
    found |= {f"small {' '.join(map(str, cell))}": f"{x:.1f}" for cell, x in cells.items()}
    found["small no-ewma 16"] = f"{runs.final('no-ewma', '16', 'final_return').mean():.1f}"
    found["small fifth"] = f"{every['64'].mean() / 5:.1f}"
    below = [every["64"], every["1"]]
    found["small below"] = f"{mean_difference(*below):.1f}"
    low, high = bootstrap_interval(below, mean_difference)
    found |= {"small below from": f"{low:.1f}", "small below to": f"{high:.1f}"}
    runs, planned = results("staleness", "small"), len(runs_of("staleness", "small"))
    found |= {"small stale done": runs.finished, "small stale planned": planned}
    for label, column in [("", "final_return"), (" on the way", "mean_return")]:
        fresh_runs = runs.final("decoupled", "0", column).mean()
        for age in ("1", "2", "4", "8"):
            found[f"small lost{label} {age}"] = f"{1 - runs.final('decoupled', age, column).mean() / fresh_runs:.0%}"
    run = runs.runs[0]
    found["small iteration"] = f"{run.flags['num-envs'] * run.flags['num-steps'] / run.flags['total-timesteps']:.2%}"
    found["paper iteration"] = f"{paper['num-envs'] * paper['num-steps'] / paper['total-timesteps']:.2%}"
    for _, run in pd.read_csv(RESULTS / "small/fresh.csv").iterrows():
        found[f"small fresh {run['run'].split('__')[2]}"] = f"{run['return']:.1f}"
    runs = results("linear-lr", "minatar")
    one = [runs.final(rule, "1", "final_return").to_numpy() for rule in ("linear", "sqrt")]
    found["linear below sqrt 1"] = f"{lost(*one):.0%}"
    for name in ("staleness", "ewma"):
        runs = results(name, "minatar")
        found |= {f"minatar {name} runs": len(runs.runs), f"minatar {name} hours": f"{runs.hours:.1f}"}
    found["minatar times shorter"] = f"{paper['total-timesteps'] / runs.runs[0].flags['total-timesteps']:.0f}"
    found["minatar random"] = f"{random_return('space_invaders'):.1f}"
    rows = [row.strip("| ").split(" | ") for row in minatar_ewma_differences().splitlines()[2:]]
    base = runs.rows.groupby(["variant", "value"])["final_return"].mean()
    bases = {"ppo": ("algorithms", "ppo"), "ppg": ("algorithms", "ppg"), "eight": ("eight-minibatches", "ppo")}
    for (name, setting), row in zip(bases.items(), rows, strict=True):
        found[f"minatar gain below {name}"] = f"{float(row[2].split(' to ')[1]) / base[setting]:.0%}"
    runs = results("staleness", "minatar")
    flags = runs.runs[0].flags
    found["minatar staleness 8"] = f"{8 * flags['num-envs'] * flags['num-steps'] / flags['total-timesteps']:.1%}"
    rows = runs.rows.astype({"value": int}).groupby(["variant", "value"])
    final, whole, clipped = rows["final_return"], rows["mean_return"].mean(), rows["clip_fraction"].median()
    share = 1 - final.mean() / final.mean()["decoupled", 0]
    low = final.agg(lambda x: (x < random_return("space_invaders")).sum())
    found |= {f"minatar lost {age}": f"{share['decoupled', age]:.0%}" for age in (2, 4, 8, 16)}
    found |= {f"minatar behavior lost {age}": f"{share['behavior', age]:.0%}" for age in (1, 16)}
    for age in (2, 8):
        found[f"minatar lost on the way {age}"] = f"{1 - whole['decoupled', age] / whole['decoupled', 0]:.0%}"
    found |= {f"minatar behavior clipped {age}": f"{clipped['behavior', age]:.0%}" for age in (1, 16)}
    found |= {f"minatar recent low {age}": low["recent", age] for age in (4, 8)}
    found |= {"minatar recent lost 2": f"{share['recent', 2]:.0%}"}
    found["minatar fresh clipped"] = f"{clipped['decoupled', 0]:.0%}"

    epochs, ours = parse("ppo")[0].epochs, results("ewma").runs[0].flags["epochs"]
    ages = [np.mean(np.arange(x * minibatches)) for x in (epochs, ours)]  # of PPO's old policy, over an iteration
    found |= {"age of old": f"{ages[0]:.1f}", "age of old here": f"{ages[1]:.1f}"}
    found["prox-com"] = f"{parse('ppo_ewma')[0].prox_com:.0f}"

    seconds = results("ewma").all_rows.query("value == 'ppo-ewma' and game == 'starpilot'")["seconds"]
    found["minutes"] = f"{seconds.median() / 60:.0f}"

    last = {name: pd.read_csv(RESULTS / f"{name}.csv").groupby(["label", "run"])["return"].last() for name in CURVES}
    for name, label in [("float32", "float32"), ("bf16", "bfloat16 convolutions")]:
        found |= {f"{name} {n}": f"{x:.1f}" for n, x in enumerate(last["bf16"][label], 1)}
    moved = np.abs(last["bf16"]["float32"].to_numpy() - last["learning"]["PPO, small"].to_numpy())
    found["float32 moved"] = f"{moved.max():.1f}"

    played = json.loads((RESULTS / "play.json").read_text())["results"]
    (random,) = [x["return"]["mean"] for x in played if (x["policy"], x["levels"]) == ("random", "training")]
    found["random play"] = f"{random:.1f}"
    for envs in (16, 4):
        x = last["dial"][f"{envs} environments"]
        found |= {f"dial {envs} from": f"{x.min():.1f}", f"dial {envs} to": f"{x.max():.1f}"}

    args, _ = parse("ppg_ewma")
    frame = np.prod(load("ppo").FRAME)
    iteration = args.num_envs * args.num_steps * frame / 1e9
    found |= {"iteration GB": f"{iteration:.1f}", "phase GB": f"{args.n_pi * iteration:.1f}"}
    found |= {"staleness 64 GB": f"{64 * iteration:.1f}", "reference": args.reference_num_envs}

    measured = (RESULTS / "throughput.md").read_text()
    speeds = pd.read_csv(RESULTS / "throughput.csv").set_index("name")
    found["ewma time"] = f"{speeds['time_over_base']['ppo_ewma']:.2f}"
    fraction = speeds["rollout_fraction"]
    found |= {"in passes from": f"{fraction.min():.0%}", "in passes to": f"{fraction.max():.0%}"}
    drift = re.search(r"matrix multiplication [\d,]+ \((\d+) to (\d+)\) GFLOP/s", measured)
    found |= {"gemm from": drift[1], "gemm to": drift[2]}
    found["procgen alone"] = re.search(r"environments alone ([\d,]+) \(", measured)[1]
    for envs, rate in re.findall(r"(\d+) environments (\d+) steps/s", measured):
        found[f"ppo speed {envs}"] = rate
    model = (RESULTS / "throughput_model.md").read_text()
    for script in ("ppo", "ppg_ewma"):
        rate = int(re.search(rf"\| {script} \| RTX 4090 \| ([\d,]+)", model)[1].replace(",", ""))
        found[f"{script} on a 4090"] = f"{round(rate, 1 - len(str(rate)) + 1):,}"
        found[f"{script} hours on a 4090"] = f"{args.total_timesteps / rate / 3600:.0f}"
    profile = (RESULTS / "throughput_profile.md").read_text()
    found["pass speed"] = re.search(r"the whole pass (\d+%) of it", profile)[1]
    found["product speed"] = re.search(r"dense layers alone: (\d+%)", profile)[1]
    gradients = re.search(r"convolution, gradient \| [\d.]+ \| (\d+%) \| \d+ \| (\d+%)", profile)
    found |= {"gradient share": gradients[1], "gradient speed": gradients[2]}
    return {name: str(x) for name, x in found.items()}


def updated(text):
    text = BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[4]}", text)
    return NUMBER.sub(lambda found: f"{numbers()[found[2]]}<!-- {found[2]} -->", text)


if __name__ == "__main__":
    os.chdir(ROOT)
    for path in map(Path, FILES):
        before = path.read_text()
        path.write_text(updated(before))
        print(f"{path.relative_to(ROOT)}: {'updated' if path.read_text() != before else 'as it was'}")
