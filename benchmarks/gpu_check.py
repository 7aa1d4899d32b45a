"""``make gpu-check``: what can only be seen on an accelerator, each part in a process of its own.

Writes ``results/gpu.json`` and ``results/gpu.md``. Exit code: 0 all parts passed, 1 one did not, 69 there is
no accelerator here, and nothing was checked. ``--device cpu`` runs the same parts on the CPU with tiny models
and gloo, which tests this program and says nothing about accelerators.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import Row

RESULTS = Path(__file__).with_name("results")
NO_DEVICE = 69
"""sysexits' EX_UNAVAILABLE."""
_PART_SECONDS = 1800
_PREFIX = "gpu-check: "
"""Begins the line of a part's result; libraries may print before and after it."""


class CheckFailedError(Exception):
    """A part did not show what it must show."""


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise CheckFailedError(what)


# ---- parts: (device, is_tiny) -> rows ----------------------------------------------------------------------


def check_environment(device: str, is_tiny: bool) -> list[Row]:
    """Name, memory and versions; nothing can fail here but the device itself."""
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
    """The curve of each precision stays near that of fp32 on the CPU."""
    reference = _curve("cpu", "fp32", compiled=False)
    rows = []
    for precision, tolerance in {"fp32": 1e-3, "bf16-autocast": 0.02, "bf16": 0.05}.items():
        curve = _curve(device, precision, compiled=False)
        worst = max(abs(one - other) for one, other in zip(curve, reference, strict=True))
        rows.append(
            Row(
                "precision",
                f"{precision}: largest difference of a loss",
                worst,
                "nats",
            )
        )
        _require(
            worst < tolerance,
            f"{precision}: a loss differs by {worst:.3g} nats from fp32 on the CPU",
        )
    return rows


def check_compile(device: str, is_tiny: bool) -> list[Row]:
    """A compiled model has the same curve, and blocks that are alike share their graphs."""
    import torch

    plain = _curve(device, "bf16-autocast", compiled=False)
    torch._dynamo.utils.counters.clear()
    begun = time.perf_counter()
    compiled = _curve(device, "bf16-autocast", compiled=True)
    seconds = time.perf_counter() - begun
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    worst = max(abs(one - other) for one, other in zip(plain, compiled, strict=True))
    _require(worst < 0.02, f"a loss differs by {worst:.3g} nats between eager and compiled")
    _require(0 < graphs <= 2, f"{graphs} graphs were compiled for blocks that are alike")
    return [
        Row("compile", "largest difference of a loss", worst, "nats"),
        Row("compile", "graphs", graphs, ""),
        Row("compile", "four steps with compilation", seconds, "s"),
    ]


def check_offload(device: str, is_tiny: bool) -> list[Row]:
    """Inputs of blocks that wait in host memory give the gradients of those that stay, and leave the
    device's memory."""
    import torch

    ids = torch.arange(256, device=device).reshape(1, 256)
    gradients, kept = {}, {}
    for mode in ("full", "offload"):
        machinery, stage = _build(
            device, "bf16-autocast", compiled=False, recomputation=mode
        )
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        with machinery.autocast():
            loss = machinery.loss_of({"input_ids": ids, "labels": ids}, stage).total / 256
        kept[mode] = (torch.cuda.memory_allocated() if device == "cuda" else 0) - before
        loss.backward()
        gradients[mode] = [one.grad.cpu() for one in machinery.model.parameters()]
    pairs = zip(gradients["full"], gradients["offload"], strict=True)
    differing = sum(not torch.equal(one, other) for one, other in pairs)
    _require(differing == 0, f"{differing} gradients have other bits with offload")
    if device != "cuda":
        return [Row("offload", "gradients with other bits", differing, "")]
    _require(
        kept["offload"] < kept["full"], f"a forward pass keeps bytes on the device: {kept}"
    )
    return [
        Row("offload", f"kept by a forward pass, {mode}", size / 2**20, "MiB")
        for mode, size in kept.items()
    ]


