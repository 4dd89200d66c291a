"""When a worker is over its memory limit, and what it shows until then."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry
from tests.fakes import metrics_of

from inferq_worker.observe.device_memory import DeviceMemory
from inferq_worker.observe.memory import Resident
from inferq_worker.observe.memory_watch import MemoryWatch, give_free_memory_back

if TYPE_CHECKING:
    from collections.abc import Iterable

LIMIT = 1000


class Case:
    """A watch over given figures; the last one stays."""

    def __init__(self, figures: Iterable[int | None], limit_bytes: int | None = LIMIT) -> None:
        self.registry = CollectorRegistry()
        self.metrics = metrics_of(self.registry)
        self.figures = list(figures)
        self.samples = 0
        self.given_back: list[int] = []
        self.watch = MemoryWatch(
            limit_bytes,
            self.metrics,
            interval_s=1e-9,
            read=self.read,
            give_back=lambda: self.given_back.append(self.samples),
        )

    def read(self) -> Resident | None:
        figure = self.figures[min(self.samples, len(self.figures) - 1)]
        self.samples += 1
        return None if figure is None else Resident(figure + 50, figure)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"inferq_{name}", labels)


async def test_it_is_over_after_three_samples_in_a_row() -> None:
    case = Case([900, 1001, 1500, 1000, 1100, 1200, 1300, 1400])
    why = await case.watch.exceeded()
    assert case.samples == 7
    assert "1300" in why
    assert "1000" in why
    assert case.given_back == [2, 5], "each time that the limit is passed"


async def test_what_is_given_back_may_be_enough() -> None:
    case = Case([1001, 900])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await case.watch.exceeded()
    assert case.given_back == [1]


@pytest.mark.parametrize(("figure", "limit_bytes"), [(10**12, None), (None, LIMIT), (LIMIT, LIMIT)])
async def test_without_a_limit_or_a_figure_it_only_watches(figure: int | None, limit_bytes: int | None) -> None:
    case = Case([figure], limit_bytes)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await case.watch.exceeded()
    assert case.samples > 3
    assert case.given_back == []


def test_the_figures_are_metrics_and_status() -> None:
    case = Case([700])
    case.watch.read_device = lambda: DeviceMemory("0000:01:00.0", 3, 9)
    for _ in range(2500):
        case.metrics.batch_done("m", rows=1, padded_rows=0, reason="full", run_s=0.1)
        case.watch.sample()
    assert case.value("resident_bytes") == 750
    assert case.value("anonymous_bytes") == 700
    assert case.value("memory_growth_bytes_per_thousand_batches") == pytest.approx(0)
    assert case.value("gpu_memory_used_bytes", device="0000:01:00.0") == 3
    assert case.value("gpu_memory_total_bytes", device="0000:01:00.0") == 9
    assert case.watch.status() == {
        "resident_bytes": 750,
        "anonymous_bytes": 700,
        "limit_bytes": LIMIT,
        "growth_bytes_per_thousand_batches": pytest.approx(0),
        "device": {"device": "0000:01:00.0", "used_bytes": 3, "total_bytes": 9},
    }


def test_before_the_first_sample_nothing_is_known() -> None:
    status = Case([1]).watch.status()
    assert status["resident_bytes"] is None
    assert status["device"] is None


def test_giving_memory_back_works_on_any_system() -> None:
    give_free_memory_back()
