"""The tutorial of docs/: its pages say what the scripts do, its dials compute what the scripts compute.

Dials, keys and accessibility are tested in Chromium, on pages from the file system. Without Chromium these tests are
skipped; under CI they fail.
"""

import ast
import copy
import csv
import itertools
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

from helpers import EWMA, PPG, ROOT, SCRIPTS, load, parse
from test_contract import END, LINES, PAIRS, TEXT, opcodes, tagged

FILES = [f"{script}.html" for script in SCRIPTS]
DIFFS = {f"{base}-to-{variant}.html": (base, variant, tag) for base, variant, tag, _ in PAIRS}
DIALS = ["adjust.html", "age.html", "objective.html"]
PAPER = "https://arxiv.org/abs/2110.00641"
PAGES = ["index.html", *FILES, *DIFFS, *DIALS, "results.html"]


# Building


def build(root, *flags):
    command = [sys.executable, str(root / "docs" / "build.py"), *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("docs") / "site"
    result = build(ROOT, "--out", out)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture
def project(tmp_path):
    """A copy of what the site is made from, to be changed."""
    for script in SCRIPTS:
        shutil.copy(ROOT / f"{script}.py", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("site", "__pycache__"))
    shutil.copytree(ROOT / "results", tmp_path / "results", ignore=lambda _, names: [x for x in names if "." not in x])
    return tmp_path


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "file, old, new, message",
    [
        ("ppo.py", "def gae(", "def gae2(", "does not occur in ppo.py"),
        ("ppg_ewma.py", "def update_ewma(", "def update(", "does not occur in ppg_ewma.py"),
        (
            "staleness.py",
            "\ndef value_loss(",
            "\ndef gae(reward, values, first, gamma, gae_lambda):\n    pass\n\ndef x(",
            "occurs 2 times",
        ),
        ("docs/notes/ppo.md", "```\ndef gae(", "def gae(", "must begin with the code"),
        ("docs/notes/ppo.md", r"\frac{m\,n}", r"\fraction{m\,n}", "Merging two variances"),
        ("docs/notes/ewma.md", "## No warm-up", "## The reset", 'two notes called "The reset"'),
        ("ppo.py", END, "Done.", "where the algorithm ends"),
        ("ppo.py", "def gae(", "def gae((", "ppo.py, line "),
    ],
)
def test_a_note_without_its_line_breaks_the_build(project, file, old, new, message):
    """One line that says which note and which file; and no page is written."""
    change(project / file, old, new)
    result = build(project)
    assert result.returncode == 2
    assert message in result.stderr and result.stderr.count("\n") == 1 and result.stderr.startswith("build.py: error: ")
    assert not (project / "docs" / "site").exists()


def test_a_reworded_comment_or_help_text_does_not(project):
    text = re.sub(r"^(    share = .*?)  # .*$", r"\1  # other words", TEXT["ppo"], flags=re.M)
    text = re.sub(r'("--clip-coef".*help=")[^"]*', r"\1other words", text)
    (project / "ppo.py").write_text(text)
    assert build(project).returncode == 0


def test_a_folder_with_other_things_is_left_alone(project):
    (project / "letters").mkdir()
    (project / "letters" / "mine.txt").write_text("mine")
    result = build(project, "--out", project / "letters")
    assert result.returncode == 2 and "is not empty" in result.stderr
    assert [path.name for path in (project / "letters").iterdir()] == ["mine.txt"]


def test_results_are_what_is_there(project):
    """Missing tables are left out, new ones are shown, and without any the site still builds."""
    folder = project / "results"
    (folder / "ewma.csv").unlink()
    (folder / "novel.csv").write_text("game,variant,value,seed,step,return\nheist,a,7,1,10,1.5\nheist,a,7,1,20,2.5\n")
    assert build(project).returncode == 0
    page = (project / "docs" / "site" / "results.html").read_text()
    assert 'id="ewma"' not in page and 'id="novel"' in page and "2.50" in page
    shutil.rmtree(folder)
    assert build(project).returncode == 0
    assert "no results yet" in (project / "docs" / "site" / "results.html").read_text()


@pytest.mark.parametrize(
    "flags, message", [(["--serve", "99999"], "--serve 99999"), (["--serve", "x"], "invalid int"), (["--no"], "--no")]
)
def test_bad_flags_are_one_line(flags, message):
    result = build(ROOT, *flags)
    assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_a_damaged_table_is_one_line(project):
    (project / "results" / "bad.csv").write_text("value,seed,step,return\n7,1,ten,1.5\n")
    result = build(project)
    assert result.returncode == 2 and "bad.csv" in result.stderr and result.stderr.count("\n") == 1


