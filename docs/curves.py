"""The learning curves of the tables in results/ and its folders, and what the texts say about them."""

import csv
import re
from collections import defaultdict
from statistics import mean, stdev

from annotate import BuildError, to_html

# The order on the page, which is that of the texts in results/; others follow.
ORDER = "learning dial minatar-ppg_batch-size minatar-ppg_batch-size_advantage_std".split()
ORDER += "minatar-ppg_more minatar-ppg_age".split()
ORDER += "minatar_batch-size minatar_why minatar_sgd minatar_batch-size_advantage_std".split()
ORDER += "minatar_linear-lr minatar_adam-betas minatar-ppg_com-vs-kl cartpole_sgd cartpole cartpole_betas".split()
ORDER += "minatar_staleness minatar_slow minatar_slower minatar_ewma small_batch-size small_staleness bf16".split()
ORDER += "batch-size batch-size_advantage_std staleness ewma".split()
TEXTS = ["README.md", "SMALL_ENOUGH.md", "SPEED.md", "FIRST.md"]  # of results/
CROSSES = {"learning": ("authors_ppo", "authors’ PPO, full size")}  # a table of single points, drawn as crosses
SETTINGS = ("game", "variant", "value")


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def experiments(folder, claims):
    """Tables with learning curves: a step, a return or a standard deviation, and which run it is of."""
    found = {}
    for path in [*sorted(folder.glob("*.csv")), *sorted(folder.glob("*/*.csv"))]:
        rows, name = read_csv(path), "_".join(path.relative_to(folder).with_suffix("").parts)
        columns = rows[0].keys() if rows else set()
        measured = next((name for name in ("return", "std") if name in columns), None)
        if measured and "step" in columns and columns & {"value", "label"}:
            try:
                found[name] = experiment(name, rows, measured, path, folder, claims.get(name))
            except (TypeError, ValueError, KeyError) as error:
                raise BuildError(f"{path}: not a table of learning curves ({error})") from None
    order = sorted(found, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    return [found[name] for name in order]


def experiment(name, rows, measured, path, folder, claim):
    runs = defaultdict(list)
    for row in rows:
        setting = [row.get("game", ""), row.get("variant", ""), row.get("value", row.get("label"))]
        seed = row.get("seed") or re.sub(r".*?(\d+)$", r"\1", row.get("run", "1"))
        runs[(*setting, seed)].append((float(row["step"]), float(row[measured])))
    steps, curves = [], []
    for (game, variant, value, seed), points in runs.items():
        points.sort()
        xs = [round(x) for x, _ in points]
        if xs not in steps:
            steps.append(xs)
        ys = [float(f"{y:.4g}") for _, y in points]
        run = {"game": game, "variant": variant, "value": value, "seed": seed}
        curves.append(run | {"steps": steps.index(xs), "y": ys})
    return {
        "name": name,
        "crosses": crosses(folder, *CROSSES[name]) if name in CROSSES else None,
        "labels": claim["labels"] if claim else {},
        "title": claim["title"] if claim else name.replace("_", ", ").replace("-", " ").capitalize(),
        "lines": claim["lines"] if claim else "",
        "log": measured == "std",
        "measured": "standard deviation of the advantages" if measured == "std" else "return",
        "values": ordered(curve["value"] for curve in curves),
        "variants": list(dict.fromkeys(curve["variant"] for curve in curves)),
        "games": sorted({curve["game"] for curve in curves}),
        "seeds": ordered(curve["seed"] for curve in curves),
        "curves": curves,
        "steps": steps,
        "claim": to_html(re.sub(r"^(?:- |Words: ).*\n", "", claim["body"], flags=re.M)) if claim else "",
        "words": to_html("".join(re.findall(r"^Words: (.*\n)", claim["body"], re.M))) if claim else "",
        "settings": settings(claim["body"], {curve["variant"] for curve in curves}) if claim else "",
        "table": table(path.with_name(f"{path.stem}_runs.csv"), curves, steps, claim["labels"] if claim else {}),
        "findings": findings(folder, path.relative_to(folder).with_suffix(""), claim and claim["about"]),
    }


def crosses(folder, name, label):
    path = folder / f"{name}.csv"
    points = [[float(row["step"]), float(row["return"])] for row in read_csv(path)] if path.exists() else []
    return {"label": label, "points": points} if points else None


def settings(body, variants):
    """What claims.md says about the settings that are there: its items, each of which begins with a setting's name."""
    return to_html("\n".join(line for line in re.findall(r"^- .*", body, re.M) if line.split("`")[1] in variants))


def ordered(values):
    """Each value once; numbers by size, words as they come."""
    values = list(dict.fromkeys(values))
    return sorted(values, key=float) if all(re.fullmatch(r"[\d.]+", value) for value in values) else values


def table(path, curves, steps, labels):
    """What each setting ends with, over the last tenth of a run: mean and standard deviation over seeds."""
    ends = defaultdict(list)
    if path.exists():
        for row in read_csv(path):
            if row.get("final_return"):
                ends[tuple(row[name] for name in SETTINGS)].append(float(row["final_return"]))
    else:
        for curve in curves:
            xs = steps[curve["steps"]]
            late = [y for x, y in zip(xs, curve["y"], strict=True) if x > 0.9 * xs[-1]]
            ends[tuple(curve[name] for name in SETTINGS)].append(mean(late))
    values = ordered(value for _, _, value in ends)
    lines = []
    for game, variant in dict.fromkeys((game, variant) for game, variant, _ in ends):
        cells = [ends.get((game, variant, value), []) for value in values]
        spread = [f" ± {stdev(cell):.2f}" if len(cell) > 1 else "" for cell in cells]
        cells = [f"{mean(cell):.2f}{s}" if cell else "" for cell, s in zip(cells, spread, strict=True)]
        label = f": {labels[variant].format('')}".rstrip() if variant in labels else ""
        lines.append({"name": (", ".join(filter(None, [game, variant])) or "at the end") + label, "cells": cells})
    return {"values": values, "lines": lines, "seeds": max(map(len, ends.values()))}


def how(folder):
    """How the runs were made, as results/README.md says, and whether some still wait for those of results/PLAN.md."""
    path = folder / "README.md"
    text = re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.S) if path.exists() else ""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # links, of that file
    scale = re.search(r"^- \*\*Scale\.\*\* (.*?)(?=^- |\n\n)", text, re.S | re.M)
    rows = [row for path in folder.glob("*_runs.csv") for row in read_csv(path)]
    waiting = (folder / "PLAN.md").exists() and any(row.get("scale") == "first" for row in rows)
    return {"scale": to_html(scale[1]) if scale else "", "waiting": waiting}


