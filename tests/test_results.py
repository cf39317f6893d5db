"""The numbers in the README, computed again from the files in results/."""

import json
import re
import sys

import imageio.v3 as iio
import numpy as np
import pandas as pd
import pytest
from helpers import ROOT, parse

sys.path.insert(0, str(ROOT / "experiments"))
import throughput  # noqa: E402
from catalogue import runs_of  # noqa: E402
from curves import Results  # noqa: E402
from figures import caption_of  # noqa: E402
from report import apart, overview, report  # noqa: E402
from stats import mean_difference, stratified_interval, van_elteren  # noqa: E402

RESULTS = ROOT / "results"
README = (ROOT / "README.md").read_text()


def section(title):
    """A section of the README, on one line."""
    return " ".join(README.split(f"## {title}\n")[1].split("\n## ")[0].split())


SECTION = section("It learns")


def at(curve, step):
    """The return at a step, between the two nearest points."""
    curve = curve.sort_values("step")
    before, after = curve[curve["step"] <= step].iloc[-1], curve[curve["step"] >= step].iloc[0]
    share = 0 if before["step"] == after["step"] else (step - before["step"]) / (after["step"] - before["step"])
    return before["return"] + share * (after["return"] - before["return"])


def test_the_table_of_returns():
    learning, authors = (pd.read_csv(RESULTS / f"{name}.csv", comment="#") for name in ("learning", "authors_ppo"))
    full = learning[learning["label"] == "PPO, full size"]
    for name, table, runs in [("`ppo.py`, full size, 3 seeds", full, 3), ("the authors' PPO, 2 seeds", authors, 2)]:
        curves = [group for _, group in table.groupby("run")]
        assert len(curves) == runs
        cells = [" / ".join(f"{at(curve, step):.1f}" for curve in curves) for step in (10e3, 40e3, 80e3, 120e3)]
        assert f"| {name} | {' | '.join(cells)} |" in README


def test_ewma_against_its_base():
    learning = pd.read_csv(RESULTS / "learning.csv")
    ends = [
        " / ".join(
            f"{curve['return'].iloc[-1]:.2f}" for _, curve in learning[learning["label"] == label].groupby("run")
        )
        for label in ("PPO-EWMA, small", "PPO, small")
    ]
    assert f"PPO-EWMA ends below PPO, at {ends[0]} against {ends[1]}." in SECTION


def test_every_algorithm_has_three_seeds_and_learns():
    learning = pd.read_csv(RESULTS / "learning.csv")
    for _, runs in learning.groupby("label"):
        assert runs["run"].nunique() == 3
        for _, curve in runs.groupby("run"):
            assert curve["return"].iloc[-10:].mean() > 5 + curve["return"].iloc[:5].mean()


def test_the_returns_in_the_text():
    played = json.loads((RESULTS / "play.json").read_text())
    mean, interval = {}, {}
    for result in played["results"]:
        which = result["policy"], result["levels"]
        returns = [episode["return"] for episode in result["episodes"]]
        assert len(returns) == 100
        mean[which] = np.mean(returns)
        interval[which] = f"{result['return']['low']:.1f} to {result['return']['high']:.1f}"
    agent, random = ("agent", "training"), ("random", "training")
    assert f"a mean return of {mean[agent]:.1f} over 100 episodes" in SECTION
    assert f"interval of {interval[agent]}" in SECTION
    assert f"the random policy: {mean[random]:.1f} ({interval[random]})" in SECTION
    assert f"{mean['agent', 'unseen']:.1f} against {mean['random', 'unseen']:.1f}" in SECTION


