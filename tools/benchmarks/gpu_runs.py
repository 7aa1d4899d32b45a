"""The parts of ``gpu_check.py`` that are whole runs on the device: a run that is stopped and resumed, runs
with lost nodes, and the memory of a step compared with the calculated memory."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import elastic_nodes
import recovery_inprocess
from common import Row, build_training, manifest, open_without_data, write_documents
from elastic_nodes import (
    ElasticNodes,
    NodesSettings,
    Step,
    Steps,
    running,
    training_manifest,
)
from gpu_parts import require

_SECONDS = 120
"""Time limit for a step or a command."""
_CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_LOG_CHARACTERS = 3000


def check_run(device: str, is_tiny: bool) -> list[Row]:
    """Check that a run stopped by SIGTERM and resumed has the same bits as an undisturbed run."""
    with tempfile.TemporaryDirectory(prefix="evergrad-gpu-") as name:
        folder = Path(name)
        document = manifest("gpu", shape=(2, 64) if is_tiny else (8, 256))
        training = document["spec"]["training"]
        training["horizon"] = {"steps": 12 if is_tiny else 60}
        training["checkpoint"] = {"every": {"steps": 1000}}
        training["reproducibility"] = {"deterministic": True}
        training["runtime"] |= {
            "device": device,
            "precision": "bf16-autocast",
            "compile": "auto",
        }
        write_documents(folder / "documents.jsonl")
        (folder / "run.yaml").write_text(json.dumps(document), encoding="utf-8")
        whole = _run(folder, "whole")
        before = time.time()
        stopped = _run(folder, "resumed", stop_at=5)
        require(stopped == 75, f"a run that was asked to stop ended with {stopped}")
        rows = Steps(folder / "resumed" / "metrics.jsonl")
        rows.read()
        last, first = rows.rows[-1]["step"], rows.rows[0]["time"] - before
        before = time.time()
        resumed = _run(folder, "resumed")
        require((whole, resumed) == (0, 0), f"the runs ended with {whole} and {resumed}")
        rows.read()
        again = next(row["time"] for row in rows.rows if row["step"] > last) - before
        compared = subprocess.run(
            [*_EVERGRAD, "compare-runs", "whole", "resumed", "--exact", "--state"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        require(
            compared.returncode == 0,
            f"{compared.stdout}{compared.stderr}"[-_LOG_CHARACTERS:],
        )
        what = "evergrad run, deterministic, compile auto"
        return [
            Row(what, "stopped and resumed: other bits", 0.0, "", note=f"at step {last}"),
            Row(what, "start to the first step", first, "s"),
            Row(what, "resume to the first new step", again, "s"),
        ]


_EVERGRAD = [sys.executable, "-m", "evergrad_cli"]


def _run(folder: Path, name: str, *, stop_at: int | None = None) -> int:
    """Train into ``name``; with ``stop_at``, send SIGTERM after that step. Returns the exit code."""
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [*_EVERGRAD, "run", "run.yaml", "--run-directory", name],
            cwd=folder,
            env={**os.environ, **_CUBLAS},
            stdout=log,
            stderr=log,
        )
    try:
        if stop_at is not None:
            Steps(folder / name / "metrics.jsonl").wait(
                lambda row: row["step"] >= stop_at,
                f"step {stop_at}",
                check=lambda: require(
                    process.poll() is None, _tail(folder / f"{name}.log")
                ),
            )
            process.send_signal(signal.SIGTERM)
        code = process.wait(_SECONDS)
    finally:
        process.kill()
        process.wait()
    require(code in (0, 75), f"ended with {code}: {_tail(folder / f'{name}.log')}")
    return code


def check_recovery(device: str, is_tiny: bool) -> list[Row]:
    """Kill one of three nodes, add a node, kill a worker, and request a node to leave. Sums are exact, so
    each loss has the same bits as in an undisturbed run on a single node."""
    os.environ |= _CUBLAS
    elastic_nodes.WAIT_SECONDS = _SECONDS
    elastic_nodes.warm_up_this_process()
    document = training_manifest(num_nodes=recovery_inprocess.NUM_NODES, is_tiny=is_tiny)
    training = document["spec"]["training"]
    training["reproducibility"] = {"elastic": "exact"}
    training["runtime"] |= {"device": device, "precision": "bf16-autocast"}
    with tempfile.TemporaryDirectory(prefix="evergrad-gpu-") as name:
        disturbed, taken = _disturb(Path(name) / "three", document)
        quiet = ElasticNodes(NodesSettings(Path(name) / "one", document, 1))
        last = disturbed[-1]["step"]
        with running(quiet, num_nodes=1):
            quiet.steps.wait(lambda row: row["step"] >= last, f"step {last} of one node")
        expected = {row["step"]: row["loss"] for row in quiet.steps.rows}
    others = [row["step"] for row in disturbed if row["loss"] != expected[row["step"]]]
    require(not others, f"steps with another loss than an undisturbed run's: {others}")
    sizes = sorted({row["world_size"] for row in disturbed})
    what = f"three nodes on one device, {'NCCL' if device == 'cuda' else 'gloo'}"
    return [
        Row(
            what, "losses with other bits", 0.0, "", note=f"{last} steps, worlds of {sizes}"
        ),
        *[
            Row(what, label, seconds, "s", note=note)
            for label, (seconds, note) in taken.items()
        ],
    ]


def _disturb(
    folder: Path, document: dict[str, Any]
) -> tuple[list[Step], dict[str, tuple[float, str]]]:
    """Return all finished steps, and the seconds of each event."""
    nodes = ElasticNodes(NodesSettings(folder, document, recovery_inprocess.NUM_NODES))
    try:
        with running(nodes, num_nodes=recovery_inprocess.NUM_NODES) as first:
            steps = nodes.steps.wait_further(first, 4)
            killed = recovery_inprocess.kill_node(nodes, 0)
            joined = recovery_inprocess.rejoin(nodes, 0)
            crashed = recovery_inprocess.kill_worker(nodes, 1, step_seconds=0.0)
            left = recovery_inprocess.ask_to_leave(nodes, 2)
            nodes.steps.read()
    except Exception as error:
        logs = "\n".join(_tail(folder / name) for name in ("nodes.log", "coordinator.log"))
        raise RuntimeError(f"{error}\n{logs}") from error
    step = statistics.median(steps)
    return nodes.steps.rows, {
        "an undisturbed step of three": (step, ""),
        "SIGKILL of a node to the next step": (
            killed["seconds"],
            f"{killed['steps_lost']} steps trained again",
        ),
        "a node joins: the others stand still": (joined["pause_seconds"], ""),
        "SIGKILL of a worker to the next step": (
            crashed["seconds"],
            f"in a world of {crashed['world_size']}",
        ),
        "SIGTERM of a node: the others stand still": (left["pause_seconds"], ""),
    }


def check_memory(device: str, is_tiny: bool) -> list[Row]:
    """Compare the peak memory of a step with the memory that preflight calculates."""
    import torch

    from evergrad_trainer.models.build import plan_model
    from evergrad_trainer.models.memory import memory_of
    from evergrad_trainer.preflight.memory import model_facts

    rows = []
    for parameters, shape in {"124M": (16, 1024), "1B": (4, 2048)}.items():
        if is_tiny:
            parameters, shape = "10M", (2, 64)
        for mode in ("none", "selective", "full", "offload"):
            training = build_training(
                precision="bf16-autocast", parameters=parameters, shape=shape
            )
            runtime = training.runtime.model_copy(update={"activation_checkpointing": mode})
            training = training.model_copy(update={"runtime": runtime})
            plan = plan_model(training.model, base_directory=Path(), vocab_size=257)
            need = memory_of(
                model_facts(plan),
                training,
                world_size=1,
                on_accelerator=device == "cuda",
                compiles=False,
            )
            calculated = (need.total - need.fixed) / 2**30
            peak, fixed = _peak_of_steps(training, device)
            what = (
                f"memory of a step, {parameters} Llama, {shape[0] // 2} x {shape[1]} tokens"
            )
            note = f"calculated {calculated:.2f}; held besides by driver and kernels {fixed:.2f}"
            rows.append(
                Row(what, f"activationCheckpointing {mode}", peak, "GiB", note=note)
            )
            if device == "cuda":
                rows.append(
                    Row(what, f"{mode}: measured / calculated", peak / calculated, "ratio")
                )
                torch.cuda.empty_cache()
        if is_tiny:
            break
    return rows


def _peak_of_steps(training: Any, device: str) -> tuple[float, float]:
    """Return the peak GiB of tensors in three steps, and the additional GiB of the process; zeros on a
    CPU."""
    import gc

    import torch

    from evergrad_trainer.distributed.world import World
    from evergrad_trainer.models.build import plan_model
    from evergrad_trainer.training.build import build_machinery

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    opened = open_without_data(training)
    plan = plan_model(training.model, base_directory=Path(), vocab_size=257)
    world = World(1, 0, 1, torch.device(device))
    machinery = build_machinery(training, opened, plan, world, with_weights=True)
    samples, length = training.batching.micro_batch_size, training.data.sequence_length
    ids = torch.arange(samples * length, device=device).reshape(samples, length) % 257
    for _ in range(3):
        for _ in range(2):
            with machinery.autocast():
                loss = machinery.loss_of(
                    {"input_ids": ids, "labels": ids}, opened.data.train.stages[0]
                )
            (loss.total / ids.numel()).backward()
            del loss
        machinery.optimizer.step()
        machinery.optimizer.zero_grad()
    if device != "cuda":
        return 0.0, 0.0
    free, total = torch.cuda.mem_get_info()
    peak, fixed = (
        torch.cuda.max_memory_allocated(),
        total - free - torch.cuda.memory_reserved(),
    )
    del machinery, ids
    gc.collect()
    return peak / 2**30, fixed / 2**30


def _tail(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return f"{path.name}: {text[-_LOG_CHARACTERS:]}"
