"""Decisions of a monitor from the values of a metric, and the state that they need. Pure.

Every decision follows from the values alone, which are the same on every rank: a resume decides the same.
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
    """The settings of a watch, with every default filled in. Fields as a monitor's of the file."""

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
        """Under which the state of its watch is kept."""
        return f"{self.kind}:{self.metric}"


@dataclass(frozen=True)
class WatchAlert:
    """The beginning of what a rule looks for, after ``step``. ``value``: the mean that was looked at."""

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
    """A monitor of the file with its defaults."""
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
    """An early stop is a plateau at which the run stops."""
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
    """One rule and its memory."""

    rule: Rule
    values: list[float] = field(default_factory=list)
    """The newest ones, as many as the window has."""
    others: list[float] = field(default_factory=list)
    """The values of ``of`` beside them."""
    reference: float | None = None
    """collapse: the first mean; divergence: the lowest; plateau: the best."""
    waited: int = 0
    """plateau: looks since the best."""
    since: int | None = None
    """The step after which it began; None while all is well."""
    alerts: int = 0

    def look(self, step: int, measured: Mapping[str, float]) -> WatchAlert | None:
        """Take the values after ``step``; an alert where it begins now."""
        rule = self.rule
        value = measured.get(rule.metric, math.nan)
        other = measured.get(rule.of, math.nan) if rule.of else 0.0
        # A step that was skipped has no loss; it says nothing about those around it.
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
            # It goes on, and was said.
            return None
        self.since = step
        self.alerts += 1
        return WatchAlert(rule, step, mean, threshold)

    def alert_of(self, step: int) -> WatchAlert | None:
        """The alert of the newest step, ``step``, where it has raised one: another process may have said it
        to nobody."""
        if self.since != step:
            return None
        mean = math.fsum(self.values) / self.rule.window
        is_plateau = self.rule.kind in ("plateau", "early stop")
        threshold = self.reference if is_plateau else self._judge(mean)
        return None if threshold is None else WatchAlert(self.rule, step, mean, threshold)

    def _judge(self, mean: float) -> float | None:
        """The threshold that ``mean`` is beyond; None while all is well."""
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
        """The state to be remembered, as JSON values."""
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
        """Go on from :meth:`state`; the rule may have been changed in place meanwhile.

        An alarm that has begun by the rule of then is over where it would not be by that of now: a run that
        it has stopped goes on.
        """
        window, rule = self.rule.window, self.rule
        self.values = [float(one) for one in state.get("values", ())][-window:]
        self.others = [float(one) for one in state.get("others", ())][-window:]
        if rule.of and state.get("of", rule.of) != rule.of:
            # The state beside the values is of another metric.
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
            # The same values by the same rule are beyond the same threshold: nothing is over then.
            is_over = len(self.values) < window
            is_over = is_over or self._judge(math.fsum(self.values) / window) is None
        if is_over:
            self.since = None


def _share(base: float, ratio: float) -> float:
    """``ratio`` times ``base``; for a negative base as far from it in the same direction."""
    return base + (ratio - 1) * abs(base)
