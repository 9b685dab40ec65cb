"""Reads the project's Markdown pages: code blocks, headings and links. For check_docs.py,
extract_samples.py and the tests in tests/docs."""
import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent

# A marker is a comment on the line before a block:
#   <!-- sample: NAME -->   extracted to NAME.LANGUAGE; a test compiles and runs it
#   <!-- from: PATH -->     lines of a file that is compiled and run itself
#   <!-- run -->            commands and their output, repeated by a test
#   <!-- fails -->          the same for commands that end with an error
#   <!-- message -->        a message of the library or the command, with … for what varies
#   <!-- not run: WHY -->   commands that are not even checked for valid flags
MARKER = re.compile(r"\s*<!-- (sample|from|run|fails|message|not run)(?:: (.+?))? -->\s*")
FENCE = re.compile(r"(\s*)(```+)\s*([\w-]*)\s*$")
ITEM = re.compile(r"(\s*)([-*+]|\d+[.)])(\s+)\S")
HEADING = re.compile(r"(#{1,6}) (.+)")
# Images, links and the targets that HTML tags name.
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]*(?:\([^()\s]*\))?[^()\s]*)\)")


@dataclasses.dataclass
class Block:
    """A code block. `line` is the number of its first line of code; `kind` is the language
    of a fence, or "indented"."""
    page: pathlib.Path
    line: int
    kind: str
    text: str
    marker: str = ""
    value: str = ""

    def file_name(self):
        """Of the extracted sample."""
        return f"{self.value}.{'py' if self.kind == 'python' else self.kind}"

    def where(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages(root=ROOT):
    """The pages of the project, sorted."""
    found = {*root.glob("*.md"), root / "src/README.md", *root.glob("docs/**/*.md"),
             *root.glob("examples/**/*.md"), *root.glob("packaging/**/*.md")}
    return sorted(path for path in found if path.is_file())


class _Reader:
    """Separates the code blocks of a page from its prose."""

    def __init__(self, page):
        self.page = page
        self.blocks = []
        self.prose = []  # (line number, text) outside of blocks
        self.marker = ("", "")
        self.content = [0]  # columns at which the content of open list items starts

    def read(self):
        lines = self.page.read_text().splitlines()
        at = 0
        while at < len(lines):
            at = self.step(lines, at)
        return self

    def step(self, lines, at):
        """Reads a block or a line of prose at `at`; returns where the next one starts."""
        line = lines[at]
        fence = FENCE.fullmatch(line)
        if fence:
            return self.fenced(lines, at, fence)
        if not line.strip():
            self.prose.append((at + 1, ""))
            return at + 1
        indent = len(line) - len(line.lstrip())
        after_blank = at == 0 or not lines[at - 1].strip()
        if after_blank and indent < self.content[-1]:
            self.content = [column for column in self.content if column <= indent]
        if after_blank and indent >= self.content[-1] + 4:
            return self.indented(lines, at, self.content[-1] + 4)
        marker = MARKER.fullmatch(line)
        if marker:
            self.marker = (marker[1], marker[2] or "")
        else:
            item = ITEM.match(line)
            if item:
                column = len(item[1]) + len(item[2]) + len(item[3])
                self.content = [c for c in self.content if c <= len(item[1])] + [column]
            self.marker = ("", "")
        self.prose.append((at + 1, line))
        return at + 1

    def fenced(self, lines, at, fence):
        end = at + 1
        while end < len(lines) and lines[end].strip() != fence[2]:
            end += 1
        if end == len(lines):
            raise ValueError(f"{self.page}:{at + 1}: the fence is not closed")
        self.add(at + 1, fence[3], lines[at + 1:end], len(fence[1]))
        return end + 1

    def indented(self, lines, at, indent):
        end = at
        while end < len(lines) and (not lines[end].strip() or
                                    lines[end].startswith(" " * indent)):
            end += 1
        while not lines[end - 1].strip():
            end -= 1
        self.add(at, "indented", lines[at:end], indent)
        return end

    def add(self, before, kind, lines, indent):
        code = [line[indent:] if line[:indent].isspace() or not indent else line.lstrip()
                for line in lines]
        self.blocks.append(Block(self.page, before + 1, kind, "\n".join(code) + "\n",
                                 *self.marker))
        self.marker = ("", "")
        self.prose += [(before + 1 + number, "") for number in range(len(lines))]


def blocks(page):
    return _Reader(page).read().blocks


def prose(page):
    """(number, text) of the lines outside of code blocks, without inline code."""
    return [(number, re.sub(r"`+[^`]*`+", "`code`", line))
            for number, line in _Reader(page).read().prose]


def slug(heading):
    """The anchor that GitHub gives to a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(page):
    found = []
    for _, line in _Reader(page).read().prose:
        heading = HEADING.fullmatch(line)
        if heading:
            name = slug(heading[2])
            count = sum(1 for other in found if re.fullmatch(re.escape(name) + r"(-\d+)?", other))
            found.append(f"{name}-{count}" if count else name)
    return found


def links(page):
    """(line number, target) of the links and images of a page."""
    lines = prose(page)
    text = "\n".join(line for _, line in lines)
    for match in LINK.finditer(text):
        yield lines[text.count("\n", 0, match.start())][0], match[1]


def header_blocks(root=ROOT):
    """The samples in the comments of public headers: blocks with the marker `sample`, whose
    names are those of the headers with a number (ops-norm-1). Blocks that are neither C++ nor
    YAML, such as tables, are left out."""
    found = []
    for header in sorted((root / "include/reprise").rglob("*.h")):
        lines = header.read_text().splitlines()
        stem = header.relative_to(root / "include/reprise").with_suffix("").as_posix()
        at = number = 0
        while at < len(lines):
            start = at
            while at < len(lines) and re.match(r"\s*///(     ?\S|     |$)", lines[at]) and (
                    at > start or re.match(r"\s*///     ?\S", lines[at]) and
                    lines[at - 1].strip() == "///"):
                at += 1
            if at == start:
                at += 1
                continue
            code = [re.sub(r"^\s*///(     )?", "", line) for line in lines[start:at]]
            text = "\n".join(code).rstrip() + "\n"
            kind = "cpp" if is_code(text) else "yaml" if re.match(r"\w+: ", text) else ""
            if kind:
                number += 1
                found.append(Block(header, start + 1, kind, text, "sample",
                                   f"{stem.replace('/', '-')}-{number}"))
    return found


def is_code(text):
    """Whether an indented block of a comment is C++, and not a table."""
    return bool(re.search(r";\s*(//.*)?$", text, re.MULTILINE))


def commands(block):
    """(line number, words) of the commands of a block, without prompts, comments and what
    is sent elsewhere. Lines that end with a backslash continue on the next one."""
    line = block.line
    text, first = "", line
    prompts = block.kind == "console"
    for number, part in enumerate(block.text.splitlines(), start=line):
        if not text:
            if prompts and not part.startswith("$ "):
                continue
            part = part[2:] if prompts else part
            first = number
        if part.endswith("\\"):
            text += part[:-1] + " "
            continue
        yield first, text + part
        text = ""
