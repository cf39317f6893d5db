"""The Markdown files: numbers, tables, commands, names and links are right. Words are free.

What is quoted is marked in the text; update_readme.py says how, and brings it up to date. Numbers without a mark are
those listed in FREE below.
"""

import itertools
import json
import re
import shlex
import subprocess
import sys
from collections import Counter

import imageio.v3 as iio
import numpy as np
import pandas as pd
import pytest

import update_readme
from helpers import PPG, ROOT, SCRIPTS, checkpoint, command_line, curves, load, tiny, train

sys.path.insert(0, str(ROOT / "experiments"))
import throughput  # noqa: E402
from lab.inference import told_apart, within  # noqa: E402
from lab.reporting import report  # noqa: E402
from lab.runs import Results  # noqa: E402

RESULTS = ROOT / "results"
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("[!.]*/*.md")}
PAGES |= {path.name: path.read_text() for path in ROOT.glob("*.md")}
README = PAGES["README.md"]
COMMENT = re.compile(r"<!--.*?-->", re.S)
FENCE = re.compile(r"^```.*?^```$", re.S | re.M)

# Numbers that do not come from results: settings, versions, sections of the paper. By how often a page has them.
FREE = {
    "README.md": {
        1: "3.10 3.11 3.12 3.2 5.1 6.2 15 4090 90%",
        2: "16 256 95%",
        3: "1 3",
        4: "100",
        5: "8",
        6: "2",
        7: "4",
        12: "64",
    },
    "REFERENCE.md": {
        1: "2 10 129 130 143 1% 10%",
        2: "0 1",
        3: "100",
    },
    "results/README.md": {
        1: "0.0004 0.0005 1.5 2.5 3.1 5.5 6 7 18 40 50 65 100 128 400 8,192 16,384 200,000 1% 5%",
        2: "0 3 20",
        3: "90%",
        4: "32 256 95%",
        5: "2 5",
        16: "1",
        21: "8",
        24: "16",
        29: "4",
        38: "64",
    },
    "results/SMALL_ENOUGH.md": {
        1: "3.3 20 49 100 1,024 25,600 102,400 153,600 95%",
        2: "128 500 90%",
        3: "1",
        8: "16",
        12: "4",
        13: "256",
        23: "64",
    },
    "results/SPEED.md": {
        1: "1.023 1.03 1.19 1.3 1.8 3 16",
        2: "64 256",
    },
    "results/FIRST.md": {
        1: "6.2 13 95%",
        2: "0 3",
        4: "2 8",
        5: "16",
        6: "1",
        8: "4",
        9: "64",
    },
    "experiments/README.md": {
        1: "2 6 7 9 10 13 15 17 20 50",
        2: "3 4 6.2 16 18 100",
        3: "0 256",
        4: "5 64",
        5: "1",
    },
}


# Numbers and tables