def check_fsdp2(device: str, is_tiny: bool) -> list[Row]:
    """FSDP2 in a world of one device: the same first loss as the whole model, gradients in fp32."""
    import torch
    import torch.distributed as dist

    from evergrad_trainer.models.deferred import defer_model
    from evergrad_trainer.models.parallel import Cut, Sharding, shard
    from evergrad_trainer.objectives.causal_lm import causal_lm_loss
    from evergrad_trainer.world import World

    _alone_in_a_group(device)
    where = torch.device(device)
    world = World(1, 0, 1, where, group=dist.group.WORLD)
    deferred = defer_model(_plan("10M"), seed=0, precision="bf16-autocast")
    _require(
        deferred is not None, "the model could not be built without memory for its weights"
    )
    assert deferred is not None  # noqa: S101 - for the type checker
    shard([Cut(deferred.model)], world, Sharding(precision="bf16-autocast"))
    deferred.materialise(where)
    ids = torch.arange(64, device=where).reshape(1, 64)
    loss = causal_lm_loss(deferred.model)(ids, ids) / 64
    loss.backward()
    types = {str(p.grad.dtype) for p in deferred.model.parameters() if p.grad is not None}
    _require(types == {"torch.float32"}, f"sharded gradients are {types}")
    expected = _curve("cpu", "fp32", compiled=False, steps=1)[0]
    difference = abs(float(loss.detach()) - expected)
    _require(
        difference < 0.05,
        f"the first loss differs by {difference:.3g} nats from a whole model's",
    )
    dist.destroy_process_group()
    return [Row("fsdp2", "difference of the first loss", difference, "nats")]


def check_world(device: str, is_tiny: bool) -> list[Row]:
    """Two processes sum a tensor; where they share a device NCCL may refuse, which is noted and
    no failure."""
    from elastic_nodes import free_port

    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, __file__, "--rank-of-world", device]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=300)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    result = next((line for line in output.splitlines() if line.startswith(_PREFIX)), None)
    _require(result is not None, "the first of two processes ended without a result")
    found = json.loads(str(result).removeprefix(_PREFIX))
    refused = found.get("refused", "")
    _require(
        bool(refused) or found["sum"] == 3.0, f"1 + 2 was summed to {found.get('sum')}"
    )
    note = f"refused: {refused}" if refused else ""
    return [
        Row(
            "world of two processes",
            "formed",
            float(not refused),
            "",
            note=note,
        )
    ]


def _be_rank_of_world(device: str) -> None:
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(where)
    try:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        values = torch.full((1 << 20,), float(rank + 1), device=where)
        dist.all_reduce(values)
        found: dict[str, Any] = {"sum": float(values.mean())}
    except (dist.DistBackendError, RuntimeError) as error:
        found = {"refused": str(error).splitlines()[0][:200]}
    print(_PREFIX + json.dumps(found), flush=True)
    os._exit(0)


def check_abort(device: str, is_tiny: bool) -> list[Row]:
    """Groups are aborted from another thread, twice over, and formed again in the same process."""
    import threading

    import torch
    import torch.distributed as dist

    from evergrad_trainer.transports import AsynchronousTransport, NcclTransport, Transport

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
        _require(float(values.mean()) == number + 1.0, f"group {number} summed wrongly")
        begun = time.perf_counter()
        given_up = threading.Thread(target=transport.give_up)
        given_up.start()
        given_up.join(30)
        _require(not given_up.is_alive(), "the abort did not return within 30 s")
        transport.close()
        seconds.append(time.perf_counter() - begun)
        _require(not dist.is_initialized(), "a group was left after the abort")
    return [
        Row(
            "abort and form again",
            "slowest abort of three",
            max(seconds),
            "s",
        )
    ]


def check_staging(device: str, is_tiny: bool) -> list[Row]:
    """A state is copied to the host with its bits, and how fast."""
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
        _require(
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


def check_speed(device: str, is_tiny: bool) -> list[Row]:
    """Tokens/s in bf16 beside a hand-written loop and transformers' Trainer."""
    import training_speed

    rows = []
    for parameters, shape in {"124M": (16, 1024), "1B": (8, 2048)}.items():
        # Compilation has a part of its own, and takes most of a tiny one's minutes.
        for compiled in (False,) if is_tiny else (False, True):
            setting = training_speed.Setting(
                precision="bf16-autocast",
                compiled=compiled,
                parameters="10M" if is_tiny else parameters,
                shape=(2, 64) if is_tiny else shape,
                device=device,
            )
            rows += training_speed.measure(setting, rounds=2 if is_tiny else 20)
        if is_tiny:
            break
    return rows


PARTS: dict[str, Callable[[str, bool], list[Row]]] = {
    "environment": check_environment,
    "precision": check_precisions,
    "compile": check_compile,
    "offload": check_offload,
    "fsdp2": check_fsdp2,
    "world": check_world,
    "abort": check_abort,
    "staging": check_staging,
    "speed": check_speed,
}


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
) -> list[float]:
    """Losses of some steps of the 10M model."""
    import torch

    machinery, stage = _build(device, precision, compiled=compiled)
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
    """The 10M model, built and compiled as a run builds it, and the stage that it trains."""
    import torch
    from common import build_training, open_without_data

    from evergrad_trainer.training.build import build_machinery
    from evergrad_trainer.world import World

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


