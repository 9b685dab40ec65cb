"""Checks the pages of the project: links, anchors and pictures; and that every block of code
is one that a test compiles, runs or checks.

Usage: check_docs.py [ROOT]. Needs no network: of external links only the form is checked.

- C++, Python, YAML and CMake need a marker (scripts/docs.py): `sample: NAME`, which a test
  includes, or `from: PATH`, whose lines they repeat. Samples in the comments of public
  headers have the names of the headers with a number, such as ops-norm-1.
- Indented blocks and the languages sh and console are commands, which
  tests/docs/commands_test.py checks.
- `text` is for output and formulas; with `message`, the sources have to contain its text.
  Other languages are refused.
"""
import pathlib
import re
import sys
import urllib.parse

import docs

CODE = {"cpp", "python", "yaml", "cmake"}
COMMANDS = {"indented", "sh", "console"}
# Commands start with one of these; an indented block of anything else is no command.
PROGRAMS = re.compile(
    r"(\w+=\S+ )*(\./)?(reprise|test|own_model|script_example|scripts/\S+|docs/\S+|build/\S+|"
    r"bench/\S+|python3|cmake|ctest|ninja|torchrun|mpirun|srun|git|cd|export|sudo|apt|apt-get|"
    r"cmp|docker|podman|source|\.|cp|mkdir|tar|dpkg|conan|vcpkg|man|cat|head|seq|nvidia-smi)( .*)?$")


def sample_files(root):
    """What tests include: the names of samples, without extension."""
    text = "".join(path.read_text() for path in sorted((root / "tests/docs").glob("*sample*"))
                   if path.is_file())
    return set(re.findall(r"(?:samples/|read_sample_study\(\")([\w-]+\.\w+)[\"']", text))


def dedented(lines):
    lines = [line.rstrip() for line in lines if line.strip()]
    margin = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    return [line[margin:] for line in lines]


def repeats(part, whole):
    """Whether the lines of `part` occur in `whole` one after the other, apart from blank
    lines and common indentation. A line of an ellipsis stands for any number of lines."""
    position = 0
    pieces = re.split(r"^\s*(?:…|//\s*…|#\s*…)\s*$", part, flags=re.MULTILINE)
    lines = [line.rstrip() for line in whole.splitlines() if line.strip()]
    for piece in pieces:
        wanted = dedented(piece.splitlines())
        for start in range(position, len(lines) - len(wanted) + 1):
            if dedented(lines[start:start + len(wanted)]) == wanted:
                position = start + len(wanted)
                break
        else:
            return False
    return True


class Checker:
    def __init__(self, root):
        self.root = root
        self.problems = []
        self.names = {}
        self.anchors = {}
        self.sources = None

    def report(self, where, text):
        self.problems.append(f"{where}: {text}")

    def check_block(self, block):
        if block.kind in CODE:
            self.check_code(block)
        elif block.kind in COMMANDS:
            self.check_commands(block)
        elif block.kind == "text":
            if block.marker == "message":
                self.check_message(block)
        else:
            self.report(block.where(), f"expected a block of {', '.join(sorted(CODE))}, sh, "
                        f"console or text, got '{block.kind}'; name the language behind ```")

    def check_code(self, block):
        if block.marker == "sample":
            name = block.file_name()
            if name in self.names:
                self.report(block.where(), f"the sample {name} is also in {self.names[name]}; "
                            "choose another name")
            self.names[name] = block.where()
        elif block.marker == "from":
            path = self.root / block.value
            if not path.is_file():
                self.report(block.where(), f"expected lines of {block.value}: no such file")
            elif not repeats(block.text, path.read_text()):
                self.report(block.where(), f"the block differs from the lines of {block.value}; "
                            "copy them again")
        else:
            self.report(block.where(), f"a block of {block.kind} that nothing compiles; put "
                        "<!-- sample: NAME --> or <!-- from: PATH --> before it")

    def check_message(self, block):
        """Whether the parts of a message, between ellipses, are in the sources."""
        if self.sources is None:
            texts = [path.read_text() for folder in ("src", "tools", "include")
                     for path in sorted((self.root / folder).rglob("*.[hc]*"))
                     if path.is_file()]
            self.sources = re.sub(r'"\s*"', "", "\n".join(texts))  # literals are joined
        for part in re.split("…", " ".join(block.text.split())):
            part = part.strip(" ;,")
            if part and part not in self.sources:
                self.report(block.where(), f"no source has the message '{part}'; has it been "
                            "changed?")

    def check_commands(self, block):
        if block.kind == "console" and not block.text.startswith("$ "):
            self.report(block.where(), "a console block starts with '$ ' and a command")
        for line, command in docs.commands(block):
            word = command.split(" #")[0].strip()
            if word and not word.startswith("#") and not PROGRAMS.match(word):
                self.report(f"{block.page.relative_to(self.root)}:{line}",
                            f"'{word}' is no known command; use a fence with a language, such "
                            "as ```text for output")

    def check_link(self, page, line, target):
        where = f"{page.relative_to(self.root)}:{line}"
        parts = urllib.parse.urlsplit(target)
        if parts.scheme or target.startswith("//"):
            if parts.scheme not in ("https", "http", "mailto") or " " in target or (
                    parts.scheme != "mailto" and "." not in parts.netloc):
                self.report(where, f"'{target}' is no valid address")
            return
        path = (page.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else page
        if not path.exists():
            self.report(where, f"'{target}' does not exist")
        elif self.root not in path.parents and path != self.root:
            self.report(where, f"'{target}' is outside of the project")
        elif parts.fragment and path.suffix == ".md":
            if path not in self.anchors:
                self.anchors[path] = docs.anchors(path)
            if parts.fragment not in self.anchors[path]:
                self.report(where, f"{path.relative_to(self.root)} has no heading "
                            f"#{parts.fragment}")

    def check(self):
        for page in docs.pages(self.root):
            for block in docs.blocks(page):
                self.check_block(block)
            for line, target in docs.links(page):
                self.check_link(page, line, target)
        for block in docs.header_blocks(self.root):
            self.check_block(block)
        used = sample_files(self.root)
        for name, where in self.names.items():
            if name not in used:
                self.report(where, f"no file of tests/docs includes samples/{name}")
        for name in sorted(used - set(self.names)):
            self.report("tests/docs", f"includes samples/{name}, which no page has")
        return self.problems


def main(arguments):
    root = pathlib.Path(arguments[0]).resolve() if arguments else docs.ROOT
    docs.ROOT = root
    problems = Checker(root).check()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
