"""The parts of ``gpu_check.py`` that need one or two processes: arithmetic, memory, groups and speed.

Each part is called as ``part(device, is_tiny)`` in its own process, and returns its rows. It raises
CheckFailedError if the device does not show the expected behaviour.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import Row

PREFIX = "gpu-check: "
"""Prefix of the line with a part's result, because libraries may print other lines."""
_WORLD_SECONDS = 60


class CheckFailedError(Exception):
    """A part did not show the expected behaviour."""


def require(is_right: bool, what: str) -> None:
    """Raise CheckFailedError with ``what`` unless ``is_right``."""
    if not is_right:
        raise CheckFailedError(what)


def check_environment(device: str, is_tiny: bool) -> list[Row]:
    """Report name, memory and versions. Only the device itself can fail here."""
    import torch

    rows = [Row("environment", "torch", 0.0, "", note=torch.__version__)]
    if device == "cuda":
        facts = torch.cuda.get_device_properties(0)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        rows += [
            Row(
                "environment",
                "devices",
                torch.cuda.device_count(),
                "",
                note=facts.name,
            ),
            Row("environment", "memory", facts.total_memory / 2**30, "GiB"),
            Row(
                "environment",
                "cuda",
                0.0,
                "",
                note=f"{torch.version.cuda}, NCCL {nccl}",
            ),
        ]
    return rows


def check_precisions(device: str, is_tiny: bool) -> list[Row]:
    """Check that each precision's loss curve stays near the fp32 curve on the CPU, from the same weights."""
    weights = _build("cpu", "fp32", compiled=False)[0].model.state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    reference = _curve("cpu", "fp32", compiled=False)
    rows = []
    for precision, tolerance in {"fp32": 1e-3, "bf16-autocast": 0.02, "bf16": 0.05}.items():
        # Start from the same weights: torch draws other numbers in another dtype, which would be another
        # model.
        curve = _curve(device, precision, compiled=False, weights=weights)
        worst = max(abs(one - other) for one, other in zip(curve, reference, strict=True))
        rows.append(
            Row(
                "precision",
                f"{precision}: largest difference of a loss",
                worst,
                "nats",
            )
        )
        require(
            worst < tolerance,
            f"{precision}: a loss differs by {worst:.3g} nats from fp32 on the CPU",
        )
    return rows


def check_compile(device: str, is_tiny: bool) -> list[Row]:
    """Check that a compiled model has the same curve, and that equal blocks share their graphs."""
    import torch

    plain = _curve(device, "bf16-autocast", compiled=False)
    torch._dynamo.utils.counters.clear()
    begun = time.perf_counter()
    compiled = _curve(device, "bf16-autocast", compiled=True)
    seconds = time.perf_counter() - begun
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    worst = max(abs(one - other) for one, other in zip(plain, compiled, strict=True))
    require(worst < 0.02, f"a loss differs by {worst:.3g} nats between eager and compiled")
    require(0 < graphs <= 2, f"{graphs} graphs were compiled for blocks that are alike")
    return [
        Row("compile", "largest difference of a loss", worst, "nats"),
        Row("compile", "graphs", graphs, ""),
        Row("compile", "four steps with compilation", seconds, "s"),
    ]


def check_offload(device: str, is_tiny: bool) -> list[Row]:
    """Check that inputs of blocks in host memory give the same gradients, and do not use the device's
    memory."""
    import torch

    ids = torch.arange(256, device=device).reshape(1, 256)
    gradients, kept = {}, {}
    for mode in ("full", "offload"):
        machinery, stage = _build(
            device, "bf16-autocast", compiled=False, recomputation=mode
        )
        # Reference cycles keep the model of the previous mode.
        gc.collect()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        with machinery.autocast():
            loss = machinery.loss_of({"input_ids": ids, "labels": ids}, stage).total / 256
        kept[mode] = (torch.cuda.memory_allocated() if device == "cuda" else 0) - before
        loss.backward()
        gradients[mode] = [one.grad.cpu() for one in machinery.model.parameters()]
    pairs = zip(gradients["full"], gradients["offload"], strict=True)
    differing = sum(not torch.equal(one, other) for one, other in pairs)
    require(differing == 0, f"{differing} gradients have other bits with offload")
    if device != "cuda":
        return [Row("offload", "gradients with other bits", differing, "")]
    require(
        kept["offload"] < kept["full"], f"a forward pass keeps bytes on the device: {kept}"
    )
    return [
        Row("offload", f"kept by a forward pass, {mode}", size / 2**20, "MiB")
        for mode, size in kept.items()
    ]


