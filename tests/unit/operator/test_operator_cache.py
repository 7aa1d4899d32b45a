"""The informer cache: the newest version wins, lists prune, repeated versions change nothing, and missing
watch events are known."""

from typing import Any

import pytest

from evergrad_operator.core.objects.slim import slim_pod
from evergrad_operator.edge.cache.cache import InformerCache
from evergrad_operator.edge.cache.store import CHILDREN, CLAIMS, PODS, RUNS

KEY = ("ns", "run")


def pod(
    name: str = "run-0-0", *, uid: str = "u1", version: int = 10, **status: Any
) -> dict[str, Any]:
    labels = {"evergrad.dev/run": "run"}
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": labels,
    }
    return {"metadata": metadata, "spec": {}, "status": status}


def run(
    name: str = "run", *, uid: str = "r1", version: int = 10, claim: str | None = None
) -> dict[str, Any]:
    spec = {"storage": {"claimName": claim}} if claim else {}
    return {
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": uid,
            "resourceVersion": str(version),
        },
        "spec": spec,
    }


@pytest.fixture
def cache() -> InformerCache:
    return InformerCache(clock=lambda: 0.0)


def test_an_older_version_never_replaces_a_newer_one(
    cache: InformerCache,
) -> None:
    assert cache.see(PODS, pod(version=12, phase="Running"), is_watched=True) == (KEY,)
    assert cache.see(PODS, pod(version=11, phase="Pending"), is_watched=True) == ()
    assert cache.pods(KEY)[0]["status"] == {"phase": "Running"}


def test_versions_are_compared_as_numbers(cache: InformerCache) -> None:
    cache.see(PODS, pod(version=99, phase="Pending"))
    assert cache.see(PODS, pod(version=100, phase="Running")) == (KEY,)


def test_a_watch_event_of_a_known_version_concerns_no_run(cache: InformerCache) -> None:
    assert cache.see(RUNS, run(version=20)) == (KEY,)
    assert cache.see(RUNS, run(version=20), is_watched=True) == ()


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_scheduling_gate_missing_from_the_create_response_is_a_change_of_the_same_version(
    cache: InformerCache, is_watched: bool
) -> None:
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    assert cache.see(PODS, pod(version=10, phase="Pending")) == (KEY,)
    shown = pod(version=10, phase="Pending", conditions=[gated])
    assert cache.see(PODS, shown, is_watched=is_watched) == (KEY,)
    assert cache.pods(KEY)[0]["status"]["conditions"] == [gated]
    # The response may come after the watch event.
    assert cache.see(PODS, pod(version=10, phase="Pending")) == ()
    assert cache.see(PODS, shown, is_watched=True) == ()
    assert cache.pods(KEY)[0]["status"]["conditions"] == [gated]


def test_a_late_response_does_not_restore_a_deleted_object(cache: InformerCache) -> None:
    cache.see(PODS, pod(version=10))
    assert cache.see(PODS, pod(version=12), is_deleted=True, is_watched=True) == (KEY,)
    assert cache.see(PODS, pod(version=11)) == ()
    assert cache.pods(KEY) == ()


def test_an_older_list_does_not_restore_a_pruned_object(
    cache: InformerCache,
) -> None:
    cache.see(PODS, pod(version=10), is_watched=True)
    cache.prune(PODS, [], version=50, covers=lambda namespace: True)
    cache.replace(PODS, [pod(version=10)], version=40, covers=lambda namespace: True)
    assert cache.pods(KEY) == ()


def test_an_object_returns_to_the_cache_if_its_label_returns(
    cache: InformerCache,
) -> None:
    cache.see(PODS, pod(version=10), is_watched=True)
    # A watch by label shows an object that loses the label as deleted.
    cache.see(PODS, pod(version=12), is_deleted=True, is_watched=True)
    assert cache.see(PODS, pod(version=13, phase="Running"), is_watched=True) == (KEY,)
    assert [one["metadata"]["uid"] for one in cache.pods(KEY)] == ["u1"]