def test_the_speeds():
    speeds = pd.read_csv(RESULTS / "throughput.csv").set_index("name", drop=False)
    printed = (RESULTS / "throughput.md").read_text()
    table = printed.split("\n\n")[1]
    assert table in README
    numbers = [re.findall(r"[\d.]+", text) for text in (table, throughput.markdown(speeds.to_dict("records")))]
    printed_numbers, of_csv = (list(map(float, words)) for words in numbers)
    assert of_csv == pytest.approx(printed_numbers, rel=0.01)  # the CSV has four digits, rounded once more here
    text, rollout = section("Speed"), speeds["rollout_fraction"]
    assert f"A rollout spends {rollout.min():.0%} to {rollout.max():.0%} of its time in forward passes" in text
    assert f"costs {speeds['time_over_base']['ppo_ewma']:.2f} times as much as PPO;" in text
    assert speeds["time_over_base"]["ppg_ewma"] == pytest.approx(1, abs=0.005)
    drift = re.search(r"matrix multiplication [\d,]+ \((\d+ to \d+)\) GFLOP/s", printed)[1]
    assert f"speed drifts: {drift} GFLOP/s" in text
    alone = re.search(r"environments alone ([\d,]+) \(", printed)[1]
    assert f"Procgen alone would make {alone} steps/s" in text
    rates = dict(re.findall(r"(\d+) environments (\d+) steps/s", printed))
    assert f"With 16, 64 and 256 environments PPO makes {rates['16']}, {rates['64']} and {rates['256']} steps/s" in text


def test_where_the_time_goes():
    profile, text = (RESULTS / "throughput_profile.md").read_text(), section("Speed")
    whole = re.search(r"the whole pass (\d+%) of it", profile)[1]
    products = re.search(r"dense layers alone: (\d+%)", profile)[1]
    share, speed = re.search(r"convolution, gradient \| [\d.]+ \| (\d+%) \| \d+ \| (\d+%)", profile).groups()
    assert f"reaches {whole} of the matrix multiplication's speed" in text
    assert f"its products alone would reach {products}" in text
    assert f"gradients take {share} of its time, at {speed} of that speed" in text


@pytest.mark.parametrize("name, runs", [("staleness", 48), ("ewma", 45), ("batch-size", 72)])
def test_an_experiment_is_complete_and_its_report_follows_from_its_tables(name, runs):
    results = Results.of_csv(name, RESULTS)
    assert results.finished == len(results.runs) == runs
    assert report(results, caption_of(results)) == (RESULTS / f"{name}.md").read_text()
    assert overview(results, "final_return") in README


def pooled(results, pairs, column):
    """Of several pairs of settings, and of all games, together: mean difference, its interval, and p."""
    strata = []
    for first, second in pairs:
        first, second = (results.final(*setting, column) for setting in (first, second))
        strata += [(list(first[game].values()), list(second[game].values())) for game in results.games]
    samples = [np.array(x) for x, _ in strata] + [np.array(y) for _, y in strata]
    return mean_difference(*samples), stratified_interval(samples, mean_difference), van_elteren(strata).p


def at_all_ages(results, first, second, column):
    ages = [age for age in results.values(first) if age != "0"]
    effect, (low, high), p = pooled(results, [((first, age), (second, age)) for age in ages], column)
    return f"{effect:.1f}", f"{low:.1f} to {high:.1f}", f"{p:.2g}"


ABLATIONS = ["no-step-size", "no-adv-norm", "no-ewma-adjustment", "no-ewma"]


