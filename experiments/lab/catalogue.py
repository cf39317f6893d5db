"""The experiments: all that runs, at three scales, and how it is drawn and tested. A new one is an entry at the end."""

import csv
import itertools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

with open(Path(__file__).with_name("procgen_return_range.csv"), newline="") as file:
    RANGES = {row["game"]: row for row in csv.DictReader(line for line in file if line[0] != "#")}
GAMES = list(RANGES)
SCALES = ["paper", "small", "smoke"]
ALGORITHMS = {"ppo": "PPO", "ppo-ewma": "PPO-EWMA", "ppg": "PPG", "ppg-ewma": "PPG-EWMA"}


def return_range(game, mode):
    """The least and the greatest return of a game, by which returns are normalised."""
    return tuple(float(RANGES[game][f"{mode}_{end}"]) for end in ("min", "max"))


# Flags that all runs of a scale share. The report names those that differ from the paper's.
SHARED = ["distribution-mode", "num-levels", "num-steps", "channels", "total-timesteps"]
BASE = {
    "paper": dict(zip(SHARED, ["hard", 0, 256, [16, 32, 32], 100_000_000], strict=True)),
    "small": dict(zip(SHARED, ["easy", 1, 64, [8, 16, 16], 114_688], strict=True)),
    "smoke": dict(zip(SHARED, ["easy", 1, 32, [2, 2, 2], 384], strict=True)),
}
PPO_EPOCHS = {"paper": 3, "small": 1, "smoke": 1}
PPG = {  # the auxiliary phase costs most of PPG's time; n-pi is stated for the default number of environments
    "paper": {"arch": "dual", "n-pi": 32, "aux-epochs": 6, "aux-rollouts": 16},
    "small": {"arch": "detach", "n-pi": 8, "aux-epochs": 2, "aux-rollouts": 4},
    "smoke": {"arch": "detach", "n-pi": 1, "aux-epochs": 1, "aux-rollouts": 4},
}
DEFAULT_ENVS = {"paper": 256, "small": 16, "smoke": 4}
# Batch sizes, the reference first. Small: step size 1e-3 for 64 environments is 5e-4 for the default 16.
SIZES = {"paper": [256, 64, 16, 4, 1], "small": [64, 16, 4, 1], "smoke": [4, 2]}
SIZES_LEARNING_RATE = {"paper": 5e-4, "small": 1e-3, "smoke": 5e-4}


