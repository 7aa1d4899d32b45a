"""Human-readable numbers: a table of accepted and refused values with messages; exact, bounded and fast."""

import json
import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction as Ratio
from typing import Annotated, Any, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.model.fields import walk_fields
from evergrad_manifest.values.numbers import (
    Human,
    NumberError,
    SamplesOrShare,
    StepsOrFraction,
    parse_bytes,
    parse_count,
    parse_fraction,
    parse_real,
    parse_steps_or_fraction,
    parse_whole,
    show,
)

Parser = Callable[[Any], int | float]

READ: list[tuple[Parser, Any, int | float]] = [
    (parse_count, 5, 5),
    (parse_count, "5", 5),
    (parse_count, 5.0, 5),
    (parse_count, "20M", 20_000_000),
    (parse_count, "20 M", 20_000_000),
    (parse_count, " 20M ", 20_000_000),
    (parse_count, "1.1k", 1100),
    (parse_count, "1.001k", 1001),
    (parse_count, "0.07M", 70_000),
    (parse_count, "64K", 64_000),
    (parse_count, "2B", 2 * 10**9),
    (parse_count, "2G", 2 * 10**9),
    (parse_count, "1.5T", 1_500_000_000_000),
    (parse_count, "1e6", 1_000_000),
    (parse_count, "1E+6", 1_000_000),
    (parse_count, "2.5e3", 2500),
    (parse_count, "1e3k", 1_000_000),
    (parse_count, "1_000_000", 1_000_000),
    (parse_count, "1_0.5_0k", 10_500),
    (parse_count, "+3", 3),
    (parse_count, "-3", -3),
    (parse_count, "007", 7),
    (parse_count, ".5k", 500),
    (parse_count, "5.", 5),
    (parse_count, "9223372036854775807", 2**63 - 1),
    (parse_count, 2**63 - 1, 2**63 - 1),
    (parse_count, "0e9999", 0),
    (parse_real, "1e-3", 0.001),
    (parse_real, "0.1", 0.1),
    (parse_real, 0.1, 0.1),
    (parse_real, "3k", 3000.0),
    (parse_real, "30%", 0.3),
    (parse_real, "0.7%", 0.007),
    (parse_real, "1e308", 1e308),
    (parse_real, "5e-324", 5e-324),
    (parse_real, 7, 7.0),
    (parse_fraction, "5%", 0.05),
    (parse_fraction, "5 %", 0.05),
    (parse_fraction, "0.05", 0.05),
    (parse_fraction, "29%", 0.29),
    (parse_fraction, "100%", 1.0),
    (parse_fraction, 0, 0.0),
    (parse_fraction, 1, 1.0),
    (parse_bytes, "64Ki", 65_536),
    (parse_bytes, "1.5Ki", 1536),
    (parse_bytes, "4Mi", 4 * 2**20),
    (parse_bytes, "1Gi", 2**30),
    (parse_bytes, "1M", 1_000_000),
    (parse_bytes, 4096, 4096),
    (parse_steps_or_fraction, 100, 100),
    (parse_steps_or_fraction, "2k", 2000),
    (parse_steps_or_fraction, "5%", 0.05),
    (parse_steps_or_fraction, 0.05, 0.05),
    (parse_steps_or_fraction, "0.05", 0.05),
    (parse_steps_or_fraction, "100%", 1.0),
    (parse_steps_or_fraction, 1, 1),
    (parse_steps_or_fraction, 0, 0),
    (parse_steps_or_fraction, 0.0, 0),
    (parse_steps_or_fraction, "0%", 0),
]


