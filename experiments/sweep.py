"""Run one experiment of the paper: all its settings, games and seeds, on this machine or on a Slurm cluster.

  python experiments/sweep.py staleness --scale small --dry-run    what would run, and what it takes
  python experiments/sweep.py staleness --scale small              run it; the same again goes on where it stopped
  python experiments/sweep.py staleness --scale small --status     how far it is
  python experiments/figures.py staleness                          the figure, at any time

The experiments are listed in catalogue.py.
"""

import argparse
import json
import os
import shlex
import signal
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

try:
    import submitit
    from catalogue import EXPERIMENTS, GAMES, SCALES, runs_of
    from cost import estimate, hours
    from curves import Results
    from execution import STOPPED, SlurmJob, execute, read_end, slurm_jobs, state_of, stop_all
except ImportError as error:
    print(f"sweep.py: error: {error}; pip install -r experiments/requirements.txt", file=sys.stderr)
    sys.exit(2)

ARRAY = 1000  # jobs in a Slurm array; Slurm's own default is to allow 1001


def fail(message):
    print(f"sweep.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def count(text):
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, 1 or more")
    return int(text)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    add = parser.add_argument
    add("name", metavar="NAME", choices=EXPERIMENTS, help=", ".join(EXPERIMENTS))
    add(
        "--scale",
        choices=SCALES,
        default="small",
        help="paper: the paper's; small: a night on 2 cores; smoke: a minute",
    )
    add("--games", nargs="+", choices=GAMES, metavar="GAME", help="default: the experiment's at this scale")
    add("--seeds", nargs="+", type=count, metavar="SEED", help="default: 1 up to the experiment's number")
    add("--runs-dir", default="runs", help="where runs go: RUNS_DIR/NAME/SCALE/; default: runs")
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
    for name in ("games", "seeds"):
        if len(set(getattr(args, name) or [])) < len(getattr(args, name) or []):
            fail(f"--{name}: one is given twice")
    return args


def without(runs, args):
    """The runs that are not finished elsewhere, according to --csv."""
    if not args.csv:
        return runs
    try:
        table = Results.of_csv(args.name, args.csv).all_rows.query("finished and scale == @args.scale")
    except (OSError, ValueError, KeyError, IndexError) as error:
        fail(f"--csv {args.csv}: has no tables of {args.name} that figures.py has written ({error})")
    finished = set(table[["game", "variant", "value", "seed"]].itertuples(index=False, name=None))
    left = [run for run in runs if (run.game, run.variant, run.value, run.seed) not in finished]
    print(f"{len(runs) - len(left)} of {len(runs)} runs are finished in {args.csv}, and left out here")
    if not left:
        sys.exit()
    return left


def write_specifications(runs, runs_dir):
    """Leave with each run what it is, for figures.py; refuse to go on with a run that was something else."""
    for run in runs:
        path = run.file(runs_dir, "json")
        if path.exists() and run.folder(runs_dir).exists():
            old = json.loads(path.read_text())
            before, now = ({"script": x["script"]} | x["flags"] for x in (old, vars(run)))
            changed = sorted(x for x in before.keys() | now.keys() if before.get(x) != now.get(x))
            if changed == ["total-timesteps"] and before["total-timesteps"] < now["total-timesteps"]:
                changed = []  # a longer run goes on from a shorter one
            if changed:
                was = ", ".join(f"{x} {before.get(x)}, now {now.get(x)}" for x in changed)
                fail(f"{run.folder(runs_dir)}: was started with {was}; take another --runs-dir, or remove it")
    try:
        for run in runs:
            path = run.file(runs_dir, "json")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(run.to_json())
    except OSError as error:
        fail(f"--runs-dir {runs_dir}: cannot be written ({error.strerror})")


def print_status(runs, runs_dir, jobs):
    states = {run.name: state_of(run, runs_dir, jobs) for run in runs}
    width = max(map(len, states))
    print(f"{'RUN':<{width}}  {'STATE':<9} {'DONE':>5}  RECENT RETURN")
    for run in runs:
        state = states[run.name]
        recent = "" if state.recent is None else f"{state.recent:.2f}"
        print(f"{run.name:<{width}}  {state.name:<9} {state.steps / run.steps:>5.0%}  {recent}")
    print_failures([run for run in runs if states[run.name].name == "failed"], runs_dir)
    counts = Counter(state.name for state in states.values())
    print(", ".join(f"{number} {name}" for name, number in counts.items()))


def print_failures(runs, runs_dir):
    for run in runs:
        log = run.file(runs_dir, "log")
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        code = read_end(run.file(runs_dir, "exit")).get("code")
        print(f"failed: {run.name} (exit code {code}), log: {log}\n  {lines[-1] if lines else 'the log is empty'}")


def run_here(runs, runs_dir, workers, threads):
    """Returns the runs that failed."""
    failed = []
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(execute, run, runs_dir, threads): run for run in runs}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                run, code = futures[future], future.result()
                took = hours(read_end(run.file(runs_dir, "exit"))["seconds"])
                outcome = "finished" if code == 0 else "stopped" if code in STOPPED else "FAILED"
                print(f"[{number}/{len(runs)}] {outcome:<8} {run.name}, {took}", flush=True)
                failed += [run] * (outcome == "FAILED")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_all()
            print("\nstopped; the same command goes on from here", file=sys.stderr)
            sys.exit(130)
    return failed


