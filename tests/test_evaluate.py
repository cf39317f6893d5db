"""experiments/evaluate.py, end to end on runs made here: the numbers, the levels, the video, the errors."""

import itertools
import json
import math
import pickle
import sys
import time
import zipfile
from functools import partial
from types import SimpleNamespace

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from PIL import Image

from helpers import PPG, ROOT, SCRIPTS, call, checkpoint, load, run, start, train

sys.path.insert(0, str(ROOT / "experiments"))
import evaluate  # noqa: E402
from lab import video  # noqa: E402

call = partial(call, evaluate)
TINY = "--env-id starpilot --distribution-mode easy --num-envs 2 --num-steps 16 --num-minibatches 1 --channels 2 2 2"
TINY = [*TINY.split(), "--device", "cpu", "--total-timesteps", "64", "--checkpoint-seconds", "0"]
TRAINING = ["--start-level", 5, "--num-levels", 3]  # levels 5, 6, 7


def tiny(script):
    more = "--n-pi 1 --no-adjust n-pi --aux-epochs 1" if script in PPG else "--staleness 1" * (script == "staleness")
    return TINY + more.split()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of every script, on three levels; and one of ppo.py on all levels."""
    folder = tmp_path_factory.mktemp("runs")
    for script in SCRIPTS:
        train(script, folder / script, *tiny(script), *TRAINING)
    train("ppg", folder / "detach", *tiny("ppg"), *TRAINING, "--arch", "detach")
    train("ppo", folder / "all", *tiny("ppo"))
    return folder


@pytest.fixture
def forged(runs, tmp_path):
    """Write a checkpoint that differs from a good one."""

    def forge(**changes):
        saved = checkpoint(runs / "ppo")
        for name, value in changes.items():
            (saved if name in saved else saved["args"])[name] = value
        torch.save(saved, tmp_path / "checkpoint.pt")
        return tmp_path

    return forge


def test_all_of_it_as_a_user_would(runs, tmp_path):
    before = sorted((x.name, x.stat().st_mtime_ns) for x in (runs / "ppo").iterdir())
    flags = ["--episodes", 6, "--num-envs", 4, "--random", "--video-seconds", 1.4, "--video-episodes", 2]
    files = {"--json": tmp_path / "numbers.json", "--video": tmp_path / "play.mp4"}
    code, out, err = run("experiments/evaluate", runs / "ppo", *flags, *itertools.chain(*files.items()))
    assert (code, err) == (0, "")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["numbers.json", "play.mp4"]
    assert sorted((x.name, x.stat().st_mtime_ns) for x in (runs / "ppo").iterdir()) == before, "the run was touched"

    numbers = json.loads(files["--json"].read_text())
    results = {(x["policy"], x["levels"]): x for x in numbers["results"]}
    assert list(results) == [(p, x) for p in ("agent", "random") for x in ("unseen", "training")]
    for (_, levels), result in results.items():
        episodes = result["episodes"]
        assert [e["env"] for e in episodes] == [0, 0, 1, 1, 2, 3], "not a fixed number in every environment"
        assert [e["level"] for e in episodes] == [e["level"] for e in results["agent", levels]["episodes"]]
        assert all((e["level"] in (5, 6, 7)) == (levels == "training") for e in episodes)
        for name in ("return", "length", "solved"):
            mean = np.mean([e[name] for e in episodes])
            assert math.isclose(result[name]["mean"], mean, abs_tol=1e-9)
            assert result[name]["low"] <= mean <= result[name]["high"]
        assert all(0 < e["length"] <= 1000 for e in episodes)
        assert result["return"]["mean"] == pytest.approx(
            2.5 + result["normalised"]["mean"] * (64 - 2.5)
        )  # easy starpilot
        assert f"{result['return']['mean']:.2f} [" in out and f"{result['length']['mean']:.1f} [" in out
    for policy, gap in numbers["generalisation_gap"].items():
        difference = results[policy, "training"]["return"]["mean"] - results[policy, "unseen"]["return"]["mean"]
        assert gap["return"]["mean"] == pytest.approx(difference)
        assert gap["normalised"]["mean"] == pytest.approx(difference / (64 - 2.5))
        assert f"generalisation gap, {policy}: {difference:.2f} [" in out
    assert "ppo.py on starpilot, easy, seed 1, after 64 steps" in out

    frames = iio.imread(files["--video"], plugin="pyav")
    panel = video.Panel("", 1)
    assert panel.size == 512
    assert frames.shape[1:] == (2 * (512 + panel.strip), 2 * 512, 3)
    assert len(frames) == 21 + 15  # 1.4 seconds, and one to read the outcome
    assert iio.immeta(files["--video"], plugin="pyav")["fps"] == 15
    check_pictures(frames, 512, panel.strip, rows=2, columns=2)


def check_pictures(frames, size, strip, rows, columns):
    """Every panel has a game that goes on, and captions and bars that change."""
    for row, column in itertools.product(range(rows), range(columns)):
        top, left = row * (size + strip), column * size
        panel = frames[:, top : top + size + strip, left : left + size].astype(float)
        for part in (panel[:, :size], panel[:, size:]):
            assert part[0].std() > 5, "blank"
            assert np.abs(part[0] - part[20]).max() > 50, "nothing moves"


def test_gif(runs, tmp_path):
    path = tmp_path / "play.gif"
    path.write_bytes(b"an older one")
    flags = ["--video-levels", "training", "--video-seconds", 5]
    assert call(runs / "ppo", "--episodes", 1, "--video", path, *flags)[0] == 0
    frames, panel = iio.imread(path, plugin="pillow", mode="RGB"), video.Panel("", 0.375)
    assert (panel.size, frames.shape[1:]) == (192, (192 + panel.strip, 3 * 192, 3))
    with Image.open(path) as gif:
        assert gif.info["loop"] == 0, "should repeat for ever"
        duration = sum(gif.seek(i) or gif.info["duration"] for i in range(gif.n_frames))
    assert duration == pytest.approx(6000, abs=200)  # five seconds at the game's pace, and one to read the outcome
    check_pictures(frames, 192, panel.strip, rows=1, columns=3)
    assert path.stat().st_size < 2e6


def test_pictures_show_return_and_probabilities():
    black = np.zeros((512, 512, 3), dtype=np.uint8)

    def strip(score=1, probabilities=(0.4, 0.6, *[0] * 13), action=1):
        panel = video.Panel("title", 1)
        panel.draw(black, 17, score, 3, np.array(probabilities), action)
        return np.asarray(panel.picture)[512:].astype(int)

    captions, bars = slice(0, 80), slice(80, None)
    assert (strip() == strip()).all()
    assert (strip(score=2)[captions] != strip()[captions]).any() and (strip(score=2)[bars] == strip()[bars]).all()

    def heights(picture, colour):
        """Of the bars of a colour, in each of the 15 places."""
        here = (picture == colour).all(-1)
        return [here[:, int(12 + 32.5 * i) : int(12 + 32.5 * (i + 1))].any(1).sum() for i in range(15)]

    chosen, others = heights(strip(), video.CHOSEN), heights(strip(), video.BAR)
    assert chosen[1] > 30 and sum(chosen) == chosen[1]
    assert others[0] == pytest.approx(chosen[1] * 0.4 / 0.6, abs=2) and max(others[2:]) <= 3

    panel = video.Panel("title", 1)
    for solved in (False, True):
        panel.draw(np.full_like(black, 200), 17, 11, 4, np.full(15, 1 / 15), 0, solved)
        picture = np.asarray(panel.picture)
        assert (picture[5:50, 5:-5] == 80).all(), "the last picture is dimmed"
        assert (picture[:512] == video.SOLVED).all(-1).any() == solved, "only what is solved is green"
        assert (picture[:512] != 80).any(-1).sum() > 500, "no word on it"


class Fake:
    """Environment i's episodes take lengths[i] steps, pay 1 at each, and are solved in odd ones."""

    def __init__(self, *lengths):
        self.num, self.lengths, self.time, self.actions = len(lengths), np.array(lengths), 0, []

    def observe(self):
        first = self.time % self.lengths == 0
        frames = np.zeros((self.num, 64, 64, 3), dtype=np.uint8)
        return np.ones(self.num, dtype=np.float32), {"rgb": frames + np.arange(self.num)[:, None, None, None]}, first

    def act(self, action):
        self.time += 1
        self.actions.append(action)

    def get_info(self):
        return [{"prev_level_complete": i % 2, "prev_level_seed": self.time // n} for i, n in enumerate(self.lengths)]


def test_long_episodes_count_as_much_as_short_ones():
    envs = Fake(2, 50)
    episodes = [e for step in evaluate.play(evaluate.random_policy, envs, [3, 3], 1) for e in step.ended.values()]
    assert sorted(e["env"] for e in episodes) == [0, 0, 0, 1, 1, 1]
    assert all(e["return"] == e["length"] == (2, 50)[e["env"]] for e in episodes)
    assert all(e["solved"] == (e["env"] == 1) for e in episodes)
    assert [e["level"] for e in episodes if e["env"] == 0] == [1, 2, 3]
    assert len(envs.actions) == 150


def test_actions():
    policy_frames = []

    def policy(frames):
        policy_frames.append(frames[:, 0, 0, 0].tolist())
        return np.array([[0.2, 0.5, 0.3, *[0] * 12]] * len(frames))

    for greedy in (False, True):
        envs = Fake(1, 4000)
        steps = list(evaluate.play(policy, envs, [10, 1], 3, greedy))
        actions = np.stack(envs.actions)[:, 1]
        shares = np.bincount(actions, minlength=15) / len(actions)
        assert shares == pytest.approx(
            [0, 1, *[0] * 13] if greedy else [0.2, 0.5, 0.3, *[0] * 12], abs=0.04 * (not greedy)
        )
        assert [step.action[1] for step in steps] == actions.tolist()
        assert policy_frames[9:11] == [[0, 1], [1]], "the network still sees environments that are done"
        policy_frames.clear()


def test_no_episode_is_left_out():
    assert evaluate.spread(100, 16) == [7] * 4 + [6] * 12
    assert evaluate.spread(3, 20) == [1, 1, 1]


def training(**changes):
    flags = {"env_id": "heist", "distribution_mode": "easy", "start_level": 0, "num_levels": 0, "seed": 1}
    return SimpleNamespace(**flags | changes)


def first_levels(train, options, seed=1, num=64):
    envs = evaluate.make_envs(train, options, num, seed)
    return {int(info["level_seed"]) for info in envs.get_info()}


@pytest.mark.parametrize("start,count", [(0, 1), (0, 200), (7, 3), (2**30, 2**30 - 3), (2**31 - 1, 1), (2**31 - 9, 99)])
def test_unseen_levels_are_unseen(start, count):
    train = training(start_level=start, num_levels=count)
    sets = evaluate.level_sets(train)
    assert sets["training"] == {"distribution_mode": "easy", "start_level": start, "num_levels": count}
    low, high = sets["unseen"]["start_level"], sets["unseen"]["start_level"] + sets["unseen"]["num_levels"]
    assert 0 <= low < high <= 2**31 - 1 and (high <= start or low >= start + count)
    assert high - low > 2**29, "hardly any level to draw from"
    unseen, seen = first_levels(train, sets["unseen"]), first_levels(train, sets["training"])
    assert len(unseen) == 64 and all(low <= level < high for level in unseen), "Procgen plays others"
    assert not unseen & seen


@pytest.mark.parametrize("count", [0, 2**31 - 1])
def test_training_on_all_levels(count):
    train = training(num_levels=count)
    assert list(evaluate.level_sets(train)) == ["all"]
    assert len(first_levels(train, evaluate.level_sets(train)["all"])) == 64


@pytest.mark.parametrize("seed", [1, 2, 2**31 - 1, 2**31 - 2])
def test_not_the_levels_that_training_began_with(seed):
    """With all levels, training's own seed would deal out training's own levels."""
    envs = evaluate.ProcgenGym3Env(64, "heist", rand_seed=seed, distribution_mode="easy", num_levels=0)
    began_with = {int(info["level_seed"]) for info in envs.get_info()}
    for evaluation_seed in (0, 1, seed):
        train = training(seed=seed)
        assert not began_with & first_levels(train, evaluate.level_sets(train)["all"], evaluation_seed)


def test_film_is_of_the_episodes_that_count(runs):
    agent, _, train, _ = evaluate.load_run(runs / "ppo", "cpu")
    options, found = evaluate.level_sets(train)["unseen"], []
    for num, more in [(4, {}), (2, {"render_mode": "rgb_array"})]:
        envs = evaluate.make_envs(train, options, num, 1, **more)
        steps = evaluate.play(evaluate.agent_policy(agent, "cpu"), envs, [1] * num, 1, render=bool(more))
        found.append({i: e for step in steps for i, e in step.ended.items() if i < 2})
    assert found[0] == found[1] and len(found[0]) == 2


@pytest.mark.parametrize("name", [*SCRIPTS, "detach"])
def test_every_script(runs, name):
    script = "ppg" if name == "detach" else name
    saved, module = checkpoint(runs / name), load(script)
    agent, found, train, global_step = evaluate.load_run(runs / name, torch.device("cpu"))
    assert (found, global_step, vars(train)) == (script, saved["global_step"], saved["args"])
    theirs = module.Agent(train.channels, *([train.arch] if script.startswith("ppg") else []))
    theirs.load_state_dict(saved["agent"])
    frames = torch.randint(256, (5, 64, 64, 3), dtype=torch.uint8)
    probabilities = evaluate.agent_policy(agent, torch.device("cpu"))(frames.numpy())
    assert probabilities == pytest.approx(theirs(frames)[0].softmax(-1).detach().numpy(), abs=1e-6)
    code, out, err = call(runs / name, "--episodes", 2)
    assert (code, err) == (0, "") and f"{script}.py on starpilot" in out and "generalisation gap" in out


def test_all_levels_and_greedy(runs):
    code, out, err = call(runs / "all", "--episodes", 1, "--greedy")
    assert (code, err) == (0, "")
    assert "all levels" in out and "generalisation gap" not in out
    assert "the likeliest action" in out and "at least 2 episodes" in out
    assert call(runs / "all", "--episodes", 1, "--greedy")[1] == out
    assert call(runs / "all" / "checkpoint.pt", "--episodes", 1, "--greedy")[1] == out


def test_the_seed_decides(runs):
    outputs = [call(runs / "ppo", "--episodes", 3, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert outputs[0] == outputs[1] != outputs[2]


def test_while_training(tmp_path):
    flags = [*tiny("ppo"), "--total-timesteps", 10**9, "--run-dir", tmp_path / "run"]
    process = start("ppo", *flags, stdout=None)
    try:
        while not (tmp_path / "run/checkpoint.pt").exists():
            assert process.poll() is None
            time.sleep(0.1)
        steps = []
        for _ in range(20):  # the checkpoint is replaced many times a second
            steps.append(evaluate.load_run(tmp_path / "run", "cpu")[3])
        code, _, err = call(tmp_path / "run", "--episodes", 2)
        assert (code, err) == (0, "")
        while evaluate.load_run(tmp_path / "run", "cpu")[3] <= steps[-1]:
            assert process.poll() is None, "training was disturbed"
        assert steps == sorted(steps)
    finally:
        process.kill()
        process.communicate()


def test_intervals():
    rng = np.random.default_rng(0)
    x, y = rng.normal(5, 1, 400), rng.normal(3, 1, 400)
    mean = evaluate.interval(1, x)
    assert (mean["low"], mean["mean"], mean["high"]) == pytest.approx(
        (x.mean() - 0.098, x.mean(), x.mean() + 0.098), abs=0.02
    )
    gap = evaluate.interval(1, x, y)
    middle, half = x.mean() - y.mean(), 1.96 * math.sqrt(2 / 400)
    assert (gap["low"], gap["mean"], gap["high"]) == pytest.approx((middle - half, middle, middle + half), abs=0.03)
    assert evaluate.interval(1, [4, 4, 4]) == {"mean": 4, "low": 4, "high": 4}
    assert evaluate.interval(1, [4]) == {"mean": 4, "low": None, "high": None}
    assert evaluate.interval(1, [4, 4], [1, 1]) == {"mean": 3, "low": 3, "high": 3}
    assert all(map(math.isfinite, evaluate.interval(1, [0, 0, 0, 10], [0, 0]).values()))
    none = evaluate.summarise([{"return": 0, "length": 9, "solved": False}] * 40, (0, 10), 1)
    assert none["solved"]["low"] == 0 and 0.05 < none["solved"]["high"] < 0.1


class Bomb:
    """What a malicious checkpoint would hold."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def damaged(good, folder, how):
    path = folder / "checkpoint.pt"
    whole = bytearray(good.read_bytes())
    if how == "text":
        path.write_text("no checkpoint")
    elif how == "empty":
        path.touch()
    elif how == "folder":
        path.mkdir()
    elif how == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "flipped":  # a bit of a weight, which only the checksum knows
        with zipfile.ZipFile(good) as archive:
            largest = max(archive.infolist(), key=lambda x: x.file_size)
        whole[largest.header_offset + largest.file_size // 2] ^= 1
        path.write_bytes(whole)
    elif how == "pickle":
        path.write_bytes(pickle.dumps(Bomb(folder / "bang")))
    elif how == "bomb":
        torch.save(torch.load(good, weights_only=True) | {"extra": Bomb(folder / "bang")}, path)
    elif how == "other project":
        torch.save({"model": torch.zeros(3), "epoch": 3}, path)
    elif how == "list":
        torch.save([1, 2, 3], path)


@pytest.mark.parametrize(
    "how", ["text", "empty", "folder", "cut", "flipped", "pickle", "bomb", "other project", "list", "nothing"]
)
def test_damaged_and_foreign_files(runs, tmp_path, how):
    damaged(runs / "ppo/checkpoint.pt", tmp_path, how)
    before = sorted(tmp_path.iterdir())
    code, out, err = call(tmp_path, "--episodes", 1)
    assert (code, out) == (2, "") and sorted(tmp_path.iterdir()) == before, "the bomb went off"
    assert err.startswith("evaluate.py: error: ") and err.count("\n") == 1
    assert ("there is no checkpoint.pt" if how == "nothing" else "is damaged, or no checkpoint of ours") in err


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"script": "sac"}, "was written by 'sac'"),
        ({"script": "../ppo"}, "was written by '../ppo'"),
        ({"script": "ppg"}, "do not fit ppg.py"),
        ({"format": 999}, "has format 999"),
        ({"format": torch.zeros(2)}, "is damaged, or no checkpoint of ours"),
        ({"env_id": "pong"}, "do not fit ppo.py"),
        ({"distribution_mode": "memory"}, "do not fit ppo.py"),
        ({"num_levels": -1}, "do not fit ppo.py"),
        ({"channels": [2, 2, 3]}, "do not fit ppo.py"),
        ({"channels": [10**6] * 3}, "do not fit ppo.py"),
        ({"agent": {}}, "do not fit ppo.py"),
        ({"args": {}}, "do not fit ppo.py"),
        ({"agent": 3}, "is damaged, or no checkpoint of ours"),
    ],
)
def test_checkpoints_that_do_not_fit(forged, changes, words):
    code, out, err = call(forged(**changes), "--episodes", 1)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1


def test_diverged_run(runs, forged):
    weights = {name: x * math.nan for name, x in checkpoint(runs / "ppo")["agent"].items()}
    code, _, err = call(forged(agent=weights), "--episodes", 1)
    assert code == 1 and "diverged" in err


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--episodes", 0], "--episodes: 0: must be a whole number, from 1"),
        (["--episodes", "many"], "--episodes: many: must be a whole number"),
        (["--num-envs", 0], "--num-envs: 0: must be"),
        (["--video", "TMP/missing/play.mp4"], "play.mp4: cannot be written (No such file or directory)"),
        (["--video", "TMP/file/play.gif"], "play.gif: cannot be written (Not a directory)"),
        (["--video", "TMP/folder.mp4"], "folder.mp4: cannot be written (it is a folder)"),
        (["--video", "TMP/play.avi"], "must end in .mp4 or .gif"),
        (["--json", "TMP/missing/numbers.json"], "numbers.json: cannot be written"),
        (["--video-seconds", 5], "--video-seconds: needs --video FILE"),
        (["--video", "TMP/play.mp4", "--video-levels", "training"], "the run trains on all levels"),
        (["--video", "TMP/play.mp4", "--video-seconds", 0], "--video-seconds: 0: must be a number, from 0.1 to 3600"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_wrong_flags(runs, tmp_path, flags, words):
    (tmp_path / "file").touch()
    (tmp_path / "folder.mp4").mkdir()
    code, out, err = call(runs / "all", *(str(x).replace("TMP", str(tmp_path)) for x in flags))
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1
    assert sorted(x.name for x in tmp_path.iterdir()) == ["file", "folder.mp4"]


def test_missing_run(tmp_path):
    code, out, err = call(tmp_path / "nowhere")
    assert (code, out) == (2, "") and "nowhere: there is no such folder" in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["play.mp4", "play.gif"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_interrupted_video(tmp_path, name, error):
    def frames():
        yield np.zeros((16, 16, 3), dtype=np.uint8)
        raise error

    (tmp_path / name).write_text("an older one")
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else SystemExit) as raised:
        video.save_video(frames(), tmp_path / name, 15)
    assert getattr(raised.value, "code", 1) == 1
    assert [x.name for x in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "an older one"
