"""Checks that every invalid input is reported quickly, with the right exit status, in one
short paragraph that names the flag and the nearest name, without internal names.

    wrong_inputs_test.py REPRISE [FILTER]
"""
import concurrent.futures
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

from wrong_inputs import CASES, UNREADABLE, make_files

MAX_SECONDS = 60  # per case, on a busy machine
MOST_LINES = 3
MOST_LETTERS = 500
# Texts that must not reach users: names of C++ functions and types, messages of libraries.
FORBIDDEN = re.compile(
    r"::|\bstd\b|\bc10\b|[A-Za-z_]\w*\(|Exception raised from|int64|nlohmann|"
    r"json\.exception|yaml-cpp|terminate called|INTERNAL ASSERT|Could not convert|"
    r"(^|: )\[[A-Za-z_][\w: '-]*\] ",
    re.MULTILINE,
)


def wrong_with(command, case, files, folder):
    """The problems with the output of a case; empty if there are none."""
    text, status, *parts = case
    text = re.sub(r"\{([^}]+)\}", lambda name: files[name[1]], text)
    words = [command, *shlex.split(text)]
    try:
        ran = subprocess.run(words, capture_output=True, text=True, errors="replace",
                             timeout=MAX_SECONDS, cwd=folder, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return [f"not answered within {MAX_SECONDS} s"]
    answer = ran.stderr
    problems = []
    if ran.returncode != status:
        problems.append(f"status {ran.returncode}, expected {status}")
    if len(answer.splitlines()) > MOST_LINES or len(answer) > MOST_LETTERS:
        problems.append("not a short paragraph")
    if not answer.startswith("reprise: "):
        problems.append("does not begin with reprise:")
    if status == 2 and "\nSee: reprise " not in answer:
        problems.append("does not point to the help")
    if found := FORBIDDEN.search(answer):
        problems.append(f"has '{found.group()}'")
    problems += [f"lacks '{part}'" for part in parts if part not in answer]
    return [f"{problem}\n    {answer.strip()[:600]}" for problem in problems]


def check_statuses(command, folder):
    """Every subcommand fails if its output cannot be written."""
    problems = []
    for words in (["--help"], ["--version"], ["devices"], ["study", "--list"],
                  ["train", "--help"], ["devices", "--format", "json"]):
        with open("/dev/full", "w", encoding="utf-8") as full:
            ran = subprocess.run([command, *words], stdout=full, stderr=subprocess.PIPE,
                                 text=True, cwd=folder, check=False)
        if ran.returncode != 1 or "cannot write to standard output" not in ran.stderr:
            problems.append(f"{words} > /dev/full: status {ran.returncode}: {ran.stderr}")
    return problems


def main():
    command = os.path.abspath(sys.argv[1])
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    cases = CASES + ([] if os.geteuid() == 0 else UNREADABLE)
    cases = [case for case in cases if only in case[0]]
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("RANK", "WORLD_SIZE", "REPRISE_PAGE"):
        os.environ.pop(name, None)
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        files_at = pathlib.Path(scratch) / "files"
        folder = pathlib.Path(scratch) / "work"
        files_at.mkdir()
        folder.mkdir()
        files = make_files(files_at)
        before = sorted(files_at.rglob("*"))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            answers = pool.map(lambda case: wrong_with(command, case, files, folder), cases)
            for case, problems in zip(cases, answers):
                failures += bool(problems)
                for problem in problems:
                    print(f"FAILED: reprise {case[0]}: {problem}")
        for problem in [] if only else check_statuses(command, folder):
            failures += 1
            print(f"FAILED: {problem}")
        left = sorted(folder.iterdir()) + sorted(set(files_at.rglob("*")) - set(before))
        left = [path for path in left if path.name != "lock"]
        if left:
            failures += 1
            print(f"FAILED: left behind: {left}")
    print(f"{len(cases)} wrong inputs, {failures} failures")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
