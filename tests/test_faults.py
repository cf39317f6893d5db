"""What goes wrong takes one line and loses nothing: divergence, odd checkpoints, lost terminals, full disks."""

import gc
import os
import resource
import signal
import subprocess
import sys
from unittest import mock

import pytest
import torch
from procgen import ProcgenGym3Env

from helpers import (
    EWMA,
    PPG,
    ROOT,
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


def refusal(capsys, script, *flags):
    """The one line that a script ends with, and its exit code."""
    capsys.readouterr()
    code = exit_code(script, *flags)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith(f"{script}.py: error: "), err
    return code, err


def exit_code(script, *flags):
    """Of a script in this process; its lock is let go, as when a process ends."""
    code = 0
    try:
        with command_line(script, flags):
            load(script).main()
    except SystemExit as stop:
        code = stop.code
    gc.collect()
    return code


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_diverged_run_keeps_its_last_good_checkpoint(script, tmp_path, capsys):
    train(script, tmp_path / "whole", *tiny(script), "--total-timesteps", "160")
    steps = {"n": 0}
    adam_step = torch.optim.Adam.step

    def diverging(optimizer, *args):
        adam_step(optimizer, *args)
        steps["n"] += 1
        if steps["n"] == 15:
            optimizer.param_groups[0]["params"][0].data[0] = float("nan")

    with mock.patch.object(torch.optim.Adam, "step", diverging):
        flags = [*tiny(script), "--total-timesteps", "160", "--run-dir", tmp_path / "run"]
        code, err = refusal(capsys, script, *flags)
    assert code == 1 and "weights" in err and "diverged" in err and "--learning-rate" in err
    saved = checkpoint(tmp_path / "run")
    assert saved["iteration"] >= 1 and f"iteration {saved['iteration'] + 1} " in err
    assert all(x.isfinite().all() for x in saved["agent"].values())
    assert max(step for step, _ in curves(tmp_path / "run")["time/environment_steps"]) == saved["global_step"]
    with command_line(script, ["--resume", tmp_path / "run"]):
        load(script).main()
    again = checkpoint(tmp_path / "run")
    assert differences(checkpoint(tmp_path / "whole"), again, but=["args", "digest"]) == []


def test_a_step_size_that_is_too_high_stops_the_run(tmp_path, capsys):
    code, err = refusal(capsys, "ppo", *TINY, "--learning-rate", "1e15", "--run-dir", tmp_path / "run")
    assert code == 1 and "loss/" in err and "not finite" in err
    assert checkpoint(tmp_path / "run")["iteration"] == 0


@pytest.mark.parametrize("scale", [40, 100])
@pytest.mark.parametrize("script", [*EWMA, "staleness"])
def test_confident_policies_make_no_nan(script, scale, tmp_path):
    """pi / pi_prox overflows float32 once the log-probabilities are 88.7 apart; the objective must not."""
    module, apart, finite = load(script), [], []

    class Fickle(torch.nn.Linear):
        """Logits of this scale, others at each call: pi, pi_prox and pi_behav have nothing in common."""

        def forward(self, x):
            return super().forward(x) + scale * torch.randn(len(x), 15)

    class Agent(module.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.policy_head = Fickle(256, 15)

    def recording(logp, logp_prox, advantage, clip_coef):
        loss, clipped = policy_loss(logp, logp_prox, advantage, clip_coef)
        apart.append(float((logp - logp_prox).max().detach()))
        (gradient,) = torch.autograd.grad(loss, logp, retain_graph=True)
        finite.append(bool(loss.isfinite() and gradient.isfinite().all()))
        return loss, clipped

    policy_loss = module.policy_loss
    flags = [*tiny(script), "--num-envs", "16", "--total-timesteps", "640"]
    with mock.patch.object(module, "Agent", Agent), mock.patch.object(module, "policy_loss", recording):
        saved = train(script, tmp_path / "run", *flags)
    assert max(apart) > 59, "too tame to show anything"
    assert len(finite) >= 8 and all(finite)
    assert all(x.isfinite().all() for x in saved["agent"].values())


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, capsys):
    folder, path = tmp_path / "run", tmp_path / "run" / "checkpoint.pt"
    saved = train("ppo", folder, *TINY)
    env = ProcgenGym3Env(4, "maze", distribution_mode="easy")
    other_game = [torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in env.callmethod("get_state")]
    misfits = {
        "missing key": {k: v for k, v in saved.items() if k != "return_stats"},
        "other shape": saved | {"discounted_return": torch.zeros(7)},
        "other game": saved | {"games": other_game},
        "garbage": saved | {"games": [torch.zeros(9, dtype=torch.uint8)] * 4},
        "tampered flag": saved | {"args": saved["args"] | {"num_envs": 5}},
        "tampered number": saved | {"iteration": -3},
        "tampered weight": saved | {"agent": saved["agent"] | {"value_head.bias": torch.tensor([float("nan")])}},
        "no digest": {k: v for k, v in saved.items() if k != "digest"},
    }
    for name, misfit in misfits.items():
        torch.save(misfit, path)
        before = {p: p.read_bytes() for p in folder.iterdir()}
        code, err = refusal(capsys, "ppo", "--resume", folder, "--total-timesteps", "1000")
        assert code == 2 and "changed after it was written" in err, name
        assert before == {p: p.read_bytes() for p in folder.iterdir()}, name
    # One that says it is whole, and is not: by another version of a script, say.
    for name in ("missing key", "other shape"):
        misfit = misfits[name]
        if name == "other shape":
            misfit = saved | {"agent": {k: v[:1] for k, v in saved["agent"].items()}}
        misfit = {k: v for k, v in misfit.items() if k != "digest"}
        torch.save(misfit | {"digest": load("ppo").digest(misfit)}, path)
        code, err = refusal(capsys, "ppo", "--resume", folder, "--total-timesteps", "1000")
        assert code == 2 and "does not fit" in err, name


def test_a_resumed_run_knows_its_return(tmp_path, capsys):
    flags = ["--env-id", "bossfight", "--num-steps", "64"]
    train("ppo", tmp_path / "run", *TINY, *flags, "--total-timesteps", "1024")
    capsys.readouterr()
    with command_line("ppo", ["--resume", tmp_path / "run"]):
        load("ppo").main()
    out = capsys.readouterr().out
    assert "resumed    after iteration 4, 1,024 steps" in out
    logged = curves(tmp_path / "run")["episode/return_last_100"][-1][1]
    assert f"finished at 1,024 steps, return {logged:.2f} " in out


def test_a_stop_while_starting_is_one_line(tmp_path):
    slow = tmp_path / "procgen.py"  # a library that is interrupted while the games are made
    slow.write_text("class ProcgenGym3Env:\n    def __init__(self, *_, **__):\n        raise KeyboardInterrupt\n")
    (tmp_path / "procgen").mkdir()
    slow.rename(tmp_path / "procgen" / "__init__.py")
    (tmp_path / "procgen" / "env.py").write_text("ENV_NAMES = ['chaser']\n")
    process = start("ppo", *TINY, "--run-dir", tmp_path / "run", env=environment(PYTHONPATH=str(tmp_path)))
    _, err = process.communicate()
    assert process.returncode == 130 and err.count("\n") == 1 and "Traceback" not in err


def test_resume_without_a_folder_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, err = refusal(capsys, "ppo", "--resume", "")
    assert code == 2 and "--resume" in err and not list(tmp_path.iterdir())


def test_a_closed_pipe_stops_the_run_in_one_line(tmp_path):
    process = start("ppo", *TINY, "--total-timesteps", "1000000", "--run-dir", tmp_path / "run")
    read_until(process, "iteration 1/")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 1
    assert "Traceback" not in err and "Broken pipe" in err and f"--resume {tmp_path / 'run'}" in err
    assert checkpoint(tmp_path / "run")["iteration"] >= 1


def test_a_full_disk_under_the_output_stops_the_run_in_one_line(tmp_path):
    with open("/dev/full", "w") as full:
        process = start("ppo", *TINY, "--run-dir", tmp_path / "run", stdout=full)
        err = process.communicate()[1]
    assert process.returncode == 1 and "Traceback" not in err and "No space left" in err


def test_a_name_that_the_terminal_cannot_show(tmp_path):
    process = start("ppo", *TINY, "--run-dir", tmp_path / "läuft", env=environment(PYTHONIOENCODING="ascii"))
    out, err = process.communicate()
    assert process.returncode == 0 and err == "" and "l\\xe4uft" in out


def test_without_docstrings(tmp_path):
    command = [sys.executable, "-OO", str(ROOT / "ppg_ewma.py"), *tiny("ppg_ewma"), "--run-dir", str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr == "" and "finished" in result.stdout


def test_nohup_is_respected(tmp_path):
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    process = start("ppo", *TINY, "--total-timesteps", "1000000", "--run-dir", tmp_path / "run", **ignore)
    read_until(process, "iteration 1/")
    os.kill(process.pid, signal.SIGHUP)
    read_until(process, "iteration 5/")
    process.kill()
    process.communicate()


def test_a_log_that_fails_at_the_very_end_is_not_lost(tmp_path):
    flags = [*TINY, "--total-timesteps", "320"]
    train("ppo", tmp_path / "whole", *flags)
    process = start("ppo", *flags, "--run-dir", tmp_path / "run")
    read_until(process, "iteration 8/")
    process.kill()
    process.communicate()
    module = load("ppo")

    def full(*_):
        raise OSError(28, "No space left on device")

    with mock.patch.object(module.SummaryWriter, "flush", full):
        assert exit_code("ppo", "--resume", tmp_path / "run") == 1
        assert exit_code("ppo", "--resume", tmp_path / "run") == 1  # nothing left to do but to log, and still no room
    assert checkpoint(tmp_path / "run")["iteration"] == 10 and checkpoint(tmp_path / "run")["unlogged"]
    # In a process of its own: TensorBoard reads files in the order of their names, where of one second
    # and one process the tenth comes before the ninth.
    assert run("ppo", "--resume", tmp_path / "run")[0] == 0
    assert checkpoint(tmp_path / "run")["unlogged"] == []
    logs = [{tag: x for tag, x in curves(tmp_path / name).items() if tag[:5] != "time/"} for name in ("whole", "run")]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_stated_and_used_values_are_on_record(script, tmp_path):
    saved = train(script, tmp_path, *tiny(script))
    assert saved["args"]["learning_rate"] == 5e-4 and saved["used"]["lr"] == 5e-4 / 8
    assert saved["used"]["lr"] == saved["optimizer"]["param_groups"][0]["lr"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    logs = EventAccumulator(str(tmp_path))
    logs.Reload()
    content = logs.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    assert found["used_lr"].number_value == 5e-4 / 8 and found["learning_rate"].string_value == "0.0005"
    assert len(found) == len(saved["args"]) + len(saved["used"])


@pytest.mark.parametrize("script", ["ppo", "ppg_ewma"])
def test_results_do_not_depend_on_the_threads_that_step_the_games(script, tmp_path):
    one, three = (train(script, tmp_path / n, *tiny(script), "--env-threads", n) for n in "13")
    assert differences(one, three, but=["args", "digest"]) == []


@pytest.mark.parametrize("script", PPG)
def test_without_its_loss_the_true_value_sleeps_through_the_auxiliary_phase(script, tmp_path):
    flags = [*tiny(script), "--total-timesteps", "64"]
    none, off, on = (
        train(script, tmp_path / str(i), *flags, *more)["agent"]
        for i, more in enumerate([["--aux-epochs", "0"], ["--aux-value-coef", "0"], []])
    )

    def trained(agent):
        return {name.strip("/").split(".")[0] for name in differences(none, agent)}

    assert trained(off) == {"trunk", "policy_head", "aux_head"}
    assert trained(on) == trained(off) | {"value_trunk", "value_head"}


def test_a_cpu_is_told_that_the_paper_takes_weeks(tmp_path):
    """And gets a command for a laptop; both before the first step."""
    flags = [*TINY, "--num-envs", "1", "--num-steps", "1", "--num-minibatches", "1", "--total-timesteps", "100000000"]
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))}
    process = start("ppo", *flags, "--run-dir", tmp_path / "run", **limit)
    out = read_until(process, "iteration 1/")
    process.kill()
    process.communicate()
    note = out.split("weeks")[1]
    command = note.split("python ppo.py ")[1].split("\n")[0]
    with command_line("ppo", command.split()):
        assert load("ppo").parse_args()[0].total_timesteps < 200_000


def test_frames_that_vanish_stop_the_run(tmp_path, capsys):
    """A tidy system may delete the buffer within a phase: the frames must not turn black in silence."""
    buffer = load("ppg").AuxiliaryBuffer
    add = buffer.add

    def tidy(self, *args):
        if self.value_targets:
            self.path.unlink()
        add(self, *args)

    with mock.patch.object(buffer, "add", tidy):
        code, err = refusal(capsys, "ppg", *tiny("ppg"), "--run-dir", tmp_path / "run")
    assert code == 1 and "frames.aux_buffer: No such file or directory" in err


def test_a_run_that_nothing_limits_says_so(tmp_path, capsys):
    with command_line("ppo", [*TINY, "--clip-coef", "0", "--run-dir", tmp_path / "run"]):
        load("ppo").main()
    assert "nothing limits the update" in capsys.readouterr().out
