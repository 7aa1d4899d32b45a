"""The catalogue of metrics: names, the tables made from it, and what a recipe may declare."""

import re

import pytest

from evergrad_common.metrics import (
    COLUMNS,
    COORDINATOR,
    MOST_DECLARED,
    NODE,
    OPERATOR,
    TRAINER,
    Column,
    declare,
    fill_tables,
    render_series,
)


def test_metric_names_are_unique_and_follow_the_prometheus_rules() -> None:
    series = [*TRAINER, *NODE, *COORDINATOR, *OPERATOR]
    names = [one.name for one in series]
    assert len(set(names)) == len(names)
    for one in series:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", one.name)
        assert one.name.endswith("_total") is (one.kind == "counter"), one.name
        assert bool(one.buckets) is (one.kind == "histogram"), one.name
        assert list(one.buckets) == sorted(set(one.buckets))
        # Target labels override metric labels: a scrape would rename them.
        assert not {"namespace", "pod", "job", "instance", "container"} & set(one.labels)
        # The endpoints of a run add the label themselves; the operator has it for many runs.
        assert one in OPERATOR or "run" not in one.labels
        assert one.kind == "gauge" or one.over_several == "sum"


def test_a_table_has_a_row_for_each_entry() -> None:
    assert [line.split("`")[1] for line in render_series(NODE).splitlines()[2:]] == [
        one.exported for one in NODE
    ]


def test_a_page_gets_its_table_replaced_and_keeps_the_surrounding_text() -> None:
    page = "before\n<!-- table: node -->\nold\n<!-- end -->\nafter\n"
    filled = fill_tables(page)
    assert filled.startswith("before\n<!-- table: node -->\n\n| Metric |")
    assert filled.endswith("\n<!-- end -->\nafter\n")
    assert "\nold\n" not in filled
    assert fill_tables(filled) == filled


def test_a_recipe_declares_its_metrics_by_name_and_meaning() -> None:
    assert declare({"kl": "divergence from the reference"}) == (
        Column("kl", "", "divergence from the reference", "mean", "closely"),
    )
    assert declare({}) == ()


def test_a_recipe_declares_the_unit_of_a_metric_in_brackets_at_the_end_of_its_text() -> (
    None
):
    kl, share = declare({"kl": "divergence [from] the reference [nats]", "share": "[all]"})
    assert (kl.unit, kl.help) == ("nats", "divergence [from] the reference")
    assert (share.unit, share.help) == ("", "[all]")


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"a b": ""}, "'a b' is no name; use letters, digits and _"),
        ({"": ""}, "'' is no name"),
        ({"loss": ""}, "'loss' is a column of every run; use another name"),
        ({"perplexity": ""}, "'perplexity' is a column of every run"),
        (
            {f"m{number}": "" for number in range(MOST_DECLARED + 1)},
            "there are 33; 32 are possible",
        ),
    ],
)
def test_invalid_metrics_are_refused_with_a_sentence(
    metrics: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        declare(metrics)


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ValueError, match=r"'a b' is no name.*'loss' is a column"):
        declare({"a b": "", "loss": ""})


def test_every_column_describes_how_values_of_ranks_are_combined() -> None:
    assert all(column.aggregate for column in COLUMNS)