def findings(folder, figure, about):
    """What the texts say about it: of the section that shows its figure, the paragraphs that begin in bold; where that
    section is another's, those with the word that claims.md gives."""
    paths = [folder / name for name in TEXTS]
    text = "\n\n".join(path.read_text() for path in paths if path.exists())
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        if re.search(rf"\({re.escape(str(figure))}\.(md|png)\)", section):
            section = re.sub(r"<!--.*?-->", "", section, flags=re.S)
            section = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", section)  # links, of that file
            found = re.findall(r"^\*\*.*?(?=\n\n|\Z)", section, re.S | re.M)
            return to_html("\n\n".join(paragraph for paragraph in found if (about or "") in paragraph))
    return ""


def read_claims(path):
    """What the paper says, by the name of an experiment. The first line: its title, what its lines differ in, and a
    word that its findings must have. A setting whose lines are called otherwise says how, after "Lines:"."""
    claims = {}
    for section in re.split(r"^## ", path.read_text(), flags=re.M)[1:]:
        name, title, body = section.split("\n", 2)
        title, lines, about = (title.strip().split(" | ") + ["", ""])[:3]
        labels = dict(re.findall(r"^- `([^`]+)`: .*? Lines: (.*)$", body, re.M))
        body = re.sub(r" Lines: .*", "", body)
        claims[name.strip()] = {"title": title, "lines": lines, "about": about, "labels": labels, "body": body}
    return claims
