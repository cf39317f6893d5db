"""The experiments from end to end at smoke scale: real training, real files, figures that show something."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from helpers import ROOT, parse
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(ROOT / "experiments"))
from catalogue import EXPERIMENTS, SCALES, runs_of  # noqa: E402
from curves import RETURN, read_scalars  # noqa: E402
from execution import state_of  # noqa: E402

WORKERS = str(os.cpu_count())


def run(program, *words, code=0, **options):
    """Run sweep.py or figures.py; returns what it printed, errors included."""
    command = [sys.executable, str(ROOT / "experiments" / program), *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def sweep(name, runs_dir, *words, **options):
    return run("sweep.py", name, "--scale", "smoke", "--runs-dir", runs_dir, "--workers", WORKERS, *words, **options)


def figures(name, runs_dir, *words, **options):
    return run("figures.py", name, "--runs-dir", runs_dir, *words, **options)


def check_picture(path):
    """A picture that shows something: not of one colour, and with ink on more than the frame."""
    pixels = plt.imread(path)[..., :3]
    assert pixels.shape[1] >= 800, "too small for a README"
    assert (pixels.min(axis=2) < 0.9).mean() > 0.02
    assert len(np.unique(pixels.reshape(-1, 3).round(2), axis=0)) > 20
    root = ElementTree.parse(path.with_suffix(".svg")).getroot()
    return " ".join("".join(x.itertext()) for x in root.iter("{http://www.w3.org/2000/svg}text"))


def check_results(name, runs_dir, pictures, seeds):
    """All files of a finished experiment, and the numbers in them against TensorBoard's own reader."""
    folder = runs_dir / name / "smoke" / "figures"
    texts = {picture: check_picture(folder / f"{picture}.png") for picture in pictures}
    assert {path.stem for path in folder.glob("*.png")} == set(pictures)
    for text in texts.values():
        assert "512 environment steps" in text and "Shrunk" in text and "easy mode, 1 level" in text
    runs = runs_of(name, "smoke", seeds=seeds)
    table = pd.read_csv(folder / f"{name}_runs.csv", dtype={"value": str})
    curves = pd.read_csv(folder / f"{name}.csv", dtype={"value": str})
    key = ["game", "variant", "value", "seed"]
    expected = {(x.game, x.variant, x.value, x.seed) for x in runs}
    assert set(table[key].itertuples(index=False, name=None)) == expected
    assert set(curves[key].itertuples(index=False, name=None)) == expected
    assert table["finished"].all() and (table["seconds"] > 0).all()
    low, high = (2.5, 64) if runs[0].game == "starpilot" else (3.5, 10)  # Procgen's constants, easy mode
    for x in runs:
        events = EventAccumulator(str(x.folder(runs_dir)), size_guidance={"scalars": 0}).Reload().Scalars(RETURN)
        mask = (table[key].astype(str) == [x.game, x.variant, x.value, str(x.seed)]).all(axis=1)
        final = np.mean([event.value for event in events if event.step > 512 - 51])
        assert table.loc[mask, "final_return"].item() == pytest.approx(final, rel=1e-4)
        normalised = table.loc[mask, "final_normalised_return"].item()
        assert normalised == pytest.approx((final - low) / (high - low), rel=1e-4)
    return texts, (folder / f"{name}.md").read_text()


# The six experiments. Where a sweep is to be disturbed, it is disturbed here, so that runs are made only once.


def test_staleness(runs_dir):
    sweep("staleness", runs_dir, "--seeds", 1)
    printed = figures("staleness", runs_dir)
    assert "one seed only" in printed
    texts, report = check_results("staleness", runs_dir, ["staleness"], [1])
    assert "one seed, so there are no error bars" in texts["staleness"]
    assert "decoupled 1 | recent 1" in report
    curves = (runs_dir / "staleness/smoke").glob("starpilot__*")
    assert len(list(curves)) == 4  # at staleness 0 one run serves the three losses


