"""Killed at any moment, nothing lost: a run that was stopped and resumed ends as the run that was never stopped."""

import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
import torch

from helpers import (
    PPG,
    SCRIPTS,
    TINY,
    checkpoint,
    command_line,
    curves,
    differences,
    environment,
    load,
    read_until,
    run,
    start,
    tiny,
    train,
)

# What differs between two runs that are the same: where they are, that one was resumed, and how long things took.
OWN = ["args/run_dir", "args/resume", "digest"]
STEPS = 160  # five iterations; in PPG two phases and a bit


def flags_of(script, *more):
    return [*tiny(script), "--total-timesteps", str(STEPS), *more]


def assert_same_run(a, b):
    assert differences(checkpoint(a), checkpoint(b), but=OWN) == []
    logs = [{tag: x for tag, x in curves(folder).items() if tag != "time/steps_per_second"} for folder in (a, b)]
    assert logs[0] == logs[1]
    speeds = [[step for step, _ in curves(folder)["time/steps_per_second"]] for folder in (a, b)]
    assert speeds[0] == speeds[1]


def wait_for_the_next_second():
    """TensorBoard orders files by the second of their creation; starting Python would take longer."""
    time.sleep(1.01 - time.time() % 1)


def resume(script, folder, *flags):
    wait_for_the_next_second()
    with command_line(script, ["--resume", folder, *flags]):
        load(script).main()


KILL = [sys.executable, str(Path(__file__).parent / "kill.py")]


