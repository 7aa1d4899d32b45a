"""Adds an observation to the memory of a run: ends of pods, the coordinator's counters, and progress. Pure.

``pod_ends`` counts the ends of nodes, ``budget`` counts failures, ``host_faults`` counts faults of hosts, and
``root_cause`` determines which component failed.
"""

from dataclasses import replace
from typing import Final, TypeVar

from evergrad_common.causes import PodCause
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.images import pin_image
from evergrad_operator.core.objects.status_kinds import MAX_CAUSES
from evergrad_operator.core.observe.coordinator_status import CoordinatorStatus
from evergrad_operator.core.observe.evaluation import Tries
from evergrad_operator.core.observe.memory import (
    Budget,
    Coordinator,
    EndRecord,
    HostFaults,
    Memory,
    RecordedTraining,
    count_restart,
)
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.core.observe.pods import PodState
from evergrad_operator.core.observe.profiles import UNSETTLED
from evergrad_operator.core.policies.budget import add_short_life, begin_count, forgive
from evergrad_operator.core.policies.evaluation_ends import note_evaluation
from evergrad_operator.core.policies.pod_ends import is_letting_go, note_nodes
from evergrad_operator.core.policies.preparation_ends import note_preparation
from evergrad_operator.core.policies.root_cause import CAUSES, note_outcome
from evergrad_operator.core.policies.time_accounting import note_usage

Value = TypeVar("Value")
IN_POD_CAUSES: Final = (
    "worker_crash",
    "out_of_memory",
    "stuck",
    "setup_failed",
    "environment",
    "volume_full",
)
"""Causes, as the coordinator counts them, for which a worker was restarted inside its pod."""
_FORMED: Final = ("Running", "Draining")
"""Phases in which the coordinator's group has formed."""


def remember(observation: Observation, config: Config, now: float) -> Memory:
    """Return the run's memory, updated with the observation. ``now``: seconds since 1970."""
    memory = _note_image(
        _begin(observation, config),
        observation,
        config,
    )

    # Note progress before the ends of pods. Progress forgives the failures before it, and shows whether a
    # group has formed, which determines the meaning of exit code 64. Skip a complete run: its last status
    # from the coordinator may be older than the recorded last step.
    if (
        observation.progress is not None
        and is_current(observation, memory)
        and not memory.is_complete
    ):
        memory = _note_progress(
            memory,
            observation,
            observation.progress,
            now,
        )
    memory = note_nodes(memory, observation, config, now)
    memory = note_preparation(memory, observation, config, now)
    memory = note_evaluation(memory, observation, config, now)
    memory = _note_coordinators(memory, observation, config, now)
    # Note the ends before the count begins: only steps after the coordinator's next status are progress
    # again.
    is_answered = is_current(observation, memory)
    if is_answered:
        memory = begin_count(memory, observation)
    return note_usage(memory, observation, now, is_current=is_answered)


def is_current(observation: Observation, memory: Memory) -> bool:
    """Return whether the progress comes from the run's newest coordinator, in the current restart."""
    progress, live = observation.progress, observation.live_coordinator
    return (
        progress is not None
        and live is not None
        and live.attempt == progress.attempt
        and live.restart == memory.restart
    )


