"""The position in another run: where it is found, and why it may not be valid in this run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import InputError
from evergrad_manifest.identity import from_wire
from evergrad_trainer.base.errors import CheckpointError, RunDirectoryError
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.checkpoint.search import Choice
from evergrad_trainer.data.preparation.row_format import identify_texts
from evergrad_trainer.data.prepared import Prepared, PreparedSource, TokenSequence
from evergrad_trainer.data.start_positions import (
    DATA_START,
    DataStart,
    SourcePosition,
    place_sources,
)
from evergrad_trainer.data.tokenizers import ByteTokenizer
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.resume import resolved_record
from evergrad_trainer.worker import resume_position
from evergrad_trainer.worker.resume_position import (
    OtherRun,
    check_content,
    find_fingerprints,
    find_other,
)

START = DataStart((SourcePosition("a", "A", 0), SourcePosition("b", "B", 1)))


def prepared_of(
    *sources: tuple[str, str], tokenizer: str = "byte", template: str = ""
) -> Prepared:
    """Prepared sources by name and content."""
    return Prepared(
        tuple(
            PreparedSource(name, Path(name), content, content, TokenSequence("uint16", ()))
            for name, content in sources
        ),
        evaluation=(),
        tokenizer_identity=tokenizer,
        vocab_size=257,
        end_of_document=256,
        row_texts={"chat template": template} if template else {},
    )


def make_run(load: str | None = "position", **training: Any) -> TrainingRun:
    values: dict[str, Any] = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"sources": [{"name": "b", "path": "b.jsonl"}], "sequenceLength": 64},
        "batching": {"globalBatchSize": 8, "microBatchSize": 2},
        "optimizer": {"learningRate": 1e-3},
        "horizon": {"steps": 100},
    }
    if load is not None:
        values["initFrom"] = {"path": "theirs", "load": load}
    return from_wire(
        {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "next"},
            "spec": {"training": values | training},
        }
    )


class Other:
    """A run in ``theirs`` that was saved after its sixth step."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.directory = RunDirectory(path / "theirs")
        self.directory.create()
        checkpoint = self.directory.path / "checkpoints" / "step-6"
        self.choice = Choice(
            "step-6",
            step=6,
            data_fingerprint="f",
            extra={"step": 6, "cursor": {"a": 18, "b": 7}},
        )
        monkeypatch.setattr(
            resume_position, "look_at", lambda path, step: (checkpoint, self.choice)
        )
        self.write()

    def write(self, run: TrainingRun | None = None, **fields: Any) -> None:
        record = resolved_record(
            run or make_run(None),
            prepared_of(("a", "A"), ("b", "B")),
            identity=Identity("theirs", "recipe", "f"),
            base_directory=".",
            derived={},
            model={},
        )
        record[DATA_START] = START.to_json()
        record |= fields
        self.directory.write_resolved(
            {key: value for key, value in record.items() if value is not None}
        )

    def find(self, run: TrainingRun) -> OtherRun | None:
        return find_other(run, self.path)

    def refusal(self, run: TrainingRun, error: type[InputError] = CheckpointError) -> str:
        with pytest.raises(error) as raised:
            self.find(run)
        return str(raised.value)


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Other:
    return Other(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("load", "found"),
    [
        ("position", {"A", "B"}),
        ("everything", {"A", "B"}),
        ("weights", set()),
        (None, set()),
    ],
)
def test_the_data_of_the_continued_run_is_found(
    other: Other, load: str | None, found: set[str]
) -> None:
    assert find_fingerprints(make_run(load).training, other.path) == found
    other.directory.resolved.unlink()
    assert find_fingerprints(make_run(load).training, other.path) == frozenset()


def test_data_of_a_run_with_another_template_cannot_be_continued(other: Other) -> None:
    ByteTokenizer().save_pretrained(other.path / "tokenizer")
    template = other.path / "tokenizer" / "chat_template.jinja"
    template.write_text("{{ messages }}")
    run = make_run(
        "everything",
        recipe="sft",
        rows={},
        tokenizer={"type": "transformers", "path": "tokenizer"},
    )
    texts = identify_texts(run.training, other.path)
    prepared = replace(prepared_of(("a", "A")), row_texts=texts)
    other.write(prepared=prepared.to_json())
    assert find_fingerprints(run.training, other.path) == {"A"}
    template.write_text("Talk: {{ messages }}")
    assert find_fingerprints(run.training, other.path) == frozenset()


