#!/usr/bin/env python3
"""Simulates power failures during a training and a resume.

    power_loss_test.py REPRISE [--images N]

Records the file operations of a training, and builds what a disk may hold if the power fails
after each of them: of the bytes that were written since the last fsync of a file, and of the
names that were made, renamed or removed since the last fsync of a directory, none, all, or any
part in any order. Every such directory must resume, from the state that was last reported as
saved or a later one, and end with the same bytes as a training that was never interrupted.
--images 0 tries all images that differ; the default is a selection.
"""
import argparse
import hashlib
import os
import random
import re
import shutil
import sys

from fault_shim import Shim, TRAIN, last_saved, tensors_of

STEPS = 6
MORE_STEPS = 10
PAGE = 512  # writes are torn at multiples of a sector
CHANGES = {"write", "fsync", "rename", "unlink", "open", "ftruncate", "mkdir"}


class File:
    def __init__(self, synced=b""):
        self.data = bytearray(synced)
        self.synced = bytes(synced)
        self.pending = []  # (offset, bytes), or (None, size) of a truncation

    def write(self, offset, some):
        apply(self.data, (offset, some))
        for at in range(0, len(some), PAGE):
            self.pending.append((offset + at, some[at:at + PAGE]))

    def truncate(self, size):
        apply(self.data, (None, size))
        self.pending.append((None, size))

    def sync(self):
        self.synced = bytes(self.data)
        self.pending = []

    def after_crash(self, keep):
        data = bytearray(self.synced)
        for change in self.pending:
            if keep():
                apply(data, change)
        return bytes(data)


def apply(data, change):
    offset, some = change
    size = some if offset is None else offset + len(some)
    if offset is None:
        del data[size:]
    data.extend(b"\0" * (size - len(data)))
    if offset is not None:
        data[offset:size] = some


class Directory:
    """Names and their files, as they are and as they are on disk."""

    def __init__(self):
        self.names = {}
        self.synced = {}
        self.pending = []

    def change(self, change):
        rename_in(self.names, change)
        self.pending.append(change)

    def sync(self):
        self.synced = dict(self.names)
        self.pending = []

    def after_crash(self, keep):
        names = dict(self.synced)
        for change in self.pending:
            if keep():
                rename_in(names, change)
        return names


def rename_in(names, change):
    kind, name, other = change
    if kind == "link":
        names[name] = other
    elif kind == "unlink":
        names.pop(name, None)
    elif name in names:
        names[other] = names.pop(name)


class Disk:
    def __init__(self, root):
        self.root = str(root)
        self.directories = {self.root: Directory()}
        self.open = {}  # descriptor: [file or directory, position or None if it appends]
        self.said = ""

    def load(self, folder):
        """The files of a directory, as if they had been there for long."""
        directory = Directory()
        for path in folder.iterdir():
            directory.names[path.name] = File(path.read_bytes())
        directory.sync()
        self.directories[str(folder)] = directory
        top = self.directories[self.root]
        top.names[folder.name] = directory
        top.sync()

    def replay(self, op):
        if op.name == "say":
            self.said += bytes.fromhex((op.arguments.split(" ") + [""])[1]).decode(
                errors="replace")
        if op.result < 0:
            return
        folder, name = os.path.split(op.path)
        words = op.arguments.split(" ")
        if op.name == "open":
            self.replay_open(op, folder, name)
        elif op.name == "mkdir":
            self.directories[op.path] = Directory()
            self.directories[folder].change(("link", name, self.directories[op.path]))
        elif op.name == "rename":
            target = os.path.split(op.arguments)
            assert target[0] == folder, "expected names in one directory"
            self.directories[folder].change(("rename", name, target[1]))
        elif op.name == "unlink":
            self.directories[folder].change(("unlink", name, None))
        elif op.name == "close":
            self.open.pop(op.result, None)
        elif words[0].isdigit() and int(words[0]) in self.open:
            self.replay_on(self.open[int(words[0])], op, words)

    def replay_open(self, op, folder, name):
        flags = int(op.arguments)
        if op.path in self.directories:
            self.open[op.result] = [self.directories[op.path], 0]
            return
        directory = self.directories[folder]
        if name not in directory.names:
            directory.change(("link", name, File()))
        file = directory.names[name]
        if flags & os.O_TRUNC and file.data:
            file.truncate(0)
        self.open[op.result] = [file, None if flags & os.O_APPEND else 0]

    @staticmethod
    def replay_on(opened, op, words):
        file, position = opened
        if op.name == "fsync":
            file.sync()
        elif op.name == "ftruncate":
            file.truncate(int(words[1]))
        elif op.name == "lseek" and position is not None:
            opened[1] = op.result
        elif op.name == "write":
            some = bytes.fromhex(words[1])
            at = len(file.data) if position is None else position
            file.write(at, some)
            if position is not None:
                opened[1] = at + len(some)

    def image(self, keep_name, keep_data):
        """What is on disk after a crash, by path below the root; None: a directory."""
        found = {}

        def add(directory, path):
            for name, item in sorted(directory.after_crash(keep_name).items()):
                where = f"{path}{name}"
                if isinstance(item, Directory):
                    found[where] = None
                    add(item, where + "/")
                else:
                    found[where] = item.after_crash(keep_data)
        add(self.directories[self.root], "")
        return found


