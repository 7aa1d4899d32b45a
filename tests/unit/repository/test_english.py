"""The English of the pages: sentences begin with their subject, as those of a manual do."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

GENERATED = {
    "docs/acceptance.md",
    "docs/capabilities.md",
    "docs/reference/configuration.md",
}
"""Pages that are made of texts in code and tables."""
SENTENCE = re.compile(
    r"(?:^(?:[-*] |\d+\. )?|(?<=[.!?])[)*]{0,3} +)(?P<sentence>[*]{0,2}(?:Of|So|What|Whoever)\b[^.!?]*[.!?]?)"
)


def find_openings(text: str) -> Iterator[tuple[int, str]]:
    """Find sentences that open with Of, So, What or Whoever, with their line.

    Headings, code, generated tables, heads of tables and questions are no sentences here.
    """
    # What is left out keeps its lines, so that those after it are numbered rightly.
    left_out = r"^(```|~~~).*?^\1|^<!-- table: .*?^<!-- end -->"
    bare = re.sub(
        left_out, lambda found: "\n" * found[0].count("\n"), text, flags=re.M | re.S
    )
    begin, paragraph = 1, ""
    for number, line in enumerate([*bare.split("\n"), ""], start=1):
        is_item = re.match(r"\s*([-*] |\d+\. |\|)", line) is not None
        if not line.strip() or line.startswith(("#", "    ")) or is_item:
            for found in SENTENCE.finditer(paragraph):
                if not found["sentence"].endswith("?"):
                    yield begin, found["sentence"]
            paragraph = ""
        if line.strip() and not line.startswith(("#", "    ")):
            begin = begin if paragraph else number
            paragraph = f"{paragraph} {line.strip()}".strip()


@pytest.mark.parametrize(
    ("text", "num_found"),
    [
        ("It is read.\nSo is the rest.", 1),
        ("It is read. Of these two\nare left.", 1),
        ("- **What fails is said.** More.", 1),
        ("| a | It ends. Whoever asks is told |", 1),
        ("## What it means\n\nIt means much.", 0),
        ("| What it is | When |", 0),
        ("**What do I gain?** Much.", 0),
        ("```\nSo it is.\n```\n\nIt is.", 0),
        ("It says what is left, so that all is well. Softly.", 0),
    ],
)
def test_openings_are_found_in_sentences_and_nowhere_else(
    text: str, num_found: int
) -> None:
    assert len(list(find_openings(text))) == num_found


def test_no_sentence_of_a_page_opens_with_of_so_what_or_whoever(
    texts: dict[Path, str], root: Path
) -> None:
    found = []
    for file, text in texts.items():
        name = file.relative_to(root).as_posix()
        is_page = name in ("README.md", "CONTRIBUTING.md") or re.fullmatch(
            r"docs/([^/]+/)?[^/]+\.md|examples/(.+/)?README\.md", name
        )
        if is_page and name not in GENERATED:
            found += [
                f"{name}:{line}: {sentence}" for line, sentence in find_openings(text)
            ]
    assert found == []
