"""Writes the descriptions of the chart's values into README.md and values.schema.json, from values.yaml's
comments.

A value's description is the comment directly above it, followed by the one on its line.
``python tools/docs/chart_values.py`` writes both files; with ``--check`` it only compares. Both refuse a
value without a description, and a value that the schema does not list.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts/evergrad"
_BLOCK = re.compile(
    r"(<!-- values: make generate -->\n).*?(<!-- end of values -->\n)", re.DOTALL
)


@dataclass(frozen=True)
class Value:
    """One value or section of values.yaml: its path, its comments, and its part of the schema."""

    path: tuple[str, ...]
    description: str
    default: Any
    schema: dict[str, Any]

    @property
    def is_section(self) -> bool:
        """Whether the values below it are listed separately, each with its own description."""
        listed = self.schema.get("properties", {}).keys()
        return (
            isinstance(self.default, dict)
            and bool(listed)
            and listed == self.default.keys()
        )


def read_values(text: str, schema: dict[str, Any]) -> Iterator[Value]:
    """Yield all values and sections in the file's order. Raises KeyError if the schema does not list one."""

    def read(
        node: yaml.MappingNode, part: dict[str, Any], above: tuple[str, ...]
    ) -> Iterator[Value]:
        for key, value in node.value:
            path = (*above, key.value)
            found = Value(
                path,
                _comment_of(lines, key, value),
                yaml.safe_load(yaml.serialize(value)),
                part["properties"][key.value],
            )
            yield found
            if found.is_section:
                yield from read(value, found.schema, path)

    lines = text.splitlines()
    yield from read(yaml.compose(text), schema, ())


def _comment_of(lines: list[str], key: yaml.Node, value: yaml.Node) -> str:
    """Return the comment lines that end directly above a key, followed by the comment on the key's line."""
    first = key.start_mark.line
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    is_inline = value.start_mark.line == key.start_mark.line
    rest = lines[key.start_mark.line][
        (value if is_inline else key).end_mark.column :
    ].lstrip(": ")
    parts = [*lines[first : key.start_mark.line], rest if rest.startswith("#") else ""]
    return " ".join(text for part in parts if (text := part.strip().lstrip("#").strip()))


def find_problems(values: list[Value]) -> list[str]:
    """Return one sentence for each value without a description."""
    return [
        f"values.yaml: {'.'.join(one.path)}: has no description. Add a comment on its line or directly above."
        for one in values
        if not one.description and not one.is_section
    ]


def render_schema(schema: dict[str, Any], values: list[Value]) -> str:
    """Return the schema's text, with each description first in its part."""
    for one in values:
        rest = {key: value for key, value in one.schema.items() if key != "description"}
        one.schema.clear()
        one.schema.update({"description": one.description} if one.description else {})
        one.schema.update(rest)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def render_table(values: list[Value]) -> str:
    """Return the table of the README: one line per value, and one line above each section."""
    rows = ["| value | default | description |", "|---|---|---|"]
    for one in values:
        name = ".".join(one.path)
        if one.is_section:
            rows += [f"| **`{name}`** | | {one.description} |"] if one.description else []
            continue
        choices = ", ".join(
            f"`{_as_text(choice)}`" for choice in one.schema.get("enum", ()) if choice != ""
        )
        text = f"{one.description} One of {choices}." if choices else one.description
        rows.append(f"| `{name}` | `{_as_text(one.default)}` | {text} |")
    return "\n".join(row.replace(" || ", " \\|\\| ") for row in rows) + "\n"


def _as_text(value: Any) -> str:
    """Return a default in YAML's flow style; texts are unquoted if YAML allows it."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").replace("''", '""')


def main() -> int:
    """Write or compare. Return 1, with the problems on stderr, if there are any."""
    schema_file, readme = CHART / "values.schema.json", CHART / "README.md"
    schema = json.loads(schema_file.read_text("utf-8"))
    values = list(read_values((CHART / "values.yaml").read_text("utf-8"), schema))
    problems = find_problems(values)

    page = readme.read_text("utf-8")
    made = {
        schema_file: render_schema(schema, values),
        readme: _BLOCK.sub(
            lambda found: f"{found[1]}{render_table(values)}{found[2]}", page
        ),
    }
    is_check = sys.argv[1:] == ["--check"]
    for file, text in made.items():
        if is_check and file.read_text("utf-8") != text:
            problems.append(f"{file.name}: out of date. Run `make generate`.")
        elif not is_check and not problems:
            file.write_text(text, "utf-8")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
