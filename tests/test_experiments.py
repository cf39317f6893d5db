"""The experiments from end to end at smoke scale: real training, real files, figures that show something."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from unittest import mock

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from helpers import ROOT, command_line, load, parse, read_until

sys.path.insert(0, str(ROOT / "experiments"))
import figures as figures_program  # noqa: E402
import sweep as sweep_program  # noqa: E402
from lab.any_runs import AUTHORS  # noqa: E402
from lab.catalogue import EXPERIMENTS, RANGES, SCALES, Experiment, return_range, runs_of, twins_of  # noqa: E402
from lab.logs import ADVANTAGES, CLIPPED, RETURN, STEPS, read_last, read_scalars  # noqa: E402
from lab.reporting import report  # noqa: E402
from lab.running import program, state_of  # noqa: E402
from lab.runs import Results  # noqa: E402

WORKERS = os.cpu_count()  # a thread each: runs with more threads than free cores hinder each other


def run(program, *words, code=0):
    """Run sweep.py or figures.py within this process, which saves their imports; returns what they printed."""
    output, ended = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            with command_line(program.__name__, words):
                program.main()
        except SystemExit as end:
            ended = end.code or 0
    assert ended == code, output.getvalue()
    return output.getvalue()


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def sweep(name, runs_dir, *words, **options):
    return run(sweep_program, name, "--scale", "smoke", "--runs-dir", runs_dir, "--workers", WORKERS, *words, **options)


def figures(name, runs_dir, *words, **options):
    return run(figures_program, name, "--runs-dir", runs_dir, *words, **options)


TOP = {"ewma": "#D55E00", "com-vs-kl": None}  # the colour of the curve drawn last; otherwise:
LIGHTEST = matplotlib.colors.to_hex(plt.cm.viridis(0.88))


def check_picture(path, colour=None):
    """A picture that shows something: not of one colour, with ink on more than the frame, and with a curve.

    colour: of the curve; its sample in the legend has less than 100 pixels. Returns the text in the picture, the
    caption of which has three lines at most.
    """
    pixels = plt.imread(path)[..., :3]
    assert pixels.shape[1] >= 800, "too small for a README"
    assert (pixels.min(axis=2) < 0.9).mean() > 0.02
    assert len(np.unique(pixels.reshape(-1, 3).round(2), axis=0)) > 20
    if colour:
        assert (np.abs(pixels - matplotlib.colors.to_rgb(colour)).max(axis=2) < 0.02).sum() > 250
    root = ElementTree.parse(path.with_suffix(".svg")).getroot()
    assert len(captions(root)) <= 3
    return " ".join("".join(x.itertext()) for x in root.iter("{http://www.w3.org/2000/svg}text"))


def captions(root):
    """The lines of grey text in a picture."""
    return [x for x in root.iter("{http://www.w3.org/2000/svg}text") if "#4c4c4c" in x.get("style", "")]


def check_results(name, runs_dir, pictures, seeds):
    """All files of a finished experiment, and the numbers in them against TensorBoard's own reader."""
    folder = runs_dir / name / "smoke" / "figures"
    texts = {picture: check_picture(folder / f"{picture}.png") for picture in pictures}
    check_picture(folder / f"{name}.png", TOP.get(name, LIGHTEST))
    assert {path.stem for path in folder.glob("*.png")} == set(pictures)
    runs = runs_of(name, "smoke", seeds=seeds)
    for text in texts.values():
        assert f"{runs[0].steps} environment steps" in text and "easy mode, 1 level" in text
    table = pd.read_csv(folder / f"{name}_runs.csv", dtype={"value": str})
    curves = pd.read_csv(folder / f"{name}.csv", dtype={"value": str})
    key = ["game", "variant", "value", "seed"]
    expected = {(x.game, x.variant, x.value, x.seed) for x in runs}
    assert set(table[key].itertuples(index=False, name=None)) == expected
    assert set(curves[key].itertuples(index=False, name=None)) == expected
    assert table["finished"].all() and (table["seconds"] > 0).all()
    low, high = 2.5, 64  # Procgen's constants: starpilot, easy mode
    for x in runs:
        log = EventAccumulator(str(x.folder(runs_dir)), size_guidance={"scalars": 0}).Reload()
        events, clipped = log.Scalars(RETURN), [event.value for event in log.Scalars("policy/clip_fraction")]
        mask = (table[key].astype(str) == [x.game, x.variant, x.value, str(x.seed)]).all(axis=1)
        final = np.mean([event.value for event in events if event.step > x.steps * 0.9])
        assert table.loc[mask, "final_return"].item() == pytest.approx(final, rel=1e-4)
        normalised = table.loc[mask, "final_normalised_return"].item()
        assert normalised == pytest.approx((final - low) / (high - low), rel=1e-4)
        mean = np.mean([event.value for event in events])
        assert table.loc[mask, "mean_return"].item() == pytest.approx(mean, rel=1e-4)
        fraction = np.nan if x.flags.get("clip-coef") == 0 else np.mean(clipped[len(clipped) // 2 :])
        assert table.loc[mask, "clip_fraction"].item() == pytest.approx(fraction, nan_ok=True)
    report = (folder / f"{name}.md").read_text()
    assert "Shrunk (in brackets: the paper): " in report  # not in the figure, whose caption stays short
    return texts, report


# Experiments with real runs. Where a sweep is to be disturbed, it is disturbed here, so that runs are made only once.


def test_staleness(runs_dir):
    sweep("staleness", runs_dir, "--seeds", 1)
    printed = figures("staleness", runs_dir)
    assert "one seed only" in printed
    texts, report = check_results("staleness", runs_dir, ["staleness"], [1])
    assert "one seed, so there are no error bars" in texts["staleness"]
    assert "decoupled 1 | recent 1" in report
    assert re.search(r"\| recent \| 1 \| \d+\.\d\d% \| too few \|", report)  # three iterations
    curves = (runs_dir / "staleness/smoke").glob("starpilot__*")
    assert len(list(curves)) == 4  # at staleness 0 one run serves the three losses
    real = runs_dir / "staleness/smoke/starpilot__decoupled__1__seed1"
    assert "staleness.py on starpilot, 4 environments, 384 steps" in run(figures_program, "advice", real)


def test_ewma(runs_dir):
    sweep("ewma", runs_dir, "--seeds", 1)
    figures("ewma", runs_dir)
    texts, report = check_results("ewma", runs_dir, ["ewma"], [1])
    assert {"PPO", "PPO-EWMA", "PPG", "PPG-EWMA"} <= set(re.split(r" |(?<=EWMA)\n", texts["ewma"]))
    assert re.findall(r"\| (\S+-ewma) \| (\S+) \|", report.split("Does EWMA help?")[1])[:2] == [
        ("ppo-ewma", "ppo"),
        ("ppg-ewma", "ppg"),
    ]


def test_linear_lr_with_a_failure(runs_dir):
    """A run that fails stops no other, is listed with its log, and is all that the same command runs again."""
    good, _, bad = runs_of("linear-lr", "smoke", seeds=[1])
    broken = bad.folder(runs_dir) / "checkpoint.pt"
    broken.parent.mkdir(parents=True)
    broken.write_text("no checkpoint")
    printed = sweep("linear-lr", runs_dir, "--seeds", 1, code=1)
    assert f"failed: {bad.name} (exit code 2), log: " in printed and "checkpoint.pt is damaged" in printed
    status = sweep("linear-lr", runs_dir, "--seeds", 1, "--status")
    assert re.search(rf"{good.name} +finished +100% +-?\d+\.\d\d\n", status)
    assert re.search(rf"{bad.name} +failed", status) and status.endswith("2 finished, 1 failed\n")
    assert "2 of 3 runs are finished" in figures("linear-lr", runs_dir)
    check_picture(runs_dir / "linear-lr/smoke/figures/linear-lr.png")

    shutil.rmtree(broken.parent)
    finished_at = (good.folder(runs_dir) / "checkpoint.pt").stat().st_mtime_ns
    assert "2 finished already, 0 with another process, 1 to do" in sweep("linear-lr", runs_dir, "--seeds", 1)
    assert (good.folder(runs_dir) / "checkpoint.pt").stat().st_mtime_ns == finished_at
    figures("linear-lr", runs_dir)
    check_results("linear-lr", runs_dir, ["linear-lr"], [1])


def test_a_new_experiment_is_one_entry(runs_dir, monkeypatch):
    """An entry in the catalogue is enough for a sweep, a figure, a table and statistics."""

    def settings(scale):
        flags = scale.ppo | {"num-envs": 4, "reference-num-envs": 4, "gamma": 0.9, "gae-lambda": 0.9}
        yield "gamma", 0.9, "ppo.py", flags
        yield "gamma", 0.99, "ppo.py", flags | {"gamma": 0.99}
        yield "lambda", 0.99, "ppo.py", flags | {"gae-lambda": 0.99}

    entry = Experiment(
        settings,
        "{algorithm} looks ahead.",
        axis="discount",
        panels={"gamma": "discounted rewards", "lambda": "discounted errors"},
        at={"smoke": {"seeds": 2, "flags": {"checkpoint-seconds": 30}}},  # the other flags stay
        shared={"gamma": ["lambda"]},
        figures={"curves": {"lines": ["gamma", "lambda"]}, "difference": ["gamma"]},
        tests={
            "better": ("Far or near?", lambda _: [("far", "near", [(("gamma", "0.99"), ("gamma", "0.9"))])]),
            "largest_minus_smallest": ["gamma"],
        },
    )
    monkeypatch.setitem(EXPERIMENTS, "looking-ahead", entry)
    assert runs_of("looking-ahead", "smoke")[0].flags.items() >= {"checkpoint-seconds": 30, "num-steps": 32}.items()
    for x in runs_of("looking-ahead", "smoke"):
        if (x.value, x.seed) != ("0.9", 1):
            make_up(x, runs_dir, 0, 1)
    printed = sweep("looking-ahead", runs_dir, "--seeds", 1)
    assert "3 runs: 2 finished already, 0 with another process, 1 to do" in printed
    figures("looking-ahead", runs_dir)
    folder = runs_dir / "looking-ahead/smoke/figures"
    text = check_picture(folder / "looking-ahead.png", LIGHTEST)
    for words in ("PPO looks ahead.", "(a) discounted rewards", "(b) discounted errors", "discount", "rewards"):
        assert words in text
    check_picture(folder / "looking-ahead_difference.png")
    report = (folder / "looking-ahead.md").read_text()
    assert "| discount | 0.9 | 0.99 |" in report and "6 of 6 runs finished" in report
    assert re.search(r"## Far or near\? Final .*\n\n.*\n.*\n\| far \| near \| -?\d", report)
    assert re.search(r"\| gamma \| 0.9 minus 0.99 \| -?\d", report)
    rows = pd.read_csv(folder / "looking-ahead_runs.csv")
    assert len(rows) == 6 and rows["finished"].all()


ENDLESS = """
import sys
sys.path.insert(0, "{experiments}")
from lab.catalogue import EXPERIMENTS, Experiment
flags = {{"num-envs": 4, "reference-num-envs": 4, "total-timesteps": 10**9, "checkpoint-seconds": 0}}
settings = lambda scale: [("endless", value, "ppo.py", flags) for value in (1, 2)]
EXPERIMENTS["endless"] = Experiment(settings, "It does not end.", "", {{"endless": "endless"}})
"""


def test_a_stopped_sweep_continues(tmp_path):
    """Stopped while it trains, a sweep continues from there. It takes SIGTERM, as nohup and & keep Ctrl-C away."""
    program = ENDLESS.format(experiments=ROOT / "experiments")
    words = ["endless", "--scale", "smoke", "--seeds", "1", "--workers", "2", "--runs-dir", str(tmp_path)]
    command = [sys.executable, "-c", program + "import sweep\nsweep.main()", *words]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    exec(program, {})  # the same entry here, to ask for the status
    try:
        runs, logged = runs_of("endless", "smoke", seeds=[1]), [0, 0]
        for call in (1, 2):
            process = subprocess.Popen(command, **options)
            if call == 1:
                read_until(process, " left")  # how far it is, and how long it will take
            while not all(state_of(x, tmp_path).steps > steps for x, steps in zip(runs, logged, strict=True)):
                assert process.poll() is None
                time.sleep(0.1)
            assert len(re.findall("__seed1 +running", run(sweep_program, *words, "--status"))) == 2
            process.send_signal(signal.SIGTERM)
            printed = process.communicate()[0]
            assert process.returncode == 130 and "the same command continues" in printed
            states = [state_of(x, tmp_path) for x in runs]
            assert [state.name for state in states] == ["stopped", "stopped"]
            logged = [state.steps for state in states]
            for x in runs:  # nothing begins again: what an earlier call has logged is still there
                assert len(list(x.folder(tmp_path).glob("events*"))) == call
                assert read_scalars(x.folder(tmp_path), [STEPS])[0][STEPS][0, 0] == 4 * 32
    finally:
        del EXPERIMENTS["endless"]


def test_a_longer_run_continues_a_shorter_one(tmp_path, monkeypatch):
    def entry(steps):
        flags = {"num-envs": 4, "reference-num-envs": 4, "total-timesteps": steps}
        return Experiment(lambda scale: [("only", 1, "ppo.py", flags)], "", "", {"only": "only"})

    words = ["growing", tmp_path, "--seeds", 1]
    for steps in (128, 384):
        monkeypatch.setitem(EXPERIMENTS, "growing", entry(steps))
        assert "0 finished already, 0 with another process, 1 to do" in sweep(*words)
        (x,) = runs_of("growing", "smoke", seeds=[1])
        logged = read_scalars(x.folder(tmp_path), [STEPS])[0][STEPS][:, 0]
        assert logged.tolist() == list(range(128, steps + 1, 128))
    assert len(list(x.folder(tmp_path).glob("events*"))) == 2
    monkeypatch.setitem(EXPERIMENTS, "growing", entry(256))
    assert "was started with total-timesteps 384, now 256" in sweep(*words, code=2)


def test_each_worker_has_a_gpu_of_its_own(tmp_path, monkeypatch):
    """With stand-ins for a machine of two GPUs, and for Python: which of them the runs see."""
    seen = tmp_path / "seen"
    seen.mkdir()
    smi, python = tmp_path / "nvidia-smi", tmp_path / "python"
    smi.write_text("#!/bin/sh\necho 'GPU 0: one'\necho 'GPU 1: two'\n")
    python.write_text(f"#!/bin/sh\nsleep 0.5\necho $CUDA_VISIBLE_DEVICES > {seen}/$$\n")
    for path in (smi, python):
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(sys, "executable", str(python))
    run(sweep_program, "linear-lr", "--scale", "smoke", "--runs-dir", tmp_path / "runs", "--workers", 2)
    assert sorted(path.read_text().strip() for path in seen.iterdir()) == ["0", "0", "0", "1", "1", "1"]


def make_up(x, runs_dir, first, last, hours=1, others=()):
    """The files of a finished run whose return grows in a straight line, and stays where it is towards the end.

    others: tags that go from 0.1 to 1.1.
    """
    with SummaryWriter(x.folder(runs_dir)) as writer:
        for step in np.linspace(0, x.steps, 21):
            writer.add_scalar(RETURN, first + (last - first) * min(1, 1.25 * step / x.steps), round(step))
            for tag in others:
                writer.add_scalar(tag, 0.1 + step / x.steps, round(step))
    x.write(runs_dir)
    x.file(runs_dir, "exit").write_text(json.dumps({"code": 0, "steps": x.steps, "seconds": 3600 * hours}))


# Of a final difference between two such runs, what is left in the mean: half of it while the curve rises, for 0.8 of
# the run and 17 of its 21 points, then all of it.
WHOLE_RUN = (8.5 + 4) / 21


def test_batch_size(tmp_path):
    """On made-up runs of all settings: three figures, and table 5."""
    for x in runs_of("batch-size", "smoke", seeds=[1]):
        make_up(x, tmp_path, 3, 3 + int(x.value) * len(x.variant) / 7, others=[CLIPPED, ADVANTAGES])
    figures("batch-size", tmp_path)
    pictures = ["batch-size", "batch-size_difference", "batch-size_advantage_std"]
    texts, report = check_results("batch-size", tmp_path, pictures, [1])
    assert "KL penalty 1/256" in texts["batch-size"]
    swings = pd.read_csv(tmp_path / "batch-size/smoke/figures/batch-size_advantage_std.csv")
    assert set(swings["value"]) == {2, 4} and swings["std"].between(0.1, 1.1).all()

    # Table 5, recomputed from the table of runs: with one seed a Z is +1, 0 or -1.
    table = pd.read_csv(tmp_path / "batch-size/smoke/figures/batch-size_runs.csv")
    final = table.set_index(["variant", "value"])["final_normalised_return"]
    gap = final["all", 4] - final["all", 2]
    expected = []
    for variant in ["no-step-size", "no-adv-norm", "no-ewma-adjustment", "no-ewma"]:
        reference = final["no-ewma" if variant == "no-ewma" else "all", 4]
        expected.append(reference - final[variant, 2] - gap)
    cells = re.search(r"^\| 2 \| (.*) \|$", report, re.MULTILINE).group(1).split(" | ")
    for cell, effect in zip(cells, expected, strict=True):
        size, z = re.fullmatch(r"(\S+) \((\S+)\)", cell).groups()
        assert float(size) == pytest.approx(effect, abs=6e-4)
        assert float(z) == np.sign(round(effect, 6))


def test_many_games_and_seeds(tmp_path):
    """On made-up runs of the paper's scale, where EWMA always helps: error bars, games by themselves, and the test."""
    gain = {"ppo": 0, "ppo-ewma": 0.1, "ppg": 0.3, "ppg-ewma": 0.4}
    games = ["coinrun", "maze", "ninja"]  # of which the returns 5, 4, 2 and 10, 10, 10 are 0 and 1, normalised
    for x in runs_of("ewma", "paper", games, seeds=[1, 2, 3]):
        final = gain[x.value] + 0.01 * x.seed
        low = {"coinrun": 5, "maze": 4, "ninja": 2}[x.game]
        paused = x.seed == 2 and x.game == "maze"
        make_up(x, tmp_path, low, low + (10 - low) * final, hours=9 if paused else 1)
    assert "note" not in figures("ewma", tmp_path, "--out", tmp_path / "out")
    text = check_picture(tmp_path / "out/ewma.png", TOP["ewma"])
    assert "mean and standard deviation over 3 seeds" in text
    assert text.count("maze") == 4 and "(b) maze" in text  # curves, two bars, caption
    report = (tmp_path / "out/ewma.md").read_text()
    assert "Shrunk" not in report
    assert "36 of 36 runs finished; 36.00 hours of computing" in report
    assert "| algorithms | ppg | 0.320 | 0.010 | 0.320 |" in report
    # maze: of 6 from its least to its greatest return, gains of 0.02, 0.12, 0.32 and 0.42
    assert "| maze | 4.12 ± 0.06 | 4.72 ± 0.06 | 5.92 ± 0.06 | 6.52 ± 0.06 |" in report
    # three games, in each all three runs above all three: Z is the root of 3 times 4.5 / sqrt(5.25)
    assert re.search(r"\| ppo-ewma \| ppo \| 0.100 \| \S+ to \S+ \| 3.40 of 3.40 \| 0.0003\d \| yes", report)
    assert f"| ppo-ewma | ppo | {0.1 * WHOLE_RUN:.3f} |" in report.split("Over the whole run")[1]


def test_com_vs_kl(tmp_path):
    """What it would take; and, on made-up runs, the grid."""
    printed = sweep("com-vs-kl", tmp_path, "--dry-run")
    commands = [line for line in printed.splitlines() if line.startswith("python ppo_ewma.py")]
    assert len(commands) == 4 and "4 runs, 768 environment steps" in printed
    assert re.search(r"[\d,]+ steps/s measured\ntime: about \d+\.\d minutes .*\ndisk: about \d+\.\d MB", printed)
    assert not list(tmp_path.iterdir())

    runs = runs_of("com-vs-kl", "smoke")
    for place, x in enumerate(runs):
        make_up(x, tmp_path, 3, 11.1 * (place + 1))
    figures("com-vs-kl", tmp_path, "--out", tmp_path / "out")
    text = check_picture(tmp_path / "out/com-vs-kl.png")
    assert "--prox-com" in text and "--kl-coef" in text
    # rows from below: a penalty of 1, then 2; columns: a centre of mass of 4, then of the default 8
    assert [(x.flags["kl-coef"], x.flags["prox-com"]) for x in runs] == [(1, 8), (1, 4), (2, 8), (2, 4)]
    assert re.findall(r"\d\d\.\d", text)[:4] == ["22.2", "11.1", "44.4", "33.3"]


def test_bands(tmp_path):
    """On made-up runs whose return is what the product says, but for one cell."""
    for x in runs_of("com-vs-kl", "small"):
        product, corner = x.flags["kl-coef"] * x.flags["prox-com"], x.flags["kl-coef"] == 4 and x.flags["prox-com"] == 2
        make_up(x, tmp_path, 3, 3 + product / 8 - corner + 0.1 * x.seed)
    figures("com-vs-kl", tmp_path, "--out", tmp_path / "out")
    report = (tmp_path / "out/com-vs-kl.md").read_text()
    cells = {row.split(" | ")[0][2:]: row.split(" | ")[1:3] for row in report.splitlines() if "product" in row}
    # Products 8 4 2, 16 8 4, 32 16 8: returns 4 3.5 3.25, 5 4 3.5, 7 5 3, and 0.1 and 0.2 more
    means = {8: [4, 4, 3], 4: [3.5, 3.5], 2: [3.25], 16: [5, 5], 32: [7]}
    total = 2 * np.var([x for group in means.values() for x in group]) * 9 + 18 * 0.05**2
    inside = sum(2 * np.var(group) * len(group) for group in means.values()) + 18 * 0.05**2
    assert cells["share of the variance: product"][0] == f"{1 - inside / total:.2f}"
    assert float(cells["product minus ratio"][1].split(" to ")[0]) > 0.2
    # two doublings from the first to the last row, each of three cells; likewise from the last column to the first
    assert f"| doubling the penalty, return | {(15 - 10.75) / 6:.2f} |" in report
    assert f"| doubling the centre of mass, return | {(16 - 9.75) / 6:.2f} |" in report
    assert "| corner minus default, return | -1.00 | -1.10 to -0.90 |" in report


def test_decoupling_at_all_ages(tmp_path):
    """On made-up runs where it always helps against one loss, and against the other at every second age only."""
    for x in runs_of("staleness", "small", ["maze"], seeds=[1, 2, 3]):
        behaviour = 6 + 0.3 * (-1) ** int(x.value).bit_length()  # at staleness 1 to 16: below, above, below, ...
        final = {"decoupled": 6, "recent": 5.4, "behavior": behaviour}[x.variant] + 0.01 * x.seed
        make_up(x, tmp_path, 3, final)
    figures("staleness", tmp_path, "--out", tmp_path / "out")
    report = (tmp_path / "out/staleness.md").read_text()
    # Maze: 5 from its least to its greatest return. A test has three runs against three, all ages are five such.
    assert re.search(r"\| decoupled 4 \| recent 4 \| 0.120 \| \S+ to \S+ \| 1.96 of 1.96 \| 0.025 \| no \|", report)
    report, whole_run = report.split("## Does decoupling help? Over the whole run")
    assert f"| decoupled 4 | recent 4 | {0.12 * WHOLE_RUN:.3f} |" in whole_run
    assert re.search(r"\| decoupled \| recent, all ages \| 0.120 \| .* \| 4.39 of 4.39 \| 5.\de-06 \| yes \|", report)
    assert "| decoupled 2 | behavior 2 | -0.060 |" in report
    assert re.search(r"\| decoupled \| behavior, all ages \| 0.012 \| .* \| 0.88 of 4.39 \|", report)  # a fifth of it
    assert "48 of 48 runs finished" in report and "| decoupled | 6.02 ± 0.01 |" in report


def test_the_tables_are_enough_to_draw_again(tmp_path):
    """Where there are no runs, their tables give the same report, and a figure."""
    for x in runs_of("adam-betas", "smoke", ["coinrun", "maze"], seeds=[1, 2]):
        make_up(x, tmp_path, 3, 3 + 0.3 * int(x.value) + x.seed / 3)
    figures("adam-betas", tmp_path, "--out", tmp_path / "first")
    (tmp_path / "second").mkdir()
    for name in ("adam-betas.csv", "adam-betas_runs.csv"):
        shutil.copy(tmp_path / "first" / name, tmp_path / "second")
    figures("adam-betas", tmp_path / "nowhere", "--csv", tmp_path / "second")
    for name in ("adam-betas.md", "adam-betas.csv", "adam-betas_runs.csv"):
        assert (tmp_path / "first" / name).read_text() == (tmp_path / "second" / name).read_text()
    check_picture(tmp_path / "second/adam-betas.png", LIGHTEST)
    text = check_picture(tmp_path / "second/adam-betas_by_game_none.png", LIGHTEST)
    assert "mean and standard deviation over 2 seeds" in text and text.count("maze") == 2  # curves, caption
    assert "has no tables of ewma" in figures("ewma", tmp_path, "--csv", tmp_path / "second", code=2)


def test_an_experiment_on_two_machines(tmp_path):
    """Its tables put together are those of all runs in one place; what one has finished, the other need not run."""
    one, here, there = (tmp_path / name for name in ("one", "here", "there"))
    runs = runs_of("linear-lr", "smoke", ["maze", "coinrun"], seeds=[1, 2])
    for place, x in enumerate(runs):
        for folder in (one, there if place % 5 else here):
            make_up(x, folder, 3, 3 + 0.1 * place)
    begun = runs[1]  # is finished there; not furthest here, though its return is higher
    make_up(begun, here, 9, 9)
    begun.file(here, "exit").unlink()
    for folder in (one, here, there):
        figures("linear-lr", folder, "--out", folder / "tables")
    figures("linear-lr", tmp_path, "--csv", there / "tables", here / "tables", "--out", tmp_path / "both")
    for name in ("linear-lr.csv", "linear-lr_runs.csv", "linear-lr.md"):
        assert (tmp_path / "both" / name).read_text() == (one / "tables" / name).read_text()

    words = ["--games", "maze", "coinrun", "--csv", there / "tables", "--status"]
    status = sweep("linear-lr", here, *words)
    assert "9 of 12 runs are finished in" in status and status.endswith("3 finished\n")
    assert "12 of 12 runs" in sweep("linear-lr", here, *words[:3], "--csv", one / "tables")
    assert "has no tables of linear-lr" in sweep("linear-lr", here, "--csv", tmp_path, code=2)


def test_a_run_that_serves_two_experiments(tmp_path):
    """It is made once, by whichever comes first; where only tables are left, it is taken from the other's."""
    tables = tmp_path / "tables"
    for x in runs_of("batch-size", "smoke", seeds=[1, 2, 3]):
        if x.variant == "all":
            make_up(x, tmp_path, 3, 3 + 0.1 * int(x.value) + x.seed)
    figures("batch-size", tmp_path, "--out", tables)
    assert "4 finished" in sweep("adam-betas", tmp_path, "--status")
    assert "4 of 8 runs are finished in" in sweep("adam-betas", tmp_path / "elsewhere", "--csv", tables, "--status")
    for x in runs_of("adam-betas", "smoke"):
        if not x.twin:
            make_up(x, tmp_path / "elsewhere", 3, 5)
    figures("adam-betas", tmp_path / "elsewhere", "--out", tmp_path / "rest")
    figures("adam-betas", tmp_path, "--csv", tables, tmp_path / "rest", "--out", tmp_path / "both")
    rows = pd.read_csv(tmp_path / "both/adam-betas_runs.csv").set_index(["variant", "value", "seed"])["final_return"]
    assert len(rows) == 8  # batch-size's third seed is not for this experiment
    assert rows["none", 4, 2] == pytest.approx(5.4) and rows["none", 2, 1] == pytest.approx(4.2)
    points = pd.read_csv(tmp_path / "both/adam-betas.csv").groupby(["variant", "value", "seed"]).size()
    assert set(points.index) == set(rows.index) and points.nunique() == 1


def test_twins_are_the_same_run():
    """Found by comparing flags; listed here by hand."""
    for scale in SCALES:
        all_sizes = {size: ("batch-size", "all", size) for size in map(str, SCALES[scale].sizes)}
        for name in EXPERIMENTS:
            variant = {"linear-lr": "sqrt", "adam-betas": "none"}.get(name)
            expected = {(variant, size): twin for size, twin in all_sizes.items()} if variant else {}
            assert twins_of(name, scale) == expected
    twin = runs_of("linear-lr", "paper", ["heist"], seeds=[2])[0]
    assert twin.folder("runs") == Path("runs/batch-size/paper/heist__all__256__seed2")


@pytest.mark.parametrize(
    "name, variant",
    [("batch-size", "no-ewma"), ("batch-size", "same-age"), ("ewma", "as-old-as-ppo"), ("staleness", "recent")],
)
def test_a_machine_that_has_one_variant_only(name, variant, tmp_path):
    """As after sweep.py --csv: what is missing here leaves gaps, and no more."""
    for x in runs_of(name, "first", seeds=[2, 3]):
        if x.variant == variant:
            make_up(x, tmp_path, 3, 3 + 0.1 * x.seed)
    figures(name, tmp_path)
    folder = tmp_path / name / "first/figures"
    assert f"| {variant} |" in (folder / f"{name}.md").read_text() and (folder / f"{name}.png").exists()


def test_table_5(tmp_path):
    """On made-up runs where one ablation hurts, one changes nothing, one helps, and PPO by itself is only worse."""
    lows = {"coinrun": 5, "maze": 5, "ninja": 3.5, "jumper": 3}  # the highest return is 10 for all of them
    final = {("all", "4"): 0.5, ("all", "2"): 0.45, ("no-step-size", "2"): 0.1, ("no-adv-norm", "2"): 0.45}
    final |= {("no-ewma-adjustment", "2"): 0.48, ("no-ewma", "4"): 0.3, ("no-ewma", "2"): 0.25, ("floor", "4"): 0}
    runs = runs_of("batch-size", "smoke", list(lows), seeds=[1, 2, 3])
    for x in runs:
        low, largest = lows[x.game], x.value == "4"
        make_up(x, tmp_path, low, low + (10 - low) * (final[x.variant, x.value] + 0.001 * x.seed * largest))
    text = report(Results.of_runs("batch-size", runs, tmp_path, []))
    # four games, three seeds: without overlap, Z is 2 times 4.5 / sqrt(5.25); for 4 hypotheses it must exceed 3.48
    cells = re.search(r"^\| 2 \| (.*) \|$", text, re.MULTILINE).group(1).split(" | ")
    assert cells[0] == "**0.350 (3.93)**" and cells[2] == "-0.030 (-3.93)"
    assert [abs(float(cell.strip("*").split()[0])) for cell in cells] == [0.35, 0, 0.03, 0]
    assert f"**{0.35 * WHOLE_RUN:.3f} (3.93)**" in text.split("table 5), over the whole run")[1]
    assert "0.001/4" in text
    alike = text.split("## Do all batch sizes end alike?")[1]  # at the smaller size, 20 ways to swap runs
    assert "are 0.052 apart" in alike and "| no-step-size | 3 | +0.350 | 0.05 | 0.2 |" in alike
    assert "| no-ewma | 3 | +0.000 |" in alike, "its largest batch is worse by as much as the smaller one"
    apart = text.split("## How far apart")[1]  # no overlap: 2 of the 20 ways to deal out three and three runs
    assert f"| no-step-size | 0.402 | 0.1 | {0.402 * WHOLE_RUN:.3f} | 0.1 |" in apart
    assert f"| all | 0.052 | 0.1 | {0.052 * WHOLE_RUN:.3f} | 0.1 |" in apart
    row = re.search(r"\| all \| 4 minus 2 \| 0.052 \| \S+ to \S+ \| (\S+) \|", text)
    assert float(row[1]) == pytest.approx(0.052 * WHOLE_RUN, abs=6e-4)


def test_the_same_age_at_the_largest_batch(tmp_path):
    """In environment steps, the average is as old; and the report compares the two."""
    runs = [x for x in runs_of("batch-size", "first") if x.variant in ("no-ewma-adjustment", "same-age")]
    ages = {}
    for x in runs:
        args, used = parse("ppo_ewma", *x.words()[1:])
        age = used.prox_com * args.num_envs * args.num_steps / args.num_minibatches
        ages.setdefault((x.value, x.variant), set()).add((args.num_envs, age))
        make_up(x, tmp_path, 0, 2 + (x.variant == "same-age") + 0.1 * x.seed)
    for size in (16, 4, 1):
        ((envs, age),), ((reference, same),) = (
            ages[str(size), variant] for variant in ("no-ewma-adjustment", "same-age")
        )
        assert (envs, reference) == (size, 64) and age == same == 8 * size * 8
    text = report(Results.of_runs("batch-size", runs, tmp_path, [])).split("minus same-age")[1]
    assert re.search(rf"\| 4 \| -1.00 \| \S+ to \S+ \| {-WHOLE_RUN:.2f} \|", text)


# What can be wrong with runs.


@pytest.fixture
def linear_lr(tmp_path):
    for x in runs_of("linear-lr", "smoke", seeds=[1]):
        make_up(x, tmp_path, 0, 10)
    return tmp_path


def test_no_runs(tmp_path):
    assert figures("ewma", tmp_path, code=2).count("\n") == 1
    assert "no runs of ewma found" in figures("ewma", tmp_path, code=2)


def test_runs_of_mixed_scale(linear_lr):
    for x in runs_of("linear-lr", "small", seeds=[1]):
        make_up(x, linear_lr, 0, 10)
    printed = figures("linear-lr", linear_lr)
    assert "note: runs of mixed scale: small, smoke; this is small" in printed
    check_picture(linear_lr / "linear-lr/small/figures/linear-lr.png")
    assert "mixed scale" not in figures("linear-lr", linear_lr, "--scale", "smoke")


def test_a_damaged_event_file(linear_lr):
    (path,) = (linear_lr / "linear-lr/smoke/starpilot__linear__2__seed1").glob("events*")
    path.write_bytes(path.read_bytes()[:-200] + b"\xff" * 100)
    printed = figures("linear-lr", linear_lr)
    assert f"note: {path}: is damaged; showing what can be read of it" in printed
    assert "2 of 3 runs are finished" in printed
    check_picture(linear_lr / "linear-lr/smoke/figures/linear-lr.png")


def test_runs_with_other_flags_are_not_continued(linear_lr):
    path = linear_lr / "linear-lr/smoke/sweep/starpilot__linear__2__seed1.json"
    specification = json.loads(path.read_text())
    specification["flags"]["learning-rate"] = 0.5
    path.write_text(json.dumps(specification))
    printed = sweep("linear-lr", linear_lr, "--seeds", 1, code=2)
    assert "was started with learning-rate 0.5, now 0.0005" in printed and printed.count("\n") == 1


def test_some_variants_only(tmp_path):
    """All seeds that these have, and nothing of the others."""
    words = ["--scale", "small", "--runs-dir", tmp_path, "--status", "--variants"]
    assert run(sweep_program, "batch-size", *words, "all").endswith("\n20 queued\n")  # 4 sizes, 5 seeds
    listed = run(sweep_program, "batch-size", *words, "floor", "no-n-pi")
    assert set(re.findall(r"starpilot__([a-z-]+)__", listed)) == {"floor", "no-n-pi"}
    assert listed.endswith("\n12 queued\n")  # 4 sizes, 3 seeds


@pytest.mark.parametrize(
    "words, message",
    [
        (["sokoban"], "invalid choice: 'sokoban'"),
        (["ewma", "--games", "chess"], "invalid choice: 'chess'"),
        (["ewma", "--games", "breakout"], "--games breakout: is for --scale minatar"),
        (["ewma", "--scale", "minatar", "--games", "heist"], "--games heist: is not one of MinAtar"),
        (["ewma", "--seeds", "0"], "0: must be a whole number, from 1 to "),
        (["ewma", "--stat"], "--stat"),  # no abbreviations, as in the scripts
        (["ewma", "--seeds", "1", "1"], "--seeds: one is given twice"),
        (["linear-lr", "--variants", "all"], "--variants all: linear-lr has sqrt, linear"),
        (["ewma", "--gpus", "1"], "--gpus: only with --executor slurm"),
        (["ewma", "--dry-run", "--status"], "one of them"),
    ],
)
def test_bad_words(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = run(sweep_program, *words, code=2)
    assert message in printed and printed.strip().count("\n") == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["sweep", "figures", "evaluate", "throughput", "noise_scale"])
def test_packages_that_are_missing(name):
    """Without any (-S), one line says what to install."""
    command = [sys.executable, "-S", ROOT / f"experiments/{name}.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{name}.py: error: there is no torch") and "pip install" in done.stderr


def test_curves_of_any_runs(tmp_path):
    for label, slope, seeds in (("a", 1, 2), ("b", 2, 2), ("many", 0, 7)):
        for seed in range(1, seeds + 1):
            writer = SummaryWriter(tmp_path / f"{label}_{seed}")
            for step in range(100, 1001, 100):
                writer.add_scalar(RETURN, slope * step + seed, step)
                writer.add_scalar("policy/kl", seed / 256 if step < 1000 else 0.5, step)
            writer.close()
    (tmp_path / "theirs.csv").write_text("# a comment\nrun,step,return\n1,250,3\n1,950,4\n")
    words = [f"A={tmp_path}/a_*", f"B={tmp_path}/b_2", f"theirs={tmp_path}/theirs.csv", f"many={tmp_path}/many_*"]
    run(figures_program, "curves", *words, "--out", tmp_path / "out" / "all")
    table = pd.read_csv(tmp_path / "out" / "all.csv")
    table, many = table[table["label"] != "many"], table[table["label"] == "many"]
    assert len(many) == 70
    assert len(table) == 30 and set(table["run"]) == {"a_1", "a_2", "b_2"} and set(table["label"]) == {"A", "B"}
    assert table[(table["run"] == "a_2") & (table["step"] == 300)]["return"].item() == 302
    assert (tmp_path / "out" / "all.md").read_text() == (
        "|  | 250 steps | 950 steps | at the end |\n| --- | --- | --- | --- |\n"
        "| A | 251.0 / 252.0 | 951.0 / 952.0 | 1001.0 / 1002.0 |\n"
        "| B | 502.0 | 1902.0 | 2002.0 |\n| theirs | 3.0 | 4.0 | 4.0 |\n"
        "| many | 4.0 ± 2.2 | 4.0 ± 2.2 | 4.0 ± 2.2 |\n"  # 1 to 7
    )
    text = check_picture(tmp_path / "out" / "all.png", "#E69F00")
    assert "A (2 runs)" in text and "B (1 run)" in text and "theirs" in text

    kl = tmp_path / "kl"  # another quantity than the return
    (tmp_path / "kl_theirs.csv").write_text("run,step,policy/kl\n1,250,0.25\n")
    words = [f"A={tmp_path}/a_*", f"theirs={tmp_path}/kl_theirs.csv"]
    run(figures_program, "curves", *words, "--tag", "policy/kl", "--out", kl)
    table = pd.read_csv(f"{kl}.csv")
    assert table.columns.tolist() == ["label", "run", "step", "policy/kl"]
    assert table[(table["run"] == "a_2") & (table["step"] == 300)]["policy/kl"].item() == pytest.approx(2 / 256)
    _, _, *rows = Path(f"{kl}.md").read_text().splitlines()
    assert rows == ["| A | 0.0039 / 0.0078 | 0.50 / 0.50 |", "| theirs | 0.25 | 0.25 |"]
    assert "policy/kl" in check_picture(Path(f"{kl}.png"), "#0072B2")

    for words, message in [
        (["A"], "must be LABEL=RUNS"),
        ([f"A={tmp_path}/c_*"], "no run with a finished episode"),
        ([f"A={tmp_path}/a_1", f"A={tmp_path}/a_2"], "a label is given twice"),
        ([f"A={tmp_path}/a_1", "--tag", "policy/kk"], "no run with policy/kk is there"),
        ([f"A={tmp_path}/a_1", "--tag", "policy/kl", "--reference", "authors"], "leave out --tag"),
    ]:
        printed = run(figures_program, "curves", *words, code=2)
        assert message in printed and printed.count("\n") == 1


def hard_run(folder, last, **flags):
    """A run made up of three points, and the flags in its checkpoint."""
    with SummaryWriter(folder) as writer:
        for step in (last // 4, last // 2, last):
            writer.add_scalar(RETURN, step / 1e6, step)
    args = {"env_id": "heist", "distribution_mode": "hard", "num_levels": 0} | flags
    saved = {"args": args, "script": "ppg_ewma", "format": 2, "global_step": last, "agent": {}}
    torch.save(saved, folder / "checkpoint.pt")
    return folder


def test_curves_before_the_authors(tmp_path, monkeypatch):
    """Their points on the game that the runs' flags name, up to the first that the runs have yet to reach."""
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    mine = hard_run(tmp_path / "mine", 3_000_000)
    run(figures_program, "curves", f"mine={mine}", "--reference", "authors", "--out", tmp_path / "out")
    curve, ppo, ppg = kept[0].axes[0].get_lines()
    assert ppo.get_label() == "authors' PPO (mean of 3 runs)" and ppg.get_label() == "authors' PPG (mean of 3 runs)"
    assert ppo.get_xydata().tolist() == [[1e6, 1.80], [2e6, 1.66], [4e6, 1.92]]
    assert ppg.get_xydata().tolist() == [[1e6, 2.06], [2e6, 2.08], [4e6, 1.97]]
    assert max(ppo.get_zorder(), ppg.get_zorder()) < curve.get_zorder()  # behind
    assert kept[0].axes[0].get_xlim()[0] < 750_000 and 4e6 < kept[0].axes[0].get_xlim()[1] < 5e6
    text = check_picture(tmp_path / "out.png", "#0072B2")
    assert all(x in text for x in ("heist, hard mode", "authors' PPO", "authors' PPG", "mine (1 run)"))
    _, _, *rows = (tmp_path / "out.md").read_text().splitlines()
    assert rows[0] == "| mine | 1.0 | 2.0 |  |  |  | 3.0 |"
    assert rows[1:] == [
        "| authors' PPO | 1.8 | 1.7 | 1.9 | 1.7 | 4.0 | 4.0 |",
        "| authors' PPG | 2.1 | 2.1 | 2.0 | 2.1 | 6.2 | 6.2 |",
    ]
    assert set(pd.read_csv(tmp_path / "out.csv")["label"]) == {"mine"}  # what was measured here

    whole = hard_run(tmp_path / "whole", 100_007_936, env_id="starpilot")
    run(figures_program, "curves", f"mine={whole}", "--reference", "authors", "--out", tmp_path / "out")
    assert kept[-1].axes[0].get_lines()[2].get_xydata()[-1].tolist() == [1e8, 23.25]
    run(figures_program, "curves", f"mine={mine}", "--out", tmp_path / "out")  # not without a request
    assert len(kept[-1].axes[0].get_lines()) == 1 and kept[-1].axes[0].get_xscale() == "linear"


def test_curves_that_the_authors_do_not_have(tmp_path):
    runs = {
        "hard": {},
        "easy": {"distribution_mode": "easy"},
        "level": {"num_levels": 200},
        "other": {"env_id": "maze"},
        "cartpole": {"env_id": "CartPole-v1", "distribution_mode": None, "num_levels": None},
    }
    for name, flags in runs.items():
        hard_run(tmp_path / name, 1_000_000, **flags)
    (tmp_path / "theirs.csv").write_text("run,step,return\n1,250,3\n")
    theirs = "theirs are in hard mode, on all levels; "
    for names, message in [
        (["easy"], f"{theirs}{tmp_path}/easy is on heist, easy mode, all levels"),
        (["hard", "level"], f"{theirs}{tmp_path}/level is on heist, hard mode, 200 levels"),
        (["cartpole"], f"{theirs}{tmp_path}/cartpole is on CartPole-v1, not of Procgen"),
        (["hard", "other"], "needs runs of one game; these are of heist, maze"),
        (["theirs.csv"], "needs runs of one game; a table does not say which"),
    ]:
        words = [f"{name}={tmp_path / name}" for name in names]
        printed = run(figures_program, "curves", *words, "--reference", "authors", "--out", tmp_path / "out", code=2)
        assert printed == f"figures.py: error: --reference authors: {message}\n"
    assert not list(tmp_path.glob("out*"))


def test_the_authors_table():
    """All games; normalised and averaged, their known results."""
    table = pd.read_csv(AUTHORS, comment="#", index_col="game")
    assert set(table.index) == set(RANGES)
    low, high = np.array([return_range(game, "hard") for game in table.index]).T
    for name, mean in ("ppo", 0.579), ("ppg", 0.757):
        assert ((table[f"{name}_final"] - low) / (high - low)).mean() == pytest.approx(mean, abs=5e-4)


def test_curves_of_runs_of_one_name(tmp_path):
    """In two folders they are two runs; and a label may hold what is mathematics to others."""
    for place in ("here", "there"):
        with SummaryWriter(tmp_path / place / "run") as writer:
            for step in (100, 200):
                writer.add_scalar(RETURN, len(place), step)
    run(figures_program, "curves", f"$a_b$={tmp_path}/*/run", "--out", tmp_path / "out")
    assert set(pd.read_csv(tmp_path / "out.csv")["run"]) == {f"{tmp_path}/{place}/run" for place in ("here", "there")}
    assert "$a_b$ (2 runs)" in check_picture(tmp_path / "out.png", "#0072B2")


@pytest.mark.parametrize(
    "text, message",
    [
        ("run,step\n1,2\n", "has no column return"),
        ("run,step,return\n1,2,much\n", "column return has something that is not a number"),
        ("", "No columns"),
    ],
)
def test_tables_that_are_none(text, message, tmp_path):
    """Not ours, or edited: one line says what is wrong with them."""
    (tmp_path / "theirs.csv").write_text(text)
    printed = run(figures_program, "curves", f"A={tmp_path / 'theirs.csv'}", code=2)
    assert message in printed and printed.count("\n") == 1
    for name in ("ewma.csv", "ewma_runs.csv"):
        shutil.copy(ROOT / "results" / name, tmp_path)
    path = tmp_path / "ewma.csv"
    path.write_text(path.read_text().replace("normalised_return", "normal", 1))
    assert "has no column normalised_return" in figures("ewma", tmp_path, "--csv", tmp_path, code=2)
    path = tmp_path / "ewma_runs.csv"
    path.write_text(re.sub(r"^(dodgeball,.*?),True,", r"\1,perhaps,", path.read_text(), count=1, flags=re.MULTILINE))
    printed = figures("ewma", tmp_path, "--csv", tmp_path, code=2)
    assert "column finished has something that is not a number" in printed and printed.count("\n") == 1


def test_advice(tmp_path):
    """On a run made to go wrong in all three ways, on one that is fine, and on none."""
    flags = {"epochs": 3, "clip_coef": 0.2, "learning_rate": 0.5, "adv_norm": "iteration", "no_adjust": ["adv-norm"]}
    advice = fake_run(tmp_path / "bad", flags, [0.6] * 50, [0.1, 2.0] * 25)
    assert "60.00% of ratios" in advice and "lower --learning-rate" in advice
    assert "Consider --epochs 1" in advice
    assert "factor of 20.0" in advice and "leave out adv-norm of --no-adjust" in advice

    flags |= {"epochs": 1, "prox_com": 8.0, "no_adjust": []}
    advice = fake_run(tmp_path / "good", flags, [0.05] * 50, np.linspace(1, 3, 50))
    assert advice.count("Nothing to change") == 3
    advice = fake_run(tmp_path / "outside", flags, [0.1156] * 50, [1] * 50)
    assert "11.56% of ratios" in advice and "within a factor of 2 (0.5% to 20%). Nothing to change" in advice
    advice = fake_run(tmp_path / "timid", flags, [0.001] * 50, [1] * 50)
    assert "Far too few" in advice and "a higher --prox-com (now 8)" in advice
    assert "clipping: is off" in fake_run(tmp_path / "unclipped", flags | {"clip_coef": 0}, [0] * 50, [1] * 50)

    printed = run(figures_program, "advice", tmp_path, code=2)
    assert "there is no checkpoint.pt" in printed and printed.count("\n") == 1


def fake_run(folder, flags, clip_fractions, stds):
    with SummaryWriter(folder) as writer:
        for step, (fraction, std) in enumerate(zip(clip_fractions, stds, strict=True)):
            writer.add_scalar("policy/clip_fraction", fraction, step)
            writer.add_scalar("value/advantage_std_used", std, step)
    args = {"env_id": "starpilot", "num_envs": 4} | flags
    saved = {"args": args, "script": "ppo", "format": 2, "global_step": 50, "agent": {}}
    torch.save(saved, folder / "checkpoint.pt")
    return run(figures_program, "advice", folder)


# Parts.


def test_reading_a_resumed_run(tmp_path):
    """What was logged after the checkpoint that a run continued from does not count."""
    with SummaryWriter(tmp_path, filename_suffix=".a") as writer:
        for step in range(5):
            writer.add_scalar(RETURN, step, step)
    time.sleep(1.1)  # the files' names hold the second
    with SummaryWriter(tmp_path, purge_step=3, filename_suffix=".b") as writer:
        writer.add_scalar(RETURN, 30, 3)
    curve = read_scalars(tmp_path, [RETURN])[0][RETURN]
    assert curve.tolist() == [[0, 0], [1, 1], [2, 2], [3, 30]]
    theirs = EventAccumulator(str(tmp_path)).Reload().Scalars(RETURN)
    assert [[event.step, event.value] for event in theirs] == curve.tolist()


def test_the_end_of_a_long_log(tmp_path):
    """--status reads the last kilobytes only; also where a resumed run has hardly logged anything."""
    with SummaryWriter(tmp_path, filename_suffix=".a") as writer:
        for step in range(3000):
            writer.add_scalar(RETURN, step / 2, step)
            writer.add_scalar(STEPS, step, step)
    assert max(path.stat().st_size for path in tmp_path.iterdir()) > 5 * 2**15
    assert read_last(tmp_path, [RETURN, STEPS]) == {RETURN: (2999, 1499.5), STEPS: (2999, 2999)}
    time.sleep(1.1)  # the files' names hold the second
    with SummaryWriter(tmp_path, purge_step=2000, filename_suffix=".b") as writer:
        writer.add_scalar(STEPS, 2000, 2000)
    assert read_last(tmp_path, [RETURN, STEPS]) == {RETURN: (2999, 1499.5), STEPS: (2000, 2000)}


def test_the_papers_numbers_of_runs():
    numbers = {name: len(runs_of(name, "paper")) for name in EXPERIMENTS}
    assert numbers == {
        "staleness": (1 + 3 * 7) * 16 * 4,
        "batch-size": (5 + 3 * 4 + 5 + 1) * 16 * 3,
        "ewma": 4 * 16 * 4,
        "linear-lr": (5 + 4) * 16 * 3,
        "adam-betas": (5 + 2 * 4) * 3,
        "com-vs-kl": 25 * 2,
    }


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_scripts_take_all_flags(name, scale):
    """Every setting, through the script's own parser; and what is not to be adjusted is not."""
    for x in runs_of(name, scale, SCALES[scale].games[:1], seeds=[1]):
        # short rollouts, since the scripts refuse what does not fit into this machine's memory
        words = [*x.words()[1:], "--run-dir", "unused", "--num-steps", 8]
        args, used = parse(Path(x.script).stem, *words, module=script_of(x))
        ratio = args.reference_num_envs / args.num_envs
        assert args.seed == 1 and args.env_id == "lab.minatar:" * scale.startswith("minatar") + x.game
        expected = {"no-step-size": 1, "linear": ratio}.get(x.variant, ratio**0.5)
        assert args.learning_rate / used.lr == pytest.approx(expected)
        if "ewma" in x.script:
            assert used.prox_com == pytest.approx(args.prox_com * (1 if x.variant == "no-ewma-adjustment" else ratio))
        assert used.adv_norm_span == (1 if x.variant == "no-adv-norm" else ratio)
        if "ppg" in x.script:  # the phase has the same number of steps at all batch sizes
            assert used.n_pi == args.n_pi * (1 if x.variant in ("no-n-pi", "ppg-ewma-no-n-pi") else ratio)


def script_of(x):
    """What runs, as a module; for MinAtar, the patched copy."""
    with program(x) as ((_, path), _), mock.patch("helpers.ROOT", Path(path).parent):
        return (load.__wrapped__ if x.patched else load)(Path(path).stem)


def test_minatar(tmp_path, monkeypatch):
    """Patched scripts learn, stop and continue as the others do; their returns are not normalised."""
    small = {"seeds": 2, "sizes": [4, 1], "games": ["breakout"]}
    small["flags"] = SCALES["minatar"].flags | {"total-timesteps": 1024}
    monkeypatch.setitem(SCALES, "minatar", replace(SCALES["minatar"], **small))
    words = ["linear-lr", "--scale", "minatar", "--runs-dir", tmp_path, "--workers", WORKERS]
    assert "python ppo_ewma.py --env-id lab.minatar:breakout --seed 1" in run(sweep_program, *words, "--dry-run")
    assert "done" in run(sweep_program, *words)
    figures("linear-lr", tmp_path)
    folder = tmp_path / "linear-lr/minatar/figures"
    text = check_picture(folder / "linear-lr.png", LIGHTEST)
    assert "Game: MinAtar's Breakout; 1,024 environment steps" in text
    rows = pd.read_csv(folder / "linear-lr_runs.csv")
    assert rows["finished"].all() and (rows["final_return"] == rows["final_normalised_return"]).all()
    assert len(rows) == 6 and rows["final_return"].between(0.01, 5).all()  # a random policy has 0.5

    longer = SCALES["minatar"].flags | {"total-timesteps": 2048}
    monkeypatch.setitem(SCALES, "minatar", replace(SCALES["minatar"], flags=longer))
    assert "6 runs: 0 finished already" in run(sweep_program, *words)
    assert "6 finished" in run(sweep_program, *words, "--status")
    for x in runs_of("linear-lr", "minatar"):
        assert "resumed    after iteration" in x.file(tmp_path, "log").read_text()


def test_minatar_without_patch(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    printed = run(sweep_program, "ewma", "--scale", "minatar", "--runs-dir", tmp_path / "runs", code=2)
    assert "there is no program named patch" in printed and printed.count("\n") == 1


SBATCH = """#!/bin/sh
for last; do :; done
cp "$last" "$SUBMITTED"
echo "Submitted batch job 7"
"""
SQUEUE = """#!/bin/sh
echo "7_0 PENDING"
echo "7_1 RUNNING"
echo "7_2 PENDING"
"""


def test_slurm_gets_the_same_runs(tmp_path, monkeypatch):
    """With stand-ins for Slurm's commands: what is submitted, and that it is submitted once."""
    submitted, programs = tmp_path / "submitted.sh", tmp_path / "bin"
    programs.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": "#!/bin/sh\n", "squeue": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("SUBMITTED", str(submitted))
    words = ["--seeds", 1, "--executor", "slurm"]
    flags = ["--partition", "night", "--gpus", 2, "--cpus", 3, "--time", 90]
    printed = sweep("linear-lr", tmp_path, *words, *flags)
    assert "3 jobs handed to Slurm" in printed
    script = submitted.read_text()
    for line in ["partition=night", "gpus-per-node=2", "cpus-per-task=3", "time=90", "array=0-2%"]:
        assert f"#SBATCH --{line}" in script
    assert f"export PYTHONPATH={ROOT / 'experiments'}" in script

    (programs / "squeue").write_text(SQUEUE)
    status = sweep("linear-lr", tmp_path, "--seeds", 1, "--status")
    assert re.search(r"sqrt__4__seed1 +submitted", status) and re.search(r"sqrt__2__seed1 +running", status)
    assert "3 with another process, 0 to do" in sweep("linear-lr", tmp_path, *words)


def test_slurm_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    printed = sweep("linear-lr", tmp_path, "--executor", "slurm", code=2)
    assert "--executor slurm: " in printed and printed.count("\n") == 1
    assert not list(tmp_path.iterdir())