def test_the_sentences_on_batch_size():
    text, results = section("The paper's claims, on two cores"), Results.of_csv("batch-size", RESULTS)
    assert f"{len(results.runs)} runs, {results.hours:.1f} hours of one core" in text
    rows = results.rows.astype({"value": int})
    settings = rows.groupby(["variant", "value"])
    final, whole = settings["final_return"].mean(), settings["mean_return"].mean()
    steps = [run.flags["num-envs"] * run.flags["num-steps"] for run in results.runs if run.variant == "all"]
    assert f"iterations of {max(steps):,} to {min(steps)} steps" in text
    total = results.runs[0].flags["total-timesteps"]
    assert f"with {8 * total // max(steps)} to {8 * total // min(steps):,} optimiser steps" in text  # 8 minibatches

    distances = apart(results, ["all", *ABLATIONS])[1]
    assert distances in README
    p = {row.split(" | ")[0]: float(row.split(" | ")[2]) for row in distances.replace("| ", "", 1).split("\n| ")[2:]}
    assert p["all"] > 0.5 and f"no difference is to be seen (p = {p['all']:.1g})" in text
    assert max(p["no-step-size"], p["no-adv-norm"]) < 0.05 < min(p["no-ewma-adjustment"], p["no-ewma"])
    spread = {x: rows.groupby(["seed", "variant"])[f"{x}_return"].agg(np.ptp).unstack() for x in ("final", "mean")}
    assert len(results.seeds) == 3 and "in each of the 3 seeds the sizes are nearer to each other" in text
    assert all(spread["final"]["all"] < spread["final"][ABLATIONS].min(axis=1))
    later = rows[rows["seed"] > 1].groupby(["variant", "value"])["final_return"].mean().groupby("variant").agg(np.ptp)
    others = f"{later[ABLATIONS].min():.1f} to {later[ABLATIONS].max():.1f}"
    assert f"in the other two alone the sizes are {later['all']:.1f} apart, against {others}." in text
    nearer = (spread["mean"][ABLATIONS].lt(spread["mean"]["all"], axis=0)).sum()
    assert (
        nearer["no-step-size"] == nearer.sum() == 1 and "in one seed the sizes are nearer without the adjusted" in text
    )
    behind = [f"{1 - whole['all', size] / whole['all', 64]:.0%}" for size in (4, 1)]
    effect, (low, high), _ = pooled(results, [(("all", "64"), ("all", "1"))], "mean_return")
    less = f"{effect:.1f}, 95% interval {low:.1f} to {high:.1f}"
    assert f"4 and 1 environments are {behind[0]} and {behind[1]} below 64 (64 minus 1: {less})" in text

    ends = f"{final['no-adv-norm', 1]:.1f} and {final['no-step-size', 1]:.1f}, against {final['all', 1]:.1f} with all"
    assert f"It ends at {ends} adjustments." in text
    clipped, swing = settings["clip_fraction"].median(), settings["advantage_swing"].median()
    ratios = (
        f"{clipped['all', 64]:.0%} of the ratios are clipped with 64 environments, {clipped['all', 1]:.0%} with one"
    )
    assert ratios in text
    assert f"down to {clipped['no-ewma-adjustment', 1]:.0%} of clipped ratios" in text
    gains = []
    for variant in ("no-ewma-adjustment", "no-ewma"):
        effect, (low, high), _ = pooled(results, [((variant, "1"), (variant, "64"))], "final_return")
        gains.append(f"{effect:.1f} ({low:.1f} to {high:.1f})")
    ends = f"{final['no-ewma-adjustment', 1]:.1f} and {final['no-ewma', 1]:.1f}"
    assert f"One environment ends at {ends}, above the 64 by {gains[0]} and {gains[1]}." in text
    four = rows[rows["value"] == 4].set_index(["variant", "seed"])["final_return"]
    for variant in ("no-ewma-adjustment", "no-ewma"):
        assert (four[variant] < 2.5).sum() == 1 and (four[variant] > 6).sum() == 2  # "one run of 3 hardly learns"

    coms = [run.flags["prox-com"] for run in results.runs if (run.variant, run.seed) == ("same-age", 1)]
    assert f"`--prox-com` {coms[0]:g}, {coms[1]:g} and {coms[2]:g}) end at " in text
    young, own = ([f"{final[x, size]:.1f}" for size in (16, 4, 1)] for x in ("same-age", "no-ewma-adjustment"))
    effect, (low, high), _ = pooled(results, [(("no-ewma-adjustment", "1"), ("same-age", "1"))], "final_return")
    ends = "{}, {} and {}, where 16, 4 and 1 environments end at {}, {} and {}; the last two".format(*young, *own)
    assert f"end at {ends} are {effect:.1f} apart ({low:.1f} to {high:.1f})." in text

    ends = f"{final['ppg-ewma', 64]:.1f} with 64 environments and at {final['ppg-ewma', 4]:.1f} with 4"
    assert f"**PPG-EWMA** ends at {ends}." in text
    effect, (low, high), _ = pooled(results, [(("ppg-ewma", "4"), ("ppg-ewma-no-n-pi", "4"))], "final_return")
    less = f"{final['ppg-ewma-no-n-pi', 4]:.1f}, lower by {effect:.1f} ({low:.1f} to {high:.1f})"
    assert f"4 environments end at {less}, with phases of 2 iterations" in text and low < 0 < high

    assert f"swing by a factor of {swing['no-adv-norm', 1]:.0f}," in text
    assert f"too high, {clipped['no-step-size', 1]:.0%} of the ratios are clipped, which is usual" in text
    assert 0.01 < clipped["no-step-size", 1] < 0.1
    assert f"Without EWMA about {clipped['no-ewma', 1]:.1%} are clipped; in the one run below 0.5%" in text
    without = rows[(rows["variant"] == "no-ewma") & (rows["value"] == 1)]
    assert (without["clip_fraction"] < 0.005).sum() == 1 and final["no-ewma", 1] > final["all", 1]


