"""Draw an experiment of the paper from its runs, finished or still running; draw any runs; or advise on them.

python experiments/figures.py batch-size             figures (PNG, SVG), numbers (CSV), tables and tests (Markdown)
python experiments/figures.py curves PPO="runs/*__ppo__*" EWMA="runs/*__ppo_ewma__*"
                                                     learning curves of runs of any script: figure, numbers, table;
                                                     --reference authors: before those of the authors, hard mode
python experiments/figures.py advice runs/RUN ...    section 6.2 of the paper, applied to runs of any script
"""

from pathlib import Path

from lab.advice import advise
from lab.any_runs import draw_any
from lab.catalogue import EXPERIMENTS, SCALES
from lab.common import Parser, fail
from lab.drawing import draw
from lab.logs import RETURN
from lab.reporting import report
from lab.runs import Results, find_runs, results_of_csv, write_csv


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
    add("--tag", default=RETURN, help=f"what to draw, of all that is logged; default: {RETURN}")
    add("--out", default="curves", help="path of the results, without the ending; default: curves")
    add = commands.add_parser("advice", help="advise on runs: clipping, epochs, advantage normalisation").add_argument
    add("runs", nargs="+", metavar="RUN", help="folder of a run")
    return parser.parse_args()


def read_results(args):
    """What there is, from runs or from tables; says what is wrong with it."""
    if args.csv:
        return results_of_csv(args.name, args.csv)
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


def main():
    args = parse_args()
    if args.name == "curves":
        draw_any(args.curves, args.out, args.tag, with_authors=args.reference)
    elif args.name == "advice":
        for folder in args.runs:
            print("\n".join(advise(folder)))
    else:
        draw_experiment(args)


if __name__ == "__main__":
    main()