def test_batch_size(runs_dir):
    sweep("batch-size", runs_dir, "--seeds", 1)
    figures("batch-size", runs_dir)
    pictures = ["batch-size", "batch-size_difference", "batch-size_advantage_std"]
    texts, report = check_results("batch-size", runs_dir, pictures, [1])
    assert "KL penalty 1/256" in texts["batch-size"]
    swings = pd.read_csv(runs_dir / "batch-size/smoke/figures/batch-size_advantage_std.csv")
    assert set(swings["value"]) == {1, 4} and (swings["std"] > 0).all()

    # Table 5, recomputed from the table of runs: with one seed a Z is +1, 0 or -1.
    table = pd.read_csv(runs_dir / "batch-size/smoke/figures/batch-size_runs.csv")
    final = table.set_index(["variant", "value"])["final_normalised_return"]
    gap = final["all", 4] - final["all", 1]
    expected = []
    for variant in ["no-step-size", "no-adv-norm", "no-ewma-adjustment", "no-ewma"]:
        reference = final["no-ewma" if variant == "no-ewma" else "all", 4]
        expected.append(reference - final[variant, 1] - gap)
    cells = re.search(r"\| 1 \| (.*) \|", report).group(1).split(" | ")
    for cell, effect in zip(cells, expected, strict=True):
        size, z = re.fullmatch(r"(\S+) \((\S+)\)", cell).groups()
        assert float(size) == pytest.approx(effect, abs=6e-4)
        assert float(z) == np.sign(round(effect, 6))


def test_ewma(runs_dir):
    sweep("ewma", runs_dir, "--seeds", 1, 2)
    printed = figures("ewma", runs_dir)
    assert "note" not in printed
    texts, report = check_results("ewma", runs_dir, ["ewma"], [1, 2])
    assert "2 seeds" in texts["ewma"]
    assert len(re.findall(r"\| algorithms \| \S+ \| \S+ \| \d\.\d+ \| \S+ \| \S+ to \S+ \| 2 \|", report)) == 4
    with_intervals = re.findall(r"algorithms (\S+) \| algorithms (\S+) \| \S+ \| \S+ to \S+ \|", report)
    assert with_intervals == [("ppo-ewma", "ppo"), ("ppg-ewma", "ppg")]