def test_the_time_that_all_runs_take():
    text = section("The paper's claims, on two cores")
    results = [Results.of_csv(name, RESULTS) for name in ("staleness", "batch-size", "ewma")]
    runs, hours = sum(len(x.runs) for x in results), sum(x.hours for x in results)
    assert f"All {runs} runs take {hours:.1f} hours of one core, so {hours / 2:.1f} hours on two." in text


def mean_age(epochs, minibatches):
    """Of PPO's old policy, in optimiser steps, over those of an iteration."""
    return np.mean(np.arange(epochs * minibatches))


def test_the_sentences_on_ewma():
    text, results = section("The paper's claims, on two cores"), Results.of_csv("ewma", RESULTS)
    assert f"{len(results.runs)} runs, {results.hours:.1f} hours of one core" in text
    numbers = {}
    for base in ("ppo", "ppg"):
        for column in ("final_normalised_return", "mean_normalised_return"):
            pair = ("algorithms", f"{base}-ewma"), ("algorithms", base)
            effect, (low, high), p = pooled(results, [pair], column)
            numbers[base, column[:4]] = f"{effect:.3f}", f"{low:.3f} to {high:.3f}"
            if column[:4] == "mean":
                assert f"by the paper's test p = {2 * min(p, 1 - p):.1g} for both, two-sided" in text
            assert (low < 0 < high) == (column[:4] == "fina")  # "no gain is to be seen", "EWMA is behind"
    (ppo, ppo_range), (ppg, ppg_range) = numbers["ppo", "fina"], numbers["ppg", "fina"]
    assert f"PPO-EWMA minus PPO is {ppo} (95% interval {ppo_range}), PPG-EWMA minus PPG is {ppg} ({ppg_range})." in text
    (ppo, ppo_range), (ppg, ppg_range) = numbers["ppo", "mean"], numbers["ppg", "mean"]
    assert f"the differences are {ppo} ({ppo_range}) and {ppg} ({ppg_range}), and negative on each game." in text
    fresh = Results.of_csv("staleness", RESULTS).final("decoupled", "0", "final_return")["starpilot"].values()
    assert f"Those runs, {np.mean([*fresh]):.2f} ± {np.std([*fresh], ddof=1):.2f}, were made on another." in text
    rows = results.all_rows[results.all_rows["variant"] == "algorithms"]
    means = rows.groupby(["game", "value"])["mean_return"].mean().unstack()
    assert (means["ppo-ewma"] < means["ppo"]).all() and (means["ppg-ewma"] < means["ppg"]).all()

    said = []
    for base in ("ppo", "ppo-ewma"):
        for column in ("final_normalised_return", "mean_normalised_return"):
            pair = ("as-old-as-ppo", "ppo-ewma"), ("algorithms", base)
            effect, (low, high), _ = pooled(results, [pair], column)
            said.append(f"{effect:.3f} ({low:.3f} to {high:.3f})")
            assert (low < 0 < high) == (base == "ppo")  # "is level with PPO", "is above PPO-EWMA"
    assert f"is level with PPO: {said[0]} at the end, {said[1]} over the learning curve." in text
    assert f"It is above PPO-EWMA as it is by {said[2]} and {said[3]}." in text

    args, _ = parse("ppo_ewma")
    ours = results.runs[0].flags
    assert f"the old policy is {mean_age(args.epochs, args.num_minibatches)} optimiser steps old in the mean" in text
    assert f"the average's {args.prox_com:.0f} is younger" in text
    assert f"with one epoch it is {mean_age(ours['epochs'], args.num_minibatches)}," in text
    assert results.runs[0].script == "ppo.py" and "num-minibatches" not in ours
    ages = {run.flags["prox-com"] for run in results.runs if run.variant == "as-old-as-ppo"}
    assert ages == {mean_age(ours["epochs"], args.num_minibatches)}


