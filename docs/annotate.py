"""The five scripts as lines with colours, and the notes that belong to these lines."""

import ast
import html
import re
from dataclasses import dataclass

import latex2mathml.converter
from markdown_it import MarkdownIt
from markupsafe import Markup
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

END = "The algorithm is complete."

# The scripts that must have each note's line. Those of ppo.md are also shown in every other script that has the line,
# unless a later file of this table has a note for it there.
HOMES = {
    "ppo": ["ppo"],
    "staleness": ["staleness"],
    "ppg": ["ppg", "ppg_ewma"],
    "ewma": ["ppo_ewma", "ppg_ewma"],
    "ppg_ewma": ["ppg_ewma"],
}
WHOLE = 8  # a tagged block of up to so many lines is not cut
COLOURED = "c1 sd s1 s2 sa si se k kn kc ow nf nc fm mi mf nb bp nd".split()  # of Pygments' classes


class BuildError(Exception):
    """Something is wrong with what the site is made from. The message is one line."""


@dataclass
class Note:
    title: str
    quote: list  # the line it belongs to, or several in a row, without indentation
    body: Markup
    source: str

    @property
    def slug(self):
        return slug(self.title)


class Script:
    def __init__(self, name, text):
        self.name, self.file, self.text = name, f"{name}.py", text
        self.lines = text.splitlines()
        ends = [i for i, line in enumerate(self.lines) if END in line]
        if len(ends) != 1:
            raise BuildError(f"{self.file}: {END!r} must occur once, to say where the algorithm ends")
        self.end = ends[0]
        self.tokens = coloured(text)
        try:
            self.starts = starts(text)
        except SyntaxError as error:
            raise BuildError(f"{self.file}, line {error.lineno}: {error.msg}") from None
        self.notes = {}  # by the index of a line
        self.tags, self.heads = {tag: set() for tag in ("EWMA", "STALE", "PPG")}, {}
        for i, line in enumerate(self.lines):  # a tag stands for its line, or as many as it says, from there on
            if found := re.search(rf"# ({'|'.join(self.tags)})(?:, (\d+) lines)?\b", line):
                block = range(i, i + int(found[2] or 1))
                self.tags[found[1]] |= set(block)
                if len(block) <= WHOLE:
                    self.heads |= dict.fromkeys(block, i)

    def places(self, quote):
        """Where these lines stand. Indentation does not count, nor does a comment at the end that the quote lacks, nor
        what the quote leaves out by ending in "..."."""

        def same(line, quoted):
            if quoted.endswith("..."):
                return line.strip().startswith(quoted[:-3])
            return quoted in (line.strip(), re.sub(r"  # .*", "", line).strip())

        size, found = len(quote), range(len(self.lines) - len(quote) + 1)
        return [i for i in found if all(map(same, self.lines[i : i + size], quote))]

    def line(self, i, marks=(), tag=None, number=True, anchor=False):
        """One line as HTML. marks: stretches of characters to be marked as changed."""
        attributes = f' data-n="{i + 1}"' if number else ""
        attributes += f' id="L{i + 1}"' if anchor else ""
        if indent := len(self.lines[i]) - len(self.lines[i].lstrip()):
            attributes += f' style="--i:{indent}"'  # where the rest of a line that does not fit continues
        classes = "l" + (f" tag-{tag}" if tag else "")
        text = re.sub(r"^((?:<[^>]*>)*)( +)", r'\1<span class="in">\2</span>', colour(self.tokens[i], marks))
        return f'<span class="{classes}"{attributes}>{text}\n</span>'

    def block(self, start, stop, anchor=True):
        """Lines as HTML, those of a tag marked by its name."""

        def tag_of(i):
            return next((tag for tag, lines in self.tags.items() if i in lines and self.lines[i].strip()), None)

        return Markup("".join(self.line(i, tag=tag_of(i), anchor=anchor) for i in range(start, stop)))

    def rows(self, start, stop):
        """Lines cut at notes: [start, stop, notes]. A cut is never inside a statement or a short tagged block, nor
        between the head of a block and its first line. Comments just above go with it."""
        notes = {}
        for i, note in sorted(self.notes.items()):
            if start <= i < stop:
                i = self.starts.get(i, i)
                notes.setdefault(max(start, self.above(self.heads.get(i, i))), []).append(note)
        cuts = sorted({start, *notes})
        return [(a, b, notes.get(a, [])) for a, b in zip(cuts, [*cuts[1:], stop], strict=True)]

    def above(self, i):
        """The first of the comment lines that end just above line i, or i itself."""
        while self.lines[i - 1].strip().startswith("#") and i - 1 not in self.notes and i > 0:
            i -= 1
        return i

    def in_docstring(self, i):
        return i < next(n for n, line in enumerate(self.lines) if line.startswith("import "))

    def contents(self):
        """Where to jump to: top-level functions and classes, and the steps of the loop."""
        for i, line in enumerate(self.lines[: self.end]):
            if found := re.match(r"(?:def|class) (\w+)", line):
                yield i + 1, found[1], True
            elif found := re.match(r" {8}# (\(\d\) [\w ]+)", line):
                yield i + 1, found[1].split(" from")[0].split(" the ")[0], False
            elif "iteration % used.n_pi == 0" in line:
                yield i + 1, "Auxiliary phase", False


