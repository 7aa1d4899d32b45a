"""2,000 mutated manifests: each is accepted or refused with exit 64 and a path, and none ends in
a traceback."""

import argparse
import contextlib
import io
import json
import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evergrad_cli.local import validate
from evergrad_manifest.identity import config_hash, from_wire, to_wire
from evergrad_manifest.reading.loader import load_manifest

BASE = Path(__file__).parent / "base_manifest.yaml"
TEXT = BASE.read_bytes()
TREE = yaml.safe_load(TEXT)
SCRIPT_TREE = yaml.safe_load((BASE.parent / "script_manifest.yaml").read_bytes())

DEEP: Any = 1
for _ in range(70):
    DEEP = [DEEP]

ODD_VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        3,
        7,
        10**30,
        2**63,
        -(2**63),
        0.5,
        1.0,
        -0.0,
        1e308,
        1e-320,
        2.5,
    ),
    *(
        "",
        " ",
        "x",
        "on",
        "off",
        "null",
        "~",
        "20M",
        "5%",
        "64Ki",
        "1e400",
        "1e-3",
        "-5",
        "nan",
        ".inf",
        "0x10",
        "010",
        "1_0",
        "1,5",
    ),
    *(
        "heldOut",
        "docs",
        "wsd",
        "cosine",
        "tokens",
        "transformers",
        "exact",
        "fsdp2",
        "a/b",
        "../x",
        "~/x",
        "https://x/y",
        "\u2028",
        "ü",
    ),
    *(
        "a\nb",
        "\t",
        "\x7f",
        "x" * 100,
        "x" * 5000,
        "9" * 5000,
        "'\"`",
        "{{x}}",
        "%s%n",
        "$(id)",
        "heldOut/loss",
        "4Gi",
        "4GB",
        "400m",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [1, 2],
        ["a", "a"],
        {"a": None},
        {"steps": 1},
        {"": 1},
        {"a.b": {"c": [1]}},
        [{"name": "x"}],
        {"type": "wsd"},
        DEEP,
    ),
    *(
        ["train.py", "torchrun"],
        ["-m"],
        [{"name": "a", "path": "p"}] * 3,
        {"name": "A", "value": 1},
        {"model_type": "llama", "auto_map": {}},
        {"cpu": "1", "x/y": "0.5"},
    ),
]
ODD_KEYS = [
    *(
        "",
        " ",
        "steps",
        "epochs",
        "name",
        "path",
        "type",
        "config",
        "count",
        "learningRate",
        "learning_rate",
        "LearningRate",
    ),
    *(
        "a.b",
        "a b",
        "x" * 300,
        "on",
        "1",
        "<<",
        "~",
        "ü",
        "\u202e",
        "\x1b[31m",
        "__class__",
        "model_config",
        "heldOut",
        "weight",
        "decay",
    ),
]
SNIPPETS = [
    *(
        b"\t",
        b"\x00",
        b"\xff\xfe",
        b"\xc3",
        b"\xed\xa0\x80",
        b":",
        b": ",
        b"- ",
        b"{",
        b"}",
        b"[",
        b"]",
        b"&a ",
        b"*a ",
        b"*b",
        b"<<: *a\n",
    ),
    *(
        b"!!python/object:x ",
        b"!!int ",
        b"!x ",
        b"---\n",
        b"...\n",
        b"%YAML 1.2\n",
        b"|",
        b">",
        b"'",
        b'"',
        b"#",
        b"\n",
        b"\r",
        b" ",
        b"  ",
    ),
    *(
        b"? ",
        b"@",
        b"`",
        b"\\ud800",
        b"\xe2\x80\xa8",
        b"\xef\xbb\xbf",
        b".nan",
        b"1e999",
        b"0777",
        b"null",
        b"\n" * 50,
        b"[" * 500,
        b"9" * 500,
    ),
]


