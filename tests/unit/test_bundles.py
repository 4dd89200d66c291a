import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq.bundles import BUNDLE_BYTES, Bundler, cut, jobs_per_bundle
from inferq.jobs import JobOptions, build_job
from inferq_schemas import DEFAULT_LIMITS, encode_bundle


def test_only_lanes_that_allow_bundles_get_them() -> None:
    assert jobs_per_bundle("bulk", 64) == 64
    assert jobs_per_bundle("bulk", 1000) == DEFAULT_LIMITS.bundle_jobs
    assert jobs_per_bundle("interactive", 64) == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=50), st.integers(1, 10))
def test_bundles_keep_the_order_lose_nothing_and_stay_within_bounds(sizes: list[int], max_jobs: int) -> None:
    bundler: Bundler[int] = Bundler(max_jobs, max_bytes=50)

    bundles = [bundle for number, size in enumerate(sizes) for bundle in bundler.add(number, size)]
    if len(bundler):
        bundles.append(bundler.flush())

    assert [number for bundle in bundles for number in bundle] == list(range(len(sizes)))
    assert all(1 <= len(bundle) <= max_jobs for bundle in bundles)
    # One job alone may be larger than the bound; several together may not.
    assert all(len(bundle) == 1 or sum(sizes[number] for number in bundle) <= 50 for bundle in bundles)


def test_a_flushed_bundler_is_empty() -> None:
    bundler: Bundler[str] = Bundler(3)
    assert list(bundler.add("a", 1)) == []

    assert bundler.flush() == ("a",)
    assert bundler.flush() == ()


def test_cut_bundles_stay_well_under_the_body_limit() -> None:
    jobs = [
        build_job("m", {"x": np.zeros((1, 200_000), np.float32)}, JobOptions(lane="bulk"), now_ms=1) for _ in range(25)
    ]

    bundles = list(cut(jobs, 64))

    assert [job for bundle in bundles for job in bundle] == jobs
    assert all(len(encode_bundle(bundle)) <= BUNDLE_BYTES for bundle in bundles)
    assert len(bundles) == 5
