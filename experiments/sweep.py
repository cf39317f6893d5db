"""Run one experiment of the paper: all its settings, games and seeds, on this machine or on a Slurm cluster.

  python experiments/sweep.py staleness --scale small --dry-run    what would run, and what it takes
  python experiments/sweep.py staleness --scale small              run it; the same again continues where it stopped
  python experiments/sweep.py staleness --scale small --status     how far it is
  python experiments/figures.py staleness                          the figure, at any time

The experiments are listed in lab/catalogue.py.
"""

import json
import os
import shlex
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

from lab.catalogue import EXPERIMENTS, GAMES, MINATAR, SCALES, runs_of
from lab.common import Parser, fail, number
from lab.cost import estimate
from lab.running import ARRAY, read_end, run_here, states_of, submit
from lab.runs import KEY, key_of, results_of_csv


def parse_args():
    parser = Parser(description=__doc__)
    add, count = parser.add_argument, number(int, 1, 2**31 - 1)
    add("name", metavar="NAME", choices=EXPERIMENTS, help=", ".join(EXPERIMENTS))
    scales = "paper: the paper's; small: a day or two on 2 cores; "
    scales += "minatar, minatar-ppg: other games, many seeds; smoke: a minute"
    add("--scale", choices=SCALES, default="small", help=scales)
    add("--games", nargs="+", choices=GAMES, metavar="GAME", help="default: the experiment's at this scale")
    add("--seeds", nargs="+", type=count, metavar="SEED", help="default: 1 up to the experiment's number")
    add("--variants", nargs="+", metavar="VARIANT", help="only these panels of the figure; default: all of them")
    add("--runs-dir", type=Path, default="runs", help="where runs go: RUNS_DIR/NAME/SCALE/; default: runs")
    add("--csv", metavar="FOLDER", help="tables of figures.py, made elsewhere: what is finished there is not run again")
    add("--workers", type=count, help="runs at the same time; default: one for each core, at paper scale 1")
    add("--dry-run", action="store_true", help="print the commands and what they take, measured on this machine")
    add("--status", action="store_true", help="print a table of the runs")
    add("--executor", choices=["local", "slurm"], default="local", help="this machine, or jobs of Slurm")
    slurm = [
        add("--partition", help="Slurm's partition; default: the cluster's"),
        add("--gpus", type=count, help="GPUs for each run; default: none"),
        add("--cpus", type=count, help="CPU cores for each run; default: 2"),
        add("--time", type=count, help="minutes before Slurm stops a run, which is then queued again; default: 1440"),
    ]
    args = parser.parse_args()
    given = [option.option_strings[0] for option in slurm if getattr(args, option.dest) is not None]
    if given and args.executor != "slurm":
        fail(f"{', '.join(given)}: only with --executor slurm")
    if args.dry_run and args.status:
        fail("--dry-run and --status: one of them")
    if args.dry_run and args.executor == "slurm":
        fail("--dry-run: measures this machine; leave out --executor slurm")
    if args.executor == "slurm" and not args.status and not shutil.which("sbatch"):
        fail("--executor slurm: there is no sbatch here; give this command on a machine of the cluster")
    patched = SCALES[args.scale].games[0] in MINATAR
    if wrong := [game for game in args.games or [] if (game in MINATAR) != patched]:
        fail(f"--games {wrong[0]}: {'is for --scale minatar' if wrong[0] in MINATAR else 'is not one of MinAtar'}")
    if patched and not shutil.which("patch"):
        fail(f"--scale {args.scale}: there is no program named patch here, which changes the scripts")
    variants = list(dict.fromkeys(run.variant for run in runs_of(args.name, args.scale)))
    if wrong := [variant for variant in args.variants or [] if variant not in variants]:
        fail(f"--variants {wrong[0]}: {args.name} has {', '.join(variants)}")
    for name in ("games", "seeds", "variants"):
        if len(set(getattr(args, name) or [])) < len(getattr(args, name) or []):
            fail(f"--{name}: one is given twice")
    return args


def without_finished(runs, args):
    """The runs that are not finished elsewhere, according to --csv."""
    rows = results_of_csv(args.name, [args.csv]).all_rows
    done = rows.query("finished and scale == @args.scale")[KEY].to_dict("records")
    left = [run for run in runs if key_of(run) not in done]
    print(f"{len(runs) - len(left)} of {len(runs)} runs are finished in {args.csv}, and left out here")
    return left


