"""Write questions about the words of Python's documentation, as rows and as pairs: without a download."""

import argparse
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics


def words() -> list[str]:
    """Return each word of 2 to 12 lower-case letters once, sorted by a hash, so that the order has no
    meaning."""
    found = {
        word for text in topics.values() for word in re.findall(r"\b[a-z]{2,12}\b", text)
    }
    return sorted(found, key=lambda word: hashlib.sha256(word.encode()).hexdigest())


def answers(word: str) -> tuple[str, str]:
    """Return the short answer and the long answer."""
    return str(len(word)), f"The word has {len(word)} letters."


def rows(chosen: Sequence[str]) -> list[dict[str, str]]:
    """Return one row per word, with the two kinds of answers in turn."""
    return [
        {"prompt": f"letters in {word}: ", "completion": answers(word)[at % 2]}
        for at, word in enumerate(chosen)
    ]


def pairs(chosen: Sequence[str]) -> list[dict[str, str]]:
    """Return one pair per word, in which the short answer is preferred."""
    return [
        {
            "prompt": f"letters in {word}: ",
            "chosen": answers(word)[0],
            "rejected": answers(word)[1],
        }
        for word in chosen
    ]


def write(path: Path, made: Sequence[dict[str, str]]) -> None:
    # Write to another name and rename the file, so that a reader never sees an incomplete file.
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in made), "utf-8")
    os.replace(unfinished, path)
    print(f"{path}: {len(made)} rows")


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
    found = words()
    # Use words that the first run has not seen.
    cut = 3 * len(found) // 4
    write(folder / "rows.jsonl", rows(found[:cut]))
    write(folder / "pairs.jsonl", pairs(found[cut:]))


if __name__ == "__main__":
    main()
