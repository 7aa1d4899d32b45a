"""The coordinator that `evergrad run` starts on this machine, seen by its launcher."""

import json
from pathlib import Path

from evergrad_trainer.node.local import CoordinatorSettings, LocalCoordinator


def test_nobody_waits_for_an_outcome_that_no_node_can_bring(tmp_path: Path) -> None:
    coordinator = LocalCoordinator(
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
    try:
        coordinator.start()
        # Far above the limit of the test: it ends because no node is connected, or not at all.
        assert coordinator.wait(1e6) is None
        assert coordinator.is_running
        # `evergrad open` finds its page by this file, which is there as long as it is.
        assert json.loads((tmp_path / "address.json").read_text())["statusPort"] > 0
    finally:
        coordinator.close()
    assert not (tmp_path / "address.json").exists()
