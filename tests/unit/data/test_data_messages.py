"""Rows as other tools write them: parts, null and missing contents, from and value, reasoning, dates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.chat_template import ChatTemplate, ChatTemplateError
from evergrad_trainer.data.marked_text import MarkedText
from evergrad_trainer.data.preparation.documents import RowError
from evergrad_trainer.data.preparation.rows import RowFormat
from evergrad_trainer.data.prepared import Prepared

Make = Callable[..., Training]
Prepare = Callable[..., Prepared]

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ONLY_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = {"type": "function", "function": {"name": "w", "arguments": {"city": "Paris"}}}
USER = {"role": "user", "content": "hi"}


def render(template: str, row: dict[str, Any], *, date: str | None = None) -> MarkedText:
    form = RowFormat(
        "messages", "prompt", "completion", 1000, "refuse", template, (), date=date
    )
    return form.render(row)


def turns(text: MarkedText) -> list[str]:
    return [text[span.start : span.end] for span in text.spans]


def answer(**keys: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", **keys}]}


@pytest.mark.parametrize("more", [{"content": None}, {}, {"content": ""}])
@pytest.mark.parametrize(
    "template", [PLAIN, PLAIN.replace("m.content", "'' + m['content']")]
)
def test_a_tool_call_needs_no_content(template: str, more: dict[str, Any]) -> None:
    text = render(template, answer(tool_calls=[CALL], **more))
    assert text == '<user>hi;<assistant>w{"city": "Paris"};'
    assert turns(text) == ['w{"city": "Paris"};']


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_reasoning_has_the_field_names_of_transformers(name: str, read: str) -> None:
    template = PLAIN.replace("reasoning_content", read)
    text = render(template, answer(content="4", **{name: "two and two"}))
    assert text == "<user>hi;<assistant>two and two4;"
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    row = answer(content="4", tool_calls=None, **{name: "two and two"})["messages"]
    assert text == theirs.apply_chat_template(row, chat_template=template, tokenize=False)


PARTS = [{"type": "text", "text": "the "}, {"type": "text", "text": "answer"}]


@pytest.mark.parametrize("template", [PLAIN, STRICT, ONLY_PARTS])
@pytest.mark.parametrize("content", ["the answer", PARTS, ["the ", "answer"]])
def test_content_may_be_text_or_parts_with_any_template(
    template: str, content: Any
) -> None:
    text = render(template, answer(content=content))
    assert text == "<user>hi;<assistant>the answer;"
    assert turns(text) == ["the answer;"]
    assert not text.dropped


@pytest.mark.parametrize(
    ("speakers", "expected"),
    [
        (
            [("system", "s"), ("human", "h"), ("gpt", "g")],
            "<system>s;<user>h;<assistant>g;",
        ),
        (
            [
                ("human", "h"),
                ("function_call", '{"name": "w", "arguments": {"a": 1}}'),
                ("observation", "o"),
                ("gpt", "g"),
            ],
            '<user>h;<assistant>w{"a": 1};<tool>o;<assistant>g;',
        ),
    ],
)
@pytest.mark.parametrize("field", ["conversations", "messages"])
def test_roles_under_the_key_from_are_read(
    speakers: list[tuple[str, str]], expected: str, field: str
) -> None:
    row = {field: [{"from": name, "value": said} for name, said in speakers]}
    assert render(PLAIN, row) == expected


def test_conversations_are_not_read_from_rows_with_a_prompt() -> None:
    row = {"prompt": "a", "completion": "b", "conversations": []}
    assert render(PLAIN, row) == "ab"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            {"from": "alien", "value": "x"},
            "messages[0].from is 'alien'; speakers that are known",
        ),
        ({"from": "gpt"}, "messages[0] has from and no value; its keys are 'from'"),
        (
            {"from": "function_call", "value": "x"},
            "messages[0].value is not a function call",
        ),
        (
            {"text": "x"},
            "messages[0].role is missing; a message has a role, or from and value",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0] is a part of the type 'image_url'; only parts that are texts",
        ),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "messages[0].content[0] is not a text",
        ),
        ({"role": "user", "content": {"a": 1}}, "messages[0].content is not a text"),
    ],
)
def test_an_invalid_message_is_described(message: dict[str, Any], said: str) -> None:
    with pytest.raises(RowError) as refused:
        render(PLAIN, {"messages": [message, {"role": "assistant", "content": "a"}]})
    assert f"{refused.value.what}; {refused.value.why}".startswith(said)


def test_a_template_that_writes_the_date_uses_the_date_of_the_manifest(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    template = "Today: {{ strftime_now('%Y-%m-%d %d %b') }} " + PLAIN
    (tmp_path / "docs.jsonl").write_text(json.dumps(answer(content="yo")) + "\n")
    rows = {"chatTemplate": template}
    data = {"sequenceLength": 100, "malformed": "skip"}
    # Also where malformed rows are passed over: all of them would be.
    with pytest.raises(DataError) as refused:
        prepared_in(training(recipe="sft", data=data, rows=rows))
    assert str(refused.value).startswith(
        "spec.training.rows.date: missing; the chat template writes"
    )
    assert "`date: 2025-06-01`" in str(refused.value)
    dated = training(recipe="sft", data=data, rows={**rows, "date": "2025-06-01"})
    assert prepared_in(dated).sources[0].documents == 1
    text = render(template, answer(content="yo"), date="2025-06-01")
    assert text.startswith("Today: 2025-06-01 01 Jun <user>hi;")
    # A template that does not need the value gets none.
    optional = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}" + PLAIN
    assert render(optional, answer(content="yo")).startswith("<user>")
    assert render(optional, answer(content="yo"), date="2025-06-01").startswith(
        "2025<user>"
    )


def test_message_parts_that_a_template_omits_are_counted(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    """Reasoning of an earlier turn, and calls: parts that are written in another form are present."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if loop.last %}{{ m.reasoning_content }}{% endif %}"
        "{{ m.content | upper if m.role == 'user' else m.content }};{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    rows = [
        {
            "messages": [
                m for why in "yz" for m in answer(content="a", reasoning=why)["messages"]
            ]
        },
        answer(content="a", reasoning="because"),
        answer(content="b", tool_calls=[CALL]),
        answer(content="c"),
    ]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = training(
        recipe="sft", data={"sequenceLength": 100}, rows={"chatTemplate": template}
    )
    (source,) = prepared_in(recipe).sources
    assert source.documents == 4
    assert source.skipped == {"droppedReasoning": 1, "droppedToolCalls": 1}
    assert source.malformed == 0