def places_in(tree: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a tree."""
    found: list[tuple[Any, Any]] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        keys = (
            list(node)
            if isinstance(node, dict)
            else range(len(node))
            if isinstance(node, list)
            else ()
        )
        found += [(node, key) for key in keys]
        pending += [node[key] for key in keys]
    return found


def delete_key(tree: Any, chance: random.Random) -> None:
    container, key = chance.choice(places_in(tree))
    del container[key]


def replace_value(tree: Any, chance: random.Random) -> None:
    container, key = chance.choice(places_in(tree))
    container[key] = deepcopy(chance.choice(ODD_VALUES))


def rename_key(tree: Any, chance: random.Random) -> None:
    container, key = chance.choice(
        [(c, k) for c, k in places_in(tree) if isinstance(c, dict)]
    )
    new = chance.choice([*ODD_KEYS, key[:-1], key.upper(), key + "x", key[::-1]])
    container[new] = container.pop(key)


def add_key(tree: Any, chance: random.Random) -> None:
    mappings = [tree, *(c[k] for c, k in places_in(tree) if isinstance(c[k], dict))]
    chance.choice(mappings)[chance.choice(ODD_KEYS)] = deepcopy(chance.choice(ODD_VALUES))


def duplicate_item(tree: Any, chance: random.Random) -> None:
    lists = [c[k] for c, k in places_in(tree) if isinstance(c[k], list) and c[k]]
    if lists:
        chosen = chance.choice(lists)
        chosen.append(deepcopy(chosen[0]))


def move_value(tree: Any, chance: random.Random) -> None:
    (source, source_key), (target, target_key) = (
        chance.choice(places_in(tree)),
        chance.choice(places_in(tree)),
    )
    target[target_key] = deepcopy(source[source_key])


TREE_MUTATIONS: list[Callable[[Any, random.Random], None]] = [
    *(delete_key, rename_key, add_key, duplicate_item, move_value),
    *(replace_value, replace_value, replace_value),
]


def mutated_tree(chance: random.Random) -> bytes:
    tree = deepcopy(chance.choice((TREE, TREE, SCRIPT_TREE)))
    for _ in range(chance.choice((0, 1, 1, 1, 1, 1, 2, 5, 20))):
        if (
            0 < len(places_in(tree)) < 2000
        ):  # Parts that are moved into each other double in size.
            chance.choice(TREE_MUTATIONS)(tree, chance)
    return json.dumps(tree, ensure_ascii=chance.random() < 0.5).encode()


def mutated_text(chance: random.Random) -> bytes:
    text = TEXT
    for _ in range(chance.choice((1, 1, 2, 4))):
        lines = text.splitlines(keepends=True) or [b"\n"]
        at = chance.randrange(len(text) + 1)
        number = chance.randrange(len(lines))
        changes = (
            text[:at] + chance.choice(SNIPPETS) + text[at:],
            text[:at] + text[at + chance.randrange(1, 6) :],
            text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :],
            text[:at],
            b"".join([*lines[:number], lines[number], lines[number], *lines[number + 1 :]]),
            b"".join([*lines[:number], *lines[number + 1 :]]),
            b"".join(
                [
                    *lines[:number],
                    chance.choice((b" ", b"  ", b"    ", b"\t")) + lines[number],
                    *lines[number + 1 :],
                ]
            ),
            b"".join([*lines[:number], lines[number].lstrip(), *lines[number + 1 :]]),
        )
        text = chance.choice(changes)
    return text


def mutated_overrides(chance: random.Random) -> list[str]:
    parts = [
        "spec",
        "training",
        "data",
        "sources",
        "0",
        "[1]",
        "[99]",
        "path",
        "optimizer",
        "horizon",
        "steps",
        "a b",
        '["x.y"]',
        "",
        "=",
    ]
    words = [
        ".".join(chance.choice(parts) for _ in range(chance.randrange(1, 6)))
        for _ in range(chance.randrange(1, 3))
    ]
    values = [
        "1",
        "x",
        "",
        "null",
        "[1",
        "{a: 1}",
        "{a: 1, a: 2}",
        "20M",
        "a: b",
        ".nan",
        "\x00",
        "*a",
        "'x'",
        "on",
    ]
    return [
        f"{word}{chance.choice(('=', '=', '=', ''))}{chance.choice(values)}"
        for word in words
    ]


def run_validate(
    path: Path, overrides: list[str], *, as_json: bool
) -> tuple[int, str, str]:
    parser = argparse.ArgumentParser()
    validate.add_arguments(parser)
    arguments = [
        str(path),
        *(f"--set={override}" for override in overrides),
        *(["--json"] if as_json else []),
    ]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = validate.execute(parser.parse_args(arguments))
    return code, out.getvalue(), err.getvalue()


def check(path: Path, overrides: list[str]) -> int:
    """Run the command on one mutant; returns its exit code."""
    code, out, err = run_validate(path, overrides, as_json=True)
    document = json.loads(out)
    assert err == ""
    assert code == (0 if document["valid"] else 64)
    assert bool(document["problems"]) is (code == 64)
    for problem in document["problems"]:
        assert problem["path"].strip() and problem["what"].strip()
        assert problem["message"].isprintable(), problem["message"]
        assert len(problem["message"]) < 1500
    if code == 0:
        run = load_manifest(path, overrides=overrides).run
        assert from_wire(document["resolved"]) == run
        assert (
            to_wire(run) == document["resolved"]
            and config_hash(run) == document["configHash"]
        )
    return code


@pytest.mark.capability("A-68")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("examples", [400, pytest.param(2000, marks=pytest.mark.long)])
def test_mutated_manifests_are_accepted_or_refused_with_a_path_and_no_traceback(
    tmp_path: Path, examples: int
) -> None:
    counts = {0: 0, 64: 0}
    path = tmp_path / "mutant.yaml"
    (tmp_path / "train.py").touch()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**64 - 1))
    def judge(seed: int) -> None:
        chance = random.Random(seed)
        path.write_bytes(
            mutated_text(chance) if chance.random() < 0.4 else mutated_tree(chance)
        )
        counts[check(path, mutated_overrides(chance) if chance.random() < 0.1 else [])] += 1

    judge()
    assert sum(counts.values()) >= examples
    assert counts[0] >= examples / 20 and counts[64] >= examples / 2


@pytest.mark.acceptance("input-A-68")
@pytest.mark.parametrize(
    "mutation", TREE_MUTATIONS[:6], ids=lambda mutation: mutation.__name__
)
def test_the_printed_form_of_a_refused_mutant_is_error_lines(
    mutation: Callable[[Any, random.Random], None], tmp_path: Path
) -> None:
    chance = random.Random(7)
    path = tmp_path / "mutant.yaml"
    refused = 0
    for _ in range(20):
        tree = deepcopy(TREE)
        mutation(tree, chance)
        path.write_text(json.dumps(tree))
        code, out, err = run_validate(path, [], as_json=False)
        assert "Traceback" not in out + err
        assert (code == 0) == out.startswith("valid: ")
        assert (code == 64) == bool(err)
        assert all(line.startswith("error: ") for line in err.splitlines())
        refused += code == 64
    assert refused