def test_linear_lr_interrupted(runs_dir):
    """Stopped while it trains, a sweep goes on from there, and does not touch what is finished."""
    command = [sys.executable, ROOT / "experiments/sweep.py", "linear-lr", "--scale", "smoke", "--seeds", "1"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([*command, "--runs-dir", runs_dir, "--workers", "1"], **options)
    first, second = runs_of("linear-lr", "smoke", seeds=[1])
    while state_of(second, runs_dir, {}).name != "running" and process.poll() is None:
        time.sleep(0.02)
    status = sweep("linear-lr", runs_dir, "--seeds", 1, "--status") if process.poll() is None else ""
    process.send_signal(signal.SIGTERM)
    printed = process.communicate()[0]
    assert process.returncode == 130, printed
    assert "the same command goes on" in printed
    assert re.search(r"starpilot__linear__4__seed1 +finished +100%", status), status
    left = state_of(second, runs_dir, {})
    assert left.name in ("stopped", "finished")
    finished_at = (first.folder(runs_dir) / "checkpoint.pt").stat().st_mtime_ns

    printed = sweep("linear-lr", runs_dir, "--seeds", 1)
    assert "1 finished already" in printed or "2 finished already" in printed
    assert (first.folder(runs_dir) / "checkpoint.pt").stat().st_mtime_ns == finished_at
    status = sweep("linear-lr", runs_dir, "--seeds", 1, "--status")
    assert len(re.findall(r"finished +100% +-?\d+\.\d\d", status)) == 2 and status.endswith("2 finished\n")
    figures("linear-lr", runs_dir)
    check_results("linear-lr", runs_dir, ["linear-lr"], [1])


def test_adam_betas_with_a_failure(runs_dir):
    """A run that fails stops no other, and is listed with its log."""
    runs = runs_of("adam-betas", "smoke", seeds=[1])
    broken = next(x for x in runs if x.variant == "both").folder(runs_dir)
    broken.mkdir(parents=True)
    (broken / "checkpoint.pt").write_text("no checkpoint")
    printed = sweep("adam-betas", runs_dir, "--seeds", 1, code=1)
    assert f"failed: {broken.name} (exit code 2), log: " in printed and "checkpoint.pt is damaged" in printed
    status = sweep("adam-betas", runs_dir, "--seeds", 1, "--status")
    assert re.search(f"{broken.name} +failed", status) and "3 finished, 1 failed" in status
    assert "3 of 4 runs are finished" in figures("adam-betas", runs_dir)
    check_picture(runs_dir / "adam-betas/smoke/figures/adam-betas.png")
    shutil.rmtree(broken)
    assert "3 finished already, 0 with another process, 1 to do" in sweep("adam-betas", runs_dir, "--seeds", 1)
    figures("adam-betas", runs_dir)
    check_results("adam-betas", runs_dir, ["adam-betas"], [1])


def test_com_vs_kl(runs_dir):
    printed = sweep("com-vs-kl", runs_dir, "--dry-run")
    commands = [line for line in printed.splitlines() if line.startswith("python ppg_ewma.py")]
    assert len(commands) == 4 and "4 runs, 2,048 environment steps" in printed
    assert re.search(r"[\d,]+ steps/s measured\ntime: about \d+\.\d minutes .*\ndisk: about \d+\.\d MB", printed)
    assert not (runs_dir / "com-vs-kl").exists()

    sweep("com-vs-kl", runs_dir)
    figures("com-vs-kl", runs_dir)
    texts, _ = check_results("com-vs-kl", runs_dir, ["com-vs-kl"], [1])
    assert "--prox-com" in texts["com-vs-kl"] and "--kl-coef" in texts["com-vs-kl"]


# What can be wrong with runs. These use copies of the runs above.


@pytest.fixture
def linear_lr(runs_dir, tmp_path):
    if not (runs_dir / "linear-lr").exists():
        sweep("linear-lr", runs_dir, "--seeds", 1)
    shutil.copytree(runs_dir / "linear-lr", tmp_path / "linear-lr", ignore=shutil.ignore_patterns("figures"))
    return tmp_path


def test_no_runs(tmp_path):
    assert figures("ewma", tmp_path, code=2).count("\n") == 1
    assert "no runs of ewma found" in figures("ewma", tmp_path, code=2)


def test_runs_of_mixed_scale(linear_lr):
    shutil.copytree(linear_lr / "linear-lr/smoke", linear_lr / "linear-lr/small")
    for path in (linear_lr / "linear-lr/small/sweep").glob("*.json"):
        path.write_text(path.read_text().replace('"smoke"', '"small"'))
    printed = figures("linear-lr", linear_lr)
    assert "note: runs of mixed scale: small, smoke; this is small" in printed
    check_picture(linear_lr / "linear-lr/small/figures/linear-lr.png")
    assert "mixed" not in figures("linear-lr", linear_lr, "--scale", "smoke")


def test_a_damaged_event_file(linear_lr):
    (path,) = (linear_lr / "linear-lr/smoke/starpilot__linear__1__seed1").glob("events*")
    path.write_bytes(path.read_bytes()[:-200] + b"\xff" * 100)
    printed = figures("linear-lr", linear_lr)
    assert f"note: {path}: is damaged; showing what can be read of it" in printed
    assert "1 of 2 runs are finished" in printed
    check_picture(linear_lr / "linear-lr/smoke/figures/linear-lr.png")


def test_runs_with_other_flags_are_not_gone_on_with(linear_lr):
    path = linear_lr / "linear-lr/smoke/sweep/starpilot__linear__1__seed1.json"
    specification = json.loads(path.read_text())
    specification["flags"]["learning-rate"] = 0.5
    path.write_text(json.dumps(specification))
    printed = sweep("linear-lr", linear_lr, "--seeds", 1, code=2)
    assert "was started with learning-rate 0.5, now 0.0005" in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    "words, message",
    [
        (["sokoban"], "invalid choice: 'sokoban'"),
        (["ewma", "--games", "chess"], "invalid choice: 'chess'"),
        (["ewma", "--seeds", "0"], "0: must be a whole number, 1 or more"),
        (["ewma", "--seeds", "1", "1"], "--seeds: one is given twice"),
        (["ewma", "--gpus", "1"], "--gpus: only with --executor slurm"),
        (["ewma", "--dry-run", "--status"], "one of them"),
    ],
)
def test_bad_words(words, message, tmp_path):
    printed = run("sweep.py", *words, code=2, cwd=tmp_path)
    assert message in printed and printed.strip().count("\n") == 0
    assert not list(tmp_path.iterdir())


def test_advice(runs_dir, tmp_path):
    """On a run made to go wrong in all three ways, on one that is fine, and on none."""
    flags = {"epochs": 3, "clip_coef": 0.2, "learning_rate": 0.5, "adv_norm": "iteration", "no_adjust": ["adv-norm"]}
    advice = fake_run(tmp_path / "bad", flags, [0.6] * 50, [0.1, 2.0] * 25)
    assert "60.00% of ratios" in advice and "lower --learning-rate" in advice
    assert "Consider --epochs 1" in advice
    assert "factor of 20.0" in advice and "leave out adv-norm of --no-adjust" in advice

    flags |= {"epochs": 1, "prox_com": 8.0, "no_adjust": []}
    advice = fake_run(tmp_path / "good", flags, [0.05] * 50, np.linspace(1, 3, 50))
    assert advice.count("Nothing to change") == 3
    advice = fake_run(tmp_path / "timid", flags, [0.001] * 50, [1] * 50)
    assert "Far too few" in advice and "a higher --prox-com (now 8)" in advice
    assert "clipping: is off" in fake_run(tmp_path / "unclipped", flags | {"clip_coef": 0}, [0] * 50, [1] * 50)

    real = runs_dir / "staleness/smoke/starpilot__decoupled__1__seed1"
    if real.exists():
        assert "staleness.py on starpilot, 4 environments, 512 steps" in run("figures.py", "advice", real)
    printed = run("figures.py", "advice", tmp_path, code=2)
    assert "no run is there" in printed and printed.count("\n") == 1


