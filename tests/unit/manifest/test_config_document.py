"""How YAML is read: strict where YAML would guess, bounded where it would explode, and with a line for every
value."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad_manifest.reading.document import Document, YamlLocation, parse_document


def parse(text: str) -> Document:
    return parse_document(text, label="run.yaml")


def value(text: str) -> Any:
    document = parse(text)
    assert document.problems == []
    return document.value


def problem_texts(text: str) -> list[str]:
    document = parse(text)
    assert document.problems
    return [str(problem) for problem in document.problems]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a: 1", 1),
        ("a: -1_000", -1000),
        ("a: 0", 0),
        ("a: 0x1F", 31),
        ("a: 0b101", 5),
        ("a: 1e-3", 0.001),
        ("a: 3e4", 30000.0),
        ("a: 1.5", 1.5),
        ("a: .5", 0.5),
        ("a: 0.0e9", 0.0),
        ("a: 20M", "20M"),
        ("a: 5%", "5%"),
        ("a: on", True),
        ("a: No", False),
        ("a: 'on'", "on"),
        ("a: ~", None),
        ("a:", None),
        ("a: 2024-01-01", "2024-01-01"),
        ("a: 1:30", "1:30"),
        ("a: 1__0", 10),
        ("a: y", True),
        ("a: 0o17", 15),
        ("a: 0X1F", 31),
        ("a: =", "="),
        ("a: !!str 5", "5"),
        ("a: !!int '5'", 5),
        ("a: !!float 5", 5.0),
        ("a: |\n  x\n  y\n", "x\ny\n"),
        ('a: "\\ud83d\\ude00"', "\U0001f600"),
        ("\ufeffa: 1", 1),
    ],
)
def test_a_scalar_is_parsed_as_kubernetes_parses_it(text: str, meant: Any) -> None:
    found = value(text.removeprefix("\ufeff"))["a"]
    assert found == meant and type(found) is type(meant)


def test_octal_numbers_are_refused_except_in_fields_where_kubernetes_expects_them() -> None:
    (problem,) = problem_texts("a: 010")
    assert problem.startswith(
        "a: 010 begins with 0 (line 1); YAML would read it as an octal number."
    )
    assert problem.endswith('Write 10 for the number, or "010" in quotes for the text.')
    assert value("spec: {template: {volumes: [{configMap: {defaultMode: 0644}}]}}") == {
        "spec": {"template": {"volumes": [{"configMap": {"defaultMode": 0o644}}]}}
    }
    assert "09 begins with 0" in problem_texts("a: 09")[0]


@pytest.mark.acceptance("8d-8a", "input-A-66")
@pytest.mark.capability("A-66")
def test_all_duplicate_keys_are_reported_with_both_lines_at_any_depth() -> None:
    text = "a: 1\nb:\n  - c: 1\n    d: 2\n    c: 3\na: 4\n"
    assert problem_texts(text) == [
        "b[0].c: the key is given twice, in lines 3 and 5; only one of them could take effect. Remove one of them.",
        "a: the key is given twice, in lines 1 and 6; only one of them could take effect. Remove one of them.",
    ]


def test_a_duplicate_inside_an_overlay_names_the_overlay() -> None:
    document = parse_document("{a: 1, a: 2}", label="small.yaml", source="small.yaml")
    assert "in lines 1 and 1 of small.yaml" in str(document.problems[0])


def test_quoted_and_plain_keys_are_equal() -> None:
    assert "the key is given twice" in problem_texts("a: 1\n'a': 2")[0]


@pytest.mark.parametrize(
    ("key", "kind"),
    [("on", "true or false"), ("1", "a number"), ("1.5", "a number"), ("~", "nothing")],
)
def test_a_key_that_is_not_text_is_refused(key: str, kind: str) -> None:
    assert problem_texts(f"a:\n  {key}: x") == [
        f"a: the key '{key}' is not a text (line 2); YAML reads it as {kind}. Put it in quotes: \"{key}\"."
    ]


def test_a_key_that_is_a_list_is_refused() -> None:
    assert "is not a text (line 1)" in problem_texts("[a, b]: x")[0]


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", ".NaN"])
def test_non_finite_numbers_are_refused(text: str) -> None:
    assert problem_texts(f"a: {text}") == [
        f"a: '{text}' is not a finite number (line 1). Write a finite number."
    ]


def test_floats_that_cannot_be_represented_are_refused() -> None:
    assert "'1e999' is too large (line 1)" in problem_texts("a: 1e999")[0]
    assert "'1e-999' is too small (line 1)" in problem_texts("a: 1e-999")[0]


def test_a_number_of_a_million_digits_is_refused_at_once() -> None:
    assert (
        "a number of 900000 digits is too large" in problem_texts("a: " + "1" * 900_000)[0]
    )


def test_anchors_and_merge_keys_work_and_an_explicit_key_overrides_the_merge() -> None:
    anchors = "base: &base {x: 1, w: 2}\nother: &other {w: 5, z: 6}\n"
    found = value(
        anchors + "a: {<<: *base, w: 3}\nb: {<<: [*other, *base]}\nc: [*base, *base]\n"
    )
    assert found["a"] == {"x": 1, "w": 3}
    assert found["b"] == {"x": 1, "w": 5, "z": 6}
    assert found["c"] == [{"x": 1, "w": 2}] * 2


def test_a_merge_of_a_non_mapping_or_a_second_merge_is_refused() -> None:
    assert (
        "merges something that is not a mapping"
        in problem_texts("b: &b [1]\na: {<<: *b}")[0]
    )
    assert (
        "the merge key is given twice"
        in problem_texts("b: &b {x: 1}\na: {<<: *b, <<: *b}")[0]
    )


def bomb(levels: int) -> str:
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize("levels", [6, 30])
def test_an_alias_bomb_is_refused_before_it_is_expanded(levels: int) -> None:
    assert problem_texts(bomb(levels)) == [
        "run.yaml: aliases expand to more than 20000 values. Write the values out where they are needed."
    ]


def test_a_merge_bomb_is_refused_before_it_is_expanded() -> None:
    lines = ["m0: &m0 {k: 1}"] + [
        f"m{n}: &m{n} {{a: {{<<: *m{n - 1}}}, b: {{<<: *m{n - 1}}}}}" for n in range(1, 30)
    ]
    assert "20000 values" in problem_texts("\n".join(lines))[0]


def test_an_anchor_that_contains_itself_is_refused() -> None:
    assert problem_texts("a: &a [*a]") == [
        "run.yaml:1: cannot be expanded; an anchor contains itself. Remove the alias."
    ]
    assert "contains itself" in problem_texts("a: &a\n  b:\n    c: *a")[0]
    assert "contains itself" in problem_texts("a: &a\n  <<: *a")[0]


def test_a_long_chain_of_aliases_is_refused() -> None:
    lines = ["c0: &c0 [x]"] + [f"c{n}: &c{n} [*c{n - 1}]" for n in range(1, 200)]
    assert "nest deeper than 64 levels" in problem_texts("\n".join(lines))[0]


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "{a: " * 100_000, "- " * 5000 + "x", "a: " + "[" * 65 + "]" * 65],
)
def test_deep_nesting_is_refused_without_overflow(text: str) -> None:
    assert "nested deeper than 64 levels" in problem_texts(text)[0]


def test_too_many_values_are_refused() -> None:
    assert "more than 20000 values" in problem_texts("a:\n" + "  - 1\n" * 30_000)[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "run.yaml: is empty; a TrainingRun is needed."),
        ("# only a comment\n", "run.yaml: is empty"),
        ("---\n", None),
        (
            "a: 1\n---\nb: 2\n",
            "run.yaml:2:1: a second document begins here; a file contains exactly one TrainingRun.",
        ),
        (
            "a:\n\t- b\n",
            "run.yaml:2:1: not valid YAML; while scanning for the next token found character '\\t'",
        ),
        (
            "a: b: c\n",
            "run.yaml:1:5: not valid YAML; mapping values are not allowed here. Check the indentation",
        ),
        (
            "a: *x\n",
            "found undefined alias 'x'. Define the anchor (&name) before it is used (*name).",
        ),
        ("a: %5\n", "Put the value in quotes."),
        ("a: [1\n", "Close the bracket or add the comma."),
        ("a: 'x\n", "Close the quotes or brackets."),
        ("a: 1\n b: 2\n", "not valid YAML"),
        (
            "a: \x01\n",
            "run.yaml:1: contains the character U+0001; it is not allowed in YAML. Remove it.",
        ),
        ("a: 1\nb: \x00\n", "run.yaml:2: contains the character U+0000"),
        (
            "a: !!python/object/apply:os.system [ls]\n",
            "a: the tag !!python/object/apply:os.system is not allowed (line 1).",
        ),
        ("a: !!binary aGk=\n", "the tag !!binary is not allowed"),
        ("a: !!set {x, y}\n", "the tag !!set is not allowed"),
        ("a: !mine x\n", "the tag !mine is not allowed"),
        ("a: !!int x\n", "a: 'x' does not match its tag !!int (line 1). Remove the tag."),
        ("a: !!bool x\n", "does not match its tag !!bool"),
        ("a: !!null x\n", "does not match its tag !!null"),
        ('a: "\\ud800"\n', "a: the text holds half of a surrogate pair (line 1)"),
        (
            'a: 1\nb: "\\UFFFFFFFF"\n',
            "run.yaml:2: not valid YAML; an escape stands for a character that does not exist.",
        ),
        ('a: "\\U00110000"\n', "Correct the \\U escape."),
        ("%YAML 3.0\n---\na: 1\n", "not valid YAML"),
    ],
)
def test_a_text_that_is_not_a_manifest_is_reported_with_its_position(
    text: str, problem: str | None
) -> None:
    if problem is None:
        assert parse(text).value is None
    else:
        assert problem in problem_texts(text)[0]


def test_every_value_has_its_line_number() -> None:
    document = parse_document(
        "a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n", label="l", source="over.yaml"
    )
    lines = {path: place.line for path, place in document.places.items()}
    assert lines[("a", "b")] == 2
    assert lines[("a", "c", 0)] == 4
    assert lines[("a", "c", 1, "d")] == 5
    assert str(document.places[("a", "b")]) == "over.yaml line 2"
    assert str(YamlLocation("", 7)) == "line 7"


def test_a_value_that_cannot_be_parsed_is_marked_as_lost() -> None:
    document = parse("a: {b: .nan, c: 1}")
    assert document.value == {"a": {"b": None, "c": 1}}
    assert document.lost == {"a.b"}


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_any_text_gives_a_document_or_a_problem(text: str) -> None:
    document = parse(text)
    assert document.value is not None or document.problems or text.strip()
    for problem in document.problems:
        assert problem.path and problem.what
