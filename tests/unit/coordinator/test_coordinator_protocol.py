"""Messages on the wire: camelCase, strict types, finite numbers only, bounded lines."""

import contextlib
import dataclasses
import enum
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad_common.codec import (
    MAX_LINE_BYTES,
    MAX_TEXT,
    Codec,
    ProtocolError,
    encode,
    from_json,
    to_json,
)
from evergrad_coordinator.protocol import (
    FROM_COORDINATOR,
    FROM_NODES,
    Broken,
    Capacity,
    Commit,
    Go,
    Hello,
    Message,
    Ping,
    Placement,
    Plan,
    Progress,
    Ready,
    Up,
    decode_from_coordinator,
    decode_from_node,
)

HELLO = Hello(
    "r",
    "3",
    "a",
    "10.0.0.3",
    2,
    "in-process",
    fingerprint={"torch": "2"},
    had=Placement(5, 2, 2, 8),
    known_generation=7,
)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=500)
NODE_MESSAGES = st.one_of(
    st.builds(Ping),
    st.builds(
        Ready,
        st.integers(0, 2**52),
        st.integers(0, 4096),
        st.integers(0, 65535),
        st.integers(-1, 2**52),
    ),
    st.builds(Commit, st.integers(-(2**53) + 1, 2**53 - 1), st.integers(0, 2**40)),
    st.builds(Broken, st.integers(0, 9), st.just("stuck"), message=TEXTS),
    st.builds(
        Progress,
        st.integers(0, 9),
        st.integers(0, 9),
        loss=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    ),
)


@given(NODE_MESSAGES)
def test_a_message_encoded_by_a_node_is_decoded_by_the_coordinator(
    message: Message,
) -> None:
    assert decode_from_node(encode(message)) == message


def test_nested_and_optional_fields_are_decoded_unchanged() -> None:
    assert decode_from_node(encode(HELLO)) == HELLO
    assert decode_from_node(
        encode(dataclasses.replace(HELLO, had=None))
    ) == dataclasses.replace(HELLO, had=None)


def test_every_message_has_its_own_type() -> None:
    names = [kind.TYPE for kind in (*FROM_NODES, *FROM_COORDINATOR)]
    assert len(names) == len(set(names))


def test_names_are_in_camel_case_on_the_wire() -> None:
    found = json.loads(encode(HELLO))
    assert found["type"] == "hello"
    assert found["knownGeneration"] == 7
    assert found["had"] == {"generation": 5, "firstRank": 2, "workers": 2, "worldSize": 8}


def test_unknown_fields_are_ignored() -> None:
    line = json.dumps(
        {"type": "ready", "generation": 1, "workers": 1, "port": 5, "colour": "red"}
    ).encode()
    assert decode_from_node(line) == Ready(1, 1, 5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"generation": None}, "ready.generation"),
        ({"generation": "1"}, "ready.generation"),
        ({"generation": 1.0}, "ready.generation"),
        ({"generation": True}, "ready.generation"),
        ({"generation": 2**53}, "ready.generation"),
        ({"port": [1]}, "ready.port"),
        ({"type": "go"}, "type"),
        ({"type": ["ready"]}, "type"),
    ],
)
def test_an_invalid_field_is_named(changes: dict[str, Any], named: str) -> None:
    line = json.dumps(
        {"type": "ready", "generation": 1, "workers": 1, "port": 5, **changes}
    ).encode()
    with pytest.raises(ProtocolError, match=named.replace(".", r"\.")):
        decode_from_node(line)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Capacity(-1), "capacity.workers: -1 is not within 0 and 4096"),
        (Capacity(10**9), "capacity.workers"),
        (Ready(1, 1, 65536), "ready.port"),
        (Up(-1, 0), "up.generation"),
        (Up(1, -2), "up.step"),
        (Progress(1, 1, total_steps=-1), "progress.totalSteps"),
        (Broken(1, "stuck", time_since=-1), "broken.timeSince"),
    ],
)
def test_a_number_out_of_its_bounds_is_refused(message: Message, field: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(field)):
        decode_from_node(encode(message))


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"ready\.port: missing"):
        decode_from_node(b'{"type": "ready", "generation": 1, "workers": 1}')


def test_an_invalid_field_of_a_nested_object_is_named() -> None:
    found = json.loads(encode(HELLO))
    found["had"]["firstRank"] = "0"
    with pytest.raises(ProtocolError, match=r"hello\.had\.firstRank"):
        decode_from_node(json.dumps(found).encode())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400])
def test_a_non_finite_number_is_refused(number: str) -> None:
    with pytest.raises(ProtocolError):
        decode_from_node(
            b'{"type": "progress", "generation": 1, "step": 1, "loss": '
            + number.encode()
            + b"}"
        )


def test_a_non_finite_number_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match=r"progress\.loss"):
        encode(Progress(1, 1, loss=float("nan")))


