"""Every recipe while nodes leave, die and join: after any event on one of two nodes, the bits equal those of
an undisturbed run."""

import signal
from collections.abc import Callable

import pytest
from elastic_helpers import STEPS, Cluster, fault
from recipe_runs import RECIPES, assert_same_run
from run_helpers import INTERNAL, STOPPED_SAVED, Experiment, checkpoints, steps_of

MakeCluster = Callable[..., Cluster]
WholeOf = Callable[[str], Experiment]


def check(cluster: Cluster, whole: Experiment, **lost: bool) -> None:
    cluster.check(whole.at("undisturbed"), **lost)
    assert_same_run(whole.at("undisturbed"), cluster.directory)


@pytest.mark.acceptance("8d-11j:latent_edit", "8d-10g:two_stage_kl")
@pytest.mark.acceptance(
    "8d-1f:sft", "8d-1f:two_stage_kl", "8d-1f:latent_edit", "8d-1f:preference"
)
@pytest.mark.acceptance(
    "8d-1g:sft", "8d-1g:two_stage_kl", "8d-1g:latent_edit", "8d-1g:preference"
)
@pytest.mark.acceptance(
    "8d-1h:sft", "8d-1h:two_stage_kl", "8d-1h:latent_edit", "8d-1h:preference"
)
@pytest.mark.acceptance("8d-1f:pretrain", "8d-1g:pretrain", "8d-1h:pretrain")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_drain_a_join_and_a_kill_of_the_remaining_node_change_no_bit(
    make_elastic: MakeCluster, whole_of: WholeOf, recipe: str
) -> None:
    whole = whole_of(recipe)
    held = [
        fault("hold", "slot", node=0, step=step, name=f"held-{step}") for step in (3, 6)
    ]
    cluster = make_elastic(whole, expect=2).start(faults=held)
    cluster.until_held("held-3")
    cluster.nodes[1].send(signal.SIGTERM)
    cluster.until_planned("node 1 leaving")
    cluster.release("held-3")
    assert cluster.nodes[1].wait() == STOPPED_SAVED

    cluster.until_held("held-6")
    # It is paused in its second step, in which the other is killed: only the joining node then has the state.
    second = [fault("hold", "update", node=2, call=2, name="joined")]
    cluster.start_node(2, faults=second)
    cluster.until_planned("node 2 joined")
    cluster.release("held-6")
    cluster.until_held("joined")
    cluster.nodes[0].kill()
    cluster.release("joined")
    cluster.finish(nodes=[2])

    check(cluster, whole)
    assert steps_of(cluster.directory) == list(range(1, STEPS + 1)), (
        "no step is trained twice"
    )
    assert 3 <= cluster.steps(1)[-1] < 6
    first = cluster.steps(2)[0]
    assert first > 6 and cluster.steps(2) == list(range(first, STEPS + 1))
    assert len(cluster.pids(0)) == len(cluster.pids(2)) == 1, "each trained in one process"


PLACES = {
    "an update": fault("SIGKILL", "update", node=1, step=6, to="node", name="kill"),
    "a save": fault("SIGKILL", "shard", node=1, to="node", name="kill"),
    "an evaluation": fault("SIGKILL", "batch", node=1, call=2, to="node", name="kill"),
}


@pytest.mark.long
@pytest.mark.acceptance(
    "8d-2e:sft", "8d-2e:latent_edit", "8d-2f:sft", "8d-2f:latent_edit", "8d-2f:preference"
)
@pytest.mark.acceptance("8d-3b:two_stage_kl", "8d-3b:latent_edit", "8d-3b:preference")
@pytest.mark.parametrize(
    ("recipe", "place"),
    [
        ("sft", "an update"),
        ("sft", "a save"),
        ("sft", "an evaluation"),
        ("two_stage_kl", "an evaluation"),
        ("latent_edit", "an update"),
        ("latent_edit", "a save"),
        ("latent_edit", "an evaluation"),
        ("preference", "a save"),
        ("preference", "an evaluation"),
    ],
)
def test_the_kill_of_one_of_two_nodes_at_any_point_changes_no_bit(
    make_elastic: MakeCluster, whole_of: WholeOf, recipe: str, place: str
) -> None:
    whole = whole_of(recipe)
    cluster = make_elastic(whole, expect=2).start(faults=[PLACES[place]])
    cluster.finish(nodes=[0])
    assert cluster.has_happened("kill") and cluster.nodes[1].wait() == -signal.SIGKILL
    check(cluster, whole)
    assert len(cluster.pids(0)) == 1, "it went on in the process it was"


