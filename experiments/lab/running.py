"""Running a sweep: one run, all runs on this machine, all runs on a Slurm cluster; and how far each of them is."""

import contextlib
import fcntl
import json
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import submitit.helpers
from tqdm import tqdm

from lab.common import ROOT, fail
from lab.logs import RETURN, STEPS, read_last

STOPPED = {128 + 1, 128 + 2, 128 + 15, -1, -2, -15}  # exit codes after SIGHUP, Ctrl-C, SIGTERM: no failure
ARRAY = 1000  # jobs in a Slurm array; Slurm's own default is to allow 1001

# name: queued, submitted (to Slurm), running, finished, failed, or stopped, which can be continued
# recent: the mean return of the last 100 episodes, None if there are none
State = namedtuple("State", "name steps recent")
children, stopping = set(), threading.Event()


@contextlib.contextmanager
def program(run):
    """Python and the script to give it, and what to set for it. For other games than Procgen's, a patched copy."""
    if not run.patched:
        yield [sys.executable, str(ROOT / run.script)], {}
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, run.script)
        words = ["patch", "--silent", "-o", copy, ROOT / run.script, ROOT / "patches/gymnasium.patch"]
        subprocess.run(words, check=True)
        where = filter(None, [str(ROOT / "experiments"), os.environ.get("PYTHONPATH")])  # has lab/minatar.py
        yield [sys.executable, str(copy)], {"PYTHONPATH": os.pathsep.join(where)}


def execute(run, runs_dir, threads, **environment):
    """Run a script to its end, from its last checkpoint if it has one; returns its exit code."""
    folder, end = run.folder(runs_dir), run.file(runs_dir, "exit")
    seconds = read_end(end).get("seconds", 0)
    end.unlink(missing_ok=True)
    words = [*run.words()[1:], "--run-dir", str(folder)]
    if (folder / "checkpoint.pt").exists():
        words = ["--resume", str(folder), "--total-timesteps", str(run.flags["total-timesteps"])]
    elif folder.exists() and not is_locked(folder):
        shutil.rmtree(folder)  # killed before its first checkpoint: there is nothing to continue from
    started = time.time()
    with open(run.file(runs_dir, "log"), "ab") as log, program(run) as (command, more):
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | more | environment
        # A session of its own: Ctrl-C reaches the sweep alone, which then stops its runs.
        options = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command + words, env=environment, **options)
        children.add(process)
        if stopping.is_set():
            process.terminate()
        code = process.wait()
        children.discard(process)
    seconds += time.time() - started
    end.write_text(json.dumps({"code": code, "steps": run.steps, "seconds": round(seconds, 1)}))
    return code


def stop_children():
    stopping.set()
    for process in list(children):
        process.terminate()


# How far a run is.


def read_end(path):
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def is_locked(folder):
    """If a process is writing to the run. The lock is taken for an instant only, to see if it can be."""
    try:
        with open(folder / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def states_of(runs, runs_dir):
    jobs = slurm_jobs()
    return [state_of(run, runs_dir, jobs) for run in tqdm(runs, "reading runs", delay=2, leave=False, disable=None)]


def state_of(run, runs_dir, jobs=()):
    end, job, folder = read_end(run.file(runs_dir, "exit")), run.file(runs_dir, "job"), run.folder(runs_dir)
    last = read_last(folder, [RETURN, STEPS])
    steps, recent = last.get(STEPS, (0, 0))[0], last.get(RETURN, (0, None))[1]
    if end.get("code") == 0 and end["steps"] >= run.steps:
        return State("finished", run.steps, recent)
    if is_locked(folder):
        return State("running", steps, recent)
    if job.exists() and job.read_text() in jobs:
        return State("running" if jobs[job.read_text()] == "RUNNING" else "submitted", steps, recent)
    if end.get("code", 0) not in {0} | STOPPED:
        return State("failed", steps, recent)
    return State("stopped" if folder.exists() else "queued", steps, recent)


# This machine.


def run_here(runs, runs_dir, workers, threads):
    """Run them all, several at a time; returns those that failed. An interruption stops them, and is passed on."""
    devices, failed, ended = queue.Queue(), [], 0
    for worker in range(workers):
        devices.put(device_of(worker))

    def work(run):
        device = devices.get()
        try:
            return execute(run, runs_dir, threads, **device)
        finally:
            devices.put(device)

    progress = Progress(runs, runs_dir)
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(work, run): run for run in runs}
        left = set(futures)
        try:
            while left:
                done, left = wait(left, timeout=1, return_when=FIRST_COMPLETED)
                for future in done:
                    run, code, ended = futures[future], future.result(), ended + 1
                    took = hours(read_end(run.file(runs_dir, "exit"))["seconds"])
                    outcome = "finished" if code == 0 else "stopped" if code in STOPPED else "FAILED"
                    progress.say(f"[{ended}/{len(runs)}] {outcome:<8} {run.name}, {took}")
                    failed += [run] * (outcome == "FAILED")
                if left:
                    progress.tell(ended)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_children()
            raise
    return failed


