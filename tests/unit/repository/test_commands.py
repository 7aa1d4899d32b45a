"""A test runs every command on a page, or commands.csv in this folder gives the reason why none does. The
command line, the Makefile and the tree contain every command."""

import ast
import csv
import re
import shlex
from collections.abc import Iterator

import pytest
from pages import BLOCK, ROOT

from evergrad_cli.main import build_whole_parser

TABLE = ROOT / "tests/unit/repository/commands.csv"
_PAGES = ("*.md", "docs/**/*.md", "examples/*/README.md", "tools/benchmarks/*.md")
_VARIABLE = re.compile(r"^[A-Z_]+=\S* ")


def find_blocks() -> Iterator[tuple[str, str]]:
    """Each page's blocks of commands."""
    for page in sorted({page for pattern in _PAGES for page in ROOT.glob(pattern)}):
        for block in BLOCK.findall(page.read_text("utf-8")):
            yield page.relative_to(ROOT).as_posix(), block


def split_commands(block: str) -> list[str]:
    """The commands of a block, without comments, variables before them and what follows a pipe."""
    lines = block.replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        for command in re.split(r"&&|\|\||;|\||&$", re.split(r"\s#", line)[0]):
            command = command.strip()
            while _VARIABLE.match(command):
                command = _VARIABLE.sub("", command)
            found += [command] if command else []
    return found


BLOCKS = list(find_blocks())
COMMANDS = sorted({command for _, block in BLOCKS for command in split_commands(block)})
ROWS = list(csv.DictReader(TABLE.read_text("utf-8").splitlines()))


def first_command(block: str) -> str:
    return re.split(r"\s+#|\s+\\", block.splitlines()[0])[0].strip()


def test_the_table_lists_every_block_of_commands_exactly_once() -> None:
    shown = [(page, first_command(block)) for page, block in BLOCKS]
    listed = [(row["page"], row["command"]) for row in ROWS]
    assert len(set(listed)) == len(listed)
    assert sorted(set(shown) - set(listed)) == [], (
        "add these to tests/unit/repository/commands.csv"
    )
    assert sorted(set(listed) - set(shown)) == [], "no page shows these any more"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['page']}: {row['command']}")
def test_each_block_names_a_test_that_executes_it_or_a_reason(
    row: dict[str, str],
) -> None:
    assert row["test"] or len(row["why"]) > 20
    if not row["test"]:
        return
    path, _, name = row["test"].partition("::")
    text = (ROOT / path).read_text("utf-8")
    tests = {
        node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
    }
    assert name in tests
    # A test reads the commands from the page, so that it runs exactly the shown commands.
    folder = (
        row["page"].split("/")[-2] if row["page"].startswith("examples/") else row["page"]
    )
    assert folder in text


@pytest.mark.parametrize(
    "command", [one for one in COMMANDS if one.startswith(("evergrad ", "make "))]
)
def test_each_evergrad_command_exists(command: str) -> None:
    words = [word for word in shlex.split(command) if not word.startswith((">", "2>"))]
    if words[0] == "evergrad":
        # A run of the reader's, as pages of an alert name it.
        named = ["docs-lm" if word == "RUN" else word for word in words[1:]]
        build_whole_parser().parse_args(named)
        return
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = [word for word in words[1:] if "=" not in word]
    assert targets and [one for one in targets if f"\n{one}: " not in makefile] == []


@pytest.mark.parametrize("page", sorted({page for page, _ in BLOCKS}))
def test_repository_files_that_a_command_names_exist(page: str) -> None:
    words = [
        word.split("[")[0].rstrip("/")
        for shown, block in BLOCKS
        if shown == page
        for command in split_commands(block)
        for word in shlex.split(command)
    ]
    ours = [
        word.removeprefix("./")
        for word in words
        if re.match(
            r"(\./)?(examples|charts|trainer_image|latent_edit|common|coordinator|docs|tests)(/|$)",
            word,
        )
    ]
    made = ("examples/latent-edit/corpus",)
    assert [
        word for word in ours if not word.startswith(made) and not (ROOT / word).exists()
    ] == []
