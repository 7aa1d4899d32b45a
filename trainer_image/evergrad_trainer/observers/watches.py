"""Decisions of monitors about the values of a metric, and the state that the decisions need. Pure.

A decision depends only on the values, which are the same on every rank, so a resumed run decides the same.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from evergrad_manifest.training import EarlyStop, Monitor

Kind = Literal["collapse", "divergence", "plateau", "early stop"]
Policy = Literal["warn", "save", "stop"]

DIVERGENCE_WINDOW: Final = 20
COLLAPSE_RATIO: Final = 0.5
DIVERGENCE_RATIO: Final = 2.0


@dataclass(frozen=True)
class Rule:
    """The settings of a watch, with all defaults. The fields are the fields of a monitor in the manifest."""

    kind: Kind
    metric: str
    policy: Policy
    window: int = 1
    limit: float | None = None
    ratio: float = 1.0
    of: str | None = None
    mode: Literal["min", "max"] = "min"
    patience: int = 1
    min_delta: float = 0.0

    @property
    def name(self) -> str:
        """The key of the watch's state."""
        return f"{self.kind}:{self.metric}"


@dataclass(frozen=True)
class WatchAlert:
    """An alert: the condition of ``rule`` begins after ``step``. ``value``: the mean that was compared."""

    rule: Rule
    step: int
    value: float
    threshold: float

    def describe(self) -> str:
        rule, value, threshold = self.rule, f"{self.value:.6g}", f"{self.threshold:.6g}"
        of = "" if rule.window == 1 else f", the mean of its last {rule.window} values,"
        if rule.kind == "collapse":
            return f"{rule.metric}{of} is {value}, below {threshold}"
        if rule.kind == "divergence":
            return f"{rule.metric}{of} is {value}, above {threshold}"
        looks = "look" if rule.patience == 1 else "looks"
        return (
            f"{rule.metric}{of} is {value}, and was not better than {threshold} in the last "
            f"{rule.patience} {looks}"
        )


def rule_of(monitor: Monitor) -> Rule:
    """Return the rule of a monitor of the manifest, with its defaults."""
    is_divergence = monitor.type == "divergence"
    ratio = DIVERGENCE_RATIO if is_divergence else COLLAPSE_RATIO
    return Rule(
        kind=monitor.type,
        metric=monitor.metric,
        policy=monitor.policy,
        window=monitor.window or (DIVERGENCE_WINDOW if is_divergence else 1),
        limit=monitor.limit,
        ratio=ratio if monitor.ratio is None else monitor.ratio,
        of=monitor.of,
        mode=monitor.mode,
        patience=monitor.patience or 1,
        min_delta=monitor.min_delta,
    )


def rule_of_early_stop(early: EarlyStop) -> Rule:
    """Return the rule of an early stop, which is a plateau at which the run stops."""
    return Rule(
        kind="early stop",
        metric=early.metric,
        policy="stop",
        mode=early.mode,
        patience=early.patience,
        min_delta=early.min_delta,
    )


@dataclass
class Watch:
    """One rule and its state."""

    rule: Rule
    values: list[float] = field(default_factory=list)
    """The newest values, as many as the window has."""
    others: list[float] = field(default_factory=list)
    """The values of the metric ``of`` at the same steps."""
    reference: float | None = None
    """collapse: the first mean; divergence: the lowest mean; plateau: the best mean."""
    waited: int = 0
    """plateau: number of looks since the best mean."""
    since: int | None = None
    """The step after which the condition began; None if it is not met."""
    alerts: int = 0

    def look(self, step: int, measured: Mapping[str, float]) -> WatchAlert | None:
        """Add the values after ``step``; returns an alert if the condition begins at this step."""
        rule = self.rule
        value = measured.get(rule.metric, math.nan)
        other = measured.get(rule.of, math.nan) if rule.of else 0.0
        # A skipped step has no loss. Ignore it, because it gives no information about other steps.
        if not (math.isfinite(value) and math.isfinite(other)):
            return None
        self.values = [*self.values, value][-rule.window :]
        self.others = [*self.others, other][-rule.window :] if rule.of else []
        if len(self.values) < rule.window:
            return None

        mean = math.fsum(self.values) / rule.window
        threshold = self._judge(mean)
        if threshold is None:
            self.since = None
            return None
        if self.since is not None:
            # The condition continues and has been reported already.
            return None
        self.since = step
        self.alerts += 1
        return WatchAlert(rule, step, mean, threshold)

    def alert_of(self, step: int) -> WatchAlert | None:
        """Return the alert of the newest step, ``step``, or None if it raised no alert.

        Used to report an alert again if the process that should have recorded it is lost.
        """
        if self.since != step:
            return None
        mean = math.fsum(self.values) / self.rule.window
        is_plateau = self.rule.kind in ("plateau", "early stop")
        threshold = self.reference if is_plateau else self._judge(mean)
        return None if threshold is None else WatchAlert(self.rule, step, mean, threshold)

    def _judge(self, mean: float) -> float | None:
        """Return the threshold that ``mean`` violates, or None if the condition is not met."""
        rule, reference = self.rule, self.reference
        if rule.kind == "collapse":
            self.reference = mean if reference is None else reference
            base = self.reference
            if rule.of:
                base = math.fsum(self.others) / rule.window
            threshold = _share(base, rule.ratio) if rule.limit is None else rule.limit
            return threshold if mean < threshold else None
        if rule.kind == "divergence":
            lowest = mean if reference is None else reference
            self.reference = min(lowest, mean)
            threshold = _share(lowest, rule.ratio) if rule.limit is None else rule.limit
            return threshold if mean > threshold else None

        gain = math.inf
        if reference is not None:
            gain = reference - mean if rule.mode == "min" else mean - reference
        if gain > rule.min_delta:
            self.reference, self.waited = mean, 0
            return None
        self.waited += 1
        return reference if self.waited >= rule.patience else None

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "values": list(self.values),
            "others": list(self.others),
            "of": self.rule.of,
            "reference": self.reference,
            "waited": self.waited,
            "since": self.since,
            "alerts": self.alerts,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state from :meth:`state`; the rule may have changed since.

        If an alert has begun under the old rule but not under the new rule, it ends, so that a run that the
        alert stopped can continue.
        """
        window, rule = self.rule.window, self.rule
        self.values = [float(one) for one in state.get("values", ())][-window:]
        self.others = [float(one) for one in state.get("others", ())][-window:]
        if rule.of and state.get("of", rule.of) != rule.of:
            # ``others`` has values of another metric, so drop both lists.
            self.values, self.others = [], []
        self.reference = state.get("reference")
        self.waited = int(state.get("waited", 0))
        self.since = state.get("since")
        self.alerts = int(state.get("alerts", 0))
        if self.since is None:
            return
        if rule.kind in ("plateau", "early stop"):
            is_over = self.waited < rule.patience
        else:
            # With an unchanged rule the same values violate the same threshold, so the alert continues.
            is_over = len(self.values) < window
            is_over = is_over or self._judge(math.fsum(self.values) / window) is None
        if is_over:
            self.since = None


def _share(base: float, ratio: float) -> float:
    """Return ``ratio`` times ``base``; for a negative base, the same distance in the same direction.

    For example, a ratio of 2 gives 6 for a base of 3, and 0 for a base of -3.
    """
    return base + (ratio - 1) * abs(base)
