"""Section 6.2 of the paper, practical advice at small batch sizes, applied to a run of any of the five scripts."""

from pathlib import Path

import numpy as np
from curves import ADVANTAGES, CLIPPED, read_scalars
from stats import second_half, swing

FAR = 2  # the paper says "much less" and "much more"; here that is a factor of two


def advise(folder):
    """Lines of advice, or a ValueError that says why there are none."""
    folder = Path(folder)
    if not (folder / "checkpoint.pt").exists():
        raise ValueError(f"{folder}: no run is there (it has no checkpoint.pt)")
    import torch  # here, because it takes seconds and figures do without

    try:
        saved = torch.load(folder / "checkpoint.pt", weights_only=True, map_location="cpu", mmap=True)
        args, script = saved["args"], saved["script"]
    except Exception as error:
        raise ValueError(f"{folder}: checkpoint.pt is damaged, or none of ours ({type(error).__name__})") from None
    scalars, damaged = read_scalars(folder, [CLIPPED, ADVANTAGES])
    curves = {tag: curve[:, 1] for tag, curve in scalars.items()}
    environments = f"{args['num_envs']} environment{'s' * (args['num_envs'] != 1)}"
    lines = [f"{folder}: {script}.py on {args['env_id']}, {environments}, {saved['global_step']:,} steps"]
    lines += [f"  note: {name} is damaged; this is about the part that can be read" for name in damaged]
    epochs_flag = "policy_epochs" if "policy_epochs" in args else "epochs"
    lines += on_clipping(curves[CLIPPED], args, args[epochs_flag])
    lines += on_epochs(args[epochs_flag], "--" + epochs_flag.replace("_", "-"))
    lines += on_advantages(curves[ADVANTAGES], args)
    return lines


def on_clipping(fractions, args, epochs):
    if args["clip_coef"] == 0:
        return ["  clipping: is off, so there is no fraction of clipped ratios to go by"]
    if not len(fractions):
        return ["  clipping: nothing is logged yet"]
    fraction, most = second_half(fractions), 0.1 if epochs == 1 else 0.2
    text = f"  clipping: {fraction:.2%} of ratios in the second half of the run; from 1% to {most:.0%} is usual"
    if fraction < 0.01 / FAR:
        larger = "a larger iteration (--num-steps together with --num-minibatches, or --num-envs)"
        prox = (
            f"a higher --prox-com (now {args['prox_com']:g})"
            if "prox_com" in args
            else "the EWMA script, --prox-com high"
        )
        return [f"{text}. Far too few: try {larger}, or {prox}"]
    if fraction > most * FAR:
        return [f"{text}. Far too many: the step size is probably too high; lower --learning-rate"]
    return [f"{text}. Nothing to change"]


def on_epochs(epochs, flag):
    if epochs > 1:
        return [f"  epochs: {epochs}. Consider {flag} 1, at least at first: it is the easiest way to stay stable"]
    return ["  epochs: 1. Nothing to change"]


def on_advantages(std, args):
    if args["adv_norm"] != "iteration":
        return [f"  advantages: --adv-norm is {args['adv_norm']}, so no estimate is carried over iterations"]
    factor = swing(std)
    if np.isnan(factor):
        return ["  advantages: too few estimates to see if they swing"]
    text = f"  advantages: their standard deviation swings by a factor of {factor:.1f} within a tenth of the run"
    if factor < 10:
        return [f"{text}; under 10 is fine. Nothing to change"]
    if "adv-norm" in args["no_adjust"]:
        return [f"{text}; normalise over more iterations: leave out adv-norm of --no-adjust"]
    return [f"{text}; normalise over more steps: a larger --num-steps, or a higher --reference-num-envs"]
