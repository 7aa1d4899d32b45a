"""The reference of metrics lists those of the operator, each with its type.

What the trainer exports: tests/unit/observers.
"""

import re
from dataclasses import fields
from pathlib import Path

from evergrad_coordinator.metrics import OPERATOR, PREFIX
from evergrad_operator.metrics import Facts, FactsCollector, Metrics


def test_every_metric_of_the_operator_is_in_the_reference_with_its_type(root: Path) -> None:
    facts = Facts(
        **{field.name: 0 if field.type in (int, float) else {} for field in fields(Facts)}
    )
    families = [*Metrics().registry.collect(), *FactsCollector(facts).collect()]
    exported = {
        family.name + "_total" * (family.type == "counter"): family.type for family in families
    }
    assert exported == {one.exported: one.kind for one in OPERATOR}
    page = (root / "docs/reference/operator-metrics.md").read_text()
    assert (
        dict(re.findall(rf"^\| `({PREFIX}operator_\w+)` \| (\w+) \|", page, re.MULTILINE))
        == exported
    )
