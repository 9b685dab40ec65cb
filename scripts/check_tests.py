"""Checks that every source has a test.

Fails if
- a source or header in src/ has neither a test of its name (src/FOLDER/x.cpp:
  tests/FOLDER/x_test.cpp) nor a comment "Tested by tests/...", in itself or in the header of
  its name, private or public;
- a comment in the tree says "Tested by" and names a file that does not exist;
- tests/ has a folder that src/ and tools/ do not have;
- a test file is not in tests/CMakeLists.txt and would never run.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PUBLIC = ROOT / "include/reprise"
TESTS = ROOT / "tests"
SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
# Folders of tests that are about the whole project.
OTHER_FOLDERS = {"docs", "fixtures", "fuzz", "install", "tools"}
NAMED = re.compile(r"Tested by(?:[^.]|\.(?!\s))*")
TEST_PATH = re.compile(r"tests/[\w/]+\.\w+")


def files(folder):
    return sorted(path for path in folder.rglob("*")
                  if path.suffix in SUFFIXES and "gloo_names" not in path.parts)


def named_tests(path):
    """The tests that the comments of a file name."""
    text = re.sub(r"\n\s*///? ?", " ", path.read_text())
    return [test for sentence in NAMED.findall(text) for test in TEST_PATH.findall(sentence)]


def untested():
    for path in files(SOURCE):
        folder = path.parent.relative_to(SOURCE)
        if (TESTS / folder / f"{path.stem}_test.cpp").is_file():
            continue
        related = [path, path.with_suffix(".h"), PUBLIC / folder / f"{path.stem}.h",
                   PUBLIC / folder.parts[0] / f"{path.stem}.h"]
        if not any(named_tests(one) for one in related if one.is_file()):
            yield (f"{path}: no tests/{folder}/{path.stem}_test.cpp, and no comment that it "
                   "is tested by another one")


def missing():
    for folder in ("src", "include", "tools"):
        for path in files(ROOT / folder):
            for test in named_tests(path):
                if not (ROOT / test).is_file():
                    yield f"{path}: tested by {test}, which does not exist"


def unlisted():
    listed = (TESTS / "CMakeLists.txt").read_text()
    for path in sorted(TESTS.rglob("*_test.*")):
        name = path.relative_to(TESTS).as_posix()
        suite = name[:-len("_test.cpp")] if name.endswith(".cpp") else name
        if not re.search(rf"(?<![\w/]){re.escape(suite)}(?![\w/])|/{re.escape(name)}", listed):
            yield f"{path}: not in tests/CMakeLists.txt"


def unmirrored():
    for path in sorted(TESTS.rglob("*")):
        folder = path.relative_to(TESTS)
        if (path.is_dir() and folder.parts[0] not in OTHER_FOLDERS
                and folder.name != "__pycache__" and not (SOURCE / folder).is_dir()):
            yield f"{path}: src/ has no folder {folder}"


def main():
    problems = [*untested(), *missing(), *unlisted(), *unmirrored()]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
