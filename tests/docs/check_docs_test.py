"""Checks that scripts/check_docs.py finds each kind of mistake, and accepts correct pages."""
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

GOOD = """# A page

See [below](#what-is-below), [the other](docs/other.md#a-b-c), [a file](LICENSE),
[elsewhere](https://example.org/a) and `[no](link)`. ![Picture](docs/picture.svg)

<!-- sample: first -->
```cpp
int a = 1;
```

<!-- from: LICENSE -->
```cmake
two
# …
four
```

<!-- message -->
```text
expected … bytes, got one
```

    reprise train --batch 4   # comment
    reprise plan

- item

      reprise devices

```text
anything [at](all)
```

## What is `below`?
"""
# Text that replaces or follows the good page, and what the answer has to say.
BAD = [
    ("[a](docs/none.md)", "'docs/none.md' does not exist"),
    ("[a](docs/other.md#none)", "docs/other.md has no heading #none"),
    ("[a](#none)", "README.md has no heading #none"),
    ("![a](docs/none.svg)", "'docs/none.svg' does not exist"),
    ("[a](../../etc)", "'../../etc'"),
    ("[a](htp://example.org)", "is no valid address"),
    ("[a](https://nohost)", "is no valid address"),
    ("```cpp\nint b;\n```", "a block of cpp that nothing compiles"),
    ("<!-- sample: first -->\n```cpp\nint b;\n```", "is also in README.md"),
    ("<!-- sample: second -->\n```cpp\nint b;\n```", "no file of tests/docs includes samples/second.cpp"),
    ("<!-- from: LICENSE -->\n```cmake\nfour\ntwo\n```", "differs from the lines of LICENSE"),
    ("<!-- from: NONE -->\n```cmake\nfour\n```", "no such file"),
    ("```\nanything\n```", "name the language"),
    ("```java\nanything\n```", "name the language"),
    ("    int main() {}", "is no known command"),
    ("<!-- message -->\n```text\nno such message\n```", "no source has the message"),
    ("```console\noutput\n```", "starts with '$ '"),
]


def check(page):
    """Runs the script on a project with this README. Returns its status and its answer."""
    with tempfile.TemporaryDirectory() as work:
        root = pathlib.Path(work)
        for folder in ("docs", "tests/docs", "include/reprise"):
            (root / folder).mkdir(parents=True)
        (root / "README.md").write_text(page)
        (root / "LICENSE").write_text("one\n  two\n  three\n  four\n")
        (root / "docs/other.md").write_text("# Other\n\n## A, b & `c`\n\n### A b c\n")
        (root / "docs/picture.svg").write_text("<svg/>")
        (root / "src").mkdir()
        (root / "src/a.cpp").write_text('f("expected ", n, " bytes, "\n  "got one");')
        (root / "tests/docs/samples_test.cpp").write_text('#include "samples/first.cpp"\n')
        ran = subprocess.run([sys.executable, ROOT / "scripts/check_docs.py", root],
                             capture_output=True, text=True, check=False)
        return ran.returncode, ran.stderr


def main():
    failed = 0

    def expect(name, true, answer):
        nonlocal failed
        if not true:
            failed += 1
            print(f"{name}: got\n{answer}", file=sys.stderr)

    good = GOOD.replace("#a-b-c", "#a-b--c")
    status, answer = check(good)
    expect("the good page", status == 0 and not answer, answer)
    for text, wanted in BAD:
        status, answer = check(f"{good}\n{text}\n")
        expect(text, status == 1 and wanted in answer and len(answer.splitlines()) == 1, answer)
    unused, answer = check(good.replace("<!-- sample: first -->", "<!-- from: LICENSE -->"))
    expect("a sample that no page has", unused == 1 and "which no page has" in answer, answer)
    print(f"{len(BAD) + 2} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
