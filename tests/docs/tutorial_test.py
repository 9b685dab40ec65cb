"""Repeats the commands of blocks with the markers `run` and `fails`, and compares their output with the
page. Argument: REPRISE

The commands of a page run one after the other in one directory. A line of an ellipsis stands
for any number of lines. Figures and progress may differ: every number is compared as #, and so
are units of bytes and of time.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import docs  # noqa: E402

MAX_SECONDS = 300  # per command, on a busy machine


def masked(line):
    """A line with # for figures, up to an ellipsis at its end."""
    line = re.sub(r"…$", "", line)
    line = re.sub(r"\d[\d.,]*", "#", line)
    line = re.sub(r"# (?:[KMGT]iB|B|ms|s|min)\b", "# U", line)
    line = re.sub(r"[█▏▎▍▌▋▊▉]+", "", line)
    return re.sub(r"\s+", " ", line).strip()


def cases(block):
    """(command, expected lines) of a block."""
    found = []
    open_command = False
    for line in block.text.splitlines():
        if open_command:
            found[-1][0] += "\n" + line
        elif line.startswith("$ "):
            found.append([line[2:], []])
        else:
            found[-1][1].append(line)
            continue
        open_command = line.endswith("\\")
    return found


def difference(expected, got):
    """The first expected line that `got` does not have in its place; empty if there is
    none."""
    lines = [masked(line) for line in got]
    at, free = 0, False
    for line in expected:
        if line.strip() == "…":
            free = True
            continue
        wanted, begins = masked(line), line.endswith("…")
        found = next((i for i in range(at, len(lines)) if lines[i] == wanted or
                      begins and lines[i].startswith(wanted)), -1)
        if found < 0 or (found > at and not free):
            return line or "(an empty line)"
        at, free = found + 1, False
    return "" if free or at == len(lines) else "(the end)"


def run(page, reprise):
    """Runs the commands of a page. Returns how many there were and what differs."""
    problems, count = [], 0
    blocks = [block for block in docs.blocks(page) if block.marker in ("run", "fails")]
    with tempfile.TemporaryDirectory() as work:
        programs = pathlib.Path(work) / "programs"
        programs.mkdir()
        (programs / "reprise").symlink_to(pathlib.Path(reprise).resolve())
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}",
                       "XDG_CACHE_HOME": f"{work}/cache"}
        for block in blocks:
            for command, expected in cases(block):
                count += 1
                ran = subprocess.run(["bash", "-c", command], cwd=work, env=environment,
                                     text=True, stdout=subprocess.PIPE,
                                     stderr=subprocess.STDOUT, timeout=MAX_SECONDS, check=False)
                missing = difference(expected, ran.stdout.splitlines())
                if (ran.returncode != 0) != (block.marker == "fails") or missing:
                    problems.append(f"{block.where()}: {command}\nstatus {ran.returncode}, "
                                    f"expected: {missing}\ngot:\n{ran.stdout}")
    return count, problems


def check_difference():
    """The comparison has to find what is wrong."""
    good = ["a 1.5 MiB", "b", "c 3"]
    assert not difference(["a 2 KiB", "…", "c 44"], good)
    assert not difference(good, good)
    assert not difference(["…", "c…"], good)
    for wrong in (["a 1"], ["b", "…"], ["…", "d"], ["…", "c 3", "b"], ["a 1 KiB", "c 3"],
                  ["a 1 KiB", "b", "d…"]):
        assert difference(wrong, good), wrong


def main(reprise):
    check_difference()
    if not shutil.which("bash") or not pathlib.Path("/usr/share/common-licenses/GPL-3").exists():
        print("skipped: no Debian system")
        return 77
    total, failed = 0, 0
    for page in docs.pages():
        count, problems = run(page, reprise)
        total += count
        failed += len(problems)
        for problem in problems:
            print(problem, file=sys.stderr)
    print(f"{total} commands, {failed} failed")
    return 1 if failed or total < 5 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
