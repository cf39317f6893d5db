"""The experiments: all that runs, at each scale, and how it is drawn and tested. A new one is an entry at the end."""

import csv
import itertools
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

with open(Path(__file__).with_name("procgen_return_range.csv"), newline="") as file:
    RANGES = {row["game"]: row for row in csv.DictReader(line for line in file if line[0] != "#")}
MINATAR = ["breakout", "space_invaders", "asterix", "freeway", "seaquest"]  # lab/minatar.py
GAMES = [*RANGES, *MINATAR]
ALGORITHMS = {"ppo": "PPO", "ppo-ewma": "PPO-EWMA", "ppg": "PPG", "ppg-ewma": "PPG-EWMA"}


def return_range(game, mode):
    """The least and the greatest return of a game, by which returns are normalised. MinAtar's stay as they are."""
    if game in MINATAR:
        return 0.0, 1.0
    return tuple(float(RANGES[game][f"{mode}_{end}"]) for end in ("min", "max"))


# The scales. An experiment's entry may change any of this for itself: at={"small": {"seeds": 2, "ppo": {"epochs": 3}}}.


@dataclass
class Scale:
    games: list
    seeds: int
    flags: dict  # of all scripts
    ppo: dict  # flags of PPO
    ppg: dict  # flags of PPG; n-pi is for num_envs environments
    num_envs: int  # where the batch size is not what is studied
    sizes: list  # numbers of environments where it is, the reference first
    learning_rate: float  # at that reference
    ages: list  # of stale data, in iterations
    grid: int  # points each way of com-vs-kl
    invariant: str = "ppg"  # the algorithm whose batch size is studied
    more_seeds: dict = field(default_factory=dict)  # variant: its number of seeds, if it has more than the others
    beyond: tuple = ()  # settings that the paper does not have
    points: int = 50  # of each learning curve in the tables
    like: str = ""  # another scale, whose changes in an experiment's entry are made here, too


# Flags that all runs of an experiment at a scale have in common. The report names those that differ from the paper's.
SHARED = ["distribution-mode", "num-levels", "num-steps", "channels", "total-timesteps"]
SCALES = {
    "paper": Scale(
        games=list(RANGES),
        seeds=3,
        flags={
            "distribution-mode": "hard",
            "num-levels": 0,
            "num-steps": 256,
            "channels": [16, 32, 32],
            "total-timesteps": 100_000_000,
        },
        ppo={"epochs": 3},
        ppg={"arch": "dual", "n-pi": 32, "aux-epochs": 6, "aux-rollouts": 16},
        num_envs=256,
        sizes=[256, 64, 16, 4, 1],
        learning_rate=5e-4,
        ages=[0, 1, 2, 4, 8, 16, 32, 64],
        grid=5,
    ),
    "small": Scale(  # results/PLAN.md says why
        games=["starpilot"],
        seeds=3,
        flags={
            "distribution-mode": "easy",
            "num-levels": 1,
            "num-steps": 16,
            "channels": [8, 16, 16],
            "total-timesteps": 294_912,
        },
        ppo={"epochs": 3},
        ppg={"arch": "detach", "n-pi": 16, "aux-epochs": 2, "aux-rollouts": 16, "num-minibatches": 4},
        num_envs=64,
        sizes=[64, 16, 4, 1],
        learning_rate=5e-4,
        ages=[0, 1, 2, 4, 8, 16],
        grid=3,
        beyond=("no-n-pi",),
    ),
    "first": Scale(  # our first runs, smaller still: results/ shows them until those at small scale are complete
        games=["starpilot"],
        seeds=3,
        flags={
            "distribution-mode": "easy",
            "num-levels": 1,
            "num-steps": 64,
            "channels": [8, 16, 16],
            "total-timesteps": 114_688,
        },
        ppo={"epochs": 1},
        ppg={"arch": "detach", "n-pi": 8, "aux-epochs": 2, "aux-rollouts": 4},  # most of PPG's time is in this phase
        num_envs=16,
        sizes=[64, 16, 4, 1],
        learning_rate=1e-3,  # for 64 environments: the 5e-4 of 16
        ages=[0, 1, 2, 4, 8, 16],
        grid=4,
        invariant="ppo",
        beyond=("same-age", "ppg-ewma", "as-old-as-ppo"),
    ),
    "minatar": Scale(  # other games, in seconds: many seeds
        games=["space_invaders"],
        seeds=20,
        flags={
            "num-steps": 16,
            "num-minibatches": 4,
            "gamma": 0.99,
            "channels": [64],
            "total-timesteps": 153_600,
        },
        ppo={"epochs": 3},
        ppg={"arch": "detach", "n-pi": 16, "aux-epochs": 2, "aux-rollouts": 16},
        num_envs=64,
        sizes=[64, 16, 8, 4, 1],
        learning_rate=4e-3,
        ages=[0, 1, 2, 4, 8, 16],
        grid=3,
        invariant="ppo",
        beyond=("eight-minibatches",),
        points=25,
    ),
    "smoke": Scale(
        games=["starpilot"],  # where episodes are short
        seeds=2,
        flags={
            "distribution-mode": "easy",
            "num-levels": 1,
            "num-steps": 32,
            "channels": [2, 2, 2],
            "total-timesteps": 384,
        },
        ppo={"epochs": 1},
        ppg={"arch": "detach", "n-pi": 1, "aux-epochs": 1, "aux-rollouts": 4},
        num_envs=4,
        sizes=[4, 2],
        learning_rate=5e-4,
        ages=[0, 1],
        grid=2,
        invariant="ppo",
    ),
}


