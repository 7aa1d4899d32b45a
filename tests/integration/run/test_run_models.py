"""Runs with unusual models: weights of another configuration, an untied head, no SDPA."""

import json
from typing import Any

import pytest
from run_helpers import (
    DONE,
    MODEL,
    STOPPED_SAVED,
    USER_ERROR,
    Experiment,
    events,
    recipe,
    steps_of,
)


def begin(
    experiment: Experiment, name: str, path: str, model: dict[str, Any] | None
) -> None:
    """Write a run that begins with the weights in ``path``; without ``model``, with their model, too."""
    training = {**recipe(horizon={"steps": 1}), "initFrom": {"path": path}}
    del training["model"]
    if model is not None:
        training["model"] = {"config": {**MODEL, **model}}
    experiment.write(training, name=name)


def test_weights_are_loaded_only_into_an_equivalent_model(
    experiment: Experiment,
) -> None:
    experiment.run()
    experiment.command("checkpoint", "export", "runs/tiny", "--output", "exported").expect(
        DONE
    )
    other = {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}
    for number, path in enumerate(("runs/tiny", "exported")):
        begin(experiment, f"other-{number}", path, other)
        refused = experiment.run(name=f"other-{number}", expect=USER_ERROR)
        assert f"{path} has rope_parameters.rope_theta 10000" in refused.err
        assert steps_of(experiment.at(f"other-{number}")) == []

        begin(experiment, f"same-{number}", path, {"attention_dropout": 0.1})
        accepted = experiment.run(name=f"same-{number}")
        assert "attention_dropout is 0.1 here and 0" in accepted.err
        # An export has the tokenizer's ids in place of the architecture's: no difference to warn of.
        assert "token_id" not in accepted.err
        warnings = events(experiment.at(f"same-{number}"), "warning")
        assert any(
            one["message"].startswith("attention_dropout is 0.1 here") for one in warnings
        )

        # The file describes no model: the model of the weights is used, and recorded.
        begin(experiment, f"theirs-{number}", path, None)
        experiment.run(name=f"theirs-{number}")
        records = [
            json.loads((experiment.at(name) / "run.json").read_text())["model"]["config"]
            for name in ("tiny", f"theirs-{number}")
        ]
        assert records[0]["rope_parameters"] == records[1]["rope_parameters"]
        assert records[0]["hidden_size"] == records[1]["hidden_size"] == 32


def test_a_head_that_differs_from_tied_embeddings_is_kept_by_resume_and_export(
    experiment: Experiment,
) -> None:
    experiment.run()
    experiment.command("checkpoint", "export", "runs/tiny", "--output", "base").expect(DONE)
    config = json.loads((experiment.path / "base" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    contradiction = json.dumps({**config, "tie_word_embeddings": True})
    (experiment.path / "base" / "config.json").write_text(contradiction)

    training = {**recipe(horizon={"steps": 3}), "model": {"path": "base"}}
    training["tokenizer"] = {"type": "byte"}
    experiment.write(training, name="apart")
    started = experiment.run("--stop-after-steps", "1", name="apart", expect=STOPPED_SAVED)
    assert "lm_head.weight and model.embed_tokens.weight are trained as two" in started.err
    experiment.run(name="apart")
    assert steps_of(experiment.at("apart")) == [1, 2, 3]
    experiment.command("checkpoint", "export", "runs/apart", "--output", "again").expect(
        DONE
    )
    written = json.loads((experiment.path / "again" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False


@pytest.mark.parametrize("kind", ["gemma2", "mamba"])
def test_an_architecture_without_sdpa_trains_and_reports_its_attention(
    experiment: Experiment, kind: str
) -> None:
    own = {"head_dim": 16, "num_key_value_heads": 1}
    config: dict[str, Any] = {**MODEL, "model_type": "gemma2", **own}
    if kind == "mamba":
        config = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1}
    experiment.write({**recipe(horizon={"steps": 2}), "model": {"config": config}})
    ended = experiment.run()
    # A model without attention computes as it always does.
    assert ("trains with eager attention" in ended.err) == (kind == "gemma2")
    document = json.loads((experiment.at() / "provenance.json").read_text())
    assert document["processes"][0]["kernels"]["attention"] == "eager"


def test_a_tokenizer_that_auto_tokenizer_cannot_load_is_reported_at_each_stage(
    experiment: Experiment,
) -> None:
    experiment.run()
    tokenizer = experiment.path / "exported"
    experiment.command("checkpoint", "export", "runs/tiny", "--output", "exported").expect(
        DONE
    )
    settings = tokenizer / "tokenizer_config.json"
    own_code = {
        "tokenizer_class": "Mine",
        "auto_map": {"AutoTokenizer": ["mine.Mine", None]},
    }
    settings.write_text(json.dumps(json.loads(settings.read_text()) | own_code))
    section = {"type": "transformers", "path": "exported"}
    experiment.write({**recipe(horizon={"steps": 2}), "tokenizer": section}, name="code")
    ended = experiment.run("--stop-after-steps", "1", name="code", expect=STOPPED_SAVED)
    warning = "spec.training.tokenizer.path: AutoTokenizer cannot load exported: ValueError"
    assert f"warning: {warning}" in ended.err
    assert "AutoTokenizer will not load an export of this run either" in ended.err
    # A resume reports it again, and the record of each process contains it.
    assert f"warning: {warning}" in experiment.run(name="code").err
    document = json.loads((experiment.at("code") / "provenance.json").read_text())
    for process in document["processes"]:
        assert process["tokenizer"]["reader"] == "tokenizer.json alone"
        assert "contains custom code" in process["tokenizer"]["autoTokenizer"]
    exported = experiment.command(
        "checkpoint", "export", "runs/code", "--output", "again"
    ).expect(DONE)
    assert "the export is written, but spec.training.tokenizer" in exported.err
    assert "AutoTokenizer cannot load an export of it" in exported.err
