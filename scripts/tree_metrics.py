"""Counts how hard the tree is to change, at any revision.

    python3 scripts/tree_metrics.py [--files] [REVISION...]

Prints one column per revision (default: HEAD); --files lists the files that were counted.

Files to add: the files that have to be written or edited to add one more of a kind, in
include/, src/, tools/, cmake/ and CMakeLists.txt; tests and documentation come on top. Those
that exist stand for a new one. A file counts for a representative if the file has its name,
or if its code registers, declares, dispatches to or lists it, which the pattern of the kind
finds. Comments do not count, and neither do uses:
- a model that calls an operator is outside the folders of the kind;
- code that reads the value of a flag, or an error message that mentions it, neither declares
  the member nor has a string that is the flag's name. (Before there was a table of fields,
  the key of cached costs and the agreement of ranks had to list the members too. They are
  not counted, in favour of the past.)
A kind's figure is the median of its representatives, the larger of the middle two, with
their range. The range shows what the patterns cannot tell apart from a registration: sgd is
also the name of a fused operator in compat/, the planner compares plans with sqrt, and the
setup gives checkpoints the sizes of outputs.

The figure of flags depends on the rule. If error messages such as "[--base-batch] needs
--scale-lr" counted, it would be 4 at 51c30b1 and 3 after the redesign.

Options compared as strings: comparisons of a value with a string literal in src/train,
src/study, src/plan and tools, each of which an enum could replace.

Class and function: the class with the most data members, and the function with the most
lines.
"""
import re
import statistics
import subprocess
import sys

TREE = ["include", "src", "tools", "cmake", "CMakeLists.txt"]
# Of each kind: the representatives, the pattern by which C++ code registers or declares
# NAME (Name in camel case, NA_ME in snake case), and the files outside of which a mention is
# a use. CMake code counts if it has the name.
KINDS = {
    "model": (["vgg", "unet", "resnet"], r"NAME", r".*"),
    "strategy": (["revolve", "every", "checkpoints", "sqrt"],
                 r"StrategyKind::kName\b|enum class StrategyKind[^}]*\bkName\b"
                 r"|\"NAME:\d", r".*"),
    # A name that ends a statement is a default, not an entry of a list.
    "dataset": (["fashion-mnist", "random"],
                r"\"NAME\"(?!\s*;)|, NAME,|\bNAME_dataset|data/NAME\.",
                r"include/|src/data/|tools/"),
    "optimizer": (["adafactor", "adam8bit", "sgd"], r"\bNAME\b|_NAME\b|\bNAME_", r".*"),
    "operator with kernel": (["add_norm", "image_conv", "norm_act"], r"\bNAME|\bName",
                             r"include/reprise/(ops/|lean/|\w+\.h)|src/(ops|lean)/"),
    # All flags of two words, because single words have other meanings as well.
    "flag": (["base-batch", "eval-every", "fp32-products", "global-batch", "host-memory",
              "image-size", "loss-scale", "lr-lowest", "lr-schedule",
              "quantize-embeddings", "random-samples", "save-every", "scale-lr",
              "sync-norm", "weight-copies", "weight-decay"],
             r"\"(--)?NAME\"|\"NA_ME\"|^  [\w:]+ NA_ME( = [^;]*|\{\})?;",
             r"include/reprise/train/|src/(train|study)/|tools/"),
}
OPTION_COMPARISON = re.compile(r'[=!]= "[a-z][a-z0-9-]*"')
OPTION_FOLDERS = ("src/train", "src/study", "tools", "src/plan")


def git(*arguments):
    return subprocess.run(["git", *arguments], capture_output=True, text=True,
                          check=True).stdout


def strip_comments(path, text):
    """The text without comments and with as many lines."""
    if path.endswith((".txt", ".cmake")):
        return re.sub(r"#[^\n]*", "", text)
    # Strings are matched first, so that "//" in one of them is no comment.
    token = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.S)
    return token.sub(lambda m: m[0] if m[0][0] == '"' else "\n" * m[0].count("\n"), text)


def tree(revision):
    """Text of every file of the revision, without comments."""
    paths = git("ls-tree", "-r", "--name-only", revision, "--", *TREE).split()
    return {path: strip_comments(path, git("show", f"{revision}:{path}")) for path in paths
            if path.endswith((".h", ".cpp", ".cu", ".cuh", ".txt", ".cmake"))}


def touched(files, name, pattern, scope):
    """The files that adding `name` touched."""
    snake = name.replace("-", "_")
    camel = "".join(word.capitalize() for word in snake.split("_"))
    pattern = pattern.replace("NA_ME", snake).replace("NAME", name).replace("Name", camel)
    own = re.compile(rf"(?:{scope})(?:.*/)?{snake}\.\w+$")
    code = re.compile(pattern, re.M)
    build = re.compile(rf"\b{name}\b")
    return [path for path, text in files.items()
            if (build.search(text) if path.endswith((".txt", ".cmake")) else
                own.match(path) or re.match(scope, path) and code.search(text))]


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
            best = max(best, (len(data_members(body)), f"`{match[1]}`"))
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
            best = max(best, (body.count("\n") + 1, f"`{match[1]}`"))
    return best


def measure(revision, show):
    files = tree(revision)
    sources = {path: text for path, text in files.items() if path.endswith((".h", ".cpp"))}
    rows = {}
    for kind, (names, pattern, scope) in KINDS.items():
        found = {name: touched(files, name, pattern, scope) for name in names}
        # A representative that the revision does not have yet.
        counts = [len(paths) for paths in found.values() if paths]
        rows[f"files to add: {kind}"] = (
            f"{statistics.median_high(counts)} ({min(counts)}–{max(counts)})")
        if show:
            for name, paths in found.items():
                print(f"{revision}: {kind} {name}: {len(paths)}", *paths, sep="\n  ")
    rows["installed headers"] = str(
        sum(path.startswith("include/") for path in sources))
    rows["members of the largest class"] = "{} ({})".format(*largest_class(sources))
    rows["lines of the longest function"] = "{} ({})".format(*longest_function(sources))
    rows["options compared as strings"] = str(
        sum(len(OPTION_COMPARISON.findall(text)) for path, text in sources.items()
            if path.startswith(OPTION_FOLDERS)))
    return rows


def main():
    arguments = sys.argv[1:]
    show = "--files" in arguments
    revisions = [one for one in arguments if one != "--files"] or ["HEAD"]
    columns = [measure(revision, show) for revision in revisions]
    print("| | " + " | ".join(revisions) + " |")
    print("| --- |" + " ---: |" * len(revisions))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(column[name] for column in columns) + " |")


if __name__ == "__main__":
    main()
