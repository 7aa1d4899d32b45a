"""An object of the API server is refused for the same reasons as a file of the same content, and for changes
of fixed fields."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.model.nesting import MAX_DEPTH, cut_deep, find_too_deep
from evergrad_manifest.reading import problems
from evergrad_manifest.reading.document import Document
from evergrad_manifest.reading.loader import load_manifest, read_document
from evergrad_manifest.reading.overrides import (
    Override,
    apply_override,
    parse_override,
)
from evergrad_manifest.validation import (
    INVALID_SPEC,
    parse_object,
    problems_of,
    read_object,
    with_plain_numbers,
)

FOLDER = Path(__file__).parent
BASE: dict[str, Any] = yaml.safe_load((FOLDER / "base_manifest.yaml").read_text())
NEVER_SENT = ("a missing kind", "metadata of the cluster")
"""Fields that an API server fills in or sets."""
TABLE: list[dict[str, Any]] = [
    case
    for case in yaml.safe_load((FOLDER / "bad_manifests.yaml").read_text())
    if case["name"] not in NEVER_SENT
]
REPLACED = (
    "the recipe of a run does not change. Set it back to 0.001, or make a new TrainingRun"
)
OF_CLUSTER = {
    "uid": "3b0c",
    "generation": 4,
    "resourceVersion": "17",
    "creationTimestamp": "2026-01-02T03:04:05Z",
    "managedFields": [{"manager": "kubectl"}],
    "finalizers": ["evergrad.dev/end"],
    "labels": {"team": "one"},
    "namespace": "default",
}


def changed(changes: dict[str, Any], base: dict[str, Any] = BASE) -> dict[str, Any]:
    """Return the content of ``base`` with ``changes``, path to value; a text is read as YAML."""
    layered = Document(copy.deepcopy(base), {}, [], set())
    for path, value in changes.items():
        override = parse_override(f"{path}=x")
        assert isinstance(override, Override)
        value = yaml.safe_load(value) if isinstance(value, str) else value
        layered = apply_override(layered, Override(override.path, value, {}))
    assert not layered.problems
    value = json.loads(json.dumps(layered.value))
    assert isinstance(value, dict)
    return value


def sent(document: dict[str, Any], **status: Any) -> dict[str, Any]:
    """Return the object that an API server makes of ``document``."""
    metadata = document.get("metadata")
    metadata = {**metadata, **OF_CLUSTER} if isinstance(metadata, dict) else metadata
    return {**document, "metadata": metadata, "status": {"phase": "Running", **status}}


def without_lines(text: str) -> str:
    return re.sub(r" \(line \d+\)", "", text)


@pytest.mark.parametrize("case", TABLE, ids=[case["name"] for case in TABLE])
def test_an_object_is_refused_with_the_same_messages_as_a_file_with_its_content(
    case: dict[str, Any], tmp_path: Path
) -> None:
    document = changed(case["set"])
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigurationError) as refused:
        load_manifest(file)
    said = [without_lines(str(problem)) for problem in refused.value.problems]
    assert [str(problem) for problem in problems_of(document)] == said
    if not any(path.startswith(("metadata", "status")) for path in case["set"]):
        assert [str(problem) for problem in problems_of(sent(document))] == said
        with pytest.raises(ConfigurationError):
            parse_object(sent(document))


def test_fields_that_the_cluster_adds_to_a_valid_object_are_not_a_problem() -> None:
    run = parse_object(sent(BASE))
    assert problems_of(sent(BASE)) == () and run == read_object(sent(BASE))
    assert run.metadata.labels == {"team": "one"}
    listed = {
        key: value for key, value in sent(BASE).items() if key not in ("apiVersion", "kind")
    }
    assert read_object(listed) == run


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"spec.training.optimizer.learningRate": 0.002},
            (
                f"spec.training.optimizer.learningRate: 0.002 cannot replace 0.001; {REPLACED}, "
                "with training.initFrom for the weights."
            ),
        ),
        (
            {"spec.training.horizon.tokens": "10M"},
            (
                "spec.training.horizon: 1221 steps are fewer than the 2442 of this run; a run "
                "can be extended, not shortened. "
                "Use at least 2442 steps; to end it earlier use spec.training.stop.afterStep."
            ),
        ),
        (
            {"spec.image": "example.org/a:2"},
            (
                "spec.image: 'example.org/a:2' cannot replace nothing; all pods of a run have one image. "
                "Set it back to nothing, or make a new TrainingRun."
            ),
        ),
        (
            {"spec.storage.size": "30Gi"},
            (
                "spec.storage.size: '30Gi' cannot replace '20Gi'; the run's state is there. "
                "Set it back to '20Gi', or make a new TrainingRun."
            ),
        ),
        (
            {"spec.managedBy": "kueue.x-k8s.io/multikueue"},
            (
                "spec.managedBy: 'kueue.x-k8s.io/multikueue' cannot replace nothing; two controllers would manage the run. Set it back to nothing, or make a new TrainingRun."
            ),
        ),
        (
            {
                "spec.training": None,
                "spec.script": {"command": ["train.py"]},
                "spec.workersPerNode": 1,
            },
            (
                "spec.script: replaces training; neither can continue from what the other saved. "
                "Set training again, or make a new TrainingRun."
            ),
        ),
    ],
    ids=["recipe", "horizon", "image", "volume", "manager", "kind"],
)
def test_fields_that_a_run_keeps_cannot_be_replaced(
    changes: dict[str, Any], problem: str
) -> None:
    assert [
        str(found) for found in problems_of(sent(changed(changes)), old=sent(BASE))
    ] == [problem]


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.training.horizon.tokens": 20_000_000},
        {"spec.training.horizon.tokens": "40M"},
        {"spec.training.horizon": {"steps": 5000}},
        {"spec.training.horizon": {"epochs": 1}},
        {"spec.training.optimizer.learningRate": "0.1%"},
        {"spec.training.skipSteps": [4]},
        {"spec.training.checkpoint.every.steps": 7},
        {"spec.nodes.max": 3},
        {"spec.suspend": True},
        {"spec.storage.whenDeleted": "Delete"},
    ],
    ids=[
        "number",
        "longer",
        "longer in steps",
        "epochs",
        "percent",
        "skipped step",
        "cadence",
        "nodes",
        "suspend",
        "the end of its volume",
    ],
)
def test_another_spelling_and_operational_fields_may_change(
    changes: dict[str, Any],
) -> None:
    assert problems_of(sent(changed(changes)), old=sent(BASE)) == ()


def test_a_run_that_was_refused_before_its_start_may_change_as_a_whole() -> None:
    bad = changed({"spec.training.schedule.warmup": "150%"})
    assert [problem.path for problem in problems_of(sent(bad))] == [
        "spec.training.schedule.warmup"
    ]
    good = changed({"spec.training.optimizer.learningRate": 0.5})
    assert problems_of(sent(good), old=sent(bad, reason=INVALID_SPEC)) == ()
    assert (
        problems_of(sent(good), old=sent(BASE, reason=INVALID_SPEC, recipeHash="ab")) != ()
    )


def test_an_invalid_update_reports_the_invalid_values_and_not_the_changes() -> None:
    bad = changed({"spec.training.batching.microBatchSize": 5})
    assert [problem.path for problem in problems_of(sent(bad), old=sent(BASE))] == [
        "spec.training.batching.globalBatchSize"
    ]


def test_existing_problems_do_not_permit_a_change_of_fixed_fields() -> None:
    wrong = {"spec.template.labels": {"not a key": "x"}}
    (known,) = problems_of(sent(changed(wrong)))
    shorter = changed({**wrong, "spec.training.horizon": {"steps": 1}})
    found = problems_of(sent(shorter), old=sent(changed(wrong)))
    assert found[0] == known and [problem.path for problem in found[1:]] == [
        "spec.training.horizon"
    ]
    longer = changed({**wrong, "spec.training.horizon": {"steps": 9000}})
    assert problems_of(sent(longer), old=sent(changed(wrong))) == (known,)


REFUSED = sorted((FOLDER.parents[1] / "golden" / "refused").glob("*.yaml"))


@pytest.mark.parametrize("file", REFUSED, ids=[file.stem for file in REFUSED])
def test_each_of_the_twenty_files_is_refused_alike_as_a_file_and_as_an_object(
    file: Path,
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_manifest(file)
    said = [without_lines(str(problem)) for problem in refused.value.problems]
    document = yaml.safe_load(file.read_text())
    assert [str(problem) for problem in problems_of(sent(document))] == said and said


def test_there_are_exactly_twenty_files() -> None:
    assert len(REFUSED) == 20


def test_the_search_for_similar_names_is_bounded_for_an_object_full_of_problems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words: list[str] = []
    monkeypatch.setattr(problems, "nearest", lambda word, known: words.append(word))
    raw = changed({})
    raw["spec"]["training"] |= {f"key{number}": 0 for number in range(20_000)}
    found = problems_of(sent(raw))
    assert (len(found), len(words)) == (
        problems.MOST_PROBLEMS + 1,
        10 * problems.MOST_PROBLEMS,
    )
    assert (
        found[-1].what == f"{20_000 - problems.MOST_PROBLEMS} more problems are not listed"
    )


# ---- objects that an API server still stores
# ----------------------------------------------------------------


def test_quoted_numbers_of_an_earlier_version_are_parsed_and_each_is_named() -> None:
    old = changed({"spec.nodes": '{min: "2", max: 3}', "spec.workersPerNode": '"2"'})
    old["spec"]["training"]["metrics"] = {"port": 0, "lingerSeconds": "0.5k"}
    found, problems = with_plain_numbers(old)
    assert [str(problem) for problem in problems] == [
        "spec.nodes.min: '2' is not a plain integer; it takes no unit and no quotes. Write 2.",
        "spec.workersPerNode: '2' is not a plain integer; it takes no unit and no quotes. Write 2.",
        (
            "spec.training.metrics.lingerSeconds: '0.5k' is not a plain integer; it takes no unit and "
            "no quotes. Write 500."
        ),
    ]
    assert (found["spec"]["nodes"], found["spec"]["workersPerNode"]) == (
        {"min": 2, "max": 3},
        2,
    )
    assert found["spec"]["training"]["metrics"]["lingerSeconds"] == 500
    assert parse_object(found).spec.nodes.min == 2
    assert old["spec"]["nodes"]["min"] == "2"
    # A new object is still refused for them.
    assert {problem.path for problem in problems_of(sent(old))} == {
        one.path for one in problems
    }


def test_no_other_text_becomes_a_number() -> None:
    wrong = changed(
        {"spec.nodes": "{min: many}", "spec.training.schedule.warmup": '"150%"'}
    )
    assert with_plain_numbers(wrong) == (wrong, ())
    assert with_plain_numbers(BASE) == (BASE, ())


@pytest.mark.acceptance("input-4e-17")
@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("spec.training.recipe", "5"),
        ("spec.training.data.heldOut", {"fraction": "5"}),
        ("spec.resources.requests.cpu", " 7 "),
    ],
)
def test_a_text_like_a_number_stays_text_in_fields_without_plain_integers(
    path: str, text: Any
) -> None:
    # The nodes field is validated again together with it.
    wrong = changed({"spec.nodes.min": '"2"'})
    *parents, key = path.split(".")
    holder = wrong
    for parent in parents:
        holder = holder[parent]
    holder[key] = text
    found, problems = with_plain_numbers(wrong)
    assert [problem.path for problem in problems] == ["spec.nodes.min"]
    wrong["spec"]["nodes"]["min"] = 2
    assert found == wrong and problems_of(sent(found)) != ()


def test_a_stored_quoted_number_does_not_permit_a_change_of_fixed_fields() -> None:
    old = changed({"spec.workersPerNode": '"2"'})
    mended = changed({"spec.workersPerNode": 2})
    assert problems_of(sent(mended), old=sent(old)) == ()
    other = changed({"spec.workersPerNode": 1, "spec.training.optimizer.learningRate": 0.5})
    assert [problem.path for problem in problems_of(sent(other), old=sent(old))] == [
        "spec.training.optimizer.learningRate",
        "spec.workersPerNode",
    ]


def nested(levels: int) -> dict[str, Any]:
    options: Any = {}
    for _ in range(levels):
        options = {"a": options, "b": [1]}
    return changed({"spec.training.model": {"config": {"model_type": "llama", "x": 1}}}) | {
        "spec": {
            **BASE["spec"],
            "training": {**BASE["spec"]["training"], "options": options},
        }
    }


def test_an_object_that_is_nested_too_deeply_has_one_problem() -> None:
    for document in (nested(1_200), nested(MAX_DEPTH), cut_deep(nested(1_200))):
        [problem] = problems_of(sent(document), old=sent(BASE))
        assert str(problem) == (
            "spec.training.options: is nested deeper than 64 levels; mappings or lists are nested in one another. Write it flatter."
        )


def test_values_nested_too_deeply_are_cut_and_others_stay_unchanged() -> None:
    cut = cut_deep(nested(1_200))
    assert (
        json.dumps(cut).count('{"a"') == MAX_DEPTH - 2
        and cut["metadata"] == BASE["metadata"]
    )
    assert cut_deep(BASE) is BASE


def test_a_file_with_the_largest_permitted_nesting_is_accepted(
    tmp_path: Path,
) -> None:
    # The mapping of the options is on level 4, so that its innermost values are on the last one.
    for levels, is_read in ((MAX_DEPTH - 5, True), (MAX_DEPTH - 4, False)):
        document = nested(levels)
        file = tmp_path / "run.yaml"
        file.write_text(json.dumps(document))
        assert (read_document(file).value is not None) is is_read
        assert (find_too_deep(document) is None) is is_read
