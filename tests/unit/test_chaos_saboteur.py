"""Plans of faults: the same seed gives the same plan, every kind gets its turn, nothing is planned past the end."""

import pytest
from tests.chaos.faults import FAULTS
from tests.chaos.saboteur import Planned, chosen, plan

WORKERS = ("worker-1", "worker-2")
LINKS = ("worker-1.broker", "worker-1.redis", "clients.broker")


def planned(seed: int = 1, *, seconds: float = 300.0, faults: str = "all") -> list[Planned]:
    return plan(seed=seed, seconds=seconds, kinds=chosen(faults), workers=WORKERS, links=LINKS)


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert planned(1) == planned(1)
    assert planned(1) != planned(2)


def test_every_kind_comes_once_before_any_comes_twice() -> None:
    kinds = [one.kind for one in planned()]
    drawn = [kind for kind in chosen("all") if FAULTS[kind].weight]

    assert sorted(kinds[: len(drawn)]) == drawn


def test_a_fault_hits_a_part_of_its_own_sort() -> None:
    for one in planned():
        match FAULTS[one.kind].on:
            case "worker":
                assert one.target in WORKERS
            case "link.broker":
                assert one.target in {"worker-1.broker", "clients.broker"}
            case "link.redis":
                assert one.target == "worker-1.redis"
            case _:
                assert one.target == ""


@pytest.mark.parametrize("seconds", [5.0, 20.0, 120.0])
def test_nothing_begins_in_the_last_seconds(seconds: float) -> None:
    assert all(one.at_s < seconds - 5.0 for one in planned(seconds=seconds))


def test_kinds_are_chosen_by_name_all_or_none() -> None:
    assert chosen("all") == sorted(FAULTS)
    assert chosen("none") == []
    assert chosen("worker_kill, link_cut") == ["link_cut", "worker_kill"]


def test_a_kind_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="no fault 'worker_kil'"):
        chosen("worker_kil")
