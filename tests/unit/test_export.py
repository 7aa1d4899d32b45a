"""Exports: the files that transformers would write, made without the whole model in memory."""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from latent_corpus import training as training_on_edits
from safetensors import safe_open

from evergrad_manifest.identity import from_wire, to_wire
from evergrad_manifest.training import Model
from evergrad_trainer import export
from evergrad_trainer.base.errors import (
    CheckpointError,
    ModelError,
    RunDirectoryError,
    VolumeError,
)
from evergrad_trainer.checkpoint.attempts import Medium
from evergrad_trainer.checkpoint.generations import claim_generation
from evergrad_trainer.checkpoint.layout import LATEST, TENSORS, Version
from evergrad_trainer.checkpoint.leases import find_leased
from evergrad_trainer.checkpoint.manifest import FileEntry, Identity, Manifest
from evergrad_trainer.checkpoint.staging import view_bytes
from evergrad_trainer.checkpoint.store import open_store
from evergrad_trainer.checkpoint.tensor_table import StoredChunk, StoredTensor, encode_table
from evergrad_trainer.checkpoint.weights import open_tensors
from evergrad_trainer.models import safetensors_files
from evergrad_trainer.models.build import build_model, plan_model
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.state.providers import module_tensors
from evergrad_trainer.task import Modules
from evergrad_trainer.training.frozen import hash_frozen

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
MakeRun = Callable[..., tuple[Path, Any]]


def save_sharded(
    directory: Path,
    state: dict[str, torch.Tensor],
    *,
    ranks: int,
    frozen: dict[str, str] | None = None,
) -> None:
    """Write a checkpoint whose tensors are cut along their first dimension, as fsdp2's are."""
    generation = claim_generation(directory)
    attempts = open_store(directory, medium=Medium(stale_seconds=0.0)).attempts
    attempt = attempts.begin(Version(10, generation, 1))
    chunks: dict[str, list[StoredChunk]] = {key: [] for key in state}
    entries: list[FileEntry] = []
    for rank in range(ranks):
        shard = attempts.create_shard(attempt, rank)
        for key, tensor in state.items():
            rows = -(-tensor.shape[0] // ranks)
            part = tensor[rank * rows : (rank + 1) * rows].contiguous()
            if part.numel():
                offset = shard.append(view_bytes(part))
                starts = (rank * rows, *[0] * (tensor.dim() - 1))
                place = StoredChunk(
                    starts, tuple(part.shape), f"rank-{rank:05d}.bin", offset, part.nbytes
                )
                chunks[key].append(place)
        entries.append(shard.finish())
        shard.abandon()
    table = {
        key: StoredTensor(tensor.dtype, tuple(tensor.shape), tuple(chunks[key]))
        for key, tensor in state.items()
    }
    entries.append(attempts.write_document(attempt, TENSORS, encode_table(table)))
    identity = Identity("one", "recipe", "data")
    version = Version(10, generation, 1)
    extra = {"state": {"frozen": frozen or {}}}
    manifest = Manifest(version, ranks, identity, extra, False, tuple(entries), {}, 0.0)
    attempts.publish(attempt, manifest)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """``make_run(config, ranks=3)``: a run's directory with one checkpoint, and the model that it holds."""

    def make(
        config: dict[str, Any], *, ranks: int = 3, ema: Any = None, **model_settings: Any
    ) -> tuple[Path, Any]:
        training = {
            "model": {"config": config, **model_settings},
            "ema": ema,
            "data": {
                "sources": [{"name": "docs", "path": "docs.jsonl"}],
                "sequenceLength": 16,
            },
            "batching": {"globalBatchSize": 2, "microBatchSize": 1},
            "optimizer": {"learningRate": 0.1},
            "horizon": {"steps": 10},
        }
        run = from_wire(
            {
                "apiVersion": "evergrad.dev/v1alpha1",
                "kind": "TrainingRun",
                "metadata": {"name": "one"},
                "spec": {"training": training},
            }
        )
        directory = RunDirectory(tmp_path / "run")
        directory.create()
        directory.write_resolved({"manifest": to_wire(run), "baseDirectory": "."})
        plan = plan_model(run.training.model, base_directory=tmp_path, vocab_size=257)
        model = build_model(plan, seed=0, precision="fp32")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn_like(parameter))
        state = {f"model.{name}": tensor for name, tensor in module_tensors(model).items()}
        if ema is not None:
            # Twice the weights, so that the two can be distinguished.
            state |= {f"ema.{name}": 2 * tensor.float() for name, tensor in state.items()}
        frozen = hash_frozen(Modules({"model": model}))
        save_sharded(directory.checkpoints, state, ranks=ranks, frozen=frozen)
        return directory.path, model

    return make


