"""The figures that benchmarks make of their samples."""

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "tools/benchmarks"


@pytest.fixture
def common() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_common", FOLDER / "common.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_interval_of_a_median_contains_it_and_narrows_with_more_samples(
    common: ModuleType,
) -> None:
    generator = random.Random(7)
    values = [generator.gauss(0.99, 0.08) for _ in range(400)]
    few, many = (common.interval_of_median(values[:count]) for count in (20, 400))
    assert few[0] < 0.99 < few[1] and many[0] < 0.99 < many[1]
    assert many[1] - many[0] < (few[1] - few[0]) / 2


def test_one_file_of_samples_gives_one_interval(common: ModuleType) -> None:
    values = [1.0, 1.1, 0.9, 1.05]
    assert common.interval_of_median(values) == common.interval_of_median(values)


def test_the_interval_of_equal_values_is_that_value(common: ModuleType) -> None:
    assert common.interval_of_median([2.0] * 5) == (2.0, 2.0)


def test_the_interval_of_a_ratio_of_medians_contains_it(common: ModuleType) -> None:
    generator = random.Random(7)
    above = [generator.gauss(14, 1) for _ in range(20)]
    below = [generator.gauss(0.7, 0.1) for _ in range(20)]
    low, high = common.interval_of_ratio(above, below)
    assert low < 20 < high
    one_side = common.interval_of_ratio([14.0] * 20, below)
    assert one_side[0] < 20 < one_side[1]
    assert common.interval_of_ratio([14.0] * 20, [0.7] * 20) == pytest.approx((20, 20))
