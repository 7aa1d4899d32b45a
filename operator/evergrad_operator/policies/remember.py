"""What an observation adds to the memory of a run: attempts, ends of pods, restarts, the coordinator's counters, progress.

Each end is counted once, whatever happens between two writes: a pod's end is counted when it is first seen to be over, and the
memory holds each node's newest attempt and whether its end is counted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from evergrad_coordinator.contract import ExitCode
from evergrad_operator import names
from evergrad_operator.config import Config
from evergrad_operator.memory import (
    MAX_CAUSES,
    MAX_ENDS,
    Budget,
    Coordinator,
    EndRecord,
    LastFailure,
    Memory,
    Training,
)
from evergrad_operator.names import Cause
from evergrad_operator.observe import Observation, Progress, hash_recipe
from evergrad_operator.pods import MAX_MESSAGE, PodState, describe_cause
from evergrad_operator.raw import keep_end

IN_POD_CAUSES = ("worker_crash", "out_of_memory", "stuck", "setup_failed")
"""Changes of the group, as the coordinator counts them, that restarted a worker inside its pod."""
_FREE_SHORT_LIVES = 3
_NODE_DIGITS = 7


_ECHO_SECONDS = 60.0
"""A node ends so soon after its coordinator has said which rank failed."""
_SAID_BEFORE = (ExitCode.USER_ERROR, ExitCode.INTERNAL)
"""Exit codes of a node that ends by itself, after its coordinator was told why."""


def remember(observation: Observation, config: Config, now: float) -> Memory:
    """The run's memory with everything that is new in the observation. ``now``: seconds since 1970."""
    memory = _begin(observation, config)
    memory = _note_progress(memory, observation, now)
    memory = _note_nodes(memory, observation, config, now)
    return _note_coordinators(memory, observation, config, now)


def is_current(observation: Observation, memory: Memory) -> bool:
    """Whether the progress is that of the run's newest coordinator, of this restart."""
    progress, live = observation.progress, observation.live_coordinator
    return progress is not None and live is not None and live.attempt == progress.attempt and live.restart == memory.restart


def _begin(observation: Observation, config: Config) -> Memory:
    """Images and recipe are settled at first sight, and again at a restart: an operator's upgrade never mixes images."""
    run, memory = observation.run, observation.status
    nonce = run.spec.restart_nonce
    if not memory.is_known:
        visible = max((pod.restart for pod in (*observation.nodes, *observation.coordinators)), default=0)
        memory = replace(memory, restart_nonce=nonce, restart=max(memory.restart, visible))
    elif nonce != memory.restart_nonce and not _is_complete(memory):
        memory = replace(
            memory,
            restart=memory.restart + 1,
            restart_nonce=nonce,
            finish=None,
            finishing_since=None,
            is_stopped=False,
            start_time=None,
            image="",
            coordinator=replace(memory.coordinator, image="", is_recorded=True),
            budget=Budget(),
            gang_size=0,
            recorded=frozenset(range(len(memory.attempts))),
        )
    return replace(
        memory,
        image=memory.image or run.spec.image or config.trainer_image,
        recipe_hash=memory.recipe_hash or hash_recipe(run),
        coordinator=replace(memory.coordinator, image=memory.coordinator.image or config.operator_image),
    )


def _is_complete(memory: Memory) -> bool:
    return memory.finish is not None and memory.finish.phase == names.Phase.COMPLETE


# ---- ends of pods ----------------------------------------------------------------------------------------------------


