"""The rows of the fleet page, and the requests that it answers."""

import asyncio
import json
import socket
import urllib.request
from typing import Any
from urllib.error import HTTPError

import pytest
from patience import PATIENCE

from evergrad_operator.core.fleet import MOST_RUNS, build_fleet
from evergrad_operator.edge.metrics.fleet_page import MOST_PAGES, FleetPage


def run(
    name: str, *, created: str = "2026-03-01T12:00:00Z", **status: Any
) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "lab", "creationTimestamp": created}
    return {"metadata": metadata, "spec": {}, "status": status}


def test_a_run_is_one_row() -> None:
    raw = run(
        "docs-lm",
        phase="Running",
        message="3 nodes train",
        nodes={"summary": "3/4"},
        progress={"step": 40, "totalSteps": 100, "loss": "2.413", "tokensPerSecond": "41.2k", "eta": "5h12m",
                  "etaSeconds": 18720},
        checkpoint={"step": 30},
        restarts={"total": 2},
    )  # fmt: skip
    assert build_fleet([raw]) == {
        "total": 1,
        "phases": {"Running": 1},
        "runs": [
            {
                "namespace": "lab", "name": "docs-lm", "created": "2026-03-01T12:00:00Z", "phase": "Running",
                "message": "3 nodes train", "nodes": "3/4", "step": 40, "totalSteps": 100, "loss": "2.413",
                "tokensPerSecond": "41.2k", "eta": "5h12m", "etaSeconds": 18720, "checkpointStep": 30, "restarts": 2,
            }
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    "status", [None, "text", {"progress": 1, "restarts": [], "phase": {}}]
)
def test_an_unreadable_status_omits_only_its_own_parts(status: Any) -> None:
    raw = {**run("x"), "status": status}
    [row] = build_fleet([raw])["runs"]
    assert (row["phase"], row["step"], row["loss"], row["restarts"]) == (
        "Pending",
        None,
        "",
        0,
    )


def test_running_runs_are_listed_first_and_newer_runs_before_older_ones() -> None:
    raws = [
        run("old", created="2026-01-01T00:00:00Z", phase="Running"),
        run("ended", created="2026-03-01T00:00:00Z", phase="Complete"),
        run("new", created="2026-02-01T00:00:00Z", phase="Waiting"),
    ]
    assert [row["name"] for row in build_fleet(raws)["runs"]] == ["new", "old", "ended"]


def test_the_number_of_rows_is_bounded_but_all_runs_are_counted() -> None:
    fleet = build_fleet(
        [run(f"r{number}", message="x" * 9000) for number in range(MOST_RUNS + 7)]
    )
    assert (fleet["total"], len(fleet["runs"])) == (MOST_RUNS + 7, MOST_RUNS)
    assert len(json.dumps(fleet)) < 1024 * 1024


def ask(url: str, **headers: str) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=PATIENCE
        ) as answer:
            first = answer.readline() + answer.readline()
            return answer.status, answer.headers["Content-Type"], first
    except HTTPError as error:
        with error:
            return error.code, "", error.read()


def test_the_page_listens_on_loopback_only_and_refuses_cross_site_requests() -> None:
    async def scenario() -> None:
        page = FleetPage(lambda: [run("docs-lm", phase="Running")])
        port = await page.listen(0)
        url = f"http://127.0.0.1:{port}"
        status, kind, text = await asyncio.to_thread(ask, f"{url}/")
        assert (status, kind, text[:15]) == (
            200,
            "text/html; charset=utf-8",
            b"<!doctype html>",
        )
        # It listens on no other address of the machine, so other pods cannot reach it.
        socket.create_server(("127.0.0.2", port)).close()
        status, kind, text = await asyncio.to_thread(ask, f"{url}/live")
        assert (status, kind) == (200, "text/event-stream")
        assert b'"docs-lm"' in text
        # Another site may make a browser send a request: through its own name that resolves to this host, or
        # cross-site.
        for headers in ({"Host": f"evil.example:{port}"}, {"Sec-Fetch-Site": "cross-site"}):
            assert (await asyncio.to_thread(ask, f"{url}/live", **headers))[0] == 403
        await page.close()

    asyncio.run(scenario())


def test_the_number_of_open_pages_is_bounded() -> None:
    async def scenario() -> None:
        page = FleetPage(list)
        port = await page.listen(0)
        readers = [
            await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST_PAGES)
        ]
        for reader, writer in readers:
            writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"data: ")
        status, _, text = await asyncio.to_thread(ask, f"http://127.0.0.1:{port}/live")
        assert (status, text) == (503, f"{MOST_PAGES} pages are open; close one\n".encode())
        for _, writer in readers:
            writer.close()
        await page.close()

    asyncio.run(scenario())


def test_a_port_that_is_in_use_does_not_stop_the_operator() -> None:
    async def scenario() -> None:
        one, other = FleetPage(list), FleetPage(list)
        port = await one.listen(0)
        assert await other.listen(port) == 0
        await one.close()
        await other.close()

    asyncio.run(scenario())
