"""Share of the gradient reduction that is hidden behind the backward pass, in a world of two.

Measures three ways to compile: not at all, block by block like the trainer, and the whole model as one graph.

``measure`` starts this file twice, as the two ranks. Two processes hold the 10M Llama and sum its gradients
in the trainer's own buckets. Two kinds of steps alternate: one begins each sum as soon as its gradients
exist, the other begins all sums after the backward pass. The exposed share is the wait after the backward
pass in the first kind, divided by the wait in the second kind; the rest is hidden.

There are two links: gloo over this machine's loopback, whose work uses the same cores as the backward pass,
and a simulated link, which uses no core and moves nothing, but lets a bucket arrive when a link of fixed
bandwidth would have delivered it (the whole sum takes half of a backward pass).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Row, interval_of_median, model_config, print_rows

_LENGTH, _SAMPLES = 256, 2
_WARM_UP = 2
MODES = ("off", "blocks", "whole")
"""Ways to compile: none, block by block like the trainer, and the whole model as one graph, as in earlier
versions."""


def measure(*, rounds: int = 12, modes: tuple[str, ...] = MODES) -> list[Row]:
    """Return medians over steps of the hidden share, for each way to compile and each link."""
    rows = []
    for mode in modes:
        for link, turns in _both_ranks(mode, rounds).items():
            shares = [1 - under["wait"] / after["wait"] for under, after in turns]
            gains = [after["step"] / under["step"] for under, after in turns]
            begun, none_begun = (
                statistics.median(turn[index]["wait"] for turn in turns) * 1e3
                for index in range(2)
            )
            low, high = interval_of_median(shares)
            what = f"reduction under backward, 10M Llama, world 2, compile {mode}, {link}"
            rows += [
                Row(
                    what,
                    "hidden share",
                    statistics.median(shares),
                    "ratio",
                    goal=">= 0.7" if mode == "blocks" else "",
                    note=f"n={len(shares)}; 95 % interval {low:.2f} to {high:.2f}; waits "
                    f"{begun:.0f} ms, {none_begun:.0f} ms where nothing was begun",
                ),
                Row(
                    what,
                    "step, nothing begun / begun",
                    statistics.median(gains),
                    "ratio",
                ),
            ]
    return rows


def _both_ranks(
    mode: str, rounds: int
) -> dict[str, list[tuple[dict[str, float], dict[str, float]]]]:
    from elastic_nodes import free_port

    port = str(free_port())
    ranks = []
    for rank in range(2):
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = [sys.executable, __file__, "--rank", mode, "--rounds", str(rounds)]
        ranks.append(
            subprocess.Popen(
                command, env={**os.environ, **place}, stdout=subprocess.PIPE, text=True
            )
        )
    try:
        output, _ = ranks[0].communicate(timeout=900)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    found = next(line for line in output.splitlines() if line.startswith('{"gloo"'))
    result: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = json.loads(found)
    return result


def _paced_transport() -> Any:
    """Return a transport whose sums end one after another, when a link of ``seconds_per_byte`` would have
    finished."""
    from evergrad_trainer.distributed.transports import GlooTransport

    class Arrival:
        def __init__(self, due: float) -> None:
            self._due = due

        def is_completed(self) -> bool:
            return time.perf_counter() >= self._due

        def wait(self) -> None:
            time.sleep(max(0.0, self._due - time.perf_counter()))

    class PacedTransport(GlooTransport):
        seconds_per_byte = 0.0

        def __init__(self) -> None:
            self._free_from = 0.0

        def start_sum(self, values: Any, group: Any) -> Any:
            begun = max(self._free_from, time.perf_counter())
            self._free_from = (
                begun + values.numel() * values.element_size() * self.seconds_per_byte
            )
            return Arrival(self._free_from)

    return PacedTransport()


def _be_rank(mode: str, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from evergrad_trainer.distributed.transports import GlooTransport

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = _Steps(mode)
    paced = _paced_transport()
    links: dict[str, Callable[[], Any]] = {
        "gloo": GlooTransport,
        "paced link": lambda: paced,
    }

    # Run both kinds of steps in each round, in alternating order.
    results: dict[str, list[Any]] = {name: [] for name in links}
    for number in range(rounds + _WARM_UP):
        for name, make in links.items():
            turns = {}
            for is_begun_under in (True, False) if number % 2 else (False, True):
                dist.barrier()
                turns[is_begun_under] = steps.run(make(), is_begun_under=is_begun_under)
            results[name].append((turns[True], turns[False]))
            # Adapt the link to the current speed of the machine: a sum takes half of a backward pass.
            paced.seconds_per_byte = 0.5 * turns[False]["backward"] / steps.gradient_bytes

    if dist.get_rank() == 0:
        kept = {name: found[_WARM_UP:] for name, found in results.items()}
        print(json.dumps(kept), flush=True)
    dist.destroy_process_group()


class _Steps:
    """The 10M Llama, compiled in one of the MODES, and steps of it without an update."""

    def __init__(self, mode: str) -> None:
        import torch

        from evergrad_manifest.training import Model
        from evergrad_trainer.models.build import build_model, plan_model
        from evergrad_trainer.models.compilation import compile_blocks
        from evergrad_trainer.models.gradients import BucketedSum
        from evergrad_trainer.models.parallel import default_bucket_bytes
        from evergrad_trainer.objectives.causal_lm import causal_lm_loss

        config = Model.model_validate({"config": model_config()})
        plan = plan_model(config, base_directory=Path(), vocab_size=257)
        model = build_model(plan, seed=0, precision="fp32")
        if mode == "blocks":
            compile_blocks(model)
        self._loss_sum = causal_lm_loss(model)
        if mode == "whole":
            self._loss_sum = torch.compile(self._loss_sum, dynamic=False)

        parameters = list(model.parameters())
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in parameters)
        bucket_bytes = default_bucket_bytes(on_accelerator=False)
        self._gradients = BucketedSum(parameters, bucket_bytes=bucket_bytes)
        self._ids = torch.randint(0, 256, (_SAMPLES, _LENGTH))

    def run(self, transport: Any, *, is_begun_under: bool) -> dict[str, float]:
        """Return the seconds of a step, of its backward pass, and of the remaining wait."""
        import torch
        import torch.distributed as dist

        from evergrad_trainer.distributed.world import World

        world = World(
            1,
            dist.get_rank(),
            2,
            torch.device("cpu"),
            group=dist.group.WORLD,
            transport=transport,
        )
        self._gradients.begin(world)
        self._gradients.before_backward(is_last=is_begun_under)

        begun = time.perf_counter()
        loss = self._loss_sum(self._ids, self._ids)
        middle = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()

        # Let both ranks wait for each other first, because a late rank is not a cost of the reduction. If
        # sums began during the backward pass, the wait includes such delays, to the disadvantage of our
        # result.
        if not is_begun_under:
            dist.barrier()
        before = time.perf_counter()
        self._gradients.finish()
        after = time.perf_counter()
        return {
            "step": after - before + ended - begun,
            "backward": ended - middle,
            "wait": after - before,
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES)
    parser.add_argument("--rank", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _be_rank(options.rank, options.rounds)
    else:
        print_rows(measure(rounds=options.rounds, modes=tuple(options.modes)))
