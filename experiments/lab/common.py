"""What every command needs: errors in one line, bounds of flags, safe output files, the scripts and checkpoints."""

import argparse
import contextlib
import importlib.util
import math
import os
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["ppo", "ppo_ewma", "ppg", "ppg_ewma", "staleness"]


def fail(message, code=2):
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """Flags in full only, errors in one line; the help is the module's docstring and the list of flags."""

    def __init__(self, **options):
        look = {"formatter_class": argparse.RawDescriptionHelpFormatter, "usage": argparse.SUPPRESS}
        super().__init__(**look | {"allow_abbrev": False} | options)

    def error(self, message):
        fail(message)


def number(kind, low, high=math.inf):
    """An argparse type: an int or a float within bounds."""
    noun = "whole number" if kind is int else "number"
    bounds = f"{low} or more" if high == math.inf else f"from {low} to {high}"

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text}: must be a {noun}, {bounds}")
        return value

    return parse


def check_writable(flag, path):
    """Fail now rather than after hours of work."""
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(0, "it is a folder")
        temporary = temporary_name(path)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        fail(f"{flag} {path}: cannot be written ({error.strerror})")


def temporary_name(path):
    return Path(path).with_name(f".unfinished-{os.getpid()}-{Path(path).name}")


@contextlib.contextmanager
def written(flag, path):
    """A temporary name to write to, which becomes path once complete: an interruption spoils no older file."""
    temporary = temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        fail(f"{flag} {path}: cannot be written ({error.strerror or error})", code=1)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def load_script(name, path=None):
    """One of the five scripts as a module, or the script at another path."""
    spec = importlib.util.spec_from_file_location(name, path or ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_checkpoint(path, scripts=SCRIPTS):
    """A checkpoint, from its file or its run's folder, of these scripts. weights_only: code in it is never run."""
    import torch  # here, because it takes seconds and most commands do without

    path = Path(path)
    if not path.exists():
        fail(f"{path}: there is no such folder")
    path = path if path.is_file() else path / "checkpoint.pt"
    if not path.exists():
        fail(f"{path.parent}: there is no checkpoint.pt")
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():  # compares the checksums, which torch.load does not
                raise ValueError("wrong checksum")
        # mmap: checkpoints of staleness.py and of PPG hold a lot that is of no use here.
        saved = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        kinds = {"script": str, "format": int, "args": dict, "global_step": int, "agent": dict}
        if not all(isinstance(saved[name], kind) for name, kind in kinds.items()):
            raise TypeError("something is of another type")
    except Exception as error:
        fail(f"{path}: is damaged, or no checkpoint of ours ({type(error).__name__})")
    if scripts and saved["script"] not in scripts:
        fail(f"{path}: was written by {saved['script']!r:.40}, which is none of {', '.join(scripts)}")
    return saved
