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
from types import SimpleNamespace
from unittest import mock

import pytest
import update_readme
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
)
from procgen.env import ENV_NAMES

README = (ROOT / "README.md").read_text()
LOGGED = """episodes/return episodes/length last_100_episodes/return last_100_episodes/length time/environment_steps
time/steps_per_second loss/policy loss/value loss/entropy policy/approx_kl policy/clip_fraction value/explained_variance
advantage/mean advantage/std advantage/mean_used advantage/std_used""".split()


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
    lines = [line for line in out.splitlines() if line.startswith("iteration ") and " steps/s, " in line]
    assert len(lines) == iterations  # not a terminal: a line an iteration
    assert re.match(r"iteration 1: \d+ steps, \d+ steps/s, \d\d:\d\d left, (return|no episode)", lines[0])
    saved = checkpoint(folder)
    assert saved["global_step"] == 512 and saved["args"]["env_id"] == game
    load(script).Agent([2, 2, 2], *(["dual"] if script in PPG else [])).load_state_dict(saved["agent"])

    logs = curves(folder)
    expected = set(LOGGED) | ({"prox/com", "prox/kl"} if script in EWMA else set())
    if script in PPG:
        expected |= {"auxiliary/aux_value_loss", "auxiliary/clone_kl", "auxiliary/value_loss"}
    assert logs.keys() == expected
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
    for which, window in [("episodes", 64), ("last_100_episodes", len(recorded))]:
        for step, value in logs[f"{which}/return"]:
            mine = [x for x in ended if step // 4 - window < x[0] <= step // 4]
            assert abs(value - np.mean([x[1] for x in mine])) < 1e-5
            assert abs(dict(logs[f"{which}/length"])[step] - np.mean([x[2] for x in mine])) < 1e-3


def test_on_a_terminal_there_is_one_bar_that_tells_the_phase(tmp_path):
    """Progress while it collects, while it optimises and in the auxiliary phase; no lines by iteration."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))  # 40 lines of 120 characters
    process = start("ppg", *tiny("ppg"), "--run-dir", tmp_path / "run", stdout=terminal)
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
    bar = [x for x in out.decode().replace("\r\n", "\n").split("\r") if "steps/s" in x]
    phases = {x.split(":")[0].strip() for x in bar}
    assert {"collect", "optimise, epoch 1", "auxiliary phase, epoch 1", "auxiliary phase, epoch 2"} <= phases
    assert any("return" in x or "no episode" in x for x in bar) and any("100%" in x for x in bar)
    assert "iteration 1:" not in out.decode()


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
    ("--env-id bigfish --distribution-mode memory", ["--distribution-mode", "memory", "easy, hard"]),
    (
        "--env-id starpilot --distribution-mode exploration",
        ["--distribution-mode", "exploration", "easy, hard, extreme"],
    ),
    ("--env-id coinrun --distribution-mode exploration --num-levels 3", ["exploration", "--num-levels"]),
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
    with pytest.raises(SystemExit), command_line(script, ["--no-adjust", "x"]):
        load(script).adjust_for_batch_size(load(script).parse_args()[0])
    said = capsys.readouterr().err
    assert ("prox" in said) == (script in EWMA) and ("n-pi" in said) == (script in PPG)


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
    assert "3.10, 3.11 and 3.12" in err and "procgen" in err


@pytest.mark.parametrize("mode, game", [("extreme", "leaper"), ("memory", "heist"), ("exploration", "maze")])
def test_special_modes_work_where_the_game_has_them(mode, game, tmp_path):
    flags = [
        *TINY,
        "--env-id",
        game,
        "--distribution-mode",
        mode,
        "--total-timesteps",
        "32",
        "--run-dir",
        tmp_path / "run",
    ]
    with command_line("ppo", flags):
        load("ppo").main()


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


def readme_commands():
    blocks = re.findall(r"```(?:bash|sh|console)?\n(.*?)```", README, re.S)
    return [line.strip() for block in blocks for line in block.splitlines() if re.match(r"\s*python \w+\.py", line)]


def test_readme_commands_have_flags_that_exist():
    commands = readme_commands()
    assert commands
    for command in commands:
        script, *words = shlex.split(command.split("#")[0])[1:]
        if script.removesuffix(".py") in SCRIPTS and "--resume" not in words:
            with command_line(script.removesuffix(".py"), words):
                load(script.removesuffix(".py")).parse_args()
    for flag in set(re.findall(r"`(--[a-z][a-z-]+)", README)):
        assert any(f'"{flag}"' in path.read_text() for path in [*ROOT.glob("*.py"), *ROOT.glob("experiments/*.py")]), (
            flag
        )


def test_the_first_command_of_the_readme_trains(tmp_path):
    """The README's own line, only shorter."""
    (command,) = [x for x in readme_commands() if x.startswith("python ppg_ewma.py --env-id heist --num-envs 64")]
    words = shlex.split(command)[1:]
    short = [
        "--num-steps",
        "2",
        "--total-timesteps",
        "128",
        "--channels",
        "2",
        "2",
        "2",
        "--run-dir",
        str(tmp_path / "x"),
    ]
    short += ["--aux-epochs", "0"]
    result = subprocess.run([sys.executable, *words, *short], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_diff_in_the_readme_is_the_diff():
    assert update_readme.BLOCK.findall(README) == [update_readme.diff()]


def test_every_file_and_line_that_the_readme_names_exists():
    for script, name in re.findall(r"`(\w+\.py)`:? `(\w+)`", README):
        assert re.search(rf"\b(def|class) {name}\b", (ROOT / script).read_text()), (script, name)
    for path in re.findall(r"\]\((?!http|#)([^)#]+)\)", README):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("script", SCRIPTS)
def test_procgen_gets_what_the_flags_say(script, tmp_path):
    class Enough(Exception):
        pass

    flags = "--env-id maze --distribution-mode memory --num-levels 7 --start-level 3 --seed 9 --num-envs 16".split()
    with mock.patch.object(load(script), "ProcgenGym3Env", side_effect=Enough) as made:
        with command_line(script, [*flags, "--run-dir", tmp_path / "run"]), pytest.raises(Enough):
            load(script).main()
    options = {"distribution_mode": "memory", "num_levels": 7, "start_level": 3, "rand_seed": 9}
    made.assert_called_once_with(16, "maze", **options)


def test_the_last_100_episodes_are_the_last_100():
    module = load("ppo")
    run = object.__new__(module.Run)
    run.state = SimpleNamespace(recent=[[float(x), 10.0] for x in range(90)], unlogged=[])
    run.steps, run.total, run.resumed_at, run.started, run.last_iteration, run.last_save = 8, 80, 0, 0, 0, 1e18
    run.args, run.bar = SimpleNamespace(checkpoint_seconds=0), mock.Mock(disable=False)
    with mock.patch.object(module.Run, "write_logs"):
        run.end_iteration(1, {}, [[float(x), 20.0] for x in range(1000, 1030)])
    (step, stats) = run.state.unlogged[0]
    assert step == 8 and stats["episodes/return"] == 1014.5 and stats["episodes/length"] == 20
    assert stats["last_100_episodes/return"] == pytest.approx((sum(range(20, 90)) + sum(range(1000, 1030))) / 100)
    assert stats["last_100_episodes/length"] == pytest.approx(13)
