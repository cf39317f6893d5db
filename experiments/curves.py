"""From the runs of a sweep to tables: learning curves and final returns."""

import functools
import json
import struct
from pathlib import Path

import numpy as np
import pandas as pd
from catalogue import GAMES, RANGES, SCALES, Run, runs_of
from execution import is_locked, read_end
from google.protobuf.message import DecodeError
from stats import second_half, swing
from tensorboard.compat.proto.event_pb2 import Event

RETURN = "last_100_episodes/return"  # the same number of episodes at every batch size, unlike an iteration's own
CLIPPED, ADVANTAGES = "policy/clip_fraction", "advantage/std_used"  # what section 6.2 of the paper looks at
POINTS = 50  # of a curve in the tables
SHARED = ["distribution-mode", "num-levels", "num-steps", "channels", "total-timesteps"]  # by all runs of a figure


def read_scalars(folder, tags):
    """TensorBoard logs of a run, as {tag: array of (step, value)}, and the names of damaged files.

    TensorBoard's own reader takes a minute for the run of one environment at the paper's length: it checks every byte,
    in Python. This one looks at the records that it wants only.
    """
    curves, damaged, wanted = {tag: [] for tag in tags}, [], [tag.encode() for tag in tags]
    for path in sorted(Path(folder).glob("events.out.tfevents.*")):
        data, start = path.read_bytes(), 0
        try:
            while start < len(data):  # length, checksum of it, record, checksum of it
                (length,) = struct.unpack_from("<Q", data, start)
                record = data[start + 12 : start + 12 + length]
                if len(record) < length:
                    raise DecodeError("cut off")
                if any(tag in record for tag in wanted):
                    event = Event.FromString(record)
                    for value in event.summary.value:
                        if value.tag in curves:
                            curve = curves[value.tag]
                            while curve and curve[-1][0] >= event.step:  # from before the run was resumed
                                curve.pop()
                            curve.append((event.step, value.simple_value))
                elif start == 0:
                    Event.FromString(record)  # is it such a file at all?
                start += 16 + length
        except (struct.error, DecodeError, OverflowError):
            damaged.append(path.name)
    return {tag: np.array(curve, dtype=float).reshape(-1, 2) for tag, curve in curves.items()}, damaged


def find_runs(runs_dir, experiment, scale=None):
    """The runs of an experiment at one scale, and lines about what is wrong or left out."""
    found, notes = [], []
    for path in sorted(Path(runs_dir, experiment).glob("*/sweep/*.json")):
        try:
            found.append(Run(**json.loads(path.read_text())))
        except (ValueError, TypeError):
            notes.append(f"{path}: is damaged, or none of ours; left out")
    scales = [x for x in SCALES if any(run.scale == x for run in found)]
    if scale is None and scales:
        scale = scales[0]
        if len(scales) > 1:
            notes.append(f"runs of mixed scale: {', '.join(scales)}; this is {scale}, and --scale shows the others")
    runs = [run for run in found if run.scale == scale]
    order = [(run.variant, run.value) for run in runs_of(experiment, scale or SCALES[0], GAMES[:1], [1])]
    runs = [run for setting in order for run in runs if (run.variant, run.value) == setting]
    kinds = pd.Series([json.dumps([run.flags[x] for x in SHARED]) for run in runs], dtype=object)
    if kinds.nunique() > 1:
        kept = kinds.mode()[0]
        notes.append(f"{(kinds != kept).sum()} runs left out: their {', '.join(SHARED)} are not those of the others")
        runs = [run for run, kind in zip(runs, kinds, strict=True) if kind == kept]
    return runs, notes


def final_window(total):
    """Steps at the end that count as final: the paper's 4 million, in short runs a tenth."""
    return 4_000_000 if total >= 40_000_000 else total // 10


