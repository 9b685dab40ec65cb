"""Counts how hard the tree is to change, at any revision.

    python3 scripts/tree_metrics.py [REVISION...]

Prints one column per revision (default: HEAD):
- files that name a representative of its kind, which are the files that adding another one
  touches: a model, a recomputation strategy, a dataset, an optimizer, an operator with a
  CUDA kernel and a training flag (tests and docs are not counted);
- installed headers;
- data members of the largest class, and the class;
- lines of the longest function, and the function;
- comparisons of options with string literals.
"""
import re
import subprocess
import sys

# What a new one of its kind would be named like.
KINDS = {
    "model": r"\bvgg|VGG",
    "strategy": r"[kK]Revolve|\"revolve",
    "dataset": r"fashion.mnist",
    "optimizer": r"[aA]dafactor",
    "operator with kernel": r"\badd_norm|AddNorm",
    "flag": r"quantize.embeddings",
}
SOURCES = ["include", "src", "tools", "CMakeLists.txt"]
OPTION_COMPARISON = re.compile(r'[=!]= "[a-z][a-z0-9-]*"')
OPTION_FOLDERS = ("src/train", "src/study", "tools", "src/plan")


def git(*arguments):
    return subprocess.run(["git", *arguments], capture_output=True, text=True,
                          check=False).stdout


def files(revision, *folders):
    return git("ls-tree", "-r", "--name-only", revision, "--", *folders).split()


def read(revision, path):
    return git("show", f"{revision}:{path}")


def strip_comments(text):
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)


def touched(revision, pattern):
    found = git("grep", "-lE", pattern, revision, "--", *SOURCES).split()
    return [line.split(":", 1)[1] for line in found]


def bodies(text, opening):
    """(match, body, first line) of every block whose head matches `opening`."""
    for match in re.finditer(opening, text, re.M):
        depth, at = 1, match.end()
        while depth and at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        yield match, text[match.end():at - 1], text.count("\n", 0, match.start()) + 1


def data_members(body):
    """Members declared directly in a class body: statements that end in `name_`."""
    flat, depth = [], 0
    for character in body:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            flat.append(character)
    statements = "".join(flat).split(";")
    return [s for s in statements
            if re.search(r"[\w>&*]\s+\*?\w+_\s*(=[^=].*|\}?)$", s.strip(), re.S)]


def largest_class(sources):
    best = (0, "")
    for path, text in sources.items():
        for match, body, _ in bodies(text, r"^\s*(?:class|struct)\s+([\w:]+)[^;{}()]*\{"):
            best = max(best, (len(data_members(body)), f"{match[1]} ({path})"))
    return best


def longest_function(sources):
    best = (0, "")
    opening = r"^[\w:<>&*,\s]*?\b([\w:~]+)\([^;{}]*\)[^;{}()]*\{\n"
    for path, text in sources.items():
        if not path.endswith(".cpp"):
            continue
        for match, body, _ in bodies(text, opening):
            if match[1] in ("if", "for", "while", "switch", "namespace"):
                continue
            best = max(best, (body.count("\n") + 1, f"{match[1]} ({path})"))
    return best


def measure(revision):
    sources = {path: strip_comments(read(revision, path))
               for path in files(revision, "include", "src", "tools")
               if path.endswith((".h", ".cpp"))}
    rows = {f"files to add: {kind}": str(len(touched(revision, pattern)))
            for kind, pattern in KINDS.items()}
    rows["installed headers"] = str(
        sum(path.endswith(".h") for path in files(revision, "include")))
    rows["members of the largest class"] = "{} {}".format(*largest_class(sources))
    rows["lines of the longest function"] = "{} {}".format(*longest_function(sources))
    rows["options compared as strings"] = str(
        sum(len(OPTION_COMPARISON.findall(text)) for path, text in sources.items()
            if path.startswith(OPTION_FOLDERS)))
    return rows


def main():
    revisions = sys.argv[1:] or ["HEAD"]
    columns = [measure(revision) for revision in revisions]
    print("| | " + " | ".join(revisions) + " |")
    print("| --- |" + " ---: |" * len(revisions))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(column[name] for column in columns) + " |")


if __name__ == "__main__":
    main()