def test_a_claim_without_its_label_is_still_the_claim_of_the_run(
    cache: InformerCache,
) -> None:
    claim = {
        "metadata": {"name": "run", "namespace": "ns", "uid": "p", "resourceVersion": "12"},
        "spec": {},
        "status": {},
    }
    cache.see(RUNS, run())
    cache.see(CLAIMS, claim, is_deleted=True, is_watched=True)
    cache.see(CLAIMS, claim)
    assert cache.claim(*KEY) is not None


def test_a_late_response_about_an_older_namesake_is_ignored_and_not_expected_from_the_watch() -> (
    None
):
    now = 0.0
    cache = InformerCache(clock=lambda: now)
    cache.see(RUNS, run(uid="new", version=20), is_watched=True)
    assert cache.see(RUNS, run(uid="old", version=19)) == ()
    found = cache.run(KEY)
    assert found is not None and found["metadata"]["uid"] == "new"
    now = 60.0
    assert cache.expectations.lag()[RUNS] == 0.0


def test_deletion_of_an_object_does_not_remove_its_namesake(cache: InformerCache) -> None:
    cache.see(RUNS, run(uid="new", version=20))
    cache.see(RUNS, run(uid="old", version=19), is_deleted=True, is_watched=True)
    found = cache.run(KEY)
    assert found is not None and found["metadata"]["uid"] == "new"


def test_a_list_prunes_objects_whose_deletion_the_watch_missed(
    cache: InformerCache,
) -> None:
    cache.see(PODS, pod("run-0-0", uid="a", version=10), is_watched=True)
    cache.see(PODS, pod("run-1-0", uid="b", version=11), is_watched=True)
    changed = cache.replace(
        PODS,
        [pod("run-0-0", uid="a", version=10)],
        version=50,
        covers=lambda namespace: True,
    )
    assert changed == {KEY}
    assert [one["metadata"]["name"] for one in cache.pods(KEY)] == ["run-0-0"]


def test_a_list_keeps_newer_objects_and_objects_outside_its_scope(
    cache: InformerCache,
) -> None:
    cache.see(PODS, pod("run-0-0", uid="a", version=60), is_watched=True)
    cache.see(PODS, pod("run-1-0", uid="b", version=10), is_watched=True)
    assert (
        cache.replace(PODS, [], version=50, covers=lambda namespace: namespace == "other")
        == set()
    )
    cache.replace(PODS, [], version=50, covers=lambda namespace: True)
    assert [one["metadata"]["name"] for one in cache.pods(KEY)] == ["run-0-0"]


def test_a_list_without_changes_concerns_no_run(cache: InformerCache) -> None:
    cache.see(PODS, pod(version=10), is_watched=True)
    cache.see(RUNS, run(version=9), is_watched=True)
    assert (
        cache.replace(PODS, [pod(version=10)], version=50, covers=lambda namespace: True)
        == set()
    )
    assert (
        cache.replace(RUNS, [run(version=9)], version=50, covers=lambda namespace: True)
        == set()
    )


def test_runs_that_share_a_claim_see_each_other_and_are_queued_if_the_claim_changes(
    cache: InformerCache,
) -> None:
    for name, identity in (("a", "a"), ("b", "b"), ("shared", "c"), ("d", "d")):
        made = run(name, uid=identity, claim=None if name in ("shared", "d") else "shared")
        made["spec"]["storage"] = {**made["spec"].get("storage", {}), "path": "x"}
        cache.see(RUNS, made)
    cache.see(RUNS, run("apart", uid="e", claim="shared"))
    assert [one["metadata"]["name"] for one in cache.others(("ns", "a"))] == ["b", "shared"]
    assert cache.others(("ns", "d")) == ()
    claim = {
        "metadata": {
            "name": "shared",
            "namespace": "ns",
            "uid": "p",
            "resourceVersion": "5",
        },
        "spec": {},
        "status": {},
    }
    assert cache.see(CLAIMS, claim) == (
        ("ns", "a"),
        ("ns", "apart"),
        ("ns", "b"),
        ("ns", "shared"),
    )
    cache.see(RUNS, run("b", uid="b", version=11), is_deleted=True, is_watched=True)
    assert [one["metadata"]["name"] for one in cache.others(("ns", "a"))] == ["shared"]