@pytest.mark.acceptance("8d-8c", "number-A-67")
@pytest.mark.parametrize(
    ("parse", "written", "meant"),
    READ,
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_a_human_readable_number_is_parsed_to_its_value(
    parse: Parser, written: Any, meant: int | float
) -> None:
    found = parse(written)
    assert found == meant
    assert type(found) is type(meant)


REFUSED: list[tuple[Parser, Any, str]] = [
    (parse_count, "", "'' is not a number"),
    (parse_count, "abc", "'abc' is not a number. Write a number, such as 20M"),
    (
        parse_count,
        "1,000",
        (
            "'1,000' is not a number; a number has no comma. Write 1000, or 1.000 if the comma is a "
            "decimal point"
        ),
    ),
    (
        parse_real,
        "0,003",
        "'0,003' is not a number; a number has no comma. Write 0.003",
    ),
    (parse_count, "10^6", "'10^6' is not a number; powers are not calculated. Write 1e6"),
    (parse_real, "10^-3", "'10^-3' is not a number; powers are not calculated. Write 1e-3"),
    (
        parse_count,
        "2**20",
        "'2**20' is not a number; powers are not calculated. Write 1048576",
    ),
    (parse_real, "2^-3", "powers are not calculated. Write its value"),
    (parse_count, "2^999", "'2^999' is not a number"),
    (parse_count, "0x10", "'0x10' is not a number"),
    (parse_count, "1__0", "'1__0' is not a number"),
    (parse_count, "_1", "'_1' is not a number"),
    (parse_count, "1_", "'1_' is not a number"),
    (parse_count, "1 0", "'1 0' is not a number"),
    (parse_count, "--1", "'--1' is not a number"),
    (parse_count, "٣", "is not a number"),
    (parse_count, "2.5", "'2.5' is not a whole number; this is a count. Write 2 or 3"),
    (parse_count, 2.5, "2.5 is not a whole number"),
    (parse_count, "1.0001k", "'1.0001k' is not a whole number"),
    (
        parse_count,
        "64Ki",
        (
            "'64Ki' has the unit Ki, which does not fit here; Ki (1024) is for sizes in bytes and "
            "this is not one. Write 65536"
        ),
    ),
    (
        parse_count,
        "5%",
        (
            "'5%' has the unit %, which does not fit here; this is not a share of something. Write a "
            "plain number"
        ),
    ),
    (
        parse_count,
        "20m",
        "'20m' has the unknown unit m. Did you mean 20M? Known units: k, K, M, G, B, T",
    ),
    (parse_count, "20MB", "Did you mean 20M?"),
    (
        parse_count,
        "20 tokens",
        "'20 tokens' has the unknown unit tokens. Known units: k, K, M, G, B, T",
    ),
    (
        parse_count,
        True,
        "true is not a number; YAML reads on, off, yes and no as true and false. Write a number",
    ),
    (parse_count, None, "is empty (null); a number is needed"),
    (parse_count, [1], "a list is not a number"),
    (parse_count, {"a": 1}, "a mapping is not a number"),
    (parse_count, math.nan, "nan is not a finite number"),
    (parse_count, math.inf, "inf is not a finite number"),
    (parse_count, "nan", "'nan' is not a finite number"),
    (parse_count, "-Infinity", "'-Infinity' is not a finite number"),
    (
        parse_count,
        2**63,
        "9223372036854775808 is too large; the largest number here is 9223372036854775807 (2^63 - 1)",
    ),
    (parse_count, "1e19", "'1e19' is too large"),
    (
        parse_count,
        "1e9999",
        "'1e9999' is too large; it cannot be represented. Check the exponent",
    ),
    (parse_count, "1e99999", "'1e99999' is not a number"),
    (parse_count, 10**400, "a number of more than"),
    (
        parse_real,
        "1e400",
        "'1e400' is too large; it cannot be represented as a 64-bit float",
    ),
    (parse_real, "1e-400", "'1e-400' is too small"),
    (parse_real, "1e-401", "'1e-401' is too small"),
    (parse_real, "64Ki", "has the unit Ki"),
    (parse_real, "fast", "Write a number, such as 0.1"),
    (
        parse_fraction,
        5,
        "5 is not a fraction; a fraction lies between 0 and 1 (0% and 100%). Write 5% if percent is meant",
    ),
    (parse_fraction, "101%", "'101%' is not a fraction"),
    (parse_fraction, "-1%", "'-1%' is not a fraction"),
    (parse_fraction, "1k", "'1k' has the unknown unit k. Known units: %"),
    (parse_bytes, "64KiB", "'64KiB' has the unknown unit KiB. Did you mean 64Ki?"),
    (parse_bytes, "4MB", "Did you mean 4M?"),
    (
        parse_bytes,
        "1024B",
        (
            "'1024B' has the unit B, which does not fit here; it could mean bytes or billions. Write "
            "1024 for bytes, or 1024G"
        ),
    ),
    (
        parse_bytes,
        "0.3Ki",
        "'0.3Ki' is not a whole number; this is a number of bytes. Write 307 or 308",
    ),
    (parse_bytes, "9999999Pi", "is too large"),
    (
        parse_steps_or_fraction,
        1.0,
        "1.0 is ambiguous; it could be one step or the whole horizon. Write 1 or 100%",
    ),
    (parse_steps_or_fraction, "1.0", "'1.0' is ambiguous"),
    (
        parse_steps_or_fraction,
        2.5,
        "2.5 is neither whole steps nor a fraction of the horizon. Write 2 for steps, or a share such as 5%",
    ),
    (parse_steps_or_fraction, "120%", "'120%' is not a fraction"),
    (parse_steps_or_fraction, -0.5, "-0.5 is not a whole number"),
]


@pytest.mark.acceptance(
    "8d-4h", "8d-8c", "number-A-67", "input-G-6", "input-A-67", "input-1e-12", "input-2e-2"
)
@pytest.mark.capability("A-67", "G-6")
@pytest.mark.parametrize(
    ("parse", "written", "said"),
    REFUSED,
    ids=lambda value: getattr(value, "__name__", repr(value)[:30]),
)
def test_an_invalid_number_is_refused_with_a_plain_message(
    parse: Parser, written: Any, said: str
) -> None:
    with pytest.raises(NumberError) as refused:
        parse(written)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "text",
    ["9" * 10**6, "1e" + "9" * 10**6, "1" + "_1" * 10**6, " " * 10**6, "a" * 10**6],
    ids=show,
)
@pytest.mark.parametrize(
    "parse", [parse_count, parse_real, parse_fraction, parse_bytes, parse_steps_or_fraction]
)
def test_a_number_text_of_a_million_digits_is_refused_at_once(
    parse: Parser, text: str
) -> None:
    with pytest.raises(NumberError, match="characters is not a number"):
        parse(text)