def test_serve_rebuilds_when_a_file_changes(project):
    """On loopback alone. A note that breaks the build is reported, and the server stays."""
    command = [sys.executable, str(project / "docs" / "build.py"), "--serve", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert "14 pages" in server.stdout.readline()
            address = re.match(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())[0]
            change(project / "docs" / "notes" / "ppo.md", "## Value loss", "## Value loss, renamed")
            assert "14 pages" in server.stdout.readline()
            assert "Value loss, renamed" in urllib.request.urlopen(f"{address}ppo.html").read().decode()
            change(project / "ppo.py", "def gae(", "def gae2(")
            assert "does not occur in ppo.py" in server.stderr.readline()
            assert urllib.request.urlopen(address).status == 200
        finally:
            server.kill()


# What the pages say


class Page(HTMLParser):
    """Lines of code by the id of the part they are in, links, ids, headings, and the text of notes."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.lines, self.stack, self.sources = [], [], [], [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        self.links += [attributes[name] for name in ("href",) if name in attributes]
        self.sources += [attributes["src"]] if "src" in attributes else []
        if tag not in ("meta", "link", "input", "br", "circle", "line", "rect", "mspace"):
            self.stack.append((tag, attributes))
            if "l" in attributes.get("class", "").split():
                inside = {x.get("id") for _, x in self.stack} | {
                    y for _, x in self.stack for y in x.get("class", "").split()
                }
                self.lines.append([attributes, inside, ""])

    def handle_endtag(self, tag):
        if tag in [name for name, _ in self.stack]:
            while self.stack.pop()[0] != tag:
                pass

    def handle_data(self, data):
        if any("l" in x.get("class", "").split() for _, x in self.stack):
            self.lines[-1][2] += data


@pytest.fixture(scope="session")
def pages(site):
    return {name: Page(site / name) for name in PAGES}


def test_all_pages_are_there(site):
    assert sorted(path.name for path in site.glob("*.html")) == sorted(PAGES)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_file_is_shown_to_the_letter(pages, script):
    shown = pages[f"{script}.html"].lines
    algorithm = "".join(text for _, inside, text in shown if "algorithm" in inside)
    assert algorithm == TEXT[script][: TEXT[script].rindex("\n", 0, TEXT[script].index(END)) + 1]
    assert "".join(text for _, _, text in shown) == TEXT[script]
    assert [int(attributes["data-n"]) for attributes, _, _ in shown] == list(range(1, len(LINES[script]) + 1))


@pytest.mark.parametrize("name", DIFFS)
def test_each_tagged_line_is_marked_and_the_rest_is_there(pages, name):
    """New lines on the right are the tagged ones; both files can be put together again from what is shown."""
    base, variant, tag = DIFFS[name]
    lines = [x for x in pages[name].lines if "theirs" not in x[1]]
    new = {int(x["data-n"]) - 1 for x, _, _ in lines if "tag-new" in x["class"]}
    assert {n for n in new if LINES[variant][n].strip()} == {
        n for n in tagged(variant, tag) if LINES[variant][n].strip()
    }
    right = [text for x, inside, text in lines if "left" not in inside]
    assert "".join(right) == TEXT[variant]
    old = {int(x["data-n"]) - 1: text for x, _, text in lines if "tag-old" in x["class"]}
    gone = {n for _, i, j, _, _ in opcodes(base, variant) for n in range(i, j)}
    assert old == {n: f"{LINES[base][n]}\n" for n in gone}


@pytest.mark.parametrize("name", DIFFS)
def test_changed_words_are_marked_within_a_swapped_line(site, name):
    for change in (site / name).read_text().split('<section class="change ')[1:]:
        own = change.split("</section>")[0].split('<div class="theirs">')[0]
        assert ('class="l tag-old"' in own) == ("<mark>" in own)


@pytest.mark.parametrize("name", DIFFS)
def test_each_change_has_a_note(site, name):
    changes = (site / name).read_text().split('<section class="change ')[1:]
    assert len(changes) == len(opcodes(*DIFFS[name][:2]))
    assert all('<div class="note">' in change for change in changes)


def test_the_patches_laid_over_each_other_are_the_same(pages):
    """Of the changes to PPG, PPO's own are shown beside them, line for line; only the reset is left over."""
    lines = pages["ppg-to-ppg_ewma.html"].lines
    theirs = [text for _, inside, text in lines if "theirs" in inside]
    twins = [
        text for x, inside, text in lines if "tag-new" in x["class"] and "twin" in inside and "theirs" not in inside
    ]
    alone = [text for x, inside, text in lines if "tag-new" in x["class"] and "twin" not in inside]
    assert theirs == twins and len(twins) > 20
    assert len(alone) == 3 and "a new average" in alone[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_function_of_the_algorithm_has_a_note(site, script):
    page = (site / f"{script}.html").read_text()
    algorithm = page[page.index('id="algorithm"') :]
    for number, line in enumerate(LINES[script], 1):
        if END in line:
            break
        if re.match(r"(def|class) (?!main)", line):
            before = algorithm[: algorithm.index(f'id="L{number}"')]
            row = before[before.rindex('<div class="row') :]
            assert row.startswith('<div class="row noted">'), line


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_row_of_a_file_tears_a_statement(site, script):
    """A row begins at a statement, and not at the first of an if, for or with, whose head would stay behind."""
    rows = (site / f"{script}.html").read_text().split('<div class="row')[1:]
    begins = {int(re.search(r'id="L(\d+)"', row)[1]) for row in rows}
    assert len(begins) == len(rows) > 40
    for node in ast.walk(ast.parse(TEXT[script])):
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and not ast.unparse(node).startswith(("'", '"')):
            assert not begins & set(range(node.lineno + 1, node.end_lineno + 1)), ast.unparse(node)
        if isinstance(node, ast.If | ast.For | ast.With):
            assert not begins & set(range(node.lineno + 1, node.body[0].lineno + 1)), ast.unparse(node)


def test_a_variant_has_its_own_notes_where_ppo_s_would_be_wrong(site):
    """With stale data the ratio need not start at 1, and the old policy is older; PPG has two Adams."""
    for script, gone, own in [
        ("staleness", "the-ratio-starts-at-1", "where-the-ratio-starts"),
        ("staleness", "how-old-is-the-old-policy", "how-old-are-the-two-policies"),
        ("ppg", "one-adam-for-all-weights", "one-adam-for-the-policy-phase"),
        ("ppg_ewma", "one-adam-for-all-weights", "one-adam-for-the-policy-phase"),
    ]:
        ids = Page(site / f"{script}.html").ids
        assert gone not in ids and own in ids and gone in Page(site / "ppo.html").ids


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(pages, site, name):
    page = pages[name]
    assert len(page.ids) == len(set(page.ids))
    for link in {*page.links, *page.sources} - {"data:,"}:
        path, _, anchor = link.partition("#")
        if link == PAPER:  # to be followed, not loaded
            continue
        assert ":" not in link, f"{link}: leaves the site"
        assert (site / (path or name)).exists(), link
        assert not anchor or anchor in pages[path or name].ids, link
    assert PAPER in page.links and PAPER not in page.sources
    assert not re.search(r"url\(|@import|https?://", (site / "style.css").read_text())


@pytest.mark.parametrize("name", PAGES)
def test_equations_are_mathematics(site, name):
    text = (site / name).read_text()
    for body in re.findall(r'<(?:section|div) class="note".*?</(?:section|div)>', text, re.S):
        assert "$" not in body and "\\" not in body and 'class="err' not in body, body
    if name in (*FILES, *DIFFS, "objective.html"):
        assert text.count('<math display="block">') > 0


def test_the_tables_of_results_are_those_of_the_runs(site):
    text = (site / "results.html").read_text()
    names = ["batch-size", "staleness", "ewma"]
    for name in [*names, *(f"minatar_{name}" for name in names), "minatar-ppg_batch-size"]:
        path = ROOT / "results" / f"{name.replace('_', '/')}_runs.csv"
        if path.exists():
            runs = pd.read_csv(path, dtype={"value": str})
            section = text[text.index(f'id="{name}"') :].split("</section>")[0]
            for (game, variant, value), group in runs.groupby(["game", "variant", "value"]):
                label = ": as young as with" if variant == "same-age" else ""  # these all have as many environments
                row = section.split(f'<th scope="row">{game}, {variant}{label}</th>')[1].split("</tr>")[0]
                header = re.findall(r'<th scope="col">(.*?)</th>', section)
                cell = re.findall(r"<td>(.*?)</td>", row)[header.index(value)]
                ends = group["final_return"]
                assert cell == f"{ends.mean():.2f} ± {ends.std():.2f}"


def section_of(site, name):
    text = (site / "results.html").read_text()
    return text[text.index(f'id="{name}"') :].split("</section>")[0]


def test_tables_without_a_list_of_runs_are_of_the_last_tenth_of_a_run_too(site):
    curves = pd.read_csv(ROOT / "results" / "learning.csv")
    curves["late"] = curves["step"] > 0.9 * curves.groupby("run")["step"].transform("max")
    ends = curves[curves["late"]].groupby(["label", "run"], sort=False)["return"].mean().groupby("label", sort=False)
    section = section_of(site, "learning")
    assert "averaged over the last tenth of a run" in section and "over seeds" in section
    assert re.findall(r"<td>([^<]+)</td>", section) == [f"{x.mean():.2f} ± {x.std():.2f}" for _, x in ends]


def test_the_results_come_in_the_order_of_their_texts_and_say_how_they_were_made(site):
    text = (site / "results.html").read_text()
    names = "how learning minatar-ppg_batch-size minatar_batch-size cartpole_sgd minatar_staleness minatar_ewma bf16 "
    names += "batch-size staleness ewma"
    places = [text.index(f'id="{name}"') for name in names.split()]
    assert places == sorted(places)
    scale = re.search(r"\*\*Scale\.\*\* (\w+)", (ROOT / "results" / "README.md").read_text())[1]
    assert scale in text[places[0] : places[1]] and "Full size" in text[places[0] : places[1]]


def test_the_swing_of_advantages_has_its_own_finding_and_a_true_caption(site):
    section = section_of(site, "batch-size_advantage_std")
    findings = section.split('<div class="findings">')[1].split("</div>")[0]
    assert findings.count("<p>") == 1 and "swing by a factor" in findings
    seeds = pd.read_csv(ROOT / "results" / "batch-size_advantage_std.csv")["seed"].nunique()
    assert ("one seed</summary>" in section) == (seeds == 1)
    assert "<em>Distance</em>" in section_of(site, "batch-size")


# In a browser


@pytest.fixture(scope="session")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        reason = "no Chromium here: apt-get install chromium"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, site):
    """Opens a page of the site. At the end: nothing in the console, no request but to files of the site."""
    contexts, messages, requests = [], [], []

    def open_page(name, width=1000, scheme="light", **options):
        options = {
            "viewport": {"width": width, "height": 900},
            "color_scheme": scheme,
            "reduced_motion": "reduce",
        } | options
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto((site / name.split("#")[0]).as_uri() + "".join(name.partition("#")[1:]))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert messages == []
    assert all(url.startswith((site.as_uri(), "data:")) for url in requests), requests


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_and_is_accessible(visit, name, scheme):
    """At three widths; the checker, which is slow, at the narrowest in the dark and at the widest in the light."""
    widths = {"dark": [1000, 380], "light": [1000, 1600]}[scheme]
    page = visit(name, scheme=scheme)
    for width in widths:
        page.set_viewport_size({"width": width, "height": 900})
        fits = "width => document.documentElement.scrollWidth <= width"
        page.wait_for_function(fits, arg=width, timeout=5000)  # charts are drawn again a moment later
    page.reload()  # as it is when it opens at this width
    result = Axe().run(page, options={"resultTypes": ["violations"], "preload": False})
    found = [(x["id"], x["nodes"][0]["html"][:150], len(x["nodes"])) for x in result.response["violations"]]
    assert found == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_without_javascript_has_its_equations_and_code(visit, name):
    page = visit(name, java_script_enabled=False)
    boxes = [x.bounding_box() for x in page.locator("math[display=block]").all()[:5]]
    assert all(box is None or box["height"] > 10 for box in boxes)
    if name in FILES:
        assert page.locator("#algorithm .note").first.is_visible() and boxes
        page.locator(".plumbing summary").click()
        assert page.locator(".plumbing .l").first.is_visible()
    if name == "adjust.html":
        rules = [x.is_visible() for x in page.locator("td.rule math").all()]
        assert len(rules) == 12 and sum(rules) == 10  # two have another form for the linear rule
    if name == "ppg-to-ppg_ewma.html":
        page.locator("#overlay").check()
        assert page.locator(".theirs").first.is_visible()


def test_notes_stand_beside_their_lines_or_above_them(visit):
    for width, beside in [(380, False), (1000, False), (1600, True)]:
        page = visit("ppo.html", width)
        row = page.locator(".row.noted", has_text="Generalised advantage estimation")
        note, code = row.locator(".note").bounding_box(), row.locator("pre").bounding_box()
        assert (note["x"] >= code["x"] + code["width"]) == beside
        assert beside or note["y"] + note["height"] <= code["y"] + 1


def test_the_four_panels_stand_in_one_column_or_two(visit):
    page = visit("index.html")
    for width in (380, 600, 700, 1000, 1200, 1299, 1400, 1720):
        page.set_viewport_size({"width": width, "height": 900})
        lefts = page.locator(".panels > div").evaluate_all("all => all.map((x) => x.getBoundingClientRect().x)")
        assert len(lefts) == 4 and len(set(lefts)) == (1 if width < 640 else 2)


@pytest.mark.parametrize("name, width", [("ppo.html", 380), ("ppo-to-ppg.html", 1000)])
def test_a_line_that_does_not_fit_continues_further_in_than_it_began(visit, name, width):
    read = """all => all.map((line) => {
        const lefts = [], range = document.createRange(), walker = document.createTreeWalker(line, 4);
        for (let node; (node = walker.nextNode()); ) {
            for (let i = 0; i < node.length; i++) {
                range.setStart(node, i);
                range.setEnd(node, i + 1);
                const box = range.getBoundingClientRect();
                if (node.data[i].trim()) lefts.push([Math.round(box.top), box.left]);
            }
        }
        const first = lefts.filter(([top]) => top === lefts[0]?.[0]);
        const rest = lefts.filter(([top]) => top > lefts[0]?.[0] + 5);
        const least = (pairs) => Math.min(...pairs.map((pair) => pair[1]));
        return rest.length ? [least(first), least(rest)] : null;
    })"""
    page = visit(name, width)
    lines = page.locator("#algorithm .l" if name == "ppo.html" else ".change .l").evaluate_all(read)
    wrapped = [line for line in lines if line]
    assert len(wrapped) > 20
    assert all(first <= rest for first, rest in wrapped)  # equal: a single word, all of it on the next row
    assert sum(first < rest for first, rest in wrapped) > 0.9 * len(wrapped)


def test_printed_pages_show_code_and_notes(visit):
    page = visit("ppo_ewma.html")
    page.emulate_media(media="print")
    assert page.locator("#algorithm .note").first.is_visible() and page.locator("#algorithm .l").first.is_visible()
    assert not page.locator(".contents").is_visible()


def test_keys_go_from_change_to_change(visit):
    page = visit("ppo-to-ppo_ewma.html")
    focused = "document.activeElement.id"
    last = page.locator(".change").count()
    for key, expected in [("n", 1), ("n", 2), ("p", 1), ("p", 1), *(("n", min(k, last)) for k in range(2, last + 2))]:
        page.keyboard.press(key)
        assert page.evaluate(focused) == f"change-{expected}"
        assert page.locator("#place").inner_text() == f"{expected} of {last}"
        assert page.locator(f"#change-{expected}").evaluate("x => x.getBoundingClientRect().top < innerHeight")
    page.locator("#previous").click()
    assert page.evaluate(focused) == f"change-{last - 1}"
    page = visit("ppo-to-ppo_ewma.html#change-3")
    page.keyboard.press("n")
    assert page.evaluate(focused) == "change-4"


def test_the_first_tab_skips_to_the_content(visit):
    page = visit("ppo.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_a_link_to_a_folded_line_opens_it(visit):
    number = next(n for n, line in enumerate(LINES["ppo"], 1) if line.startswith("class Run"))
    page = visit(f"ppo.html#L{number}")
    assert page.locator(f"#L{number}").is_visible()


# The dial of the batch size


ABLATIONS = [[], ["lr"], ["adv-norm"], ["prox"], ["n-pi"], ["lr", "adv-norm", "prox", "n-pi"]]
STATED = [{}, {"learning_rate": 3e-4, "prox_com": 2.5, "n_pi": 5, "aux_rollouts": 3, "reference_num_envs": 24}]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_batch_size_dial_computes_what_the_script_does(visit, script):
    sizes = [1, 2, 3, 4, 7, 16, 24, 48, 64, 100, 256, 512, 1024]
    cases, expected, given = [], [], parse(script)[0]
    for n, none, rule, betas, stated in itertools.product(
        sizes, ABLATIONS, ["sqrt", "linear"], ["none", "beta2", "both"], STATED
    ):
        args = copy.copy(given)
        vars(args).update(num_envs=n, no_adjust=none, lr_rule=rule, adjust_betas=betas, **stated)
        cases.append({name: x for name, x in vars(args).items() if isinstance(x, int | float | str | list)})
        expected.append(vars(load(script).adjust_for_batch_size(args)))
    page = visit("adjust.html")
    found = page.evaluate("([script, cases]) => cases.map((args) => Adjust.used(script, args))", [script, cases])
    assert len(found) == len(expected) == 936
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(mine[name] == pytest.approx(theirs[name], rel=1e-12) for name in mine)


def set_controls(page, controls):
    for name, x in controls.items():
        field = page.locator(f"#{name}")
        if field.evaluate("x => x.tagName") == "SELECT":
            field.select_option(x)
        else:
            field.evaluate("(x, v) => { x.value = v; x.dispatchEvent(new Event('input', { bubbles: true })); }", str(x))


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "controls, none",
    [
        ({"num-envs": 256}, []),
        ({"num-envs": 16}, []),
        ({"num-envs": 1, "adjust-betas": "both"}, ["lr"]),
        ({"num-envs": 64, "lr-rule": "linear", "learning-rate": 0.001, "prox-com": 3, "n-pi": 7}, ["adv-norm"]),
        ({"num-envs": 512, "reference-num-envs": 128, "adjust-betas": "beta2"}, ["prox", "n-pi"]),
    ],
)
def test_what_the_batch_size_dial_shows(visit, script, controls, none):
    """Each value is what the script would print after the command that the dial offers."""
    page = visit("adjust.html")
    set_controls(page, {"script": script} | controls)
    for name in none:
        box = page.locator(f"[data-ablation={name}]")
        if box.is_enabled():
            box.uncheck()
    command = page.locator("#command").inner_text().split()
    assert command[:2] == ["python", f"{script}.py"]
    args, used = parse(script, *command[2:])
    for name, x in vars(used).items():
        row = page.locator(f"[data-row={name}]")
        shown = row.locator("[data-cell=value]").inner_text()
        if name in ("beta1", "beta2"):  # close to 1: enough digits to tell how close
            assert 1 - float(shown) == pytest.approx(1 - x, rel=0.01)
        else:
            assert shown == f"{x:.5g}"
        assert row.locator("[data-cell=formula]").inner_text().strip()
    for name in ("lr", "aux_lr"):
        rule = page.locator(f"[data-row={name}] .rule").inner_text()
        assert ("√" in rule or page.locator(f"[data-row={name}] .rule msqrt").first.is_visible()) == (
            args.lr_rule == "sqrt"
        )
    absent = page.locator("tr.absent").evaluate_all("rows => rows.map((row) => row.dataset.row)")
    assert absent == [x for x in ("prox_com", "prox_decay") if script not in EWMA] + [
        x for x in ("n_pi", "aux_rollouts", "aux_lr") if script not in PPG
    ]
    assert args.num_envs == controls["num-envs"]
    assert set(args.no_adjust) == {
        x for x in none if (x != "prox" or script in EWMA) and (x != "n-pi" or script in PPG)
    }
    numbers = page.locator("[data-row=lr] [data-cell=formula] mn").all_text_contents()
    if "lr" not in none:
        assert numbers == [f"{x:.5g}" for x in (args.learning_rate, args.reference_num_envs / args.num_envs)]
    phase = page.locator("#sizes tr", has_text="a phase")
    assert phase.count() == (script in PPG)
    if script in PPG:
        steps = used.n_pi * args.num_envs * args.num_steps
        assert phase.locator("td").first.inner_text() == f"{steps:,}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_command_asks_for_one_policy_epoch_unless_told_not_to(visit, script):
    """Where the batch differs from the reference. The age of the average in environment steps follows."""
    page = visit("adjust.html")
    set_controls(page, {"script": script, "num-envs": 16})
    several = script not in PPG

    def ask():
        args, _ = parse(script, *page.locator("#command").inner_text().split()[2:])
        age = page.locator("#sizes tr", has_text="age of the proximal").locator("td").all_inner_texts()
        return args.epochs if several else args.policy_epochs, [float(x.replace(",", "")) for x in age]

    assert page.locator("#one-epoch").is_visible() == several
    once = ask()
    assert once == (1, [65536.0] * 2 if script in EWMA else [])
    if several:
        page.locator("#one-epoch").uncheck()
        assert ask() == (3, [pytest.approx(x / 3, abs=1) for x in once[1]])
        assert "add --epochs 1" in page.locator("#notices").inner_text()
    set_controls(page, {"num-envs": 256})
    assert not page.locator("#one-epoch").is_visible() and "epochs" not in page.locator("#command").inner_text()


def test_the_slider_and_the_field_agree_and_bad_input_is_marked(visit):
    page = visit("adjust.html")
    page.locator("#num-envs-range").focus()
    page.keyboard.press("Home")
    assert page.locator("#num-envs").input_value() == "1" and "--num-envs 1" in page.locator("#command").inner_text()
    page.keyboard.press("End")
    assert page.locator("#num-envs").input_value() == "1024"
    assert "larger batch" in page.locator("#notices").inner_text()
    for bad in ("0", "1.5", "2000", ""):
        page.locator("#num-envs").fill(bad)
        assert page.locator("#num-envs").get_attribute("aria-invalid") == "true"
    page.locator("#num-envs").fill("12")
    assert page.locator("#num-envs").get_attribute("aria-invalid") == "false"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#copy").click()
    page.wait_for_function("document.getElementById('copied').textContent !== ''")
    assert page.evaluate("navigator.clipboard.readText()") == page.locator("#command").inner_text()


def test_what_does_not_split_is_what_the_script_refuses(visit):
    page = visit("adjust.html")
    sizes = [1, 2, 3, 5, 8, 12, 24, 100, 256]
    splits = load("ppo").even_splits
    found = page.evaluate("(sizes) => sizes.map((n) => Adjust.evenSplits(n, 256))", sizes)
    assert [sorted(x) for x in found] == [sorted(splits(n, 256)) for n in sizes]
    for n in sizes:
        page.locator("#num-envs").fill(str(n))
        assert ("do not split" in page.locator("#notices").inner_text()) == (8 not in splits(n, 256))


# The dial of the age


class Network(torch.nn.Module):
    """As many weights as there are steps: after step t, weight t is 1 and all others are 0."""

    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(1, size, dtype=torch.float64)[0])