def test_a_run_that_mounts_the_claim_of_another_run_counts_as_user_until_deleted(
    cache: InformerCache,
) -> None:
    def mounting(version: int, claim: str) -> dict[str, Any]:
        raw = run("tune", uid="tune", version=version)
        source = {"persistentVolumeClaim": {"claimName": claim}}
        raw["spec"]["template"] = {"volumes": [{"name": "base", **source}]}
        return raw

    cache.see(RUNS, run("base", uid="base", version=10))
    index = cache.claim_index
    assert index.users_of("ns", "base") == {("ns", "base")}
    # The run of the claim is reconciled again: the claim must not be deleted with it any more.
    assert ("ns", "base") in cache.see(RUNS, mounting(11, "base"))
    assert index.users_of("ns", "base") == {("ns", "base"), ("ns", "tune")}
    assert index.keepers_of("ns", "base") == {("ns", "base")}
    assert cache.others(("ns", "base")) == (), "it keeps no files there"
    assert ("ns", "base") in cache.see(RUNS, mounting(12, "elsewhere"))
    assert index.users_of("ns", "base") == {("ns", "base")}
    # A volume of its profile counts, too.
    of_profile = run("tune", uid="tune", version=13)
    of_profile["status"] = {"volume": {"profileClaims": ["base"]}}
    assert ("ns", "base") in cache.see(RUNS, of_profile)
    assert index.users_of("ns", "base") == {("ns", "base"), ("ns", "tune")}
    assert ("ns", "base") in cache.replace(
        RUNS, [run("base", uid="base", version=10)], version=99, covers=lambda _: True
    )
    assert index.users_of("ns", "base") == {("ns", "base")}
    assert not index._mounters


def test_a_claim_that_no_watch_shows_is_cached_while_a_run_refers_to_it(
    cache: InformerCache,
) -> None:
    index = cache.claim_index

    def look() -> None:
        for name in ("shared", "other"):
            metadata = {"name": name, "namespace": "ns", "uid": name}
            cache.see(CLAIMS, {"metadata": metadata, "spec": {}, "status": {}})
            index.note_fetched("ns", name, 5.0)

    look()
    assert not cache.store.claims
    for number in range(2):
        name = f"run-{number}"
        cache.see(RUNS, run(name, uid=name, claim="shared"))
    look()
    assert list(cache.store.claims) == [("ns", "shared")]
    cache.see(RUNS, run("run-0", uid="run-0", version=11, claim="other"))
    look()
    # The first run is edited to another claim, the second is deleted.
    cache.forget(RUNS, run("run-1", uid="run-1"))
    assert list(cache.store.claims) == [("ns", "other")]
    assert index.fetched_at("ns", "other") == 5.0
    assert index.fetched_at("ns", "shared") == float("-inf")
    cache.replace(RUNS, [], version=99, covers=lambda _: True)
    assert not cache.store.claims
    assert not index._keepers and not index._fetched_at


def test_the_claim_of_a_run_stays_cached_after_the_run_is_deleted(
    cache: InformerCache,
) -> None:
    metadata = {"name": "run", "namespace": "ns", "uid": "p", "resourceVersion": "12"}
    claim = {
        "metadata": {**metadata, "labels": {"evergrad.dev/run": "run"}},
        "spec": {},
        "status": {},
    }
    cache.see(RUNS, run())
    cache.see(CLAIMS, claim, is_watched=True)
    cache.see(RUNS, run(version=11), is_deleted=True, is_watched=True)
    assert cache.claim(*KEY) is not None


