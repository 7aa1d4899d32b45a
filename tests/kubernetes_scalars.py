"""Plain YAML scalars and the values that Kubernetes' YAML reader returns for them.

To write the table again, run `PYTHONPATH=tests .venv/bin/python -m kubernetes_scalars`. It needs Go.
"""

import itertools
import json
from pathlib import Path
from typing import Any, Final

from bed import toolbox

TABLE: Final = Path(__file__).parent / "unit/manifest/kubernetes_scalars.json"
"""A list of `text`, the document, with `value` (the JSON that an API server stores) or `error`."""

_WORDS: Final = [
    "y",
    "n",
    "yes",
    "no",
    "true",
    "false",
    "on",
    "off",
    "null",
    "nan",
    "inf",
    ".nan",
    ".inf",
    "+.inf",
    "-.inf",
    "+.nan",
    "infinity",
]
_OTHERS: Final = (
    *(
        "~",
        "<<",
        "''",
        '"5"',
        "'no'",
        '"1e3"',
        "!!str 5",
        "!!str no",
        "!!int 0o17",
        "!!float 3",
    ),
    *(
        "!!bool yes",
        "!!null ''",
        "12:30",
        "1:30:45",
        "190:20:30.15",
        "2026-01-01",
        "2026-1-1 10:00:00",
    ),
    *(
        "2001-12-14t21:59:43.10-05:00",
        "1.2.3",
        "1e",
        "e5",
        "1e+",
        "+-5",
        "--5",
        "+",
        "5%",
        "20M",
        "64Ki",
    ),
    *(
        "0x",
        "0b",
        "0o",
        "0x_",
        "0xg",
        "0b2",
        "0o8",
        "0x1.8p3",
        "0x1p-2",
        "1,000",
        "1 000",
        "01e3",
        "08.5",
    ),
    *(
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775808",
        "-9223372036854775809",
    ),
    *(
        "18446744073709551615",
        "18446744073709551616",
        "+9223372036854775808",
        "0xffffffffffffffff",
    ),
    *(
        "0x10000000000000000",
        "12345678901234567890123",
        "1152921504606846976.0",
        "1e20",
        "1e21",
        "1e22",
    ),
    *(
        "123456789012345678.9",
        "9007199254740993",
        "9007199254740993.0",
        "5e-324",
        "1.7976931348623157e308",
    ),
    *(
        "1e400",
        "-1e400",
        "1e-400",
        ".1e400",
        "0e400",
        "0.0e-999",
        "-0",
        "-0.0",
        "+0",
        ".0",
        "0.",
        ".",
    ),
    *(
        "._1",
        ".1_",
        ".1__0",
        ".1_0",
        ".1e1_0",
        "-.1_0",
        "1_.5",
        "1._5",
        "1_000.5",
        "_1",
        "1_e3",
        "1e1_0",
    ),
)
_DIGITS: Final = (
    "0",
    "1",
    "7",
    "10",
    "777",
    "08",
    "010",
    "0777",
    "1_000",
    "1_",
    "1__0",
    "0_10",
    "1e3",
    "1E3",
)
_MORE_DIGITS: Final = (
    "1e-3",
    "1.5",
    "1.",
    ".5",
    "1.5e3",
    "1.e3",
    "10000.0",
    "1e6",
    "3.0",
    "100000000000000000000",
)
_PREFIXED: Final = (
    "0x1F",
    "0X1F",
    "0xff",
    "0b11",
    "0B11",
    "0o17",
    "0O17",
    "0o1_0",
    "0x_1F",
    "0b1_1",
)


def scalars() -> list[str]:
    """Return each scalar once."""
    words = [
        form
        for word in _WORDS
        for form in (word, word.upper(), word.capitalize(), word[:1] + word[1:].upper())
    ]
    numbers = [
        sign + digits
        for sign, digits in itertools.product(
            ("", "+", "-"), (*_DIGITS, *_MORE_DIGITS, *_PREFIXED)
        )
    ]
    return list(dict.fromkeys([*words, *numbers, *_OTHERS]))


def ask_kubernetes() -> list[dict[str, Any]]:
    """Return the value that Kubernetes' reader returns for each scalar as the value of a key."""
    found: list[dict[str, Any]] = toolbox.ask(
        "kubeyaml", [f"a: {text}\n" for text in scalars()]
    )
    return found


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in ask_kubernetes())
    TABLE.write_text(f"[\n{lines}\n]\n")