def images_of(operations, disk, seeds):
    """Yields the images after each operation, and the update that was last reported saved."""
    seen = set()
    for number, op in enumerate(operations):
        disk.replay(op)
        if op.name not in CHANGES:
            continue
        saved = last_saved(disk.said)
        keeps = [(lambda n=n: n, lambda d=d: d) for n in (False, True) for d in (False, True)]
        for seed in range(seeds):
            source = random.Random(f"{seed} {number}")
            some = (lambda source=source: source.random() < 0.5)
            keeps.append((some, some))
        for keep_name, keep_data in keeps:
            image = disk.image(keep_name, keep_data)
            digest = hashlib.sha256(repr((saved, sorted(image.items()))).encode()).digest()
            if digest not in seen:
                seen.add(digest)
                yield number, saved, image


def restore(image, folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in image.items():
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)


def problem_of(shim, folder, saved, steps, expected):
    run = folder / "run"
    if not (run / "config.json").exists():
        return "" if saved == 0 else "the run is lost"
    done = shim.plain("train", "--resume", run, "--steps", steps)
    if done.returncode != 0:
        return f"cannot be resumed: {done.stderr}"
    found = re.search(r"continues after update (\d+)", done.stderr)
    if (int(found[1]) if found else 0) < saved:
        return f"resumed from {found and found[1]}, saved was {saved}"
    if tensors_of(run) != expected:
        return "the result differs"
    checked = shim.plain("check", run)
    return "" if checked.returncode == 0 else f"not whole afterwards: {checked.stdout}"


def expected_of(shim, name, steps):
    done = shim.plain("train", *TRAIN, "--steps", steps, "--out", shim.work / name)
    assert done.returncode == 0, done.stderr
    return tensors_of(shim.work / name)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("reprise")
    parser.add_argument("--images", type=int, default=2, help="of each scenario; 0: all")
    arguments = parser.parse_args()
    failures = 0
    with Shim(arguments.reprise) as shim:
        expected = {steps: expected_of(shim, str(steps), steps) for steps in (STEPS, MORE_STEPS)}
        for name, steps in (("new", STEPS), ("resumed", MORE_STEPS)):
            folder = shim.work / name
            folder.mkdir()
            disk = Disk(folder)
            if name == "new":
                words = ["train", *TRAIN, "--steps", steps, "--out", folder / "run"]
            else:
                shutil.copytree(shim.work / str(STEPS), folder / "run")
                disk.load(folder / "run")
                words = ["train", "--resume", folder / "run", "--steps", steps]
            done = shim.run(folder, words)
            assert done.status == 0, done.err
            all_images = list(images_of(done.operations, disk, 0 if arguments.images else 6))
            some = all_images
            if arguments.images:
                some = random.Random(1).sample(all_images, min(arguments.images, len(all_images)))
            for number, saved, image in some:
                restore(image, shim.work / "image")
                problem = problem_of(shim, shim.work / "image", saved, steps, expected[steps])
                if problem:
                    failures += 1
                    op = done.operations[number]
                    print(f"FAILED: {name}, after operation {number}, {op.name} {op.path}, "
                          f"with {sorted(image)}: {problem}")
            print(f"{name}: {len(done.operations)} operations, {len(all_images)} images that "
                  f"differ, {len(some)} of them tried", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