def test_a_position_is_the_place_of_each_source_at_the_step_of_the_checkpoint(
    other: Other,
) -> None:
    found = other.find(make_run())
    assert found is not None
    assert found.start == DataStart(
        (SourcePosition("a", "A", 0, 18, "A"), SourcePosition("b", "B", 1, 7, "B")),
        6,
        data_before="f",
    )


@pytest.mark.parametrize("load", [None, "weights", "optimizer", "everything"])
def test_other_load_levels_have_no_position(other: Other, load: str | None) -> None:
    assert other.find(make_run(load)) is None


def test_a_resume_in_another_directory_starts_at_the_start_of_that_run(
    other: Other,
) -> None:
    began = START.go_on(2, cursor={"a": 6, "b": 2}, data_fingerprint="earlier")
    other.write(dataStart=began.to_json())
    found = other.find(make_run("everything"))
    assert found is not None and found.start == began
    # Its data are compared as a whole.
    check_content(found, found.start, prepared_of(("x", "X"), tokenizer="other"))
    # A position is the step after its checkpoint's step.
    found = other.find(make_run())
    assert found is not None and (found.start.after_step, found.start.data_before) == (
        6,
        "f",
    )


def test_a_resume_through_a_link_to_a_checkpoint_starts_at_the_start_of_its_run(
    other: Other,
) -> None:
    began = START.go_on(2, cursor={"a": 6, "b": 2}, data_fingerprint="earlier")
    other.write(dataStart=began.to_json())
    checkpoint = other.directory.checkpoints / "step-6"
    checkpoint.mkdir()
    # Two folders above the link, there is no run.
    link = other.path / "links" / "newest"
    link.parent.mkdir()
    link.symlink_to(checkpoint)
    found = other.find(
        make_run(None, initFrom={"path": "links/newest", "load": "everything"})
    )
    assert found is not None and found.start == began


def test_a_position_requires_the_record_of_its_run(other: Other) -> None:
    other.write(dataFingerprint="another")
    assert "does not lie in the directory of its run" in other.refusal(make_run())
    other.directory.resolved.unlink()
    assert "spec.training.initFrom.path" in other.refusal(make_run())


@pytest.mark.parametrize("key", ["dataStart", "prepared", "manifest"])
def test_a_damaged_key_of_the_record_of_the_other_run_is_reported(
    other: Other, key: str
) -> None:
    other.write(**{key: [1]})
    said = other.refusal(make_run(), RunDirectoryError)
    assert said.startswith(f"{other.directory.resolved}: {key} is [1]; ")
    assert "Restore it from a backup." in said


def test_a_run_of_several_stages_or_of_an_older_version_has_no_position(
    other: Other,
) -> None:
    other.write(dataStart=None)
    assert "has not recorded where its sources begin" in other.refusal(make_run())


def test_a_checkpoint_with_other_sources_than_the_record_is_refused(other: Other) -> None:
    other.choice = replace(other.choice, extra={"step": 6, "cursor": {"x": 7}})
    assert "step-6 is not at a position in the sources of its run" in other.refusal(
        make_run()
    )


def test_fields_that_determine_items_and_order_are_named_and_others_may_differ(
    other: Other,
) -> None:
    data = {"sources": [{"name": "b", "path": "b.jsonl"}], "sequenceLength": 32}
    said = other.refusal(
        make_run(
            data=data,
            reproducibility={"seed": 4},
            batching={"globalBatchSize": 4, "microBatchSize": 2},
        )
    )
    for field in (
        "data.sequenceLength: 32 here, and 64 in",
        "batching.globalBatchSize: 4 here, and 8 in",
        "reproducibility.seed: 4 here, and 0 in",
    ):
        assert f"spec.training.{field}" in said
    assert "sources" not in said
    # The seed of the data is the same; the other two seeds have no effect on the data.
    assert other.find(
        make_run(
            reproducibility={"seed": 4, "dataSeed": 0, "elastic": "exact"},
            optimizer={"learningRate": 2e-3},
            horizon={"steps": 500},
        )
    )


