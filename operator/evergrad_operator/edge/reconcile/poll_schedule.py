"""Selects the coordinator that is polled for each run, and when it is polled outside the schedule."""

from collections.abc import Callable

from evergrad_operator.core.objects.names import Key
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.edge.reconcile.coordinator_poller import Coordinators
from evergrad_operator.edge.reconcile.reconcile_context import Pass


class CoordinatorPolling:
    """Selects the coordinator of each run for polling. ``token_of`` returns a run's token by its uid."""

    def __init__(self, coordinators: Coordinators, token_of: Callable[[str], str]) -> None:
        self._coordinators = coordinators
        self._token_of = token_of

    def follow(self, key: Key, seen: Observation) -> None:
        """Poll the run's newest coordinator, or the pod that prepares its data if there is no coordinator.

        If none of these pods is running, polling stops.
        """
        # Before there is a coordinator, the pod that prepares the data reports its progress on the same port.
        pods = seen.preparations
        if any(pod.is_live for pod in seen.coordinators):
            pods = seen.coordinators
        running = [pod for pod in pods if pod.ip and pod.is_running and pod.is_live]
        if not running:
            self._coordinators.leave(key)
            return

        # Two coordinators may run briefly while one replaces the other. Poll the newer one.
        newest = max(running, key=lambda pod: pod.attempt)
        token = self._token_of(seen.run.uid)
        self._coordinators.follow(key, newest.ip, newest.attempt, token=token)

    async def ask_about_ends(self, work: Pass, seen: Observation) -> bool:
        """Poll the coordinator if pods of nodes have ended, and return whether it was polled.

        The last answer is older than the end of the pods. It lacks the cause and the last step, which is the
        baseline for new progress. This also applies to a pod that was killed.

        The coordinator is also polled if its last answer reports connected nodes but no node's pod is left,
        because a suspended run waits for a newer answer.
        """
        hints = work.hints
        is_new = not hints.ends <= hints.asked_about
        hints.asked_about = hints.ends
        is_at_work = any(pod.is_live or pod.is_leaving for pod in seen.nodes)
        is_late = (
            seen.progress is not None and seen.progress.connected > 0 and not is_at_work
        )
        if is_new or is_late:
            self.follow(work.key, seen)
            await self._coordinators.ask(work.key)
        return is_new or is_late
