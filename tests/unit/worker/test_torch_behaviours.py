"""Five behaviours of torch's agent that no document promises and the rendezvous backend relies on.

Each is seen on a real ``torchrun`` with a handler written down here, so that a new torch that behaves
otherwise is noticed before it is used. ``EVERGRAD_TEST_PYTHON`` names another interpreter, whose torch is
tried instead (``make test-torch-matrix``).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

PYTHON = os.environ.get("EVERGRAD_TEST_PYTHON", sys.executable)

AGENT = '''
import json, os, sys, time
from pathlib import Path
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler, RendezvousInfo, RendezvousStoreInfo, rendezvous_handler_registry,
)
from torch.distributed.run import main

directory, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
seen = {"rendezvous": 0, "waiting": 0, "store": []}

def note():
    (directory / "agent.json").write_text(json.dumps(seen))

class Store(HashStore):
    """Notes what is asked of it; the barrier's ``wait`` ends at once."""

    def __getattribute__(self, name):
        if not name.startswith("__"):
            seen["store"].append(name)
        return super().__getattribute__(name)

    def wait(self, *_):
        pass

class Handler(RendezvousHandler):
    use_agent_store = True

    def next_rendezvous(self):
        seen["rendezvous"] += 1
        note()
        if seen["rendezvous"] > len(plan["ends"]):
            raise SystemExit(plan["exit"])
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ["TEST_END"] = plan["ends"][seen["rendezvous"] - 1]
        bootstrap = RendezvousStoreInfo("127.0.0.1", self.server.port)
        return RendezvousInfo(Store(), plan["rank"], plan["nodes"], bootstrap)

    def num_nodes_waiting(self):
        started = (directory / f"worker-{os.environ['TEST_END']}-0").exists()
        seen["waiting"] += started
        return int(started and os.environ["TEST_END"].startswith("sleep"))

    def get_backend(self): return "pinned"
    def get_run_id(self): return "pinned"
    def is_closed(self): return False
    def set_closed(self): pass
    def shutdown(self):
        note()
        return True

rendezvous_handler_registry.register("pinned", lambda parameters: Handler())
sys.argv = ["torchrun", *sys.argv[3:]]
main()
'''

WORKER = """
import json, os, sys, time
from pathlib import Path

name = f"worker-{os.environ['TEST_END']}-{os.environ['LOCAL_RANK']}"
kept = {key: value for key, value in os.environ.items() if key.startswith("TORCHELASTIC") or key.endswith(("RANK", "SIZE"))}
if os.environ["TEST_END"] == "join":
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    kept["total"] = total.item()
    dist.barrier()
temporary = Path(sys.argv[1]) / "temporary"
temporary.mkdir(exist_ok=True)
(temporary / name).write_text(json.dumps(kept))
(temporary / name).rename(Path(sys.argv[1]) / name)
if os.environ["TEST_END"].startswith("sleep"):
    time.sleep(600)
sys.exit(3 if os.environ["TEST_END"] == "fail" else 0)
"""


class Outcome:
    """The actions of an agent, and the environment of its workers."""

    def __init__(self, directory: Path, plan: dict[str, Any], *options: str) -> None:
        self._directory = directory
        for name, text in (("agent.py", AGENT), ("worker.py", WORKER)):
            (directory / name).write_text(text)
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("EVERGRAD_", "TORCHELASTIC_"))
        }
        environment |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONSAFEPATH": "1",
            "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
        }
        command = [
            PYTHON,
            str(directory / "agent.py"),
            str(directory),
            json.dumps(plan),
            "--nnodes=1:9",
            "--rdzv-backend=pinned",
        ]
        command += [
            "--rdzv-endpoint=127.0.0.1:1",
            "--monitor-interval=0.05",
            *options,
            str(directory / "worker.py"),
            str(directory),
        ]
        ended = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        self.exit_code, self.output = ended.returncode, ended.stdout + ended.stderr
        self.agent: dict[str, Any] = json.loads((directory / "agent.json").read_text())

    def worker(self, end: str, local_rank: int = 0) -> dict[str, Any]:
        return dict(
            json.loads((self._directory / f"worker-{end}-{local_rank}").read_text())
        )


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One agent of two workers and no restart to spend: asked to restart once, then its workers end well."""
    plan = {"ends": ["sleep", "well"], "rank": 1, "nodes": 3, "exit": 1}
    return Outcome(
        tmp_path_factory.mktemp("restarted"), plan, "--nproc-per-node=2", "--max-restarts=0"
    )


def test_a_waiting_node_restarts_the_workers_without_using_up_a_restart(
    restarted: Outcome,
) -> None:
    assert restarted.exit_code == 0, restarted.output
    assert restarted.agent["rendezvous"] == 2
    assert restarted.worker("sleep")["TORCHELASTIC_RESTART_COUNT"] == "0"
    assert restarted.worker("well")["TORCHELASTIC_RESTART_COUNT"] == "0"


def test_the_store_of_the_agent_is_used_only_for_the_exit_barrier(
    restarted: Outcome,
) -> None:
    used = restarted.agent["store"]
    assert [name for name in used if name not in ("timeout", "set_timeout")] == [
        "add",
        "wait",
    ]


def test_identical_workers_are_ranked_by_node_without_a_store(restarted: Outcome) -> None:
    ranks = [restarted.worker("well", local_rank) for local_rank in (0, 1)]
    assert [
        (one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"], one["GROUP_RANK"])
        for one in ranks
    ] == [
        ("2", "0", "6", "1"),
        ("3", "1", "6", "1"),
    ]


@pytest.mark.parametrize("exit_code", [0, 64])
def test_a_system_exit_from_the_rendezvous_is_the_exit_code_of_the_agent(
    tmp_path: Path, exit_code: int
) -> None:
    plan = {"ends": ["sleep-once"], "rank": 0, "nodes": 1, "exit": exit_code}
    outcome = Outcome(tmp_path, plan, "--nproc-per-node=1", "--max-restarts=0")
    assert outcome.exit_code == exit_code, outcome.output
    assert outcome.agent["rendezvous"] == 2


def test_workers_are_clients_of_the_store_of_the_agent(tmp_path: Path) -> None:
    """Rank 0 would fail to open it a second time at the same port."""
    plan = {"ends": ["join"], "rank": 0, "nodes": 1, "exit": 1}
    outcome = Outcome(tmp_path, plan, "--nproc-per-node=2", "--max-restarts=0")
    assert outcome.exit_code == 0, outcome.output
    assert [outcome.worker("join", local_rank)["total"] for local_rank in (0, 1)] == [
        2.0,
        2.0,
    ]
    assert outcome.worker("join")["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_a_failed_worker_causes_the_next_rendezvous_and_uses_up_a_restart(
    tmp_path: Path,
) -> None:
    plan = {"ends": ["fail", "well"], "rank": 0, "nodes": 1, "exit": 1}
    outcome = Outcome(tmp_path, plan, "--nproc-per-node=1", "--max-restarts=1")
    assert outcome.exit_code == 0, outcome.output
    assert outcome.agent["rendezvous"] == 2
    assert outcome.worker("well")["TORCHELASTIC_RESTART_COUNT"] == "1"
