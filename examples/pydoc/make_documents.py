"""Write the documentation topics that every Python contains as JSONL documents: real text without a
download."""

import argparse
import json
import os
from pathlib import Path
from pydoc_data.topics import topics


def render_documents() -> str:
    """Return one JSON object ``{"topic", "text"}`` per line, sorted by topic. The same Python version returns
    the same bytes."""
    rows = (
        {"topic": topic, "text": text.strip()} for topic, text in sorted(topics.items())
    )
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        default=Path(__file__).with_name("documents.jsonl"),
        help="default: %(default)s",
    )
    path: Path = parser.parse_args().path
    data = render_documents().encode()
    # Write to another name and rename the file, so that a reader never sees an incomplete file.
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(data)
    os.replace(unfinished, path)
    print(f"{path}: {len(topics)} documents, {len(data):,} bytes")


if __name__ == "__main__":
    main()