def _note_nodes(memory: Memory, observation: Observation, config: Config, now: float) -> Memory:
    pods: dict[int, list[PodState]] = {}
    for pod in observation.nodes:
        pods.setdefault(pod.index, []).append(pod)
    attempts, recorded, ended = list(memory.attempts), set(memory.recorded), list[PodState]()
    vanished = []
    attempts += [-1] * (1 + max(pods, default=-1) - len(attempts))
    for index in range(len(attempts)):
        mine = pods.get(index, [])
        if attempts[index] >= 0 and index not in recorded and all(pod.attempt != attempts[index] for pod in mine):
            vanished.append((index, attempts[index]))
            recorded.add(index)
        for pod in mine:
            if pod.attempt < attempts[index] or (pod.attempt == attempts[index] and index in recorded):
                continue
            attempts[index] = pod.attempt
            recorded.discard(index)
            if pod.is_over:
                ended.append(pod)
                recorded.add(index)
    released = _released(observation, memory, len(attempts))
    counted = [pod for pod in ended if pod.index not in released and pod.restart == memory.restart]
    lost = [(index, attempt) for index, attempt in vanished if index not in released]
    memory = replace(memory, attempts=tuple(attempts), recorded=frozenset(recorded | released))
    memory = _add_ends(memory, observation, counted, lost, now)
    return _add_failures(memory, observation, counted, config, now)


def _released(observation: Observation, memory: Memory, known: int) -> frozenset[int]:
    """Nodes whose pods the operator itself sends away: their ends are nobody's fault and no restart."""
    if _is_letting_go(observation, memory):
        return frozenset(range(known))
    return frozenset(range(observation.run.spec.nodes.max, known))


def _is_letting_go(observation: Observation, memory: Memory) -> bool:
    """Whether the operator itself sends the run's pods away."""
    return observation.run.spec.suspend or memory.is_stopped or memory.finish is not None


def _add_ends(
    memory: Memory, observation: Observation, ended: Iterable[PodState], vanished: Iterable[tuple[int, int]], now: float
) -> Memory:
    records = [
        EndRecord(pod.name, describe_cause(pod), pod.end.exit_code if pod.end else None, (pod.end and pod.end.at) or now)
        for pod in ended
    ]
    run = observation.run.name
    records += [EndRecord(names.node_pod_name(run, index, attempt), Cause.DELETED, None, now) for index, attempt in vanished]
    restarts = dict(memory.restarts)
    for record in records:
        if record.cause not in (Cause.DONE, Cause.USER_ERROR):
            restarts[record.cause] = restarts.get(record.cause, 0) + 1
    return replace(memory, restarts=restarts, ends=(*memory.ends, *records)[-MAX_ENDS:])


def _add_failures(memory: Memory, observation: Observation, ended: list[PodState], config: Config, now: float) -> Memory:
    """Count what uses the budget. Pods that were there when the last failure was counted fell with it, and count no more."""
    budget, failure = memory.budget, memory.last_failure
    # Successors, made by an operator that died before it could write this down, do not count as having been there.
    last = {pod.index: pod.attempt for pod in ended}
    there = (pod.created_at for pod in observation.nodes if pod.attempt <= last.get(pod.index, pod.attempt))
    newest = max(there, default=0.0)
    for pod in ended:
        cause = describe_cause(pod)
        if cause in names.COUNTED or cause == Cause.USER_ERROR:
            described = _describe_failure(pod, memory, now)
            # A node that ends by itself repeats what its coordinator has said of the rank that failed, with less.
            is_repeated = failure is not None and failure.rank is not None and described.at - failure.at < _ECHO_SECONDS
            failure = failure if is_repeated and described.exit_code in _SAID_BEFORE else described
        if cause in names.COUNTED and pod.created_at > budget.at:
            failures = (0 if _has_lasted(pod, memory, config) else budget.failures) + 1
            delay = _delay(failures - 1, config)
            budget = replace(_mark(budget, memory), failures=failures, at=newest, retry_at=max(budget.retry_at, now + delay))
        elif cause != Cause.DONE and now - pod.created_at < config.short_life_seconds:
            budget = _add_short_life(budget, memory, config, now)
    return replace(memory, budget=budget, last_failure=failure)


def _has_lasted(pod: PodState, memory: Memory, config: Config) -> bool:
    """Whether a pod of a run that tells nothing of itself lived long enough for its end to be a first failure again."""
    training, end = memory.training, pod.end
    is_told = training.step is not None or training.checkpoint_step is not None
    return not is_told and end is not None and (end.at or 0.0) - pod.created_at >= config.undisturbed_seconds


