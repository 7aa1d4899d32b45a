"""Real gloo groups that end badly: frozen peers, failed set-ups, operations that never end.

A function is a process.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_helpers import Functions, Process, until
from patience import PATIENCE
from torch.distributed import TCPStore

from bed.process_state import is_alive
from evergrad_trainer.base import torch_private
from evergrad_trainer.base.errors import PeerLostError
from evergrad_trainer.distributed.process_groups import Place, abandon_world, form_world
from evergrad_trainer.distributed.transports import GlooTransport
from evergrad_trainer.distributed.world import Interrupt, World
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.worker.channel import WorkerGo, WorkerPlan, channel_pair
from evergrad_trainer.worker.watchdog import Watchdog
from evergrad_trainer.worker.worlds import SupervisedWorlds

CPU = torch.device("cpu")
TIMEOUT = 6 * PATIENCE
"""Timeout of the collectives: a rank that returns earlier was freed, and did not wait."""
SOON = 2 * PATIENCE
_kept: list[object] = []
"""Ends of channels: a watchdog whose supervisor has exited ends its process."""


@pytest.fixture
def functions(tmp_path: Path) -> Iterator[Functions]:
    started = Functions(tmp_path)
    yield started
    started.close()


def host(ports: list[str]) -> None:
    """Stores of several generations, until this process is killed."""
    stores = []
    for path in ports:
        stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        Path(f"{path}.new").write_text(str(stores[-1].port))
        Path(f"{path}.new").rename(path)
    time.sleep(TIMEOUT * 4)


def form_group(
    ports: list[str],
    generation: int,
    *,
    rank: int,
    size: int,
    interrupt: Interrupt,
    setup_seconds: float = 100,
) -> World:
    path = Path(ports[generation])
    until(path.exists, "the store")
    place = Place(generation, rank, size, "127.0.0.1", int(path.read_text()))
    return form_world(
        place,
        device=CPU,
        transport=GlooTransport(),
        interrupt=interrupt,
        setup_seconds=setup_seconds,
        timeout_seconds=TIMEOUT,
    )


def start_group(
    functions: Functions,
    function: Callable[..., Any],
    *,
    size: int,
    generations: int,
    **params: Any,
) -> list[Process]:
    ports = [str(functions.path / f"port-{number}") for number in range(generations)]
    functions.start(host, ports=ports)
    return [
        functions.start(function, ports=ports, rank=rank, size=size, **params)
        for rank in range(size)
    ]


def total_of(world: World, *, value: float, numel: int = 1 << 20) -> float:
    values = torch.full((numel,), value)
    world.wait(world.start_sum(values))
    assert bool((values == values[0]).all())
    return float(values[0])


def lose_a_frozen_peer(
    ports: list[str], rank: int, size: int, hears: bool
) -> dict[str, Any]:
    """The last rank is frozen within the group; the others receive a message (or, without ``hears``, only
    abort the group) and continue."""
    supervisor, end = channel_pair()
    _kept.append(supervisor)
    watchdog = Watchdog(end)
    watchdog.start()
    interrupt = Interrupt()
    watchdog.enter(0, interrupt)
    world = form_group(ports, 0, rank=rank, size=size, interrupt=interrupt)
    assert total_of(world, value=1.0) == size
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if hears:
        threading.Timer(0.5, lambda: supervisor.send(WorkerPlan(1, hard=True))).start()
    else:
        threading.Timer(0.5, interrupt.set).start()
    begun = time.monotonic()
    with pytest.raises(PeerLostError):
        for _ in range(3):
            total_of(world, value=1.0)
    was_leaked = abandon_world(world, GlooTransport())
    watchdog.leave()
    supervisor.send(WorkerGo(1, rank, size - 1, "", 0, 1.0, cause=""))
    if hears:
        watchdog.await_order(step=1)
    interrupt = Interrupt()
    watchdog.enter(1, interrupt)
    world = form_group(ports, 1, rank=rank, size=size - 1, interrupt=interrupt)
    total = total_of(world, value=2.0)
    seconds = time.monotonic() - begun
    world.barrier()
    return {"seconds": seconds, "total": total, "was_leaked": was_leaked}


@pytest.mark.parametrize("hears", [True, False], ids=["cut", "leaked without a cut"])
def test_a_frozen_peer_blocks_no_other_and_the_rest_form_the_next_group(
    functions: Functions, hears: bool
) -> None:
    *survivors, frozen = start_group(
        functions, lose_a_frozen_peer, size=3, generations=2, hears=hears
    )
    results = [functions.result(process) for process in survivors]
    assert [result["total"] for result in results] == [4.0, 4.0]
    assert all(result["seconds"] < SOON < TIMEOUT for result in results), results
    assert is_alive(frozen.pid)
    if not hears:
        assert all(result["was_leaked"] for result in results), (
            "without a cut the sums cannot have ended"
        )


_OPEN: list[object] = []


def keep_an_own_connection(
    ports: list[str], rank: int, size: int, directory: str
) -> dict[str, Any]:
    """A connection of a plug-in, opened while the group trains; then the last rank exits, and the world is
    changed in process."""
    supervisor, end = channel_pair()
    watchdog = Watchdog(end)
    watchdog.start()
    run_directory = RunDirectory(Path(directory))
    run_directory.create()
    worlds = SupervisedWorlds(watchdog, end, run_directory, timeout_seconds=TIMEOUT)

    def form_next_group(generation: int, *, size: int) -> World:
        path = Path(ports[generation])
        until(path.exists, "the store")
        port = int(path.read_text())
        begin = WorkerGo(generation, rank, size, "127.0.0.1", port, 100.0, cause="test")
        return worlds.meet(begin, World(0, rank=0, size=1, device=CPU))

    world = form_next_group(1, size=size)
    assert total_of(world, value=1.0) == size
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as own,
        server.accept()[0] as service,
    ):
        supervisor.send(WorkerPlan(2, hard=True))
        with pytest.raises(PeerLostError):
            for _ in range(3):
                total_of(world, value=1.0)
        worlds.cut()
        worlds.leave(world)
        world = form_next_group(2, size=size - 1)
        total = total_of(world, value=2.0)
        own.settimeout(SOON)
        service.sendall(b"still here")
        heard = own.recv(100).decode()
        world.barrier()
    # Its end would end this process before the result is accepted.
    _OPEN.append(supervisor)
    return {"heard": heard, "total": total}


def test_a_connection_of_a_plug_in_survives_a_hard_change(
    functions: Functions, tmp_path: Path
) -> None:
    *survivors, _ = start_group(
        functions,
        keep_an_own_connection,
        size=3,
        generations=3,
        directory=str(tmp_path / "run"),
    )
    results = [functions.result(process) for process in survivors]
    assert results == [{"heard": "still here", "total": 4.0}] * 2


def feed_a_frozen_peer(ports: list[str], rank: int, size: int) -> float:
    """Rank 1 is frozen instead of receiving from rank 0."""
    interrupt = Interrupt()
    world = form_group(ports, 0, rank=rank, size=size, interrupt=interrupt)
    world.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Timer(0.5, interrupt.set).start()
    begun = time.monotonic()
    with pytest.raises(PeerLostError):
        for _ in range(8):
            world.send(torch.zeros(1 << 22), to=1)
    abandon_world(world, GlooTransport())
    return time.monotonic() - begun


def test_a_source_is_not_blocked_by_a_frozen_receiver(
    functions: Functions,
) -> None:
    source, _ = start_group(functions, feed_a_frozen_peer, size=2, generations=1)
    assert functions.result(source) < SOON


def fail_once_then_form_group(ports: list[str], rank: int, size: int) -> list[int]:
    """Rank 0 finds no peer at first, and rank 1 is a new process. They connect nevertheless."""
    counted = -1
    if rank == 0:
        with pytest.raises(PeerLostError, match="generation 0 did not form"):
            form_group(ports, 0, rank=0, size=size, interrupt=Interrupt(), setup_seconds=1)
        counted = torch_private.group_state()[0]
        abandon_world(None, GlooTransport())
    world = form_group(ports, 1, rank=rank, size=size, interrupt=Interrupt())
    total = int(total_of(world, value=1.0))
    world.barrier()
    return [counted, total]


def test_after_a_failed_setup_a_process_can_join_new_ones(
    functions: Functions,
) -> None:
    processes = start_group(functions, fail_once_then_form_group, size=2, generations=2)
    (counted, total), (_, other_total) = (
        functions.result(process) for process in processes
    )
    assert total == other_total == 2
    assert counted == 1, (
        "this torch resets the counter by itself: reset_group_counter is not needed any more"
    )


def change_a_hundred_times(ports: list[str], rank: int, size: int) -> list[list[int]]:
    """Groups of all ranks, one after the other, each taken down as after a loss; descriptors and threads now
    and then."""
    counts = []
    for generation in range(len(ports)):
        world = form_group(
            ports,
            generation,
            rank=(rank + generation) % size,
            size=size,
            interrupt=Interrupt(),
        )
        assert total_of(world, value=1.0, numel=1000) == size
        world.barrier()
        abandon_world(world, GlooTransport())
        if generation % 10 == 9:
            counts.append([len(os.listdir("/proc/self/fd")), threading.active_count()])
    return counts


def test_descriptors_and_threads_do_not_grow_over_many_groups(functions: Functions) -> None:
    processes = start_group(functions, change_a_hundred_times, size=2, generations=50)
    for process in processes:
        counts = functions.result(process)
        assert counts[-1][1] <= counts[0][1] and counts[-1][0] <= counts[0][0] + 2, counts