def device_of(worker):
    """The environment of a worker's runs: where there are several GPUs, one of them."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if gpus == [""] and shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
        gpus = [str(number) for number, _ in enumerate(listed.splitlines())]
    return {"CUDA_VISIBLE_DEVICES": gpus[worker % len(gpus)]} if len(gpus) > 1 else {}


class Progress:
    """How far a sweep is: in a terminal a line that changes, elsewhere a line after 5 seconds and then each minute."""

    def __init__(self, runs, runs_dir):
        self.runs, self.runs_dir, self.terminal = runs, runs_dir, sys.stdout.isatty()
        self.total, self.before = sum(run.steps for run in runs), self.steps()
        self.started, self.next, self.said = time.time(), time.time() + (1 if self.terminal else 5), ""

    def steps(self):
        return sum(state_of(run, self.runs_dir).steps for run in self.runs)

    def say(self, text, end="\n"):
        print("\r\033[K" * self.terminal + text, end=end, flush=True)

    def tell(self, ended):
        """Say it if it is time, or if there is something to say at last."""
        if time.time() < self.next:
            return
        steps, seconds = self.steps(), time.time() - self.started
        made = steps - self.before
        left = f"about {hours(seconds / made * (self.total - steps))} left" if made > 0 else "starting"
        text = f"[{ended}/{len(self.runs)}] {steps / self.total:.0%} of {self.total:,} steps, {left}"
        if text != self.said:
            self.say(text, end="" if self.terminal else "\n")
        self.said, self.next = text, time.time() + (5 if self.terminal or made <= 0 else 60)


def hours(seconds):
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:,.1f} minutes"


# A Slurm cluster.


class SlurmJob:
    """What Slurm runs. Shortly before the time limit, submitit calls `checkpoint` and queues what it returns."""

    def __init__(self, runs_dir, threads):
        self.runs_dir, self.threads = runs_dir, threads

    def __call__(self, run):
        code = execute(run, self.runs_dir, self.threads)
        if code:
            raise SystemExit(f"exit code {code}, see {run.file(self.runs_dir, 'log')}")

    def checkpoint(self, run):
        """Called in a signal handler while execute() waits, so this waits for the run's lock, not for its process."""
        stop_children()
        deadline = time.time() + 60
        while is_locked(run.folder(self.runs_dir)) and time.time() < deadline:
            time.sleep(0.1)
        return submitit.helpers.DelayedSubmission(self, run)


def slurm_jobs():
    """Ids of jobs that wait or run, and their states; empty where there is no Slurm."""
    command = ["squeue", "--me", "--array", "--noheader", "--format=%i %T"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(line.split()[:2] for line in lines)


def submit(runs, runs_dir, name, cpus, workers, minutes, partition, gpus):
    """Hand the runs to Slurm, as arrays of jobs."""
    runs_dir = runs_dir.resolve()
    try:
        folder = runs[0].file(runs_dir, "job").parent / "slurm"
        executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=1000)  # queue again, always
        options = {"slurm_partition": partition, "gpus_per_node": gpus}
        executor.update_parameters(
            name=name,
            timeout_min=minutes,
            cpus_per_task=cpus,
            slurm_array_parallelism=workers,
            slurm_setup=[f"export PYTHONPATH={shlex.quote(str(ROOT / 'experiments'))}"],  # has lab/
            **{option: given for option, given in options.items() if given},
        )
        for start in range(0, len(runs), ARRAY):
            batch = runs[start : start + ARRAY]
            for run, job in zip(batch, executor.map_array(SlurmJob(runs_dir, cpus), batch), strict=True):
                run.file(runs_dir, "job").write_text(job.job_id)
    except (RuntimeError, submitit.core.utils.FailedJobError) as error:
        fail(f"--executor slurm: {str(error).strip().splitlines()[-1]}")
