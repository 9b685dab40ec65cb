"""Assembles the sources of the documentation site from the project's pages.

Usage: assemble.py OUT DOXYGEN-XML COMMAND-HELP

OUT gets the Markdown pages with links that work on the site, one page per example, one per
subcommand (from COMMAND-HELP, a directory of the outputs of --help) and one per header (from
Doxygen). Pages are listed in MENU; one that is missing there is an error.
"""
import os
import pathlib
import posixpath
import re
import shutil
import sys

SITE = pathlib.Path(__file__).resolve().parent
ROOT = SITE.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import docs  # noqa: E402

import headers  # noqa: E402
import help_pages  # noqa: E402
import theme  # noqa: E402

# Names on the site of pages outside of docs/.
PAGES = {
    "README.md": "overview",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
    "CHANGELOG.md": "changelog",
    "src/README.md": "source-tour",
    "docs/results/README.md": "results/index",
}
MENU = [
    ("Start", ["overview", "tutorial", "out-of-memory", "faq", "troubleshooting"]),
    ("How-to", ["how-to/index", "own-model", "examples/index"]),
    ("Training", ["training", "planning", "ranks", "studies", "report", "results"]),
    ("Reference", ["commands/index", "headers/index"]),
    ("Background", ["method", "exactness", "ops", "speed", "results/index"]),
    ("Development", ["design", "source-tour", "contributing", "security", "changelog"]),
]


def site_name(path):
    """The page of the site, without suffix, for a path relative to the project; None if it is
    no page."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and path.endswith(".md"):
        return path[len("docs/"):-len(".md")]
    parts = path.split("/")
    if parts[0] == "examples":
        return f"examples/{parts[1]}" if len(parts) > 1 and parts[1] else "examples/index"
    if path.startswith("include/reprise/") and path.endswith(".h"):
        return "headers/" + path[len("include/reprise/"):-len(".h")]
    return None


class Assembler:
    def __init__(self, out):
        self.out = out
        self.written = set()

    def write(self, name, text):
        path = self.out / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.written.add(name)

    def target(self, page, name, target):
        """What a link on the page `name`, written in the file `page`, leads to. Returns the
        new target and whether it is a page."""
        address, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), address))
        linked = site_name(path)
        here = posixpath.dirname(name)
        if linked:
            new = posixpath.relpath(linked + ".md", here or ".")
            return f"{new}#{anchor}" if anchor else new, True
        source = ROOT / path
        if path.startswith("docs/pictures/"):
            copy, kind = self.out / path[len("docs/"):], True
        else:  # files that are neither pages nor pictures are copied as they are
            place = path[len("docs/"):] if path.startswith("docs/") else f"source/{path}"
            copy, kind = self.out / "_extra" / place, False
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_file():
            shutil.copyfile(source, copy)
        new = copy.relative_to(self.out / ("" if kind else "_extra")).as_posix()
        return posixpath.relpath(new, here or "."), kind

    def convert(self, page, name):
        """The text of a page, with links that work on the site."""
        lines = (ROOT / page).read_text().splitlines()
        is_prose = {number for number, line in docs.prose(ROOT / page) if line}

        def link(match):
            whole, target = match[0], match[1]
            if re.match(r"[a-z]+:|#|//", target):
                return whole
            new, is_page = self.target(page, name, target)
            start = whole[:whole.rindex("](")]
            if is_page:
                return f"{start}]({new})"
            return f'<a href="{new}">{start.lstrip("[")}</a>'

        text = "\n".join(lines) + "\n"
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line) + 1)

        def in_prose(position):
            number = next(i for i, start in enumerate(starts) if start > position)
            return number in is_prose

        text = docs.LINK.sub(lambda m: link(m) if in_prose(m.start()) else m[0], text)
        return re.sub(r"^(\s*)<!-- (?:sample|from|run|fails|message|not run|figures|end)\b.*-->\n", "", text,
                      flags=re.MULTILINE)

    def pages(self):
        for path in docs.pages():
            page = path.relative_to(ROOT).as_posix()
            if page.startswith("docs/site/"):
                continue
            name = site_name(page)
            if name and not page.startswith("examples/"):
                text = self.convert(page, name)
                if name == "how-to/index":  # in the order of its table
                    listed = re.findall(r"\]\(([\w-]+)\.md\)", text)
                    text += "\n" + toctree(listed)
                self.write(name, text)

    def examples(self):
        rows = []
        for folder in sorted((ROOT / "examples").iterdir()):
            if not (folder / "CMakeLists.txt").is_file():
                continue
            name = folder.name
            sources = [path for path in sorted(folder.iterdir())
                       if path.suffix in (".cpp", ".py", ".txt")]
            sources.sort(key=lambda path: path.suffix == ".txt")
            text = f"# Example: {name}\n\n"
            for source in sources:
                language = {".cpp": "cpp", ".py": "python", ".txt": "cmake"}[source.suffix]
                text += (f"## {source.name}\n\n```{language}\n"
                         f"{source.read_text().rstrip()}\n```\n\n")
            self.write(f"examples/{name}", text)
            first = re.search(r"(?:^// .*\n)+", sources[0].read_text())
            line = re.sub(r"\n?// ?", " ", first[0]).strip() if first else ""
            rows.append((name, re.split(r"(?<=[.:]) ", line)[0].rstrip(":")))
        table = "".join(f"| [{name}]({name}.md) | {line} |\n" for name, line in rows)
        self.write("examples/index", "# Examples\n\nEach folder of `examples/` is a project to "
                   "start from. A test builds all of them against the installed library and "
                   "runs them.\n\n| example | |\n|---|---|\n" + table + "\n" +
                   toctree([name for name, _ in rows]))

    def landing(self):
        menu = ""
        listed = set()
        for caption, names in MENU:
            names = [name for name in names if name in self.written]
            listed.update(names)
            menu += toctree(names, caption)
        text = self.convert("docs/site/index.md", "index").replace("<!-- pages -->", menu)
        self.write("index", text)
        folders = ("examples/", "commands/", "headers/", "how-to/")
        missing = [name for name in sorted(self.written - listed - {"index"})
                   if not name.startswith(folders)]
        if missing:
            sys.exit(f"assemble.py: these pages are not in MENU: {', '.join(missing)}")


def toctree(names, caption=""):
    options = f":caption: {caption}\n" if caption else ":maxdepth: 1\n"
    return "```{toctree}\n:hidden:\n" + options + "\n" + "\n".join(names) + "\n```\n\n"


def main(arguments):
    out, xml, helps = (pathlib.Path(argument) for argument in arguments)
    shutil.rmtree(out, ignore_errors=True)
    (out / "_extra").mkdir(parents=True)
    (out / "_static").mkdir()
    shutil.copyfile(SITE / "conf.py", out / "conf.py")
    shutil.copyfile(SITE / "site.css", out / "_static/site.css")
    theme.repair(out / "_static")
    assembler = Assembler(out)
    assembler.pages()
    assembler.examples()
    for name, text in help_pages.pages(helps):
        assembler.write(name, text)
    for name, text in headers.pages(xml):
        assembler.write(name, text)
    assembler.landing()
    shutil.copytree(ROOT / "docs/pictures", out / "pictures", dirs_exist_ok=True)
    os.utime(out)


if __name__ == "__main__":
    main(sys.argv[1:])
