"""What are runs' agents worth now? Let each play fresh episodes. Beside the mean return stands what the curve says.

python experiments/fresh_returns.py RUN_DIR ... --csv returns.csv
python experiments/fresh_returns.py RUN_DIR ... --script my_ppo_ewma.py    # your own environment (patches/README.md)

A learning curve shows episodes that have ended, so it lags behind the agent: N environments take N times as many steps
to end an episode as one does, and the first episodes to end are short. In the long runs of the paper that does not
matter. In a short run with many environments it does. Here a checkpoint's agent plays, as it is, with its actions
sampled, on the levels of training. Every environment plays a number of episodes that is fixed beforehand.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

from lab.common import Parser, check_writable, fail, number, written  # checks packages

# isort: split
import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from evaluate import ALL_LEVELS, interval, spread, text
from lab.logs import RETURN, read_scalars
from noise_scale import ENVIRONMENTS, fresh_seed, load


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("run_dirs", metavar="RUN_DIR", nargs="+", help="folders of runs, or checkpoint files")
    add("--script", type=Path, metavar="FILE", help="that trained them, if it is a patched one")
    add("--episodes", type=number(int, 1, 10**6), default=128, help="of each run (128)")
    add("--seed", type=number(int, 0, ALL_LEVELS), default=1, help="of levels and actions (1)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA if there is one")
    add("--csv", metavar="FILE", type=Path, help="write a row for each run to this file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: PyTorch finds no CUDA device; use cpu or auto")
    if args.script and not args.script.is_file():
        fail(f"--script {args.script}: there is no such file")
    if args.csv:
        check_writable("--csv", args.csv)
    return args


def play(agent, module, train, episodes, seed, device, bar):
    """Return and length of so many episodes, as two lists."""
    torch.manual_seed(seed)
    envs = min(ENVIRONMENTS, episodes)
    games = module.Games(SimpleNamespace(**vars(train) | {"num_envs": envs, "seed": fresh_seed(train, seed)}))
    left, now, ended = np.array(spread(episodes, envs)), np.zeros((2, envs)), []
    _, frames, _ = games.observe()
    while left.any():
        with torch.no_grad():
            logits = agent(frames.to(device))[0].float().cpu()
        if not logits.isfinite().all():
            fail("the network's outputs are not finite: the run diverged", code=1)
        games.act(module.sample(logits.log_softmax(-1)))
        reward, frames, first = games.observe()
        now += np.stack([reward.numpy(), np.ones(envs)])
        over = first.numpy() & (left > 0)
        ended += now[:, over].T.tolist()
        left -= over
        now[:, first.numpy()] = 0
        bar.update(int(over.sum()))
    return [list(x) for x in zip(*ended, strict=True)]


def on_the_curve(run_dir, step):
    """What the run's log says at this step, if there is a log."""
    folder = Path(run_dir) if Path(run_dir).is_dir() else Path(run_dir).parent
    curve = read_scalars(folder, [RETURN])[0][RETURN]
    values = curve[curve[:, 0] <= step, 1]
    return round(values[-1], 4) if len(values) else np.nan


def main():
    args = parse_args()
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    runs = [load(run_dir, args.script, device) for run_dir in args.run_dirs]
    rows = []
    with tqdm(total=args.episodes * len(runs), unit=" episodes", dynamic_ncols=True, disable=None, leave=False) as bar:
        for run_dir, (agent, module, train, saved) in zip(args.run_dirs, runs, strict=True):
            returns, lengths = play(agent, module, train, args.episodes, args.seed, device, bar)
            row = {"run": Path(run_dir).name, "step": saved["global_step"], "return": round(np.mean(returns), 4)}
            row |= {"interval": text(interval(args.seed, returns), 2), "length": round(np.mean(lengths), 1)}
            rows.append(row | {"on the curve": on_the_curve(run_dir, row["step"]), "episodes": args.episodes})
    table = pd.DataFrame(rows)
    print("return: mean of fresh episodes [95% interval, by bootstrap over episodes]; length: their steps\n")
    print(table.assign(**{"return": table.pop("interval")}).to_string(index=False))
    if args.csv:
        with written("--csv", args.csv) as temporary:
            pd.DataFrame(rows).drop(columns="interval").to_csv(temporary, index=False)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