def test_weights_and_mixing_of_sources_may_differ(other: Other) -> None:
    sources = [
        {"name": "b", "path": "elsewhere.jsonl", "weight": 9},
        {"name": "c", "path": "c.jsonl"},
    ]
    data = {"sources": sources, "sequenceLength": 64, "mixing": "passes"}
    assert other.find(make_run(data=data)) is not None


def test_another_tokenizer_changes_the_samples_of_every_source(other: Other) -> None:
    found = other.find(make_run())
    assert found is not None
    with pytest.raises(CheckpointError, match="its content is other, and byte in"):
        check_content(found, found.start, prepared_of(("b", "B"), tokenizer="other"))


def test_another_recorded_chat_template_changes_the_samples(
    other: Other,
) -> None:
    found = other.find(make_run())
    assert found is not None and found.prepared is not None
    before = replace(found, prepared=prepared_of(("b", "B"), template="1"))
    said = "spec.training.tokenizer: its chat template changed since .* Restore its files"
    with pytest.raises(CheckpointError, match=said):
        check_content(before, found.start, prepared_of(("b", "B"), template="2"))
    check_content(before, found.start, prepared_of(("b", "B"), template="1"))
    check_content(found, found.start, prepared_of(("b", "B"), template="2"))


def test_content_of_an_omitted_source_is_refused_if_it_is_split_differently(
    other: Other,
) -> None:
    began = DataStart(
        (SourcePosition("a", "A", 0, 3),),
        2,
        (SourcePosition("y", "Y of all", 1, 7, "Y"),),
        data_before="first",
    )
    other.write(dataStart=began.to_json())
    other.choice = replace(other.choice, extra={"step": 6, "cursor": {"a": 18}})
    found = other.find(make_run())
    assert found is not None and found.start.left_out == began.left_out
    prepared = prepared_of(("a", "A"), ("why", "Y"))
    placed = place_sources(found.start, [("a", "A"), ("why", "Y of all")])
    assert check_content(found, placed, prepared) == () and placed.sources[1].taken == 7
    placed = place_sources(found.start, [("a", "A"), ("why", "Y of 5")])
    with pytest.raises(CheckpointError) as error:
        check_content(found, placed, prepared)
    assert "spec.training.data.sources[1]: why is y of a run before" in str(error.value)


def test_new_sources_that_may_be_renamed_earlier_ones_are_named(
    other: Other,
) -> None:
    found = other.find(make_run())
    assert found is not None
    # C is new. A has the name of another one, as a file does to which documents were added.
    mixture = [("c", "C"), ("a", "A and more"), ("b", "B")]
    placed = place_sources(found.start, mixture)
    (said,) = check_content(found, placed, prepared_of(*mixture))
    assert said.startswith("a begins at its first sample: the source of this name")

    # Without the content of the sources that were left out, C could be a part of it.
    forgotten = replace(found.start, left_out=(SourcePosition("y", "Y of all", 2, 7),))
    placed = place_sources(forgotten, [("c", "C"), ("b", "B")])
    (said,) = check_content(
        replace(found, start=forgotten), placed, prepared_of(("c", "C"), ("b", "B"))
    )
    assert said.startswith("c begins at its first sample: run.json of")
    assert "does not say which files y had" in said


def test_content_that_is_split_into_other_samples_is_refused(other: Other) -> None:
    found = other.find(make_run())
    assert found is not None
    prepared = prepared_of(("c", "C"), ("bee", "B"))
    placed = place_sources(found.start, [("c", "C"), ("bee", "B")])
    check_content(found, placed, prepared)
    # With `samples` its items are others, and its content is not.
    placed = place_sources(found.start, [("c", "C"), ("bee", "B of 3")])
    with pytest.raises(CheckpointError) as error:
        check_content(found, placed, prepared)
    assert "spec.training.data.sources[1]: bee is b of" in str(error.value)
