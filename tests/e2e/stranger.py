"""Tries all requests that could change or read a run without its token, and prints a JSON object for each.

It runs in a pod outside the run: ``python stranger.py RUN TARGETS``. TARGETS is a JSON list of pairs of
address and port.
"""

import json
import socket
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from evergrad_common.codec import encode
from evergrad_coordinator.protocol import (
    Commit,
    Hello,
    Leaving,
    Message,
    Progress,
    Ready,
    Result,
)

SECONDS = 2.0
"""Time limit of an answer in seconds. Answers are immediate if they come at all."""
TOKENS = ("", "wrong", "0" * 64)


def hello(run: str, node: str, token: str) -> Message:
    """Return the Hello of a node that requests to join. Of two processes of one node, the newer wins."""
    return Hello(
        run=run,
        node=node,
        incarnation=uuid.uuid4().hex,
        address="10.0.0.66",
        workers=1,
        recovery="fresh",
        token=token,
        known_generation=1,
    )


def messages(run: str) -> Iterator[tuple[str, bytes]]:
    """Yield the messages with which a node could join, replace another node, or end the run."""
    for token in TOKENS:
        for node in ("66", "0", "1"):
            for generation in (1, 2, 3, 1 << 20):
                words = [
                    hello(run, node, token),
                    Ready(generation=generation, workers=1, port=6666, step=10**6),
                    Progress(generation=generation, step=10**6, total_steps=10**6),
                    Commit(request=1, generation=generation),
                    Result(
                        generation=generation, step=10**6, exit_code=0, reason="complete"
                    ),
                    Result(
                        generation=generation, step=10**6, exit_code=75, reason="stopped"
                    ),
                    Leaving(),
                ]
                yield (
                    f"join, complete and stop as node {node} of generation {generation}",
                    b"".join(map(encode, words)),
                )
    yield "complete without a hello", encode(Result(generation=1, step=1))
    yield "a line that is no message", b"{}\n"
    yield "noise", bytes(range(256)) * 8


def requests() -> Iterator[tuple[str, bytes]]:
    """Yield the requests that a client could send to a coordinator or a node."""
    bounds = json.dumps({"min": 1, "max": 1, "maxFailures": 0})
    for token in TOKENS:
        for method, path, body in (
            ("GET", "/status", ""),
            ("HEAD", "/status", ""),
            ("GET", "/status?a=b", ""),
            ("GET", "//status", ""),
            ("GET", "/readyz", ""),
            ("GET", "/bounds", ""),
            ("POST", "/bounds", bounds),
            ("PUT", "/bounds", bounds),
            ("GET", "/", ""),
            ("GET", "/live", ""),
        ):
            head = (
                f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
                f"{token}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            yield f"{method} {path}", (head + body).encode()


def exchange(address: str, port: int, data: bytes) -> str:
    """Send data, and return the answer until the connection ends or the time limit is reached."""
    answer = b""
    try:
        with socket.create_connection((address, port), timeout=SECONDS) as connection:
            connection.settimeout(SECONDS)
            connection.sendall(data)
            while piece := connection.recv(65536):
                answer += piece
    except OSError:
        pass
    return answer.decode("latin-1")


def main(run: str, targets: str) -> None:
    """Try all requests at all ports concurrently, because unanswered requests take the whole time limit."""
    tries = [
        (*target, *one)
        for target in json.loads(targets)
        for one in (*messages(run), *requests())
    ]
    with ThreadPoolExecutor(32) as pool:
        answers = pool.map(lambda one: exchange(one[0], one[1], one[3]), tries)
        for (address, port, name, _), answer in zip(tries, answers, strict=True):
            print(
                json.dumps(
                    {"try": name, "address": address, "port": port, "answer": answer}
                ),
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