@pytest.mark.parametrize("script", EWMA)
@pytest.mark.parametrize("com", [0, 0.5, 2, 8, 32, 2048])
def test_the_age_dial_averages_as_the_script_does(visit, script, com):
    """The script's own average of networks that are unit vectors: its weights can be read off, and their mean age."""
    decay, module, most, counts = com / (com + 1), load(script), 120, (0, 1, 2, 7, 40, 120)
    policy = Network(most + 1)
    state = SimpleNamespace(prox=copy.deepcopy(policy).requires_grad_(False), prox_weight=1.0, prox_age=0.0)
    expected = {}
    for t in range(most + 1):
        if t:
            policy.weight.data = torch.eye(most + 1, dtype=torch.float64)[t]
            module.update_ewma(state, policy, decay)
        expected[t] = state.prox.weight[: t + 1].flip(0).tolist(), state.prox_age
    page = visit("age.html")
    for count in counts:
        found = page.evaluate("([n, decay]) => [Age.average(n, decay), Age.com(n, decay)]", [count, decay])
        weights, age = expected[count]
        assert found[0]["weights"] == pytest.approx(weights, abs=1e-12)
        assert sum(j * weight for j, weight in enumerate(weights)) == pytest.approx(age, abs=1e-9)
        assert found[0]["com"] == pytest.approx(age, abs=1e-9) and found[1] == pytest.approx(age, abs=1e-7)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_the_age_dial_knows_ppo_s_old_policy(visit, epochs):
    """Count the optimiser steps since the data were collected, with the script's own minibatches."""
    ages, step = [], 0
    for _ in range(4):
        collected = step
        for _ in range(epochs):
            for _ in load("ppo").minibatches(16, 4, 8):
                ages.append(step - collected)
                step += 1
    page = visit("age.html")
    assert page.evaluate("([n, epochs]) => [...Array(n).keys()].map((k) => Age.old(k, epochs))", [step, epochs]) == ages
    for envs in (1, 64, 1024):
        set_controls(page, {"epochs": str(epochs), "envs": int(np.log2(envs)), "com": 4})
        cells = page.locator("#ages tbody td").all_inner_texts()
        frames = envs * 256 / (epochs * 8)
        com = 4 * 256 / envs
        table = [np.mean(ages), max(ages), com]
        shown = [float(cell.replace(",", "")) for cell in cells]
        assert shown == pytest.approx([y for x in table for y in (x, x * frames)], rel=0.01)
    page.locator("#adjusted").uncheck()
    assert page.locator("#ages tbody td").all_inner_texts()[4] == "4"


