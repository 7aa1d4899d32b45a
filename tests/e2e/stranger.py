"""Tries everything that could change or read a run, without its token. Prints one JSON object for each try.

It runs in a pod that is no part of the run: ``python stranger.py RUN TARGETS``, where TARGETS is a JSON list
of address and port.
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
"""An answer comes at once or not at all; the run stands still for nobody."""
TOKENS = ("", "wrong", "0" * 64)


def hello(run: str, node: str, token: str) -> Message:
    """A node that wants to take part. Of two processes of one node the newer wins."""
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
    """What a node could say to get in, in another's place, or to end the run."""
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
    """What a caller could ask a coordinator or a node."""
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


def say(address: str, port: int, data: bytes) -> str:
    """What is answered before the connection ends or the time is over."""
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
    """Try everything at every port, many at a time: what is not answered takes its whole time."""
    tries = [
        (*target, *one)
        for target in json.loads(targets)
        for one in (*messages(run), *requests())
    ]
    with ThreadPoolExecutor(32) as pool:
        answers = pool.map(lambda one: say(one[0], one[1], one[3]), tries)
        for (address, port, name, _), answer in zip(tries, answers, strict=True):
            print(
                json.dumps(
                    {"try": name, "address": address, "port": port, "answer": answer}
                ),
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