@given(
    st.integers(-(2**53), 2**53),
    st.integers(0, 6),
    st.sampled_from(["", "k", "M", "G", "T"]),
)
def test_decimal_fractions_of_units_are_exact(digits: int, shift: int, unit: str) -> None:
    text = f"{digits}e-{shift}{unit}"
    exact = (
        Ratio(digits, 10**shift)
        * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}[unit]
    )
    if exact.denominator == 1 and abs(exact) < 2**63:
        assert parse_count(text) == exact
    else:
        with pytest.raises(NumberError):
            parse_count(text)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_and_its_text_are_parsed_alike(value: float) -> None:
    assert parse_real(value) == value
    assert parse_real(repr(value)) == value


@given(
    st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.binary())
)
def test_any_value_is_parsed_as_a_number_or_refused(value: Any) -> None:
    for parse in (
        parse_count,
        parse_real,
        parse_fraction,
        parse_bytes,
        parse_steps_or_fraction,
    ):
        try:
            found = parse(value)
        except NumberError as error:
            assert error.what
        else:
            assert math.isfinite(found)


def test_a_fraction_of_one_keeps_its_meaning_on_the_wire() -> None:
    for annotation in (StepsOrFraction, SamplesOrShare):
        adapter: TypeAdapter[int | float] = TypeAdapter(annotation)
        for written, wire in (("100%", "100%"), (1, 1), ("5%", 0.05)):
            value = adapter.validate_python(written)
            assert adapter.dump_python(value, mode="json") == wire
            again = adapter.validate_python(wire)
            assert again == value and type(again) is type(value)