def test_the_age_dial_draws_a_flat_average_and_a_tooth_that_follows_the_batch(visit):
    """In environment steps: pixels of the two curves, for two batch sizes."""
    page = visit("age.html")
    heights, flat = [], []
    for envs in (8, 6):  # powers of two
        set_controls(page, {"envs": envs})
        ys = {}
        for name in ("prox", "behav"):
            path = page.locator(f"#chart-env path.curve.{name}").get_attribute("d")
            ys[name] = [float(y) for y in re.findall(r",([\d.]+)", path)]
        flat.append(set(ys["prox"]))
        heights.append(max(ys["behav"]) - min(ys["behav"]))
    assert len(flat[0]) == 1 and flat[0] == flat[1]
    assert heights[0] == pytest.approx(4 * heights[1], rel=0.02)


# The dial of the objective


def objective(kind, ratio, rho, advantage, epsilon):
    """By the scripts' own loss, with pi_prox = 1: value, and gradient by log pi."""
    log_rho = torch.tensor(float(np.log(rho)), dtype=torch.float64)
    logp = torch.tensor([float(np.log(ratio))], dtype=torch.float64, requires_grad=True)
    prox, behav = torch.zeros(1, dtype=torch.float64), -log_rho
    limits, corrects = {"decoupled": (prox, behav), "behavior": (behav, behav), "recent": (prox, prox)}[kind]
    weighted = (limits - corrects).exp() * torch.tensor([advantage], dtype=torch.float64)
    loss, _ = load("staleness").policy_loss(logp, limits, weighted, epsilon)
    (-loss).backward()
    return float(-loss.detach()), float(logp.grad)


