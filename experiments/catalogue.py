"""The paper's experiments as lists of runs, at three scales. To change what an experiment runs, change it here."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RANGES = Path(__file__).with_name("procgen_return_range.csv")
GAMES = [line.split(",")[0] for line in RANGES.read_text().splitlines() if not line.startswith(("#", "game,"))]
SCALES = ["paper", "small", "smoke"]

# Flags that all runs of a scale share; figures name those that differ from the paper's.
BASE = {
    "paper": {
        "distribution-mode": "hard",
        "num-levels": 0,
        "num-steps": 256,
        "channels": [16, 32, 32],
        "total-timesteps": 100_000_000,
    },
    "small": {
        "distribution-mode": "easy",
        "num-levels": 1,
        "num-steps": 64,
        "channels": [8, 16, 16],
        "total-timesteps": 114_688,
    },
    "smoke": {
        "distribution-mode": "easy",
        "num-levels": 1,
        "num-steps": 32,
        "channels": [2, 2, 2],
        "total-timesteps": 384,
    },
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
KL_PENALTY = {"clip-coef": 0, "kl-coef": 1}  # the KL penalised objective in place of the clipped one


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


def ppo(scale, ewma=False, **more):
    return ("ppo_ewma.py" if ewma else "ppo.py"), {"epochs": PPO_EPOCHS[scale]} | more


def ppg(scale, ewma=False, **more):
    return ("ppg_ewma.py" if ewma else "ppg.py"), PPG[scale] | more


def at_default_size(scale, flags):
    return {"num-envs": DEFAULT_ENVS[scale], "reference-num-envs": DEFAULT_ENVS[scale]} | flags


def at_size(scale, size, algorithm):
    """A script and its flags at one of several batch sizes: with one policy epoch, so that PPO can be invariant."""
    script, flags = algorithm
    reference = SIZES[scale][0]
    flags = flags | {"num-envs": size, "reference-num-envs": reference, "learning-rate": SIZES_LEARNING_RATE[scale]}
    if "epochs" in flags:
        flags["epochs"] = 1
    else:
        flags["aux-learning-rate"] = SIZES_LEARNING_RATE[scale]
        flags["n-pi"] = max(1, flags["n-pi"] * DEFAULT_ENVS[scale] // reference)  # the phase is as long as elsewhere
    return script, flags


def invariant(scale):
    """The algorithm of the experiments on batch size: PPG-EWMA; below the paper's scale PPO-EWMA, which is faster."""
    return ppg(scale, ewma=True) if scale == "paper" else ppo(scale, ewma=True)


def coupled(scale):
    """The same without EWMA."""
    return ppg(scale) if scale == "paper" else ppo(scale)


# Each experiment: its settings as (variant, value, script, flags).


def staleness(scale):
    """Fig. 1, 7-9. Fresh data make the three losses one; those runs are listed under `decoupled` only."""
    ages = {"paper": [0, 1, 2, 4, 8, 16, 32, 64], "small": [0, 1, 2, 4, 8, 16], "smoke": [0, 1]}[scale]
    for loss in ["decoupled", "behavior", "recent"]:
        for age in ages:
            if age > 0 or loss == "decoupled":
                flags = {"staleness": age, "staleness-loss": loss, "epochs": PPO_EPOCHS[scale]}
                if scale == "paper":
                    flags["checkpoint-seconds"] = 3600  # they hold up to 51.5 GB
                yield loss, age, "staleness.py", at_default_size(scale, flags)


def batch_size(scale):
    """Fig. 2, 3, 10-15, table 5. At the reference there is nothing to adjust, so nothing to ablate: `all` covers it."""
    sizes = SIZES[scale]
    for size in sizes:
        yield "all", size, *at_size(scale, size, invariant(scale))
    for variant, adjustment in [("no-step-size", "lr"), ("no-adv-norm", "adv-norm"), ("no-ewma-adjustment", "prox")]:
        for size in sizes[1:]:
            script, flags = at_size(scale, size, invariant(scale))
            yield variant, size, script, flags | {"no-adjust": [adjustment]}
    for size in sizes:
        yield "no-ewma", size, *at_size(scale, size, coupled(scale))
    script, flags = at_size(scale, sizes[0], coupled(scale))
    yield "floor", sizes[0], script, flags | KL_PENALTY | {"kl-coef": 1 / 256}
    if scale == "small":
        # Is it the age that makes no-ewma-adjustment what it is? The largest batch, as young in environment steps.
        for size in sizes[1:]:
            script, flags = at_size(scale, sizes[0], invariant(scale))
            yield "same-age", size, script, flags | {"prox-com": 8 * size / sizes[0]}
        # PPO has no n_pi, so here is a little PPG-EWMA to see that adjustment at work.
        for size in (64, 4):
            yield "ppg-ewma", size, *at_size(scale, size, ppg(scale, ewma=True))
        script, flags = at_size(scale, 4, ppg(scale, ewma=True))
        yield "ppg-ewma-no-n-pi", 4, script, flags | {"no-adjust": ["n-pi"]}