def _leaves(
    annotation: Any, metadata: tuple[Any, ...] = ()
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    if get_origin(annotation) is Annotated:
        yield from _leaves(annotation.__origin__, (*annotation.__metadata__, *metadata))
    elif any(isinstance(marker, Human) for marker in metadata):
        yield annotation, metadata
    elif get_args(annotation):
        for argument in get_args(annotation):
            yield from _leaves(argument)
    else:
        yield annotation, metadata


# Nodes, processes and seconds, as everywhere in Kubernetes, and numbers that never have a unit.
_PLAIN_NUMBERS = (
    "spec.nodes.min",
    "spec.nodes.max",
    "spec.workersPerNode",
    "spec.activeDeadlineSeconds",
    "spec.evaluation.keepWaiting",
    "spec.ttlSecondsAfterFinished",
    "spec.failurePolicy.maxFailuresWithoutProgress",
    "spec.script.gracePeriodSeconds",
    "spec.script.finishGracePeriodSeconds",
    "spec.script.metrics.lingerSeconds",
    "spec.training.metrics.lingerSeconds",
    "spec.training.runtime.collectiveTimeoutSeconds",
    "spec.training.onNonFinite.skip",
    "spec.training.skipSteps",
    "spec.training.runtime.compareReplicasEvery",
    "spec.training.checkpoint.every.seconds",
    "spec.training.checkpoint.keepEvery.seconds",
    "spec.training.initFrom.step",
)
_PLAIN_SECTIONS = ("spec.template.", "spec.training.latentEdit.")
"""Fields of Kubernetes, and small counts: of edits, tokens, layers and heads."""


def test_every_numeric_field_of_the_manifest_parses_human_readable_numbers() -> None:
    numeric = 0
    for field in walk_fields(TrainingRun):
        for annotation, metadata in _leaves(
            field.info.annotation, tuple(field.info.metadata)
        ):
            is_plain = (
                field.path.startswith(_PLAIN_SECTIONS) or field.path in _PLAIN_NUMBERS
            )
            if (annotation in (int, float) or int in get_args(annotation)) and not is_plain:
                assert any(isinstance(marker, Human) for marker in metadata), field.path
                numeric += 1
    assert numeric > 30


def ascii_show(value: Any) -> str:
    return ascii(show(value))


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, 10**5000, {"a": 1}, [1], "\x1b[31m\n", "\ud800", b"\xff", None, 1.5],
    ids=ascii_show,
)
def test_any_value_is_shown_on_one_short_printable_line(value: Any) -> None:
    shown = show(value)
    assert len(shown) < 120
    assert shown.isprintable()
    shown.encode()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("4", "'4' is not a plain integer; it takes no unit and no quotes. Write 4"),
        ("2k", "'2k' is not a plain integer; it takes no unit and no quotes. Write 2000"),
        (2.5, "2.5 is not a whole number"),
        (True, "true is not a number"),
        ("many", "'many' is not a number"),
    ],
)
def test_a_plain_integer_accepts_no_unit_and_no_quotes(value: Any, words: str) -> None:
    # As an API server stores 4.0 and 4e0.
    assert parse_whole(4) == 4 and json.dumps(parse_whole(4.0)) == "4"
    with pytest.raises(NumberError, match=re.escape(words)):
        parse_whole(value)


@pytest.mark.acceptance("number-A-67", "input-A-67")
def test_numbers_of_arctictraining_have_the_same_meaning_or_get_a_remedy() -> None:
    same = {"1_000_000": 10**6, "1e6": 10**6, "1.1e6": 1_100_000, "10e-1": 1}
    same |= {"1K": 1000, "1.1K": 1100, "-5": -5, "-1K": -1000}
    assert {text: parse_count(text) for text in same} == same
    refused = {
        "10^6": "Write 1e6",
        "1Ki": "Write 1024",
        "1m": "Did you mean 1M?",
        "1.5": "Write 1 or 2",
        "10%": "this is not a share of something",
        "1e-3": "Write 0 or 1",
        "1.00001K": "Write 1000 or 1001",
        **dict.fromkeys(("err", "1Ke3", "1^10e2", "1K^2", "1K^2e3"), "is not a number"),
    }
    for text, said in refused.items():
        with pytest.raises(NumberError, match=re.escape(said)):
            parse_count(text)