def check_fsdp2(device: str, is_tiny: bool) -> list[Row]:
    """Check FSDP2 in a world of one device: the same first loss as the whole model, and gradients in fp32."""
    import torch
    import torch.distributed as dist

    from evergrad_trainer.distributed.world import World
    from evergrad_trainer.models.deferred import defer_model
    from evergrad_trainer.models.parallel import Sharding, ShardPlan, shard
    from evergrad_trainer.objectives.causal_lm import causal_lm_loss

    _alone_in_a_group(device)
    where = torch.device(device)
    world = World(1, 0, 1, where, group=dist.group.WORLD)
    deferred = defer_model(_plan("10M"), seed=0, precision="bf16-autocast")
    require(
        deferred is not None, "the model could not be built without memory for its weights"
    )
    assert deferred is not None  # noqa: S101 - for the type checker
    shard([ShardPlan(deferred.model)], world, Sharding(precision="bf16-autocast"))
    deferred.materialise(where)
    ids = torch.arange(64, device=where).reshape(1, 64)
    loss = causal_lm_loss(deferred.model)(ids, ids) / 64
    loss.backward()
    types = {str(p.grad.dtype) for p in deferred.model.parameters() if p.grad is not None}
    require(types == {"torch.float32"}, f"sharded gradients are {types}")
    expected = _curve("cpu", "fp32", compiled=False, steps=1)[0]
    difference = abs(float(loss.detach()) - expected)
    require(
        difference < 0.05,
        f"the first loss differs by {difference:.3g} nats from a whole model's",
    )
    dist.destroy_process_group()
    return [Row("fsdp2", "difference of the first loss", difference, "nats")]


def check_world(device: str, is_tiny: bool) -> list[Row]:
    """Let two processes sum a tensor: directly, which NCCL may refuse on one device, and as two hosts."""
    rows = []
    for name, as_hosts in (("as they are", False), ("as two hosts", True)):
        found = _sum_of_two(device, as_hosts=as_hosts)
        refused = found.get("refused", "")
        note = f"refused: {refused}" if refused else f"{found['seconds']:.3f} s for 4 MiB"
        rows.append(
            Row("world of two processes", name, float(not refused), "formed", note=note)
        )
        require(
            bool(refused) or found["sum"] == 3.0, f"1 + 2 was summed to {found.get('sum')}"
        )
    require(not refused, f"two processes form no world even as two hosts: {refused}")
    return rows


def _sum_of_two(device: str, *, as_hosts: bool) -> dict[str, Any]:
    """Let two processes sum a tensor. Returns ``sum`` and ``seconds`` of the first, or the reason
    ``refused``."""
    from elastic_nodes import be_host, free_port

    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(Path(__file__).with_name("gpu_check.py"))]
    command += ["--rank-of-world", device]
    ranks = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                **place,
                "RANK": str(rank),
                **(be_host(rank) if as_hosts else {}),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=_WORLD_SECONDS)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    result = next((line for line in output.splitlines() if line.startswith(PREFIX)), None)
    require(result is not None, "the first of two processes ended without a result")
    found: dict[str, Any] = json.loads(str(result).removeprefix(PREFIX))
    return found