class Results:
    """The runs of one experiment at one scale.

    rows: a row for each run, with its final return. points: a row for each point of its learning curve. Runs that the
    catalogue lists once and that belong to several variants are in both under each of them.
    """

    def __init__(self, experiment, runs, rows, points, runs_dir=None):
        self.experiment, self.runs, self.runs_dir = experiment, runs, runs_dir
        self.finished = int(rows["finished"].sum())
        # Of a setting, the median run stands for all: a run that was paused has counted the pause.
        seconds = rows[rows["finished"]].groupby(["variant", "value"])["seconds"]
        self.hours = float((seconds.median() * seconds.count()).sum()) / 3600
        self.games = [game for game in GAMES if game in set(rows["game"])]
        self.seeds = sorted(set(rows["seed"]))
        self.all_rows, self.all_points = rows, points
        self.rows, self.points = self.share(rows), self.share(self.usable(rows, points))

    @classmethod
    def of_runs(cls, experiment, runs, runs_dir, notes):
        """Read what the runs have written. Appends to notes what is wrong with their files."""
        rows, points = [], []
        for run in runs:
            label = {"game": run.game, "variant": run.variant, "value": run.value, "seed": run.seed}
            row, curve = cls.read(run, runs_dir, notes)
            rows.append(label | row)
            points += [label | point for point in curve]
        columns = ["game", "variant", "value", "seed", "step", "return", "normalised_return"]
        return cls(experiment, runs, pd.DataFrame(rows), pd.DataFrame(points, columns=columns), runs_dir)

    @classmethod
    def of_csv(cls, experiment, *folders):
        """Read the two tables that figures.py has written; of several machines, each run where it is furthest."""
        rows, points = (
            pd.concat(
                pd.read_csv(Path(folder) / name, dtype={"value": str}, float_precision="round_trip").assign(
                    origin=place
                )
                for place, folder in enumerate(folders)
            )
            for name in (f"{experiment}_runs.csv", f"{experiment}.csv")
        )
        if rows["scale"].nunique() > 1:
            raise ValueError(f"mixed scale: {', '.join(rows['scale'].unique())}")
        key = ["game", "variant", "value", "seed"]
        rows = rows.sort_values(["finished", "steps"], kind="stable").drop_duplicates(key, keep="last")
        points = points.merge(rows[[*key, "origin"]])
        runs = runs_of(experiment, rows["scale"].iloc[0], sorted(set(rows["game"])), sorted(set(rows["seed"])))
        order = {setting: place for place, setting in enumerate(dict.fromkeys((x.variant, x.value) for x in runs))}
        rows, points = (
            table.assign(setting=[order[x] for x in zip(table["variant"], table["value"], strict=True)])
            .sort_values(["setting", "game", "seed", *more])
            .drop(columns=["origin", "setting"])
            .reset_index(drop=True)
            for table, more in ((rows, []), (points, ["step"]))
        )
        there = set(rows[key].itertuples(index=False, name=None))
        runs = [run for run in runs if (run.game, run.variant, run.value, run.seed) in there]
        return cls(experiment, runs, rows, points)

    @staticmethod
    def read(run, runs_dir, notes):
        """A run's row and its points. The final return is NaN until the run is finished."""
        folder, end = run.folder(runs_dir), read_end(run.file(runs_dir, "exit"))
        low, high = return_range(run)
        scalars, damaged = read_scalars(folder, [RETURN, CLIPPED, ADVANTAGES])
        if not is_locked(folder):  # the last record of a live run may be half written
            notes += [f"{folder / name}: is damaged; showing what can be read of it" for name in damaged]
        curve = scalars[RETURN]
        finished = end.get("code") == 0 and len(curve) > 0 and curve[-1, 0] >= run.steps
        final = curve[curve[:, 0] > run.steps - final_window(run.steps), 1].mean() if finished else np.nan
        mean = curve[:, 1].mean() if len(curve) else np.nan
        row = {
            "scale": run.scale,
            "script": run.script,
            "steps": int(curve[-1, 0]) if len(curve) else 0,
            "finished": finished,
            "seconds": end.get("seconds", 0),
            "final_return": final,
            "final_normalised_return": (final - low) / (high - low),
            "mean_return": mean,
            "mean_normalised_return": (mean - low) / (high - low),
            "clip_fraction": np.nan if run.flags.get("clip-coef") == 0 else second_half(scalars[CLIPPED][:, 1]),
            "advantage_swing": swing(scalars[ADVANTAGES][:, 1]),
        }
        if not len(curve):
            return row, []
        grid = np.linspace(0, run.flags["total-timesteps"], POINTS + 1)[1:]
        grid = grid[(grid >= curve[0, 0]) & (grid <= curve[-1, 0])]
        returns = np.interp(grid, *curve.T)
        points = zip(grid.round().astype(int), returns, (returns - low) / (high - low), strict=True)
        return row, [dict(zip(("step", "return", "normalised_return"), point, strict=True)) for point in points]

    def usable(self, rows, points):
        """The curves to show: of finished runs, but where a setting has none on a game, of those on their way."""
        setting = ["game", "variant", "value"]
        any_finished = rows.groupby(setting)["finished"].transform("any")
        return points.merge(rows.loc[rows["finished"] | ~any_finished, [*setting, "seed"]])

    def share(self, table):
        """At staleness 0 the losses are the same, at the reference batch size the adjustments: one run serves all."""
        source, targets = {
            "staleness": ("decoupled", ["behavior", "recent"]),
            "batch-size": ("all", ["no-step-size", "no-adv-norm", "no-ewma-adjustment"]),
            "adam-betas": ("none", ["beta2", "both"]),
        }.get(self.experiment, (None, []))
        value = "0" if self.experiment == "staleness" else str(self.runs[0].flags["reference-num-envs"])
        shared = table[(table["variant"] == source) & (table["value"] == value)]
        return pd.concat([shared.assign(variant=target) for target in targets] + [table], ignore_index=True)

    def values(self, variant):
        """A variant's settings, in the catalogue's order."""
        return list(dict.fromkeys(self.rows.loc[self.rows["variant"] == variant, "value"]))

    def settings(self, variant):
        """The same, also those without a run here."""
        runs = runs_of(self.experiment, self.runs[0].scale, self.games[:1], self.seeds[:1])
        return [run.value for run in runs if run.variant == variant]

    def final(self, variant, value, column="final_normalised_return"):
        """Final normalised returns, or another number, of the finished runs of a setting, {game: {seed: number}}."""
        table = self.rows[(self.rows["variant"] == variant) & (self.rows["value"] == value)]
        table = table.dropna(subset=["final_normalised_return"])
        games = table.groupby("game")
        return {game: group.set_index("seed")[column].to_dict() for game, group in games}

    def over_seeds(self, variant, value, column="final_normalised_return"):
        """For each seed the mean over games; seeds that lack a game are left out."""
        final = self.final(variant, value, column)
        return np.array([np.mean([final[game][s] for game in final]) for s in self.seeds if self.has(final, s)])

    def has(self, final, seed):
        return all(seed in final.get(game, {}) for game in self.games)


def return_range(run):
    """The least and the greatest return of a game, for normalisation."""
    mode = run.flags["distribution-mode"]
    return ranges().loc[run.game, f"{mode}_min"], ranges().loc[run.game, f"{mode}_max"]


@functools.cache
def ranges():
    return pd.read_csv(RANGES, comment="#", index_col="game")
