"""Reads Doxygen's XML: descriptions as Markdown, declarations as C++."""
import re
import xml.etree.ElementTree as ElementTree

WIDTH = 78  # of a declaration


def looks_like_code(text):
    return bool(re.search(r";\s*(//.*)?$", text, re.MULTILINE))


def escaped(text):
    return re.sub(r"([\\`*_{}\[\]<>#|$])", r"\\\1", text)


class Markdown:
    """Converts descriptions. `link(refid, text)` returns the Markdown of a reference."""

    def __init__(self, link):
        self.link = link

    def inline(self, node):
        text = escaped(node.text or "")
        for child in node:
            text += self.element(child) + escaped(child.tail or "")
        return text

    def element(self, node):
        plain = "".join(node.itertext())
        if node.tag == "computeroutput":
            return f"`{plain}`"
        if node.tag == "ref":
            return self.link(node.get("refid"), plain)
        if node.tag in ("emphasis", "bold"):
            mark = "*" if node.tag == "emphasis" else "**"
            return f"{mark}{escaped(plain)}{mark}"
        if node.tag == "ulink":
            return f"[{escaped(plain)}]({node.get('url')})"
        if node.tag in ("verbatim", "programlisting"):
            language = "cpp" if looks_like_code(plain) else "text"
            code = plain.strip("\n").rstrip()
            return f"\n\n```{language}\n{code}\n```\n\n"
        if node.tag in ("itemizedlist", "orderedlist"):
            mark = "-" if node.tag == "itemizedlist" else "1."
            items = [self.blocks(item).strip().replace("\n", "\n   ") for item in node]
            return "\n\n" + "\n".join(f"{mark} {item}" for item in items) + "\n\n"
        if node.tag == "simplesect":
            return f"\n\n*{node.get('kind')}* {self.blocks(node)}"
        symbols = {"ndash": "–", "mdash": "—", "nonbreakablespace": " ", "linebreak": "\n"}
        return symbols.get(node.tag) or self.inline(node)

    def blocks(self, node):
        """The paragraphs of a description."""
        if node is None:
            return ""
        text = "\n\n".join(self.inline(part) for part in node if part.tag in ("para", "simplesect"))
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" if text.strip() else ""

    def description(self, member):
        parts = [self.blocks(member.find(tag)).strip()
                 for tag in ("briefdescription", "detaileddescription")]
        return "\n\n".join(part for part in parts if part)


def cpp(text):
    """C++ as Doxygen writes it, with the project's spacing."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"(?<=\d) ?'(?=\d)", "", text)  # Doxygen writes digit separators as " '"
    text = text.replace("< ", "<").replace(" >", ">")
    text = re.sub(r" ([&*]+) ?(?=\w)", r"\1 ", text)
    return re.sub(r" ([&*]+)(?=[,)>.]|$)", r"\1", text)


def text_of(node):
    return "".join(node.itertext()) if node is not None else ""


def template_of(node):
    parameters = node.find("templateparamlist")
    if parameters is None:
        return ""
    names = []
    for one in parameters:
        name = f"{text_of(one.find('type'))} {one.findtext('declname') or ''}".strip()
        default = text_of(one.find("defval"))
        names.append(cpp(name + (f" = {default}" if default else "")))
    return f"template <{', '.join(names)}>\n"


def wrapped(head, arguments, tail):
    """A declaration, with one line per parameter if it is too long for one line."""
    line = f"{head}({', '.join(arguments)}){tail}"
    if len(line) <= WIDTH or not arguments:
        return line
    return f"{head}(\n    " + ",\n    ".join(arguments) + f"){tail}"


def function(member):
    head = " ".join(filter(None, [
        "static" if member.get("static") == "yes" else "",
        "explicit" if member.get("explicit") == "yes" else "",
        "virtual" if member.get("virt") in ("virtual", "pure-virtual") else "",
        text_of(member.find("type")), member.findtext("name")]))
    head = re.sub(r"^(static|virtual|explicit) (?=\1\b)", "", cpp(head))
    arguments = []
    for one in member.findall("param"):
        name = one.findtext("declname") or ""
        default = text_of(one.find("defval"))
        kind = text_of(one.find("type"))
        text = cpp(f"{kind} {name}")
        arguments.append(text + (f" = {cpp(default)}" if default else ""))
    signature = member.findtext("argsstring") or ""
    tail = signature[signature.rindex(")") + 1:] if ")" in signature else ""
    tail = re.sub(r"\s*=\s*0", " = 0", tail).replace("=default", " = default")
    tail = tail.replace("=delete", " = delete")
    return template_of(member) + wrapped(head, arguments, tail) + ";"


def declaration(member):
    """A member or a free function, type, variable or macro as C++."""
    kind = member.get("kind")
    if kind == "function":
        return function(member)
    name = member.findtext("name")
    if kind == "enum":
        strong = "enum class" if member.get("strong") == "yes" else "enum"
        values = [value.findtext("name") + (f" {value.findtext('initializer')}"
                                            if value.findtext("initializer") else "")
                  for value in member.findall("enumvalue")]
        line = f"{strong} {name} {{ {', '.join(values)} }};"
        if len(line) > WIDTH:
            line = f"{strong} {name} {{\n  " + ",\n  ".join(values) + "\n};"
        return line
    if kind == "typedef":
        return template_of(member) + cpp(member.findtext("definition") or "") \
            .replace("reprise::", "") + ";"
    if kind == "define":
        names = [text_of(one) for one in member.findall("param")]
        return f"#define {name}" + (f"({', '.join(names)})" if names else "")
    initializer = cpp(member.findtext("initializer") or "")
    if initializer and initializer[0] not in "={":
        initializer = f"= {initializer}"
    space = "" if initializer.startswith("{") else " "
    static = "static " if member.get("static") == "yes" else ""
    kind = cpp(text_of(member.find("type")))
    return static + f"{kind} {name}{member.findtext('argsstring') or ''}" + \
        (f"{space}{initializer}" if initializer else "") + ";"


def parse(path):
    return ElementTree.parse(path).getroot().find("compounddef")