def test_the_sentences_on_staleness():
    text, results = section("The paper's claims, on two cores"), Results.of_csv("staleness", RESULTS)
    assert f"{len(results.runs)} runs, {results.hours:.1f} hours of one core" in text
    runs = results.all_rows.astype({"value": int}).set_index(["variant", "value", "seed"]).sort_index()
    final, whole, ages = runs["final_return"], runs["mean_return"], (1, 2, 4, 8, 16)

    random = next(
        result["return"]["mean"]
        for result in json.loads((RESULTS / "play.json").read_text())["results"]
        if (result["policy"], result["levels"]) == ("random", "training")
    )
    assert f"(the random policy has {random:.1f})" in text
    assert (final["recent"].loc[[8, 16]] < 0.05).all() and "all 6 runs end at a return of 0 " in text
    assert (final["recent", 4] < random).sum() == 1 and "with 4 one of 3." in text
    assert final["behavior"].min() > random

    clipped = runs["clip_fraction"].groupby(["variant", "value"]).median()
    low, high, fresh = clipped["behavior"].min(), clipped["behavior"].max(), clipped["decoupled", 0]
    assert f"{low:.0%} to {high:.0%} of the ratios are clipped, with fresh data {fresh:.0%}" in text
    assert all(whole["decoupled", age].mean() > whole["behavior", age].mean() for age in ages)
    apart = [age for age in ages if whole["decoupled", age].min() > whole["behavior", age].max()]
    assert apart == [2, 4, 8, 16] and "from a staleness of 2 on, every run is below every decoupled one" in text
    effect, _, p = at_all_ages(results, "decoupled", "behavior", "mean_return")
    assert f"at every staleness, by {effect} in the mean" in text
    assert f"decoupled above behaviour over the learning curve, p = {p}." in text and float(p) < 0.001 / 12

    assert all(whole["decoupled", age].mean() > whole["recent", age].mean() for age in (4, 8, 16))
    curves = results.all_points.astype({"value": int})
    curves = curves[(curves["variant"] == "decoupled") & (curves["value"] >= 8)].groupby(["value", "seed"])["return"]
    highest = curves.max()
    lowest = curves.apply(lambda curve: curve.loc[curve.idxmax() :].min())
    fallen = f"{(lowest < 0.5).sum()} of the {len(lowest)} runs fall below 0.5"
    assert f"after a return of {highest.min():.1f} to {highest.max():.1f}, {fallen}" in text
    effect, interval, p_end = at_all_ages(results, "decoupled", "recent", "final_return")
    assert f"above the recent policy by {effect} (95% interval {interval})" in text
    p_whole = at_all_ages(results, "decoupled", "recent", "mean_return")[2]
    assert f"Decoupled against recent: p = {p_end} at the end, {p_whole} over the learning curve." in text
    effect, interval, _ = at_all_ages(results, "decoupled", "behavior", "final_return")
    assert f"the behaviour policy ({effect}, {interval})" in text

    mean = final.groupby(["variant", "value"]).mean()["decoupled"]
    lost = [f"{1 - mean[age] / mean[0]:.0%}" for age in (1, 2, 4)]
    assert f"it has lost {lost[0]}, {lost[1]} and {lost[2]} of its return" in text
    ours, paper = results.runs[0].flags, runs_of("staleness", "paper")[0].flags
    assert f"{paper['total-timesteps'] / ours['total-timesteps']:.0f} times shorter" in text
    iteration, papers = (x["num-envs"] * x["num-steps"] for x in (ours, paper))
    share, papers_share = 8 * iteration / ours["total-timesteps"], 8 * papers / paper["total-timesteps"]
    assert f"8 iterations are {share:.0%} of our run, in the paper {papers_share:.1%}" in text


def test_the_clip_is_small_and_moves():
    assert (RESULTS / "play.gif").stat().st_size < 2e6
    frames = iio.imread(RESULTS / "play.gif")
    assert len(frames) > 20 and frames.shape[1:3] == (576, 576)
    assert (frames[0] != frames[-1]).mean() > 0.1


def test_what_the_readme_links_to_is_there():
    for path in re.findall(r"(?:\]\(|src=\")((?!http|#)[^)\"]+)", README):
        assert (ROOT / path).exists(), path
