"""Sequences of bases are in no log and no message of a worker's end."""

import logging
from pathlib import Path

import pytest

from evergrad_common.contract import ExitCode
from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.base.redact_sequences import hide_bases
from evergrad_trainer.observers.logs import setup_logging
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.worker.error_reports import build_last_words, report_failure

pytestmark = pytest.mark.capability("G-99")
SEQUENCE = "ACGTN" * 8


def raise_with_sequence() -> Exception:
    """An error as a library raises it, which quotes what it was given."""
    try:
        raise ValueError(f"cannot encode {SEQUENCE!r}")
    except ValueError as error:
        return error


@pytest.mark.acceptance("8d-15e:latent_edit")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"at {SEQUENCE.lower()}.", "at [40 bases]."),
        (f"{'AC' * 10} and {'AC' * 9}C", f"[20 bases] and {'AC' * 9}C"),
        ("A" * 40, "A" * 40),
        (
            "placed/train.jsonl:1, population 5 A>C",
            "placed/train.jsonl:1, population 5 A>C",
        ),
        ("0123456789abcdefacacacac", "0123456789abcdefacacacac"),
    ],
)
def test_sequences_of_twenty_bases_or_more_are_shown_by_their_length(
    text: str, shown: str
) -> None:
    assert hide_bases(text) == shown


@pytest.mark.acceptance("8d-15e:latent_edit")
def test_a_log_contains_no_sequence_not_even_in_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = setup_logging(RunDirectory(tmp_path), rank=0)
    log = logging.getLogger("evergrad_trainer.training.loop")
    log.warning("odd: %s", SEQUENCE)
    log.info("failed", exc_info=raise_with_sequence())
    logs.close()
    text = (tmp_path / "logs/node-0-rank-0.log").read_text("utf-8")
    assert "odd: [40 bases]" in text and "ValueError: cannot encode '[40 bases]'" in text
    assert SEQUENCE not in text
    assert capsys.readouterr().err == "warning: odd: [40 bases]\n"


@pytest.mark.parametrize("is_input", [False, True])
def test_the_last_output_of_a_worker_contains_no_sequence(
    is_input: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    error = raise_with_sequence()
    if is_input:
        error = DataError(Problem("a row", f"is {SEQUENCE}", "", "Correct it"))
    report_failure(None, error, rank=0)
    said = capsys.readouterr().err
    assert "[40 bases]" in said and SEQUENCE not in said
    words = build_last_words(None, error, ExitCode.INTERNAL, generation=1, is_agreed=False)
    assert "[40 bases]" in words.text and SEQUENCE not in words.text
