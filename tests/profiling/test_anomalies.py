import math
import random

import pytest

from lit_fsdp.profiling.anomalies import SpikeDetector


def find_spikes(values: list[float], detector: SpikeDetector) -> list[int]:
    found = []
    for i, value in enumerate(values):
        if value > detector.compute_limit():
            found.append(i)
        detector.add(value)
    return found


def test_only_what_stands_out_from_the_window_is_a_spike() -> None:
    noisy = [2.0 + 0.1 * math.sin(i * 7.3) for i in range(60)]
    assert find_spikes(noisy, SpikeDetector(6.0, 16)) == []
    noisy[3] = noisy[30] = noisy[31] = 9.0  # the first comes before there is anything to compare it with
    assert find_spikes(noisy, SpikeDetector(6.0, 16)) == [30, 31]
    assert find_spikes(noisy, SpikeDetector(None, 16)) == []


def test_norms_of_small_batches_which_spread_upward_are_no_spikes() -> None:
    draw = random.Random(0)
    skewed = [draw.lognormvariate(0.0, 0.6) for _ in range(5000)]
    assert len(find_spikes(skewed, SpikeDetector(6.0, 128))) <= 3  # by the absolute deviation alone 34
    for place in range(1000, 1120, 8):  # fifteen in one window hide none of each other
        skewed[place] = 20.0
    assert {*range(1000, 1120, 8)} <= {*find_spikes(skewed, SpikeDetector(6.0, 128))}


@pytest.mark.parametrize("num_before", [64, 128])
def test_a_model_that_broke_is_found_step_after_step(num_before: int) -> None:
    values = [2.0 + 0.1 * math.sin(i * 7.3) for i in range(num_before)] + [50.0] * 20
    assert find_spikes(values, SpikeDetector(6.0, 128)) == [*range(num_before, num_before + 20)]


def test_a_change_that_lasts_becomes_normal() -> None:
    values = [1.0 + 0.01 * (i % 3) for i in range(40)] + [5.0 + 0.01 * (i % 3) for i in range(40)]
    spikes = find_spikes(values, SpikeDetector(6.0, 16))
    assert spikes[0] == 40
    assert spikes[-1] < 40 + 10


def test_numbers_that_hardly_vary_or_are_no_numbers_raise_no_alarm() -> None:
    detector = SpikeDetector(6.0, 8)
    assert find_spikes([1.0] * 20 + [1.05] + [math.nan, math.inf, 1.0], detector) == [22]
    assert all(math.isfinite(value) for value in detector.state_dict())


def test_a_saved_window_is_the_same_window() -> None:
    one, two = SpikeDetector(6.0, 8), SpikeDetector(6.0, 8)
    find_spikes([1.0, 1.1, 0.9, 1.2, 1.0, 1.05], one)
    two.load_state_dict(one.state_dict())
    assert one.compute_limit() == two.compute_limit() < math.inf
