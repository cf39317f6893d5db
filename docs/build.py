"""Builds the tutorial: the five scripts annotated and side by side, dials to turn, results.

python docs/build.py            writes docs/site/; open docs/site/index.html
python docs/build.py --serve    serves it on this machine only, and rebuilds when a file changes
"""

import argparse
import ast
import functools
import json
import re
import shutil
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    import curves
    from annotate import BuildError, Script, attach_notes, mathematics
    from compare import compare
except ImportError as error:
    print(f"build.py: error: {error}; pip install -r docs/requirements.txt", file=sys.stderr)
    sys.exit(2)

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
WHAT = {
    "ppo": "PPO. One old policy does two jobs.",
    "ppo_ewma": "PPO-EWMA. Two policies for the two jobs.",
    "staleness": "PPO on data made old on purpose: why the jobs differ.",
    "ppg": "Phasic policy gradient, a stronger algorithm.",
    "ppg_ewma": "PPG-EWMA, the paper’s main algorithm.",
}
EDGES = [("ppo", "ppo_ewma", "EWMA"), ("ppo", "staleness", "STALE"), ("ppo", "ppg", "PPG"), ("ppg", "ppg_ewma", "EWMA")]
DIALS = {"adjust": "Batch size", "age": "Age", "objective": "Objective"}


def defaults(script):
    """The flags of a script that have a number as default."""
    found = {}
    for flag, value in re.findall(r'^    add\("--([\w-]+)",.*?\bdefault=([^,)]+)', script.text, re.M):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[flag.replace("-", "_")] = value
    return found


def picture():
    """The idea in four panels: who corrects and who limits, for a batch and for a quarter of it. 1 unit: some steps."""
    now, panels = 95, []
    for title, step in [("a batch", 5), ("1/4 of the batch", 1.25)]:
        start = now - 7 * step  # seven optimiser steps ago: the iteration's start
        decay = (40 / step) / (40 / step + 1)  # as old in environment steps
        bars = [(now - j * step, decay**j) for j in range(int(88 / step))]
        panels.append({"title": title, "step": step, "start": start, "bars": bars})
    return {"now": now, "mean": now - 40, "panels": panels}


def from_elsewhere(body, name):
    """A note of a file's page, on another page: its links within that page lead there."""
    return Markup(str(body).replace('href="#', f'href="{name}.html#'))


def build(out):
    """Make the site in the folder out. Nothing is touched there if something is wrong."""
    scripts = {}
    for name in WHAT:
        try:
            scripts[name] = Script(name, (ROOT / f"{name}.py").read_text())
        except OSError as error:
            raise BuildError(f"{name}.py: {error.strerror}") from None
    attach_notes(scripts, DOCS / "notes")
    edges = [compare(scripts[a], scripts[b], tag) for a, b, tag in EDGES]
    by_name = {edge.name: edge for edge in edges}
    for change in by_name["ppg-to-ppg_ewma"].changes:
        for other in by_name["ppo-to-ppo_ewma"].changes:
            if other.added == change.added and len(other.rows) == len(change.rows):
                change.twin = other
    experiments = curves.experiments(ROOT / "results", curves.read_claims(DOCS / "claims.md"))

    environment = Environment(
        loader=FileSystemLoader(DOCS / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.globals |= {"scripts": scripts, "edges": edges, "what": WHAT, "dials": DIALS}
    environment.filters["math"] = lambda latex: Markup(mathematics(latex))
    environment.filters["display"] = lambda latex: Markup(mathematics(latex, {"display_mode": True}))
    environment.filters["from_elsewhere"] = from_elsewhere
    pages = {}

    def page(name, template, **values):
        pages[f"{name}.html"] = environment.get_template(template).render(page=name, **values)

    page("index", "index.html", picture=picture(), by_name=by_name)
    for name, script in scripts.items():
        mine = [edge for edge in edges if script in (edge.base, edge.variant)]
        page(name, "file.html", script=script, mine=mine)
    for edge in edges:
        page(edge.name, "diff.html", edge=edge, overlay=edge.name == "ppg-to-ppg_ewma")
    flags = {name: defaults(script) for name, script in scripts.items()}
    for name in DIALS:
        page(name, f"{name}.html", defaults_of=flags["ppg_ewma"])
    page("results", "results.html", experiments=experiments, how=curves.how(ROOT / "results"))

    drawn = (
        "name",
        "measured",
        "lines",
        "log",
        "values",
        "variants",
        "games",
        "seeds",
        "curves",
        "steps",
        "crosses",
        "labels",
    )
    data = {x["name"]: {key: x[key] for key in drawn} for x in experiments}
    if out.exists() and any(out.iterdir()) and not (out / "index.html").exists():
        raise BuildError(f"{out}: is not empty, and not a site; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (out / name).write_text(text)
    for path in (DOCS / "static").iterdir():
        shutil.copy(path, out)
    (out / "flags.js").write_text(f"const FLAGS = {json.dumps(flags)};\n")
    (out / "data.js").write_text(f"const RESULTS = {json.dumps(data, separators=(',', ':'))};\n")
    return sorted(pages)


def sources():
    """When each file that the site is made from was last changed."""
    found = [*ROOT.glob("*.py"), *(ROOT / "results").glob("**/*"), *DOCS.glob("*.*")]
    found += [path for folder in ("notes", "static", "templates") for path in (DOCS / folder).iterdir()]
    return {path: path.stat().st_mtime_ns for path in found if path.exists()}


def try_to_build(out):
    start = time.monotonic()
    try:
        pages = build(out)
        print(f"{len(pages)} pages in {time.monotonic() - start:.1f} s: {out / 'index.html'}", flush=True)
        return True
    except BuildError as error:
        print(f"build.py: error: {error}", file=sys.stderr, flush=True)
    except OSError as error:
        print(f"build.py: error: {error.filename}: {error.strerror}", file=sys.stderr, flush=True)
    return False


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def end_headers(self):
        self.send_header("Cache-Control", "no-store")  # a reload shows the newest
        super().end_headers()


def serve(out, port):
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Handler, directory=out))
    except (OSError, OverflowError) as error:
        print(f"build.py: error: --serve {port}: {getattr(error, 'strerror', error)}", file=sys.stderr)
        sys.exit(2)
    seen = sources()
    try_to_build(out)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C stops)", flush=True)
    try:
        while True:
            time.sleep(0.5)
            if seen != (seen := sources()):
                try_to_build(out)
    except KeyboardInterrupt:
        print()


def main():
    parser = argparse.ArgumentParser(
        description="Build the tutorial site.", usage=argparse.SUPPRESS, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=DOCS / "site", help="where the site goes; default: docs/site")
    words = "serve it on this machine, and rebuild when a file changes; default port: 8000; 0: any that is free"
    parser.add_argument("--serve", type=int, nargs="?", const=8000, metavar="PORT", help=words)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.out, args.serve)
    elif not try_to_build(args.out):
        sys.exit(2)


if __name__ == "__main__":
    main()
