"""Run a script on a pretend GPU: python pretend_gpu.py SCRIPT.py COUNTS.json FLAGS...

Without arguments it takes them from standard input, as a JSON list a line, and answers with the exit code of each. It
has then loaded all that takes long to load, and forks a process for every line.

The pretend GPU is a second kind of tensor. It has a device of its own, and computes on the CPU. The script's choice of
"cuda" leads to it; nothing else in the script is changed. It refuses
  - operations on tensors of both devices; a CPU number, of 0 dimensions, may take part in arithmetic, as on a GPU;
  - an index on the CPU into a tensor on the device, which a GPU would take, but upload each time;
  - .numpy() of what is on the device, and random numbers drawn there, which would not be the CPU's.
It counts copies up to the device and down from it, and waits: moments when the CPU stands still until the GPU has done
all it was given. A wait is a copy down; a copy up, unless it is from pinned memory and non_blocking; a number or a
truth value taken from the device; and what has a size that depends on values there, as with a boolean mask for an
index. COUNTS.json lists, for each iteration and for what follows the last, {"phase | kind | line": [number, bytes]}.

What this shows: all tensors are where they must be, results do not depend on the device, checkpoints move between
devices, and an iteration copies and waits no more than is listed. What it cannot show: that CUDA's kernels give the
same numbers (they round differently, with TF32 more so), that they give them twice (some of cuDNN's do not), how fast
they are, what fits into a GPU's memory, or that --compile and --bf16 work there. Exact resume is promised for a CPU.
"""

import importlib.util
import json
import linecache
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import torch
from procgen import ProcgenGym3Env
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

aten = torch.ops.aten
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
WAITED_FOR = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.equal.default}

now = SimpleNamespace(script=None, phase="start", counts={}, iterations=[])


def count(kind, size=0):
    """Note it, for the line that the main thread is at: gradients are computed in another thread."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame and frame.f_code.co_filename != now.script:
        frame = frame.f_back
    line = f"{frame.f_lineno}: {linecache.getline(now.script, frame.f_lineno).strip()}" if frame else "elsewhere"
    entry = now.counts.setdefault(f"{now.phase} | {kind} | {line}", [0, 0])
    entry[:] = entry[0] + 1, entry[1] + size
    if kind == "down":
        count("wait")


class DeviceTensor(torch.Tensor):
    """A tensor on the pretend device. It holds a CPU tensor, and has the same shape and strides."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, held):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        self = cls._make_wrapper_subclass(cls, held.shape, **layout, dtype=held.dtype, device="pretend:0")
        self.held = held
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})

    def __repr__(self):
        return f"DeviceTensor({self.held})"

    def __deepcopy__(self, memo):
        copy = self.detach().clone()
        return torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy

    def __reduce_ex__(self, protocol):  # torch.save
        return self.cpu().__reduce_ex__(protocol)

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, **options):
        raise TypeError("numpy of a tensor on the device")


class Mode(TorchDispatchMode):
    """Sees also what is made on the device, or goes there, out of nothing that is there already."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def on_device(x):
    return isinstance(x, DeviceTensor)


def held(x):
    return x.held if on_device(x) else x


def compute(func, args, kwargs):
    """One operation, on the CPU tensors that are held; what comes of it is on the device again."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    involved, target = any(map(on_device, tensors)), kwargs.get("device")
    there = involved if target is None else target.type == "pretend"  # where the result will be
    if not (involved or there):
        return func(*args, **kwargs)
    if func in (aten._to_copy.default, aten.copy_.default):
        in_place = func is aten.copy_.default
        there, source = (on_device(args[0]), args[1]) if in_place else (there, args[0])
        if on_device(source) and not there:
            count("down", source.nbytes)
        elif there and not on_device(source):
            count("up", source.nbytes)
            if not (getattr(source, "pinned", False) and (kwargs.get("non_blocking") or args[2:] == (True,))):
                count("wait")
    else:
        check(func, args, tensors, involved, there)
    if target is not None and there:
        kwargs = kwargs | {"device": torch.device("cpu")}
    given = {id(held(x)): x for x in tensors}

    def wrap(x):
        if not (there and isinstance(x, torch.Tensor)):
            return x
        wrapped = given[id(x)] if id(x) in given else DeviceTensor(x)  # in place: the one that was given
        assert (wrapped.shape, wrapped.stride()) == (x.shape, x.stride()), f"{func} changes a shape in place"
        return wrapped

    args, kwargs = tree_map(held, (args, kwargs))
    return tree_map(wrap, func(*args, **kwargs))


def check(func, args, tensors, involved, there):
    """Refuse what must not be; count what a GPU waits for."""
    if there and torch.Tag.nondeterministic_seeded in func.tags:
        raise RuntimeError(f"{func}: random numbers drawn on the device")
    index, assigned = (args[1], args[2:3]) if func in INDEXED else ((), ())
    for i, x in enumerate(tensors):
        read = not (func._schema.is_mutable and i == 0)
        number = x.dim() == 0 and read and (torch.Tag.pointwise in func.tags or any(x is y for y in assigned))
        if involved and not on_device(x) and not number:
            raise RuntimeError(f"{func}: tensors on both devices")
    if func is aten._local_scalar_dense.default:  # item, float, int, bool
        count("down", tensors[0].nbytes)
    masked = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in index)
    if func in WAITED_FOR or (masked and not (assigned and assigned[0].numel() == 1)):
        count("wait")


class Torch:
    """The torch module, as a script finds it on a machine with a GPU."""

    cuda = SimpleNamespace(is_available=lambda: True)

    def __getattr__(self, name):
        return getattr(torch, name)

    def device(self, name):
        return torch.device("pretend:0" if name == "cuda" else name)

    def tensor(self, *args, device="cpu", **options):  # in C++ it would get round Mode; so would the next
        return torch.tensor(*args, **options).to(device)

    def as_tensor(self, *args, device="cpu", **options):
        return torch.as_tensor(*args, **options).to(device)


def pin_memory(x):
    x = x.detach()
    x.pinned = True
    return x


def watch(Run):
    """Note what a run is doing, from the labels of its loops, and where an iteration ends."""
    each, save, end_iteration = Run.each, Run.save, Run.end_iteration

    def watched_each(self, items, label):
        now.phase = label.partition(",")[0].rstrip(" 0123456789")
        yield from each(self, items, label)
        now.phase = "between"

    def watched_save(self):
        before, now.phase = now.phase, "checkpoint"
        save(self)
        now.phase = before

    def watched_end_iteration(self, *args):
        end_iteration(self, *args)
        now.iterations.append(now.counts)
        now.counts = {}

    Run.each, Run.save, Run.end_iteration = watched_each, watched_save, watched_end_iteration


def main(script, output, *flags):
    now.script = str(Path(script).resolve())
    sys.argv, sys.path[0] = [now.script, *flags], str(Path(now.script).parent)
    spec = importlib.util.spec_from_file_location(Path(script).stem, now.script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torch, torch.Tensor.pin_memory = Torch(), pin_memory
    if hasattr(module, "Run"):
        watch(module.Run)
    with Mode():
        module.main()
    Path(output).write_text(json.dumps([*now.iterations, now.counts], indent=1))


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
    backend = _DummyBackendModule()
    backend.get_amp_supported_dtype = lambda: [torch.bfloat16]  # autocast asks, even when it is off
    _setup_privateuseone_for_python_backend("pretend", backend)  # without it, autograd knows no such device
    main(*sys.argv[1:]) if sys.argv[1:] else serve()
