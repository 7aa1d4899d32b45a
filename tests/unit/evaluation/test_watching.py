"""Following a run: each checkpoint once, oldest first, to the last one of a complete run."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import CheckpointError
from evergrad_trainer.checkpoint.layout import Version
from evergrad_trainer.checkpoint.manifest import Candidate
from evergrad_trainer.evaluation.follower import watch


def candidate(step: int, checksum: str = "a") -> Candidate:
    manifest = cast(Any, SimpleNamespace(checksum=checksum)) if checksum else None
    return Candidate(f"step-{step}", Version(step, 1, 1), manifest, "file is missing")


@dataclass
class FakeRun:
    """A run that publishes while it is watched: ``coming`` names what happens at each wait."""

    there: list[Candidate]
    coming: list[Any] = field(default_factory=list)
    is_done: bool = False
    evaluated: list[str] = field(default_factory=list)
    refused: dict[str, bool] = field(default_factory=dict)
    """Checkpoints that cannot be evaluated, and whether they are deleted in the meantime."""
    warnings: list[str] = field(default_factory=list)

    def scan(self) -> list[Candidate]:
        return sorted(self.there, key=lambda one: one.version, reverse=True)

    def evaluate(self, one: Candidate) -> Iterator[Any]:
        if one.name in self.refused:
            if self.refused[one.name]:
                self.there.remove(one)
            raise CheckpointError(Problem(one.name, "cannot be loaded", "damaged"))
        self.evaluated.append(one.name)
        yield one.name

    def is_complete(self) -> bool:
        return self.is_done

    def wait(self) -> bool:
        event = self.coming.pop(0)
        if event == "stop":
            return True
        if event == "complete":
            self.is_done = True
        else:
            self.there.append(event)
        return False

    def watch(self) -> list[Any]:
        evaluator = SimpleNamespace(
            store=SimpleNamespace(
                catalog=SimpleNamespace(scan=self.scan),
                reader=SimpleNamespace(locate=lambda name: "run/checkpoints"),
            ),
            evaluate=self.evaluate,
        )
        return list(
            watch(
                cast(Any, evaluator),
                cast(Any, self),
                wait=self.wait,
                warn=self.warnings.append,
            )
        )


def test_each_checkpoint_is_evaluated_once_and_the_oldest_first() -> None:
    run = FakeRun([candidate(4), candidate(2)], [candidate(6), "complete"])
    assert run.watch() == ["step-2", "step-4", "step-6"]
    assert run.coming == [] and run.warnings == []


def test_a_checkpoint_published_at_the_end_is_evaluated_too() -> None:
    class EndsAtOnce(FakeRun):
        """Publishes a checkpoint, and completes the run directly after the first list of checkpoints."""

        def scan(self) -> list[Candidate]:
            found = super().scan()
            if not self.is_done:
                self.there.append(candidate(9))
                self.is_done = True
            return found

    assert EndsAtOnce([], ["complete"]).watch() == ["step-9"]


def test_a_step_that_was_trained_again_is_another_checkpoint() -> None:
    run = FakeRun([candidate(2, "a")], ["complete"])
    run.coming.insert(0, candidate(2, "b"))
    assert run.watch() == ["step-2", "step-2"]


def test_a_checkpoint_that_cannot_be_evaluated_is_reported_once_and_skipped() -> None:
    run = FakeRun(
        [candidate(2, ""), candidate(4), candidate(6), candidate(8)],
        ["complete"],
        refused={"step-4": False, "step-6": True},
    )
    assert run.watch() == ["step-8"]
    unreadable, damaged, retired = run.warnings
    assert unreadable == "step-2 cannot be read: file is missing"
    assert damaged.startswith("step-4 is skipped: step-4: cannot be loaded")
    assert retired.startswith("step-6 was retired before it could be evaluated; raise")


def test_a_stop_ends_the_wait_for_the_next_checkpoint() -> None:
    assert FakeRun([candidate(2)], ["stop"]).watch() == ["step-2"]
