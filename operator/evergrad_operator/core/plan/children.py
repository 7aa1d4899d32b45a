"""Plans all objects to apply, create and delete for a decision."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_operator.core.decision import Action, Decision, NodeBounds
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.kinds import POD_GROUP
from evergrad_operator.core.objects.raw import get_map, get_text
from evergrad_operator.core.observe.memory import add_hosts
from evergrad_operator.core.observe.observe import Observation, is_deleted_with
from evergrad_operator.core.plan.claim import (
    NOTHING_STALE,
    StaleRecords,
    build_claim,
    find_stale_records,
    is_for_one_host,
)
from evergrad_operator.core.plan.common import JsonObject, pass_labels, with_hash
from evergrad_operator.core.plan.config_map import build_config_map
from evergrad_operator.core.plan.coordinator_pod import Epoch, build_coordinator_pod
from evergrad_operator.core.plan.disruption_budget import (
    build_coordinator_budget,
    build_disruption_budget,
)
from evergrad_operator.core.plan.evaluation_pod import build_evaluation_pod
from evergrad_operator.core.plan.network_policy import build_network_policy
from evergrad_operator.core.plan.node_pod import NodePlan, build_node_pod
from evergrad_operator.core.plan.pod_group import (
    build_pod_group,
    is_fixed,
    is_of_kubernetes,
)
from evergrad_operator.core.plan.preparation_pod import build_preparation_pod
from evergrad_operator.core.plan.service import build_service
from evergrad_operator.core.plan.token import build_token_secret

Object = Mapping[str, Any]
OWNED_KINDS: Final = (
    "ConfigMap",
    "Service",
    "PodDisruptionBudget",
    "NetworkPolicy",
    POD_GROUP,
)
"""Kinds of the children other than pods and the PVC."""
_SWITCHED: Final = ("PodDisruptionBudget", "NetworkPolicy")
"""Kinds that the installation or the phase of a run switches on and off."""


@dataclass(frozen=True)
class Deletion:
    """One object to delete.

    ``uid``, ``resource_version``: preconditions; empty for none. ``grace_seconds``: None uses the object's
    own grace period. ``version``: API version, for a kind that exists in several API groups.
    """

    kind: str
    name: str
    uid: str = ""
    grace_seconds: int | None = None
    version: str = ""
    resource_version: str = ""


@dataclass(frozen=True)
class ObjectPlan:
    """The steps of a pass, in the order of the fields.

    ``claim``: PVC to apply with the field manager ``claim_manager``, after ``stale_records`` are removed from
    it.
    ``token``: the run's Secret, to POST before any pod. It is no error if the Secret exists.
    ``apply``: whole objects to apply with the operator's field manager.
    ``bounds``: bounds to send to the coordinator.
    ``delete``: objects to delete.
    ``create``: pods to POST. If a pod exists already, the run has to be observed again.
    """

    claim: Object | None = None
    claim_manager: str = ""
    stale_records: StaleRecords = NOTHING_STALE
    token: Object | None = None
    apply: tuple[Object, ...] = ()
    bounds: NodeBounds | None = None
    delete: tuple[Deletion, ...] = ()
    create: tuple[Object, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.claim or self.apply or self.bounds or self.delete or self.create)


def plan_children(
    observation: Observation, decision: Decision, config: Config, *, token: str
) -> ObjectPlan:
    """Plan all objects to apply, delete and create for the decision. Objects that are up to date are left
    out.

    ``token``: the run's token.
    """
    run = observation.run
    claim = _plan_claim(observation, decision, config)
    stale_records = NOTHING_STALE
    if claim is not None:
        stale_records = find_stale_records(run, observation.claim, observation.claim_users)

    # Apply only objects whose hash has changed, because every apply is a write.
    is_running = decision.action == Action.RUN
    wanted = _build_wanted(observation, decision, config) if is_running else {}
    apply = tuple(
        child
        for key, child in wanted.items()
        if observation.hashes.get(key)
        != child["metadata"]["annotations"][names.ANNOTATION_HASH]
    )

    # Secrets are not watched, so create the Secret before any pod, whether it exists or not. Also create it
    # if a pod has a host and does not run, because the Secret may have been deleted.
    create = tuple(
        pass_labels(pod, run, config)
        for pod in _build_pods(observation, decision, config, token)
    )
    everything = (
        *observation.nodes,
        *observation.coordinators,
        *observation.preparations,
    )
    waits_for_volumes = is_running and any(
        pod.is_live and pod.node_name and not pod.is_running for pod in everything
    )
    return ObjectPlan(
        claim=claim,
        claim_manager=names.claim_field_manager(run.name),
        stale_records=stale_records,
        token=build_token_secret(run, token) if create or waits_for_volumes else None,
        apply=apply,
        bounds=decision.bounds,
        delete=_plan_deletions(
            observation, decision, frozenset(wanted), is_claim_due=claim is not None
        ),
        create=create,
    )


def _plan_claim(
    observation: Observation, decision: Decision, config: Config
) -> JsonObject | None:
    """Return the claim to apply; None if it is up to date or does not change now."""
    # A run that waits or is being deleted does not change its PVC, with one exception: a waiting run gives up
    # the ownership of a claim that has to stay. Otherwise a deletion of the run would delete the claim. The
    # run can own the claim again later.
    run, live = observation.run, observation.claim
    is_owned = is_deleted_with(run, live, observation.claim_users)
    mark = live.annotations.get(names.ANNOTATION_DELETED_WITH) if live is not None else None
    is_given_up = mark == run.uid and not is_owned and not run.is_deleting
    if decision.action == Action.HOLD and not is_given_up:
        return None
    return build_claim(run, decision.record, config, live, is_owned=is_owned)


def _plan_deletions(
    observation: Observation,
    decision: Decision,
    wanted: frozenset[tuple[str, str]],
    *,
    is_claim_due: bool,
) -> tuple[Deletion, ...]:
    # The deletion of a run deletes everything that the run owns. Apply the claim first, so that a claim that
    # storage.whenDeleted keeps has no owner. The resource version is a precondition: a run that was changed
    # since this observation is not deleted.
    if decision.deletes_run:
        run = observation.run
        version = get_text(get_map(run.raw, "metadata"), "resourceVersion")
        the_run = Deletion(names.KIND, run.name, run.uid, resource_version=version)
        return () if is_claim_due else (the_run,)

    is_running = decision.action == Action.RUN
    # The uid is a precondition, so that a new pod with the same name is not deleted instead.
    delete = [
        Deletion("Pod", pod.name, pod.uid, pod.grace_seconds)
        for pod in decision.pods_to_delete
    ]
    # Delete all children at the end. Before the end, delete only children that were switched off, and the
    # Kubernetes PodGroup of a suspended or restarted run, because its priority class cannot change. A
    # ConfigMap or Service is never deleted before the end.
    is_idle = decision.action == Action.STOP and all(pod.end for pod in observation.nodes)
    for kind, name in observation.hashes:
        group = observation.group_kind if kind == POD_GROUP else None
        is_switched_off = kind in _SWITCHED and is_running and (kind, name) not in wanted
        is_renewed = is_idle and group is not None and is_of_kubernetes(group)
        # If the API server no longer has the PodGroup kind, its objects are gone and cannot be deleted.
        is_there = kind != POD_GROUP or group is not None
        is_over = decision.action == Action.CLEAN and kind in OWNED_KINDS and is_there
        if is_switched_off or is_renewed or is_over:
            delete.append(Deletion(kind, name, version=group.version if group else ""))
    return tuple(delete)


def _build_wanted(
    observation: Observation, decision: Decision, config: Config
) -> dict[tuple[str, str], JsonObject]:
    """Build all children of a running run except pods and the PVC, by kind and name."""
    run, live = observation.run, observation.live_coordinator
    attempt = decision.coordinator_attempt
    if attempt is None and live is not None:
        attempt = live.attempt
    wanted = [build_config_map(run)]
    if attempt is not None:
        wanted.append(build_service(run, attempt=attempt))

    # Create budgets only after a group has formed. Earlier they protect no work and cost time, because
    # Kubernetes checks all budgets of a namespace for each pod.
    has_budgets = any(kind == "PodDisruptionBudget" for kind, _ in observation.hashes)
    if config.disruption_budgets and (decision.phase == names.Phase.RUNNING or has_budgets):
        budget = build_disruption_budget(run)
        if budget:
            wanted.append(budget)
        # Protect the coordinator during a change of the group, because no other coordinator can complete it.
        progress = observation.progress
        is_regrouping = (
            progress is not None
            and live is not None
            and progress.attempt == live.attempt
            and progress.phase in ("Starting", "Draining")
        )
        wanted.append(build_coordinator_budget(run, is_needed=is_regrouping))
    if config.network_policies:
        wanted.append(build_network_policy(run, config))

    # An existing PodGroup follows nodes.min, even down to 1, if its API version allows changes.
    group = observation.group_kind
    has_group = (POD_GROUP, run.name) in observation.hashes
    is_ours = has_group or decision.joins_group
    if group is not None and is_ours and not (has_group and is_fixed(group)):
        priority = _find_group_priority(observation)
        # Keep the restart at which the PodGroup was created. An older restart shows that it has to be
        # recreated.
        restart = observation.group_restart if has_group else decision.memory.restart
        wanted.append(build_pod_group(run, group, priority_class=priority, restart=restart))
    return {
        (child["kind"], child["metadata"]["name"]): with_hash(
            pass_labels(child, run, config)
        )
        for child in wanted
    }


def _build_pods(
    observation: Observation,
    decision: Decision,
    config: Config,
    token: str,
) -> Iterator[JsonObject]:
    """Yield the pods to create. The coordinator comes before the nodes, because nodes connect to it."""
    run, attempt = observation.run, decision.preparation_attempt
    memory = add_hosts(decision.memory, observation.troubled_hosts)
    if attempt is not None:
        yield build_preparation_pod(run, memory, config, attempt, token=token)
    if decision.evaluation is not None:
        yield build_evaluation_pod(run, memory, config, decision.evaluation)

    attempt = decision.coordinator_attempt
    if attempt is not None:
        epoch = _plan_epoch(observation, decision, attempt)
        yield build_coordinator_pod(
            run,
            memory,
            config,
            epoch,
            token=token,
        )

    is_on_one_host = is_for_one_host(run, config, observation.claim)
    # A coordinator that was created by an operator without tokens rejects nodes that present a token.
    serving = [pod for pod in observation.coordinators if pod.is_live]
    if decision.coordinator_attempt is None and not all(pod.has_token for pod in serving):
        token = ""
    for index, attempt in decision.nodes_to_create:
        node = NodePlan(
            index,
            attempt,
            is_on_one_host=is_on_one_host,
            gang=decision.gang,
            joins_group=decision.joins_group,
            group_priority=_find_group_priority(observation),
        )
        yield build_node_pod(run, memory, config, node, token=token)


def _plan_epoch(observation: Observation, decision: Decision, attempt: int) -> Epoch:
    """Return what a new coordinator knows about the nodes: how many it waits for, and whether none runs."""
    # The start of a queued run waits for nodes that are starting, but not for nodes above the minimum that
    # the queue admits later. Those nodes join later, which costs steps only if workers restart for a join.
    run = observation.run
    expect = run.spec.nodes.largest
    is_queued = bool(run.queue)
    coming = {
        pod.index for pod in observation.nodes if pod.is_live and not pod.place.is_gated
    }
    coming |= {index for index, _ in decision.nodes_to_create}
    # A new coordinator waits for the nodes that run now, because it takes over the existing group.
    running = sum(pod.is_live and pod.is_running for pod in observation.nodes)
    if running or (is_queued and coming and run.parsed.recovery == "in-process"):
        expect = min(max(running or len(coming), run.spec.nodes.min), expect)
    # A gated pod waits in a queue and has never run.
    all_ended = all(pod.end is not None or pod.place.is_gated for pod in observation.nodes)
    return Epoch(attempt, expect, nothing_runs=all_ended and attempt > 0)


def _find_group_priority(observation: Observation) -> str:
    """Return the priority class of the run's PodGroup. An existing PodGroup keeps its priority class."""
    if (POD_GROUP, observation.run.name) in observation.hashes:
        return observation.group_priority
    return observation.run.spec.template.priority_class_name or ""