CLOSES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}<eos>{% endif %}"
)
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}<think></think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPENS = THINKS.replace(
    "add_generation_prompt %}<|assistant|>",
    "add_generation_prompt %}<|assistant|><think>\n",
)
RETURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' and not add_generation_prompt %}<|return|>{% else %}<|end|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "yo"},
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CLOSES, ["yo<|end|>", "yo<|end|><eos>"]),
        (THINKS, ["yo<|end|>", "<think></think>yo<|end|>"]),
        (OPENS, ["yo<|end|>", "</think>yo<|end|>"]),
        (RETURNS, ["yo<|end|>", "yo<|return|>"]),
    ],
    ids=["closes", "thinks", "opens", "returns"],
)
def test_turns_are_found_although_a_longer_conversation_is_rendered_differently(
    template: str, expected: list[str]
) -> None:
    text = ChatTemplate(template, (("eos_token", "<eos>"),)).render(TALK, {})
    assert turns(text) == expected
    assert text.startswith(
        "<|user|>hi<|end|><|assistant|>yo<|end|><|user|>?<|end|><|assistant|>"
    )


def test_a_tool_call_turn_is_found_although_its_text_depends_on_later_turns() -> None:
    talk = [
        TALK[0],
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "12"},
        TALK[1],
    ]
    text = ChatTemplate(THINKS).render(talk, {})
    assert turns(text) == ["(w)<|end|>", "<think></think>yo<|end|>"]


@pytest.mark.parametrize(
    "template",
    [
        # The beginning of the turn cannot be determined: after half a token, and in another order.
        RETURNS.replace("<|assistant|>{% endif", "<|ass{% endif").replace(
            "<|{{", "<|{{ loop.index }}{{"
        ),
        "{% for m in messages | reverse %}{{ m.content }}{{ messages | length }}{% endfor %}",
    ],
)
def test_an_ambiguous_turn_is_refused(template: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"needs {% generation %} blocks .* trl"):
        ChatTemplate(template, (("eos_token", "<eos>"),)).render(TALK, {})