def _begin(observation: Observation, config: Config) -> Memory:
    """Return the memory with the run's images and recipe.

    Both are chosen when the run is first observed, and again at a restart. An upgrade of the operator
    therefore never mixes images within a run.
    """
    run, memory = observation.run, observation.status
    nonce = run.spec.restart_nonce
    # With a lower minimum, the hosts may be enough. Check this in each pass, because the memory stores the
    # new minimum and the next pass can no longer detect the change.
    if memory.min_nodes is not None and run.spec.nodes.min < memory.min_nodes:
        memory = _end_pause(memory, observation)
    # A restart uses the profile as it is at that time. While that profile is not valid, keep the memory
    # unchanged: the pods train, and the run continues as before if the user reverts the new nonce.
    is_restart_unsettled = (
        bool(memory.recipe_hash)
        and memory.profile_note not in ("", UNSETTLED)
        and run.profile.note == UNSETTLED
    )
    if is_restart_unsettled:
        return memory
    if not memory.is_known:
        # The status was lost or never written: existing pods show how many times the run was restarted.
        everything = (
            *observation.nodes,
            *observation.coordinators,
            *observation.preparations,
            *observation.evaluations,
        )
        visible = max((pod.restart for pod in everything), default=0)
        memory = replace(memory, restart_nonce=nonce, restart=max(memory.restart, visible))
    elif nonce != memory.restart_nonce and not memory.is_complete:
        memory = _begin_anew(memory, nonce)
    elif _has_other_settings(observation):
        # Nodes with old and new settings would deadlock, for example at a save that only some of them make.
        # All nodes therefore save, leave and start again. Budgets and image stay, because the user did not
        # request a restart.
        memory = replace(
            memory,
            restart=memory.restart + 1,
            coordinator=replace(memory.coordinator, is_recorded=True),
            preparation=replace(memory.preparation, is_recorded=True),
            evaluation=replace(memory.evaluation, is_recorded=True),
            has_formed=False,
            input_errors=(),
            recorded=frozenset(range(len(memory.attempts))),
        )

    # Update the hash from the file. Older releases hashed the text of the file; the hash of its meaning
    # replaces such a hash here. Keep the hash if the file cannot be read or the run is over.
    is_readable, applied = not run.parsed.problems, observation.applied
    keeps_recipe = bool(memory.recipe_hash) and (
        not is_readable or memory.finish is not None
    )
    coordinator_image = memory.coordinator.image or config.operator_image
    # The profile may set the image. Choose the image again if the profile is not valid, or was not valid in
    # the previous pass.
    image = "" if UNSETTLED in (memory.profile_note, run.profile.note) else memory.image
    return replace(
        memory,
        profile=run.profile.text,
        profile_note=run.profile.note,
        settings_hash=run.parsed.settings_hash if is_readable else memory.settings_hash,
        told_changes=memory.told_changes if applied is None else applied.changes_hash,
        image=image or run.spec.image or config.trainer_image,
        recipe_hash=memory.recipe_hash if keeps_recipe else run.parsed.recipe_hash,
        coordinator=replace(memory.coordinator, image=coordinator_image),
    )


def _end_pause(memory: Memory, observation: Observation) -> Memory:
    """Return the memory of a run that ends its pause.

    The run requests pods again, or continues with the pods that it was about to give back.
    """
    recorded = memory.recorded
    if memory.come_again_at:
        # The ends of these pods were marked as not to be counted. The pods stay, so their ends count again.
        recorded -= {pod.index for pod in observation.nodes if pod.is_live}
    return replace(memory, given_back=0, come_again_at=0.0, recorded=recorded)


def _begin_anew(memory: Memory, nonce: str | None) -> Memory:
    """Return the memory of a run that a new ``restartNonce`` restarts, with budgets and images reset."""
    return replace(
        memory,
        restart=memory.restart + 1,
        restart_nonce=nonce,
        finish=None,
        finishing_since=None,
        stop_reason="",
        start_time=None,
        # Prepare the data again if no step was trained: the user may have corrected the input files.
        preparation=replace(
            memory.preparation,
            is_recorded=True,
            prepared="" if memory.training.step is None else memory.preparation.prepared,
        ),
        evaluation=replace(
            memory.evaluation, is_recorded=True, failed=0, failure="", tries=Tries()
        ),
        image="",
        image_id="",
        image_pin="",
        coordinator=replace(memory.coordinator, image="", is_recorded=True),
        budget=Budget(),
        faults=HostFaults(at=memory.faults.at),
        given_back=0,
        come_again_at=0.0,
        input_errors=(),
        has_formed=False,
        recorded=frozenset(range(len(memory.attempts))),
    )


def _has_other_settings(observation: Observation) -> bool:
    """Return whether an edit gave a run that is not over other settings than its pods have."""
    run, memory = observation.run, observation.status
    # Without a new generation, only a new version of the operator can change the hash, because its hash
    # covers more or fewer fields.
    new = run.parsed.settings_hash
    if not run.has_new_spec or not new or memory.finish is not None or run.parsed.problems:
        return False

    # Older releases recorded no hash. Their pods have the settings in the ConfigMap.
    known = memory.settings_hash
    if not known and observation.applied is not None:
        known = observation.applied.hash
    if not known:
        # The pods' settings are unknown. Pods that started with different files never agree, so assume other
        # settings if any pod was created: all pods then leave and start again.
        return any(attempt >= 0 for attempt in memory.attempts)
    return new != known


