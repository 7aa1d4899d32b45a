"""Chat templates: the text of a conversation, and the assistant's turns in it."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from evergrad_manifest.training import Tokenizer as Settings
from evergrad_trainer.data.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    check_template,
)
from evergrad_trainer.data.marked_text import MarkedText, marks_of
from evergrad_trainer.data.tokenizers import load_tokenizer

BY_TURNS = (
    "{% for message in messages %}\n"
    "<{{ message.role }}>{{ message.content }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITH_BLOCKS = (
    "{%- for message in messages -%}"
    "<{{ message.role }}>"
    "{%- if message.role == 'assistant' -%}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{%- else -%}{{ message.content }}{{ eos_token }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)
EOS = (("eos_token", "<end>"),)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Señor?"},
    {"role": "assistant", "content": "Sí, 漢字"},
]


def turns(text: MarkedText) -> list[str]:
    return [text[span.start : span.end] for span in text.spans]


@pytest.mark.parametrize("source", [BY_TURNS, WITH_BLOCKS], ids=["by turns", "with blocks"])
def test_assistant_turns_are_found_with_their_ends(source: str) -> None:
    text = ChatTemplate(source, EOS).render(TALK, {})
    behind = "" if source is WITH_BLOCKS else "\n"
    assert turns(text) == [f"4<end>{behind}", f"Sí, 漢字<end>{behind}"]
    assert text.startswith("<system>Be brief.<end>")


def test_text_and_marks_match_transformers(tmp_path: Path) -> None:
    words = [
        "<unk>",
        "<end>",
        "<system>",
        "<user>",
        "<assistant>",
        *["Be", "brief.", "2", "+", "?", "4"],
    ]
    backend = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<system>", "<user>", "<assistant>"],
        chat_template=WITH_BLOCKS,
    )
    theirs.save_pretrained(tmp_path)
    expected: Any = theirs.apply_chat_template(
        TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )

    own = load_tokenizer(
        Settings.model_validate({"type": "transformers", "path": str(tmp_path)}), tmp_path
    )
    text = ChatTemplate(WITH_BLOCKS, EOS).render(TALK, {})
    ids, offsets = own.encode_with_offsets(text)
    assert ids == list(expected["input_ids"])
    assert marks_of(text, offsets).astype(int).tolist() == list(expected["assistant_masks"])
    assert sum(expected["assistant_masks"]) >= 4


def test_a_template_that_changes_earlier_turns_needs_blocks() -> None:
    only_last = (
        "{% for message in messages %}{% if loop.last or message.role == 'user' %}"
        "{{ message.content }}|{% endif %}{% endfor %}"
    )
    with pytest.raises(ChatTemplateError, match=r"message 3 after its prompt.* generation"):
        ChatTemplate(only_last).render(TALK, {})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "refuses it: roles must alternate",
        ),
        ("{{ strftime_now('%d') }}", "writes the date"),
        ("{{ messages.append(1) }}", "the chat template fails"),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails"),
        ("{{ 1 // 0 }}", "the chat template fails: "),
    ],
)
def test_a_conversation_that_the_template_refuses_is_reported_with_the_reason(
    source: str, said: str
) -> None:
    with pytest.raises(ChatTemplateError, match=said):
        ChatTemplate(source).render(TALK, {})


def test_an_invalid_template_is_reported_with_its_line() -> None:
    check_template(BY_TURNS)
    with pytest.raises(ChatTemplateError, match="line 2: "):
        check_template("{{ messages }}\n{% for %}")


def test_functions_that_model_templates_use_are_available() -> None:
    source = (
        "{% for message in messages %}{% if message.role != 'user' %}{% continue %}{% endif %}"
        "{{ message | tojson }}{% endfor %}{{ tools | length }}"
    )
    text = ChatTemplate(source).render(
        [{"role": "user", "content": "<é>"}], {"tools": [1, 2]}
    )
    assert text == '{"role": "user", "content": "<é>"}2'


TOOL = {"type": "function", "function": {"name": "look_up", "description": "é <b>"}}
BODY = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
)


@pytest.mark.parametrize("given", [{}, {"tools": [TOOL]}, {"documents": [{"text": "d"}]}])
@pytest.mark.parametrize(
    "source",
    [
        "{% if tools is none %}no tools {% else %}Tools: {{ tools }} {% endif %}",
        "{% if tools is defined %}{{ tools }} {% endif %}",
        "{% if documents is not none %}{{ documents | length }} documents {% endif %}",
        "{% if tools %}{{ tools | tojson(separators=(',', ':')) }} {% endif %}",
        "{% if tools %}{{ tools[0] | tojson(sort_keys=true, indent=2) }} {% endif %}",
        "{{ tools | tojson(true) }}{{ documents }}",
        "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}",
    ],
)
def test_tools_and_documents_are_rendered_as_in_transformers(
    source: str, given: dict[str, Any]
) -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    expected = theirs.apply_chat_template(
        TALK, chat_template=source + BODY, tokenize=False, **given
    )
    assert ChatTemplate(source + BODY).render(TALK, given) == expected
