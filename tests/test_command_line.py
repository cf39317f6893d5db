"""What a person sees: end to end runs, progress, logs, and one clear line for bad input."""

import fcntl
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
from unittest import mock

import pytest
from procgen.env import ENV_NAMES

from helpers import (
    EWMA,
    PPG,
    ROOT,
    SCRIPTS,
    TINY,
    checkpoint,
    command_line,
    curves,
    environment,
    load,
    run,
    start,
    tiny,
    train,
)

LOGGED = """episode/return episode/steps episode/return_last_100 episode/steps_last_100 time/environment_steps
time/steps_per_second loss/policy loss/value policy/entropy policy/kl policy/clip_fraction value/explained_variance
value/advantage_mean value/advantage_std value/advantage_mean_used value/advantage_std_used""".split()


@pytest.mark.parametrize("game, envs", [("bossfight", 8), ("dodgeball", 1)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_end_to_end_on_a_real_game(script, game, envs, tmp_path):
    """Several environments, and one; a copy in an empty folder, to the end, with all that the README promises."""
    folder = tmp_path / "run"
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    steps = 32 if envs == 8 else 256
    flags = f"--env-id {game} --distribution-mode easy --num-envs {envs} --num-steps {steps} --channels 2 2 2".split()
    flags += ["--total-timesteps", "512", "--device", "cpu", "--run-dir", folder]
    flags += ["--n-pi", "1", "--no-adjust", "n-pi", "--aux-epochs", "1"] if script in PPG else []
    flags += ["--staleness", "1"] if script == "staleness" else []
    command = [sys.executable, f"{script}.py", *map(str, flags)]
    result = subprocess.run(command, cwd=tmp_path, env=environment(PYTHONPATH=""), capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    out = result.stdout
    iterations = 512 // (envs * steps)
    lines = [line for line in out.splitlines() if " steps/s" in line]
    assert len(lines) == iterations  # not a terminal: a line an iteration
    place = r"phase 1, iteration 1/1" if script in PPG else rf"iteration 1/{iterations}"
    assert re.fullmatch(rf"(return [\d.-]+ \([+-][\d.]+\)|no episode has ended yet), {place}, [\d,]+ steps/s", lines[0])
    assert re.search(r" steps/s, \d+(\.\d)? (s|min) left$", lines[1])  # from the second on, it can tell
    saved = checkpoint(folder)
    assert saved["global_step"] == 512 and saved["args"]["env_id"] == game
    load(script).Agent([2, 2, 2], *(["dual"] if script in PPG else [])).load_state_dict(saved["agent"])

    logs = curves(folder)
    expected = set(LOGGED) | ({"policy/prox_age"} if script in EWMA else set())
    if script == "staleness":
        expected.add("policy/stale_kl")
    if script in PPG:
        expected |= {"loss/aux_head", "loss/aux_clone_kl", "loss/aux_value_head"}
    assert logs.keys() == expected
    assert min(logs) == "episode/return"  # TensorBoard shows it first
    every = [envs * steps * (i + 1) for i in range(iterations)]
    assert [step for step, _ in logs["time/environment_steps"]] == every
    assert [value for _, value in logs["time/environment_steps"]] == every
    assert [step for step, _ in logs["loss/policy"]] == (every[1:] if script == "staleness" else every)
    assert all(abs(value) < 1e6 for series in logs.values() for _, value in series)


def test_logged_returns_are_those_of_all_episodes_of_the_iteration(tmp_path):
    """Played once more with the stored actions, by a loop that knows nothing of the scripts' bookkeeping."""
    import numpy as np
    from procgen import ProcgenGym3Env

    recorded = []
    module = load("ppo")

    class Recording(ProcgenGym3Env):
        def act(self, action):
            recorded.append(np.array(action))
            super().act(action)

    module.ProcgenGym3Env, original = Recording, module.ProcgenGym3Env
    flags = [*TINY, "--env-id", "bossfight", "--num-steps", "64", "--total-timesteps", "768", "--run-dir", tmp_path]
    try:
        with command_line("ppo", flags):
            module.main()
    finally:
        module.ProcgenGym3Env = original
    env = ProcgenGym3Env(4, "bossfight", distribution_mode="easy", rand_seed=1, num_levels=0, start_level=0)
    returns, lengths, ended = [0.0] * 4, [0] * 4, []
    logs = curves(tmp_path)
    for t, action in enumerate(recorded, start=1):
        env.act(action)
        reward, _, first = env.observe()
        for i in range(4):
            returns[i], lengths[i] = returns[i] + reward[i], lengths[i] + 1
            if first[i]:
                ended.append((t, returns[i], lengths[i]))
                returns[i], lengths[i] = 0.0, 0
    assert len(ended) > 5
    for suffix, window in [("", 64), ("_last_100", len(recorded))]:
        for step, value in logs[f"episode/return{suffix}"]:
            mine = [x for x in ended if step // 4 - window < x[0] <= step // 4]
            assert abs(value - np.mean([x[1] for x in mine])) < 1e-5
            assert abs(dict(logs[f"episode/steps{suffix}"])[step] - np.mean([x[2] for x in mine])) < 1e-3


def on_a_terminal(script, *flags, columns=140):
    """What a script writes to a terminal of this width."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = start(script, *flags, stdout=terminal)
    os.close(terminal)
    out = b""
    while True:
        try:
            chunk = os.read(controller, 65536)
        except OSError:
            break
        if not chunk:
            break
        out += chunk
    assert process.wait() == 0
    return out.decode().replace("\r\n", "\n")


def test_on_a_terminal_there_is_one_line_that_moves(tmp_path):
    """Return, place, activity and clock through all phases, a line that fits; no lines by iteration."""
    flags = [*tiny("ppg"), "--num-steps", "512", "--total-timesteps", "6144", "--channels", "8", "8", "8"]
    out = on_a_terminal("ppg", *flags, "--microbatch-size", "32", "--run-dir", tmp_path / "run")
    status = [x.split("\n")[0].replace("\x1b[K", "") for x in out.split("\r") if " | " in x]
    assert all(len(x) < 140 for x in status)
    for activity in ("collect, step", "optimise, epoch 1, minibatch", "auxiliary epoch 1, minibatch"):
        assert any(activity in x for x in status), (activity, status)
    assert all(re.search(r"phase [12], iteration [12]/2 \| ", x) for x in status)
    assert any(re.match(r"(return [\d.]+ \([+-]|no episode)", x) for x in status)
    clocks = [re.search(r", for (\d+ s|[\d.]+ min)( \||$)", x)[1] for x in status]
    assert len(set(clocks)) > 1
    lines = [
        x for x in (y.split("\r")[-1] for y in out.split("\n")) if " steps/s" in x and " | " not in x
    ]  # what stays: ten in a long run
    assert len(lines) == 3 and re.search(r"finished at 6,144 steps, (return|no episode)", out)


BAD = [
    ("--env-id pong", ["--env-id", "'pong'", *ENV_NAMES]),
    ("--num-envs 0", ["--num-envs", "0", "1 or more"]),
    ("--num-envs -4", ["--num-envs", "-4", "1 or more"]),
    ("--num-envs 2.5", ["--num-envs", "2.5", "whole number"]),
    ("--num-steps 0", ["--num-steps", "0", "1 or more"]),
    ("--total-timesteps -1", ["--total-timesteps", "-1", "1 or more"]),
    ("--num-minibatches 0", ["--num-minibatches", "0", "1 or more"]),
    ("--num-levels -1", ["--num-levels", "-1", "0"]),
    ("--seed -1", ["--seed", "-1", "0"]),
    ("--microbatch-size 0", ["--microbatch-size", "0", "1 or more"]),
    ("--channels 0 1 2", ["--channels", "0", "1 or more"]),
    ("--learning-rate nan", ["--learning-rate", "nan", "0 or more"]),
    ("--gamma 1.5", ["--gamma", "1.5", "from 0 to 1"]),
    ("--num-envs 6 --num-minibatches 4", ["--num-minibatches", "4", "1, 2, 3, 6, 12"]),
    ("--num-envs 1 --num-steps 9 --num-minibatches 2", ["--num-minibatches", "2", "1, 3"]),
    ("--distribution-mode memory", ["--distribution-mode", "memory", "easy", "hard"]),
    ("--num-envs 100000", ["--num-envs", "GB of memory", "free"]),
    ("--num-steps 1000000000", ["--num-steps", "GB of memory", "free"]),
    ("--channels 100000 1 1", ["--channels", "GB of memory", "free"]),
    ("--num-minibatches 1000000000000000", ["--num-minibatches", "256 x 256", "65536"]),
    (f"--num-envs {'9' * 400}", ["--num-envs", "from 1 to"]),
    (f"--learning-rate {'9' * 400}", ["--learning-rate", "from 0 to"]),
    ("--clip-coef 1", ["--clip-coef", "below 1"]),
    ("--clip-coef 1.5", ["--clip-coef", "from 0 to 1"]),
    ("--adv-norm none --no-adjust adv-norm", ["--no-adjust", "--adv-norm", "nothing to adjust"]),
    ("--start-level 5", ["--start-level", "5", "--num-levels"]),
    ("--start-level 2147483600 --num-levels 100", ["--start-level", "2147483600", "from 1 to 47"]),
    ("--distribution-mode medium", ["--distribution-mode", "medium", "easy", "hard"]),
    ("--no-adjust lr nonsense", ["--no-adjust", "nonsense", "lr", "adv-norm"]),
    ("--adv-norm batch", ["--adv-norm", "batch", "iteration"]),
    ("--clip-vloss --clip-coef 0", ["--clip-vloss", "--clip-coef"]),
    ("--num-env 4", ["--num-env"]),
    ("--device cuda", ["--device", "cuda", "cpu"]),
]


@pytest.mark.parametrize("flags, said", BAD, ids=[flags for flags, _ in BAD])
@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_input_is_one_line_and_exit_code_2(script, flags, said, tmp_path, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = tmp_path / "run"
    with pytest.raises(SystemExit) as stop, command_line(script, [*shlex.split(flags), "--run-dir", folder]):
        load(script).main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith(f"{script}.py: error: ")
    assert all(word in err for word in said), err
    assert not folder.exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_adjust_offers_what_the_script_adjusts(script, capsys):
    for flags in (["--no-adjust", "x"], ["--help"]):
        with pytest.raises(SystemExit), command_line(script, flags):
            load(script).parse_args()
        said = "".join(capsys.readouterr()).split("--no-adjust")[1].split("\n  --")[0]
        assert ("prox" in said) == (script in EWMA) and ("n-pi" in said) == (script in PPG), said


def test_bad_input_as_a_process(tmp_path):
    """Once for real: exit code 2, one line, no traceback, nothing written."""
    code, out, err = run("ppg_ewma", "--env-id", "pong", cwd=tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1) and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", ["ppo", "ppg_ewma"])
def test_a_python_without_procgen_gets_one_sentence(script, tmp_path):
    (tmp_path / "procgen.py").write_text("raise ModuleNotFoundError(\"No module named 'procgen'\")\n")
    code, out, err = run(script, env=environment(PYTHONPATH=str(tmp_path)))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "3.12" in err and "procgen" in err


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_every_flag_with_its_default(script, capsys):
    with pytest.raises(SystemExit) as stop, command_line(script, ["--help"]):
        load(script).parse_args()
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for flag, default in [("--learning-rate", "0.0005"), ("--gamma", "0.999"), ("--num-envs", "256")]:
        text = " ".join(out.split(f"  {flag} ")[1].split("\n  --")[0].split())
        assert f"(default: {default})" in text
    assert all(f"\n{group}:" in out for group in ("run", "environment", "optimisation", "batch size"))
    assert script.upper().replace("_", "-") in out and f"python {script}.py --env-id heist --num-envs 64" in out


@pytest.mark.parametrize("script", SCRIPTS)
def test_procgen_gets_what_the_flags_say(script, tmp_path):
    class Enough(Exception):
        pass

    flags = "--env-id maze --distribution-mode easy --num-levels 7 --start-level 3 --seed 9 --num-envs 16".split()
    flags += ["--env-threads", "3"]
    with mock.patch.object(load(script), "ProcgenGym3Env", side_effect=Enough) as made:
        with command_line(script, [*flags, "--run-dir", tmp_path / "run"]), pytest.raises(Enough):
            load(script).main()
    options = {"distribution_mode": "easy", "num_levels": 7, "start_level": 3, "rand_seed": 9, "num_threads": 3}
    made.assert_called_once_with(16, "maze", **options)


def test_the_last_100_episodes_are_the_last_100(tmp_path):
    """Counted by hand from the episodes of every iteration, over the whole run."""
    module, ended = load("ppo"), []
    count = module.Run.count_episodes

    def recording(run, reward, first):
        before = len(run.ended)
        count(run, reward, first)
        ended.extend((run.state.iteration + 1, *episode) for episode in run.ended[before:])

    flags = [*TINY, "--env-id", "bossfight", "--num-envs", "16", "--num-steps", "64", "--total-timesteps", "16384"]
    with mock.patch.object(module.Run, "count_episodes", recording):
        train("ppo", tmp_path, *flags, "--epochs", "1", "--channels", "1", "1", "1")
    assert len(ended) > 150  # more than are averaged over
    logs = curves(tmp_path)
    for tag, column in [("episode/return_last_100", 1), ("episode/steps_last_100", 2)]:
        for step, value in logs[tag]:
            window = [x[column] for x in ended if x[0] <= step // 1024][-100:]
            assert value == pytest.approx(sum(window) / len(window), rel=1e-5)
