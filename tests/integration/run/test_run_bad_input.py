"""Bad input: exit 64, a message that names the path, no traceback, and nothing lost."""

import contextlib
import gzip
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_helpers import (
    DONE,
    INTERNAL,
    MODEL,
    STOPPED_SAVED,
    STOPPED_UNSAVED,
    USER_ERROR,
    Ended,
    Experiment,
    assert_same_curve,
    assert_same_state,
    checkpoints,
    constant,
    events,
    fault,
    merge,
    recipe,
    steps_of,
    wait_until,
)

SLOW = fault("step", call=0, action="sleep", rank=None, seconds=0.05)


def refused(
    experiment: Experiment, *texts: str, arguments: tuple[str, ...] = (), **options: Any
) -> Ended:
    """Check that ``evergrad run`` exits with 64, and that stderr contains each of ``texts``."""
    ended = experiment.run(*arguments, expect=USER_ERROR, **options)
    assert all(
        line.startswith(("error: ", "warning: ", "evergrad: ", "[transformers]"))
        for line in ended.err.splitlines()
    ), ended.err
    for text in texts:
        assert text in ended.err, f"{text!r} is not said in\n{ended.err}"
    return ended


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.capability("A-42")
def test_a_start_that_requires_prepared_data_trains_once_the_data_is_prepared(
    experiment: Experiment,
) -> None:
    experiment.write()
    said = "documents.jsonl: is not prepared; this start may prepare nothing (--require-prepared)"
    refused(experiment, said, arguments=("--require-prepared",))
    assert not (experiment.at() / "metrics.jsonl").exists()
    experiment.command("prepare", "tiny.yaml").expect(DONE)
    one = ("--require-prepared", "--stop-after-steps", "1")
    experiment.run(*one, expect=STOPPED_SAVED)
    assert steps_of(experiment.at()) == [1]


# --- the manifest


