"""Write questions about the words of Python's documentation as rows: real words without a download."""

import argparse
import hashlib
import json
import os
import re
from pathlib import Path
from pydoc_data.topics import topics


def words() -> list[str]:
    """Words of 2 to 12 small letters, each once, by a hash: in an order that carries no meaning."""
    found = {
        word for text in topics.values() for word in re.findall(r"\b[a-z]{2,12}\b", text)
    }
    return sorted(found, key=lambda word: hashlib.sha256(word.encode()).hexdigest())


def rows() -> list[dict[str, object]]:
    """One row a word, in turns a conversation and a prompt with its completion."""
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
    # Renamed into place, so that a reader never sees half of it.
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in made), "utf-8")
    os.replace(unfinished, path)
    print(f"{path}: {len(made)} rows")


if __name__ == "__main__":
    main()
