"""``evergrad validate`` reports what ``evergrad run`` reports before its first step."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from evergrad_cli.main import main
from evergrad_trainer.data.tokenizers import ByteTokenizer

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MIXTRAL = TINY | {
    "model_type": "mixtral",
    "num_key_value_heads": 4,
    "output_router_logits": True,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
GEMMA = TINY | {"model_type": "gemma3_text", "head_dim": 8}


def config(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"model": {"config": base | changes}}


WRONG: dict[str, dict[str, Any]] = {
    "unknown type": config(TINY, model_type="lama"),
    "type of another task": config(TINY, model_type="clip"),
    "unknown key": config(TINY, hiden_size=32),
    "two unknown keys": config(TINY, hiden_size=32, num_layer=2),
    "heads do not divide the width": config(TINY, num_attention_heads=5),
    "heads of gpt2 do not divide the width": config(GPT2, n_head=5),
    "key-value heads do not divide the heads": config(TINY, num_key_value_heads=3),
    "more key-value heads than heads": config(TINY, num_key_value_heads=8),
    "no key-value heads": config(TINY, num_key_value_heads=0),
    "key-value heads of qwen2": config(
        TINY | {"model_type": "qwen2"}, num_key_value_heads=3
    ),
    "more experts for a token than there are": config(
        MIXTRAL, num_local_experts=2, num_experts_per_tok=3
    ),
    "router loss left out": config(
        MIXTRAL, output_router_logits=False, num_local_experts=2
    ),
    "samples longer than the positions": {**config(TINY), "data": {"sequenceLength": 128}},
    "samples longer than the positions of gpt2": {
        **config(GPT2),
        "data": {"sequenceLength": 65},
    },
    "text for a number": config(TINY, hidden_size="wide"),
    "text for a switch": config(TINY, tie_word_embeddings="no"),
    "fraction of a layer": config(TINY, num_hidden_layers=1.5),
    "vocabulary below the tokenizer's": config(TINY, vocab_size=100),
    "unknown activation": config(TINY, hidden_act="swoosh"),
    "unknown type of positions": config(
        TINY, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}
    ),
    "older key that contradicts": config(
        TINY, rope_theta=5, rope_parameters={"rope_type": "default", "rope_theta": 6}
    ),
    "older key of another architecture": config(GPT2, rope_theta=5.0),
    "older key without an effect": config(TINY, rope_local_base_freq=5),
    "unknown type of weights": config(TINY, dtype="halffloat"),
    "odd width of a head": config(TINY, head_dim=7),
    "padding beyond the vocabulary": config(TINY, pad_token_id=100000),
    "momentum that bf16 rounds away": {
        **config(TINY),
        "runtime": {"precision": "bf16"},
        "optimizer": {"betas": [0.9, 0.999]},
    },
    "pattern that matches no weight": {
        **config(TINY),
        "optimizer": {"groups": [{"match": ["nothing.*"], "weightDecay": 0}]},
    },
    "logits in chunks of an unknown head": {**config(GEMMA), "runtime": {"lossChunk": 16}},
    "more workers than slots": {**config(TINY), "workersPerNode": 16},
    "adapters on no layer": {
        "model": {"config": TINY, "lora": {"rank": 2, "targetModules": ["nothing"]}}
    },
    "layers for other layers": config(
        GEMMA, layer_types=["full_attention", "full_attention"]
    ),
}


def write(folder: Path, changes: dict[str, Any]) -> Path:
    training: dict[str, Any] = {
        "data": {"sources": [{"name": "docs", "path": "docs.jsonl"}], "sequenceLength": 32},
        "batching": {"globalBatchSize": 4, "microBatchSize": 2},
        "optimizer": {"learningRate": 1e-3},
        "horizon": {"steps": 2},
    }
    spec: dict[str, Any] = {"training": training}
    for key, value in changes.items():
        if key == "workersPerNode":
            spec[key] = value
        else:
            training[key] = {**training.get(key, {}), **value}
    (folder / "docs.jsonl").write_text(json.dumps({"text": "a short text " * 40}) + "\n")
    path = folder / "run.yaml"
    head = {
        "apiVersion": "evergrad.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "one"},
    }
    path.write_text(yaml.safe_dump({**head, "spec": spec}))
    return path


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return sorted(
        line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")
    )


@pytest.mark.parametrize("name", WRONG)
def test_both_commands_report_the_same_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = str(write(tmp_path, WRONG[name]))
    assert main(["validate", file]) == 64
    of_validate = errors(capsys)
    assert main(["run", file, "--run-directory", str(tmp_path / "run")]) == 64
    assert errors(capsys) == of_validate != []


def test_a_file_on_the_cluster_alone_is_not_searched_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = {
        "model": {"path": "/volume/base"},
        "tokenizer": {"type": "transformers", "path": "/volume/base"},
    }
    assert main(["validate", str(write(tmp_path, elsewhere))]) == 0
    # Checks that need only the file are made nevertheless.
    wrong = {**config(TINY, num_key_value_heads=3), "tokenizer": elsewhere["tokenizer"]}
    assert main(["validate", str(write(tmp_path, wrong))]) == 64
    assert (
        "num_key_value_heads: 3 does not divide num_attention_heads 4"
        in capsys.readouterr().err
    )
    right = {**config(TINY), "tokenizer": elsewhere["tokenizer"]}
    assert main(["validate", str(write(tmp_path, right))]) == 0


@pytest.mark.parametrize("source", ["model.path", "initFrom", "config"])
def test_a_vocabulary_is_not_compared_with_a_tokenizer_that_is_not_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    values = TINY | {"vocab_size": 32000}
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(values))
    changes: dict[str, Any] = {
        "model.path": {"model": {"path": "base"}},
        "initFrom": {"initFrom": {"path": "base"}},
        "config": {"model": {"config": values}},
    }[source]
    elsewhere = {"type": "transformers", "path": "/volume/base"}
    file = write(tmp_path, {**changes, "tokenizer": elsewhere})
    assert main(["validate", str(file)]) == 0, capsys.readouterr().err


def test_the_json_document_has_the_same_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "validate",
                str(write(tmp_path, config(TINY, num_key_value_heads=3))),
                "--json",
            ]
        )
        == 64
    )
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["path"] == "spec.training.model.config.num_key_value_heads"


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_stored_weights_with_an_unsupported_dtype_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    assert main(["validate", str(write(tmp_path, config(TINY, **{key: "float16"})))]) == 0
    message = capsys.readouterr().err
    assert f"warning: spec.training.model.config.{key}: 'float16' has no effect" in message
    assert (
        "the weights are trained in float32; spec.training.runtime.precision is bf16-autocast"
        in message
    )
    assert main(["validate", str(write(tmp_path, config(TINY, **{key: "float32"})))]) == 0
    assert "warning" not in capsys.readouterr().err


CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
}
PROMPT: dict[str, Any] = {"prompt": "a", "completion": "b"}


def write_rows(
    folder: Path, row: dict[str, Any], *, file_type: str = "jsonl", **training: Any
) -> Path:
    sources = [{"name": "docs", "path": f"rows.{file_type}", "type": file_type}]
    data = {"sources": sources, **training.pop("data", {})}
    path = write(folder, {**config(TINY), "data": data})
    manifest = yaml.safe_load(path.read_text())
    manifest["spec"]["training"] |= {"recipe": "sft", **training}
    path.write_text(yaml.safe_dump(manifest))
    rows = folder / f"rows.{file_type}"
    if file_type == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([row] * 60), rows)
    else:
        rows.write_text((json.dumps(row) + "\n") * 60)
    return path


@pytest.mark.parametrize("file_type", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "sections"),
    [
        (CHAT, {}),
        ({"conversations": CHAT["messages"]}, {}),
        (
            {
                "chosen": CHAT["messages"],
                "rejected": [CHAT["messages"][0], {"role": "assistant", "content": "c"}],
            },
            {"preference": {}},
        ),
    ],
)
def test_conversations_without_a_template_are_refused_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    row: dict[str, Any],
    sections: dict[str, Any],
    file_type: str,
) -> None:
    sections = {**sections, "recipe": "preference" if sections else "sft"}
    file = str(write_rows(tmp_path, row, file_type=file_type, **sections))
    assert main(["validate", file]) == 64
    (error,) = errors(capsys)
    assert error.startswith(
        "error: spec.training.rows.chatTemplate: missing, and the first "
    )
    assert main(["run", file, "--run-directory", str(tmp_path / "run")]) == 64
    assert errors(capsys) == [error]


def test_rows_that_need_no_template_and_rows_on_the_cluster_are_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(write_rows(tmp_path, PROMPT))]) == 0
    # With the template that the remedy shows, the same rows are accepted.
    path = write_rows(tmp_path, CHAT)
    assert main(["validate", str(path)]) == 64
    template = errors(capsys)[0].split('"')[1]
    assert (
        main(["validate", str(write_rows(tmp_path, CHAT, rows={"chatTemplate": template}))])
        == 0
    )

    # A row that is passed over on request is a warning: others may be left.
    skipping = write_rows(tmp_path, CHAT, data={"malformed": "skip"})
    capsys.readouterr()
    assert main(["validate", str(skipping)]) == 0
    assert "warning: spec.training.rows.chatTemplate: missing" in capsys.readouterr().err

    # The file, or a tokenizer that may have a template, exists on the cluster alone.
    elsewhere = {"type": "transformers", "path": "/volume/base"}
    assert main(["validate", str(write_rows(tmp_path, CHAT, tokenizer=elsewhere))]) == 0
    path = write_rows(tmp_path, CHAT)
    (tmp_path / "rows.jsonl").unlink()
    assert main(["validate", str(path)]) == 0


def test_an_invalid_template_is_reported_by_both_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write_rows(tmp_path, PROMPT, rows={"chatTemplate": "{% for %}"}))
    assert main(["validate", file]) == 64
    (error,) = errors(capsys)
    assert "spec.training.rows.chatTemplate: is not a jinja template" in error
    assert main(["run", file, "--run-directory", str(tmp_path / "run")]) == 64
    assert errors(capsys) == [error]


def write_tokenizer(folder: Path, **config: Any) -> dict[str, Any]:
    """The byte tokenizer as a directory with further settings; the section that names it."""
    ByteTokenizer().save_pretrained(folder / "tok")
    path = folder / "tok" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return {"tokenizer": {"type": "transformers", "path": "tok"}}


def test_a_tokenizer_that_auto_tokenizer_cannot_load_is_reported_with_its_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_code = {
        "tokenizer_class": "Mine",
        "auto_map": {"AutoTokenizer": ["mine.Mine", None]},
    }
    section = write_tokenizer(tmp_path, **own_code)
    file = str(write(tmp_path, {**config(TINY), **section}))
    for command in ("validate", "preflight"):
        assert main([command, file]) == 0
        printed = capsys.readouterr()
        (line,) = [
            one
            for one in (printed.out + printed.err).splitlines()
            if "spec.training.tokenizer" in one
        ]
        assert line.split()[0].rstrip(":") == "warning"
        assert "spec.training.tokenizer.path: AutoTokenizer cannot load tok: " in line
        assert "contains custom code" in line
        assert "texts get the ids of its tokenizer.json alone" in line
        assert "AutoTokenizer will not load an export of this run either" in line
        assert "save the tokenizer again with save_pretrained" in line


def test_a_tokenizer_whose_export_can_be_loaded_is_reported_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = write_tokenizer(tmp_path)
    # It is not copied into an export, which has a configuration of its own.
    (tmp_path / "tok" / "config.json").write_text("{")
    settings = tmp_path / "tok" / "tokenizer_config.json"
    values = json.loads(settings.read_text())
    # Only then transformers looks into config.json for a class.
    del values["tokenizer_class"]
    settings.write_text(json.dumps(values))
    assert main(["validate", str(write(tmp_path, {**config(TINY), **section}))]) == 0
    message = capsys.readouterr().err
    assert "warning: spec.training.tokenizer.path: AutoTokenizer cannot load tok" in message
    assert "an export" not in message


def test_ids_that_an_export_would_change_are_refused_by_both_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = write_tokenizer(tmp_path)
    path = tmp_path / "tok" / "tokenizer.json"
    values = json.loads(path.read_text())
    # transformers cuts the digits of a text apart for this architecture.
    values["model"]["vocab"]["23"] = 257
    values["model"]["merges"] = [["2", "3"]]
    path.write_text(json.dumps(values))
    file = str(
        write(
            tmp_path, {**config(TINY, model_type="qwen2", num_key_value_heads=4), **section}
        )
    )
    assert main(["validate", file]) == 64
    (error,) = errors(capsys)
    assert (
        "spec.training.tokenizer: transformers would give other ids in an export" in error
    )
    assert main(["run", file, "--run-directory", str(tmp_path / "run")]) == 64
    assert errors(capsys) == [error]


def test_a_null_that_kubectl_apply_drops_gives_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, config(TINY, pad_token_id=None))
    manifest = yaml.safe_load(file.read_text())
    # A null elsewhere is a missing key for both, and nulls in lists are kept.
    manifest["spec"]["workersPerNode"] = None
    manifest["spec"]["training"]["model"]["config"]["head_dim"] = None
    file.write_text(yaml.safe_dump(manifest))
    assert main(["validate", str(file)]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "null" in line]
    assert [line.split(": ")[1] for line in warnings] == [
        "spec.training.model.config.head_dim",
        "spec.training.model.config.pad_token_id",
    ]
    assert "kubectl apply --server-side" in warnings[0]