@pytest.mark.acceptance("8d-8a", "input-A-66")
def test_a_duplicate_key_is_refused_with_both_lines(experiment: Experiment) -> None:
    manifest = experiment.write()
    text = manifest.read_text().replace(
        '"horizon": {', '"batching": {},\n      "horizon": {'
    )
    manifest.write_text(text)
    lines = [
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if '"batching"' in line
    ]
    refused(
        experiment,
        f"spec.training.batching: the key is given twice, in lines {lines[0]} and {lines[1]}",
    )
    assert not (experiment.path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        (
            {"batching": {"globalBatchsize": 8}},
            ["spec.training.batching.globalBatchsize", "globalBatchSize"],
        ),
        ({"optimizer": {"learningRate": -1}}, ["spec.training.optimizer.learningRate"]),
        (
            {"optimizer": {"learningRate": "fast"}},
            ["spec.training.optimizer.learningRate", "fast"],
        ),
        (
            {"horizon": {"tokens": "1M"}},
            ["spec.training.horizon: steps and tokens are both set", "exactly one"],
        ),
        (
            {"batching": {"globalBatchSize": 4, "microBatchSize": 3}},
            ["spec.training.batching", "3", "4"],
        ),
        (
            {"reproducibility": {"elastic": "exact"}, "runtime": {"parallelism": "fsdp2"}},
            ["exact cannot be combined"],
        ),
        (
            {"schedule": {"warmup": 20}},
            ["spec.training.schedule.warmup", "longer than the horizon of 8 steps"],
        ),
        (
            {"stop": {"afterStep": 9}},
            ["spec.training.stop.afterStep", "beyond the horizon of 8 steps"],
        ),
        (
            {"checkpoint": {"best": {"metric": "nothing/loss"}}},
            ["spec.training.checkpoint.best.metric", "nothing/loss"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_invalid_value_is_refused_with_its_path(
    experiment: Experiment, changes: dict[str, Any], texts: list[str]
) -> None:
    experiment.write(recipe(**changes))
    refused(experiment, *texts)
    assert not (experiment.path / "runs").exists()


@pytest.mark.capability("G-100")
def test_all_problems_of_a_manifest_are_reported_together(experiment: Experiment) -> None:
    experiment.write(
        recipe(
            optimizer={"learningRate": -1},
            data={"sequenceLength": 1},
            checkpoint={"keep": 0},
        )
    )
    refused(experiment, "optimizer.learningRate", "data.sequenceLength", "checkpoint.keep")


@pytest.mark.acceptance("input-T-41")
def test_more_workers_than_slots_are_refused(experiment: Experiment) -> None:
    refused(
        experiment,
        "spec.workersPerNode: 5 workers cannot share 4 slots a step",
        arguments=("--workers", "5"),
    )
    experiment.write(recipe(), workersPerNode=5)
    refused(
        experiment,
        "make W = 5 processes, more than the M = 4 slots of a step",
        "lower workersPerNode to 4",
    )
    assert not steps_of(experiment.at())


def test_a_missing_manifest_is_reported(experiment: Experiment) -> None:
    refused(experiment, "other.yaml", name="other")


# --- the model


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        (
            {"model_type": "lama"},
            ["config.model_type: unknown name 'lama'", "Did you mean 'llama'?"],
        ),
        (
            {"hiden_size": 32},
            [
                "spec.training.model.config.hiden_size: unknown name",
                "Did you mean 'hidden_size'?",
            ],
        ),
        (
            {"vocab_size": 100},
            [
                "spec.training.model.config.vocab_size: 100 is too small",
                "Raise it to at least 257",
            ],
        ),
        ({"num_attention_heads": 3}, ["spec.training.model.config", "32", "3"]),
        (
            {"max_position_embeddings": 8},
            ["spec.training.data.sequenceLength: 16 is above", "max_position_embeddings 8"],
        ),
    ],
    ids=["type", "key", "vocabulary", "shapes", "positions"],
)
def test_an_invalid_model_configuration_is_refused(
    experiment: Experiment, config: dict[str, Any], texts: list[str]
) -> None:
    experiment.write(recipe(model={"config": merge(MODEL, config)}))
    refused(experiment, *texts)
    assert not steps_of(experiment.at())


@pytest.mark.acceptance("input-G-4")
def test_weights_in_a_pickle_are_refused_and_never_opened(experiment: Experiment) -> None:
    directory = experiment.path / "pickled"
    directory.mkdir()
    (directory / "config.json").write_text(
        json.dumps({**MODEL, "vocab_size": 257, "architectures": ["LlamaForCausalLM"]})
    )
    trap = experiment.path / "opened"
    (directory / "pytorch_model.bin").write_bytes(
        f"cposix\nsystem\n(S'touch {trap}'\ntR.".encode()
    )
    for training in (
        {**recipe(), "model": {"path": "pickled"}},
        recipe(initFrom={"path": "pickled"}),
    ):
        experiment.write(training)
        refused(
            experiment,
            "pickled",
            "weights only as pickle (pytorch_model.bin)",
            "loading a pickle runs whatever code is in it",
        )
    assert not trap.exists()


@pytest.mark.acceptance("input-G-4")
@pytest.mark.acceptance("input-4e-20")
def test_remote_code_is_never_run(experiment: Experiment) -> None:
    directory = experiment.path / "remote"
    directory.mkdir()
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (directory / "config.json").write_text(
        json.dumps({"model_type": "my_model", "auto_map": auto})
    )
    (directory / "code.py").write_text(f"open({str(experiment.path / 'ran')!r}, 'w')\n")
    experiment.write({**recipe(), "model": {"path": "remote"}})
    refused(
        experiment,
        "spec.training.model.path",
        "remote/config.json cannot be used",
        "remote code is never run",
    )
    assert not (experiment.path / "ran").exists()


# --- the data


@pytest.mark.acceptance("8d-12d:pretrain")
@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (
            None,
            [
                "documents.jsonl",
                "does not exist",
                "spec.training.data.sources[0].path names it",
            ],
        ),
        (b"", ["documents.jsonl", "is empty"]),
        (
            b'{"text": "fine"}\n{"text": "br\xff\xfeken"}\n',
            ["documents.jsonl:2: the line is not UTF-8"],
        ),
        (
            b'{"text": "fine"}\n{"text": "cut of',
            ["documents.jsonl:2: the line is not JSON", "so it may be truncated"],
        ),
        (
            b'{"text": "fine"}\n["no", "object"]\n',
            ["documents.jsonl:2: the line contains a list; each line is one JSON object"],
        ),
        (
            b'{"body": "other field"}\n',
            ["documents.jsonl:1: the object has no field 'text'; it has 'body'"],
        ),
        (b'{"text": ""}\n\n', ["documents.jsonl"]),
    ],
    ids=["missing", "empty", "not UTF-8", "truncated", "no object", "no text", "blank"],
)
def test_an_unusable_data_file_is_reported_with_its_line(
    experiment: Experiment, content: bytes | None, texts: list[str]
) -> None:
    path = experiment.path / "documents.jsonl"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    refused(experiment, *texts)
    assert not steps_of(experiment.at())


