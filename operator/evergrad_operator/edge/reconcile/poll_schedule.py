"""Which coordinator is a run's, and when it is asked again."""

from collections.abc import Callable

from evergrad_operator.core.objects.names import Key
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.edge.reconcile.coordinator_poller import Coordinators
from evergrad_operator.edge.reconcile.reconcile_context import Pass


class CoordinatorPolling:
    """Follows the coordinator of each run. ``token_of``: the run's token, by its uid."""

    def __init__(self, coordinators: Coordinators, token_of: Callable[[str], str]) -> None:
        self._coordinators = coordinators
        self._token_of = token_of

    def follow(self, key: Key, seen: Observation) -> None:
        """Poll the run's newest coordinator, or the pod that prepares its data, from now on."""
        # Before there is a coordinator, the pod that prepares the data says how far it is, at the same port.
        pods = seen.preparations
        if any(pod.is_live for pod in seen.coordinators):
            pods = seen.coordinators
        running = [pod for pod in pods if pod.ip and pod.is_running and pod.is_live]
        if not running:
            self._coordinators.leave(key)
            return

        # Two may run for a moment while one replaces the other: the newer one is the run's.
        newest = max(running, key=lambda pod: pod.attempt)
        token = self._token_of(seen.run.uid)
        self._coordinators.follow(key, newest.ip, newest.attempt, token=token)

    async def ask_about_ends(self, work: Pass, seen: Observation) -> bool:
        """Ask the coordinator again when pods of nodes have ended, and return whether it was asked.

        Its last answer is from before the end, and lacks the cause and the last step, from which on steps
        are progress again. A pod that was killed is no exception. The same holds for an answer with connected
        nodes if no pod of a node is left: a suspended run waits for a newer one.
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
