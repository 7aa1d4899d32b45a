"""The delay before a retry. All retries of the operator compute it here. Pure.

Each retry chooses its bounds and where it stores its count:

- ``policies/budget``, ``host_faults`` and ``evaluation_ends`` (pods that ended), and ``release_capacity``
  (pods that were given back) store it in the run's status, so that a new operator waits, too.
- ``edge/cache/queue`` (work on a key that failed), ``edge/reconcile/refusals`` (a refused step of a run) and
  ``edge/reconcile/coordinator_poller`` (a silent coordinator) store it in the process. The queue and the
  poller add jitter, because many keys fail at the same moment.
- ``edge/api/transport`` (one request) multiplies the delay by 3, because a pass waits for its four tries.

kopf's pauses in ``edge/handlers`` are a list of numbers, because kopf accepts nothing else. The loops
of ``edge/service`` and ``status_writer`` wait for a constant time.
"""


def find_delay(count: int, *, first: float, longest: float, growth: float = 2.0) -> float:
    """Return the seconds to wait before attempt ``count``, which grow up to ``longest``.

    ``growth``: factor from one count to the next. The delay is 0 if ``count`` is below 1, because most first
    failures do not repeat. For example, with ``first=10`` the delays for the counts 0, 1, 2 and 3 are 0, 10,
    20 and 40 s.
    """
    if count < 1:
        return 0.0
    # Limit the exponent, because 2.0 ** 1024 raises OverflowError.
    return min(longest, first * growth ** min(count - 1, 30))