def fake_run(folder, flags, clip_fractions, stds):
    with SummaryWriter(folder) as writer:
        for step, (fraction, std) in enumerate(zip(clip_fractions, stds, strict=True)):
            writer.add_scalar("policy/clip_fraction", fraction, step)
            writer.add_scalar("advantage/std_used", std, step)
    args = {"env_id": "starpilot", "num_envs": 4} | flags
    torch.save({"args": args, "script": "ppo", "global_step": 50}, folder / "checkpoint.pt")
    return run("figures.py", "advice", folder)


# Parts.


def test_reading_a_resumed_run(tmp_path):
    """What was logged after the checkpoint that a run went on from does not count."""
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


def test_the_papers_numbers_of_runs():
    numbers = {name: len(runs_of(name, "paper")) for name in EXPERIMENTS}
    assert numbers == {
        "staleness": (1 + 3 * 7) * 16 * 4,
        "batch-size": (5 + 3 * 4 + 5 + 1) * 16 * 3,
        "ewma": 4 * 16 * 4,
        "linear-lr": 5 * 16 * 3,
        "adam-betas": (5 + 2 * 4) * 3,
        "com-vs-kl": 25 * 2,
    }


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_scripts_take_all_flags(name, scale):
    """Every setting, through the script's own parser; and what is not to be adjusted is not."""
    for x in runs_of(name, scale, seeds=[1])[: len(list(EXPERIMENTS[name][0](scale)))]:
        args, table = parse(Path(x.script).stem, *x.words()[1:], "--run-dir", "unused")
        ratio = args.reference_num_envs / args.num_envs
        assert args.seed == 1 and args.env_id == x.game
        expected = {"no-step-size": 1, "linear": ratio}.get(x.variant, ratio**0.5)
        assert table["lr"][1] / table["lr"][2] == pytest.approx(expected)
        if "prox" in table:
            assert table["prox"][2] == pytest.approx(
                args.prox_com * (1 if x.variant == "no-ewma-adjustment" else ratio)
            )
        assert table["adv-norm"][2] == (1 if x.variant == "no-adv-norm" else ratio)
        if "n-pi" in table:  # the phase has the same number of steps at all batch sizes
            assert table["n-pi"][2] == args.n_pi * (1 if x.variant == "ppg-ewma-no-n-pi" else ratio)


SBATCH = """#!/bin/sh
for last; do :; done
cp "$last" "$SUBMITTED"
echo "Submitted batch job 7"
"""
SQUEUE = """#!/bin/sh
echo "7_0 PENDING"
echo "7_1 RUNNING"
"""


def test_slurm_gets_the_same_runs(tmp_path):
    """With stand-ins for Slurm's commands: what is submitted, and that it is submitted once."""
    submitted, programs = tmp_path / "submitted.sh", tmp_path / "bin"
    programs.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": "#!/bin/sh\n", "squeue": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:/usr/bin:/bin", "SUBMITTED": str(submitted)}
    words = ["--seeds", 1, "--executor", "slurm"]
    flags = ["--partition", "night", "--gpus", 2, "--cpus", 3, "--time", 90]
    printed = sweep("linear-lr", tmp_path, *words, *flags, env=environment)
    assert "2 jobs handed to Slurm" in printed
    script = submitted.read_text()
    for line in ["partition=night", "gpus-per-node=2", "cpus-per-task=3", "time=90", "array=0-1%"]:
        assert f"#SBATCH --{line}" in script
    assert f"export PYTHONPATH={ROOT / 'experiments'}" in script

    (programs / "squeue").write_text(SQUEUE)
    status = sweep("linear-lr", tmp_path, "--seeds", 1, "--status", env=environment)
    assert re.search(r"linear__4__seed1 +submitted", status) and re.search(r"linear__1__seed1 +running", status)
    assert "2 with another process, 0 to do" in sweep("linear-lr", tmp_path, *words, env=environment)


def test_slurm_is_missing(tmp_path):
    printed = sweep("linear-lr", tmp_path, "--executor", "slurm", code=2, env={**os.environ, "PATH": str(tmp_path)})
    assert "--executor slurm: " in printed and "Traceback" not in printed
