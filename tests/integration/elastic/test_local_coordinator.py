"""The coordinator that `evergrad run` starts on this machine, seen by its launcher."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from patience import PATIENCE

from evergrad_common.contract import INSTANCE_HEADER, ExitCode
from evergrad_trainer.node.local import CoordinatorSettings, LocalCoordinator, run_local


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[LocalCoordinator]:
    one = LocalCoordinator(
        CoordinatorSettings(
            run="r",
            min_nodes=1,
            max_nodes=1,
            expect=1,
            recovery="in-process",
            state=tmp_path / "state",
            first_generation=0,
            log=tmp_path / "coordinator.log",
            address=tmp_path / "address.json",
        )
    )
    yield one
    one.close()


def test_the_coordinator_does_not_wait_for_an_outcome_if_no_node_is_connected(
    coordinator: LocalCoordinator, tmp_path: Path
) -> None:
    coordinator.start()
    # Far above the limit of the test: it ends because no node is connected, or not at all.
    assert coordinator.wait(1e6) is None
    assert coordinator.is_running
    # `evergrad open` finds the page by this file, which exists as long as the coordinator, and recognizes it
    # by name.
    address = json.loads((tmp_path / "address.json").read_text())
    with urlopen(
        f"http://127.0.0.1:{address['statusPort']}/healthz", timeout=PATIENCE
    ) as answer:
        assert answer.headers[INSTANCE_HEADER] == address["instance"] != ""
    coordinator.close()
    assert not (tmp_path / "address.json").exists()


class NodesThatLookAtThePage:
    """Nodes of which none trains: as they start, they open the page whose address was printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.are_over = True
        self.ended: dict[int, int] = {}
        self.page = ""

    def start(self) -> None:
        first, _, _ = self._capsys.readouterr().out.partition("\n")
        found = re.fullmatch(r"page (http://127\.0\.0\.1:[1-9][0-9]*/)", first)
        assert found is not None, first
        with urlopen(found[1], timeout=PATIENCE) as answer:
            self.page = answer.read().decode("utf-8")

    def describe_missing(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing was started."""


def test_the_address_of_the_page_is_printed_first_and_serves_it(
    coordinator: LocalCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = NodesThatLookAtThePage(capsys)
    # No node reports how the run has ended.
    assert run_local(coordinator, nodes) == ExitCode.INTERNAL  # type: ignore[arg-type]
    assert "<title>Evergrad</title>" in nodes.page
