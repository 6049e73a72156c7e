import time

import torch

from lit_fsdp.clock import Clock


def test_a_cpu_mark_is_the_time_it_was_set() -> None:
    clock = Clock(torch.device("cpu"))
    begin = clock.mark()
    time.sleep(0.02)
    end = clock.mark()
    assert clock.is_past(end)
    assert 0.02 <= clock.measure_s(begin, end) < 0.5
