"""Run a script in a process that ends itself by SIGKILL at a chosen place: python kill.py SCRIPT PLACE COUNT FLAGS...

Without arguments it takes them from standard input, as a JSON list a line, and answers with the exit code of each. It
has then loaded all that takes long to load, and forks a process for every line.

The places: collect, optimise, auxiliary (at the COUNT-th step there), checkpoint (half of it written), replace
(written, not yet renamed), replaced (just renamed), log (just before a flush), unsaved (at the COUNT-th environment
step, with no checkpoint written up to there, as on a full disk). Others do not kill: "terminate" sends SIGTERM at the
COUNT-th piece of a checkpoint that is being written; "memory" prints the anonymous memory after each iteration, and
allows COUNT megabytes more than there are when the first one begins.
"""

import errno
import io
import json
import os
import re
import resource
import signal
import sys

import torch
from procgen import ProcgenGym3Env
from torch.utils.tensorboard import SummaryWriter

from helpers import load


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def status(field):
    """Kilobytes, from the kernel."""
    with open("/proc/self/status") as file:
        return int(re.search(rf"{field}:\s+(\d+) kB", file.read())[1])


def replace(owner, name, before=None, instead=None):
    original = getattr(owner, name)

    def patched(*args, **kwargs):
        if before:
            before()
        return instead(original, *args, **kwargs) if instead else original(*args, **kwargs)

    setattr(owner, name, patched)


def main(script, place, count, *flags):
    module = load(script)
    calls = {"left": int(count)}

    def countdown():
        calls["left"] -= 1
        if calls["left"] <= 0:
            die()

    def half_written(save, saved, file):
        whole = io.BytesIO()
        save(saved, whole)
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        countdown()
        file.write(whole.getvalue()[len(whole.getvalue()) // 2 :])

    def full_disk(save, run):
        raise OSError(errno.ENOSPC, "No space left on device")

    class Terminating:
        """A file that sends SIGTERM in the midst of PyTorch's writing, which is C++ that calls this."""

        def __init__(self, file):
            self.file = file

        def write(self, data):
            calls["left"] -= 1
            if calls["left"] == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            return self.file.write(data)

        def flush(self):
            self.file.flush()

    if place == "collect":
        replace(ProcgenGym3Env, "act", before=countdown)
    elif place == "optimise":
        replace(torch.optim.Adam, "step", before=countdown)
    elif place == "auxiliary":
        replace(module.AuxiliaryBuffer, "read", before=lambda: replace(torch.optim.Adam, "step", before=countdown))
    elif place == "checkpoint":
        replace(torch, "save", instead=half_written)
    elif place == "replace":
        replace(os, "replace", before=countdown)
    elif place == "replaced":
        replace(os, "replace", instead=lambda original, *args: (original(*args), countdown()))
    elif place == "log":
        replace(SummaryWriter, "flush", before=countdown)
    elif place == "unsaved":
        replace(module.Run, "save", instead=full_disk)
        replace(ProcgenGym3Env, "act", before=countdown)
    elif place == "terminate":
        replace(torch, "save", instead=lambda save, saved, file: save(saved, Terminating(file)))
    elif place == "memory":

        def limit(begin, *args):
            begin(*args)
            most = (status("VmData") + int(count) * 1024) * 1024
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))

        replace(module.Run, "__init__", instead=limit)
        replace(module.Run, "end_iteration", before=lambda: print("RssAnon", status("RssAnon"), flush=True))
    else:
        raise ValueError(place)
    sys.argv = [f"{script}.py", *flags]
    module.main()


def serve():
    torch.optim.Adam([torch.zeros(1)])  # imports PyTorch's compiler
    ProcgenGym3Env(1, "chaser").close()  # loads the pictures of all games
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)
            main(*json.loads(line))
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:]) if sys.argv[1:] else serve()