def _note_image(memory: Memory, observation: Observation, config: Config) -> Memory:
    """Record the image digest of the first pod that runs.

    All later pods of this restart use this digest, unless a host cannot pull the image by digest.
    """
    pods = [pod for pod in observation.nodes if pod.restart == memory.restart]
    # Pin the digest of the first pod that runs, because a tag can be moved at any time.
    if not memory.image_id:
        first = next((pod for pod in pods if pod.image_id), None)
        if first is None:
            return memory
        policy = observation.run.spec.image_pull_policy or config.image_pull_policy
        # With the policy Never, a host has an image only by the name under which it was loaded.
        pin = "" if policy == "Never" else pin_image(memory.image, first.image_id)
        return replace(memory, image_id=first.image_id, image_pin=pin)

    # A host on which the image was loaded by hand has it only by its tag and cannot resolve the digest.
    preparing = [pod for pod in observation.preparations if pod.restart == memory.restart]
    is_unknown = any(
        pod.is_live and pod.is_image_missing and pod.waiting_image == memory.image_pin
        for pod in (*pods, *preparing)
    )
    return replace(memory, image_pin="") if is_unknown else memory


# ---- the coordinator ---------------------------------------------------------------------------------------


def _note_coordinators(
    memory: Memory,
    observation: Observation,
    config: Config,
    now: float,
) -> Memory:
    """Count the loss of a coordinator if its pod has ended, is leaving, has disappeared or was replaced."""
    pods = {pod.attempt: pod for pod in observation.coordinators}
    newest = max(pods, default=-1)
    known = memory.coordinator
    # If there is a newer pod than the recorded one, the operator stopped after creating the pod and before
    # recording it. The loss of the older pod has not been counted.
    if newest > known.attempt:
        if known.attempt >= 0 and not known.is_recorded:
            older = pods.get(known.attempt)
            memory = _add_lost_coordinator(
                memory,
                observation,
                older,
                config,
                now,
            )
        known = Coordinator(newest, known.image, is_queued=known.is_queued)
    pod = pods.get(known.attempt)
    memory = replace(memory, coordinator=known)

    # A pod that no longer exists counts as ended: the watch missed its end.
    is_lost = known.attempt >= 0 and (pod is None or pod.is_over)
    if is_lost and not known.is_recorded:
        memory = _add_lost_coordinator(
            memory,
            observation,
            pod,
            config,
            now,
        )
    # A stranded coordinator has never run, so its replacement is not a restart.
    if observation.is_coordinator_stranded:
        queued = replace(memory.coordinator, is_queued=True, is_recorded=True)
        memory = replace(memory, coordinator=queued)
    return memory


def _add_lost_coordinator(
    memory: Memory,
    observation: Observation,
    pod: PodState | None,
    config: Config,
    now: float,
) -> Memory:
    """Count the loss of the recorded coordinator, unless the operator itself deleted it."""
    known = replace(memory.coordinator, is_recorded=True)
    claim, run = observation.claim, observation.run
    # The completion is written to the PVC before the coordinator is deleted, and to the status only
    # afterwards. A new operator may therefore find the record without the status.
    record = claim.records.get(run.name) if claim else None
    is_complete = (
        record is not None and record.complete is not None and record.uid == run.uid
    )
    is_of_before = pod is not None and pod.restart < memory.restart
    if is_complete or is_of_before or is_letting_go(observation, memory):
        return replace(memory, coordinator=known)

    # If coordinators repeatedly end shortly after they start, the delay before the next one grows. The loss
    # does not count as a failure, because training continues.
    budget = memory.budget
    if pod is not None and now - pod.created_at < config.short_life_seconds:
        budget = add_short_life(budget, memory, config, now)
    code = pod.end.exit_code if pod and pod.end else None
    cause = PodCause.COORDINATOR_LOST
    end = EndRecord(
        names.coordinator_pod_name(run.name, known.attempt),
        cause,
        code,
        now,
    )
    return replace(count_restart(memory, end), coordinator=known, budget=budget)


