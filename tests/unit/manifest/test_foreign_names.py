"""Names of options that other trainers have: each is refused with what to write instead."""

from collections import Counter
from pathlib import Path

import pytest
from pydantic import ValidationError

from evergrad_manifest.base import Section
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.fields import find_field, walk_fields
from evergrad_manifest.reading.foreign import FOREIGN
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.reading.problems import problems_of
from evergrad_manifest.spelling import fold

BASE = Path(__file__).parent / "base_manifest.yaml"


@pytest.mark.capability("A-26", "A-31", "A-52", "A-60")
@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            "spec.training.deepspeed",
            "is an option of other trainers (--set); it belongs to a vendor's engine. Write spec.training.runtime.",
        ),
        (
            "spec.training.runtime.sequence_parallel_size",
            (
                "each process computes whole samples; a sequence that does not fit is made to fit by "
                "recomputation. Write spec.training.runtime.activationCheckpointing and "
                "spec.training.runtime.lossChunk."
            ),
        ),
        ("spec.training.max_steps", "Write spec.training.horizon.steps."),
        (
            "spec.training.batching.gradientAccumulationSteps",
            "accumulation follows from the two sizes and the number of processes",
        ),
        (
            "spec.training.data.shuffle_buffer_size",
            "which a buffer can only approach. Remove it.",
        ),
        ("spec.training.warmup-steps", "Write spec.training.schedule.warmup."),
        (
            "spec.training.model.trust_remote_code",
            "code runs only where the file names it, and none is downloaded",
        ),
        ("spec.training.data.pack_samples", "Write spec.training.data.packing."),
        (
            "spec.training.mask_inputs",
            "completions alone are learned unless everything is asked for. Write spec.training.rows.learn.",
        ),
        (
            "spec.training.rows.response_template",
            "a row says by its fields where its completion",
        ),
        ("spec.launcher", "no other scheduler is used. Remove it."),
        (
            "spec.training.checkpoint.resume_from",
            "with `load: everything`. Write spec.training.initFrom.path.",
        ),
        ("spec.training.load_checkpoint_strategy", "Write spec.training.initFrom.load."),
        (
            "spec.training.checkpoint.last_save_freq",
            "`keepEvery` of those that are never removed. Write spec.training.checkpoint.every and",
        ),
        (
            "spec.training.checkpoint_engines",
            "`evergrad checkpoint export` makes a transformers directory of any of them",
        ),
        ("spec.training.checkpoint.save_end_of_training", "saved at the end in any case"),
        ("spec.training.exit_iteration_this_run", "`evergrad run --stop-after-steps`"),
    ],
)
def test_an_option_of_other_trainers_is_refused_with_what_to_write(key: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_manifest(BASE, overrides=[f"{key}=2"])
    [problem] = [one for one in refused.value.problems if one.path == key]
    assert said in str(problem)


def test_each_foreign_name_leads_to_fields_that_exist_and_stands_once() -> None:
    for one in FOREIGN:
        assert one.fields or one.why, one.names
        for field in one.fields:
            assert find_field(TrainingRun, tuple(field.split("."))), field
    names = Counter(fold(name) for one in FOREIGN for name in one.names)
    assert [name for name, count in names.items() if count > 1] == []


def test_no_foreign_name_is_the_name_of_a_field_here() -> None:
    own = {fold(field.key) for field in walk_fields(TrainingRun)}
    assert own.isdisjoint(fold(name) for one in FOREIGN for name in one.names)


def test_an_option_of_the_users_own_task_is_compared_with_the_tasks_options_alone() -> None:
    class Options(Section):
        strategies: int = 1
        """How many there are."""

    with pytest.raises(ValidationError) as refused:
        Options.model_validate({"strategy": 2})
    [problem] = problems_of(refused.value, {"strategy": 2}, root=Options)
    assert str(problem).startswith("strategy: unknown key; did you mean `strategies`?")