@pytest.fixture(scope="module")
def kill():
    """kill(script, place, count, *flags): run a script in a process that is killed there, or ends with the code."""
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(KILL, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

        def kill(*words, code=-signal.SIGKILL):
            wait_for_the_next_second()
            print(json.dumps([str(word) for word in words]), file=server.stdin, flush=True)
            if (answer := server.stdout.readline()) != f"{code}\n":
                log.seek(0)
                pytest.fail(f"exit code {answer.strip()}: {words}\n{log.read()}")

        yield kill
        server.communicate()


@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_at_every_place_and_resumed(script, tmp_path, kill):
    """One run, killed again and again, each time a little further on; a checkpoint every iteration."""
    train(script, tmp_path / "whole", *flags_of(script))
    folder = tmp_path / "killed"
    kill(script, "collect", 3, *flags_of(script), "--run-dir", folder)  # in the first iteration
    kill(script, "log", 1, "--resume", folder)  # logged, perhaps, and not saved
    kill(script, "checkpoint", 1, "--resume", folder)  # half a checkpoint of iteration 1
    assert (folder / "checkpoint.pt.tmp").exists()
    kill(script, "replaced", 1, "--resume", folder)  # iteration 1 saved, and nothing after that
    kill(script, "optimise", 3, "--resume", folder)  # within iteration 2, or 3 where 2 only collects
    if script in PPG:
        kill(script, "auxiliary", 3, "--resume", folder)
    kill(script, "replace", 2, "--resume", folder)
    resume(script, folder)
    assert_same_run(tmp_path / "whole", folder)
    assert not list(folder.glob("*.tmp"))
    # Five iterations end in the middle of a phase: the buffer stays, so that the run can be extended.
    assert len(list(folder.glob("*.aux_buffer"))) == (script in PPG)


@pytest.mark.parametrize("script", ["ppg_ewma", "staleness"])
def test_killed_long_after_the_last_checkpoint(script, tmp_path, kill):
    """Logs and buffer are then ahead of the checkpoint: their steps are done again, not doubled."""
    flags = flags_of(script, "--checkpoint-seconds", "1000000")
    train(script, tmp_path / "whole", *flags)
    kill(script, "collect", 36, *flags, "--run-dir", tmp_path / "killed")  # in the last iteration
    assert checkpoint(tmp_path / "killed")["iteration"] == (4 if script in PPG else 0)  # a phase's end is saved
    resume(script, tmp_path / "killed")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_a_phase_starts_only_when_the_one_before_is_saved(tmp_path, kill):
    """The next phase overwrites the buffer, so a phase ends with a checkpoint, or the run stops there."""
    flags = flags_of("ppg_ewma", "--checkpoint-seconds", "1000000")
    train("ppg_ewma", tmp_path / "whole", *flags)
    kill("ppg_ewma", "collect", 28, *flags, "--run-dir", tmp_path / "killed")  # in iteration 4; a phase is two
    assert checkpoint(tmp_path / "killed")["iteration"] == 2
    resume("ppg_ewma", tmp_path / "killed")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    kill("ppg_ewma", "unsaved", 1000, *flags, "--run-dir", tmp_path / "full", code=1)  # as on a full disk
    assert not (tmp_path / "full" / "checkpoint.pt").exists()  # and the buffer of the first phase is whole
    kill("ppg_ewma", "collect", 12, *flags, "--run-dir", tmp_path / "late")  # in iteration 2
    kill("ppg_ewma", "unsaved", 1000, "--resume", tmp_path / "late", code=1)
    resume("ppg_ewma", tmp_path / "late")
    assert_same_run(tmp_path / "whole", tmp_path / "late")


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_say_how_to_resume(number, code, tmp_path):
    flags = [*TINY, "--total-timesteps", "100000"]
    heed = {"preexec_fn": lambda: signal.signal(number, signal.SIG_DFL)}  # also if these tests run under nohup
    process = start("ppo", *flags, "--run-dir", tmp_path / "run", **heed)
    read_until(process, "iteration 2/")
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == code
    done = checkpoint(tmp_path / "run")["iteration"]
    assert err.count("\n") == 2 and err.endswith(f"python ppo.py --resume {tmp_path / 'run'}\n")
    assert f"after iteration {done}:" in err
    assert not list((tmp_path / "run").glob("*.tmp"))
    assert done >= 1
    resume("ppo", tmp_path / "run", "--total-timesteps", str(32 * (done + 2)))
    train("ppo", tmp_path / "whole", *flags, "--total-timesteps", str(32 * (done + 2)))
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_what_is_announced_reaches_a_file_at_once(tmp_path):
    command = [*KILL, "ppo", "collect", "1", *TINY, "--run-dir", str(tmp_path / "run")]
    buffered = environment(PYTHONUNBUFFERED="")  # as it is where nobody has set this
    printed = subprocess.run(command, capture_output=True, text=True, env=buffered).stdout
    assert "adjusted to the batch size" in printed


@pytest.mark.parametrize("script", ["ppo", "ppg_ewma"])
def test_a_signal_is_not_lost_in_a_checkpoint(script, tmp_path, kill):
    """PyTorch writes in C++, where an exception from a signal handler becomes another one, or ends the process."""
    train(script, tmp_path / "whole", *flags_of(script))
    kill(script, "collect", 12, *flags_of(script), "--run-dir", tmp_path / "run")
    for piece in (1, 5, 100):
        kill(script, "terminate", piece, "--resume", tmp_path / "run", code=143)
        assert not (tmp_path / "run" / "checkpoint.pt.tmp").exists()
    resume(script, tmp_path / "run")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_finished_run_says_so_and_can_be_extended(script, tmp_path, capsys):
    flags = flags_of(script) + (["--n-pi", "1"] if script in PPG else [])  # which ends at the end of a phase
    train(script, tmp_path / "whole", *flags)
    train(script, tmp_path / "run", *flags, "--total-timesteps", "64")
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    capsys.readouterr()
    resume(script, tmp_path / "run")
    assert "finished at 64 steps" in capsys.readouterr().out
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before
    resume(script, tmp_path / "run", "--total-timesteps", str(STEPS), "--device", "cpu")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("script", PPG)
def test_extending_in_the_middle_of_a_phase_is_the_straight_run(script, tmp_path, capsys):
    train(script, tmp_path / "whole", *flags_of(script), "--total-timesteps", "128")
    assert not list((tmp_path / "whole").glob("*.aux_buffer"))  # its last phase is complete
    train(script, tmp_path / "run", *flags_of(script), "--total-timesteps", "96")
    assert len(list((tmp_path / "run").glob("*.aux_buffer"))) == 1
    resume(script, tmp_path / "run", "--total-timesteps", "128")
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.aux_buffer"))


def refused(script, *flags):
    """Exit code 2 and one line; returns the line."""
    code, out, err = None, "", ""
    result = run(script, *flags)
    code, out, err = result
    assert code == 2 and out == "" and err.count("\n") == 1 and "Traceback" not in err, result
    return err


def test_what_cannot_be_resumed_is_refused_and_not_overwritten(tmp_path, capsys):
    folder = tmp_path / "run"
    train("ppo", folder, *TINY)
    path = folder / "checkpoint.pt"
    good = path.read_bytes()

    def refusal(*flags, script="ppo"):
        before = {p: p.read_bytes() for p in folder.iterdir()} if folder.exists() else None
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop, command_line(script, flags):
            load(script).main()
        out, err = capsys.readouterr()
        assert stop.value.code == 2 and out == "" and err.count("\n") == 1
        assert before == ({p: p.read_bytes() for p in folder.iterdir()} if folder.exists() else None)
        return err

    more = ["--total-timesteps", "1000"]
    assert "only --total-timesteps and --device" in refusal("--resume", str(folder), "--seed", "3")
    assert "only --total-timesteps and --device" in refusal("--resume", str(folder), "--learning-rate=3")
    assert "no checkpoint.pt" in refusal("--resume", str(tmp_path / "nothing"))
    assert "not empty" in refusal(*TINY, "--run-dir", str(folder))
    assert "written by ppo.py" in refusal("--resume", str(folder), *more, script="ppo_ewma")
    for size in (0, 10, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        assert "damaged" in refusal("--resume", str(folder), *more), size
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
        archive.writestr("checkpoint/data.pkl", b"not a pickle")
    shutil.move(path.with_suffix(".zip"), path)
    assert "damaged" in refusal("--resume", str(folder), *more)
    path.write_bytes(good)
    saved = checkpoint(folder)
    torch.save(saved | {"format": 99}, path)
    assert "format 99" in refusal("--resume", str(folder), *more)
    torch.save([1, 2], path)
    assert "damaged, or not ours" in refusal("--resume", str(folder), *more)


def test_a_flipped_bit_is_noticed(tmp_path, capsys):
    train("ppo", tmp_path, *TINY)
    path = tmp_path / "checkpoint.pt"
    good = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:  # the contents; what lies between is padding
        largest = sorted(archive.infolist(), key=lambda info: -info.file_size)[:40]
        offsets = [info.header_offset + 30 + len(info.filename) for info in largest]
        contents = [archive.read(info) for info in largest]
    places = [
        good.find(content[:64], offset) + len(content) // 2 for content, offset in zip(contents, offsets, strict=True)
    ]
    for place in places[::4]:
        flipped = bytearray(good)
        flipped[place] ^= 4
        path.write_bytes(flipped)
        with pytest.raises(SystemExit) as stop:
            load("ppo").load_checkpoint(tmp_path)
        assert stop.value.code == 2 and "damaged" in capsys.readouterr().err


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_a_checkpoint_never_runs_code(tmp_path, capsys):
    victim = tmp_path / "victim"
    train("ppo", tmp_path / "run", *TINY)
    saved = checkpoint(tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.pt"
    for attack in (saved | {"args": Malicious(victim)}, Malicious(victim)):
        for write in (lambda: torch.save(attack, path), lambda: path.write_bytes(pickle.dumps(attack))):  # noqa: B023
            write()
            with pytest.raises(SystemExit) as stop, command_line("ppo", ["--resume", path.parent]):
                load("ppo").main()
            assert stop.value.code == 2 and "damaged, or not ours" in capsys.readouterr().err
            assert not victim.exists()
    pickle.loads(pickle.dumps(Malicious(victim)))
    assert victim.exists()  # so the attack was a real one


def test_two_processes_never_write_into_one_folder(tmp_path, capsys):
    process = start("ppo", *TINY, "--total-timesteps", "1000000", "--run-dir", tmp_path / "run")
    try:
        read_until(process, "iteration 1/")
        again = ["--total-timesteps", "6400", "--resume"]  # if nothing stops it, it comes to an end
        for flags, said in [(again, "another process is writing there"), ([*TINY, "--run-dir"], "not empty")]:
            with pytest.raises(SystemExit) as stop, command_line("ppo", [*flags, tmp_path / "run"]):
                load("ppo").main()
            assert stop.value.code == 2 and said in capsys.readouterr().err
    finally:
        process.kill()
        process.communicate()


def test_a_folder_that_cannot_be_written_is_refused():
    assert "cannot be written" in refused("ppo", *TINY, "--run-dir", "/proc/run")  # not even by root


def limit_file_size(size):
    """The nearest to a full disk that needs no privileges: writes beyond this size fail."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("script", ["ppo", "ppg_ewma"])
def test_a_checkpoint_that_cannot_be_written_is_reported_and_training_goes_on(script, tmp_path):
    flags = [*flags_of(script), *(["--aux-epochs", "0"] if script in PPG else [])]
    train(script, tmp_path / "whole", *flags)
    train(script, tmp_path / "run", *flags, "--total-timesteps", "64")
    good = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    size = len(good) // 2
    code, out, err = run(
        script, "--resume", tmp_path / "run", "--total-timesteps", STEPS, preexec_fn=limit_file_size(size)
    )
    last = "phase 3, iteration 1/2" if script in PPG else "iteration 5/5"
    assert out.count("warning: checkpoint not written") == 4 and last in out  # the extension's, and 3 iterations'
    assert code == 1 and "iteration 5 could not be written" in err and err.count("\n") == 1
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == good
    assert not list((tmp_path / "run").glob("*.tmp"))
    resume(script, tmp_path / "run", "--total-timesteps", str(STEPS))
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_logs_that_cannot_be_written_are_written_later(tmp_path):
    flags = [*TINY, "--total-timesteps", "960", "--checkpoint-seconds", "100000"]
    train("ppo", tmp_path / "whole", *flags)
    process = start("ppo", *flags, "--run-dir", tmp_path / "run")
    read_until(process, "iteration 3/")
    full = sum(path.stat().st_size for path in (tmp_path / "run").glob("events*"))
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (full + 500, resource.RLIM_INFINITY))
    seen = read_until(process, "iteration 8/")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    process.communicate()
    assert process.returncode == 0 and "warning: TensorBoard log not written" in seen
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_full_disk_stops_ppg_cleanly_and_it_can_go_on(tmp_path):
    flags = [*flags_of("ppg"), "--num-steps", "64", "--total-timesteps", "768"]
    train("ppg", tmp_path / "whole", *flags)
    frames = 4 * 64 * 64 * 64 * 3
    assert (tmp_path / "whole" / "checkpoint.pt").stat().st_size < frames
    limit = limit_file_size(int(1.5 * frames))  # room for a checkpoint and for one rollout
    code, out, err = run("ppg", *flags, "--run-dir", tmp_path / "run", preexec_fn=limit)
    assert code == 1 and err.count("\n") == 1 and "then --resume" in err, err
    assert "iteration 1/2" in out and "iteration 2/2" not in out
    resume("ppg", tmp_path / "run")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_the_buffer_is_announced_beside_the_free_space(tmp_path, capsys, monkeypatch):
    module = load("ppg")

    def announced(free, *flags):
        monkeypatch.setattr(module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 10**12, free))
        with command_line("ppg", [*flags_of("ppg"), "--total-timesteps", "32", *flags]):
            module.main()
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("buffer ")]
        return line

    size = 256 * 64 * 64 * 3 / 1e9  # of an iteration; a run of one needs no more, whatever its phase
    line = announced(
        3 * 10**11, "--num-steps", "64", "--total-timesteps", "256", "--n-pi", "100", "--run-dir", tmp_path
    )
    assert f" {size:.1f} GB, 300.0 GB are free" in line and "--aux-buffer-dir" in line


@pytest.mark.parametrize("script", ["ppg_ewma"])
def test_the_buffer_elsewhere_is_shared_by_runs_and_goes_when_they_end(script, tmp_path, kill):
    four = ["--total-timesteps", "128"]  # iterations, two whole phases
    flags = [*flags_of(script, *four), "--aux-buffer-dir", tmp_path / "scratch"]
    train(script, tmp_path / "whole", *flags_of(script, *four))
    for name in ("a", "b"):  # two runs of the same name, in different folders, both stopped in mid-phase
        kill(script, "collect", 27, *flags, "--run-dir", tmp_path / name / "run")
    assert len(list((tmp_path / "scratch").iterdir())) == 2
    assert not list((tmp_path / "a" / "run").glob("*.aux_buffer"))
    resume(script, tmp_path / "a" / "run")
    assert len(list((tmp_path / "scratch").iterdir())) == 1
    assert differences(checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "a" / "run"), but=["args", "digest"]) == []
    for path in (tmp_path / "scratch").iterdir():
        path.write_bytes(b"")
    assert "missing or incomplete" in refused(script, "--resume", tmp_path / "b" / "run")


def memory(script, allowance, *flags):
    result = subprocess.run([*KILL, script, "memory", str(allowance), *map(str, flags)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [int(x) for x in re.findall(r"RssAnon (\d+)", result.stdout)]


@pytest.mark.parametrize("script", ["ppg_ewma"])
def test_memory_does_not_grow_over_200_iterations(script, tmp_path):
    flags = "--env-id chaser --num-envs 2 --num-steps 2 --num-minibatches 1 --channels 1 1 1 --device cpu".split()
    flags += ["--n-pi", "3", "--no-adjust", "n-pi", "--aux-epochs", "1"] if script in PPG else ["--staleness", "2"]
    used = memory(script, 4000, *flags, "--total-timesteps", 800, "--run-dir", tmp_path / "run")
    assert len(used) == 200
    assert used[-1] - used[50] < 4000, used[::10]  # kB


def test_a_buffer_larger_than_memory(tmp_path):
    """242 MB of frames in a process that may take 180 MB more than it has when it starts; it takes about 60."""
    flags = "--env-id chaser --num-envs 8 --num-steps 41 --num-minibatches 1 --channels 1 1 1 --device cpu".split()
    flags += ["--n-pi", "60", "--no-adjust", "n-pi", "--aux-epochs", "1", "--aux-rollouts", "4", "--arch", "detach"]
    memory("ppg", 180, *flags, "--total-timesteps", 8 * 41 * 60, "--run-dir", tmp_path / "run")
    assert "loss/aux_clone_kl" in curves(tmp_path / "run")


def test_a_short_stint_leaves_a_checkpoint_and_an_extension_is_not_forgotten(tmp_path):
    """However rarely checkpoints are due, and however soon the run is killed."""
    flags = [*flags_of("ppo"), "--checkpoint-seconds", "3600"]
    first = train("ppo", tmp_path, *flags)["iteration"]
    process = start("ppo", "--resume", tmp_path, "--total-timesteps", "100000")
    read_until(
        process, f"iteration {first + 2:,}/"
    )  # printed before its checkpoint would be, so the one before is there
    process.kill()
    process.communicate()
    saved = checkpoint(tmp_path)
    assert saved["iteration"] == first + 1 and saved["args"]["total_timesteps"] == 100000
