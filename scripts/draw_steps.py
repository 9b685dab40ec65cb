#!/usr/bin/env python3
"""Draws the way of one micro-batch, docs/pictures/steps.svg, from the list in docs/design.md.

    scripts/draw_steps.py            rewrites the picture
    scripts/draw_steps.py --check    changes nothing; exits with status 1 if the picture
                                     differs from the list, or if a step names a file that
                                     does not exist

A step begins with its file. Consecutive steps of one folder share a frame.
scripts/figures.py calls this script.
"""
import itertools
import pathlib
import re
import sys
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/design.md"
PICTURE = ROOT / "docs/pictures/steps.svg"
HEADING = "## The way of one micro-batch\n"

WIDTH = 860
LABEL = 150  # width of the folder's name
PAD = 12
SIZE = 13  # of the text, in pixels
LINE = 18
GAP = 20  # between steps, for the arrow
ARROW = LABEL + 28  # the middle of arrows and numbers
TEXT_LEFT = LABEL + 50
TEXT_WIDTH = WIDTH - TEXT_LEFT - 2 * PAD
# Folders get these in the order in which they appear: stroke and fill.
COLOURS = [("#5a6472", "#f1f3f5"), ("#2b6ca3", "#eaf3fb"), ("#7a4fa3", "#f4eefa"),
           ("#b5482f", "#fcefeb"), ("#2f7f86", "#e8f6f7"), ("#3c8d53", "#ecf7ef"),
           ("#9a6b12", "#fbf4e4"), ("#a23b72", "#fbecf4")]


class Step:
    def __init__(self, number, text):
        self.number = number
        self.text = text
        self.files = [one for one in re.findall(r"`([^`]+)`", text)
                      if re.fullmatch(r"[\w./-]+\.(cpp|h)", one)]
        path = pathlib.PurePath(self.files[0]) if self.files else None
        self.folder = path.parent.as_posix() if path else ""
        self.name = path.name if path else ""
        self.words = text.replace(f"`{self.files[0]}` ", "", 1) if self.files else text

    def missing(self):
        """The files that do not exist; one without a folder is beside the step's file."""
        for one in self.files:
            base = ROOT if "/" in one else ROOT / self.folder
            if not (base / one).is_file():
                yield one


def read_steps():
    text = PAGE.read_text()
    section = text[text.index(HEADING) + len(HEADING):]
    section = section[:section.index("\n## ")]
    items = re.split(r"^(\d+)\. ", section, flags=re.M)[1:]
    return [Step(int(number), " ".join(body.split("\n\n")[0].split()))
            for number, body in zip(items[::2], items[1::2])]


def width_of(word, code):
    """An upper estimate for common sans-serif and monospaced fonts."""
    return len(word) * SIZE * (0.62 if code else 0.56)


def wrapped(text):
    """Lines of (word, is code)."""
    words = []
    for i, part in enumerate(text.split("`")):
        # A word can be code in part: "(`x.cpp`)," are three pieces without spaces between.
        words += [(piece, i % 2 == 1) for piece in re.findall(r"\s+|[^\s]+", part)]
    lines, line, used = [], [], 0.0
    for unbroken in split_at_spaces(words):
        width = sum(width_of(word, code) for word, code in unbroken)
        space = SIZE * 0.3 if line else 0
        if line and used + space + width > TEXT_WIDTH:
            lines.append(line)
            line, used, space = [], 0.0, 0
        line += ([(" ", False)] if line else []) + unbroken
        used += space + width
    return lines + [line]


def split_at_spaces(words):
    unbroken = []
    for word, code in words:
        if word.isspace():
            if unbroken:
                yield unbroken
            unbroken = []
        else:
            unbroken.append((word, code))
    if unbroken:
        yield unbroken


def text_element(x, y, line, **attributes):
    pieces = []
    for code, group in itertools.groupby(line, key=lambda piece: piece[1]):
        words = escape("".join(word for word, _ in group))
        pieces.append(f'<tspan font-family="monospace">{words}</tspan>' if code else words)
    more = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
    return f'<text x="{x}" y="{y}" xml:space="preserve"{more}>{"".join(pieces)}</text>'


def draw_step(step, y, colour):
    """The elements of a step whose first line is below `y`, and the end of its last line."""
    lines = wrapped(step.words)
    out = [f'<circle cx="{ARROW}" cy="{y + LINE / 2 + 3:g}" r="12" fill="{colour}"/>',
           text_element(ARROW, f"{y + LINE / 2 + 7:g}", [(str(step.number), False)],
                        fill="#fff", text_anchor="middle", font_weight="bold"),
           text_element(TEXT_LEFT, f"{y + LINE - 2:g}", [(step.name, True)], font_weight="bold")]
    out += [text_element(TEXT_LEFT, f"{y + LINE * (i + 2) - 2:g}", line)
            for i, line in enumerate(lines)]
    return out, y + LINE * (len(lines) + 1)


def draw(steps):
    colours, out, y = {}, [], PAD
    for folder, group in itertools.groupby(steps, key=lambda step: step.folder):
        stroke, fill = colours.setdefault(folder, COLOURS[len(colours) % len(COLOURS)])
        if out:
            out.append(arrow(y - GAP, y - 1))
        top, inside = y, []
        y += PAD / 2
        for step in group:
            if inside:
                inside.append(arrow(y, y + GAP - 2))
                y += GAP
            elements, y = draw_step(step, y, stroke)
            inside += elements
        y += PAD
        out.append(f'<rect x="{PAD}" y="{top:g}" width="{WIDTH - 2 * PAD}" '
                   f'height="{y - top:g}" rx="6" fill="{fill}" stroke="{stroke}"/>')
        out.append(text_element(2 * PAD, f"{top + PAD / 2 + LINE - 2:g}",
                                [(folder.removeprefix("src/"), True)], fill=stroke,
                                font_weight="bold"))
        out += inside
        y += GAP
    height = y - GAP + PAD
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'font-family="sans-serif" font-size="{SIZE}" fill="#1f2328">\n'
            "<title>The way of one micro-batch</title>\n"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#5a6472"/>'
            "</marker></defs>\n"
            f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="#fff"/>\n')
    return head + "\n".join(out) + "\n</svg>\n"


def arrow(top, bottom):
    return (f'<line x1="{ARROW}" x2="{ARROW}" y1="{top:g}" y2="{bottom:g}" stroke="#5a6472" '
            'stroke-width="1.5" marker-end="url(#tip)"/>')


def problems():
    """What is wrong with the list or with the picture."""
    steps = read_steps()
    if [step.number for step in steps] != list(range(1, len(steps) + 1)) or not steps:
        yield "docs/design.md: expected steps 1, 2, 3, …"
        return
    for step in steps:
        if not step.words or not step.files or not step.text.startswith(f"`{step.files[0]}` "):
            yield f"docs/design.md: expected step {step.number} to begin with its file"
            return
        for one in step.missing():
            yield f"docs/design.md: step {step.number} names {one}, which does not exist"
    if not PICTURE.is_file() or PICTURE.read_text() != draw(steps):
        yield "docs/pictures/steps.svg differs from docs/design.md; run scripts/figures.py"


def write():
    PICTURE.write_text(draw(read_steps()))


def main():
    if "--check" not in sys.argv[1:]:
        write()
    wrong = list(problems())
    for text in wrong:
        print(f"steps: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
