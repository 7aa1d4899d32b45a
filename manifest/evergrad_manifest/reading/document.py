"""Converts one YAML document to plain values, with the line of each value.

Stricter than YAML: refuses input that YAML would silently change.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import yaml

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.nesting import MAX_DEPTH
from evergrad_manifest.model.raw import FieldPath
from evergrad_manifest.reading.scalars import is_zero, read_plain
from evergrad_manifest.values.numbers import show

MAX_VALUES: Final = 20_000
_TAG: Final = "tag:yaml.org,2002:"
_MERGE: Final = f"{_TAG}merge"
_OCTAL_ALLOWED: Final = ("spec", "template")


@dataclass(frozen=True)
class YamlLocation:
    """The place at which a value was written: a line of a file, or an argument of the command."""

    source: str
    """Name of the file in messages; empty for the manifest itself."""
    line: int | None = None
    written: str | None = None
    """The text of the value in the file, if it is a scalar without quotes; YAML may convert it to another
    value."""

    def __str__(self) -> str:
        line = "" if self.line is None else f"line {self.line}"
        return f"{self.source} {line}".strip()


@dataclass
class Document:
    """Content of one document, the place of each value in it, and the problems of single values and keys.

    ``lost``: the paths (as written in problems) of values that could not be read. ``value`` has null at these
    paths.
    """

    value: Any = None
    places: dict[FieldPath, YamlLocation] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)


class _UnusableDocumentError(Exception):
    """The document as a whole cannot be used."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class _Loader(yaml.SafeLoader):
    """Loads YAML as Kubernetes' tools do (``read_plain``): ``1e-3`` is a number; dates and ``1:30`` are
    texts.

    Depth and size are limited.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._count = 0

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        # This replaces PyYAML's own patterns, which follow YAML 1.1.
        if kind is yaml.ScalarNode and implicit[0]:
            return _TAG + read_plain(value)[0]
        tag: str = super().resolve(kind, value, (False, True))  # type: ignore[no-untyped-call]
        return tag

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # Check the limits while reading: PyYAML recurses for each level, and would build everything before a
        # later check.
        self._depth += 1
        self._count += 1
        if self._depth > MAX_DEPTH or self._count > MAX_VALUES:
            too_much = (
                f"nested deeper than {MAX_DEPTH} levels"
                if self._depth > MAX_DEPTH
                else f"more than {MAX_VALUES} values"
            )
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML's stubs leave it out
            raise yaml.MarkedYAMLError(problem=too_much, problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def parse_document(text: str, *, label: str, source: str = "") -> Document:
    """Return the single document in ``text``.

    ``label`` names the file in problems without a field. ``source`` names the file in the places of single
    values. If the text is not a document, the value is None, and there is a problem.
    """
    # Build nodes first and then values, because nodes have the lines that messages name.
    document = Document()
    try:
        root = _compose(text, label)
        document.value = _Construction(document, label=label, source=source).value(root, ())
    except _UnusableDocumentError as refused:
        document.value = None
        document.problems.append(refused.problem)
    return document


def _compose(text: str, label: str) -> yaml.Node:
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"contains the character U+{int(error.character):04X}"
        raise _UnusableDocumentError(
            Problem(f"{label}:{line}", what, "it is not allowed in YAML", "Remove it")
        ) from error
    except yaml.MarkedYAMLError as error:
        raise _UnusableDocumentError(_syntax_problem(error, label)) from error
    except (ValueError, OverflowError) as error:
        # PyYAML passes the number of an escape such as "\UFFFFFFFF" to chr() without a check.
        line = loader.get_mark().line + 1 if loader is not None else 1
        why = "an escape stands for a character that does not exist"
        raise _UnusableDocumentError(
            Problem(f"{label}:{line}", "not valid YAML", why, "Correct the \\U escape")
        ) from error
    except (RecursionError, yaml.YAMLError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _UnusableDocumentError(
            Problem(label, "not valid YAML", why, "Correct it")
        ) from error
    if root is None:
        raise _UnusableDocumentError(
            Problem(
                label,
                "is empty",
                "a TrainingRun is needed",
                "Write one; docs/reference/configuration.md lists all fields",
            )
        )
    return root


_REMEDIES: Final = (
    (r"character '\\t'", "Indent with spaces; a tab is not allowed"),
    (
        r"mapping values are not allowed",
        "Check the indentation, or put a text that holds `: ` in quotes",
    ),
    (
        r"expected <block end>|expected the node content",
        "Check the indentation and the brackets of this line and the one before",
    ),
    (r"expected ',' or", "Close the bracket or add the comma"),
    (
        r"could not find expected ':'",
        "Add the colon after the key, or check the indentation",
    ),
    (r"found undefined alias", "Define the anchor (&name) before it is used (*name)"),
    (r"cannot start any token", "Put the value in quotes"),
    (r"found unexpected end of stream", "Close the quotes or brackets"),
    (r"nested deeper|more than .* values", "Make it smaller; a manifest is a page or two"),
)


def _syntax_problem(error: yaml.MarkedYAMLError, label: str) -> Problem:
    # This is the place at which PyYAML noticed the mistake. It may be a line later, so remedies mention both
    # lines.
    mark = error.problem_mark or error.context_mark
    where = f"{label}:{mark.line + 1}:{mark.column + 1}" if mark is not None else label
    if error.context == "expected a single document in the stream":
        return Problem(
            where,
            "a second document begins here",
            "a file contains exactly one TrainingRun",
            "Move it to its own file",
        )
    said = (
        " ".join(str(part) for part in (error.context, error.problem) if part)
        or "it cannot be read"
    )
    remedy = next(
        (text for pattern, text in _REMEDIES if re.search(pattern, said)), "Correct it"
    )
    return Problem(where, "not valid YAML", said, remedy)


class _Construction:
    """Builds the plain values of one document from its nodes."""

    def __init__(self, document: Document, *, label: str, source: str) -> None:
        self._document = document
        self._label = label
        self._source = source
        self._count = 0
        self._open: list[int] = []
        self._read: set[FieldPath] = set()

    def value(self, node: yaml.Node, path: FieldPath) -> Any:
        """Return the value of ``node``. Its place, and its problems, are added to the document."""
        # An alias is expanded each time it is used, so a page of text can become a million values.
        self._count += 1
        if self._count > MAX_VALUES:
            what = f"aliases expand to more than {MAX_VALUES} values"
            remedy = "Write the values out where they are needed"
            raise _UnusableDocumentError(Problem(self._label, what, "", remedy))

        # Keep the nodes that are being built, to detect a cycle: an alias is the same node as its anchor.
        if id(node) in self._open or len(self._open) > MAX_DEPTH:
            why = (
                "an anchor contains itself"
                if id(node) in self._open
                else f"aliases nest deeper than {MAX_DEPTH} levels"
            )
            where = f"{self._label}:{_line(node)}"
            raise _UnusableDocumentError(
                Problem(where, "cannot be expanded", why, "Remove the alias")
            )

        # Keep the first place: the line of a key is noted before its value, and `<<` must not change the
        # place of the values that it merges.
        place = self._document.places.setdefault(
            path, YamlLocation(self._source, _line(node))
        )
        if isinstance(node, yaml.ScalarNode) and path not in self._read:
            written = str(node.value) if node.style is None else None
            self._document.places[path] = replace(place, written=written)
        self._read.add(path)
        self._open.append(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if not isinstance(node, yaml.SequenceNode):
                return self._scalar(node, path)
            if node.tag != f"{_TAG}seq":
                return self._foreign_tag(node, path)
            return [
                self.value(item, (*path, index)) for index, item in enumerate(node.value)
            ]
        finally:
            self._open.pop()

    def _refuse_value(
        self,
        path: FieldPath,
        node: yaml.Node,
        what: str,
        *,
        why: str = "",
        remedy: str = "",
    ) -> None:
        """Note that the value at ``path`` cannot be read. The value becomes null, and later checks skip
        it."""
        self._refuse(path, node, what, why=why, remedy=remedy)
        self._document.lost.add(format_path(path))

    def _refuse(
        self,
        path: FieldPath,
        node: yaml.Node,
        what: str,
        *,
        why: str = "",
        remedy: str = "",
    ) -> None:
        where = YamlLocation(self._source, _line(node))
        self._document.problems.append(
            Problem(format_path(path) or self._label, f"{what} ({where})", why, remedy)
        )

    def _mapping(self, node: yaml.MappingNode, path: FieldPath) -> Any:
        if node.tag != f"{_TAG}map":
            return self._foreign_tag(node, path)
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        merges: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merges.append(value_node)
                continue

            key = self._key(key_node, path)
            if key is None:
                continue
            here = (*path, key)
            # YAML uses the last of several equal keys, which would silently change a value.
            if key in first:
                source = f" of {self._source}" if self._source else ""
                lines = f"in lines {first[key]} and {_line(key_node)}{source}"
                what, why = (
                    f"the key is given twice, {lines}",
                    "only one of them could take effect",
                )
                self._document.problems.append(
                    Problem(format_path(here), what, why, "Remove one of them")
                )
                continue
            first[key] = _line(key_node)
            self._document.places.setdefault(
                here, YamlLocation(self._source, _line(key_node))
            )
            result[key] = self.value(value_node, here)
        # Merge last: keys next to `<<` take precedence over merged keys, whatever their order in the file.
        for merged in self._merged(merges, path):
            result = {**merged, **result}
        return result

    def _key(self, key_node: yaml.Node, path: FieldPath) -> str | None:
        """Return the key, or None after a report of its problem."""
        # A key such as `on:` or `1:` would not be a text, as the user intends.
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != f"{_TAG}str":
            is_scalar = isinstance(key_node, yaml.ScalarNode)
            shown = key_node.value if is_scalar else "a list or mapping"
            kind = _KINDS.get(key_node.tag.removeprefix(_TAG), "something else")
            remedy = (
                f'Put it in quotes: "{shown}"'
                if is_scalar
                else "Write a text before the colon"
            )
            what, why = (
                f"the key {show(shown)} is not a text",
                f"YAML reads it as {kind}",
            )
            self._refuse(path, key_node, what, why=why, remedy=remedy)
            return None
        return self._text(key_node, path)

    def _merged(self, nodes: list[yaml.Node], path: FieldPath) -> Iterator[dict[str, Any]]:
        """Yield the mappings of ``<<``. Earlier mappings take precedence, and keys next to ``<<`` over all of
        them."""
        # YAML allows one `<<`. Of two, the second would take precedence silently.
        for node in nodes[1:]:
            self._refuse(
                (*path, "<<"),
                node,
                "the merge key is given twice",
                remedy="Merge a list: `<<: [*one, *two]`",
            )
        for node in nodes[:1]:
            for part in node.value if isinstance(node, yaml.SequenceNode) else [node]:
                value = (
                    self.value(part, path) if isinstance(part, yaml.MappingNode) else None
                )
                if isinstance(value, dict):
                    yield value
                else:
                    self._refuse(
                        (*path, "<<"),
                        part,
                        "merges something that is not a mapping",
                        remedy="Merge `*name` of a mapping",
                    )

    def _foreign_tag(self, node: yaml.Node, path: FieldPath) -> None:
        self._refuse_value(
            path,
            node,
            f"the tag {node.tag.replace(_TAG, '!!')} is not allowed",
            remedy="Remove the tag",
        )

    def _scalar(self, node: yaml.Node, path: FieldPath) -> Any:
        # The tag is either chosen by YAML or written in the file, so check the text against it.
        text = str(node.value)
        kind = node.tag.removeprefix(_TAG)
        # `<<` merges only as a key.
        if kind in ("str", "merge"):
            return self._text(node, path)
        if kind not in ("null", "bool", "int", "float"):
            return self._foreign_tag(node, path)
        found, value = read_plain(text)
        if kind != found and (kind, found) != ("float", "int"):
            self._refuse_value(
                path,
                node,
                f"{show(text)} does not match its tag !!{kind}",
                remedy="Remove the tag",
            )
            return None
        if found in ("null", "bool"):
            return value
        if value is None:
            self._refuse_value(
                path,
                node,
                f"a number of {len(text)} digits is too large",
                remedy="Put it in quotes if it is a text",
            )
            return None
        if _begins_with_zero(text):
            return self._octal(node, path, text)
        if isinstance(value, int):
            return float(value) if kind == "float" else value
        return self._float(node, path, text, float(value))

    def _float(
        self, node: yaml.Node, path: FieldPath, text: str, number: float
    ) -> float | None:
        # Do not round to infinity or to zero: 1e400 and 1e-400 are mistakes.
        if text.lower().endswith(("inf", "nan")):
            self._refuse_value(
                path,
                node,
                f"{show(text)} is not a finite number",
                remedy="Write a finite number",
            )
            return None
        if math.isfinite(number) and (number != 0 or is_zero(text)):
            return number
        size = "small" if number == 0 else "large"
        why = "it cannot be represented as a 64-bit float"
        self._refuse_value(
            path, node, f"{show(text)} is too {size}", why=why, remedy="Check the exponent"
        )
        return None

    def _text(self, node: yaml.Node, path: FieldPath) -> str | None:
        try:
            # JSON writes characters beyond U+FFFF as two escapes, which YAML does not combine.
            return str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            why = "half of a character cannot be stored"
            self._refuse_value(
                path,
                node,
                "the text holds half of a surrogate pair",
                why=why,
                remedy="Correct the \\u escape",
            )
            return None

    def _octal(self, node: yaml.Node, path: FieldPath, text: str) -> int | None:
        # A leading 0 means octal in YAML. It is nearly always a mistake, or a text such as a postal code.
        # Only a pod template contains octal numbers: file modes.
        digits = text.lstrip("+-").replace("_", "")
        sign = -1 if text.startswith("-") else 1
        if path[:2] == _OCTAL_ALLOWED and re.fullmatch("[0-7]+", digits):
            return sign * int(digits, 8)
        plain = digits.lstrip("0") or "0"
        remedy = f'Write {plain} for the number, or "{text}" in quotes for the text'
        why = "YAML would read it as an octal number"
        self._refuse_value(path, node, f"{text} begins with 0", why=why, remedy=remedy)
        return None


def _begins_with_zero(text: str) -> bool:
    return re.fullmatch("[-+]?0[0-9]+", text.replace("_", "")) is not None


_KINDS: Final = {
    "bool": "true or false",
    "int": "a number",
    "float": "a number",
    "null": "nothing",
}


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