def test_the_objective_dial_is_the_scripts_loss_and_its_gradient(visit):
    kinds = ["decoupled", "behavior", "recent"]
    ratios = [0.03, 0.31, 0.52, 0.77, 0.83, 0.97, 1.03, 1.13, 1.27, 1.71, 1.99]  # none on an edge of the clip
    grid = list(itertools.product(kinds, ratios, [0.26, 0.53, 1, 1.47, 2.41], [1, -1, 0.3, -2], [0, 0.1, 0.2, 0.5]))
    expected = [objective(*case) for case in grid]
    page = visit("objective.html")
    found = page.evaluate("(grid) => grid.map((case_) => Objective.at(...case_))", grid)
    assert [x["value"] for x in found] == pytest.approx([x for x, _ in expected], abs=1e-12)
    assert [x["gradient"] for x in found] == pytest.approx([x for _, x in expected], abs=1e-12)
    assert sum(x["gradient"] == 0 for x in found) > 300


@pytest.mark.parametrize("rho, epsilon, ratio", [(1.5, 0.2, 1.0), (1.0, 0.2, 1.35), (0.5, 0.1, 0.7), (2.0, 0, 1.6)])
def test_what_the_objective_dial_shows(visit, rho, epsilon, ratio):
    page = visit("objective.html")
    set_controls(page, {"rho": rho, "eps": epsilon, "ratio": ratio})
    for kind in ("decoupled", "behavior", "recent"):
        plus, minus = (objective(kind, ratio, rho, sign, epsilon) for sign in (1, -1))
        cells = page.locator(f"#objectives tr[data-kind={kind}] td").all_inner_texts()
        shown = [float(x.replace("−", "-")) for x in cells]
        assert shown == pytest.approx([plus[0], minus[0], plus[1], minus[1]], abs=5e-4)
    words = page.locator("#objective-line").inner_text()
    stuck = {sign: objective("behavior", 1.0, rho, sign, epsilon)[1] == 0 for sign in (1, -1)}
    assert ("no gradient where A > 0" in words) == stuck[1] and ("no gradient where A < 0" in words) == stuck[-1]
    page.locator("[data-kind=recent]").first.uncheck()
    assert page.locator("#objectives tbody tr").count() == 2
    assert page.locator("#value-plus path.curve").count() == 2