def test_the_text_infinity_is_sent() -> None:
    message = Broken(1, "stuck", message="loss is NaN, was Infinity")
    assert decode_from_node(encode(message)) == message


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"3",
        b"{",
        b'{"type": 3}',
        b'{"type": "ping"} x',
        b"[" * 60000,
        b'{"type": "capacity", "workers": ' + b"9" * 5000 + b"}",
        b'{"type": "leaving", "reason": "\\ud800"}',
        b'{"type": "leaving", "reason": "' + b"x" * (MAX_TEXT + 1) + b'"}',
    ],
)
def test_a_line_that_is_not_a_message_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_from_node(line)


def test_an_overlong_line_is_refused_in_both_directions() -> None:
    with pytest.raises(ProtocolError):
        decode_from_node(b'{"type": "ping", "x": "' + b"x" * MAX_LINE_BYTES + b'"}')
    with pytest.raises(ProtocolError, match="hello"):
        encode(
            dataclasses.replace(
                HELLO, fingerprint={str(number): "x" * 4000 for number in range(20)}
            )
        )


def test_a_long_failure_message_is_cut_by_the_sender() -> None:
    message = decode_from_node(
        encode(Broken(1, "worker_crash", message="🐍" * (MAX_TEXT + 5)))
    )
    assert isinstance(message, Broken)
    assert message.message == "🐍" * MAX_TEXT


def test_each_side_refuses_its_own_messages() -> None:
    plan = Plan(1, hard=True, is_member=True, reason="x")
    assert decode_from_coordinator(encode(plan)) == plan
    with pytest.raises(ProtocolError):
        decode_from_node(encode(plan))
    with pytest.raises(ProtocolError):
        decode_from_coordinator(encode(Ping()))
    assert decode_from_coordinator(encode(Go(1, 0, 1, 1, 0, 1, "a", 2))) == Go(
        1, 0, 1, 1, 0, 1, "a", 2
    )


@given(st.binary(max_size=300))
def test_random_bytes_give_a_message_or_a_protocol_error(line: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode_from_node(line), FROM_NODES)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.sampled_from([*FROM_NODES]), st.data())
def test_random_values_give_a_message_or_a_protocol_error(
    kind: type[Message], data: st.DataObject
) -> None:
    found = {"type": kind.TYPE}
    for field in dataclasses.fields(kind):
        head, *rest = field.name.split("_")
        found[head + "".join(map(str.capitalize, rest))] = data.draw(_JSON)
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode_from_node(json.dumps(found).encode()), kind)


class Colour(enum.StrEnum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Leaf:
    text: str


@dataclasses.dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...]
    colours: Mapping[str, Colour]
    anything: Any = None


TREE = Tree((Leaf("a"), Leaf("b")), {"first": Colour.RED}, anything=[1, {"x": None}])


def test_the_codec_supports_any_dataclass_with_lists_enums_and_nested_records() -> None:
    codec = Codec([Tree, Leaf])
    assert codec.decode(codec.encode(TREE)) == TREE
    assert codec.decode(codec.encode(Leaf("x"))) == Leaf("x")


def test_an_invalid_item_deep_in_a_record_is_named() -> None:
    found = to_json(TREE)
    found["leaves"][1]["text"] = 3
    with pytest.raises(ProtocolError, match=r"tree\.leaves\[1\]\.text: 3 is not a text"):
        from_json(Tree, found, where="tree")
    with pytest.raises(ProtocolError, match=r"tree\.colours\.first: 'blue' is none of red"):
        from_json(Tree, {**to_json(TREE), "colours": {"first": "blue"}}, where="tree")


@dataclasses.dataclass(frozen=True)
class Weighed:
    weights: Mapping[str, float]
    leaves: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)
    trees: tuple[Tree, ...] = ()


def test_a_non_finite_number_is_named_at_any_depth() -> None:
    with pytest.raises(
        ProtocolError, match=r"^Weighed\.weights\.kl: nan is not a valid JSON number"
    ):
        Codec([Weighed]).encode(Weighed({"loss": 1.0, "kl": float("nan")}))
    tree = dataclasses.replace(TREE, anything=[{"x": float("inf")}])
    with pytest.raises(
        ProtocolError,
        match=r"^Weighed\.trees\[0\]\.anything\[0\]\.x: inf is not a valid JSON number",
    ):
        Codec([Weighed]).encode(Weighed({}, trees=(tree,)))


def test_a_mapping_of_records_is_decoded_unchanged() -> None:
    codec = Codec([Weighed])
    record = Weighed({"loss": 0.5}, {"first": Leaf("a")})
    assert codec.decode(codec.encode(record)) == record


def test_a_record_with_a_field_type_unknown_to_the_codec_is_refused_at_once() -> None:
    kind = dataclasses.make_dataclass("Odd", [("when", complex)], frozen=True)
    with pytest.raises(TypeError, match="complex"):
        Codec([kind])
