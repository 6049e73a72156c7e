import pytest
import torch
from fake_time import FakeTime

from lit_fsdp.profiling.clock import Clock


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
