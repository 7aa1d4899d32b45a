"""Adds an observation to the memory of a run: ends of pods, the coordinator's counters, progress. Pure.

``ends`` counts the ends of nodes, ``budget`` the failures, ``host_faults`` the troubles of hosts;
``root_cause`` names what failed.
"""

from dataclasses import replace
from typing import Final, TypeVar

from evergrad_common.causes import PodCause
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.images import pin_image
from evergrad_operator.core.observe.coordinator_status import CoordinatorStatus
from evergrad_operator.core.observe.evaluation import Tries
from evergrad_operator.core.observe.memory import (
    MAX_CAUSES,
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
"""Changes of the group, as the coordinator counts them, that restarted a worker inside its pod."""
_FORMED: Final = ("Running", "Draining")
"""Phases of a coordinator whose group is up."""


def remember(observation: Observation, config: Config, now: float) -> Memory:
    """Return the run's memory with everything that is new in the observation. ``now``: seconds since 1970."""
    memory = _note_image(
        _begin(observation, config),
        observation,
        config,
    )

    # Progress comes before the ends of pods: it takes back the failures that it followed, and says whether a
    # group has formed, which decides what an exit code 64 means. The last answer about a complete run may be
    # older than its last step, which is noted.
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
    # The ends come first: the answer that follows them is the one from which on steps are progress again.
    is_answered = is_current(observation, memory)
    if is_answered:
        memory = begin_count(memory, observation)
    return note_usage(memory, observation, now, is_current=is_answered)


def is_current(observation: Observation, memory: Memory) -> bool:
    """Whether the progress is that of the run's newest coordinator, of this restart."""
    progress, live = observation.progress, observation.live_coordinator
    return (
        progress is not None
        and live is not None
        and live.attempt == progress.attempt
        and live.restart == memory.restart
    )


def _begin(observation: Observation, config: Config) -> Memory:
    """Return the memory with images and recipe, which are settled at first sight, and again at a restart: an
    operator's upgrade never mixes images."""
    run, memory = observation.run, observation.status
    nonce = run.spec.restart_nonce
    # There may be hosts for fewer nodes. Each pass looks: the next one does not know the higher minimum.
    if memory.min_nodes is not None and run.spec.nodes.min < memory.min_nodes:
        memory = _end_pause(memory, observation)
    # A restart takes the profile as it is then. While that is wrong, the run stays what it was: its pods
    # train, and it continues as before if the new nonce is taken back.
    is_restart_unsettled = (
        bool(memory.recipe_hash)
        and memory.profile_note not in ("", UNSETTLED)
        and run.profile.note == UNSETTLED
    )
    if is_restart_unsettled:
        return memory
    if not memory.is_known:
        # The status is lost, or was never written: pods that are there show how often the run was restarted.
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
        # Nodes of old and new settings would wait for one another, at a save that only some of them make: all
        # leave, with their state saved, and come again. Budgets and image stay: no restart was asked for.
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

    # The hash follows the file: one of an older release, of the spelling, becomes that of the meaning here.
    # A file that cannot be read says nothing about the recipe, and what is over is not written any more.
    is_readable, applied = not run.parsed.problems, observation.applied
    keeps_recipe = bool(memory.recipe_hash) and (
        not is_readable or memory.finish is not None
    )
    coordinator_image = memory.coordinator.image or config.operator_image
    # The image may be the profile's: while that is wrong, or was at the last look, none is settled.
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
    """Return the memory of a run that asks for pods again, or goes on with those that it was to give back."""
    recorded = memory.recorded
    if memory.come_again_at:
        # Their end was to count for nothing, and they stay.
        recorded -= {pod.index for pod in observation.nodes if pod.is_live}
    return replace(memory, given_back=0, come_again_at=0.0, recorded=recorded)


def _begin_anew(memory: Memory, nonce: str | None) -> Memory:
    """Return the memory of a run that a new ``restartNonce`` starts again: budgets and images begin anew."""
    return replace(
        memory,
        restart=memory.restart + 1,
        restart_nonce=nonce,
        finish=None,
        finishing_since=None,
        stop_reason="",
        start_time=None,
        # Files may have been corrected where no step shows that they were right.
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
    """Whether a run that goes on was edited to other settings than its pods have."""
    run, memory = observation.run, observation.status
    # Without a new generation only the operator is another, whose hash covers more or fewer fields.
    new = run.parsed.settings_hash
    if not run.has_new_spec or not new or memory.finish is not None or run.parsed.problems:
        return False

    # An older release noted no hash: its pods have what their ConfigMap has.
    known = memory.settings_hash
    if not known and observation.applied is not None:
        known = observation.applied.hash
    if not known:
        # It cannot be known. Pods that began with one file and get another one never agree, so that all of
        # them leave and come again.
        return any(attempt >= 0 for attempt in memory.attempts)
    return new != known


def _note_image(memory: Memory, observation: Observation, config: Config) -> Memory:
    """Note the image of the first pod: all later pods of this restart ask for it, until a host cannot get
    it by that name."""
    pods = [pod for pod in observation.nodes if pod.restart == memory.restart]
    # The first pod that runs decides for all: a tag may be moved at any time.
    if not memory.image_id:
        first = next((pod for pod in pods if pod.image_id), None)
        if first is None:
            return memory
        policy = observation.run.spec.image_pull_policy or config.image_pull_policy
        # Where nothing is ever pulled, images lie on hosts by the names under which they were brought.
        pin = "" if policy == "Never" else pin_image(memory.image, first.image_id)
        return replace(memory, image_id=first.image_id, image_pin=pin)

    # A host that has the image only by its tag, as where images are brought by hand, cannot get the digest.
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
    """Count the loss of a coordinator, whose pod has ended, is leaving, has vanished or was replaced
    unseen."""
    pods = {pod.attempt: pod for pod in observation.coordinators}
    newest = max(pods, default=-1)
    known = memory.coordinator
    # A newer pod than the one that is known: the operator died between its creation and the note of it. The
    # loss of the older one has not been counted.
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

    # A pod that is gone counts as one that has ended: its end came in a gap of the watch.
    is_lost = known.attempt >= 0 and (pod is None or pod.is_over)
    if is_lost and not known.is_recorded:
        memory = _add_lost_coordinator(
            memory,
            observation,
            pod,
            config,
            now,
        )
    # It has never run: the one that takes its place is no restart.
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
    """Count the loss of the known coordinator, unless the operator itself sent it away."""
    known = replace(memory.coordinator, is_recorded=True)
    claim, run = observation.claim, observation.run
    # The end is written on the PVC before the coordinator goes, and into the status only after that: a new
    # operator may find the one without the other.
    record = claim.records.get(run.name) if claim else None
    is_complete = (
        record is not None and record.complete is not None and record.uid == run.uid
    )
    is_of_before = pod is not None and pod.restart < memory.restart
    if is_complete or is_of_before or is_letting_go(observation, memory):
        return replace(memory, coordinator=known)

    # A coordinator that dies young again and again is made ever later; its loss costs no failure, since
    # training goes on.
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
    """Merge the answer of the run's coordinator; values that it lacks after its restart stay as they were."""
    known = memory.training
    is_new = progress.step is not None and progress.step != known.step
    ago = progress.updated_seconds_ago or 0.0
    has_saved = (
        progress.checkpoint_step is not None
        and progress.checkpoint_step != known.checkpoint_step
    )
    # Only the node of rank 0 sees saves end: a new one knows nothing of them until its first has ended.
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

    # A step of this coordinator's own group shows that one was up, also where no poll fell into that time.
    has_formed = memory.has_formed or progress.phase in _FORMED or progress.step is not None
    # It shows, too, that the exit codes 64 before it were not the input's fault.
    memory = replace(
        memory,
        training=training,
        has_formed=has_formed,
        input_errors=() if has_formed else memory.input_errors,
    )
    # The last words about a group whose pods were given back end no pause. One that is still there goes on,
    # also where ``nodes.min`` was raised since.
    has_pods = any(pod.is_live and pod.is_running for pod in observation.nodes)
    if progress.phase in _FORMED and has_pods:
        memory = _end_pause(memory, observation)

    # The order matters: counters before the outcome, which names the failure that the counters count.
    memory = _add_counters(memory, progress)
    memory = note_outcome(memory, progress.last_failure, now)
    return forgive(memory, observation, progress)


def _newer(new: Value | None, known: Value | None) -> Value | None:
    """Return the new value, or the known one where there is none. 0 is a value."""
    return known if new is None else new


def _add_counters(memory: Memory, progress: CoordinatorStatus) -> Memory:
    """Add what the coordinator has counted since its last reading. Each coordinator counts from 0."""
    known = memory.coordinator
    if known.attempt != progress.attempt:
        known = Coordinator(progress.attempt, known.image, is_queued=known.is_queued)
    restarts, lost = dict(memory.restarts), dict(memory.lost_seconds)

    # Restarts that no pod shows: a worker was started again inside its pod.
    for name in IN_POD_CAUSES:
        more = progress.restarts.get(name, 0) - known.restarts.get(name, 0)
        key = CAUSES.get(name, PodCause.WORKER_CRASH).value
        if more > 0:
            restarts[key] = restarts.get(key, 0) + more

    # Seconds are kept whole: a fraction would make a status write of every answer.
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