SCALES["minatar-ppg"] = replace(  # the same with the paper's algorithm: batch-size, linear-lr, adam-betas, com-vs-kl
    SCALES["minatar"], like="minatar", invariant="ppg", sizes=[64, 16, 4, 1], seeds=5, beyond=("no-n-pi",)
)


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
    twin: tuple = None  # (experiment, variant, value) of an earlier experiment that is the same: one run serves both

    @property
    def name(self):
        return f"{self.game}__{self.variant}__{self.value}__seed{self.seed}"

    @property
    def original(self):
        """The run that is carried out: itself, or its twin."""
        experiment, variant, value = self.twin or (self.experiment, self.variant, self.value)
        return replace(self, experiment=experiment, variant=variant, value=value, twin=None)

    def folder(self, runs_dir):
        """What the script writes: TensorBoard logs and the checkpoint."""
        return Path(runs_dir) / self.original.experiment / self.scale / self.original.name

    def file(self, runs_dir, kind):
        """What the sweep writes: json (this very run), log, exit (its end) and job (of Slurm)."""
        run = self if kind == "json" else self.original
        return Path(runs_dir) / run.experiment / run.scale / "sweep" / f"{run.name}.{kind}"

    @property
    def patched(self):
        """If the script is to be changed by patches/gymnasium.patch before it runs."""
        return self.game in MINATAR

    def words(self):
        """The script and its flags, but for where to write."""
        words, game = [self.script], f"lab.minatar:{self.game}" if self.patched else self.game
        for flag, value in ({"env-id": game, "seed": self.seed} | self.flags).items():
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
        return words

    @property
    def steps(self):
        """Environment steps: whole iterations."""
        iteration = self.flags["num-envs"] * self.flags["num-steps"]
        return -(-self.flags["total-timesteps"] // iteration) * iteration

    def write(self, runs_dir):
        """Leave with the run what it is, for figures.py."""
        for kind in ("log", "json"):  # a twin's are in two folders
            self.file(runs_dir, kind).parent.mkdir(parents=True, exist_ok=True)
        self.file(runs_dir, "json").write_text(json.dumps(asdict(self), indent=1))


# Algorithms, as script and flags, at the scale's number of environments or at one of several.


def algorithm(scale, name, ewma=False, **more):
    """PPO or PPG."""
    sizes = {"num-envs": scale.num_envs, "reference-num-envs": scale.num_envs}
    return f"{name}{'_ewma' * ewma}.py", getattr(scale, name) | sizes | with_dashes(more)


def at_size(scale, size, name=None, ewma=True, **more):
    """The algorithm of the experiments on batch size. One policy epoch, so that PPO can be invariant, too."""
    reference, rate = scale.sizes[0], scale.learning_rate
    script, flags = algorithm(scale, name or scale.invariant, ewma)
    flags |= {"num-envs": size, "reference-num-envs": reference, "learning-rate": rate}
    if "epochs" in flags:
        flags["epochs"] = 1
    else:
        flags["aux-learning-rate"] = rate
        flags["n-pi"] = max(1, flags["n-pi"] * scale.num_envs // reference)  # the phase is as long as elsewhere
    return script, flags | with_dashes(more)


def with_dashes(flags):
    return {name.replace("_", "-"): value for name, value in flags.items()}


@dataclass
class Experiment:
    """Everything about an experiment: its runs, and what figures.py makes of them."""

    settings: callable  # of a Scale: (variant, value, script, flags) for each setting
    about: str  # the caption's first sentences
    axis: str  # what the values are, for legends and tables; "" if they say it themselves
    panels: dict  # variant: title of its panel, in the figure's order
    at: dict = field(default_factory=dict)  # name of a scale: what is not as in SCALES
    shared: dict = field(default_factory=dict)  # variant: the others that the runs of its first setting serve, too
    figures: dict = field(default_factory=lambda: {"curves": {}})  # kind of figure (in drawing.py): its options
    tests: dict = field(default_factory=dict)  # kind of test (in reporting.py): what is tested


# Each experiment: its settings (variant, value, script, flags), what it compares, and its entry.


def staleness(scale):
    """Fresh data make the three losses one; those runs are listed under `decoupled` only."""
    for loss in ["decoupled", "behavior", "recent"]:
        for age in scale.ages if loss == "decoupled" else scale.ages[1:]:
            _, flags = algorithm(scale, "ppo", staleness=age, staleness_loss=loss)
            yield loss, age, "staleness.py", flags


def decoupling(results):
    """Pairs to compare: at each staleness, and at all of them together, which are then strata as games are."""
    pairs, ages = [], [age for age in results.values("decoupled") if age != "0"]
    for other in ("recent", "behavior"):
        settings = [(("decoupled", age), (other, age)) for age in ages]
        pairs += [(f"decoupled {age}", f"{other} {age}", [pair]) for age, pair in zip(ages, settings, strict=True)]
        if len(ages) > 1:
            pairs.append(("decoupled", f"{other}, all ages", settings))
    return pairs


def batch_size(scale):
    """At the reference there is nothing to adjust, so nothing to ablate: `all` covers it."""
    largest, *smaller = scale.sizes
    for size in scale.sizes:
        yield "all", size, *at_size(scale, size)
    for variant, adjustment in [("no-step-size", "lr"), ("no-adv-norm", "adv-norm"), ("no-ewma-adjustment", "prox")]:
        for size in smaller:
            yield variant, size, *at_size(scale, size, no_adjust=[adjustment])
    for size in scale.sizes:
        yield "no-ewma", size, *at_size(scale, size, ewma=False)
    for size in smaller if "no-n-pi" in scale.beyond else ():
        yield "no-n-pi", size, *at_size(scale, size, no_adjust=["n-pi"])
    yield "floor", largest, *at_size(scale, largest, ewma=False, clip_coef=0, kl_coef=1 / 256)
    if "same-age" in scale.beyond:
        # Is it the age that makes no-ewma-adjustment what it is? The largest batch, as young in environment steps.
        for size in smaller:
            yield "same-age", size, *at_size(scale, largest, prox_com=8 * size / largest)
    if "ppg-ewma" in scale.beyond:
        # PPO has no n_pi, so here is a little PPG-EWMA to see that adjustment at work.
        for size in (64, 4):
            yield "ppg-ewma", size, *at_size(scale, size, "ppg")
        yield "ppg-ewma-no-n-pi", 4, *at_size(scale, 4, "ppg", no_adjust=["n-pi"])


def ewma(scale):
    yield "algorithms", "ppo", *algorithm(scale, "ppo")
    yield "algorithms", "ppo-ewma", *algorithm(scale, "ppo", ewma=True)
    yield "algorithms", "ppg", *algorithm(scale, "ppg")
    yield "algorithms", "ppg-ewma", *algorithm(scale, "ppg", ewma=True)
    if "as-old-as-ppo" in scale.beyond:
        # With one epoch of 8 minibatches, PPO's old policy is 3.5 steps old on average. Is it the age that matters?
        yield "as-old-as-ppo", "ppo-ewma", *algorithm(scale, "ppo", ewma=True, prox_com=3.5)
    if "eight-minibatches" in scale.beyond:
        # With 3 epochs of 4 minibatches it is 5.5 steps old. As in the paper, 11.5; the step size by the rule.
        flags = {"num_minibatches": 8, "learning_rate": round(1e-3 / 2**0.5, 6)}
        yield "eight-minibatches", "ppo", *algorithm(scale, "ppo", **flags)
        yield "eight-minibatches", "ppo-ewma", *algorithm(scale, "ppo", ewma=True, **flags)


def linear_lr(scale):
    """Beside the square root rule, whose runs are those of batch_size. At the reference the two are the same."""
    for size in scale.sizes:
        yield "sqrt", size, *at_size(scale, size)
    for size in scale.sizes[1:]:
        yield "linear", size, *at_size(scale, size, lr_rule="linear")


def adam_betas(scale):
    """With betas not adjusted, batch_size has the runs. At the reference they are the same, and listed once."""
    for size in scale.sizes:
        yield "none", size, *at_size(scale, size)
    for betas in ["beta2", "both"]:
        for size in scale.sizes[1:]:
            yield betas, size, *at_size(scale, size, adjust_betas=betas)


def com_vs_kl(scale):
    """The paper's text gives the default corner, not the grid: we halve the one and double the other."""
    for kl, com in itertools.product([2**n for n in range(scale.grid)], [8 / 2**n for n in range(scale.grid)]):
        yield f"kl-{kl}", f"com-{com:g}", *at_size(scale, 1, clip_coef=0, kl_coef=kl, prox_com=com)


ABLATIONS = {
    "no-step-size": "no step size adjustment",
    "no-adv-norm": "no adv. norm. adjustment",
    "no-ewma-adjustment": "no EWMA age adjustment",
    "no-ewma": "no EWMA at all",
    "no-n-pi": r"no $N_\pi$ adjustment",
}
FLOOR = "Dotted: without EWMA, at the largest batch size, with a KL penalty too weak: a floor."
SAME_AGE = "Hollow: 64 environments, their average as young as that of the filled ones."
OLD = "As old as PPO's: an average as old as PPO's old policy, 3.5 steps."
BASE_PPO, PPO_EWMA, BASE_PPG, PPG_EWMA = (("algorithms", name) for name in ALGORITHMS)
AS_OLD = ("as-old-as-ppo", "ppo-ewma")
EIGHT_PPO, EIGHT_EWMA = (("eight-minibatches", name) for name in ("ppo", "ppo-ewma"))

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
        at={
            "paper": {"seeds": 4, "flags": {"checkpoint-seconds": 3600}},  # checkpoints hold up to 51.5 GB
            "small": {"num_envs": 16, "flags": {"learning-rate": 2.5e-4}},  # a quarter of the data of 16 x 64
            "minatar": {"num_envs": 16, "flags": {"learning-rate": 5e-4}},  # a quarter of the data of 64 x 16
        },
        shared={"decoupled": ["behavior", "recent"]},
        figures={"curves": {"lines": ["recent", "decoupled", "behavior"]}},
        tests={"better": ("Does decoupling help?", decoupling)},
    ),
    "batch-size": Experiment(
        batch_size,
        "{algorithm} at different batch sizes, with all adjustments and with all but one (paper's fig. 2).",
        axis="environments",
        panels={"all": "all adjustments", **ABLATIONS, "ppg-ewma": "PPG-EWMA, all adjustments"},
        at={"small": {"more_seeds": {"all": 5}}, "minatar-ppg": {"more_seeds": {"all": 10}}},
        shared={"all": ["no-step-size", "no-adv-norm", "no-ewma-adjustment", "no-n-pi"]},
        figures={
            "curves": {
                "large": True,
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
            "same": list(ABLATIONS),
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
        # starpilot, and the two of fruitbot, dodgeball, bigfish, chaser, bossfight and leaper where a run of PPO with
        # seed 101 learnt most; the whole network
        at={
            "paper": {"seeds": 4},
            "small": {
                "games": ["starpilot", "fruitbot", "dodgeball"],
                "seeds": 5,
                "num_envs": 16,
                "flags": {"num-steps": 64, "channels": [16, 32, 32], "total-timesteps": 122_880},
                "ppg": {"n-pi": 8, "aux-rollouts": 4, "num-minibatches": 8},
            },
            "first": {"games": ["starpilot", "fruitbot", "dodgeball"]},
            "minatar": {"flags": {"learning-rate": 1e-3}, "ppg": {"aux-learning-rate": 1e-3}},
        },
        figures={
            "gains": {  # which setting minus which other, and what the caption says
                "PPO-EWMA\nminus PPO": (PPO_EWMA, BASE_PPO, ""),
                "PPG-EWMA\nminus PPG": (PPG_EWMA, BASE_PPG, ""),
                "as old as PPO's,\nminus PPO": (AS_OLD, BASE_PPO, OLD),
                "PPO-EWMA\nminus PPO,\n8 minibatches": (EIGHT_EWMA, EIGHT_PPO, ""),
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
                    ("ppo-ewma eight-minibatches", "ppo eight-minibatches", [(EIGHT_EWMA, EIGHT_PPO)]),
                ],
            )
        },
    ),
    "linear-lr": Experiment(
        linear_lr,
        "{algorithm} with the step size divided by c, and by its square root (paper's fig. 5).",
        axis="environments",
        panels={"sqrt": "square root rule", "linear": "linear rule"},
        at={"small": {"seeds": 2}},
        shared={"sqrt": ["linear"]},
        figures={"curves": {"lines": ["sqrt", "linear"]}},
        tests={"largest_minus_smallest": ["sqrt", "linear"]},
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
        at={"paper": {"games": ["heist"]}, "small": {"seeds": 2}},
        shared={"none": ["beta2", "both"]},
        figures={"curves": {"lines": ["none", "beta2", "both"]}},
        tests={"largest_minus_smallest": ["none", "beta2", "both"]},
    ),
    "com-vs-kl": Experiment(
        com_vs_kl,
        "{algorithm} with one environment (paper's fig. 18). Default: bottom right. In use, the centre of mass is "
        "{reference} times as long.",
        axis="",
        panels={},
        at={
            "paper": {"games": ["starpilot"], "seeds": 2, "flags": {"total-timesteps": 20_000_000}},
            "small": {"seeds": 2, "flags": {"total-timesteps": 147_456}},
            "minatar-ppg": {"grid": 4, "seeds": 3},
            "smoke": {"seeds": 1, "flags": {"total-timesteps": 192}},
        },
        figures={"grid": ("centre of mass of the EWMA (--prox-com)", "KL penalty (--kl-coef)")},
        tests={"bands": ("centre of mass", "penalty")},
    ),
}


def scale_of(experiment, name):
    """A scale, with what the experiment's entry changes of it; flags are added to its own."""
    scale, at = SCALES[name], EXPERIMENTS[experiment].at
    changes = at.get(scale.like, {}) | at.get(name, {})
    changes = {key: getattr(scale, key) | x if isinstance(x, dict) else x for key, x in changes.items()}
    return replace(scale, **changes)


def settings_of(experiment, scale):
    """Its settings at a scale: (variant, value, script, flags), with the flags that all runs have."""
    at = scale_of(experiment, scale)
    for variant, value, script, flags in EXPERIMENTS[experiment].settings(at):
        yield variant, str(value), script, at.flags | flags


def twins_of(experiment, scale):
    """{(variant, value): the (experiment, variant, value) of an earlier experiment that is the same}."""
    seen = {}
    for name in itertools.takewhile(lambda name: name != experiment, EXPERIMENTS):
        for variant, value, *what in settings_of(name, scale):
            seen.setdefault(json.dumps(what, sort_keys=True), (name, variant, value))
    found = {(x, y): seen.get(json.dumps(what, sort_keys=True)) for x, y, *what in settings_of(experiment, scale)}
    return {setting: twin for setting, twin in found.items() if twin}


def runs_of(experiment, scale, games=None, seeds=None, variants=None):
    """All runs of an experiment; seeds outermost, so that an unfinished sweep has something of everything."""
    at, twins = scale_of(experiment, scale), twins_of(experiment, scale)
    return [
        Run(experiment, scale, variant, value, game, seed, script, flags, twins.get((variant, value)))
        for seed in seeds or range(1, max([at.seeds, *at.more_seeds.values()]) + 1)
        for game in games or at.games
        for variant, value, script, flags in settings_of(experiment, scale)
        if (seeds or seed <= at.more_seeds.get(variant, at.seeds)) and (not variants or variant in variants)
    ]