def _delay(count: int, config: Config) -> float:
    """Twice as long each time; none for the very first, which is most often a lone accident."""
    return 0.0 if count < 1 else min(config.longest_backoff_seconds, config.first_backoff_seconds * 2.0 ** min(count - 1, 30))


def _add_short_life(budget: Budget, memory: Memory, config: Config, now: float) -> Budget:
    """Free, yet not for ever at full speed."""
    short_lives = budget.short_lives + 1
    retry_at = max(budget.retry_at, now + _delay(short_lives - _FREE_SHORT_LIVES, config))
    return replace(_mark(budget, memory), short_lives=short_lives, retry_at=retry_at)


def _mark(budget: Budget, memory: Memory) -> Budget:
    training = memory.training
    step = -1 if training.step is None else training.step
    checkpoint = -1 if training.checkpoint_step is None else training.checkpoint_step
    return replace(budget, step=max(budget.step, step), checkpoint_step=max(budget.checkpoint_step, checkpoint))


def _describe_failure(pod: PodState, memory: Memory, now: float) -> LastFailure:
    end = pod.end
    return LastFailure(
        cause=describe_cause(pod),
        node=pod.index,
        message=end.message if end else "",
        at=(end and end.at) or now,
        step=memory.training.step,
        exit_code=end.exit_code if end else None,
    )


# ---- the coordinator -------------------------------------------------------------------------------------------------


def _note_coordinators(memory: Memory, observation: Observation, config: Config, now: float) -> Memory:
    """Count the loss of a coordinator: its pod has ended, is on its way out, has vanished or was replaced unseen."""
    pods = {pod.attempt: pod for pod in observation.coordinators}
    newest = max(pods, default=-1)
    known = memory.coordinator
    if newest > known.attempt:
        if known.attempt >= 0 and not known.is_recorded:
            memory = _add_lost_coordinator(memory, observation, pods.get(known.attempt), config, now)
        known = Coordinator(newest, known.image)
    pod = pods.get(known.attempt)
    memory = replace(memory, coordinator=known)
    is_lost = known.attempt >= 0 and (pod is None or pod.is_over)
    if is_lost and not known.is_recorded:
        memory = _add_lost_coordinator(memory, observation, pod, config, now)
    return memory


def _add_lost_coordinator(memory: Memory, observation: Observation, pod: PodState | None, config: Config, now: float) -> Memory:
    """Count it, unless the operator itself sent it away."""
    known = replace(memory.coordinator, is_recorded=True)
    claim, run = observation.claim, observation.run
    record = claim.records.get(run.name) if claim else None
    # The PVC is told of the end before the coordinator goes, and the status only after that.
    is_complete = record is not None and record.complete is not None and record.uid == run.uid
    if is_complete or _is_letting_go(observation, memory) or (pod is not None and pod.restart < memory.restart):
        return replace(memory, coordinator=known)
    budget = memory.budget
    if pod is not None and now - pod.created_at < config.short_life_seconds:
        budget = _add_short_life(budget, memory, config, now)
    code = pod.end.exit_code if pod and pod.end else None
    end = EndRecord(names.coordinator_pod_name(observation.run.name, known.attempt), Cause.COORDINATOR_LOST, code, now)
    restarts = {**memory.restarts, Cause.COORDINATOR_LOST.value: memory.restarts.get(Cause.COORDINATOR_LOST, 0) + 1}
    return replace(memory, coordinator=known, budget=budget, restarts=restarts, ends=(*memory.ends, end)[-MAX_ENDS:])


