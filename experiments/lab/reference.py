"""The authors' published runs, to compare one's own with: PPO and PPG on each game, hard mode, all levels."""

import pandas as pd

from lab.common import ROOT, fail, read_checkpoint

FILE = ROOT / "results/authors_hard.csv"  # which names the source
STEPS = {"1m": 1_000_000, "2m": 2_000_000, "4m": 4_000_000, "8m": 8_000_000, "final": 100_000_000}


def game_of(folders):
    """The game that these runs play, if the authors' runs are like them: one game, hard mode, all levels."""
    games = {}
    for folder in folders:
        args = read_checkpoint(folder)["args"]
        game, mode, levels = (args.get(name) for name in ("env_id", "distribution_mode", "num_levels"))
        if (mode, levels) != ("hard", 0):
            other = f"{game}, {mode} mode, {levels or 'all'} levels" if mode else f"{game}, not of Procgen"
            fail(f"--reference authors: theirs are in hard mode, on all levels; {folder} is on {other}")
        games[game] = folder
    if len(games) != 1:
        found = f"these are of {', '.join(sorted(games))}" if games else "a table does not say which"
        fail(f"--reference authors: needs runs of one game; {found}")
    return game


def authors(game):
    """Their points, as a table of label, run, step and return."""
    row = pd.read_csv(FILE, comment="#", index_col="game").loc[game]
    points = [
        {"label": f"authors' {name.upper()}", "run": "mean of 3", "step": step, "return": row[f"{name}_{column}"]}
        for name in ("ppo", "ppg")
        for column, step in STEPS.items()
    ]
    return pd.DataFrame(points).assign(measured=False)
