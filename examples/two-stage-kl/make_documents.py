"""Write two kinds of text that every Python contains: documentation topics, and functions of its library."""

import argparse
import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

MODULES = (
    "argparse",
    "calendar",
    "configparser",
    "csv",
    "dataclasses",
    "difflib",
    "fractions",
    "functools",
    "inspect",
    "pprint",
    "shutil",
    "statistics",
    "tarfile",
    "textwrap",
    "tokenize",
    "zipfile",
)
"""Modules that are one file each, or a package's ``__init__``."""


def prose() -> Iterator[str]:
    """Yield the documentation topics, sorted."""
    for _, text in sorted(topics.items()):
        yield text.strip()


def code() -> Iterator[str]:
    """Yield functions and classes of the library, file by file."""
    library = Path(os.__file__).parent
    for name in MODULES:
        path = library / f"{name}.py"
        if not path.is_file():
            path = library / name / "__init__.py"
        text = path.read_text("utf-8")
        for node in ast.parse(text).body:
            found = ast.get_source_segment(text, node)
            if found and isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(__file__).parent,
        help="default: %(default)s",
    )
    folder: Path = parser.parse_args().folder
    for name, texts in (("prose", prose()), ("code", code())):
        rows = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
        path = folder / f"{name}.jsonl"
        # Write to another name and rename the file, so that a reader never sees an incomplete file.
        unfinished = path.with_name(path.name + ".unfinished")
        unfinished.write_text("".join(rows), "utf-8")
        os.replace(unfinished, path)
        print(f"{path}: {len(rows)} documents, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
