"""Kubernetes quantities, names and labels."""

from fractions import Fraction
from typing import Any

import pytest

from evergrad_manifest.values.numbers import NumberError
from evergrad_manifest.values.quantities import (
    fault_of_key,
    fault_of_label_value,
    is_dns_label,
    is_dns_subdomain,
    parse_quantity,
    quantity_value,
)


@pytest.mark.parametrize(
    ("written", "text", "value"),
    [
        ("4Gi", "4Gi", 4 * 2**30),
        ("500m", "500m", Fraction(1, 2)),
        ("2", "2", 2),
        (2, "2", 2),
        (2.0, "2", Fraction(2)),
        ("1.5G", "1.5G", 1_500_000_000),
        ("1e3", "1e3", 1000),
        ("4E", "4E", 4 * 10**18),
        ("100k", "100k", 100_000),
        (".5", ".5", Fraction(1, 2)),
        ("0", "0", 0),
        ("1Ei", "1Ei", 2**60),
    ],
)
def test_a_quantity_is_kept_as_text_and_has_an_exact_value(
    written: Any, text: str, value: Fraction | int
) -> None:
    assert parse_quantity(written) == text
    assert quantity_value(text) == value


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("4GB", "Did you mean 4G?"),
        ("4gb", "Did you mean 4G?"),
        ("4 Gi", "Did you mean 4Gi?"),
        ("4GiB", "Did you mean 4Gi?"),
        ("4gi", "Did you mean 4Gi?"),
        ("500K", "Did you mean 500k?"),
        ("lots", "Write a number with a unit"),
        ("", "'' is not a Kubernetes quantity"),
        ("-1", "'-1' is negative"),
        (-1, "-1 is negative"),
        (True, "true is not a quantity"),
        (None, "null is not a quantity"),
        ([1], "a list is not a quantity"),
        ("9" * 10**6, "is not a Kubernetes quantity"),
        ("1e999", "is too large"),
        ("1e9999", "is not a Kubernetes quantity"),
        (10**4000, "is not a Kubernetes quantity"),
        (0.5, 'Put it in quotes: "0.5"'),
        (float("nan"), "is not a Kubernetes quantity"),
        (float("inf"), "is not a Kubernetes quantity"),
        ("4Gi\n", "is not a Kubernetes quantity"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_an_invalid_quantity_is_refused_with_the_likely_one(
    written: Any, said: str
) -> None:
    with pytest.raises(NumberError) as refused:
        parse_quantity(written)
    assert said in str(refused.value)


@pytest.mark.parametrize("key", ["team", "a.b/c", "example.com/A_b.c-d", "x" * 63, "a/1"])
def test_a_valid_key_has_no_fault(key: str) -> None:
    assert fault_of_key(key) is None


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/a",
        "a/",
        "a/b/c",
        "A.com/x",
        "-a",
        "a-",
        "a b",
        "x" * 64,
        "a\n",
        "x" * 254 + "/a",
    ],
)
def test_an_invalid_key_has_a_fault(key: str) -> None:
    assert fault_of_key(key) is not None


def test_a_label_value_may_be_empty_but_not_long_or_with_blanks() -> None:
    assert fault_of_label_value("") is None
    assert fault_of_label_value("A-1_b.c") is None
    assert fault_of_label_value("a b") == (
        "'a b' is not a valid label value",
        "letters, digits, '-', '_' and '.' are allowed, a letter or digit first and last",
    )
    assert fault_of_label_value("x" * 64) is not None
    assert fault_of_label_value("a\n") is not None


def test_names_follow_the_dns_rules() -> None:
    assert (
        is_dns_label("a-1")
        and not is_dns_label("A")
        and not is_dns_label("a.b")
        and not is_dns_label("a\n")
    )
    assert (
        is_dns_subdomain("a.b-c")
        and not is_dns_subdomain("a..b")
        and not is_dns_subdomain("a_b")
    )
    assert not is_dns_label("") and not is_dns_subdomain("") and not is_dns_label("x" * 64)