@pytest.mark.acceptance("8d-4b:pretrain")
def test_a_source_that_changed_after_its_preparation_stops_only_the_resume(
    experiment: Experiment,
) -> None:
    experiment.run("--stop-after-steps", "4", expect=STOPPED_SAVED)
    path = experiment.path / "documents.jsonl"
    original = path.read_bytes()
    path.write_bytes(original.replace(b"node", b"edon"))
    refused(
        experiment,
        str(path),
        "its content changed since this run was prepared",
        "Restore the file to continue this run",
    )
    assert steps_of(experiment.at()) == [1, 2, 3, 4]
    path.write_bytes(original)
    experiment.run()
    assert steps_of(experiment.at()) == list(range(1, 9))


def test_a_file_that_was_added_to_a_folder_stops_the_resume_and_is_named(
    experiment: Experiment,
) -> None:
    folder = experiment.path / "shards"
    folder.mkdir()
    lines = (experiment.path / "documents.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "a.jsonl").write_bytes(b"".join(lines[::2]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[1::2])))
    path = ("--set", "spec.training.data.sources[0].path=shards")
    experiment.run(*path, "--stop-after-steps", "4", expect=STOPPED_SAVED)
    (folder / "c.jsonl").write_bytes(lines[0])
    refused(
        experiment,
        f"{folder}: its files are not those that this run was prepared from; added: c.jsonl. ",
        arguments=path,
    )
    (folder / "c.jsonl").unlink()
    experiment.run(*path)
    assert steps_of(experiment.at()) == list(range(1, 9))


def test_truncated_prepared_data_is_reported(experiment: Experiment) -> None:
    experiment.run("--stop-after-steps", "2", expect=STOPPED_SAVED)
    (tokens,) = (experiment.path / "runs" / ".prepared").rglob("*.tokens")
    os.truncate(tokens, 40)
    ended = experiment.run(expect=None)
    # Either prepared again, or refused with the file's name; never trained on less.
    if ended.code == USER_ERROR:
        assert str(tokens) in ended.err and "prepare again" in ended.err
    else:
        experiment.run(directory="undisturbed")
        assert_same_curve(experiment.at("undisturbed"), experiment.at())


# --- the run directory


@pytest.mark.acceptance("8d-4a")
def test_the_directory_of_another_run_is_left_unchanged(experiment: Experiment) -> None:
    experiment.run("--stop-after-steps", "2", expect=STOPPED_SAVED)
    before = contents(experiment.at())
    experiment.write(name="other")
    refused(
        experiment,
        f"{experiment.at()}: holds the run 'tiny'; this manifest is the run 'other'",
        "Choose another --run-directory, or use that run's manifest",
        name="other",
        directory="tiny",
    )
    assert contents(experiment.at()) == before


@pytest.mark.acceptance("8d-4c", "input-G-64")
@pytest.mark.capability("G-26")
def test_a_changed_recipe_is_refused_with_every_field(experiment: Experiment) -> None:
    experiment.run("--stop-after-steps", "2", expect=STOPPED_SAVED)
    before = contents(experiment.at())
    changes = {
        "spec.training.optimizer.learningRate": ("0.01", "0.003"),
        "spec.training.model.config.hidden_size": ("64", "32"),
        "spec.training.batching.microBatchSize": ("2", "1"),
        "spec.training.reproducibility.seed": ("1", "0"),
        "spec.training.runtime.precision": ("'bf16'", "'fp32'"),
        "spec.training.schedule.type": ("'cosine'", "'wsd'"),
    }
    arguments = [
        part
        for path, (new, _) in changes.items()
        for part in ("--set", f"{path}=" + new.strip("'"))
    ]
    texts = [
        f"{path}: {new} here, but the run in {experiment.at()} began with {old}"
        for path, (new, old) in changes.items()
    ]
    ended = refused(
        experiment,
        *texts,
        "the recipe of a run does not change",
        arguments=tuple(arguments),
    )
    # A cosine has no decay length: fields of the old shape differ, too.
    of_shape = [
        line for line in ended.err.splitlines() if "spec.training.schedule.decay" in line
    ]
    assert len(ended.err.splitlines()) == len(changes) + len(of_shape) == len(changes) + 2
    assert contents(experiment.at()) == before
    experiment.run()
    assert steps_of(experiment.at()) == list(range(1, 9))


@pytest.mark.capability("G-10", "G-13", "G-14", "A-3", "G-X14", "G-X32")
def test_a_failed_start_records_its_request_and_the_problems(
    experiment: Experiment,
) -> None:
    documents = experiment.path / "documents.jsonl"
    kept = documents.read_bytes()
    documents.write_bytes(b"no JSON\n")
    refused(experiment, "documents.jsonl")
    assert not (experiment.at() / "run.json").exists()
    assert not (experiment.at() / "metrics.jsonl").exists()
    requested = json.loads((experiment.at() / "requested.json").read_text())
    assert requested["manifest"]["metadata"]["name"] == "tiny"
    assert requested["manifest"]["spec"]["training"]["horizon"]["steps"] == 8
    assert "trainingrun" in requested["command"][-1] or "run" in requested["command"]
    found = json.loads((experiment.at() / "preflight.json").read_text())
    assert found["fine"] is True and found["overruled"] is False
    assert {"level", "path", "what", "why", "remedy"} == set(found["findings"][0])

    # The corrected run trains; a later refused start changes neither file.
    documents.write_bytes(kept)
    experiment.run("--stop-after-steps", "2", expect=STOPPED_SAVED)
    before = contents(experiment.at())
    refused(experiment, arguments=("--set", "spec.training.reproducibility.seed=5"))
    assert contents(experiment.at()) == before

    # A run that trains although the estimate is too high leaves a record of it.
    memory = constant("evergrad_trainer.models.memory._ACTIVATIONS_PER_LAYER", 1e12)
    refused(experiment, "memory", faults=[memory], directory="other")
    assert (
        json.loads((experiment.at("other") / "preflight.json").read_text())["fine"] is False
    )
    experiment.run("--no-preflight", faults=[memory], directory="other")
    overruled = json.loads((experiment.at("other") / "preflight.json").read_text())
    assert (overruled["fine"], overruled["overruled"]) == (False, True)


@pytest.mark.acceptance("input-3e-1")
def test_a_directory_with_records_but_without_run_json_is_refused(
    experiment: Experiment,
) -> None:
    experiment.run("--stop-after-steps", "3", expect=STOPPED_SAVED)
    kept = (experiment.at() / "run.json").rename(experiment.path / "kept.json")
    before = contents(experiment.at())
    refused(experiment, str(experiment.at()), "holds metrics.jsonl but no run.json")
    assert contents(experiment.at()) == before
    kept.rename(experiment.at() / "run.json")
    experiment.run()


@pytest.fixture
def volume(experiment: Experiment) -> Iterator[Callable[[str], Path]]:
    """``volume("size=4m")`` mounts a separate tmpfs at ``runs``."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small volume needs root")
    where = experiment.path / "runs"

    def mount(options: str) -> Path:
        where.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)],
            capture_output=True,
            check=False,
        )
        if made.returncode != 0:
            pytest.skip("mounting a small volume is not permitted here")
        return where

    yield mount
    experiment.close()
    subprocess.run(["umount", "-l", str(where)], capture_output=True, check=False)


def fill(volume: Path, *, leave: int) -> Path:
    """Use up the space of ``volume`` up to ``leave`` bytes."""
    ballast = volume / "ballast"
    free = shutil.disk_usage(volume).free
    # Unbuffered, and the file inside: closing it must not find the volume full a second time.
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        file.write(bytes(max(0, free - leave)))
    return ballast


def test_a_full_volume_is_refused_before_training_starts(
    experiment: Experiment, volume: Callable[[str], Path]
) -> None:
    ballast = fill(volume("size=4m"), leave=0)
    refused(experiment, str(experiment.at()), "No space left on device")
    ballast.unlink()
    experiment.run()


def test_a_volume_too_small_for_two_checkpoints_is_refused(
    experiment: Experiment, volume: Callable[[str], Path]
) -> None:
    volume("size=512k")
    refused(
        experiment,
        str(experiment.at()),
        "one checkpoint takes",
        "two must fit",
        "Free some space",
    )
    assert not steps_of(experiment.at())


def start_and_fill(
    experiment: Experiment, volume: Path, *, leave: int, steps: int = 3
) -> tuple[Any, Path]:
    """Start a slow run whose volume is filled after its first checkpoint, while it is paused."""
    run = experiment.start(faults=[SLOW, fault("step", call=steps + 1, action="hold")])
    wait_until(
        lambda: checkpoints(experiment.at()) and len(steps_of(experiment.at())) >= steps
    )
    ballast = fill(volume, leave=leave)
    (experiment.path / "go-on").touch()
    return run, ballast


def test_training_continues_while_saves_fail_and_the_end_reports_that_the_state_is_not_saved(
    experiment: Experiment, volume: Callable[[str], Path]
) -> None:
    experiment.write(recipe(horizon={"steps": 14}, checkpoint={"maxFailures": 50}))
    run, ballast = start_and_fill(experiment, volume("size=8m"), leave=100_000)
    ended = run.wait()
    assert ended.code == INTERNAL
    assert steps_of(experiment.at()) == list(range(1, 15))
    failed = events(experiment.at(), "save_failed")
    assert len(failed) >= 2 and "No space left" in failed[-1]["reason"]
    assert "could not be saved" in ended.err and "Traceback" not in ended.err
    assert not (experiment.at() / "complete.json").exists()

    ballast.unlink()
    experiment.run(expect=DONE)
    experiment.run(directory="undisturbed")
    assert_same_curve(experiment.at("undisturbed"), experiment.at())
    assert_same_state(experiment.at("undisturbed"), experiment.at())


def test_a_stop_whose_save_fails_is_reported_by_its_exit_code(
    experiment: Experiment, volume: Callable[[str], Path]
) -> None:
    experiment.write(recipe(horizon={"steps": 400}, checkpoint={"maxFailures": 50}))
    run, _ = start_and_fill(experiment, volume("size=8m"), leave=100_000)
    run.send(signal.SIGTERM)
    ended = run.wait().expect(STOPPED_UNSAVED)
    assert "the newest checkpoint is older" in ended.err
    assert [event["saved"] for event in events(experiment.at(), "stop")] == [False]


def test_a_run_whose_saves_fail_repeatedly_gives_up(
    experiment: Experiment, volume: Callable[[str], Path]
) -> None:
    experiment.write(recipe(horizon={"steps": 400}, checkpoint={"maxFailures": 2}))
    run, _ = start_and_fill(experiment, volume("size=8m"), leave=100_000)
    ended = run.wait().expect(INTERNAL)
    assert "2 saves in a row have failed" in ended.err and "No space left" in ended.err
    assert (
        str(experiment.at() / "checkpoints") in ended.err and "Traceback" not in ended.err
    )
    assert [event["failures"] for event in events(experiment.at(), "save_failed")] == [1, 2]


def test_a_run_continues_while_nothing_can_be_written_and_writes_its_rows_later(
    experiment: Experiment, volume: Callable[[str], Path]
) -> None:
    experiment.write(recipe(horizon={"steps": 10**6}, checkpoint={"maxFailures": 10**6}))
    run, ballast = start_and_fill(experiment, volume("size=8m"), leave=0)
    stdout = run.scratch / "stdout"
    wait_until(
        lambda: stdout.read_text().count("save_failed") >= 4,
        what="a save on the full volume",
    )
    before = steps_of(experiment.at())[-1]
    ballast.unlink()
    run.send(signal.SIGTERM)
    run.wait().expect(STOPPED_SAVED)
    steps = steps_of(experiment.at())
    assert steps == list(range(1, len(steps) + 1)) and steps[-1] > before
    assert checkpoints(experiment.at())[-1] == steps[-1]
    assert len(events(experiment.at(), "save_failed")) >= 4


def test_a_read_only_directory_is_refused(
    experiment: Experiment, volume: Callable[[str], Path]
) -> None:
    where = volume("size=8m")
    experiment.run("--stop-after-steps", "3", expect=STOPPED_SAVED)
    before = contents(experiment.at())
    subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)
    refused(experiment, str(experiment.at()), "Read-only file system")
    assert contents(experiment.at()) == before
    subprocess.run(["mount", "-o", "remount,rw", str(where)], check=True)
    experiment.run()


# --- checkpoints


def shard(experiment: Experiment, step: int) -> Path:
    (found,) = (experiment.at() / "checkpoints" / f"step-{step}").glob("*.bin")
    return found


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = pytest.mark.parametrize(
    "damage", [cut, flip, Path.unlink], ids=["truncated", "bit-flipped", "missing"]
)


@DAMAGES
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_damaged_checkpoint_is_quarantined_and_reported_and_the_run_resumes_before_it(
    experiment: Experiment, damage: Callable[[Path], None], workers: str
) -> None:
    experiment.run("--workers", workers, directory="undisturbed")
    experiment.run("--stop-after-steps", "7", expect=STOPPED_SAVED)
    assert checkpoints(experiment.at()) == [3, 6, 7]
    damage(shard(experiment, 7))
    experiment.run("--workers", workers)
    (fallback,) = events(experiment.at(), "fallback")
    assert fallback["checkpoint"] == "step-7" and fallback["reason"]
    assert (experiment.at() / "checkpoints" / "quarantine").is_dir()
    assert steps_of(experiment.at()) == [*range(1, 8), 7, 8]
    if workers == "1":
        assert_same_curve(experiment.at("undisturbed"), experiment.at())
        assert_same_state(experiment.at("undisturbed"), experiment.at())


@pytest.mark.acceptance("input-O-37")
@DAMAGES
def test_a_run_without_a_valid_checkpoint_stops_and_never_restarts_from_scratch(
    experiment: Experiment, damage: Callable[[Path], None]
) -> None:
    experiment.run("--stop-after-steps", "4", expect=STOPPED_SAVED)
    assert checkpoints(experiment.at()) == [3, 4]
    for step in (3, 4):
        damage(shard(experiment, step))
    for _ in range(2):
        refused(experiment, str(experiment.at() / "checkpoints"), "step-3", "step-4")
    assert steps_of(experiment.at()) == [1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_older_of_two_runs_in_one_directory_stops_and_publishes_nothing_more(
    experiment: Experiment, workers: str
) -> None:
    experiment.write(recipe(horizon={"steps": 60}))
    experiment.run(directory="undisturbed")
    slow = fault("step", call=0, action="sleep", rank=None, seconds=0.5)
    older = experiment.start("--workers", workers, faults=[slow])
    wait_until(lambda: checkpoints(experiment.at()))
    # As on a shared volume: one machine cannot see whether a process of another one is alive.
    owner = experiment.at() / "owner.json"
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "boot": "another"}))
    experiment.run()
    ended = older.wait().expect(USER_ERROR)
    assert "a newer process" in ended.err
    generations = {
        json.loads(path.read_text())["generation"]: int(
            path.parent.name.split("-")[1].split(".")[0]
        )
        for path in sorted((experiment.at() / "checkpoints").glob("step-*/manifest.json"))
    }
    assert set(generations) == {1, 2}
    begun = events(experiment.at(), "start")[1]["resumed_from"]
    late = [
        event
        for event in events(experiment.at(), "save")
        if event["generation"] == 1 and event["step"] > begun + 3
    ]
    assert not late, "the older one published after the newer one had claimed the directory"
    assert (experiment.at() / "complete.json").exists()
    if workers == "1":
        assert_same_state(experiment.at("undisturbed"), experiment.at())
