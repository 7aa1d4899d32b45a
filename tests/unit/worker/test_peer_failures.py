"""Messages of gloo, NCCL and torch's store about a failed peer, and messages that only look similar."""

import pytest
from torch.distributed import DistNetworkError

from evergrad_trainer.base.errors import PeerLostError
from evergrad_trainer.worker.peer_failures import (
    FAILURE_WORDS,
    is_peer_error,
    is_peer_failure,
)

GLOO = "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: "
    "/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2006, "
)


@pytest.mark.parametrize(
    "text",
    [
        # Messages of torch 2.13 if a process of a group is killed or frozen, or if its store has closed.
        (
            f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:12170. This is typically "
            "caused by a remote worker crashing."
        ),
        f"{GLOO}unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
        f"{GLOO}pair.cc:541] Read error [127.0.0.1]:9: Connection reset by peer",
        (
            f"Traceback (most recent call last):\n[rank1]: {GLOO}pair.cc:541] writev [127.0.0.1]:9: "
            "Broken pipe\nlast line"
        ),
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did",
        (
            "torch.distributed.DistNetworkError: The client socket has timed out after 2000ms while "
            "trying to connect to (a, 9)."
        ),
        (
            "torch.distributed.DistStoreError: Timed out after 3 seconds waiting for clients. 1/2 "
            "clients joined."
        ),
        f"{NCCL}remote process exited or there was a network error, NCCL version 2.27.3",
        (
            f"{NCCL}unhandled system error\nncclSystemError: a call failed\nLast "
            "error:\nsocketStartConnect: Connection refused"
        ),
        "socketStartConnect: Connect to 10.0.0.1<43> failed : Connection refused",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
        f"ended with exit code 70; it said: error: rank 1: {FAILURE_WORDS}",
    ],
)
def test_collective_errors_of_a_failed_peer_are_recognised_except_in_a_world_of_one(
    text: str,
) -> None:
    assert is_peer_failure(text, world_size=2)
    assert not is_peer_failure(text, world_size=1)


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: these labels do not fit",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        (
            "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, "
            "'Connection reset by peer'))"
        ),
        (
            "psycopg.OperationalError: connection failed: connection to server at 10.0.0.9, port "
            "5432 failed: Connection refused"
        ),
        "TimeoutError: Timed out waiting for a lock of torch.distributed.checkpoint",
        # The group's own frames around a database's error.
        (
            '  File "torch/distributed/elastic/errors/__init__.py", line 3, in '
            "wrapper\nConnectionRefusedError: Connection refused"
        ),
        # A remark, and then the cause.
        (
            "[rank1]:[W1122 00:48:09 TCPStore.cpp:138] [c10d] recvValue failed on Socket(fd=3): "
            "Broken pipe\nValueError: no label"
        ),
        f"{NCCL}invalid usage (run with NCCL_DEBUG=WARN for details)\nDuplicate GPU detected",
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
            "network address. EADDRINUSE"
        ),
    ],
)
def test_an_error_of_the_script_is_not_a_peer_failure(text: str) -> None:
    assert not is_peer_failure(text, world_size=8)


CLOSED = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12170."


def raise_from(cause: Exception) -> Exception:
    try:
        raise ValueError("no batch") from cause
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "is_of_peer"),
    [
        (PeerLostError("the group was given up"), True),
        (RuntimeError(CLOSED), True),
        (
            DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
            True,
        ),
        (raise_from(RuntimeError(CLOSED)), True),
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (ValueError(CLOSED), False),
        (RuntimeError("shapes do not fit"), False),
    ],
)
def test_an_error_is_judged_by_its_class_first(error: Exception, is_of_peer: bool) -> None:
    assert is_peer_error(error, world_size=4) is is_of_peer


def test_a_circular_chain_of_errors_is_followed_once() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_peer_error(first, world_size=4)
