#!/usr/bin/env python3
"""Lets each file operation of a training, a resume, a study and a report fail, one at a time.

    file_faults_test.py REPRISE [--every N | --some N]

After each failure, the state that was last reported as saved must be whole, a resume from
there must end with the same bytes as a training without failures, and the messages must name
the file and the system's reason. --every 1 tries all operations, --every N each N-th. Without
it, there is one of each kind of operation on each kind of file, of which --some limits the
number per command.
"""
import argparse
import errno
import os
import re
import shutil
import sys

from fault_shim import Shim, TRAIN, last_saved, states, tensors_of

STEPS = 6
MORE_STEPS = 10
# A command that succeeds need not report these: what cannot be read is read again, measured
# or not needed, and what cannot be removed is removed by a later save.
SILENT = {"lseek", "opendir", "read", "unlink"}
STUDY = "runs:\n  - {model: mlp, depth: 1, width: 8, data: random, random-samples: 16, " \
        "batch: 4, steps: 2, threads: 1, workers: 1}\n"


class Failure(Exception):
    pass


def require(condition, text):
    if not condition:
        raise Failure(text)


class Scenario:
    """A command whose file operations fail. `after` checks what is left."""

    def __init__(self, shim, name):
        self.shim = shim
        self.name = name
        self.directory = shim.work / name
        self.target = self.directory / "run"

    def prepare(self):
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()

    def attempt(self, fail_at):
        self.prepare()
        reason = errno.ENOSPC if fail_at % 2 else errno.EIO
        result = self.shim.run(self.directory, self.words(), fail_at, reason)
        failed = [op for op in result.operations if op.number == fail_at and fail_at > 0]
        require(result.status in (0, 1, 2), f"ended with status {result.status}")
        if fail_at == 0:
            require(result.status == 0, "failed without a fault")
        elif failed:
            self.check_message(result, failed[0], os.strerror(reason))
        self.after(result)
        return result

    def check_message(self, result, failed, reason):
        reads = failed.name == "open" and int(failed.arguments) & os.O_ACCMODE == os.O_RDONLY
        folder = failed.path in (str(self.directory), str(self.target))
        if result.status == 0 and (failed.name in SILENT or reads and not folder):
            return
        # Temporary files are those of the file to write, or a trial in a directory.
        name = re.sub(r"\.tmp-.*", "", os.path.basename(failed.path))
        if name == ".reprise":
            if failed.name == "unlink":
                return
            name = str(self.directory)
        require(name in result.err, f"no message names {name}")
        require(reason in result.err or "not whole" in result.err,
                f"no message has the reason, {reason}")


class NewRun(Scenario):
    steps = STEPS
    begin = 0

    def words(self):
        return ["train", *TRAIN, "--steps", self.steps, "--out", self.target,
                "--export", self.directory / "weights.safetensors"]

    def after(self, result):
        saved = max(self.begin, last_saved(result.err))
        require(saved == 0 or states(self.target), "no state is left")
        if saved == 0 and not (self.target / "config.json").exists():
            return  # nothing was begun
        done = self.shim.plain("train", "--resume", self.target, "--steps", self.steps)
        require(done.returncode == 0, f"cannot be resumed: {done.stderr}")
        found = re.search(r"continues after update (\d+)", done.stderr)
        resumed = int(found[1]) if found else 0
        require(resumed >= saved, f"resumed from {resumed}, saved was {saved}")
        require(tensors_of(self.target) == self.expected, "the result differs")


class Resumed(NewRun):
    steps = MORE_STEPS
    begin = STEPS

    def prepare(self):
        super().prepare()
        shutil.copytree(self.source, self.target)

    def words(self):
        return ["train", "--resume", self.target, "--steps", self.steps]


class Studied(Scenario):
    def prepare(self):
        super().prepare()
        self.file = self.shim.work / "one.yaml"
        self.file.write_text(STUDY)

    def words(self):
        return ["study", self.file, "--device", "cpu", "--no-estimate", "--out", self.target]

    def after(self, result):
        recorded = '"status":"done"' in self.results()
        require(recorded or result.status != 0, "a result is missing without an error")
        done = self.shim.plain(*self.words(), "--resume")
        require(done.returncode == 0, f"cannot be resumed: {done.stderr}")
        require(self.results().count('"type":"run"') == 1, "expected one result")
        require((self.target / "report.html").exists(), "no report")

    def results(self):
        path = self.target / "results.jsonl"
        return path.read_text() if path.exists() else ""


class Reported(Scenario):
    def prepare(self):
        super().prepare()
        shutil.copytree(self.source, self.target)
        self.page = self.target / "report.html"
        self.page.write_text("before")

    def words(self):
        return ["report", self.target, "--out", self.page]

    def after(self, result):
        text = self.page.read_text()
        require(text == "before" or text.endswith("</html>\n") or "</html>" in text[-200:],
                "a part of a page")
        require(result.status != 0 or text != "before", "no page without an error")


def selected(operations, every, some):
    """Numbers of the operations to fail."""
    counted = [op for op in operations if op.number > 0]
    if every > 0:
        return [op.number for op in counted][::every]
    numbers = {}
    for op in counted:
        kind = re.sub(r"\d+|\.tmp-.*", "", os.path.basename(op.path))
        numbers.setdefault((op.name, kind), op.number)
    numbers = sorted(numbers.values())
    step = max(1, len(numbers) // some) if some else 1
    return numbers[step // 2::step][:some or None]


def scenarios(shim):
    new = NewRun(shim, "new")
    new.expected = expected(shim, shim.work / "whole", STEPS)
    resumed = Resumed(shim, "resumed")
    resumed.source = shim.work / "whole"
    resumed.expected = expected(shim, shim.work / "longer", MORE_STEPS)
    studied = Studied(shim, "studied")
    reported = Reported(shim, "reported")
    reported.source = studied.target
    return [new, resumed, studied, reported]


def expected(shim, directory, steps):
    done = shim.plain("train", *TRAIN, "--steps", steps, "--out", directory)
    require(done.returncode == 0, done.stderr)
    return tensors_of(directory)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("reprise")
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--some", type=int, default=0)
    arguments = parser.parse_args()
    failures = 0
    with Shim(arguments.reprise) as shim:
        for scenario in scenarios(shim):
            operations = scenario.attempt(0).operations
            numbers = selected(operations, arguments.every, arguments.some)
            for number in numbers:
                try:
                    result = scenario.attempt(number)
                except Failure as failure:
                    failures += 1
                    failed = [op for op in operations if op.number == number]
                    print(f"FAILED: {scenario.name}, operation {number}, "
                          f"{failed[0].name} {failed[0].path}: {failure}", flush=True)
            count = sum(op.number > 0 for op in operations)
            print(f"{scenario.name}: {count} file operations, {len(numbers)} of them failed, "
                  f"one at a time", flush=True)
            if scenario.name == "studied":
                scenario.attempt(0)  # its results are those of the report
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