def test_only_runs_with_overlapping_folders_are_queued_for_changes_of_each_other(
    cache: InformerCache,
) -> None:
    def at(name: str, path: str, version: int, phase: str = "Pending") -> dict[str, Any]:
        made = run(name, uid=name, version=version, claim="shared")
        made["spec"]["storage"]["path"] = path
        return {**made, "status": {"phase": phase}}

    cache.see(RUNS, at("old", "team/a", 1))
    cache.see(RUNS, at("apart", "team/b", 2))
    assert cache.see(RUNS, at("new", "team/a/deep", 3)) == (("ns", "new"), ("ns", "old"))
    assert cache.see(RUNS, at("old", "team/a", 4, "Running")) == (("ns", "old"),)
    assert cache.see(RUNS, at("old", "team/a", 5, "Failed")) == (
        ("ns", "old"),
        ("ns", "new"),
    )
    assert cache.replace(RUNS, [], version=9, covers=lambda _: True) == {
        ("ns", "old"),
        ("ns", "new"),
        ("ns", "apart"),
    }
    cache.see(RUNS, at("first", "x", 10))
    cache.see(RUNS, at("second", "x", 11))
    assert cache.see(RUNS, at("first", "x", 12), is_deleted=True, is_watched=True) == (
        ("ns", "first"),
        ("ns", "second"),
    )


def test_children_are_cached_by_kind_and_name_and_removed_by_a_list(
    cache: InformerCache,
) -> None:
    metadata = {**pod("run-config")["metadata"], "uid": "c", "resourceVersion": "5"}
    cache.see(
        CHILDREN, {"kind": "ConfigMap", "metadata": metadata, "data": {"much": "x" * 1000}}
    )
    assert list(cache.children(KEY)) == [("ConfigMap", "run-config")]
    assert "data" not in cache.children(KEY)["ConfigMap", "run-config"]
    assert cache.replace(CHILDREN, [], version=9, covers=lambda namespace: True) == {KEY}
    assert cache.store.known() == set()


def test_a_watch_is_late_until_it_shows_the_response_of_a_write() -> None:
    now = [100.0]
    cache = InformerCache(clock=lambda: now[0])
    cache.see(PODS, pod(version=10))
    now[0] = 130.0
    assert cache.expectations.lag() == {RUNS: 0.0, PODS: 30.0}
    cache.see(PODS, pod(version=9), is_watched=True)
    assert cache.expectations.lag()[PODS] == 30.0
    cache.see(PODS, pod(version=10), is_watched=True)
    assert cache.expectations.lag() == {RUNS: 0.0, PODS: 0.0}


def test_a_slimmed_pod_keeps_the_fields_that_are_read_and_drops_the_rest() -> None:
    raw = pod(
        phase="Running",
        podIP="10.0.0.1",
        podIPs=[{"ip": "10.0.0.1"}],
        containerStatuses=[{"name": "node"}],
    )
    raw["metadata"] |= {"managedFields": [1], "ownerReferences": [{"uid": "r1"}]}
    raw["spec"] = {
        "nodeName": "n1",
        "containers": [{"name": "node", "image": "i", "env": [1]}],
        "volumes": [1, {"name": "evergrad-tmp"}, {"name": "evergrad-token", "secret": {}}],
    }
    slim = slim_pod(raw)
    assert slim["spec"] == {
        "nodeName": "n1",
        "containers": [{"name": "node", "image": "i"}],
        "volumes": [{"name": "evergrad-token"}],
    }
    assert slim["status"] == {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "containerStatuses": [{"name": "node"}],
    }
    assert "managedFields" not in slim["metadata"] and slim["metadata"][
        "ownerReferences"
    ] == [{"uid": "r1"}]


