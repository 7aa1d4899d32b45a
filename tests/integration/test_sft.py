"""The recipe sft: elastic and resumable as any other, with completions that are generated in its evaluations."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_helpers import Cluster, elastic_recipe, fault, train_undisturbed
from run_helpers import (
    DONE,
    USER_ERROR,
    Experiment,
    assert_same_curve,
    assert_same_state,
    checkpoints,
    curve,
    read_lines,
)
from run_helpers import fault as fault_here

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SFT: dict[str, Any] = {
    "recipe": "sft",
    "sft": {"chatTemplate": TEMPLATE},
    "data": {
        "sources": [{"name": "sums", "path": "rows.jsonl"}],
        "sequenceLength": 64,
        "heldOut": {"count": 5},
    },
    "evaluation": {"every": {"steps": 4}, "generation": {"maxNewTokens": 5}},
}


def write_rows(path: Path, *, count: int = 120) -> None:
    """Sums, as conversations and as prompts with completions."""
    source = random.Random(0)
    rows: list[dict[str, Any]] = []
    for at in range(count):
        one, other = source.randrange(50), source.randrange(50)
        question, answer = f"{one}+{other}=", str(one + other)
        if at % 2:
            rows.append({"prompt": question, "completion": answer})
        else:
            pair = [("user", question), ("assistant", answer)]
            rows.append({"messages": [{"role": role, "content": said} for role, said in pair]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_sft(experiment: Experiment, **changes: Any) -> None:
    experiment.write(elastic_recipe(**{**SFT, **changes}))
    write_rows(experiment.path / "rows.jsonl")


@pytest.fixture(scope="module")
def tuned(make_experiment: Callable[[], Experiment]) -> Iterator[Experiment]:
    """Rows of both kinds, trained by one process without an interruption."""
    experiment = make_experiment()
    write_sft(experiment)
    train_undisturbed(experiment)
    yield experiment


def evaluations(directory: Path) -> dict[tuple[int, str], Any]:
    """What was measured by step and set; of a step that was evaluated twice the last."""
    rows = read_lines(directory / "evaluation.jsonl")
    return {(row["step"], row["name"]): [row["loss"], row.get("metrics")] for row in rows}


@pytest.mark.capability("C-3", "C-35", "C-36", "C-47")
def test_each_set_is_evaluated_by_its_loss_and_by_what_is_generated(tuned: Experiment) -> None:
    found = evaluations(tuned.at("undisturbed"))
    assert {name for _, name in found} == {"heldOut", "heldOut-generated"}
    for (_, name), (_, metrics) in found.items():
        if name == "heldOut-generated":
            assert set(metrics) == {"exact_match", "parse_rate", "rmse"}
            assert 0 <= metrics["parse_rate"] <= 1
    rows = curve(tuned.at("undisturbed"))
    assert all(0 < row["valid_tokens"] < row["tokens"] for row in rows.values())


@pytest.mark.capability("C-3")
def test_a_run_that_is_killed_and_resumed_ends_with_the_bits_of_an_undisturbed_one(
    tuned: Experiment,
) -> None:
    tuned.run(
        directory="killed",
        expect=None,
        faults=[fault_here("step", call=7, action="SIGKILL", to="command")],
    )
    tuned.run(directory="killed", expect=DONE)
    assert_same_curve(tuned.at("undisturbed"), tuned.at("killed"))
    assert_same_state(tuned.at("undisturbed"), tuned.at("killed"))
    assert evaluations(tuned.at("undisturbed")) == evaluations(tuned.at("killed"))


def test_generation_ends_where_a_peer_dies_and_is_made_again(
    tuned: Experiment, tmp_path: Path
) -> None:
    cluster = Cluster(tuned, tmp_path)
    try:
        cluster.start(
            faults=[fault("SIGKILL", "evaluation", node=1, call=2, to="node", name="kill")]
        )
        cluster.until(lambda: cluster.has_happened("kill"), "the kill")
        cluster.start_node(1)
        cluster.finish()
        cluster.check(tuned.at("undisturbed"))
        assert evaluations(cluster.directory) == evaluations(tuned.at("undisturbed"))
    finally:
        cluster.close()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            '{"prompt": "a"}',
            "rows.jsonl:121: the row has no field 'completion'; it has 'prompt'",
        ),
        (
            '{"text": "a"}',
            "rows.jsonl:121: the row has neither 'messages' nor 'prompt' and 'completion'",
        ),
        ('{"messages": []}', "rows.jsonl:121: the field 'messages' is no list of messages"),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            "rows.jsonl:121: no message has the role 'assistant'; there are user",
        ),
        (
            '{"messages": [{"role": "user"}]}',
            "rows.jsonl:121: messages[0].content is missing; it is a JSON string",
        ),
        (
            '{"prompt": "a", "completion": ""}',
            "rows.jsonl:121: the field 'completion' is empty",
        ),
        (
            json.dumps({"prompt": "a" * 70, "completion": "b"}),
            "rows.jsonl:121: the row has 72 tokens, and a sample holds 65",
        ),
    ],
)
def test_a_row_that_cannot_be_learned_is_refused_with_its_line(
    experiment: Experiment, row: str, said: str
) -> None:
    write_sft(experiment)
    with (experiment.path / "rows.jsonl").open("a") as file:
        file.write(row + "\n")
    assert said in experiment.run(expect=USER_ERROR).err
    assert checkpoints(experiment.at()) == []