def read_directory(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize(
    "config", [LLAMA, {**LLAMA, "tie_word_embeddings": True}, GPT2, MIXTRAL]
)
def test_an_export_equals_what_transformers_would_save(
    make_run: MakeRun, tmp_path: Path, config: dict[str, Any]
) -> None:
    run, model = make_run(config)
    result = export.export_checkpoint(run, step=None, output=tmp_path / "ours", dtype=None)
    model.config.use_cache = True
    # In the place of the architecture's own: what the byte tokenizer ends a document with.
    model.config.eos_token_id, model.config.bos_token_id = 256, None
    settings = model.generation_config
    settings.eos_token_id, settings.bos_token_id, settings.pad_token_id = 256, None, 256
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = read_directory(tmp_path / "ours"), read_directory(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "ours" / name).read_text()) == json.loads(
            (tmp_path / "theirs" / name).read_text()
        )
    assert (result.step, result.dtype) == (10, "float32")
    assert result.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_weights_are_converted_and_split_into_files_with_an_index(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model = make_run(LLAMA)
    monkeypatch.setattr(export, "_MAX_FILE_BYTES", 20_000)
    export.export_checkpoint(run, step=10, output=tmp_path / "ours", dtype="bfloat16")
    model.bfloat16().save_pretrained(tmp_path / "theirs", max_shard_size=20_000)
    ours, theirs = read_directory(tmp_path / "ours"), read_directory(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    expected = json.loads(
        (tmp_path / "theirs" / "model.safetensors.index.json").read_text()
    )
    assert index["metadata"] == expected["metadata"]
    assert (
        set(index["weight_map"]) == set(ours) and len(set(index["weight_map"].values())) > 1
    )

    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert all(
        torch.equal(tensor, module_tensors(model)[name])
        for name, tensor in module_tensors(loaded).items()
    )


def test_an_export_of_a_damaged_checkpoint_or_to_an_existing_directory_leaves_nothing(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run, _ = make_run(LLAMA)
    (tmp_path / "taken").mkdir()
    with pytest.raises(RunDirectoryError, match="exists already"):
        export.export_checkpoint(run, step=None, output=tmp_path / "taken", dtype=None)
    (run / "checkpoints" / "step-10" / "rank-00001.bin").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"file rank-00001\.bin"):
        export.export_checkpoint(run, step=None, output=tmp_path / "ours", dtype=None)
    assert [path.name for path in tmp_path.iterdir() if "ours" in path.name] == []


def test_a_training_run_does_not_retire_a_checkpoint_that_is_being_exported(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model = make_run(LLAMA)
    checkpoints = run / "checkpoints"
    open_store(checkpoints).catalog.write_pointer(LATEST, "step-10", Version(10, 1, 1))
    leased = []

    def watch(checkpoint: Path, **options: Any) -> Any:
        leased.append(find_leased(checkpoints, now=time.time()))
        return open_tensors(checkpoint, **options)

    monkeypatch.setattr(export, "open_tensors", watch)
    export.export_checkpoint(run, step=None, output=tmp_path / "ours", dtype=None)
    assert leased == [{"step-10"}]
    assert find_leased(checkpoints, now=time.time()) == set()
    assert read_directory(tmp_path / "ours").keys() == module_tensors(model).keys()


def test_a_full_disk_is_an_error_of_the_output_and_a_lost_shard_of_the_checkpoint(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run(LLAMA)
    output = tmp_path / "ours"

    def fill_up(descriptor: int, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_files, "write_all", fill_up)
        with pytest.raises(
            VolumeError, match=f"{output}: cannot be written; No space left"
        ):
            export.export_checkpoint(run, step=None, output=output, dtype=None)

    def lose_shard(
        directory: Path, forms: Any, read: Callable[[str], torch.Tensor], **options: Any
    ) -> None:
        (run / "checkpoints" / "step-10" / "rank-00002.bin").unlink()
        for name in forms:
            read(name)

    monkeypatch.setattr(export, "write_weights", lose_shard)
    with pytest.raises(
        CheckpointError, match=r"step-10: cannot be loaded; file rank-00002\.bin"
    ):
        export.export_checkpoint(run, step=None, output=output, dtype=None)
    assert [path.name for path in tmp_path.iterdir() if "ours" in path.name] == []


PEAKS = """
import resource, sys
from pathlib import Path
from evergrad_trainer.export import export_checkpoint

small, large, output = map(Path, sys.argv[1:])
peaks = []
for number, run in enumerate((small, large)):
    export_checkpoint(run, step=None, output=output / str(number), dtype="bfloat16")
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(*peaks)
"""


@pytest.mark.long
def test_the_memory_of_an_export_does_not_grow_with_the_model(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """The peak of a process that exports a small model and then a large one: the first has all imports."""
    small, _ = make_run(LLAMA)
    small = small.rename(tmp_path / "small")
    wide = {**LLAMA, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10}
    large, model = make_run(wide)
    size = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert size > 150e6 and largest < 5e6
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, str(small), str(large), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = map(int, done.stdout.split())
    # One tensor at a time, in two types, and buffers; the whole in bfloat16 would be half of the size.
    assert after - before < size / 4


def test_a_dtype_that_the_files_cannot_have_is_reported_before_anything_is_written(
    tmp_path: Path,
) -> None:
    forms = {
        "whole": safetensors_files.TensorForm(torch.float32, (2,)),
        "phase": safetensors_files.TensorForm(torch.complex64, (2,)),
    }
    with pytest.raises(ModelError, match=r"phase: cannot be written as torch\.complex64"):
        safetensors_files.write_weights(
            tmp_path, forms, lambda name: torch.zeros(2), num_parameters=4, max_file_bytes=8
        )
    assert list(tmp_path.iterdir()) == []


IDS = torch.arange(12).view(1, 12)


@pytest.mark.capability("A-40")
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_adapters_are_merged_into_a_model_that_any_tool_can_read(
    make_run: MakeRun, tmp_path: Path, config: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    run, model = make_run(config, lora={"rank": 2, "alpha": 0.5})
    result = export.export_checkpoint(run, step=None, output=tmp_path / "ours", dtype=None)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto").eval()
    assert not [name for name in read_directory(tmp_path / "ours") if "lora" in name]
    assert result.parameters == sum(one.numel() for one in merged.parameters())
    torch.testing.assert_close(
        merged(IDS).logits, model.eval()(IDS).logits, rtol=1e-3, atol=1e-4
    )


def test_a_merge_is_rounded_to_the_requested_dtype(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run, model = make_run(LLAMA, lora={"rank": 2, "baseDtype": "bf16"})
    export.export_checkpoint(run, step=None, output=tmp_path / "ours", dtype="float32")
    layer = model.model.layers[0].self_attn.q_proj
    added = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 2.0
    expected = layer.base_layer.weight.float() + added
    found = read_directory(tmp_path / "ours")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(found, expected.detach())


# peft asks transformers for a property by its former name.
@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)
def test_exported_adapters_can_be_read_by_peft_with_their_base(
    make_run: MakeRun, tmp_path: Path
) -> None:
    from peft import PeftModel

    run, model = make_run(LLAMA, lora={"rank": 2, "targetModules": ["q_proj", "up_proj"]})
    base_plan = plan_model(
        Model.model_validate({"config": LLAMA}), base_directory=tmp_path, vocab_size=257
    )
    base = build_model(base_plan, seed=0, precision="fp32")
    result = export.export_checkpoint(
        run, step=10, output=tmp_path / "ours", dtype=None, is_adapter=True
    )
    loaded = PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    assert torch.equal(loaded(input_ids=IDS).logits, model.eval()(IDS).logits)
    assert result.parameters == sum(
        one.numel() for one in model.parameters() if one.requires_grad
    )
    assert not (tmp_path / "ours" / "model.safetensors").exists()


def test_a_merge_with_another_base_than_the_trained_one_is_refused(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run, _ = make_run(LLAMA, lora={"rank": 2})
    resolved = json.loads((run / "run.json").read_text())
    resolved["manifest"]["spec"]["training"]["reproducibility"]["seed"] = 1
    (run / "run.json").write_text(json.dumps(resolved))
    with pytest.raises(CheckpointError, match="trained with other weights"):
        export.export_checkpoint(run, step=None, output=tmp_path / "ours", dtype=None)
    assert not (tmp_path / "ours").exists()


def test_the_average_is_exported_on_request(make_run: MakeRun, tmp_path: Path) -> None:
    run, model = make_run(LLAMA, ema={"decay": 0.5})
    for weights, factor in (("trained", 1), ("average", 2)):
        output = tmp_path / weights
        export.export_checkpoint(run, step=None, output=output, dtype=None, weights=weights)
        found = read_directory(output)
        tensors = module_tensors(model)
        assert all(torch.equal(found[name], factor * tensors[name]) for name in found)


def test_parts_that_a_run_does_not_have_are_not_exported(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run, _ = make_run(LLAMA)
    options: dict[str, Any] = {"step": None, "output": tmp_path / "ours", "dtype": None}
    with pytest.raises(
        RunDirectoryError, match=r"model\.lora is not set\. Leave --adapter out"
    ):
        export.export_checkpoint(run, **options, is_adapter=True)
    with pytest.raises(RunDirectoryError, match=r"ema is not set\. Use --weights trained"):
        export.export_checkpoint(run, **options, weights="average")


def test_a_run_without_a_trained_model_has_nothing_to_export(tmp_path: Path) -> None:
    run = from_wire(
        {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "edits"},
            "spec": {"training": training_on_edits()},
        }
    )
    directory = RunDirectory(tmp_path / "edits")
    directory.create()
    directory.write_resolved({"manifest": to_wire(run), "baseDirectory": "."})
    with pytest.raises(
        RunDirectoryError,
        match=r"edits: recipe latent_edit trains no model .*; the file's model is the encoder",
    ):
        export.export_checkpoint(
            directory.path, step=None, output=tmp_path / "ours", dtype=None
        )
