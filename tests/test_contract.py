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
PAIRS = [("ppo", "ppo_ewma", "EWMA", 30), ("ppg", "ppg_ewma", "EWMA", 33), ("ppo", "ppg", "PPG", 146)]
PAIRS += [("ppo", "staleness", "STALE", 50)]
END = "The algorithm is complete."
LOOP = "    for iteration in "


def opcodes(base, variant):
    matcher = difflib.SequenceMatcher(None, LINES[base], LINES[variant], autojunk=False)
    return [code for code in matcher.get_opcodes() if code[0] != "equal"]


def tagged(script, tag):
    """The numbers of the lines that "# TAG" stands for: its own line, or as many as it says, from its own on."""
    covered = set()
    for i, line in enumerate(LINES[script]):
        if found := re.search(rf"# {tag}(?:, (\d+) lines)?\b", line):
            covered |= set(range(i, i + int(found[1] or 1)))
    return covered


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_import_only_the_packages_of_the_field(script):
    tree = ast.parse(TEXT[script])
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in names}
    assert roots - set(sys.stdlib_module_names) <= {"torch", "procgen"}


@pytest.mark.parametrize("base, variant, tag, most", PAIRS)
def test_the_tags_give_exactly_the_changes_and_there_are_few(base, variant, tag, most):
    """What grep finds is what differs: every changed line is tagged, and every tagged line is changed."""
    codes = opcodes(base, variant)
    changed = {n for _, _, _, k, m in codes for n in range(k, m) if LINES[variant][n].strip()}
    covered = {n for n in tagged(variant, tag) if LINES[variant][n].strip()}
    show = "\n".join(f"{n + 1}: {LINES[variant][n]}" for n in sorted(changed ^ covered))
    assert changed == covered, show
    assert sum(j - i + m - k for _, i, j, k, m in codes) <= most
    assert all(m > k for _, _, _, k, m in codes), "lines are taken away, and no tag can say so"


def test_no_tag_of_another_file():
    for base, tags in [("ppo", "EWMA|PPG|STALE"), ("ppo_ewma", "PPG|STALE"), ("ppg", "EWMA|STALE")]:
        assert not re.search(rf"# ({tags})\b", TEXT[base]), base


@pytest.mark.parametrize("script, loop, end", [("ppo", 290, 390), ("ppg", 335, 480)])
def test_the_algorithm_comes_first_and_soon(script, loop, end):
    """The loop starts early, the algorithm ends soon after it, and what follows is not about it."""
    numbers = {text: n for n, line in enumerate(LINES[script], 1) for text in (LOOP, END) if text in line}
    assert numbers[LOOP] <= loop and numbers[END] <= end
    head, plumbing = TEXT[script].split(END)
    for name in ["adjust_for_batch_size", "class Agent", "def gae", "def policy_loss", "def main"]:
        assert name in head and f"def {name.split()[-1]}" not in plumbing, name
    for name in ["def fail", "def parse_args", "class Run", "def load_checkpoint", "def adjustment_table"]:
        assert name in plumbing and name not in head, name


@pytest.mark.parametrize("base, variant", [("ppo", "ppo_ewma"), ("ppg", "ppg_ewma")])
def test_ewma_changes_neither_the_title_nor_the_reading_order(base, variant):
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
    assert len(rest) == 3 and all(line[0] == "+" for line in rest), rest
    assert "# EWMA, 3 lines" in rest[0]


def test_ewma_and_ppg_keep_three_lines_apart():
    """In ppg_ewma.py, at least three lines that ppo.py has too lie between a line of EWMA and a line of PPG."""

    ewma, ppg = tagged("ppg_ewma", "EWMA"), tagged("ppg_ewma", "PPG")
    reset = next(n for n, line in enumerate(LINES["ppg_ewma"]) if "# EWMA, 3 lines: a new average" in line)
    ewma -= {reset, reset + 1, reset + 2}  # the one place where the two meet
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
    own["ppg"] |= {"aux-value-coef", "beta-clone", "arch", "aux-buffer-dir"}
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


def metadata(script):
    """The lines of a script's block of inline metadata (PEP 723), by the specification's own expression."""
    pattern = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
    (block,) = [x for x in re.finditer(pattern, TEXT[script]) if x["type"] == "script"]
    return [line[2:].strip() for line in block["content"].splitlines()]


def test_the_five_blocks_for_uv_and_the_requirements_agree():
    blocks = {script: metadata(script) for script in SCRIPTS}
    assert all(block == blocks["ppo"] for block in blocks.values())
    assert blocks["ppo"][0] == 'requires-python = ">=3.10,<3.13"'
    packages = {re.match(r'"([\w-]+==[\d.]+)', line)[1] for line in blocks["ppo"] if line.startswith('"')}
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    required = {line.split(";")[0] for line in lines if line and not line.startswith("#")}
    assert packages == {
        x for x in required if x.split("==")[0] not in ("pytest", "pytest-xdist", "pytest-timeout", "ruff")
    }
    for line in lines:  # the two builds of Procgen, each for its Pythons
        if line.startswith("procgen"):
            name, marker = line.split(";")[0], re.search(r'python_version (==|>=) "(3\.\d+)"', line)
            assert any(name in x and f"{marker[1]} '{marker[2]}'" in x for x in blocks["ppo"]), line
