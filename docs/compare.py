"""Two scripts side by side: what is the same, what changed, and the note beside each change."""

import difflib
import re
from dataclasses import dataclass, field

from markupsafe import Markup

CONTEXT = 3  # unchanged lines that stay visible around a change


@dataclass
class Row:
    """What stands side by side: lines on the left, lines on the right, a note."""

    left: Markup
    right: Markup
    note: object = None


@dataclass
class Change:
    number: int
    rows: list
    where: str  # the function that it is in
    added: list  # the new lines
    twin: object = None  # the same change in another pair of scripts, if there is one


@dataclass
class Same:
    """Unchanged lines: some to be seen, the middle folded away."""

    before: Row
    folded: Markup
    count: int
    first: tuple  # the numbers of the first folded line, left and right
    after: Row


@dataclass
class Comparison:
    base: object
    variant: object
    tag: str
    parts: list = field(default_factory=list)

    @property
    def name(self):
        return f"{self.base.name}-to-{self.variant.name}"

    @property
    def changes(self):
        return [part for part in self.parts if isinstance(part, Change)]

    @property
    def size(self):
        return sum(1 for change in self.changes for line in change.added if line.strip())


def compare(base, variant, tag):
    result = Comparison(base, variant, tag)
    matcher = difflib.SequenceMatcher(None, base.lines, variant.lines, autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind == "equal":
            result.parts.append(same(base, variant, i, j, k, ends=(i == 0, j == len(base.lines))))
        else:
            number = len(result.changes) + 1
            rows = list(changed_rows(base, variant, i, j, k, m))
            added = variant.lines[k:m]
            first = next(n for n in range(k, m) if variant.lines[n].strip())
            result.parts.append(Change(number, rows, enclosing(variant, first), added))
    return result


def same(base, variant, i, j, k, ends):
    lead, trail = (0 if end else CONTEXT for end in ends)
    if j - i - lead - trail < 3:  # not worth folding
        lead, trail = j - i, 0
    shift = k - i

    def row(a, b):
        left = Markup("".join(base.line(n) for n in range(a, b)))
        return Row(left, Markup("".join(variant.line(n + shift) for n in range(a, b))))

    a, b = i + lead, j - trail
    folded = "".join(variant.line(n + shift) for n in range(a, b))
    return Same(row(i, a), Markup(folded), b - a, (a + 1, a + 1 + shift), row(b, j))


def changed_rows(base, variant, i, j, k, m):
    """A row for each note on the new lines; the old lines stand in the first."""
    old, new = pairs(base.lines[i:j], variant.lines[k:m])
    left = Markup("".join(base.line(i + n, marks, tag="old") for n, marks in enumerate(old)))
    notes = {max(k, variant.above(n)): note for n, note in variant.notes.items() if k <= n < m}
    cuts = sorted({k, *notes})
    if len(cuts) > 1 and cuts[0] not in notes and not left:  # the first note stands beside the first line
        notes[k] = notes.pop(cuts.pop(1))
    for a, b in zip(cuts, [*cuts[1:], m], strict=True):
        right = "".join(variant.line(n, new[n - k], tag="new") for n in range(a, b))
        yield Row(left if a == k else Markup(""), Markup(right), notes.get(a))


def pairs(old, new):
    """For each old and each new line, the characters that differ from its most similar counterpart, if it has one."""
    marks = [[] for _ in old], [[] for _ in new]
    for a, line in enumerate(old):
        matches = [difflib.SequenceMatcher(None, words(line), words(other), autojunk=False) for other in new]
        if not matches or not line.strip():
            continue
        b = max(range(len(new)), key=lambda n: matches[n].ratio())
        if matches[b].ratio() > 0.4:
            for kind, i, j, k, m in matches[b].get_opcodes():
                if kind != "equal":
                    for side, n, text, x, y in ((0, a, line, i, j), (1, b, new[b], k, m)):
                        cells = words(text)
                        start, stop = len("".join(cells[:x])), len("".join(cells[:y]))
                        if stop > start:
                            marks[side][n].append((start, stop))
    return marks


def words(line):
    return re.findall(r"\w+|\s+|.", line)


def enclosing(script, index):
    """The function, method or class that a line is in, as a reader would call it."""
    names, indent = [], len(script.lines[index]) - len(script.lines[index].lstrip()) + 1
    for line in reversed(script.lines[: index + 1]):
        found = re.match(r"( *)(?:def|class) (\w+)", line)
        if found and len(found[1]) < indent:
            names.insert(0, found[2])
            indent = len(found[1])
        elif line[:1].strip() and line[0] not in ")#" and indent > 0:
            break
    return ".".join(names) or ("the docstring" if script.in_docstring(index) else "the imports")