def ewma(scale):
    """Fig. 4, 17."""
    for name, algorithm in [("ppo", ppo), ("ppg", ppg)]:
        for suffix, with_ewma in [("", False), ("-ewma", True)]:
            script, flags = algorithm(scale, ewma=with_ewma)
            yield "algorithms", name + suffix, script, at_default_size(scale, flags)
    if scale == "small":
        # With one epoch of 8 minibatches, PPO's old policy is 3.5 steps old in the mean. Is it the age that matters?
        script, flags = ppo(scale, ewma=True)
        yield "as-old-as-ppo", "ppo-ewma", script, at_default_size(scale, flags | {"prox-com": 3.5})


def linear_lr(scale):
    """Fig. 5, 16."""
    for size in SIZES[scale]:
        script, flags = at_size(scale, size, invariant(scale))
        yield "linear", size, script, flags | {"lr-rule": "linear"}


def adam_betas(scale):
    """Fig. 6. At the reference the betas are as stated whatever the rule, so those runs are listed once."""
    for betas in ["none", "beta2", "both"]:
        for size in SIZES[scale][betas != "none" :]:
            script, flags = at_size(scale, size, invariant(scale))
            yield betas, size, script, flags | {"adjust-betas": betas}


def com_vs_kl(scale):
    """Fig. 18. The paper's text gives the default corner, not the grid: we halve the one and double the other."""
    number = {"paper": 5, "small": 4, "smoke": 2}[scale]
    steps = {"paper": {"total-timesteps": 20_000_000}, "small": {}, "smoke": {"total-timesteps": 192}}[scale]
    for power in range(number):
        for halvings in range(number):
            com = 8 / 2**halvings
            script, flags = at_size(scale, 1, invariant(scale))
            flags |= steps | KL_PENALTY | {"kl-coef": 2**power, "prox-com": com}
            yield f"kl-{2**power}", f"com-{com:g}", script, flags


# name: settings; games and number of seeds at each scale. Smoke: starpilot, where episodes are short. Small, ewma:
# starpilot, and the two of fruitbot, dodgeball, bigfish, chaser, bossfight and leaper where a run of PPO with seed 101
# learnt most.
EXPERIMENTS = {
    "staleness": (staleness, {"paper": (GAMES, 4), "small": (["starpilot"], 3), "smoke": (["starpilot"], 2)}),
    "batch-size": (batch_size, {"paper": (GAMES, 3), "small": (["starpilot"], 3), "smoke": (["starpilot"], 2)}),
    "ewma": (
        ewma,
        {"paper": (GAMES, 4), "small": (["starpilot", "fruitbot", "dodgeball"], 3), "smoke": (["starpilot"], 2)},
    ),
    "linear-lr": (linear_lr, {"paper": (GAMES, 3), "small": (["starpilot"], 3), "smoke": (["starpilot"], 2)}),
    "adam-betas": (adam_betas, {"paper": (["heist"], 3), "small": (["heist"], 3), "smoke": (["starpilot"], 2)}),
    "com-vs-kl": (com_vs_kl, {"paper": (["starpilot"], 2), "small": (["starpilot"], 2), "smoke": (["starpilot"], 1)}),
}


def runs_of(experiment, scale, games=None, seeds=None):
    """All runs of an experiment; seeds outermost, so that an unfinished sweep has something of everything."""
    settings, defaults = EXPERIMENTS[experiment]
    default_games, number = defaults[scale]
    seeds = seeds or range(1, number + 1)
    return [
        Run(experiment, scale, variant, str(value), game, seed, script, BASE[scale] | flags)
        for seed in seeds
        for game in games or default_games
        for variant, value, script, flags in settings(scale)
    ]
