"""Write questions about the words of Python's documentation as rows: real words without a download."""

import argparse
import hashlib
import json
import os
import re
from pathlib import Path
from pydoc_data.topics import topics


def words() -> list[str]:
    """Return each word of 2 to 12 lower-case letters once, sorted by a hash, so that the order has no
    meaning."""
    found = {
        word for text in topics.values() for word in re.findall(r"\b[a-z]{2,12}\b", text)
    }
    return sorted(found, key=lambda word: hashlib.sha256(word.encode()).hexdigest())


def rows() -> list[dict[str, object]]:
    """Return one row per word: in turn, a conversation, and a prompt with its completion."""
    made: list[dict[str, object]] = []
    for at, word in enumerate(words()):
        answer = str(len(word))
        if at % 2:
            made.append({"prompt": f"letters in {word}: ", "completion": answer})
        else:
            said = [("user", f"How many letters has {word}?"), ("assistant", answer)]
            made.append(
                {"messages": [{"role": role, "content": text} for role, text in said]}
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        default=Path(__file__).with_name("rows.jsonl"),
        help="default: %(default)s",
    )
    path: Path = parser.parse_args().path
    made = rows()
    # Write to another name and rename the file, so that a reader never sees an incomplete file.
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in made), "utf-8")
    os.replace(unfinished, path)
    print(f"{path}: {len(made)} rows")


if __name__ == "__main__":
    main()