@pytest.mark.parametrize("resource", [RUNS, PODS])
def test_a_response_that_the_watch_has_already_shown_is_not_expected_again(
    resource: str,
) -> None:
    now = [0.0]
    cache = InformerCache(clock=lambda: now[0])
    build = run if resource == RUNS else pod
    cache.see(resource, build(version=10), is_watched=True)
    cache.see(resource, build(version=10))  # a LIST, or an apply that changed nothing
    cache.see(resource, build(version=9))  # a response that was read late
    now[0] = 180.0
    assert cache.expectations.lag()[resource] == 0.0
    cache.replace(resource, [build(version=10)], version=50, covers=lambda namespace: True)
    now[0] = 360.0
    assert cache.expectations.lag()[resource] == 0.0


def test_deleted_objects_are_not_expected_from_the_watch(cache: InformerCache) -> None:
    now = [0.0]
    cache = InformerCache(clock=lambda: now[0])
    cache.see(PODS, pod("run-0-0", uid="a", version=10))
    cache.see(PODS, pod("run-1-0", uid="b", version=11))
    cache.see(PODS, pod("run-2-0", uid="c", version=12))
    cache.see(RUNS, run(uid="old", version=13))
    now[0] = 180.0
    cache.forget(PODS, pod(uid="a"))
    cache.replace(
        PODS,
        [pod("run-2-0", uid="c", version=12)],
        version=20,
        covers=lambda namespace: True,
    )
    assert cache.expectations.lag() == {PODS: 180.0, RUNS: 180.0}
    # The event of a deletion has its own version, which is newer than every response about the object.
    cache.see(PODS, pod("run-2-0", uid="c", version=15), is_deleted=True, is_watched=True)
    cache.see(PODS, pod("run-2-0", uid="c", version=14))  # its response comes after its end
    cache.see(
        RUNS, run(uid="new", version=21), is_watched=True
    )  # no event reported the end of the previous one
    now[0] = 360.0
    assert cache.expectations.lag() == {PODS: 0.0, RUNS: 0.0}


def test_lateness_of_a_silent_watch_grows_although_its_object_is_written_again() -> None:
    now = [0.0]
    cache = InformerCache(clock=lambda: now[0])
    for version in range(10, 30):
        cache.see(RUNS, run(version=version))
        now[0] += 10.0
    assert cache.expectations.lag()[RUNS] == 200.0


def test_the_last_state_of_a_deleted_pod_is_kept_for_a_bounded_time() -> None:
    now = 100.0
    cache = InformerCache(clock=lambda: now)
    cache.see(PODS, pod(version=10, phase="Running"), is_watched=True)
    assert cache.gone(KEY) == []
    # A response reports that the object is deleted; then the watch shows its last version.
    cache.forget(PODS, pod(version=10))
    now += 2.0
    cache.see(PODS, pod(version=11, phase="Failed"), is_deleted=True, is_watched=True)
    [(raw, seconds)] = cache.gone(KEY)
    assert (raw["status"], seconds) == ({"phase": "Failed"}, 2.0)
    assert cache.gone(("ns", "other")) == []
    # The change in a written status is not counted again, although an event may still come.
    cache.drop_gone(KEY, ["u1", "unknown"])
    cache.see(PODS, pod(version=12, phase="Failed"), is_deleted=True, is_watched=True)
    assert cache.gone(KEY) == []
    now += 58.0
    assert cache.gone(KEY) == []


def test_deleted_pods_are_forgotten_if_their_run_loses_no_more_pods() -> None:
    now = 100.0
    cache = InformerCache(clock=lambda: now)
    other = pod("other-0-0", uid="u2")
    other["metadata"]["labels"] = {"evergrad.dev/run": "other"}
    cache.see(PODS, other, is_deleted=True, is_watched=True)
    for number in range(3):
        now += 50.0
        cache.see(PODS, pod(uid=f"n{number}"), is_deleted=True, is_watched=True)
    assert list(cache._gone._runs) == [KEY]
    assert [raw["metadata"]["uid"] for raw, _ in cache.gone(KEY)] == ["n1", "n2"]
