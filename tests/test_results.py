"""The numbers in the README, computed again from the files in results/."""

import json
import re
import sys

import imageio.v3 as iio
import numpy as np
import pandas as pd
import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
import throughput  # noqa: E402

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


def test_the_clip_is_small_and_moves():
    assert (RESULTS / "play.gif").stat().st_size < 2e6
    frames = iio.imread(RESULTS / "play.gif")
    assert len(frames) > 20 and frames.shape[1:3] == (576, 576)
    assert (frames[0] != frames[-1]).mean() > 0.1


def test_what_the_readme_links_to_is_there():
    for path in re.findall(r"(?:\]\(|src=\")((?!http|#)[^)\"]+)", README):
        assert (ROOT / path).exists(), path