@pytest.mark.long
@pytest.mark.acceptance(
    "8d-5f:sft", "8d-5f:two_stage_kl", "8d-5f:latent_edit", "8d-5f:preference"
)
@pytest.mark.parametrize("recipe", ["sft", "two_stage_kl", "latent_edit", "preference"])
def test_two_draining_nodes_save_together_and_the_run_resumes_later(
    make_elastic: MakeCluster, whole_of: WholeOf, recipe: str
) -> None:
    whole = whole_of(recipe)
    cluster = make_elastic(whole, expect=2, options=("--lease", "2")).start(
        faults=[fault("hold", "slot", node=0, step=7, name="held")]
    )
    cluster.until_held()
    for node in cluster.nodes.values():
        node.send(signal.SIGTERM)
    cluster.until(lambda: cluster.log("plan")[-1]["members"] == 0, "a plan of nobody")
    cluster.release("held")
    cluster.finish(STOPPED_SAVED)
    assert cluster.coordinator is not None and cluster.coordinator.wait() == STOPPED_SAVED
    last = steps_of(cluster.directory)[-1]
    assert 7 <= last < STEPS and checkpoints(cluster.directory)[-1] == last

    cluster.start()
    cluster.finish()
    check(cluster, whole)
    assert steps_of(cluster.directory) == list(range(1, STEPS + 1)), (
        "no step is trained twice"
    )


@pytest.mark.long
@pytest.mark.acceptance(
    "8d-2g:pretrain", "8d-2g:sft", "8d-2g:latent_edit", "8d-2g:preference"
)
@pytest.mark.parametrize("recipe", ["pretrain", "sft", "latent_edit", "preference"])
def test_if_all_nodes_are_killed_the_run_resumes_at_its_newest_checkpoint(
    make_elastic: MakeCluster, whole_of: WholeOf, recipe: str
) -> None:
    whole = whole_of(recipe)
    held = fault("hold", "slot", node=0, step=8, name="held")
    cluster = make_elastic(whole, expect=2).start(faults=[held])
    cluster.until_held()
    cluster.until(lambda: checkpoints(cluster.directory), "the save of step 5")
    for node in cluster.nodes.values():
        node.kill()
    cluster.start_node(0)
    cluster.start_node(1)
    cluster.finish()
    check(cluster, whole, is_state_lost=True)
    assert steps_of(cluster.directory) == [*range(1, 8), *range(6, STEPS + 1)]


OWN_SETTINGS = {
    "sft": "spec.training.rows.learn=everything",
    "two_stage_kl": "spec.training.twoStageKl.stages[1].beta=3",
    "latent_edit": "spec.training.latentEdit.beta=0.2",
    "preference": "spec.training.preference.beta=0.1",
}


@pytest.mark.long
@pytest.mark.acceptance("8d-4j:sft", "8d-4j:two_stage_kl", "8d-4j:preference")
@pytest.mark.parametrize(("recipe", "change"), OWN_SETTINGS.items())
def test_a_node_with_other_recipe_settings_does_not_join_and_the_run_continues(
    make_elastic: MakeCluster, whole_of: WholeOf, recipe: str, change: str
) -> None:
    whole = whole_of(recipe)
    cluster = make_elastic(whole, expect=1).start(
        faults=[fault("hold", "report", node=0, step=2, name="held")]
    )
    cluster.until_held()
    # In the run's own directory, the existing files would refuse it before the coordinator is contacted.
    stranger = cluster.start_node(1, sets=[change], directory=whole.path / "elsewhere")
    assert stranger.wait() == INTERNAL, cluster.describe()
    assert "fingerprint.configuration" in stranger.said(), stranger.said()
    assert "Traceback" not in stranger.said()
    cluster.release("held")
    cluster.finish(nodes=[0])
    check(cluster, whole)
    assert {row["size"] for row in cluster.trace()} == {1}