def _note_progress(
    memory: Memory,
    observation: Observation,
    progress: CoordinatorStatus,
    now: float,
) -> Memory:
    """Merge the coordinator's status into the memory.

    Values that a restarted coordinator does not have yet keep their recorded value.
    """
    known = memory.training
    is_new = progress.step is not None and progress.step != known.step
    ago = progress.updated_seconds_ago or 0.0
    has_saved = (
        progress.checkpoint_step is not None
        and progress.checkpoint_step != known.checkpoint_step
    )
    # Only the node of rank 0 reports saves. A new rank 0 has no values until its first save has ended.
    saves = known if progress.failed_saves is None else progress
    training = RecordedTraining(
        generation=progress.generation or known.generation,
        step=_newer(progress.step, known.step),
        total_steps=progress.total_steps or known.total_steps,
        loss=_newer(progress.loss, known.loss),
        tokens_per_second=_newer(progress.tokens_per_second, known.tokens_per_second),
        eta_seconds=_newer(progress.eta_seconds, known.eta_seconds),
        checkpoint_step=_newer(progress.checkpoint_step, known.checkpoint_step),
        checkpoint_at=now if has_saved else known.checkpoint_at,
        ready=progress.ready,
        updated_at=now - ago if is_new else known.updated_at,
        failed_saves=saves.failed_saves,
        save_trouble=saves.save_trouble,
        save_message=saves.save_message,
    )

    # A step from this coordinator shows that a group has formed, even if no poll observed the group.
    has_formed = memory.has_formed or progress.phase in _FORMED or progress.step is not None
    # A formed group also shows that earlier exits with code 64 were not caused by wrong input.
    memory = replace(
        memory,
        training=training,
        has_formed=has_formed,
        input_errors=() if has_formed else memory.input_errors,
    )
    # A last status of a group whose pods were given back does not end the pause. If pods still run, the group
    # continues, even if ``nodes.min`` was raised.
    has_pods = any(pod.is_live and pod.is_running for pod in observation.nodes)
    if progress.phase in _FORMED and has_pods:
        memory = _end_pause(memory, observation)

    # Add the counters before the outcome, because the outcome describes a failure that the counters include.
    memory = _add_counters(memory, progress)
    memory = note_outcome(memory, progress.last_failure, now)
    return forgive(memory, observation, progress)


def _newer(new: Value | None, known: Value | None) -> Value | None:
    """Return the new value, or the known value if the new value is None. 0 is a value."""
    return known if new is None else new


def _add_counters(memory: Memory, progress: CoordinatorStatus) -> Memory:
    """Add the restarts and seconds that the coordinator has counted since the last poll.

    Each coordinator counts from 0.
    """
    known = memory.coordinator
    if known.attempt != progress.attempt:
        known = Coordinator(progress.attempt, known.image, is_queued=known.is_queued)
    restarts, lost = dict(memory.restarts), dict(memory.lost_seconds)

    # Add the restarts of workers inside their pods, which the pods do not show.
    for name in IN_POD_CAUSES:
        more = progress.restarts.get(name, 0) - known.restarts.get(name, 0)
        key = CAUSES.get(name, PodCause.WORKER_CRASH).value
        if more > 0:
            restarts[key] = restarts.get(key, 0) + more

    # Store whole seconds. With fractions, every poll would cause a write of the status.
    counted = {name: int(seconds) for name, seconds in progress.lost_seconds.items()}
    for name, whole in counted.items():
        more = whole - known.lost_seconds.get(name, 0)
        if more > 0 and (name in lost or len(lost) < MAX_CAUSES):
            lost[name] = lost.get(name, 0) + more
    seen = {
        name: progress.restarts[name]
        for name in IN_POD_CAUSES
        if progress.restarts.get(name)
    }
    coordinator = replace(known, restarts=seen, lost_seconds=counted)
    return replace(
        memory,
        restarts=restarts,
        lost_seconds=lost,
        coordinator=coordinator,
    )
