"""The recipe of edits: a killed, resumed or stopped run has the same bits as an undisturbed run; stored
states give the same bits as newly computed states; invalid input is refused before the training."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from latent_corpus import (
    ENCODER,
    LENGTH,
    edit_row,
    seal,
    training,
    write_corpus,
    write_lines,
)
from run_helpers import (
    DONE,
    STOPPED_SAVED,
    USER_ERROR,
    Experiment,
    assert_same_curve,
    assert_same_state,
    checkpoints,
    curve,
    events,
    fault,
    read_lines,
)

STEPS = 12


def write(
    experiment: Experiment, section: dict[str, Any] | None = None, **changes: Any
) -> None:
    if not (experiment.path / "corpus").exists():
        write_corpus(experiment.path / "corpus")
    experiment.write(training(section, **changes))


@pytest.fixture(scope="module")
def whole(make_experiment: Callable[[], Experiment]) -> Experiment:
    """Its directory ``undisturbed`` contains an undisturbed run."""
    experiment = make_experiment()
    write(experiment)
    experiment.run(directory="undisturbed")
    return experiment


def evaluations(directory: Path) -> dict[Any, Any]:
    """The last row of each set and step, without times."""
    return {
        (row["step"], row["name"]): (row["loss"], row["tokens"], row.get("metrics"))
        for row in read_lines(directory / "evaluation.jsonl")
    }


def assert_same_run(one: Path, other: Path) -> None:
    assert_same_curve(one, other)
    assert_same_state(one, other)
    for step, row in curve(one).items():
        assert row["metrics"] == curve(other)[step]["metrics"], f"step {step}"
    assert evaluations(one) == evaluations(other)


@pytest.mark.acceptance("8d-11i:latent_edit")
@pytest.mark.capability("G-80", "G-84", "G-90")
def test_training_improves_on_the_trivial_baselines(whole: Experiment) -> None:
    directory = whole.at("undisturbed")
    rows = curve(directory)
    assert sorted(rows) == list(range(1, STEPS + 1)) and checkpoints(directory)[-1] == STEPS
    # The predictor begins as the first baseline and soon improves: on the items of each of the last steps, by
    # 7 % of their loss, many times the rest after the first four steps.
    gains = [1 - row["loss"] / row["metrics"]["unchanged_loss"] for row in rows.values()]
    assert gains[0] == pytest.approx(0, abs=1e-4)
    assert min(gains[8:]) > 0 and mean(gains[8:]) > 0.07 and abs(mean(gains[:4])) < 0.03
    assert rows[STEPS]["metrics"].keys() == {
        "cosine",
        "squared_distance",
        "target_variance",
        "prediction_variance",
        "correlation",
        "pairwise_distance",
        "gaussian_kl",
        "unchanged_loss",
        "mean_loss",
    }
    measured = evaluations(directory)
    assert [*measured] == [(6, "test"), (12, "test")]
    loss, weight, metrics = measured[12, "test"]
    # Two windows of eight items with an edit each.
    # The loss is a sum in fp32, the gain is made of sums in fp64.
    assert weight == 16
    assert metrics["gain"] == pytest.approx(1 - loss / metrics["unchanged_loss"], abs=1e-5)
    record = json.loads((directory / "run.json").read_text("utf-8"))
    assert record["prepared"]["facts"]["snapshotId"] == "toy-snap-1"


@pytest.mark.acceptance("8d-1b:latent_edit", "8d-2b:latent_edit", "8d-2c:latent_edit")
@pytest.mark.long
@pytest.mark.parametrize(
    "place", ["step", "save", "published", "batch"], ids=lambda place: f"at_{place}"
)
def test_a_killed_run_resumes_bit_equal(whole: Experiment, place: str) -> None:
    name = f"killed-{place}"
    call = {"step": 8, "save": 2, "published": 1, "batch": 3}[place]
    killed = fault(place, call=call, action="SIGKILL", to="command")
    whole.run(directory=name, faults=[killed], expect=-9)
    whole.run(directory=name)
    assert_same_run(whole.at("undisturbed"), whole.at(name))


@pytest.mark.acceptance("8d-1a:latent_edit")
@pytest.mark.long
def test_a_stopped_run_resumes_bit_equal(whole: Experiment) -> None:
    whole.run("--stop-after-steps", "7", directory="stopped", expect=STOPPED_SAVED)
    whole.run(directory="stopped")
    assert_same_run(whole.at("undisturbed"), whole.at("stopped"))


@pytest.mark.long
@pytest.mark.capability("G-74")
def test_states_computed_in_each_step_are_bit_equal_to_cached_states(
    whole: Experiment,
) -> None:
    write(whole, {"features": "live"})
    try:
        whole.run(directory="live")
    finally:
        write(whole)
    one, other = whole.at("undisturbed"), whole.at("live")
    assert_same_curve(one, other)
    assert_same_state(one, other)
    for step, row in curve(one).items():
        kept = {key: value for key, value in row["metrics"].items() if key != "mean_loss"}
        assert kept == curve(other)[step]["metrics"], f"step {step}"
    (newest,) = other.glob(f"checkpoints/step-*{STEPS}*/manifest.json")
    frozen = json.loads(newest.read_text("utf-8"))["extra"]["state"]["frozen"]
    assert frozen.keys() == {"encoder"}, "the encoder is known by its hash, and not saved"


@pytest.mark.acceptance("8d-11d:latent_edit")
@pytest.mark.long
@pytest.mark.capability("G-83", "G-86", "G-91", "G-X6")
def test_a_collapse_is_reported_and_training_continues(whole: Experiment) -> None:
    monitors = [
        {"type": "collapse", "metric": "prediction_variance", "limit": 100},
        {"type": "divergence", "metric": "gaussian_kl", "limit": 1, "window": 1},
    ]
    write(whole, monitors=monitors)
    try:
        whole.run(directory="watched")
    finally:
        write(whole)
    directory = whole.at("watched")
    told = [
        (one["metric"], one["threshold"], one["step"]) for one in events(directory, "alert")
    ]
    assert told == [("prediction_variance", 100, 1), ("gaussian_kl", 1, 1)]
    assert_same_curve(whole.at("undisturbed"), directory)


@pytest.mark.acceptance("8d-6a:latent_edit")
def test_a_second_evaluation_of_a_finished_run_gives_the_same_numbers(
    whole: Experiment,
) -> None:
    ended = whole.command("evaluate", str(whole.at("undisturbed")), "--json")
    ended.expect(0)
    loss, _, metrics = evaluations(whole.at("undisturbed"))[12, "test"]
    text = ended.out
    assert repr(loss) in text and repr(metrics["gain"]) in text


@pytest.mark.acceptance("8d-4b:latent_edit")
@pytest.mark.long
@pytest.mark.capability("G-26", "G-64")
def test_another_corpus_is_refused_and_nothing_is_overwritten(
    experiment: Experiment,
) -> None:
    write(experiment)
    experiment.run("--stop-after-steps", "5", expect=STOPPED_SAVED)
    before = {path: path.read_bytes() for path in experiment.at().rglob("*.json*")}
    rows = read_lines(experiment.path / "corpus/gnomad/train.jsonl")
    rows[0]["alt"] = next(
        one for one in "ACGT" if one not in (rows[0]["ref"], rows[0]["alt"])
    )
    write_lines(experiment.path / "corpus/gnomad/train.jsonl", rows)
    seal(experiment.path / "corpus")
    said = experiment.run(expect=USER_ERROR).err
    assert "data" in said
    assert curve(experiment.at()).keys() == set(range(1, 6))
    for path, content in before.items():
        if path.name in ("run.json", "manifest.json"):
            assert path.read_bytes() == content, path.name
    # Another place with the same content is the same corpus.
    write_corpus(experiment.path / "elsewhere")
    write(experiment, {"corpus": "elsewhere"})
    experiment.run()


@pytest.mark.acceptance("input-G-18", "input-G-28", "input-G-49", "input-G-82")
@pytest.mark.long
@pytest.mark.capability("G-49", "G-100")
def test_invalid_corpora_are_refused_before_training(
    experiment: Experiment,
) -> None:
    def refused(said: str, section: dict[str, Any] | None = None, **changes: Any) -> None:
        write(experiment, section, **changes)
        err = experiment.run(expect=USER_ERROR).err
        assert said in err, err
        assert not (experiment.at() / "metrics.jsonl").exists()

    refused("latentEdit.phase: 2 is refused", {"phase": 2})
    refused("no-such/dataset_manifest.json: cannot be read", {"corpus": "no-such"})
    folder = experiment.path / "corpus"
    placed = folder / "placed/train.jsonl"
    content = placed.read_bytes()
    placed.write_bytes(content + b"\n")
    refused("placed/train.jsonl: has ")
    placed.write_bytes(content)

    # Windows without enough rows, and rows of another genome.
    refused(
        "has too few population edits for 5; it has 4",
        {"mixture": [{"family": "population", "count": 5}]},
    )
    rows = read_lines(placed)
    wrong = edit_row("chr1", 10, rows[0]["sequence"], seed=1, af_global=0.5, filter="PASS")
    wrong["ref"] = next(one for one in "ACGT" if one not in (wrong["ref"], wrong["alt"]))
    write_lines(folder / "gnomad/train.jsonl", [wrong])
    seal(folder)
    refused(
        "placed/train.jsonl:1: the reference of an edit at 9 is not what stands there",
        {"mixture": [{"family": "population", "fallback": "syntheticSnv"}]},
    )
    refused("stateWidth: 99 is not the width of a state", {"predictor": {"stateWidth": 99}})
    refused(
        "a window has 60 tokens",
        {"encoder": {"padTo": 60}},
        model={
            "config": {
                "model_type": "llama",
                "hidden_size": 16,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "intermediate_size": 16,
                "max_position_embeddings": LENGTH,
            }
        },
    )


def write_encoder(folder: Path) -> None:
    """A directory like that of a pretrained encoder: configuration, tokenizer, and weights that are not read."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    folder.mkdir()
    letters = {
        letter: number for number, letter in enumerate(["N", "A", "C", "G", "T", "</s>"])
    }
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="N"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "config.json").write_text(json.dumps({**ENCODER, "vocab_size": 6}), "utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")


