import pytest
import torch
from fake_time import FakeTime

from lit_fsdp.profiling.clock import Clock, Timeline


def test_a_cpu_mark_is_the_time_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    time = FakeTime()
    monkeypatch.setattr("lit_fsdp.profiling.clock.time", time)
    clock = Clock(torch.device("cpu"))
    time.sleep(1)
    begin = clock.mark()
    time.sleep(2)
    end = clock.mark()
    assert clock.is_past(end)
    assert clock.measure_s(begin, end) == 2


def test_the_time_of_the_cpu_goes_on() -> None:
    clock = Clock(torch.device("cpu"))
    begin = end = clock.mark()
    while clock.measure_s(begin, end) == 0:
        end = clock.mark()
    assert clock.measure_s(begin, end) > 0


class FakeClock(Clock):
    """Advances by 1 with every mark, and knows how far the device has come."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now, self.done = 0.0, 100.0

    def mark(self) -> float:
        self.now += 1
        return self.now

    def is_past(self, mark: object) -> bool:
        assert isinstance(mark, float)
        return mark <= self.done


def test_parts_of_a_step_add_up_without_gaps_and_what_is_dropped_counts_nowhere() -> None:
    clock = FakeClock()
    timeline = Timeline(clock)
    assert timeline.name is None
    timeline.close()
    for name in ("data", "forward", "optimizer", "data", "forward"):
        timeline.cut(name)
    timeline.rename("backward")
    timeline.cut("pause")
    clock.now += 10
    timeline.drop()
    timeline.close("first")
    timeline.cut("data")
    timeline.close("second")
    first, second = timeline.take()
    assert (first.parts, first.tag, first.total_s) == (
        {"data": 2, "forward": 1, "optimizer": 1, "backward": 1},
        "first",
        5,
    )
    assert (second.parts, second.tag) == ({"pause": 1, "data": 1}, "second")
    assert timeline.take() == []


def test_a_step_that_the_device_is_still_at_is_not_waited_for_unless_asked() -> None:
    clock = FakeClock()
    timeline = Timeline(clock)
    for _ in range(3):
        timeline.cut("a")
        timeline.close()
    clock.done = 3
    assert len(timeline.take()) == 1
    assert len(timeline.take(wait=True)) == 2