@pytest.mark.parametrize("epsilon", [0, 0.2, 0.5])
@pytest.mark.parametrize("rho", [0.25, 1, 1.4, 2.5])
def test_what_the_objective_dial_draws_stays_on_its_charts(visit, rho, epsilon):
    page = visit("objective.html")
    for ratio in (0.05, 1, 2):
        set_controls(page, {"rho": rho, "eps": epsilon, "ratio": ratio})
        for name in ("value-plus", "value-minus", "gradient-plus", "gradient-minus"):
            chart = page.locator(f"#{name}")
            top, height = (float(chart.locator("clipPath rect").get_attribute(x)) for x in ("y", "height"))
            paths = chart.locator("path.curve").evaluate_all("all => all.map((x) => x.getAttribute('d'))")
            dots = chart.locator("circle.dot").evaluate_all(
                "all => all.map((x) => [+x.getAttribute('cy'), +x.getAttribute('r')])"
            )
            ys = [float(y) for path in paths for y in re.findall(r",(-?[\d.]+)", path)] + [y for y, _ in dots]
            assert top + 3 <= min(ys) and max(ys) <= top + height - 3
            assert len({(round(y), r) for y, r in dots}) == 3, "none hides another"


# Results


def curve(name, **setting):
    rows = list(csv.DictReader((ROOT / "results" / f"{name}.csv").open()))
    rows = [row for row in rows if all(row[key] == x for key, x in setting.items())]
    return [float(row["step"]) for row in rows], [float(row["return"]) for row in rows]


