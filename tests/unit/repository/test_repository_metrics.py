"""The reference of metrics lists those of the operator, each with its type.

What the trainer exports: tests/unit/observers.
"""

import re
from dataclasses import fields
from pathlib import Path

from evergrad_common.metrics import OPERATOR, PREFIX
from evergrad_operator.edge.metrics.operator_metrics import (
    FactsCollector,
    OperatorMetrics,
    RunFactsSource,
)
from evergrad_operator.edge.settings import parse_settings


def test_every_metric_of_the_operator_is_in_the_reference_with_its_type(root: Path) -> None:
    facts = RunFactsSource(
        **{
            field.name: 0 if field.type in (int, float) else {}
            for field in fields(RunFactsSource)
        }
    )
    families = [*OperatorMetrics().registry.collect(), *FactsCollector(facts).collect()]
    exported = {
        family.name + "_total" * (family.type == "counter"): family.type
        for family in families
        if not family.name.startswith("process_")
    }
    assert exported == {one.exported: one.kind for one in OPERATOR}
    assert "process_resident_memory_bytes" in {family.name for family in families}
    page = (root / "docs/reference/operator-metrics.md").read_text()
    assert (
        dict(re.findall(rf"^\| `({PREFIX}operator_\w+)` \| (\w+) \|", page, re.MULTILINE))
        == exported
    )


def test_the_revision_is_passed_from_the_build_to_the_metric(root: Path) -> None:
    dockerfile = (root / "Dockerfile").read_text()
    operator = dockerfile.partition(" AS operator\n")[2].partition("\nFROM ")[0]
    assert "ARG REVISION=unknown\n" in operator
    (variable,) = re.findall(r"^ENV (\w+)=\$REVISION$", operator, re.MULTILINE)

    # One place reads it, and no image without one fails.
    for environ, revision in (({variable: "0123abc"}, "0123abc"), ({}, "unknown")):
        images = ["--trainer-image", "t:1", "--operator-image", "o:1"]
        settings = parse_settings(["--all-namespaces", "--no-lease", *images], environ)
        text = OperatorMetrics(revision=settings.revision).render().decode()
        (build,) = re.findall(
            rf"^{PREFIX}operator_build_info{{(.+)}} 1.0$", text, re.MULTILINE
        )
        assert f'revision="{revision}"' in build