def starts(text):
    """Where the row of a line has to begin, for lines inside a statement, and for the first in an if, for or with."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
            if isinstance(node, ast.If | ast.For | ast.With):
                last += 1
            found |= {i: min(node.lineno - 1, found.get(i, i)) for i in range(node.lineno, last)}
    for i in sorted(found):
        found[i] = found.get(found[i], found[i])
    return found


def slug(title):
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def coloured(text):
    """For each line, a list of (Pygments' class, text)."""
    lines = [[]]
    for kind, value in PythonLexer(stripnl=False).get_tokens(text):
        name = STANDARD_TYPES.get(kind, "")
        name = name if name in COLOURED else ""
        for n, part in enumerate(value.split("\n")):
            if n:
                lines.append([])
            if part and lines[-1] and lines[-1][-1][0] == name:
                lines[-1][-1] = (name, lines[-1][-1][1] + part)
            elif part:
                lines[-1].append((name, part))
    return lines


def colour(tokens, marks=()):
    result, at = [], 0
    for name, text in tokens:
        edges = {at, at + len(text), *(x for mark in marks for x in mark if at < x < at + len(text))}
        edges = sorted(edges)
        for a, b in zip(edges, edges[1:], strict=False):
            part = html.escape(text[a - at : b - at], quote=False)
            part = f'<span class="{name}">{part}</span>' if name else part
            marked = any(x <= a and b <= y for x, y in marks)
            result.append(f"<mark>{part}</mark>" if marked else part)
        at += len(text)
    return "".join(result)


def mathematics(latex, options=None):
    display = "block" if (options or {}).get("display_mode") else "inline"
    try:
        result = latex2mathml.converter.convert(latex, display=display)
    except Exception as error:
        raise BuildError(f"no equation: {latex.strip()} ({type(error).__name__})") from None
    if "\\" in result or "&</mi>" in result:
        raise BuildError(f"not understood in an equation: {latex.strip()}")
    result = result.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")
    return f'<span class="equation">{result}</span>' if display == "block" else result


def renderer():
    markdown = MarkdownIt("commonmark").enable("table")
    return markdown.use(dollarmath_plugin, renderer=mathematics, double_inline=True, allow_digits=False)


def to_html(text):
    result = renderer().render(text)
    for word in ("Paper", "Shapes"):
        result = result.replace(f"<p>{word}: ", f'<p class="aside"><b>{word}</b> ')
    return Markup(result)


def read_notes(path):
    """Notes are sections. Each begins with the code that it belongs to."""
    for section in re.split(r"^## ", path.read_text(), flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        found = re.match(r"\s*```\n(.*?)\n```\n(.*)", body, re.S)
        if not found:
            raise BuildError(f'{path.name}: "{title}" must begin with the code that it belongs to')
        quote = [line.strip() for line in found[1].splitlines()]
        try:
            body = to_html(found[2])
        except BuildError as error:
            raise BuildError(f'{path.name}: "{title}": {error}') from None
        yield Note(title, quote, body, path.stem)


def attach_notes(scripts, folder):
    """Give each script its notes. Every note has its line, once."""
    unknown = sorted(path.name for path in folder.glob("*.md") if path.stem not in HOMES)
    if unknown:
        raise BuildError(f"notes/{unknown[0]}: the notes are {', '.join(f'{name}.md' for name in HOMES)}")
    titles = set()
    for name, homes in HOMES.items():
        for note in read_notes(folder / f"{name}.md"):
            if note.slug in titles:
                raise BuildError(f'notes/{name}.md: there are two notes called "{note.title}"')
            titles.add(note.slug)
            for script in scripts.values():
                if script.name not in homes and name != "ppo":
                    continue
                places = script.places(note.quote)
                if len(places) == 1:
                    script.notes[places[0]] = note
                elif places or script.name in homes:
                    often = f"occurs {len(places)} times" if places else "does not occur"
                    where = f'notes/{name}.md, "{note.title}"'
                    raise BuildError(f"{where}: its line {often} in {script.file}: {note.quote[0]}")
