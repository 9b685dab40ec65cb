"""Pages of the site for the public headers, from Doxygen's XML."""
import collections
import pathlib
import re

import doxygen

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
HEADERS = ROOT / "include/reprise"

# Folders in the order in which a reader meets them, and what they are about.
FOLDERS = {
    "": "Headers that include all of a component, the version, the command as a function",
    "recompute": "Gradient checkpointing: stages, chains, schedules, checkpoint()",
    "accumulate": "Gradient accumulation",
    "plan": "Plans for a memory budget",
    "memory": "Meters of memory, host memory",
    "ops": "Operators that save less for the backward, or need fewer passes over memory",
    "verify": "Comparison of trainings with and without recomputation",
    "train": "The trainer",
    "data": "Datasets, streams, files",
    "models": "Models, adapters, weights, TorchScript",
    "distributed": "Training by several processes",
    "observe": "Observation of devices",
    "study": "Studies",
    "report": "Reports of studies",
    "base": "Sizes as text, errors, names of enumerators",
}


def introduction(path):
    """The comment of a header about all of it: before its includes or its namespace, as
    paragraphs and code."""
    comments = re.findall(r"((?:^///.*\n)+)(?=\n*(?:#include|namespace|\n#define))",
                          path.read_text(), re.MULTILINE)
    text = "\n\n".join("\n".join(re.sub(r"^/// ?", "", line) for line in one.splitlines())
                       for one in comments)
    result = ""
    for part in re.split(r"\n\s*\n", text):
        lines = part.splitlines()
        if lines and all(line.startswith("    ") for line in lines):
            code = "\n".join(line[4:] for line in lines)
            language = "cpp" if doxygen.looks_like_code(code) else "text"
            result += f"```{language}\n{code}\n```\n\n"
        elif part.strip():
            result += doxygen.escaped(part) + "\n\n"
    return result.replace("```\n\n```cpp\n", "\n").replace("```\n\n```text\n", "\n")


class Reference:
    """All documented declarations, by header."""

    def __init__(self, xml):
        self.xml = xml
        self.by_header = collections.defaultdict(list)  # (line, kind, node)
        self.pages = {}  # refid: (page, anchor)
        self.markdown = doxygen.Markdown(self.link)
        for entry in doxygen.ElementTree.parse(xml / "index.xml").getroot():
            kind, name = entry.get("kind"), entry.findtext("name")
            if kind in ("namespace", "class", "struct", "concept", "file"):
                self.add(kind, name, doxygen.parse(xml / f"{entry.get('refid')}.xml"))

    def add(self, kind, name, node):
        if "detail" in name or name.startswith(("std", "c10", "torch", "at")):
            return
        if kind in ("class", "struct", "concept"):
            if name.startswith("reprise::EnumText"):
                return  # its specializations are names of enumerators
            header = self.header_of(node)
            if header and ("reprise::" in name):
                self.by_header[header].append((int(node.find("location").get("line")),
                                               kind, node))
                self.pages[node.get("id")] = (header, short(name))
                for member in public_members(node):
                    self.pages[member.get("id")] = (header, short(name))
            return
        for section in node.iter("sectiondef"):
            for member in section:
                header = self.header_of(member)
                hidden = "detail" in (member.findtext("definition") or "") or \
                    re.match(r"REPRISE_(VERSION|DETAIL)", member.findtext("name"))
                if header and not hidden and (kind == "namespace" or
                                              member.get("kind") == "define"):
                    self.by_header[header].append(
                        (int(member.find("location").get("line")), "member", member))
                    self.pages[member.get("id")] = (header, self.title(member))

    def header_of(self, node):
        place = node.find("location")
        path = (place.get("declfile") or place.get("file")) if place is not None else ""
        name = path[len("reprise/"):-2] if path.startswith("reprise/") else ""
        return name if (HEADERS / f"{name}.h").is_file() else ""

    def title(self, member):
        name = member.findtext("name")
        return f"{name}()" if member.get("kind") == "function" else name

    def link(self, refid, text):
        if refid not in self.pages:
            return f"`{text}`" if re.search(r"[:()_<]", text) else doxygen.escaped(text)
        page, title = self.pages[refid]
        up = "../" * self.here.count("/")
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        return f"[{doxygen.escaped(text)}]({up}{page}.md#{anchor})"

    def described(self, code, description, level=""):
        text = f"```cpp\n{code}\n```\n\n"
        if not description:
            return text
        return text + (f'<div class="about">\n\n{description}\n\n</div>\n\n' if level
                       else f"{description}\n\n")

    def members(self, node):
        """Members of a class; those without a description are shown together."""
        text, plain = "", []
        for member in public_members(node):
            description = self.markdown.description(member)
            if not description:
                plain.append(doxygen.declaration(member))
                continue
            if plain:
                text += self.described("\n".join(plain), "")
                plain = []
            text += self.described(doxygen.declaration(member), description, "member")
        return text + (self.described("\n".join(plain), "") if plain else "")

    def compound(self, kind, node):
        name = node.findtext("compoundname")
        bases = [one.text for one in node.findall("basecompoundref")]
        inherits = " : " + ", ".join(f"public {doxygen.cpp(base)}" for base in bases) \
            if bases else ""
        if kind == "concept":
            code = doxygen.cpp(node.findtext("initializer") or "").replace("reprise::", "")
        else:
            code = doxygen.template_of(node) + f"{kind} {short(name)}{inherits};"
        return (f"## {doxygen.escaped(short(name))}\n\n" +
                self.described(code, self.markdown.description(node)) + self.members(node))

    def page(self, header):
        """The page of a header, in the order of the header."""
        path = HEADERS / f"{header}.h"
        self.here = header
        text = f"# {header}.h\n\n```cpp\n#include <reprise/{header}.h>\n```\n\n"
        text += introduction(path)
        if path.parent == HEADERS and not self.by_header[header]:
            includes = re.findall(r"#include <reprise/([^>]+)\.h>", path.read_text())
            return text + "It includes:\n\n" + "".join(
                f"- [{one}.h]({one}.md)\n" for one in includes)
        last = ""
        for _, kind, node in sorted(self.by_header[header], key=lambda one: one[0]):
            if kind != "member":
                text += self.compound(kind, node)
                last = ""
                continue
            title = self.title(node)
            if title != last:  # overloads share a heading
                text += f"## {doxygen.escaped(title)}\n\n"
            text += self.described(doxygen.declaration(node), self.markdown.description(node))
            last = title
        return text


