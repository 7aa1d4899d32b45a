"""Writes documents.yaml: a ConfigMap with a small text to train on, the pages of this repository's own documentation."""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main() -> int:
    """One JSON object a line, one line a page."""
    pages = sorted(path for path in ROOT.glob("docs/**/*.md"))
    lines = [json.dumps({"text": page.read_text("utf-8"), "title": page.stem}, ensure_ascii=True) for page in pages]
    manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "quickstart-documents"},
        "data": {"documents.jsonl": "\n".join(lines) + "\n"},
    }
    target = HERE / "documents.yaml"
    text = json.dumps(manifest, indent=1)
    target.write_text(f"# Written by make_documents.py beside this file. JSON is YAML.\n{text}\n", "utf-8")
    print(f"{target.name}: {len(lines)} documents, {target.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
