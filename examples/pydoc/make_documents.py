"""Write the documentation topics every Python carries as JSONL documents: real text without a download."""

import argparse
import json
import os
from pathlib import Path
from pydoc_data.topics import topics


def render_documents() -> str:
    """One JSON object ``{"topic", "text"}`` a line, sorted by topic: the same bytes from the same Python
    version."""
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
    # Renamed into place, so that a reader never sees half of it.
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(data)
    os.replace(unfinished, path)
    print(f"{path}: {len(topics)} documents, {len(data):,} bytes")


if __name__ == "__main__":
    main()