@dataclass
class Run:
    experiment: str
    scale: str
    variant: str  # a panel of the figure
    value: str  # a curve of the panel
    game: str
    seed: int
    script: str
    flags: dict

    @property
    def name(self):
        return f"{self.game}__{self.variant}__{self.value}__seed{self.seed}"

    def folder(self, runs_dir):
        """What the script writes: TensorBoard logs and the checkpoint."""
        return Path(runs_dir) / self.experiment / self.scale / self.name

    def file(self, runs_dir, kind):
        """What the sweep writes: json (this very run), log, exit (its end) and job (of Slurm)."""
        return Path(runs_dir) / self.experiment / self.scale / "sweep" / f"{self.name}.{kind}"

    def words(self):
        """The script and its flags, but for where to write."""
        flags = {"env-id": self.game, "seed": self.seed} | self.flags
        words = [self.script]
        for flag, value in flags.items():
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
        return words

    @property
    def steps(self):
        """Environment steps: whole iterations."""
        iteration = self.flags["num-envs"] * self.flags["num-steps"]
        return -(-self.flags["total-timesteps"] // iteration) * iteration

    def to_json(self):
        return json.dumps(asdict(self), indent=1)


# Algorithms, as script and flags, at the default batch size or at one of several.


def ppo(scale, ewma=False):
    return ("ppo_ewma.py" if ewma else "ppo.py"), {"epochs": PPO_EPOCHS[scale]}


def ppg(scale, ewma=False):
    return ("ppg_ewma.py" if ewma else "ppg.py"), PPG[scale]


def invariant(scale):
    """The algorithm of the experiments on batch size: PPG-EWMA; below the paper's scale PPO-EWMA, which is faster."""
    return ppg(scale, ewma=True) if scale == "paper" else ppo(scale, ewma=True)


def coupled(scale):
    """The same without EWMA."""
    return ppg(scale) if scale == "paper" else ppo(scale)


def at_default_size(scale, algorithm, **more):
    script, flags = algorithm
    sizes = {"num-envs": DEFAULT_ENVS[scale], "reference-num-envs": DEFAULT_ENVS[scale]}
    return script, flags | sizes | with_dashes(more)


def at_size(scale, size, algorithm, **more):
    """With one policy epoch, so that PPO can be invariant."""
    script, flags = algorithm
    reference, rate = SIZES[scale][0], SIZES_LEARNING_RATE[scale]
    flags = flags | {"num-envs": size, "reference-num-envs": reference, "learning-rate": rate}
    if "epochs" in flags:
        flags["epochs"] = 1
    else:
        flags["aux-learning-rate"] = rate
        flags["n-pi"] = max(1, flags["n-pi"] * DEFAULT_ENVS[scale] // reference)  # the phase is as long as elsewhere
    return script, flags | with_dashes(more)


def with_dashes(flags):
    return {name.replace("_", "-"): value for name, value in flags.items()}


# Each experiment's settings: (variant, value, script, flags).


def staleness(scale):
    """Fig. 1, 7-9. Fresh data make the three losses one; those runs are listed under `decoupled` only."""
    ages = {"paper": [0, 1, 2, 4, 8, 16, 32, 64], "small": [0, 1, 2, 4, 8, 16], "smoke": [0, 1]}[scale]
    seconds = {"checkpoint-seconds": 3600} if scale == "paper" else {}  # checkpoints hold up to 51.5 GB
    algorithm = "staleness.py", ppo(scale)[1] | seconds
    for loss in ["decoupled", "behavior", "recent"]:
        for age in ages if loss == "decoupled" else ages[1:]:
            yield loss, age, *at_default_size(scale, algorithm, staleness=age, staleness_loss=loss)


def batch_size(scale):
    """Fig. 2, 3, 10-15, table 5. At the reference there is nothing to adjust, so nothing to ablate: `all` covers it."""
    largest, *smaller = SIZES[scale]
    for size in SIZES[scale]:
        yield "all", size, *at_size(scale, size, invariant(scale))
    for variant, adjustment in [("no-step-size", "lr"), ("no-adv-norm", "adv-norm"), ("no-ewma-adjustment", "prox")]:
        for size in smaller:
            yield variant, size, *at_size(scale, size, invariant(scale), no_adjust=[adjustment])
    for size in SIZES[scale]:
        yield "no-ewma", size, *at_size(scale, size, coupled(scale))
    yield "floor", largest, *at_size(scale, largest, coupled(scale), clip_coef=0, kl_coef=1 / 256)
    if scale == "small":
        # Is it the age that makes no-ewma-adjustment what it is? The largest batch, as young in environment steps.
        for size in smaller:
            yield "same-age", size, *at_size(scale, largest, invariant(scale), prox_com=8 * size / largest)
        # PPO has no n_pi, so here is a little PPG-EWMA to see that adjustment at work.
        for size in (64, 4):
            yield "ppg-ewma", size, *at_size(scale, size, ppg(scale, ewma=True))
        yield "ppg-ewma-no-n-pi", 4, *at_size(scale, 4, ppg(scale, ewma=True), no_adjust=["n-pi"])


def ewma(scale):
    """Fig. 4, 17."""
    yield "algorithms", "ppo", *at_default_size(scale, ppo(scale))
    yield "algorithms", "ppo-ewma", *at_default_size(scale, ppo(scale, ewma=True))
    yield "algorithms", "ppg", *at_default_size(scale, ppg(scale))
    yield "algorithms", "ppg-ewma", *at_default_size(scale, ppg(scale, ewma=True))
    if scale == "small":
        # With one epoch of 8 minibatches, PPO's old policy is 3.5 steps old on average. Is it the age that matters?
        yield "as-old-as-ppo", "ppo-ewma", *at_default_size(scale, ppo(scale, ewma=True), prox_com=3.5)


def linear_lr(scale):
    """Fig. 5, 16."""
    for size in SIZES[scale]:
        yield "linear", size, *at_size(scale, size, invariant(scale), lr_rule="linear")


def adam_betas(scale):
    """Fig. 6. At the reference the betas are as stated whatever the rule, so those runs are listed once."""
    for betas in ["none", "beta2", "both"]:
        for size in SIZES[scale] if betas == "none" else SIZES[scale][1:]:
            yield betas, size, *at_size(scale, size, invariant(scale), adjust_betas=betas)


def com_vs_kl(scale):
    """Fig. 18. The paper's text gives the default corner, not the grid: we halve the one and double the other."""
    number, steps = {"paper": (5, 20_000_000), "small": (4, 114_688), "smoke": (2, 192)}[scale]
    for kl, com in itertools.product([2**n for n in range(number)], [8 / 2**n for n in range(number)]):
        grid = {"clip_coef": 0, "kl_coef": kl, "prox_com": com, "total_timesteps": steps}
        yield f"kl-{kl}", f"com-{com:g}", *at_size(scale, 1, invariant(scale), **grid)


@dataclass
class Experiment:
    """Everything about an experiment: its runs, and what figures.py makes of them."""

    settings: callable  # of a scale: (variant, value, script, flags) for each setting
    about: str  # the caption's first sentences
    axis: str  # what the values are, for legends and tables; "" if they say it themselves
    panels: dict  # variant: title of its panel, in the figure's order
    paper: tuple = (GAMES, 3)  # games and number of seeds at each scale
    small: tuple = (["starpilot"], 3)
    smoke: tuple = (["starpilot"], 2)  # where episodes are short
    shared: dict = field(default_factory=dict)  # variant: the others that the runs of its first setting serve, too
    figures: dict = field(default_factory=lambda: {"curves": {}})  # kind of figure (in drawing.py): its options
    tests: dict = field(default_factory=dict)  # kind of test (in reporting.py): what is tested


ABLATIONS = {
    "no-step-size": "no step size adjustment",
    "no-adv-norm": "no adv. norm. adjustment",
    "no-ewma-adjustment": "no EWMA adjustment",
    "no-ewma": "no EWMA at all",
}


FLOOR = "Dotted: without EWMA, at the largest batch size, with a KL penalty too weak: a floor."
SAME_AGE = "Hollow: 64 environments, their average as young as that of the filled ones."
OLD = "As old as PPO's: an average as old as PPO's old policy, 3.5 steps."


def decoupling(ages):
    """Pairs to compare: at each staleness, and at all of them together, which are then strata as games are."""
    pairs, ages = [], [age for age in ages if age != "0"]
    for other in ("recent", "behavior"):
        settings = [(("decoupled", age), (other, age)) for age in ages]
        pairs += [(f"decoupled {age}", f"{other} {age}", [pair]) for age, pair in zip(ages, settings, strict=True)]
        if len(ages) > 1:
            pairs.append(("decoupled", f"{other}, all ages", settings))
    return pairs


BASE_PPO, PPO_EWMA, BASE_PPG, PPG_EWMA = (("algorithms", name) for name in ALGORITHMS)
AS_OLD = ("as-old-as-ppo", "ppo-ewma")

EXPERIMENTS = {
    "staleness": Experiment(
        staleness,
        "PPO on data made stale on purpose (paper's fig. 1). One iteration is {iteration:,} environment steps.",
        axis="staleness (iterations)",
        panels={
            "recent": "recent policy for both",
            "decoupled": "decoupled objective",
            "behavior": "behaviour policy for both",
        },
        paper=(GAMES, 4),
        shared={"decoupled": ["behavior", "recent"]},
        figures={"curves": {"lines": ["recent", "decoupled", "behavior"]}},
        tests={"better": ("Does decoupling help?", lambda results: decoupling(results.values("decoupled")))},
    ),
    "batch-size": Experiment(
        batch_size,
        "{algorithm} at different batch sizes, with all adjustments and with all but one (paper's fig. 2).",
        axis="environments",
        panels={"all": "all adjustments", **ABLATIONS, "ppg-ewma": "PPG-EWMA, all adjustments"},
        shared={"all": ["no-step-size", "no-adv-norm", "no-ewma-adjustment"]},
        figures={
            "curves": {
                "lines": ["all", *ABLATIONS, "same-age"],
                # another variant in a panel: which, its name, its look, what the caption says
                "beside": {
                    "floor": ("all", "KL penalty 1/256", {"color": "0.45", "ls": ":"}, FLOOR),
                    "ppg-ewma-no-n-pi": ("ppg-ewma", r"$N_\pi$ not adjusted", {"ls": "--"}, ""),
                },
                # like another line, but hollow: which, its name, what the caption says
                "hollow": {"same-age": ("no-ewma-adjustment", "64 env., as young", SAME_AGE)},
            },
            "difference": ["all", *ABLATIONS],
            "advantage_std": "no-adv-norm",
        },
        tests={
            "apart": ["all", *ABLATIONS],
            "same_age": ("no-ewma-adjustment", "same-age"),
            "table_5": list(ABLATIONS),
            "largest_minus_smallest": ["all", *ABLATIONS],
        },
    ),
    "ewma": Experiment(
        ewma,
        "All four algorithms at the default batch size (paper's fig. 4).",
        axis="",
        panels={"algorithms": "all four algorithms"},
        paper=(GAMES, 4),
        # starpilot, and the two of fruitbot, dodgeball, bigfish, chaser, bossfight and leaper where a run of PPO with
        # seed 101 learnt most
        small=(["starpilot", "fruitbot", "dodgeball"], 3),
        figures={
            "gains": {  # which setting minus which other, and what the caption says
                "PPO-EWMA\nminus PPO": (PPO_EWMA, BASE_PPO, ""),
                "PPG-EWMA\nminus PPG": (PPG_EWMA, BASE_PPG, ""),
                "as old as PPO's,\nminus PPO": (AS_OLD, BASE_PPO, OLD),
            },
        },
        tests={
            "better": (
                "Does EWMA help?",
                lambda _: [
                    ("ppo-ewma", "ppo", [(PPO_EWMA, BASE_PPO)]),
                    ("ppg-ewma", "ppg", [(PPG_EWMA, BASE_PPG)]),
                    ("ppo-ewma as-old-as-ppo", "ppo", [(AS_OLD, BASE_PPO)]),
                    ("ppo-ewma as-old-as-ppo", "ppo-ewma", [(AS_OLD, PPO_EWMA)]),
                ],
            )
        },
    ),
    "linear-lr": Experiment(
        linear_lr,
        "{algorithm} with the step size divided by c, not by its square root (paper's fig. 5).",
        axis="environments",
        panels={"linear": "linear step size rule"},
        tests={"largest_minus_smallest": ["linear"]},
    ),
    "adam-betas": Experiment(
        adam_betas,
        "{algorithm} with Adam's betas adjusted besides everything else (paper's fig. 6).",
        axis="environments",
        panels={
            "none": "betas not adjusted",
            "beta2": r"$\beta_2$ adjusted",
            "both": r"$\beta_1$ and $\beta_2$ adjusted",
        },
        paper=(["heist"], 3),
        small=(["heist"], 3),
        shared={"none": ["beta2", "both"]},
        tests={"largest_minus_smallest": ["none", "beta2", "both"]},
    ),
    "com-vs-kl": Experiment(
        com_vs_kl,
        "{algorithm} with one environment (paper's fig. 18). Default: bottom right. In use, the centre of mass is "
        "{reference} times as long.",
        axis="",
        panels={},
        paper=(["starpilot"], 2),
        small=(["starpilot"], 2),
        smoke=(["starpilot"], 1),
        figures={"grid": ("centre of mass of the EWMA (--prox-com)", "KL penalty (--kl-coef)")},
    ),
}


def runs_of(experiment, scale, games=None, seeds=None):
    """All runs of an experiment; seeds outermost, so that an unfinished sweep has something of everything."""
    entry = EXPERIMENTS[experiment]
    default_games, number = getattr(entry, scale)
    return [
        Run(experiment, scale, variant, str(value), game, seed, script, BASE[scale] | flags)
        for seed in seeds or range(1, number + 1)
        for game in games or default_games
        for variant, value, script, flags in entry.settings(scale)
    ]
