"""Writes documents.yaml: a ConfigMap with a small text to train on, the pages of this repository's
documentation that people wrote.

With ``--check`` it writes nothing, and the exit code is 1 if the file is out of date.
"""

import argparse
import json
import sys
from pathlib import Path

# kubectl apply stores the applied object in an annotation, and an object's annotations are limited to 262,144
# bytes.
MOST_BYTES = 240_000
LEFT_OUT = (
    "README.md",
    "project/architecture.md",
    "start/comparison.md",
    "start/concepts.md",
    "decisions",
    "project/development.md",
    "start/faq.md",
    "start/first-hour.md",
    "start/glossary.md",
    "train/gpu.md",
    "operate/queues.md",
    "recipes",
    "reference",
    "runbooks",
    "operate/security.md",
    "operate/storage.md",
    "project/support.md",
    "operate/tenancy.md",
    "project/testing-on-kubernetes.md",
    "operate/troubleshooting.md",
)
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main() -> int:
    """Write one JSON object per line, one line per page."""
    parser = argparse.ArgumentParser(
        description="Write documents.yaml from the pages of docs/."
    )
    parser.add_argument(
        "--check", action="store_true", help="only look whether the file is up to date"
    )
    is_check = parser.parse_args().check
    # Use only pages that people wrote, without pages that would make the file too large for kubectl apply.
    left_out = {ROOT / "docs" / name for name in LEFT_OUT}
    pages = sorted(
        page for page in ROOT.glob("docs/**/*.md") if not left_out & {page, *page.parents}
    )
    lines = [
        json.dumps({"text": page.read_text("utf-8"), "title": page.stem}, ensure_ascii=True)
        for page in pages
    ]
    manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "quickstart-documents"},
        "data": {"documents.jsonl": "\n".join(lines) + "\n"},
    }
    target = HERE / "documents.yaml"
    text = (
        "# Written by make_documents.py beside this file. JSON is "
        f"YAML.\n{json.dumps(manifest, indent=1)}\n"
    )
    if len(text) > MOST_BYTES:
        print(
            f"{target.name}: {len(text)} bytes; kubectl apply takes {MOST_BYTES} at most. Leave pages out."
        )
        return 1
    if is_check:
        is_current = target.read_text("utf-8") == text
        print(
            f"{target.name}: {'up to date' if is_current else 'docs/ has changed since; run make generate'}"
        )
        return int(not is_current)
    target.write_text(text, "utf-8")
    print(f"{target.name}: {len(lines)} documents, {target.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