# ---- the run of all parts ----------------------------------------------------------------------------------


def run_part(name: str, *, device: str, is_tiny: bool) -> dict[str, Any]:
    """One part in a process of its own: an error of a device spoils whatever the process does afterwards."""
    begun = time.perf_counter()
    command = [
        sys.executable,
        __file__,
        "--device",
        device,
        "--part",
        name,
        *(["--tiny"] if is_tiny else []),
    ]
    result: dict[str, Any] = {"passed": False, "rows": [], "error": ""}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_PART_SECONDS, check=False
        )
        lines = [line for line in ended.stdout.splitlines() if line.startswith(_PREFIX)]
        if lines:
            result |= json.loads(lines[-1].removeprefix(_PREFIX))
        else:
            result["error"] = f"ended with {ended.returncode}: {ended.stderr[-2000:]}"
    except subprocess.TimeoutExpired:
        result["error"] = f"did not end within {_PART_SECONDS} s"
    return {**result, "seconds": round(time.perf_counter() - begun, 1)}


def to_markdown(document: dict[str, Any]) -> str:
    """The results for people."""
    lines = [
        "# Checks on an accelerator",
        "",
        f"Written by `make gpu-check`, {document['taken']}, device {document['device']}.",
        "",
        "| part | result | seconds |",
        "|---|---|---:|",
    ]
    for name, part in document["parts"].items():
        verdict = (
            "passed" if part["passed"] else f"**failed**: {part['error'].splitlines()[-1]}"
        )
        lines.append(f"| {name} | {verdict} | {part['seconds']} |")
    lines += ["", "| what | figure | value | |", "|---|---|---:|---|"]
    for part in document["parts"].values():
        for row in part["rows"]:
            value = f"{row['value']:,.4g} {row['unit']}".strip()
            lines.append(f"| {row['what']} | {row['name']} | {value} | {row['note']} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run all parts, or those that were named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few rounds")
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help="where gpu.json and gpu.md are written",
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--rank-of-world",
        choices=("cuda", "cpu"),
        help=argparse.SUPPRESS,
    )
    options = parser.parse_args(arguments)
    if options.rank_of_world:
        _be_rank_of_world(options.rank_of_world)
    if options.part:
        found: dict[str, Any]
        try:
            rows = PARTS[options.part](options.device, options.tiny)
            found = {"passed": True, "rows": [asdict(row) for row in rows]}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this part's result
            found = {"error": f"{type(error).__name__}: {error}"}
        print(_PREFIX + json.dumps(found), flush=True)
        return 0

    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    from evergrad_trainer.distributed import count_accelerators

    if options.device == "cuda" and count_accelerators() == 0:
        print(
            "no cuda device is visible on this machine: nothing was checked",
            file=sys.stderr,
        )
        return NO_DEVICE
    document: dict[str, Any] = {
        "taken": time.strftime("%Y-%m-%d"),
        "device": options.device,
        "parts": {},
    }
    for name in options.parts or PARTS:
        print(f"== {time.strftime('%T')}  {name}", flush=True)
        part = document["parts"][name] = run_part(
            name, device=options.device, is_tiny=options.tiny
        )
        print("passed" if part["passed"] else f"failed: {part['error']}", flush=True)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "gpu.json").write_text(
        json.dumps(document, indent=1) + "\n", encoding="utf-8"
    )
    (options.results / "gpu.md").write_text(to_markdown(document), encoding="utf-8")
    return 0 if all(part["passed"] for part in document["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