def submit(runs, runs_dir, args):
    """Hand the runs to Slurm, as arrays of jobs."""
    runs_dir = runs_dir.resolve()
    cpus = args.cpus or 2
    try:
        folder = runs_dir / args.name / args.scale / "sweep" / "slurm"
        executor = submitit.AutoExecutor(
            folder, cluster="slurm", slurm_max_num_timeout=1000
        )  # queue again, however often
        executor.update_parameters(
            name=f"{args.name}-{args.scale}",
            timeout_min=args.time or 1440,
            cpus_per_task=cpus,
            slurm_array_parallelism=args.workers or ARRAY,
            slurm_setup=[f"export PYTHONPATH={shlex.quote(str(Path(__file__).resolve().parent))}"],  # has execution.py
            **({"slurm_partition": args.partition} if args.partition else {}),
            **({"gpus_per_node": args.gpus} if args.gpus else {}),
        )
        for start in range(0, len(runs), ARRAY):
            batch = runs[start : start + ARRAY]
            for run, job in zip(batch, executor.map_array(SlurmJob(runs_dir, cpus), batch), strict=True):
                run.file(runs_dir, "job").write_text(job.job_id)
    except (RuntimeError, submitit.core.utils.FailedJobError) as error:
        fail(f"--executor slurm: {str(error).strip().splitlines()[-1]}")
    print(f"{len(runs)} jobs handed to Slurm; --status shows how far they are, and this command again resumes them")


def main():
    args = parse_args()
    runs_dir = Path(args.runs_dir)
    runs = without(runs_of(args.name, args.scale, args.games, args.seeds), args)
    cores = len(os.sched_getaffinity(0))
    workers = args.workers or (1 if args.scale == "paper" else cores)
    threads = max(1, cores // workers)
    jobs = slurm_jobs()
    if args.status:
        print_status(runs, runs_dir, jobs)
        return
    if args.dry_run:
        for run in runs:
            print(shlex.join(["python", *run.words(), "--run-dir", str(run.folder(runs_dir))]))
        print(f"{len(runs)} runs, {sum(run.steps for run in runs):,} environment steps, {threads} threads for each run")
        estimate(runs, threads, workers)
        return

    write_specifications(runs, runs_dir)
    states = {run.name: state_of(run, runs_dir, jobs).name for run in runs}
    todo = [run for run in runs if states[run.name] in ("queued", "stopped", "failed")]
    finished = sum(state == "finished" for state in states.values())
    elsewhere = len(runs) - len(todo) - finished
    print(f"{len(runs)} runs: {finished} finished already, {elsewhere} with another process, {len(todo)} to do")
    if args.executor == "slurm":
        if todo:
            submit(todo, runs_dir, args)
        return
    print(f"{workers} at a time with {threads} threads each; --status in another terminal shows how far they are")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, also where that is ignored (nohup, &)
    failed = run_here(todo, runs_dir, workers, threads)
    print_failures(failed, runs_dir)
    if failed:
        print(f"{len(failed)} of {len(todo)} runs failed; the same command tries them again")
        sys.exit(1)
    print(f"done; python experiments/figures.py {args.name} draws the figure")


if __name__ == "__main__":
    main()
