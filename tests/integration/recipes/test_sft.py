"""The recipe sft: elastic and resumable as any other, with completions that are generated in its evaluations."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_helpers import Cluster, elastic_recipe, fault, train_undisturbed
from recipe_runs import SFT, TEMPLATE, write_rows
from run_helpers import (
    DONE,
    STOPPED_SAVED,
    USER_ERROR,
    Experiment,
    assert_same_curve,
    assert_same_state,
    checkpoints,
    curve,
    read_lines,
)
from run_helpers import fault as fault_here
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[3]


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
    """Return the evaluations by step and set; of a step that was evaluated twice, the last."""
    rows = read_lines(directory / "evaluation.jsonl")
    return {(row["step"], row["name"]): [row["loss"], row.get("metrics")] for row in rows}


@pytest.mark.acceptance("8d-13c:sft")
@pytest.mark.capability("C-3", "C-35", "C-36", "C-47")
def test_each_set_is_evaluated_by_its_loss_and_by_its_generated_text(
    tuned: Experiment,
) -> None:
    found = evaluations(tuned.at("undisturbed"))
    assert {name for _, name in found} == {"heldOut", "heldOut-generated"}
    for (_, name), (_, metrics) in found.items():
        if name == "heldOut-generated":
            assert set(metrics) == {"exact_match", "parse_rate", "rmse"}
            assert 0 <= metrics["parse_rate"] <= 1
    rows = curve(tuned.at("undisturbed"))
    assert all(0 < row["valid_tokens"] < row["tokens"] for row in rows.values())


@pytest.mark.acceptance("8d-1b:sft")
@pytest.mark.capability("C-3")
def test_a_killed_and_resumed_run_ends_bit_equal_to_an_undisturbed_run(
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


@pytest.mark.acceptance("8d-13d:sft")
@pytest.mark.acceptance("8d-3b:sft")
def test_generation_ends_if_a_peer_dies_and_is_repeated(
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


@pytest.mark.acceptance("8d-12d:sft")
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
        (
            '{"messages": []}',
            "rows.jsonl:121: the field 'messages' is not a list of messages",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            "rows.jsonl:121: no message has the role 'assistant'; there are user",
        ),
        (
            '{"messages": [{"role": "user"}]}',
            "rows.jsonl:121: messages[0] has only a role; a message has content, tool calls",
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


def test_truncated_and_omitted_rows_are_reported_at_every_start(
    experiment: Experiment,
) -> None:
    write_sft(
        experiment,
        rows={**SFT["rows"], "tooLong": "truncate"},
        evaluation={"every": {"steps": 4}},
        horizon={"steps": 2},
    )
    with (experiment.path / "rows.jsonl").open("a") as file:
        for prompt, completion in (("a", "b" * 70), ("a" * 70, "b")):
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    for arguments, code in ((("--stop-after-steps", "1"), STOPPED_SAVED), ((), DONE)):
        said = experiment.run(*arguments, expect=code).err
        assert "rows.jsonl: rows 1 too long, and left out, 1 too long, and cut" in said
    listed = experiment.command("prepare", "tiny.yaml").expect(DONE)
    assert (
        "lines skipped: 1 too long, and left out, lines cut: 1 too long, and cut"
        in listed.out
    )


@pytest.mark.capability("C-3")
def test_the_example_generates_its_rows_and_trains_on_them(experiment: Experiment) -> None:
    folder = ROOT / "examples" / "sft"
    path = experiment.path / "rows.jsonl"
    subprocess.run([sys.executable, str(folder / "make_rows.py"), str(path)], check=True)
    assert len(path.read_text().splitlines()) > 1000
    shutil.copy(folder / "trainingrun.yaml", experiment.path / "tiny.yaml")
    changes = {
        "horizon.steps": 2,
        "evaluation.every.steps": 2,
        "evaluation.samples": 4,
        "schedule.warmup": 0,
        "schedule.decay": 0,
        "runtime.threads": 1,
    }
    sets = [
        part
        for path_, value in changes.items()
        for part in ("--set", f"spec.training.{path_}={value}")
    ]
    experiment.run(*sets, expect=DONE)
    names = {name for _, name in evaluations(experiment.at())}
    assert names == {"heldOut", "heldOut-generated"}


@pytest.mark.capability("C-37")
def test_the_chat_template_of_the_tokenizer_is_used(experiment: Experiment) -> None:
    """A tokenizer that is trained on the rows' own text, as a directory that transformers writes."""
    write_sft(experiment)
    specials = ["<unk>", "<end>", "<user>", "<assistant>"]
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train([str(experiment.path / "rows.jsonl")], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<end>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    ).save_pretrained(experiment.path / "tokenizer")
    own = {"tokenizer": {"type": "transformers", "path": "tokenizer"}, "rows": None}
    experiment.write(elastic_recipe(**{**SFT, **own}))
    experiment.run(expect=DONE)
    with_template = curve(experiment.at())

    # The same template in the file gives the same samples with the same losses.
    experiment.write(elastic_recipe(**{**SFT, **own, "rows": SFT["rows"]}), name="written")
    experiment.run(name="written", expect=DONE)
    assert [row["loss"] for row in curve(experiment.at("written")).values()] == [
        row["loss"] for row in with_template.values()
    ]
    (experiment.path / "tokenizer" / "chat_template.jinja").unlink(missing_ok=True)
    config = experiment.path / "tokenizer" / "tokenizer_config.json"
    values = json.loads(config.read_text())
    values.pop("chat_template", None)
    config.write_text(json.dumps(values))
    experiment.write(elastic_recipe(**{**SFT, **own}), name="without")
    said = experiment.run(name="without", expect=USER_ERROR).err
    assert "spec.training.rows.chatTemplate: missing, and the first line of" in said


def test_a_user_task_derived_from_the_recipe_reads_rows(
    experiment: Experiment,
) -> None:
    (experiment.path / "mine.py").write_text(
        "from evergrad_trainer.recipes.sft import Sft\n\nclass Mine(Sft):\n    pass\n"
    )
    write_sft(experiment, recipe="mine:Mine", horizon={"steps": 2})
    experiment.run(expect=DONE)
    assert (2, "heldOut-generated") in evaluations(experiment.at())


@pytest.mark.acceptance("8d-6a:sft")
@pytest.mark.capability("C-36", "O-39")
def test_evaluate_generates_the_same_text_as_the_run_itself(tuned: Experiment) -> None:
    run = tuned.at("undisturbed")
    ended = tuned.command("evaluate", str(run), "--json")
    rows = json.loads(ended.expect(DONE).out)["results"]
    own = evaluations(run)
    last = max(step for step, _ in own)
    assert {
        (row["step"], row["name"]): [row["loss"], row.get("metrics")] for row in rows
    } == {key: value for key, value in own.items() if key[0] == last}
    assert len(rows) == 2


def test_an_export_has_the_template_of_the_manifest(tuned: Experiment) -> None:
    exported = tuned.path / "exported"
    run = str(tuned.at("undisturbed"))
    tuned.command("checkpoint", "export", run, "--output", str(exported)).expect(DONE)
    theirs = AutoTokenizer.from_pretrained(exported, local_files_only=True)
    talk = [{"role": "user", "content": "1+2="}]
    said = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert said == "<user>1+2=<|end_of_document|><assistant>"