@pytest.mark.capability("G-X23")
def test_preflight_reports_what_an_encoder_directory_lacks(
    experiment: Experiment,
) -> None:
    folder = experiment.path / "encoder"
    write_encoder(folder)
    own = {
        "model": {"path": "encoder"},
        "tokenizer": {"type": "transformers", "path": "encoder"},
    }
    write(experiment, **own)

    def findings(expect: int) -> list[str]:
        ended = experiment.command("preflight", "tiny.yaml", "--json").expect(expect)
        found = json.loads(ended.out)["findings"]
        return [json.dumps(one) for one in found if one["level"] != "ok"]

    assert findings(DONE) == []
    (folder / "model.safetensors").unlink()
    (found,) = findings(DONE)
    assert "spec.training.model.path" in found and "has no weights" in found
    # A file that names the hash of its weights trains with no others.
    pinned = {"encoder": {"radius": 3, "weightHash": f"sha256:{'0' * 64}"}}
    write(experiment, pinned, **own)
    assert (
        "weightHash: there is no file of weights" in experiment.run(expect=USER_ERROR).err
    )
    write(experiment, **own)
    (folder / "config.json").rename(folder / "elsewhere")
    assert any("contains no config.json" in one for one in findings(USER_ERROR))
    (folder / "elsewhere").rename(folder / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert any("contains no tokenizer" in one for one in findings(USER_ERROR))


@pytest.mark.long
def test_a_run_reads_the_data_prepared_beforehand(experiment: Experiment) -> None:
    write(experiment)
    prepared = experiment.path / "runs/.prepared"
    command = ["prepare", "tiny.yaml", "--prepared-directory", str(prepared), "--json"]
    found = json.loads(experiment.command(*command).expect(0).out)
    assert found["sources"] == []
    before = {
        path: path.stat().st_mtime_ns for path in prepared.rglob("*") if path.is_file()
    }
    assert [path.name for path in before if path.name == "states.npy"] == ["states.npy"]
    experiment.run("--stop-after-steps", "1", expect=STOPPED_SAVED)
    after = {
        path: path.stat().st_mtime_ns for path in prepared.rglob("*") if path.is_file()
    }
    assert after == before


SHARDED = ("--workers", "2", "--set", "spec.training.runtime.parallelism=fsdp2")


@pytest.mark.long
@pytest.mark.parametrize("features", ["cached", "live"])
def test_a_sharded_predictor_learns_like_a_whole_one(
    make_experiment: Callable[[], Experiment], features: str
) -> None:
    experiment = make_experiment()
    write(experiment, {"features": features}, reproducibility={"elastic": "fast"})
    experiment.run(directory="alone")
    experiment.run(*SHARDED, directory="cut")
    one, other = experiment.at("alone"), experiment.at("cut")
    assert_same_curve(one, other, exact=False, tolerance=1e-5)
    for step, row in curve(one).items():
        assert curve(other)[step]["metrics"] == pytest.approx(
            row["metrics"], rel=1e-3, abs=1e-5
        )
    killed = fault("step", call=8, action="SIGKILL", to="command")
    experiment.run(*SHARDED, directory="killed", faults=[killed], expect=-9)
    experiment.run(*SHARDED, directory="killed")
    assert_same_curve(other, experiment.at("killed"))
    assert_same_state(other, experiment.at("killed"))


@pytest.mark.capability("G-3", "G-X15", "G-X16")
def test_preflight_reports_problems_of_a_corpus(experiment: Experiment) -> None:
    write(experiment)
    corpus = experiment.path / "corpus"

    def preflight(expect: int) -> str:
        ended = experiment.command("preflight", "tiny.yaml").expect(expect)
        return ended.out + ended.err

    preflight(DONE)
    manifest = corpus / "dataset_manifest.json"
    kept = manifest.read_text("utf-8")
    named = json.loads(kept)
    manifest.write_text(json.dumps(named | {"snapshot_id": ""}), "utf-8")
    assert "snapshot_id" in preflight(USER_ERROR)
    manifest.write_text(kept, "utf-8")

    train = corpus / "gnomad/train.jsonl"
    content = train.read_bytes()
    train.write_bytes(content + b"{}\n")
    assert "gnomad/train.jsonl" in preflight(USER_ERROR)
    train.unlink()
    assert "does not exist" in preflight(USER_ERROR)
    train.write_bytes(content)

    corpus.rename(experiment.path / "elsewhere")
    assert "corpus" in preflight(USER_ERROR)
