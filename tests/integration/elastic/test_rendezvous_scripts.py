"""The example scripts, which do not depend on Evergrad: a node is killed, and the training has the same
result."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from rendezvous_cluster import Cluster

MakeCluster = Callable[..., Cluster]
SCRIPTS = Path(__file__).parents[3] / "examples" / "scripts"
STEPS, EVERY = 40, 5
LINE = re.compile(
    r"step (?P<step>\d+)(?: loss (?P<loss>\S+))? world (?P<world>\d+)(?: from sample (?P<sample>\d+))?"
)


@dataclass(frozen=True)
class Row:
    """Return rank 0's output for a step."""

    step: int
    loss: float | None
    world_size: int
    first_sample: int | None


def read_rows(cluster: Cluster, node: str) -> list[Row]:
    rows = []
    for match in LINE.finditer(cluster.log(f"agent-{node}")):
        loss, sample = match["loss"], match["sample"]
        rows.append(
            Row(
                int(match["step"]),
                float(loss) if loss else None,
                int(match["world"]),
                int(sample) if sample else None,
            )
        )
    return rows


def train_through_a_kill(cluster: Cluster, name: str) -> list[Row]:
    """Node 0, which holds rank 0 and writes the checkpoints, is killed after its first; returns all rows in
    order."""
    output = cluster.directory / "output"
    script = [
        str(SCRIPTS / name),
        f"--output={output}",
        f"--steps={STEPS}",
        f"--save-every={EVERY}",
        "--step-seconds=0.1",
    ]
    for node in ("0", "1"):
        cluster.start_agent(
            node, script=script, max_nodes=2, TRANSFORMERS_OFFLINE="1", HF_HUB_OFFLINE="1"
        )
    cluster.until(
        lambda: any(row.step >= EVERY + 2 for row in read_rows(cluster, "0")),
        "a step after the first checkpoint",
    )
    cluster.kill_pod("0")
    assert cluster.wait_exit("1") == 0, cluster.describe()
    before, after = read_rows(cluster, "0"), read_rows(cluster, "1")
    assert {row.world_size for row in before} == {2}
    assert {row.world_size for row in after} == {1}
    assert [row.step for row in before] == list(range(1, before[-1].step + 1))
    # Continued from a checkpoint, not from the beginning, and nothing was left out.
    assert [row.step for row in after] == list(range(after[0].step, STEPS + 1))
    assert after[0].step % EVERY == 1
    assert EVERY < after[0].step <= before[-1].step + 1
    return [*before, *after]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_plain_ddp_uses_the_same_samples_and_reaches_the_same_losses(
    make_cluster: MakeCluster,
) -> None:
    rows = train_through_a_kill(make_cluster("--min", "1", "--max", "2"), "ddp.py")
    assert all(row.first_sample == (row.step - 1) * 32 for row in rows)
    first: dict[int, float] = {}
    for row in rows:
        assert row.loss is not None
        # A repeated step has the loss it had with two ranks, up to the order of sums.
        assert row.loss == pytest.approx(first.setdefault(row.step, row.loss), rel=1e-4)
    assert len(rows) > len(first)
    assert rows[-1].loss is not None and rows[0].loss is not None
    assert rows[-1].loss < rows[0].loss / 2


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_accelerate_resumes_at_its_newest_state(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("--min", "1", "--max", "2")
    rows = train_through_a_kill(cluster, "accelerate_loop.py")
    assert rows[-1].loss is not None and rows[0].loss is not None
    assert rows[-1].loss < rows[0].loss
    assert (cluster.directory / "output" / f"step-{STEPS}").is_dir()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_transformers_trainer_resumes_at_its_last_checkpoint(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("--min", "1", "--max", "2")
    train_through_a_kill(cluster, "hf_trainer.py")
    assert (
        cluster.directory / "output" / f"checkpoint-{STEPS}" / "model.safetensors"
    ).is_file()


@pytest.mark.timeout(3600)
def test_the_documented_script_loses_no_step_if_a_node_is_asked_to_drain(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("--min", "1", "--max", "2")
    page = (SCRIPTS.parents[1] / "docs/train/elastic-scripts.md").read_text()
    script, checkpoint = cluster.directory / "train.py", cluster.directory / "checkpoint.pt"
    code = (
        page.split("```python\n")[1]
        .split("```")[0]
        .replace("STEPS, checkpoint = 300", "STEPS, checkpoint = 80")
    )
    script.write_text(
        code.replace(
            "first + 1, STEPS + 1):\n",
            "first + 1, STEPS + 1):\n    print('step', step, flush=True)\n",
        )
    )
    for node in ("0", "1"):
        cluster.start_agent(node, script=[str(script), str(checkpoint)])
    cluster.until(lambda: (cluster.status()["step"] or 0) >= 5, "reports")
    cluster.agent("1").terminate()
    assert cluster.wait_exit("1") == 1
    assert cluster.wait_exit("0") == 0
    status = cluster.status()
    assert (status["phase"], status["step"], status["checkpointStep"]) == (
        "Complete",
        80,
        80,
    )
    assert set(status["restarts"]) == {"node_left"}
    # Rank 0 took every step exactly once: the next group began where this one had stopped.
    steps = [
        int(line.removeprefix("step "))
        for line in cluster.log("agent-0").splitlines()
        if line.startswith("step ")
    ]
    assert steps == list(range(1, 81))