def short(name):
    return re.sub(r"^(reprise::)", "", name)


def public_members(node):
    found = [member for section in node.findall("sectiondef")
             if section.get("kind", "").startswith(("public", "protected", "user-defined"))
             for member in section.findall("memberdef")
             if "= delete" not in (member.findtext("argsstring") or "").replace("=delete", "= delete")
             and not member.findtext("name").startswith("~") and
             member.get("prot") != "private" and member.get("kind") != "friend"]
    return sorted(found, key=lambda member: int(member.find("location").get("line")))


def names_of(reference, header):
    """Links to what a header declares."""
    reference.here = "index"
    found = {}
    for _, _, node in sorted(reference.by_header[header], key=lambda one: one[0]):
        page, title = reference.pages[node.get("id")]
        if "::" not in title:
            found[title] = reference.link(node.get("id"), title)
    return ", ".join(found.values())


def pages(xml):
    """(name, text) of every page. `xml` is the directory of Doxygen's output."""
    reference = Reference(pathlib.Path(xml))
    index = ("# Headers\n\n`<reprise/core.h>`, `<reprise/train.h>` and `<reprise/study.h>` "
             "include everything of their component. All names are in the namespace "
             "`reprise`.\n\n")
    found = {path.parent.relative_to(HEADERS).as_posix().replace(".", "")
             for path in HEADERS.rglob("*.h")}
    if found != set(FOLDERS):
        raise SystemExit(f"headers.py: FOLDERS differs from include/reprise in "
                         f"{found ^ set(FOLDERS)}")
    tree = []
    for folder, about in FOLDERS.items():
        index += f"## {folder or 'reprise'}\n\n{about}.\n\n| header | declares |\n|---|---|\n"
        for path in sorted((HEADERS / folder).glob("*.h")):
            header = path.relative_to(HEADERS).as_posix()[:-2]
            names = names_of(reference, header) or "all headers of its component"
            index += f"| [{doxygen.escaped(header)}.h]({header}.md) | {names} |\n"
            tree.append(header)
            yield f"headers/{header}", reference.page(header)
        index += "\n"
    yield "headers/index", index + "```{toctree}\n:hidden:\n:maxdepth: 1\n\n" + \
        "\n".join(tree) + "\n```\n"
