"""Run a script in a process that ends itself by SIGKILL at a chosen place: python kill.py SCRIPT PLACE COUNT FLAGS...

The places: collect, optimise, auxiliary (at the COUNT-th step there), checkpoint (half of it written), replace
(written, not yet renamed), replaced (just renamed), log (just before a flush). "memory" kills nothing: it prints the
anonymous memory after each iteration, and allows COUNT megabytes more than there are when the first one begins.
"""

import io
import os
import re
import resource
import signal
import sys

import torch
from helpers import load
from procgen import ProcgenGym3Env
from torch.utils.tensorboard import SummaryWriter


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
    elif place == "memory":

        def limit(start, *args):
            most = (status("VmData") + int(count) * 1024) * 1024
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            return start(*args)

        replace(module.Run, "start", instead=limit)
        replace(module.Run, "end_iteration", before=lambda: print("RssAnon", status("RssAnon"), flush=True))
    else:
        raise ValueError(place)
    sys.argv = [f"{script}.py", *flags]
    module.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