def test_pointing_at_a_curve_gives_its_values(visit):
    """The mean over seeds at the place pointed at; with one seed chosen, that seed's own."""
    if not (ROOT / "results" / "staleness.csv").exists():
        pytest.skip("these results are not here")
    table = pd.read_csv(ROOT / "results" / "staleness.csv", dtype=str)
    variant, value = table["variant"][0], table["value"][0]
    seeds = sorted(table[(table["variant"] == variant) & (table["value"] == value)]["seed"].unique())
    page = visit("results.html", 1600)
    plot = page.locator("[data-experiment=staleness]")
    plot.scroll_into_view_if_needed()
    facet = plot.locator(".facet", has=page.locator(f"h4:text-is('{variant}')"))
    for chosen in (seeds, seeds[:1]):
        for seed in set(seeds) - set(chosen):
            plot.locator("fieldset", has_text="Seed").get_by_label(seed, exact=True).uncheck()
        facet.locator("svg").hover(position={"x": 250, "y": 80})
        text = facet.locator(".readout").inner_text()
        step = float(re.search(r"step ([\d,]+)", text)[1].replace(",", ""))
        shown = float(re.search(rf"\s{value}: (-?[\d.]+)", text)[1])
        runs = [curve("staleness", variant=variant, value=value, seed=seed) for seed in chosen]
        assert shown == pytest.approx(np.mean([np.interp(step, *run) for run in runs]), abs=0.02)
    facet.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    assert "step" in facet.locator(".readout").inner_text()


