"""The contract between the five files: each stands alone, and they differ only where their algorithms do.

That a copy in an empty folder runs is seen in test_command_line.py.
"""

import ast
import difflib
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, SCRIPTS, load

TEXT = {script: (ROOT / f"{script}.py").read_text() for script in SCRIPTS}
LINES = {script: text.splitlines() for script, text in TEXT.items()}
PAIRS = [("ppo", "ppo_ewma", "EWMA", 32), ("ppg", "ppg_ewma", "EWMA", 34), ("ppo", "ppg", "PPG", 180)]
PAIRS += [("ppo", "staleness", "STALE", 42)]


def hunks(base, variant):
    matcher = difflib.SequenceMatcher(None, LINES[base], LINES[variant], autojunk=False)
    return [(LINES[base][i:j], LINES[variant][k:m]) for tag, i, j, k, m in matcher.get_opcodes() if tag != "equal"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_import_only_the_packages_of_the_field(script):
    tree = ast.parse(TEXT[script])
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in names}
    assert roots - set(sys.stdlib_module_names) <= {"torch", "numpy", "procgen", "tqdm"}


@pytest.mark.parametrize("base, variant, tag, most", PAIRS)
def test_every_difference_is_tagged_and_there_are_few(base, variant, tag, most):
    changes = hunks(base, variant)
    assert changes
    for removed, added in changes:
        assert any(tag in line for line in added), "\n".join([*removed, "->", *added])
    assert sum(len(removed) + len(added) for removed, added in changes) <= most


@pytest.mark.parametrize("base, variant", [("ppo", "ppo_ewma"), ("ppg", "ppg_ewma")])
def test_ewma_changes_neither_the_title_nor_the_reading_order(base, variant):
    assert LINES[base][:16] == LINES[variant][:16]
    doc = [load(x).__doc__ for x in (base, variant)]
    assert doc[1].startswith(doc[0].rstrip())


def test_the_ewma_patch_is_one_patch(tmp_path):
    """ppo.py to ppo_ewma.py, applied to ppg.py without fuzz, is ppg_ewma.py but for starting anew with each phase."""
    for script in ("ppo", "ppo_ewma", "ppg"):
        shutil.copy(ROOT / f"{script}.py", tmp_path)
    patch = subprocess.run(["diff", "-u", "ppo.py", "ppo_ewma.py"], cwd=tmp_path, capture_output=True, text=True).stdout
    apply = ["patch", "--fuzz=0", "--no-backup-if-mismatch", "ppg.py"]
    applied = subprocess.run(apply, cwd=tmp_path, input=patch, capture_output=True, text=True)
    assert applied.returncode == 0 and "fuzz" not in applied.stdout, applied.stdout
    patched = (tmp_path / "ppg.py").read_text().splitlines()
    rest = [line for line in difflib.ndiff(patched, LINES["ppg_ewma"]) if line[0] in "+-"]
    assert len(rest) == 2 and all(line[0] == "+" for line in rest), rest
    assert "EWMA" in rest[0]


def test_ewma_and_ppg_keep_three_lines_apart():
    """In ppg_ewma.py, at least three lines that ppo.py has too lie between a line of EWMA and a line of PPG."""

    def added(variant, base):
        matcher = difflib.SequenceMatcher(None, LINES[base], LINES[variant], autojunk=False)
        return {n for tag, _, _, k, m in matcher.get_opcodes() if tag != "equal" for n in range(k, m)}

    ewma = added("ppg_ewma", "ppg")
    reset = {n for n, line in enumerate(LINES["ppg_ewma"]) if "starts with a new average" in line}
    ewma -= {n + k for n in reset for k in (0, 1)}  # the one place where the two meet
    ppg = added("ppg_ewma", "ppo_ewma")
    assert min(abs(a - b) for a in ewma for b in ppg - ewma) > 3


def flags_of(script):
    return re.findall(r'^    add\("--([a-z-]+)"', TEXT[script], re.M)


def test_flags_have_the_same_names_and_help_wherever_they_mean_the_same():
    own = {
        "ppo": {"epochs"},
        "ppo_ewma": {"epochs", "prox-com"},
        "staleness": {"epochs", "staleness", "staleness-loss"},
    }
    own["ppg"] = {"policy-epochs", "value-epochs", "n-pi", "aux-epochs", "aux-rollouts", "aux-learning-rate"}
    own["ppg"] |= {"beta-clone", "arch", "aux-buffer-dir"}
    own["ppg_ewma"] = own["ppg"] | {"prox-com"}
    common = {script: set(flags_of(script)) - own[script] for script in SCRIPTS}
    assert all(common[script] == common["ppo"] for script in SCRIPTS)
    assert all(own[script] <= set(flags_of(script)) for script in SCRIPTS)
    for flag in common["ppo"]:
        lines = {tuple(re.findall(rf'^    add\("--{flag}",.*', TEXT[script], re.M)) for script in SCRIPTS}
        assert len(lines) == 1, flag


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_read_and_has_a_help_text(script):
    for flag in flags_of(script):
        name = flag.replace("-", "_")
        assert len(re.findall(rf"\bargs\.{name}\b", TEXT[script])) >= 1, flag
        (line,) = re.findall(rf'^    add\("--{flag}".*', TEXT[script], re.M)
        assert 'help="' in line, flag
