"""Checks the commands on the pages: every flag exists, and the values are valid.

    commands_test.py REPRISE COMMAND_SERVER PLUGIN

Commands are given to COMMAND_SERVER with --help, which checks the values and starts nothing.
Unknown flags are found in what --help lists. Commands in `inline code` may have placeholders
such as DIR, so only their flags are checked.
"""
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "tests/tools"))
import docs  # noqa: E402
from wrong_inputs_test import Server, run_alone  # noqa: E402

# Files that commands read.
FILES = ["tokens.bin", "tokens.u32", "letters.txt", "my.yaml", "before/summary.json",
         "after/summary.json", "page.html", "model.safetensors", "results-a/results.jsonl",
         "results-b/results.jsonl", "out/mnist/results.jsonl", "out/h200/results.jsonl",
         "out/cpu/results.jsonl", "docs/results/mnist-h200/results.jsonl",
         "docs/results/bert-h200/results.jsonl", "docs/results/checkpoints-cpu/results.jsonl",
         "Llama-3.2-1B/model.safetensors", "adapter/adapter_config.json", "a/results.jsonl",
         "b/results.jsonl", "whole/config.json", "part/config.json",
         "whole/summary.json", "small/summary.json"]


class Flags:
    """The flags of each subcommand, as --help lists them."""

    def __init__(self, reprise, plugin):
        self.reprise = reprise
        self.plugin = plugin
        self.known = {}
        listed = subprocess.run([reprise, "--help"], capture_output=True, text=True,
                                check=True).stdout
        self.subcommands = {"", *re.findall(r"^  ([a-z]+) ", listed, re.MULTILINE)}

    def of(self, subcommand):
        if subcommand not in self.known:
            words = [self.reprise, *([subcommand] if subcommand else []), "--help"]
            if subcommand in ("train", "plan", "profile", "verify", "study"):
                words[2:2] = ["--plugin", self.plugin]
            text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            self.known[subcommand] = {
                flag for line in text.splitlines() if re.match(r"  -", line)
                for flag in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", line.split("  ")[1])}
        return self.known[subcommand]


def words_of(command):
    """The words of the call of reprise in a command; empty if there is none. What follows an
    ellipsis, a comment or a pipe is left out."""
    command = re.split(r"(?:^|\s)(?:#|…|\.\.\.|\||>|2>|&&|;)", command.strip())[0]
    if re.match(r"(python3|docker|podman|man|cp|apt|sudo)\b", command):
        return []
    try:
        words = shlex.split(command)
    except ValueError:
        return []
    for at, word in enumerate(words):
        if word in ("reprise", "./reprise"):
            return words[at + 1:]
    return []


def pages_commands():
    """(where, words, whole) of every command on the pages; `whole` if it has no placeholders."""
    for page in docs.pages():
        for block in docs.blocks(page):
            if block.kind in ("indented", "sh", "console") and \
                    block.marker not in ("fails", "not run"):
                for line, command in docs.commands(block):
                    words = words_of(command)
                    if words:
                        yield f"{page.relative_to(ROOT)}:{line}", words, True
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            for code in re.findall(r"`((?:\./)?reprise [^`]+)`", line):
                words = words_of(code)
                if words:
                    yield f"{page.relative_to(ROOT)}:{number}", words, False


class Checker:
    def __init__(self, flags, server, folder):
        self.flags = flags
        self.server = server
        self.folder = folder

    def problems(self, words, whole):
        """What is wrong with a command; empty if nothing is."""
        subcommand, rest = words[0], words[1:]
        if subcommand.startswith("-"):
            subcommand, rest = "", words
        if "--" in rest:  # launch … -- train …
            inner = rest[rest.index("--") + 1:]
            rest = rest[:rest.index("--")]
            found = self.problems(inner, whole) if inner else []
            if found or subcommand != "launch":
                return found
            whole = False
        if subcommand and not re.fullmatch(r"[a-z]+", subcommand):
            return []  # a placeholder
        if subcommand not in self.flags.subcommands:
            return [f"there is no subcommand {subcommand}"]
        known = self.flags.of(subcommand)
        unknown = [word.split("=")[0] for word in rest if re.match(r"--?[a-zA-Z]", word)
                   and word.split("=")[0] not in known]
        if unknown:
            return [f"reprise {subcommand} has no flag {unknown[0]}"]
        if not whole:
            return []
        words = [subcommand, *rest, "--help"]
        if "--plugin" in words:  # COMMAND_SERVER takes none
            status, answer = run_alone([self.flags.reprise, *words], self.folder)
        else:
            status, answer = self.server.run(["reprise", *words])
        return [] if status == 0 else [answer.strip() or f"status {status}"]


def main(arguments):
    reprise, server, plugin = arguments
    failed = count = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            path = pathlib.Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        shutil.copyfile(plugin, pathlib.Path(folder) / "libforecast.so")
        checker = Checker(Flags(reprise, plugin), Server(server, folder), folder)
        for where, words, whole in pages_commands():
            count += 1
            for problem in checker.problems(words, whole):
                failed += 1
                print(f"{where}: reprise {' '.join(words)}\n  {problem}", file=sys.stderr)
        # The test itself has to fail for what is wrong.
        for words in (["train", "--bacth", "4"], ["train", "--batch", "x"], ["trian"],
                      ["launch", "-n", "2", "--", "train", "--bacth", "4"],
                      ["plan", "--memory", "8G"]):
            if not checker.problems(words, True):
                failed += 1
                print(f"reprise {' '.join(words)}: no problem was found", file=sys.stderr)
        checker.server.close()
    print(f"{count} commands, {failed} failed")
    return 1 if failed or count < 50 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
