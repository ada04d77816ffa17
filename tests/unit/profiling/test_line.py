import pytest

from seqcomp.profiling.line import latency_and_bandwidth
from seqcomp.profiling.links import group_sizes


def test_a_line_is_found_again() -> None:
    latency, bandwidth = 120e-6, 3e9
    points = [(size, latency + size / bandwidth) for size in (1e4, 1e6, 1e8)]
    assert latency_and_bandwidth(points) == pytest.approx((latency, bandwidth))


def test_short_messages_count_as_much_as_long_ones() -> None:
    """A tenth more for the long one must not turn the latency of the short one over."""
    points = [(1e3, 100e-6), (1e4, 103e-6), (1e9, 1.1 * 0.3)]
    latency, bandwidth = latency_and_bandwidth(points)
    assert latency == pytest.approx(100e-6, rel=0.05)
    assert bandwidth == pytest.approx(3e9, rel=0.15)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1e6, 1e-3)], 1e9),  # one size
        ([(1e3, 2e-3), (1e6, 1e-3)], 1e9),  # the larger one is faster
        ([(1e3, 1e-9), (1e6, 1e-3)], 1e12),  # a line through zero, near the short one
    ],
)
def test_latency_is_never_below_zero(points: list[tuple[float, float]], expected: float) -> None:
    latency, bandwidth = latency_and_bandwidth(points)
    assert latency == 0
    assert bandwidth == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, []), (2, [2]), (6, [2, 6]), (8, [2, 4, 8]), (3, [3])]
)
def test_groups_divide_the_ranks(most: int, sizes: list[int]) -> None:
    assert group_sizes(most) == sizes