def _note_progress(memory: Memory, observation: Observation, now: float) -> Memory:
    progress = observation.progress
    if progress is None or not is_current(observation, memory):
        return memory
    memory = replace(memory, training=_merge_training(memory.training, progress, now))
    memory = _add_counters(memory, progress)
    failure = progress.last_failure
    if failure is not None and failure.cause != "peer_lost":
        at = now - failure.seconds_ago
        known = memory.last_failure
        is_echo = known is not None and known.rank is None and known.exit_code in _SAID_BEFORE and at > known.at - _ECHO_SECONDS
        # The same failure is told again and again; its time, reckoned from an age, wavers.
        if known is None or at > known.at + 2 or is_echo:
            described = LastFailure(
                cause=_CAUSES.get(failure.cause, Cause.WORKER_CRASH),
                node=int(failure.node) if failure.node.isdecimal() and len(failure.node) < _NODE_DIGITS else None,
                message=keep_end(failure.message, MAX_MESSAGE),
                at=at,
                rank=failure.rank,
                step=failure.step,
                exit_code=failure.exit_code,
            )
            memory = replace(memory, last_failure=described)
    return _forgive(memory, observation)


_CAUSES: Mapping[str, Cause] = {"out_of_memory": Cause.OUT_OF_MEMORY, "user_error": Cause.USER_ERROR}


def _merge_training(known: Training, progress: Progress, now: float) -> Training:
    """What the coordinator does not know yet, as after its own restart, stays as it was."""
    is_new = progress.step is not None and progress.step != known.step
    ago = progress.updated_seconds_ago or 0.0
    has_saved = progress.checkpoint_step is not None and progress.checkpoint_step != known.checkpoint_step
    return Training(
        generation=progress.generation or known.generation,
        step=known.step if progress.step is None else progress.step,
        total_steps=progress.total_steps or known.total_steps,
        loss=known.loss if progress.loss is None else progress.loss,
        tokens_per_second=known.tokens_per_second if progress.tokens_per_second is None else progress.tokens_per_second,
        eta_seconds=known.eta_seconds if progress.eta_seconds is None else progress.eta_seconds,
        checkpoint_step=known.checkpoint_step if progress.checkpoint_step is None else progress.checkpoint_step,
        checkpoint_at=now if has_saved else known.checkpoint_at,
        ready=progress.ready,
        updated_at=now - ago if is_new else known.updated_at,
    )


def _add_counters(memory: Memory, progress: Progress) -> Memory:
    """Each coordinator counts from 0: only what it has added since the last reading is added here."""
    known = memory.coordinator if memory.coordinator.attempt == progress.attempt else Coordinator(progress.attempt)
    known = replace(known, image=memory.coordinator.image)
    restarts, lost = dict(memory.restarts), dict(memory.lost_seconds)
    for name in IN_POD_CAUSES:
        more = progress.restarts.get(name, 0) - known.restarts.get(name, 0)
        key = _CAUSES.get(name, Cause.WORKER_CRASH).value
        if more > 0:
            restarts[key] = restarts.get(key, 0) + more
    told = {name: int(seconds) for name, seconds in progress.lost_seconds.items()}
    for name, whole in told.items():
        more = whole - known.lost_seconds.get(name, 0)
        if more > 0 and (name in lost or len(lost) < MAX_CAUSES):
            lost[name] = lost.get(name, 0) + more
    seen = {name: progress.restarts[name] for name in IN_POD_CAUSES if progress.restarts.get(name)}
    coordinator = replace(known, restarts=seen, lost_seconds=told)
    return replace(memory, restarts=restarts, lost_seconds=lost, coordinator=coordinator)


def _forgive(memory: Memory, observation: Observation) -> Memory:
    """Progress since the last failure: the count begins anew. With fresh workers only a checkpoint is progress."""
    budget, training = memory.budget, memory.training
    has_step = training.step is not None and training.step > budget.step
    has_checkpoint = training.checkpoint_step is not None and training.checkpoint_step > budget.checkpoint_step
    is_fresh = observation.run.recovery == "fresh"
    if (budget.failures or budget.short_lives) and (has_checkpoint or (has_step and not is_fresh)):
        return replace(memory, budget=Budget(at=budget.at))
    return memory
