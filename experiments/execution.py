"""One run of a sweep: start it or go on with it, and tell how far it is."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple

import submitit.helpers
from catalogue import REPOSITORY

STOPPED = {128 + 2, 128 + 15, -2, -15}  # exit codes after Ctrl-C and SIGTERM: no failure, to be gone on with
PROGRESS = re.compile(r"^iteration \d+: ([\d,]+) steps, .*?(?:return (-?[\d.]+|nan))?$", re.MULTILINE)

# name: queued, submitted (to Slurm), running, finished, failed, or stopped, to be gone on with
# recent: the mean return of the last 100 episodes, None if there are none
State = namedtuple("State", "name steps recent")
children, stopping = set(), threading.Event()


def execute(run, runs_dir, threads):
    """Run a script to its end, from its last checkpoint if it has one; returns its exit code."""
    folder, end = run.folder(runs_dir), run.file(runs_dir, "exit")
    seconds = read_end(end).get("seconds", 0)
    end.unlink(missing_ok=True)
    if (folder / "checkpoint.pt").exists():
        words = [run.script, "--resume", str(folder), "--total-timesteps", str(run.flags["total-timesteps"])]
    else:
        if folder.exists() and not is_locked(folder):
            shutil.rmtree(folder)  # killed before its first checkpoint: there is nothing to go on from
        words = [*run.words(), "--run-dir", str(folder)]
    command = [sys.executable, str(REPOSITORY / words[0]), *words[1:]]
    started = time.time()
    with open(run.file(runs_dir, "log"), "ab") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which then stops its runs
        )
        children.add(process)
        if stopping.is_set():
            process.terminate()
        code = process.wait()
        children.discard(process)
    seconds += time.time() - started
    end.write_text(json.dumps({"code": code, "steps": run.steps, "seconds": round(seconds, 1)}))
    return code


def stop_all():
    """Let the runs know that they should stop, and wait until they have."""
    stopping.set()
    for process in list(children):
        process.terminate()
    for process in list(children):
        process.wait()


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
        stopping.set()
        for process in list(children):
            process.terminate()
        deadline = time.time() + 60
        while is_locked(run.folder(self.runs_dir)) and time.time() < deadline:
            time.sleep(0.1)
        return submitit.helpers.DelayedSubmission(self, run)


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


def slurm_jobs():
    """Ids of jobs that wait or run, and their states; empty where there is no Slurm."""
    command = ["squeue", "--me", "--array", "--noheader", "--format=%i %T"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(line.split()[:2] for line in lines)


def state_of(run, runs_dir, jobs):
    end, job = read_end(run.file(runs_dir, "exit")), run.file(runs_dir, "job")
    steps, recent = progress(run.file(runs_dir, "log"))
    if end.get("code") == 0 and end["steps"] >= run.steps:
        return State("finished", run.steps, recent)
    if is_locked(run.folder(runs_dir)):
        return State("running", steps, recent)
    if job.exists() and job.read_text() in jobs:
        return State("running" if jobs[job.read_text()] == "RUNNING" else "submitted", steps, recent)
    if end.get("code", 0) not in {0} | STOPPED:
        return State("failed", steps, recent)
    return State("stopped" if run.folder(runs_dir).exists() else "queued", steps, recent)


def progress(log):
    """Environment steps and recent return, from the last line that a script printed about an iteration."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))  # the last lines are enough
            found = PROGRESS.findall(file.read().decode(errors="replace"))
    except FileNotFoundError:
        found = []
    if not found:
        return 0, None
    steps, recent = found[-1]
    return int(steps.replace(",", "")), float(recent) if recent else None