@pytest.mark.parametrize("path", update_readme.FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_quoted_is_up_to_date(path):
    text = path.read_text()
    assert text.count("<!-- quote: ") == len(update_readme.BLOCK.findall(text))
    assert text == update_readme.updated(text), "python tests/update_readme.py mends it"


def unmarked_numbers(text):
    """Numbers outside of marks, code and addresses."""
    text = update_readme.BLOCK.sub("", text)
    text = update_readme.NUMBER.sub("", text)
    for pattern in (COMMENT, FENCE, re.compile(r"\]\([^)]*\)"), re.compile(r"`[^`\n]+`"), re.compile(r"<[^>]+>")):
        text = pattern.sub(" ", text)
    text = re.sub(r"^\d+\. ", "", text, flags=re.M)  # of a list
    return Counter(re.findall(r"(?<![\w.])\d[\d,.]*(?<![,.])%?", text))


@pytest.mark.parametrize("page", FREE)
def test_every_other_number_is_a_known_one(page):
    """If it comes from results, mark it; if not, list it in FREE."""
    found = unmarked_numbers(PAGES[page])
    listed = Counter({number: times for times, line in FREE[page].items() for number in line.split()})
    assert found == listed, f"not listed: {dict(found - listed)}; not found: {dict(listed - found)}"


@pytest.mark.parametrize(
    "name, runs",
    [("staleness", 48), ("ewma", 45), ("batch-size", 72)]
    + [("minatar/batch-size", 460), ("minatar/staleness", 320), ("minatar/ewma", 120)]
    + [
        ("minatar/linear-lr", 180),
        ("minatar/adam-betas", 260),
        ("minatar-ppg/batch-size", 125),
        ("minatar-ppg/com-vs-kl", 48),
    ],
)
def test_an_experiment_is_complete_and_its_report_follows_from_its_tables(name, runs):
    path = RESULTS / f"{name}.md"
    results = Results.of_csv(path.stem, path.parent)
    assert results.finished == len(results.runs) == runs
    assert report(results) == path.read_text()


def test_the_table_of_learning_follows_from_the_curves():
    rows = [row.split(" | ") for row in (RESULTS / "learning.md").read_text().replace("| ", "", 1).splitlines()[2:]]
    curves_of = pd.read_csv(RESULTS / "learning.csv"), pd.read_csv(RESULTS / "authors_ppo.csv", comment="#")
    for name, *cells in rows:
        label = name.removeprefix("| ")
        table = curves_of[0][curves_of[0]["label"] == label] if "authors" not in label else curves_of[1]
        runs = [run.sort_values("step") for _, run in table.groupby("run")]
        assert len(runs) == (2 if "authors" in label else 3)
        for step, cell in zip((10e3, 40e3, 80e3, 120e3), cells, strict=False):
            if cell.strip():
                mine = [np.interp(step, run["step"], run["return"]) for run in runs]
                assert [float(x) for x in cell.split(" / ")] == pytest.approx(mine, abs=0.051)


def test_every_algorithm_has_three_seeds_and_learns():
    learning = pd.read_csv(RESULTS / "learning.csv")
    for _, runs in learning.groupby("label"):
        assert runs["run"].nunique() == 3
        for _, curve in runs.groupby("run"):
            assert curve["return"].iloc[-10:].mean() > 5 + curve["return"].iloc[:5].mean()


def test_the_table_of_speeds_follows_from_its_csv():
    speeds = pd.read_csv(RESULTS / "throughput.csv")
    table = update_readme.speed()
    numbers = [re.findall(r"[\d.]+", text) for text in (table, throughput.markdown(speeds.to_dict("records")))]
    printed, of_csv = (list(map(float, words)) for words in numbers)
    assert of_csv == pytest.approx(printed, rel=0.01)  # the CSV has four digits, rounded once more here
    assert speeds.set_index("name")["time_over_base"]["ppg_ewma"] == pytest.approx(1, abs=0.005)


# What the pages of results/ say in words about them. If one of these fails, read that page again.


def test_the_words_on_batch_size():
    results = Results.of_csv("batch-size", RESULTS)
    rows = results.rows.astype({"value": int})
    ablations = ["no-step-size", "no-adv-norm", "no-ewma-adjustment", "no-ewma"]
    p = {name: float(update_readme.numbers()[f"p {name}"]) for name in ["all", *ablations]}
    assert p["all"] > 0.5  # end alike
    assert max(p["no-step-size"], p["no-adv-norm"]) < 0.05 < min(p["no-ewma-adjustment"], p["no-ewma"])
    spread = rows.groupby(["seed", "variant"])["final_return"].agg(np.ptp).unstack()
    assert len(spread) == 3 and all(spread["all"] < spread[ablations].min(axis=1))  # nearer in each seed
    final = rows.groupby(["variant", "value"])["final_return"].mean()
    assert final["no-adv-norm", 1] < 1 < final["no-step-size", 1] < final["all", 1]  # hardly learns, suffers
    for variant in ("no-ewma-adjustment", "no-ewma"):  # learn more; one run of three with 4 environments does not
        assert final[variant, 1] > final["all", 1] + 2
        four = rows[(rows["variant"] == variant) & (rows["value"] == 4)]["final_return"]
        assert (four < 2.5).sum() == 1 and (four > 6).sum() == 2
    assert final["no-ewma-adjustment", 1] > final["same-age", 1] + 5
    assert abs(final["ppg-ewma", 64] - final["ppg-ewma", 4]) < 0.5
    clipped = rows[rows["value"] == 1].set_index("variant")["clip_fraction"]
    assert 0.01 < clipped["no-step-size"].median() < 0.1 and (clipped["no-ewma"] < 0.005).sum() == 1  # the advice


def test_the_words_on_minatar():
    results = Results.of_csv("batch-size", RESULTS / "minatar")
    every = [results.final("all", size, "final_return") for size in ("64", "16", "8", "4", "1")]
    assert within(every[:-1]) < every[0].mean() / 5 < within(every)  # alike; with one environment, not
    assert told_apart(every) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    p = {row.split(" | ")[0][2:]: row.split(" | ")[3][:-2] for row in update_readme.ranges("minatar").splitlines()[3:]}
    assert {name for name, x in p.items() if float(x) < 0.05} == {"no-step-size", "no-ewma-adjustment", "no-ewma"}
    one = results.rows[results.rows["value"] == "1"].groupby("variant")["final_return"].mean() / every[0].mean()
    assert one["no-step-size"] < 0.05 and 0.45 < one["no-ewma-adjustment"] < 0.55 and 0.3 < one["no-ewma"] < 0.5


def test_the_words_on_the_papers_algorithm():
    results = Results.of_csv("batch-size", RESULTS / "minatar-ppg")
    sizes, agents = ("64", "16", "4", "1"), update_readme.fresh_of_sweep("minatar-ppg/fresh")
    every = [results.final("all", size, "final_return") for size in sizes]
    assert [len(x) for x in every] == [10] * 4 and list(agents) == [int(size) for size in sizes]
    for found in (every, [rows["return"] for rows in agents.values()]):
        assert within(found) < found[0].mean() / 5 and told_apart(found) == []  # alike
    assert told_apart([results.final("all", size, "mean_return") for size in sizes]) == []
    p = {
        row.split(" | ")[0][2:]: row.split(" | ")[3][:-2]
        for row in update_readme.ranges("minatar-ppg").splitlines()[4:]
    }
    assert len(p) == 5 and {name for name, x in p.items() if float(x) > 0.05} == {"no-adv-norm"}
    final = results.rows.groupby(["variant", "value"])["final_return"].mean()
    assert final["no-step-size", "1"] < update_readme.random_return("space_invaders")
    clipped = results.rows.groupby(["variant", "value"])["clip_fraction"].median()
    assert clipped["no-ewma", "1"] < 0.01
    found = {name: float(x) for name, x in update_readme.more_numbers().items() if "%" not in str(x)}
    assert found["ppg twenty within"] < found["ppo less at 1"] and found["ppg gain from"] < 0 < found["ppg gain to"]
    assert told_apart([np.concatenate(update_readme.more_of(size)) for size in sizes]) == []
    age = found["ppg age all adjustments"], found["ppg age the same, no restarts"], found["ppg age phase not adjusted"]
    assert age[0] - age[1] < 0.3 * (age[0] - age[2])  # most of the harm


def test_the_words_on_procgen_so_far():
    runs = Results.of_csv("batch-size", RESULTS / "small")
    rows = runs.rows.query("finished").astype({"value": int})
    final = rows.set_index(["variant", "value", "seed"])["final_return"].sort_index()
    number = rows.query("value != 64").groupby(["variant", "value"])["seed"].count()  # two seeds; of 1, one; one
    assert number.unstack().loc[["no-step-size", "no-adv-norm", "no-ewma-adjustment"]].to_numpy().tolist() == [
        [2, 2, 2],
        [2, 2, 2],
        [1, 2, 2],
    ]
    assert number.unstack().loc[["no-ewma", "no-n-pi"]].to_numpy().tolist() == [[1] * 3] * 2
    for seed in (1, 2):
        others = [final["no-step-size", size, seed] for size in (16, 4)] + [final["all", 64, seed]]
        assert final["no-step-size", 1, seed] < min(others) - 4
        assert final["no-ewma-adjustment", 4, seed] < final["all", 4, seed] - 4
        for cell in (("no-ewma-adjustment", 16, seed), ("no-step-size", 4, seed)):
            assert final[cell] > final["all", cell[1], seed]
    assert final["no-ewma-adjustment", 1, 1] < final["all", 64, 1]
    final = final.xs(1, level="seed")
    assert (final["no-ewma"] < 1.1).sum() == 3 and len(final["no-ewma"]) == 4
    every = {size: runs.final("all", size, "final_return").groupby("seed").mean() for size in ("64", "16", "4", "1")}
    assert [len(x) for x in every.values()] == [5] * 4 and min(x.min() for x in every.values()) > 6  # learns
    assert told_apart([*every.values()]) == [] and within([*every.values()]) > every["64"].mean() / 5  # cannot tell
    assert (every["1"] < every["64"]).tolist() == [True] * 4 + [False]
    for column in ("final_return", "mean_return"):
        assert min(every, key=lambda size: runs.final("all", size, column).mean()) == "1"
    points = runs.all_points.query("variant == 'all' and `return` > 2").groupby(["value", "seed"])["step"].min()
    assert (points["1"] > points["64"].max()).tolist() == [True, False, True, True, False]  # starts late
    one = runs.all_points.query("variant == 'all' and value == '1' and seed == 3").set_index("step")["return"]
    assert one[one.index < 200_000].max() < 1.6 and one.iloc[-1] > 6


def test_the_words_on_stale_data_on_procgen():
    runs = Results.of_csv("staleness", RESULTS / "small")
    final = [runs.final("decoupled", age, "final_return").mean() for age in runs.values("decoupled")]
    assert len(final) == 6 and final == sorted(final, reverse=True) and final[-1] < 0.1
    whole = [runs.final("decoupled", age, "mean_return").mean() for age in runs.values("decoupled")]
    assert whole == sorted(whole, reverse=True)
    returns = runs.all_points.set_index("value")["return"]
    for curve in (returns["4"].to_numpy(), returns["8"].to_numpy()):  # collapses, and comes back
        lowest = 10 + curve[10:-5].argmin()
        assert curve[lowest] < 1 < 5 < min(curve[:lowest].max(), curve[lowest:].max())
    assert runs.runs[0].flags["learning-rate"] == 2.5e-4
    minibatch = runs.runs[0].flags["num-envs"] * runs.runs[0].flags["num-steps"] // 8
    assert minibatch == 32 and 5e-4 * (minibatch / 8192) ** 0.5 == pytest.approx(3.1e-5, rel=0.01)


def cells_of(table):
    """A table's rows, each a name and numbers or intervals."""
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    return {name: [tuple(map(float, cell.split(" to "))) for cell in cells] for name, *cells in rows}


def test_the_words_on_the_step_size_rule():
    rows = cells_of(update_readme.linear_differences())
    below = [row[0][0] for row in rows.values()]
    assert list(rows) == ["16", "8", "4", "1"] and below == sorted(below, reverse=True) and below[0] < 0
    assert [size for size, row in rows.items() if row[1][1] < 0] == ["4", "1"]  # for 16 and 8 hard to tell


def test_the_words_on_betas():
    rows = cells_of(update_readme.betas_differences())
    assert list(rows) == ["none", "beta2", "beta1 and beta2"] and all(row[1][1] < 0 for row in rows.values())
    (none, *_), (beta2, *_), (both, *_) = ([end[0], whole[0]] for end, _, whole, _ in rows.values())
    assert abs(beta2 - none) < 0.5 and both < none - 1  # stays; is wider
    runs = update_readme.results("adam-betas", "minatar").points.query("value != '64'")
    curves = runs.groupby(["variant", "value", "step"])["return"].mean()["both"]
    early, late = (curves["1"] / curves["16"]).iloc[[4, -1]]
    assert early > 0.9 and late < 0.8  # keeps up, then falls behind


def test_the_words_on_age_against_penalty():
    rows = cells_of(update_readme.BLOCKS["grid shares"]())
    _, _, difference, penalty, age, steeper, corner = rows.values()
    assert difference[1][0] > 0 and difference[3][0] > 0 and corner[1][1] < 0 and steeper[1][1] < 0 > steeper[3][1]
    assert 0.15 < age[0][0] / penalty[0][0] < 0.35 and 0.4 < age[2][0] / penalty[2][0] < 0.6  # a quarter; half
    cells = update_readme.results("com-vs-kl", "minatar-ppg").rows.groupby(["value", "variant"])["final_return"].mean()
    assert cells["com-1", "kl-1"] - cells["com-1", "kl-8"] < 1.5 < 4 < cells["com-8", "kl-1"] - cells["com-8", "kl-8"]
    assert cells.idxmax() == ("com-2", "kl-1")


def test_the_words_on_where_invariance_ends():
    adam, sgd = (list(update_readme.ends(name).values()) for name in ("cartpole", "cartpole_sgd"))
    assert [len(x) for x in adam] == [20] * 5 and [len(x) for x in sgd] == [10] * 5
    assert told_apart(sgd) == [(0, 1), (0, 2), (0, 3), (0, 4)]  # 256, from each of the others
    assert len(told_apart(adam)) == 9 and (0, 1) not in told_apart(adam)  # all but 256 and 64
    assert np.all(np.diff([x.mean() for x in adam]) > 0)  # the smaller the higher
    for name in ("sgd", "adam"):
        rows = update_readme.fresh(f"cartpole_fresh_{name}")
        early, late = ([rows[step, size]["return"] for size in (256, 64, 16, 4, 1)] for step in (25_600, 102_400))
        assert [len(x) for x in early] == [len(x) for x in late] == [5, 5, 5, 5, 3]
        if name == "sgd":
            assert told_apart(early) == told_apart(late) == []
            assert min(late, key=np.mean) is late[0] and max(late, key=np.std) is late[0]
        else:
            for x in (early, late):
                assert np.all(np.diff([y.mean() for y in x]) > 0)  # the smaller the higher
            assert max(x.mean() for x in late[:2]) < min(x.mean() for x in late[2:]) and late[-1].mean() > 495
    largest, smallest = update_readme.ends("minatar/sgd").values()
    assert len(largest) == len(smallest) == 20 and abs(largest.mean() - smallest.mean()) < 0.05 * largest.mean()


def test_the_words_on_stale_data_on_minatar():
    runs = Results.of_csv("staleness", RESULTS / "minatar").all_rows.astype({"value": int})
    final, whole = (runs.groupby(["variant", "value"])[x].mean().unstack() for x in ("final_return", "mean_return"))
    lost = 1 - final / final.loc["decoupled", 0]
    assert lost.loc["decoupled", 1] < 0.02 and lost.loc["behavior", [1, 2, 4, 8, 16]].is_monotonic_increasing
    assert runs[runs["variant"] == "behavior"]["final_return"].min() > update_readme.random_return("space_invaders")
    above = whole.loc["decoupled"] - whole.loc["behavior"]  # faster; in the end level; with older data, below
    assert (above[[1, 2, 4]] > 0.3).all() and (above[[8, 16]] < -0.5).all()
    cells = [row.split(" | ") for row in (RESULTS / "minatar/staleness.md").read_text().splitlines()]
    interval = {row[0]: row[3].split(" to ") for row in reversed(cells) if row[1:2] and row[1].startswith("behavior ")}
    interval = {name[-2:].strip(): tuple(map(float, x)) for name, x in interval.items()}
    assert all(low < 0 < high for low, high in (interval[age] for age in "124"))
    assert all(high < 0 for _, high in (interval[age] for age in ("8", "16")))


def test_the_words_on_stale_data_and_smaller_steps():
    rows = [row.strip("| ").split(" | ") for row in update_readme.smaller_steps().splitlines()[2:]]
    cells = {(rate, age): (float(kl), float(whole[:-1]), interval) for rate, age, kl, _, _, whole, interval in rows}
    by_kl = [whole for _, whole, _ in sorted(cells.values())]
    assert all(later > earlier - 4 for earlier, later in itertools.pairwise(by_kl)) and by_kl[-1] > 50
    slow, slower, one, four = (cells[x] for x in [("1.25e-4", "8"), ("3.125e-5", "8"), ("5e-4", "1"), ("5e-4", "4")])
    assert 0.6 < slow[0] / four[0] < 1 and abs(slow[1] - four[1]) < 3 and slower[0] < one[0]  # nearly as far; less
    low, high = (float(x[:-1]) for x in slower[2].split(" to "))
    assert low < 0 < high and slower[1] < slow[1] / 2  # no clear loss
    half = pd.read_csv(RESULTS / "minatar/slower.csv").query("900_000 < step < 1_100_000")
    half = half.groupby(["label", "run"])["return"].mean().groupby("label").mean()
    assert half.max() < 1.1 * half.min()  # for a million steps, the same
    late = pd.read_csv(RESULTS / "minatar/slower.csv").query("step > 1_500_000")
    lowest = late.groupby(["label", "run"])["return"].min()
    assert lowest["recent, 8"].max() < 0.8 * lowest.drop("recent, 8").min()  # unstable
    numbers = update_readme.numbers()
    assert int(numbers["slow recent lost"][:-1]) > 80
    assert abs(int(numbers["slow lost"][:-1]) - int(numbers["slow behavior lost"][:-1])) < 5


def test_the_words_on_ewma_on_minatar():
    rows = [row.strip("| ").split(" | ") for row in update_readme.minatar_ewma_differences().splitlines()[2:]]
    for _, end, interval, whole, whole_interval in rows:  # a little below, level; chance can explain it
        assert float(end) < 0 and abs(float(whole)) < 0.5
        for text in (interval, whole_interval):
            low, high = map(float, text.split(" to "))
            assert low < 0 < high + 0.06
        assert float(interval.split(" to ")[1]) < 0.05 * 15  # a gain of more than a few percent


def test_the_words_on_stale_data():
    results = Results.of_csv("staleness", RESULTS)
    runs = results.all_rows.astype({"value": int}).set_index(["variant", "value", "seed"]).sort_index()
    final, whole, ages = runs["final_return"], runs["mean_return"], (1, 2, 4, 8, 16)
    played = json.loads((RESULTS / "play.json").read_text())["results"]
    (random,) = [x["return"]["mean"] for x in played if (x["policy"], x["levels"]) == ("random", "training")]
    assert (final["recent"].loc[[8, 16]] < 0.05).all() and (final["recent", 4] < random).sum() == 1  # collapse
    assert final["behavior"].min() > random  # does not
    assert all(whole["decoupled", age].mean() > whole["behavior", age].mean() for age in ages)
    assert [age for age in ages if whole["decoupled", age].min() > whole["behavior", age].max()] == [2, 4, 8, 16]
    assert all(whole["decoupled", age].mean() > whole["recent", age].mean() for age in (4, 8, 16))
    points = results.all_points.astype({"value": int})
    points = points[(points["variant"] == "decoupled") & (points["value"] >= 8)].groupby(["value", "seed"])["return"]
    fallen = points.apply(lambda curve: curve.max() > 3.5 and curve.loc[curve.idxmax() :].min() < 0.5)
    assert fallen.sum() == 5 and len(fallen) == 6  # most rise, and fall back to nothing
    cells = update_readme.staleness_differences().splitlines()
    assert cells[2].split(" | ")[2].startswith("0.") and cells[3].split(" | ")[2].startswith("-")  # above; not shown


def test_the_words_on_ewma():
    rows = [row.split(" | ") for row in update_readme.ewma_differences().splitlines()[2:]]
    low = np.array([[float(row[n].split(" to ")[0]) for n in (2, 4)] for row in rows])
    high = np.array([[float(row[n].split(" to ")[1].rstrip(" |")) for n in (2, 4)] for row in rows])
    assert ((low < 0) & (high > 0)).tolist() == [[True, False], [True, False], [True, True], [False, False]]
    assert (high[:2, 1] < 0).all() and (low[3] > 0).all()  # behind on the way; of PPO's age: above PPO-EWMA
    runs = Results.of_csv("ewma", RESULTS).all_rows
    means = runs[runs["variant"] == "algorithms"].groupby(["game", "value"])["mean_return"].mean().unstack()
    assert (means["ppo-ewma"] < means["ppo"]).all() and (means["ppg-ewma"] < means["ppg"]).all()
    ages = {run.flags["prox-com"] for run in Results.of_csv("ewma", RESULTS).runs if run.variant == "as-old-as-ppo"}
    assert ages == {float(update_readme.numbers()["age of old here"])}


def test_the_clip_is_small_and_moves():
    assert (RESULTS / "play.gif").stat().st_size < 2e6
    frames = iio.imread(RESULTS / "play.gif")
    assert len(frames) > 20 and frames.shape[1:3] == (576, 576)
    assert (frames[0] != frames[-1]).mean() > 0.1


# Commands, flags and names


def commands(text):
    """The lines of code blocks that run Python."""
    blocks = re.findall(r"```(?:bash|sh|console)?\n(.*?)```", COMMENT.sub("", text), re.S)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    lines = [re.sub(r"^(for .*; do|uv run) ", "python " if line.startswith("uv") else "", line) for line in lines]
    return [line for line in lines if re.match(r"(\S*/)?python (\w+/)?\w+\.py", line)]


def test_commands_have_flags_that_exist():
    found = [command for text in PAGES.values() for command in commands(text)]
    assert len(found) > 15
    for command in found:
        script, *words = shlex.split(command.split("#")[0].split(";")[0].split(" > ")[0])[1:]
        if script.startswith("my_"):  # what a patch makes
            continue
        assert (ROOT / script).exists(), command
        name = script.removesuffix(".py")
        if name in SCRIPTS and "--resume" not in words and not any("$" in word for word in words):
            with command_line(name, words):
                load(name).parse_args()
        elif name not in SCRIPTS:
            source = (ROOT / script).read_text()
            for word in words:
                flag = word.split("=")[0]
                assert not word.startswith("--") or f'"{flag}"' in source, command


def flags_of(words):
    """{flag: its values} of a command's words."""
    found = {}
    for word in words:
        if word.startswith("--"):
            found[word[2:]] = values = []
        else:
            values.append(word)
    return {flag: " ".join(values) for flag, values in found.items()}


def test_commands_are_those_of_the_results():
    """The laptop's is the one that the scripts suggest; the small runs are the catalogue's; lengths are the curves'."""
    (command,) = [x for x in commands(README) if x.startswith("python ppo_ewma.py --env-id starpilot")]
    suggested = flags_of(load("ppo_ewma").LAPTOP.split()) | {"epochs": "1", "env-id": "starpilot"}
    assert flags_of(shlex.split(command)[2:]) == suggested
    given = dict(re.findall(r'^(small|full)="(.*)"$', PAGES["results/README.md"], re.M))
    given = {size: flags_of(line.split()) for size, line in given.items()}
    run = next(run for run in Results.of_csv("ewma", RESULTS).runs if (run.game, run.value) == ("starpilot", "ppo"))
    listed = {flag: " ".join(map(str, x)) if isinstance(x, list | tuple) else str(x) for flag, x in run.flags.items()}
    for size, label in [("small", "PPO, small"), ("full", "PPO, full size")]:
        with command_line("ppo", [word for flag, x in given[size].items() for word in (f"--{flag}", *x.split())]):
            args = load("ppo").parse_args()[0]
        learning = pd.read_csv(RESULTS / "learning.csv")
        steps = learning[learning["label"] == label]["step"]
        assert steps.max() == args.total_timesteps and steps.min() == args.num_envs * args.num_steps
    shared = given["small"].keys() & listed.keys()
    assert len(shared) >= 8 and {x: given["small"][x] for x in shared} == {x: listed[x] for x in shared}


def test_flags_that_texts_name_exist():
    sources = [*ROOT.glob("*.py"), *ROOT.glob("experiments/*.py"), *ROOT.glob("tests/*.py")]
    sources = "\n".join(path.read_text() for path in sources)
    for page, text in PAGES.items():
        for flag in set(re.findall(r"`(?:[^`\n]* )?(--[a-z][a-z0-9-]+)", COMMENT.sub("", text))) - {"--logdir"}:
            assert f'"{flag}"' in sources, (page, flag)


def test_the_first_command_of_the_readme_trains(tmp_path):
    """The README's own line, only shorter."""
    (command,) = [x for x in commands(README) if x.startswith("python ppg_ewma.py --env-id heist --num-envs 64")]
    short = "--num-steps 2 --total-timesteps 128 --channels 2 2 2 --aux-epochs 0 --run-dir".split()
    words = [sys.executable, *shlex.split(command)[1:], *short, str(tmp_path / "x")]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_files_and_functions_that_texts_name_exist():
    for page, text in PAGES.items():
        for script, name in re.findall(r"`(\w+\.py)`:? `(\w+)`", text):
            assert re.search(rf"\b(def|class) {name}\b", (ROOT / script).read_text()), (page, script, name)
        for name in set(re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|md|csv|png|gif|json))`", COMMENT.sub("", text))):
            name = name.removeprefix("my_")
            folders = [ROOT, ROOT / "tests", ROOT / "experiments", ROOT / "experiments/lab", RESULTS]
            elsewhere = name in ("ppo_procgen.py", "ppg_procgen.py") or name.startswith("NAME")
            assert elsewhere or any((folder / name).exists() for folder in folders), (page, name)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_reference_lists_what_a_run_writes(script, tmp_path):
    """Tags of TensorBoard, keys of a checkpoint, files of a run: those of a tiny run, and no others."""
    folder, page = tmp_path / "run", PAGES["REFERENCE.md"]
    flags = [*tiny(script), "--env-id", "bossfight", "--num-steps", "64", "--total-timesteps", "512"]
    saved = train(script, folder, *flags)
    rows = re.findall(r"^\| `(\w+/\w+)` \| .* \| (.*) \|$", page, re.M)
    listed = {tag for tag, where in rows if where == "all" or f"`{script}.py`" in where}
    assert listed == curves(folder).keys()
    table = page.split("A checkpoint is a dict:")[1].split("\n\n")[1]
    keys = {key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    assert saved.keys() <= keys
    own = {"staleness": {"queue"}}.get(script, set()) | ({"aux_optimizer", "buffer"} if script in PPG else set())
    own |= {"prox", "prox_weight", "prox_age"} if "ewma" in script else set()
    assert keys - saved.keys() == {"queue", "aux_optimizer", "buffer", "prox", "prox_weight", "prox_age"} - own
    table = page.split("## The files of a run")[1].split("\n\n")[2]
    files = {name.split(".")[0] for name in re.findall(r"^\| `([\w.*]+)`", table, re.M)}
    assert {path.name.split(".")[0] for path in folder.iterdir()} <= files
    assert checkpoint(folder)["script"] == script


# Links


def anchors(text):
    """GitHub's names of a page's headings."""
    names = Counter()
    for title in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        yield f"{name}-{names[name]}" if names[name] else name
        names[name] += 1


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_and_anchors_resolve(page):
    text = FENCE.sub("", COMMENT.sub("", PAGES[page]))
    for link in re.findall(r"(?:\]\(|src=\"|href=\")([^)\"\s]+)", text):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in set(anchors(target.read_text())), link
