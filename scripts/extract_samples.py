"""Writes the samples of the pages (scripts/docs.py) to DIR/samples, for the tests that
compile and run them. Files that have not changed are left alone.

Usage: extract_samples.py DIR
"""
import itertools
import pathlib
import sys

import docs


def main(arguments):
    folder = pathlib.Path(arguments[0]) / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    of_pages = itertools.chain.from_iterable(map(docs.blocks, docs.pages()))
    for block in itertools.chain(of_pages, docs.header_blocks()):
        if block.marker != "sample":
            continue
        text = block.text
        if block.kind == "cpp":  # errors of the compiler name the line of the page
            text = f'#line {block.line} "{block.page}"\n{text}'
        path = folder / block.file_name()
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
