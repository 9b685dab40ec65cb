"""Checks that every invalid input is reported quickly, with the right exit status, in one
short paragraph that names the flag and the nearest name, without internal names.

    wrong_inputs_test.py REPRISE COMMAND_SERVER [FILTER]

Most cases run in COMMAND_SERVER, a process that forks for each of them, some in REPRISE.
"""
import concurrent.futures
import os
import pathlib
import queue
import re
import shlex
import subprocess
import sys
import tempfile
import threading

from wrong_inputs import CASES, UNREADABLE, make_files

MAX_SECONDS = 60  # per case, on a busy machine
ALONE = 25  # one of so many cases has a process of its own
MOST_LINES = 3
MOST_LETTERS = 500
# Texts that must not reach users: names of C++ functions and types, messages of libraries.
FORBIDDEN = re.compile(
    r"::|\bstd\b|\bc10\b|[A-Za-z_]\w*\(|Exception raised from|int64|nlohmann|"
    r"json\.exception|yaml-cpp|terminate called|INTERNAL ASSERT|Could not convert|"
    r"(^|: )\[[A-Za-z_][\w: '-]*\] ",
    re.MULTILINE,
)


class Server:
    """Runs commands in forks of one process."""

    def __init__(self, program, folder):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, cwd=folder)

    def run(self, words):
        """Returns the exit status and what was written to standard error."""
        coded = [os.fsencode(word) for word in words]
        request = f"{len(coded)}\n".encode()
        request += b"".join(f"{len(word)} ".encode() + word for word in coded)
        timer = threading.Timer(MAX_SECONDS, self.process.kill)
        timer.start()
        self.process.stdin.write(request + b"\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().split()
        if not answer:
            raise subprocess.TimeoutExpired(words, MAX_SECONDS)
        text = self.process.stdout.read(int(answer[1]))
        timer.cancel()
        return int(answer[0]), text.decode(errors="replace")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def run_alone(words, folder):
    ran = subprocess.run(words, capture_output=True, text=True, errors="replace",
                         timeout=MAX_SECONDS, cwd=folder, stdin=subprocess.DEVNULL,
                         check=False)
    return ran.returncode, ran.stderr


def wrong_with(case, words, run):
    """The problems with the output of a case; empty if there are none. `run` returns its exit
    status and its standard error."""
    _, status, *parts = case
    try:
        returned, answer = run(words)
    except subprocess.TimeoutExpired:
        return [f"not answered within {MAX_SECONDS} s"]
    problems = []
    if returned != status:
        problems.append(f"status {returned}, expected {status}")
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
    command, program = map(os.path.abspath, sys.argv[1:3])
    only = sys.argv[3] if len(sys.argv) > 3 else ""
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
        servers = queue.SimpleQueue()
        for _ in range(2):
            servers.put(Server(program, folder))

        def check(number):
            case = tuple(part if isinstance(part, int) else
                         re.sub(r"\{([^}]+)\}", lambda name: files.get(name[1], name[0]), part)
                         for part in cases[number])
            text = case[0]
            words = [command, *shlex.split(text)]
            if number % ALONE == 0:
                return wrong_with(case, words, lambda words: run_alone(words, folder))
            server = servers.get()
            try:
                return wrong_with(case, words, server.run)
            finally:
                servers.put(server)

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for case, problems in zip(cases, pool.map(check, range(len(cases)))):
                failures += bool(problems)
                for problem in problems:
                    print(f"FAILED: reprise {case[0]}: {problem}")
        while not servers.empty():
            servers.get().close()
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
