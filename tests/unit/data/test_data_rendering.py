"""Rows that become the text that they became in the first versions keep their fingerprint; others do not."""

from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment

from evergrad_trainer.data.preparation.content import Content
from evergrad_trainer.data.preparation.files import SourceEntry
from evergrad_trainer.data.preparation.pairs import PairFormat
from evergrad_trainer.data.preparation.publish import Recipe, compute_fingerprint
from evergrad_trainer.data.preparation.rendering import is_rendered_otherwise
from evergrad_trainer.data.preparation.rows import RowFormat
from evergrad_trainer.data.tokenizers import ByteTokenizer

SOURCE = SourceEntry("spec", "rows", Path("rows.jsonl"), "jsonl", "text", "uint16")
TALK = "{% for m in messages %}{{ m.content }}{% endfor %}"
SAME = [
    TALK,
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}",
    "{%- if tools %}{% for one in tools %}{{ one }}{% endfor %}{% else %}none{% endif %}",
    "{% if not tools and not documents %}a{% elif messages %}b{% endif %}",
    "{% if tools is defined and tools %}{{ tools | length }}{% endif %}",
    "{% if tools is defined and tools is not none and tools | length %}{{ tools }}{% endif %}",
    "{% if tools and tools | length > 1 %}{{ tools }}{% endif %}",
    "{% if messages and documents %}{{ documents }}{% endif %}",
    "{% if tools or documents %}some{% endif %}",
    "{{ tools[0] if tools else 'none' }}",
    "{%- if not tools is defined %}\n    {%- set tools = none %}\n{%- endif %}{{ tools }}",
    "{% if tools is not defined %}{% set tools = none %}{% endif %}{{ tools }}",
    "{% if builtin is defined %}{{ builtin }}{% endif %}",
]
OTHERWISE = [
    "{% if tools is none %}a{% else %}b{% endif %}",
    "{% if documents is not none %}a{% endif %}",
    "{% if tools is defined %}a{% endif %}",
    "{% if messages and tools is defined %}a{% endif %}",
    "{% if not tools %}{% if documents is none %}a{% endif %}{% endif %}",
    "{% if tools %}a{% elif tools is none %}b{% endif %}",
    "{{ tools }}",
    "{% if tools or messages %}{{ tools }}{% endif %}",
    "{% set n = namespace(tools=tools) %}{{ n.tools }}",
    "{% if tools is not defined %}a{% set tools = none %}{% endif %}",
    "{% if tools is not defined %}{% set tools = none %}{% endif %}{{ documents }}",
]


def form(template: str | None) -> RowFormat:
    variables = (("eos_token", "<end>"),)
    return RowFormat("messages", "prompt", "completion", 17, "refuse", template, variables)


def texts(template: str) -> set[str]:
    """What a template gives with keys that are undefined, and None."""
    compiled = Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    given: Any = {"messages": [{"content": "hello"}]}
    return {compiled.render(given), compiled.render(**given, tools=None, documents=None)}


@pytest.mark.parametrize("template", SAME)
def test_templates_that_render_the_same_keep_their_fingerprint(template: str) -> None:
    assert len(texts(template)) == 1
    assert not is_rendered_otherwise(form(template), skips_malformed=True)


@pytest.mark.parametrize("template", OTHERWISE)
def test_templates_that_render_otherwise_are_found(template: str) -> None:
    assert len(texts(template)) == 2
    assert is_rendered_otherwise(form(template), skips_malformed=False)


@pytest.mark.parametrize(
    "call",
    ["tojson(separators=(',', ':'))", "tojson(sort_keys=true)", "tojson(1, 2, none)"],
)
def test_rows_that_were_refused_count_only_where_such_rows_are_skipped(call: str) -> None:
    template = f"{{% if tools %}}{{{{ tools | {call} }}}}{{% endif %}}{TALK}"
    assert is_rendered_otherwise(form(template), skips_malformed=True)
    assert not is_rendered_otherwise(form(template), skips_malformed=False)


@pytest.mark.parametrize(
    ("call", "may_differ"),
    [
        ("map('tojson', sort_keys=true)", True),
        ("map('tojson', false, 2, none)", True),
        ("map(name, sort_keys=true)", True),
        ("map(*given)", True),
        ("map('tojson', **given)", True),
        ("map('tojson', false, indent=2)", False),
        ("map('replace', 'a', 'b', 1)", False),
        ("map(attribute='content')", False),
    ],
)
def test_a_filter_that_is_applied_to_each_item_counts_as_the_filter_itself(
    call: str, may_differ: bool
) -> None:
    template = f"{{{{ messages | {call} | join }}}}"
    assert is_rendered_otherwise(form(template), skips_malformed=True) is may_differ
    assert not is_rendered_otherwise(form(template), skips_malformed=False)


def fingerprint(rows: RowFormat | PairFormat) -> str:
    recipe = Recipe(ByteTokenizer(), "refuse", None, 0, rows)
    return compute_fingerprint(SOURCE, Content(()), recipe)


def test_the_fingerprint_is_that_of_the_first_versions_where_the_text_is() -> None:
    usual = form("{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}" + TALK)
    assert fingerprint(usual) == "2ee92b5155eaad5f46833b796c30c563"
    otherwise = form("{{ tools }}" + TALK)
    assert fingerprint(otherwise) != "f07329f3aeec43e50a1ab2e0b7f9237a"
    pairs = PairFormat(otherwise, "a", "b")
    assert fingerprint(pairs) != "ad0c0a07062f3d2bf97378f13ebe027f"
