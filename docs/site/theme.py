"""Repairs the files of Debian 12's furo that do not work in a site that is opened from a disk:
its style imports a file of the root directory, has no dark colours unless they are chosen by a
click, and its script is a module. Files that need no repair stay as they are."""
import pathlib
import re


def repaired_style(text):
    text = re.sub(r"@import url\(/[^)]*\);?", "", text)
    dark = re.search(r'body\[data-theme="dark"\] \{([^}]*)\}', text)
    if dark and "prefers-color-scheme" not in text:
        text += ("\n@media not print {\n  @media (prefers-color-scheme: dark) {\n"
                 f'    body[data-theme="auto"] {{{dark[1]}}}\n  }}\n}}\n')
    return text


def repaired_script(text, folder):
    found = re.match(r'import \w+ from "\./([\w.-]+)";\n', text)
    if not found:
        return text
    return (folder / found[1]).read_text() + ";\n" + text[found.end():]


def repair(static):
    """Writes the repaired files to `static`, whose files replace those of the theme."""
    import furo
    folder = pathlib.Path(furo.__file__).parent / "theme/furo/static"
    script, style = folder / "scripts/furo.js", folder / "styles/furo.css"
    for path, text in ((style, repaired_style(style.read_text())),
                       (script, repaired_script(script.read_text(), script.parent))):
        copy = static / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