def test_the_authors_returns_are_drawn_as_crosses(visit):
    """At their steps and returns: the axes' own numbers say which pixel that is."""
    page = visit("results.html", 1600)
    chart = page.locator("[data-experiment=learning] .chart")
    read = "(x) => [x.getAttribute('text-anchor'), x.textContent, +x.getAttribute('x'), +x.getAttribute('y')]"
    labels = chart.locator("text").evaluate_all(f"all => all.map({read})")
    ys = [(float(text), y - 4) for anchor, text, _, y in labels if anchor == "end"]
    xs = [
        (1000 * float(text.strip("k")), x)
        for anchor, text, x, _ in labels
        if re.fullmatch(r"\d+k|0", text) and anchor != "end"
    ]
    paths = chart.locator("path.times").evaluate_all("all => all.map((x) => x.getAttribute('d'))")
    found = [[float(v) + 4 for v in re.match(r"M([\d.]+),([\d.]+)l", path).groups()] for path in paths]
    rows = pd.read_csv(ROOT / "results" / "authors_ppo.csv", comment="#")
    scale = [np.polyfit(*zip(*pairs, strict=True), 1) for pairs in (xs, ys)]
    expected = [[np.polyval(scale[0], row.step), np.polyval(scale[1], row["return"])] for _, row in rows.iterrows()]
    assert np.allclose(found, expected, atol=0.6) and len(found) == len(rows) > 0
    assert "authors" in page.locator("[data-experiment=learning] .crosses").inner_text()


def test_lines_that_are_not_called_by_their_value(visit):
    page = visit("results.html", 1600)
    facet = page.locator("[data-experiment=batch-size] .facet", has=page.locator("h4", has_text="same-age"))
    if not facet.count():
        pytest.skip("these results are not here")
    facet.locator("svg").hover(position={"x": 250, "y": 80})
    assert "as young as with 16: " in facet.locator(".readout").inner_text()


def test_filters_take_curves_away(visit):
    page = visit("results.html", 1600)
    for plot in page.locator(".plot").all():
        lines = plot.locator("path.curve").count()
        assert lines > 0
        plot.locator("fieldset input").first.uncheck()
        assert plot.locator("path.curve").count() < lines


def test_the_site_is_not_committed_and_its_packages_are_installed_with_the_tests():
    assert "docs/site/" in (ROOT / ".gitignore").read_text().splitlines()
    assert "-r ../docs/requirements.txt" in (ROOT / "experiments" / "requirements.txt").read_text()
    assert "chromium" in (ROOT / ".ci" / "run").read_text()
    assert Path(ROOT / ".github" / "workflows" / "pages.yml").exists()
