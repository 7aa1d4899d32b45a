"""Write objects with fields as documents of tagged text. Random choices depend only on seed, pass and
content."""

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MOST_ITEMS = 10
"""Maximum number of items of a list that are written, such as related molecules."""


def spell(value: Any) -> str:
    """Return a value as text: fractions with two decimals, and the values of an object one after another."""
    if isinstance(value, dict):
        return " ".join(spell(one) for one in value.values() if not is_empty(one))
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def is_empty(value: Any) -> bool:
    """Return whether a field contains no information; 0 and false are information."""
    return value is None or value in ("", [], {})


def computed(row: dict[str, Any], draw: random.Random, first: str) -> Iterator[str]:
    """Yield one document with a tag around each value. In half of the cases ``first`` comes first; the rest
    is shuffled."""
    fields = [
        f"[{key.upper()}]{spell(item)}[/{key.upper()}]"
        for key, value in row.items()
        if key != first and not is_empty(value)
        for item in (value[:MOST_ITEMS] if isinstance(value, list) else [value])
    ]
    draw.shuffle(fields)
    if not is_empty(row.get(first)):
        place = 0 if draw.random() < 0.5 else draw.randrange(len(fields) + 1)
        fields.insert(place, f"[{first.upper()}]{spell(row[first])}[/{first.upper()}]")
    yield "".join(fields)


def assay(row: dict[str, Any], draw: random.Random, longest: int) -> Iterator[str]:
    """Yield documents of at most ``longest`` characters: the description, and the values that fit after
    it."""
    head = f"[ASSAY]{spell(row['description'])}[/ASSAY]"
    values = [f"[VALUE]{spell(one)}[/VALUE]" for one in row["values"] if not is_empty(one)]
    draw.shuffle(values)
    text = head
    for value in values:
        # Repeat the description in each document, because a value has no meaning without it.
        if text != head and len(text) + len(value) > longest:
            yield text
            text = head
        text += value
    yield text


def documents(
    lines: Sequence[str], kind: str, *, seed: int, passes: int, first: str, longest: int
) -> Iterator[str]:
    """Yield the documents of all lines, ``passes`` times, with new random choices each time."""
    for number in range(passes):
        for line in filter(str.strip, lines):
            row = json.loads(line)
            # In some files, each object is a string that contains JSON.
            row = json.loads(row) if isinstance(row, str) else row
            content = json.dumps([seed, number, row], sort_keys=True)
            draw = random.Random(hashlib.sha256(content.encode()).digest())
            needed = {"description", "values"} if kind == "assay" else set()
            if not isinstance(row, dict) or needed - row.keys():
                what = " and ".join(sorted(needed)) or "any field"
                raise SystemExit(f"{line[:60]}: is not an object with {what}")
            if kind == "assay":
                yield from assay(row, draw, longest)
            else:
                yield from computed(row, draw, first)


TYPES = ("computed", "assay")
WRONG_INPUT = 64
"""Exit code for an unknown argument, the same as that of `evergrad`."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "inputs", nargs="+", type=Path, help="JSON Lines; read in this order"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--type", default="computed", help=f"one of {', '.join(TYPES)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--passes", type=int, default=1, help="times that all are written")
    parser.add_argument("--first", default="SMILES", help="field that often comes first")
    parser.add_argument("--longest", type=int, default=4000, help="characters of an assay")
    told = parser.parse_args(arguments)
    if told.type not in TYPES:
        print(
            f"error: --type: {told.type!r} is not one of {', '.join(TYPES)}. Write one of them.",
            file=sys.stderr,
        )
        raise SystemExit(WRONG_INPUT)
    lines = [line for path in told.inputs for line in path.read_text("utf-8").splitlines()]
    found = documents(
        lines,
        told.type,
        seed=told.seed,
        passes=told.passes,
        first=told.first,
        longest=told.longest,
    )
    text = "".join(json.dumps({"text": one}, ensure_ascii=False) + "\n" for one in found)
    told.output.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