def be_rank_of_world(device: str) -> None:
    """Run one of the two processes, and exit."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(where)
    try:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        dist.all_reduce(torch.zeros(1, device=where))
        values = torch.full((1 << 20,), float(rank + 1), device=where)
        begun = time.perf_counter()
        dist.all_reduce(values)
        found: dict[str, Any] = {"sum": float(values.mean())}
        found["seconds"] = time.perf_counter() - begun
    except (dist.DistBackendError, RuntimeError) as error:
        found = {"refused": " ".join(str(error).split())[:400]}
    print(PREFIX + json.dumps(found), flush=True)
    os._exit(0)


def check_abort(device: str, is_tiny: bool) -> list[Row]:
    """Check that groups are aborted from another thread twice, and formed again in the same process."""
    import threading

    import torch
    import torch.distributed as dist

    from evergrad_trainer.distributed.transports import (
        AsynchronousTransport,
        NcclTransport,
        Transport,
    )

    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    seconds = []
    for number in range(3):
        transport: Transport = (
            NcclTransport(where) if device == "cuda" else AsynchronousTransport()
        )
        transport.prepare()
        _alone_in_a_group(device)
        transport.opened()
        values = torch.full((1 << 20,), float(number + 1), device=where)
        work = transport.start_sum(values, dist.group.WORLD)
        work.wait()
        transport.mark_started().wait()
        require(float(values.mean()) == number + 1.0, f"group {number} summed wrongly")
        begun = time.perf_counter()
        given_up = threading.Thread(target=transport.give_up)
        given_up.start()
        given_up.join(30)
        require(not given_up.is_alive(), "the abort did not return within 30 s")
        transport.close()
        seconds.append(time.perf_counter() - begun)
        require(not dist.is_initialized(), "a group was left after the abort")
    return [
        Row(
            "abort and form again",
            "slowest abort of three",
            max(seconds),
            "s",
        )
    ]


def check_staging(device: str, is_tiny: bool) -> list[Row]:
    """Check that a state is copied to the host bit by bit, and measure the speed."""
    import torch

    from evergrad_trainer.checkpoint.staging import HostStager

    size = (1 << 20) if is_tiny else (1 << 28)
    generator = torch.Generator().manual_seed(0)
    host = {name: torch.randn(size, generator=generator) for name in ("weights", "moments")}
    state = {name: value.to(device) for name, value in host.items()}
    stager = HostStager()
    stager.stage(state, rank=0, world_size=1)
    begun = time.perf_counter()
    snapshot = stager.stage(state, rank=0, world_size=1)
    seconds = time.perf_counter() - begun
    for name, value in host.items():
        require(
            torch.equal(snapshot.tensors[name].data, value),
            f"{name} was copied with other bits",
        )
    return [
        Row(
            "staging",
            "device to host",
            8 * size / seconds / 1e9,
            "GB/s",
        )
    ]


def check_speed(
    device: str, is_tiny: bool, *, parameters: str, is_compiled: bool
) -> list[Row]:
    """Measure tokens/s in bf16, compared with a hand-written loop and transformers' Trainer.

    All three are on the device at the same time: 35 GiB each with 1B parameters.
    """
    import training_speed

    shape = {"124M": (16, 1024), "1B": (8, 2048)}[parameters]
    setting = training_speed.Setting(
        precision="bf16-autocast",
        compiled=is_compiled,
        parameters="10M" if is_tiny else parameters,
        shape=(2, 64) if is_tiny else shape,
        device=device,
    )
    return training_speed.measure(setting, rounds=2 if is_tiny else 20)


def _plan(parameters: str) -> Any:
    from common import model_config

    from evergrad_manifest.training import Model
    from evergrad_trainer.models.build import plan_model

    model = Model.model_validate({"config": model_config(parameters)})
    return plan_model(model, base_directory=Path(), vocab_size=257)


def _curve(
    device: str,
    precision: str,
    *,
    compiled: bool,
    steps: int = 4,
    weights: Mapping[str, Any] | None = None,
) -> list[float]:
    """Return the losses of some steps of the 10M model, from its own initial weights or from ``weights``."""
    import torch

    machinery, stage = _build(device, precision, compiled=compiled)
    if weights is not None:
        machinery.model.load_state_dict(weights)
    ids = torch.arange(64, device=device).reshape(1, 64)
    batch = {"input_ids": ids, "labels": ids}
    losses = []
    for _ in range(steps):
        with machinery.autocast():
            loss = machinery.loss_of(batch, stage).total / 64
        loss.backward()
        machinery.optimizer.step()
        machinery.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _build(
    device: str, precision: str, *, compiled: bool, recomputation: str = "none"
) -> tuple[Any, Any]:
    """Return the 10M model, built and compiled as in a run, and the stage that it trains."""
    import torch
    from common import build_training, open_without_data

    from evergrad_trainer.distributed.world import World
    from evergrad_trainer.training.build import build_machinery

    training = build_training(precision=precision, compile_mode="on" if compiled else "off")
    runtime = training.runtime.model_copy(
        update={"activation_checkpointing": recomputation}
    )
    training = training.model_copy(update={"runtime": runtime})
    opened = open_without_data(training)
    world = World(1, 0, 1, torch.device(device))
    machinery = build_machinery(training, opened, _plan("10M"), world, with_weights=True)
    return machinery, opened.data.train.stages[0]


def _alone_in_a_group(device: str) -> None:
    import torch
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1
    )
