"""Draw an experiment of the paper from its runs, finished or still running; draw any runs; or advise on them.

python experiments/figures.py batch-size             figures (PNG, SVG), numbers (CSV), tables and tests (Markdown)
python experiments/figures.py curves PPO="runs/*__ppo__*" EWMA="runs/*__ppo_ewma__*"
                                                     learning curves of runs of any script: figure, numbers, table;
                                                     --reference authors: before those of the authors, hard mode
python experiments/figures.py advice runs/RUN ...    section 6.2 of the paper, applied to runs of any script
"""

import glob
from pathlib import Path

from lab.common import Parser, fail  # before all others: it says what is not installed

# isort: split
import numpy as np
import pandas as pd

from lab.advice import advise
from lab.catalogue import EXPERIMENTS, SCALES
from lab.drawing import any_curves, draw, write_csv
from lab.logs import RETURN, read_scalars
from lab.reference import authors, game_of
from lab.reporting import report, table
from lab.runs import Results, find_runs, read_table


def parse_args():
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name in EXPERIMENTS:
        add = commands.add_parser(name, help=f"draw the experiment {name}").add_argument
        add("--scale", choices=SCALES, help="default: the largest there is")
        add("--runs-dir", default="runs", help="as given to sweep.py; default: runs")
        help = "draw from the tables that earlier calls have written here, without runs; several are put together"
        add("--csv", metavar="FOLDER", nargs="+", help=help)
        add("--out", help="folder for the results; default: RUNS_DIR/NAME/SCALE/figures, or the first of --csv")
    add = commands.add_parser("curves", help="draw learning curves of any runs").add_argument
    add("curves", nargs="+", metavar="LABEL=RUNS", help="a pattern of run folders, or a CSV file (run, step, return)")
    help = "draw the authors' published runs of the same game behind them; hard mode, all levels"
    add("--reference", choices=["authors"], help=help)
    add("--out", default="curves", help="path of the results, without the ending; default: curves")
    add = commands.add_parser("advice", help="advise on runs: clipping, epochs, advantage normalisation").add_argument
    add("runs", nargs="+", metavar="RUN", help="folder of a run")
    return parser.parse_args()


def read_results(args):
    """What there is, from runs or from tables; says what is wrong with it."""
    if args.csv:
        try:
            return Results.of_csv(args.name, *args.csv)
        except (OSError, ValueError, KeyError) as error:
            fail(f"--csv {' '.join(args.csv)}: has no tables of {args.name} that figures.py has written ({error})")
    runs, notes = find_runs(args.runs_dir, args.name, args.scale)
    if not any(run.folder(args.runs_dir).exists() for run in runs):
        wanted = f"experiments/sweep.py {args.name}" + (f" --scale {args.scale}" if args.scale else "")
        fail("; ".join([*notes, f"no runs of {args.name} found in {args.runs_dir}; {wanted} makes them"]))
    results = Results.of_runs(args.name, runs, args.runs_dir, notes)
    for note in notes:
        print(f"note: {note}")
    return results


def draw_experiment(args):
    results = read_results(args)
    if results.points.empty:
        fail(f"no episode of {args.name} has ended in any run yet; try again later")
    if len(results.seeds) == 1:
        print("note: there is one seed only, so the figures have no error bars")
    if results.finished < len(results.runs):
        print(f"note: {results.finished} of {len(results.runs)} runs are finished; the figures show what there is")
    folder = Path(args.runs_dir, args.name, results.runs[0].scale, "figures")
    folder = Path(args.out or (args.csv[0] if args.csv else folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draw(results, folder)
        write_csv(results.all_points, folder / f"{args.name}.csv")
        write_csv(results.all_rows, folder / f"{args.name}_runs.csv", digits=17)  # to compute the same from them
        (folder / f"{args.name}.md").write_text(report(results))
        print(folder / f"{args.name}.md")
    except OSError as error:
        fail(f"{folder}: cannot be written ({error.strerror})")


def read_curves(label, pattern):
    """Learning curves as a table of label, run, step and return: of the runs that match, or out of such a file."""
    columns = ["run", "step", "return"]
    if pattern.endswith(".csv"):
        try:
            return read_table(pattern, columns)[columns].assign(label=label, measured=False)
        except (OSError, ValueError) as error:
            fail(f"{label}={pattern}: cannot be read as a table of run, step and return ({error})")
    tables, folders = [], sorted(glob.glob(pattern))
    for folder in folders:
        scalars, damaged = read_scalars(folder, [RETURN])
        for name in damaged:
            print(f"note: {Path(folder, name)}: is damaged; showing what can be read of it")
        curve = scalars[RETURN]
        if len(curve):
            kept = curve[np.unique(np.linspace(0, len(curve) - 1, 200).round().astype(int))]
            name = Path(folder).name
            same = [x for x in folders if Path(x).name == name]
            run = name if len(same) == 1 else folder  # of one name in several folders: the whole path
            tables.append(pd.DataFrame({"run": run, "folder": folder, "step": kept[:, 0], "return": kept[:, 1]}))
    if not tables:
        fail(f"{label}={pattern}: no run with a finished episode is there")
    return pd.concat(tables).assign(label=label, measured=True)


def draw_any(args):
    """Learning curves of any runs."""
    for pair in args.curves:
        if "=" not in pair:
            fail(f"{pair}: must be LABEL=RUNS, the runs being a pattern of folders or a CSV file")
    labels = [pair.split("=")[0] for pair in args.curves]
    if len(set(labels)) < len(labels):
        fail("a label is given twice; one pattern may match all its runs")
    curves = pd.concat([read_curves(*pair.split("=", 1)) for pair in args.curves], ignore_index=True)
    game = reference = None
    if args.reference:
        game = game_of(curves.loc[curves["measured"], "folder"].unique() if "folder" in curves else [])
        reference = authors(game)
    try:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        any_curves(curves, args.out, reference, game)
        measured = curves[curves["measured"]].astype({"step": int})
        write_csv(measured[["label", "run", "step", "return"]], f"{args.out}.csv")
        Path(f"{args.out}.md").write_text(table_of_returns(pd.concat([curves, reference])))
        print(f"{args.out}.md")
    except OSError as error:
        fail(f"--out {args.out}: cannot be written ({error.strerror})")


def table_of_returns(curves):
    """Return of every run at the steps of a file, or, without one, at quarters of the shortest run; and at its end."""
    given = sorted(set(curves.loc[~curves["measured"], "step"]))
    end = curves[curves["measured"]].groupby(["label", "run"])["step"].max().min()
    steps, rows = given or [end * quarter // 4 for quarter in (1, 2, 3)], []
    for label, group in curves.groupby("label", sort=False):
        runs = [run for _, run in group.groupby("run")]
        cells = [[np.interp(step, run["step"], run["return"], right=np.nan) for run in runs] for step in steps]
        cells.append([run["return"].iloc[-1] for run in runs])
        rows.append([label, *(" / ".join(f"{x:.1f}" for x in cell if not np.isnan(x)) for cell in cells)])
    return table(["", *(f"{x:,.0f} steps" for x in steps), "at the end"], rows) + "\n"


def main():
    args = parse_args()
    if args.name == "curves":
        draw_any(args)
    elif args.name == "advice":
        for folder in args.runs:
            print("\n".join(advise(folder)))
    else:
        draw_experiment(args)


if __name__ == "__main__":
    main()
