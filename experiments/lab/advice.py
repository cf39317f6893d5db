"""Section 6.2 of the paper, practical advice at small batch sizes, applied to a run of any of the five scripts."""

import numpy as np

from lab.common import read_checkpoint
from lab.inference import second_half, swing
from lab.logs import ADVANTAGES, CLIPPED, read_scalars

FAR = 2  # the paper says "much less" and "much more"; here that is a factor of two


def advise(folder):
    """Lines of advice."""
    saved = read_checkpoint(folder)
    args = saved["args"]
    scalars, damaged = read_scalars(folder, [CLIPPED, ADVANTAGES])
    environments = f"{args['num_envs']} environment{'s' * (args['num_envs'] != 1)}"
    epochs = "policy_epochs" if "policy_epochs" in args else "epochs"
    return [
        f"{folder}: {saved['script']}.py on {args['env_id']}, {environments}, {saved['global_step']:,} steps",
        *(f"  note: {name} is damaged; this is about the part that can be read" for name in damaged),
        "  clipping: " + on_clipping(scalars[CLIPPED][:, 1], args, args[epochs]),
        "  epochs: " + on_epochs(args[epochs], "--" + epochs.replace("_", "-")),
        "  advantages: " + on_advantages(scalars[ADVANTAGES][:, 1], args),
    ]


def on_clipping(fractions, args, epochs):
    if args["clip_coef"] == 0:
        return "is off, so there is no fraction of clipped ratios to go by"
    if not len(fractions):
        return "nothing is logged yet"
    fraction, least, most = second_half(fractions), 0.01, 0.1 if epochs == 1 else 0.2
    text = f"{fraction:.2%} of ratios in the second half of the run; from {least:.0%} to {most:.0%} is usual"
    if fraction < least / FAR:
        larger = "a larger iteration (--num-steps together with --num-minibatches, or --num-envs)"
        prox = "the EWMA script, --prox-com high"
        if "prox_com" in args:
            prox = f"a higher --prox-com (now {args['prox_com']:g})"
        return f"{text}. Far too few: try {larger}, or {prox}"
    if fraction > most * FAR:
        return f"{text}. Far too many: the step size is probably too high; lower --learning-rate"
    if not least <= fraction <= most:
        text += f". It is outside, but within a factor of {FAR} ({least / FAR:.1%} to {most * FAR:.0%})"
    return f"{text}. Nothing to change"


def on_epochs(epochs, flag):
    if epochs > 1:
        return f"{epochs}. Consider {flag} 1, at least at first: it is the easiest way to stay stable"
    return "1. Nothing to change"


def on_advantages(std, args):
    if args["adv_norm"] != "iteration":
        return f"--adv-norm is {args['adv_norm']}, so no estimate is carried over iterations"
    factor = swing(std)
    if np.isnan(factor):
        return "too few estimates to see if they swing"
    text = f"their standard deviation swings by a factor of {factor:.1f} within a tenth of the run"
    if factor < 10:
        return f"{text}; under 10 is fine. Nothing to change"
    if "adv-norm" in args["no_adjust"]:
        return f"{text}; normalise over more iterations: leave out adv-norm of --no-adjust"
    return f"{text}; normalise over more steps: a larger --num-steps, or a higher --reference-num-envs"
