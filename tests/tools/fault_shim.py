"""Runs the command with failing or recorded file operations; see file_faults.c."""
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
# Small enough that a training takes a fraction of a second.
TRAIN = ["--model", "mlp", "--depth", "1", "--width", "8", "--data", "random",
         "--random-samples", "16", "--batch", "2", "--accumulate", "2", "--workers", "1",
         "--threads", "1", "--dropout", "0.2", "--optimizer", "adam", "--no-eval",
         "--device", "cpu", "--save-every", "2", "--keep", "2"]


@dataclasses.dataclass
class Operation:
    number: int  # 0: not counted
    name: str
    result: int
    path: str
    arguments: str


@dataclasses.dataclass
class Result:
    status: int
    out: str
    err: str
    operations: list


class Shim:
    def __init__(self, reprise):
        self.reprise = str(pathlib.Path(reprise).resolve())
        # Not in memory: the system may treat such directories differently.
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="reprise-faults-"))
        self.library = self.work / "file_faults.so"
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", self.library,
                        HERE / "file_faults.c", "-ldl"], check=True)
        (self.work / "cache").mkdir()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.work, ignore_errors=True)

    def environment(self):
        return os.environ | {"XDG_CACHE_HOME": str(self.work / "cache"), "OMP_NUM_THREADS": "1"}

    def run(self, directory, words, fail_at=0, reason=errno.EIO):
        """Runs the command; operations below `directory` are counted, and one fails."""
        log = self.work / "log"
        log.unlink(missing_ok=True)
        environment = self.environment() | {
            "LD_PRELOAD": str(self.library), "FAULT_DIR": str(directory),
            "FAULT_LOG": str(log), "FAULT_AT": str(fail_at), "FAULT_ERRNO": str(reason)}
        done = subprocess.run([self.reprise, *map(str, words)], env=environment, timeout=120,
                              capture_output=True, text=True, errors="replace", check=False)
        lines = log.read_text().splitlines() if log.exists() else []
        return Result(done.returncode, done.stdout, done.stderr,
                      [operation(line) for line in lines])

    def plain(self, *words):
        return subprocess.run([self.reprise, *map(str, words)], env=self.environment(),
                              timeout=120, capture_output=True, text=True, errors="replace",
                              check=False)


def operation(line):
    number, name, result, path, arguments = (line.split(" ", 4) + [""])[:5]
    return Operation(int(number), name, int(result), path, arguments)


def last_saved(text):
    """The last update that the command has reported as saved; 0: none."""
    found = re.findall(r"^saved .* at update (\d+)", text, re.MULTILINE)
    return int(found[-1]) if found else 0


def states(directory):
    return sorted(path for path in directory.glob("state-*.safetensors"))


def tensors_of(directory):
    """A text that is equal if the newest states are equal, apart from times."""
    data = states(directory)[-1].read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    state = json.loads(header.pop("__metadata__")["reprise"])
    # A file of metrics that could not be written is shorter.
    for key in ("train_s", "metrics_bytes"):
        state.pop(key)
    return hashlib.sha256(data[8 + size:]).hexdigest() + json.dumps([header, state])
