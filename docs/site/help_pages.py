"""Pages of the site for the command, from what --help prints."""
import pathlib
import re

import doxygen

COLUMN = 30  # of the descriptions in --help
ORDER = ["train", "plan", "profile", "launch", "verify", "study", "report", "devices"]


def items(lines):
    """(left, right, continuation lines) of a list of flags or subcommands."""
    found = []
    for line in lines:
        if re.match(r"  \S", line):
            left, right = line[:COLUMN].strip(), line[COLUMN:].strip()
            if line[COLUMN - 1:COLUMN].strip() or (len(line) > COLUMN and
                                                   line[COLUMN - 2:COLUMN] != "  " and
                                                   "  " not in line[2:]):
                left, right = line.strip(), ""
            found.append([left, right, []])
        elif found and not found[-1][1]:
            found[-1][1] = line.strip()
        elif found:
            found[-1][2].append(line.strip())
    return found


def flag(left):
    """The flag, its value and its default: --data NAME|PATH, --lr FLOAT=0.001."""
    name, _, value = left.partition(" ")
    default = ""
    if "=" in value:
        value, _, default = value.partition("=")
    return name, value, default


def definition(item):
    left, right, more = item
    name, value, default = flag(left)
    if not name.startswith("-"):  # an argument
        term = f"`{left}`"
    else:
        # The values of an enumeration may be broken into lines between them.
        value = value.replace("|", "`|<wbr>`") if "|" in value else value
        anchor = name.split(",")[-1].lstrip("-")
        names = ", ".join(f"`{one}`" for one in name.split(","))
        term = f'<a id="{anchor}"></a>{names}' + (f" `{value}`" if value else "")
    text = sentence(right)
    text += f" Default: `{default}`." if default and not more else ""
    if more:
        rows = [re.split(r"\s{2,}", line, maxsplit=1) for line in more if line]
        text += "\n\n" + "\n".join(
            f"  - `{row[0]}`" + (f": {doxygen.escaped(row[1])}" if len(row) > 1 else "")
            for row in rows)
    return f"{term}\n: {text.strip()}\n\n"


def sentence(text):
    return doxygen.escaped(text) + ("" if text.endswith((".", ":")) else ".")


def page(name, text):
    """The page of a subcommand, from its --help."""
    about, usage, rest = re.match(r"(.*?)\nUsage: (.*?)\n(.*)", text, re.DOTALL).groups()
    result = f"# reprise {name}".rstrip() + f"\n\n{sentence(about)}\n\n```text\n{usage}\n```\n\n"
    sections = re.split(r"^(\w[\w ]*):$\n", rest, flags=re.MULTILINE)
    footer = ""
    for title, body in zip(sections[1::2], sections[2::2]):
        lines = body.splitlines()
        while lines and not lines[-1].startswith("  "):  # text below the last list
            footer = lines.pop() + "\n" + footer
        result += f"## {title}\n\n" + "".join(map(definition, items(lines)))
    return result + (f"{doxygen.escaped(footer.strip())}\n" if footer.strip() else "")


def pages(helps):
    """(name, text) of every page. `helps` has a file per subcommand, and one named reprise
    for the command itself."""
    helps = pathlib.Path(helps)
    whole = (helps / "reprise").read_text()
    found = {path.name for path in helps.iterdir()} - {"reprise"}
    names = [name for name in ORDER if name in found] + sorted(found - set(ORDER))
    listed = re.search(r"^Subcommands:\n((?:  .*\n)+)", whole, re.MULTILINE)[1]
    rows = "".join(f"| [{left}]({left}.md) | {doxygen.escaped(right)} |\n"
                   for left, right, _ in items(listed.splitlines()))
    footer = whole[whole.index(listed) + len(listed):].strip()
    yield "commands/index", (
        "# Command\n\nThese pages are what `reprise --help` and `reprise SUBCOMMAND --help` "
        "print. [Training](../training.md), [planning](../planning.md), "
        "[studies](../studies.md) and [ranks](../ranks.md) describe how the parts work.\n\n"
        f"| subcommand | |\n|---|---|\n{rows}\n{doxygen.escaped(footer)}\n\n"
        "```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n")
    for name in names:
        yield f"commands/{name}", page(name, (helps / name).read_text())
