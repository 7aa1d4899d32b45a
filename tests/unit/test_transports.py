"""Each way of moving tensors: when its data are there, and how a process gets out of a group that was given
up."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from torch.distributed import FileStore

from evergrad_trainer.base import torch_private
from evergrad_trainer.base.errors import HostError, PeerLostError
from evergrad_trainer.distributed.process_groups import abandon_world
from evergrad_trainer.distributed.transports import (
    ENVIRONMENT_VARIABLE,
    AsynchronousTransport,
    GlooTransport,
    NcclTransport,
    Transport,
    choose_transport,
)
from evergrad_trainer.distributed.world import Interrupt, World
from evergrad_trainer.worker import watchdog as watchdog_module
from evergrad_trainer.worker.channel import WorkerPing, WorkerPlan, WorkerPong, channel_pair
from evergrad_trainer.worker.watchdog import Watchdog

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A default group of this process alone."""
    dist.init_process_group(
        "gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def aborts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that aborted torch's groups."""
    seen: list[str] = []
    abort = torch_private.abort_groups

    def noted() -> None:
        seen.append(threading.current_thread().name)
        abort()

    monkeypatch.setattr(torch_private, "abort_groups", noted)
    return seen


ABORTING = pytest.mark.parametrize(
    "make",
    [lambda: NcclTransport(CUDA), AsynchronousTransport],
    ids=["nccl", "asynchronous"],
)


def test_the_device_determines_the_transport_and_a_variable_overrides_it_for_tests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert isinstance(choose_transport(CPU), GlooTransport)
    assert isinstance(choose_transport(CUDA), NcclTransport)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "asynchronous")
    assert isinstance(choose_transport(CPU), AsynchronousTransport)
    assert isinstance(choose_transport(CUDA), NcclTransport)


def test_a_worker_uses_its_own_accelerator_and_disables_the_torch_watchdog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    NcclTransport(torch.device("cuda", 5)).prepare()
    assert chosen == [torch.device("cuda", 5)]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@ABORTING
def test_a_group_is_aborted_once_and_the_survivor_lives(
    group: dist.ProcessGroup, aborts: list[str], make: "type[Transport]"
) -> None:
    """The watchdog gives the group up, main does, and then it is taken down: torch's abort cannot be called a
    second time."""
    transport = make()
    transport.opened()
    interrupt = Interrupt(transport.give_up)
    world = World(
        1, rank=0, size=2, device=CPU, group=group, interrupt=interrupt, transport=transport
    )
    interrupt.set()
    transport.give_up()
    assert not abandon_world(world, transport)
    assert len(aborts) == 1 and not dist.is_initialized()


@ABORTING
def test_a_group_that_was_not_aborted_is_destroyed_without_waiting_for_peers(
    group: dist.ProcessGroup, aborts: list[str], make: "type[Transport]"
) -> None:
    transport = make()
    transport.opened()
    world = World(
        1,
        rank=0,
        size=2,
        device=CPU,
        group=group,
        interrupt=Interrupt(),
        transport=transport,
    )
    assert not abandon_world(world, transport)
    assert len(aborts) == 1 and not dist.is_initialized()


@ABORTING
def test_an_abort_before_the_group_exists_harms_no_thread(
    aborts: list[str], make: "type[Transport]"
) -> None:
    transport = make()
    transport.give_up()
    transport.close()
    assert aborts == []


@ABORTING
def test_an_abort_during_setup_takes_effect_as_soon_as_the_group_exists(
    group: dist.ProcessGroup, aborts: list[str], make: "type[Transport]"
) -> None:
    """Not before: torch would clear its groups under the main thread, which is still making some."""
    transport = make()
    transport.give_up()
    assert aborts == [] and dist.is_initialized()
    transport.opened()
    assert len(aborts) == 1 and not dist.is_initialized()
    transport.close()
    assert len(aborts) == 1


@ABORTING
def test_the_watchdog_continues_after_a_hard_change_during_setup(
    monkeypatch: pytest.MonkeyPatch, make: "type[Transport]"
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(watchdog_module, "os", SimpleNamespace(_exit=exits.append))
    supervisor, end = channel_pair()
    watchdog = Watchdog(end)
    watchdog.start()
    transport = make()
    interrupt = Interrupt(transport.give_up)
    watchdog.enter(1, interrupt)
    supervisor.send(WorkerPlan(2, hard=True))
    supervisor.send(WorkerPing())
    assert supervisor.receive(30.0) == WorkerPong()
    assert interrupt.is_set and exits == []
    watchdog.leave()
    transport.close()
    supervisor.close()
    watchdog._thread.join(PATIENCE)
    end.close()


def test_data_received_after_the_abort_of_the_group_is_not_used(
    group: dist.ProcessGroup,
) -> None:
    """An aborted operation ends without its data and without an error."""
    transport = AsynchronousTransport()
    transport.opened()
    interrupt = Interrupt(transport.give_up)
    world = World(
        1, rank=0, size=2, device=CPU, group=group, interrupt=interrupt, transport=transport
    )
    values = torch.ones(4)
    # Nobody ever sends: the kernel spins until it is aborted.
    work = transport.start_receive(values, group, source=0)
    work.wait()
    assert not work.is_completed(), "its wait says nothing"
    threading.Timer(0.05, interrupt.set).start()
    with pytest.raises(PeerLostError):
        world.wait(work)
    assert work.is_completed() and values.tolist() == [1.0] * 4
    assert not abandon_world(world, transport), (
        "nothing is written any more, so nothing need be kept"
    )


def test_a_sum_is_complete_after_its_wait_and_a_world_waits_for_it(
    group: dist.ProcessGroup,
) -> None:
    transport = AsynchronousTransport()
    transport.opened()
    world = World(
        1,
        rank=0,
        size=2,
        device=CPU,
        group=group,
        interrupt=Interrupt(),
        transport=transport,
    )
    works = [
        (world.start_sum(values), values)
        for values in (torch.full((3,), 2.0), torch.full((5,), 3.0))
    ]
    for work, _ in works:
        world.wait(work)
        assert work.is_completed()
    transport.mark_started().wait()
    assert world.unfinished == []
    abandon_world(world, transport)


@pytest.mark.capability("C-54")
def test_a_transport_without_its_own_timeout_is_waited_for_as_long_as_that_of_the_world() -> (
    None
):
    class Never:
        def is_completed(self) -> bool:
            return False

        def wait(self) -> None: ...

    world = World(
        1, rank=0, size=2, device=CPU, interrupt=Interrupt(), timeout_seconds=0.01
    )
    with pytest.raises(PeerLostError, match=r"did not end within 0.01 s"):
        world.wait(Never())


def test_a_device_error_is_a_host_fault_and_not_a_lost_peer() -> None:
    class Broken:
        def is_completed(self) -> bool:
            raise torch.AcceleratorError("an illegal memory access was encountered")

        def wait(self) -> None: ...

    with pytest.raises(HostError, match="illegal memory access"):
        World(1, rank=0, size=2, device=CPU, interrupt=Interrupt()).wait(Broken())