def write_specifications(runs, runs_dir):
    """Leave with each run what it is, for figures.py; refuse to continue a run that was something else."""
    for run in runs:
        path = run.file(runs_dir, "json")
        if path.exists() and run.folder(runs_dir).exists():
            old = json.loads(path.read_text())
            before, now = ({"script": x["script"]} | x["flags"] for x in (old, vars(run)))
            changed = sorted(x for x in before.keys() | now.keys() if before.get(x) != now.get(x))
            if changed == ["total-timesteps"] and before["total-timesteps"] < now["total-timesteps"]:
                changed = []  # a longer run continues a shorter one
            if changed:
                was = ", ".join(f"{x} {before.get(x)}, now {now.get(x)}" for x in changed)
                fail(f"{run.folder(runs_dir)}: was started with {was}; take another --runs-dir, or remove it")
    try:
        for run in runs:
            run.write(runs_dir)
    except OSError as error:
        fail(f"--runs-dir {runs_dir}: cannot be written ({error.strerror})")


def print_status(runs, runs_dir, states):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for --status | head
    width = max(len(run.name) for run in runs)
    print(f"{'RUN':<{width}}  {'STATE':<9} {'DONE':>5}  RECENT RETURN")
    for run, state in zip(runs, states, strict=True):
        recent = "" if state.recent is None else f"{state.recent:.2f}"
        print(f"{run.name:<{width}}  {state.name:<9} {state.steps / run.steps:>5.0%}  {recent}")
    print_failures([run for run, state in zip(runs, states, strict=True) if state.name == "failed"], runs_dir)
    print(", ".join(f"{number} {name}" for name, number in Counter(state.name for state in states).items()))


def print_failures(runs, runs_dir):
    for run in runs:
        log = run.file(runs_dir, "log")
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        code = read_end(run.file(runs_dir, "exit")).get("code")
        print(f"failed: {run.name} (exit code {code}), log: {log}\n  {lines[-1] if lines else 'the log is empty'}")


def main():
    args = parse_args()
    runs, runs_dir = runs_of(args.name, args.scale, args.games, args.seeds, args.variants), args.runs_dir
    if args.csv:
        runs = without_finished(runs, args)
        if not runs:
            return
    cores = len(os.sched_getaffinity(0))
    workers = args.workers or (1 if args.scale == "paper" else cores)
    threads = max(1, cores // workers)
    each = f"{threads} thread{'s' * (threads != 1)}"
    if args.dry_run:
        for run in runs:
            print(shlex.join(["python", *run.words(), "--run-dir", str(run.folder(runs_dir))]))
        if runs[0].patched:
            print("the scripts are changed by patches/gymnasium.patch before they run, and PYTHONPATH is experiments")
        print(f"{len(runs)} runs, {sum(run.steps for run in runs):,} environment steps, {each} for each run")
        estimate(runs, threads, workers)
        return
    if not args.status:
        write_specifications(runs, runs_dir)
    states = states_of(runs, runs_dir)
    if args.status:
        print_status(runs, runs_dir, states)
        return

    todo = [run for run, state in zip(runs, states, strict=True) if state.name in ("queued", "stopped", "failed")]
    finished = sum(state.name == "finished" for state in states)
    elsewhere = len(runs) - len(todo) - finished
    print(f"{len(runs)} runs: {finished} finished already, {elsewhere} with another process, {len(todo)} to do")
    if args.executor == "slurm":
        if todo:
            name, parallel = f"{args.name}-{args.scale}", args.workers or ARRAY
            submit(todo, runs_dir, name, args.cpus or 2, parallel, args.time or 1440, args.partition, args.gpus)
            print(f"{len(todo)} jobs handed to Slurm; --status shows how far they are, and this command resumes them")
        return
    print(f"{workers} at a time with {each} each; --status in another terminal shows how far they are")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, also where that is ignored (nohup, &)
    try:
        failed = run_here(todo, runs_dir, workers, threads)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from here", file=sys.stderr)
        sys.exit(130)
    print_failures(failed, runs_dir)
    if failed:
        print(f"{len(failed)} of {len(todo)} runs failed; the same command tries them again")
        sys.exit(1)
    print(f"done; python experiments/figures.py {args.name} draws the figure")


if __name__ == "__main__":
    main()
