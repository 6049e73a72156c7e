"""All ranks learn, at the end of some work, whether one of them has failed, and none is left waiting.

Note [A failed step]: ranks meet at the end of each stretch of work, in one all-reduce over gloo. A rank that fails
before raises an alarm in the store of the run. Each rank has a thread that looks for it, since the rank itself may wait
in a collective. The thread writes down what its rank has issued and stops it there. Then the ranks that fell behind
issue what is missing, see Note [Ranks that fall behind], and all of them come to the all-reduce.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from traceback import clear_frames
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # as in roll_call.py

from lit_fsdp.sharding.collective_log import CollectiveLog, WorkStopped
from lit_fsdp.sharding.mesh import gather_objects, make_group
from lit_fsdp.strategy.roll_call import get_store, wait_until

_POLL_S = 0.1
_STORE_TIMEOUT_S = 10.0

Result = TypeVar("Result")

_agreements = count()  # of this process, the same on all ranks


class StepAgreement:
    """Runs work of which all ranks are to say together whether it is done. All must make the same calls.

    Args:
        device: Of this rank.
        timeout_s: How long a rank that failed waits for the others.
        read_failure: Returns what all ranks shall learn of an error, ``None`` for one that ends the run.
        clean_up: Called after work that was not done, before the other ranks are followed: lets go of its memory.
    """

    def __init__(
        self,
        device: torch.device,
        timeout_s: float,
        read_failure: Callable[[Exception], str | None],
        clean_up: Callable[[], None],
    ) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._read_failure, self._clean_up = read_failure, clean_up
        self._is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._number = 0  # of the work
        self._alarm = 0  # how many there were
        self._mutex = threading.Lock()
        self._published = -1  # the alarm that this rank has answered
        self._stop = threading.Event()
        if self._is_alone:
            return
        self._log = CollectiveLog()
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._group = make_group("steps", timeout_s)
        store = get_store(f"steps/{next(_agreements)}")
        self._store = store
        # A connection of its own: one that is shared would wait as long as the rank waits in it.
        self._own_store = store.clone()  # type: ignore[attr-defined]
        self._own_store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        self._thread = threading.Thread(target=self._look, name="step agreement", daemon=True)

    def start(self) -> None:
        """Begin to note collectives, and to look for alarms."""
        if not self._is_alone:
            self._log.attach()
            self._thread.start()

    def stop(self) -> None:
        """End both. May be called twice."""
        if not self._is_alone and not self._stop.is_set():
            self._stop.set()
            self._log.detach()
            self._thread.join(_STORE_TIMEOUT_S)

    def run(self, work: Callable[[], Result]) -> tuple[Result | None, dict[int, str]]:
        """Return what the work gives, and nothing else; or nothing, and what has failed on which ranks.

        Raises:
            RuntimeError: Another rank did not answer.
        """
        result, failure = None, None
        is_done = False
        try:
            if self._is_alone:
                result = work()
            else:
                with self._log.stretch(self._number):
                    result = work()
            is_done = True
        except WorkStopped as stopped:
            clear_frames(stopped.__traceback__)  # which hold what was computed
        except Exception as error:
            if (failure := self._read_failure(error)) is None:
                raise
            clear_frames(error.__traceback__)
        if self._is_alone:
            if failure is None:
                return result, {}
            self._clean_up()
            return None, {0: failure}
        if not is_done:
            self._clean_up()
            self._follow(has_failed=failure is not None)
        vote = torch.tensor([not is_done], dtype=torch.int32, device="cpu")
        dist.all_reduce(vote, group=self._group)
        self._number += 1
        if not vote.item():
            return result, {}
        if is_done:
            del result
            self._clean_up()
        return None, self._end_alarm(failure)

    def _follow(self, *, has_failed: bool) -> None:
        """Take part in all that other ranks have begun."""
        if has_failed:
            with self._mutex:
                self._publish(self._store, self._number)
            self._store.set(f"{self._alarm}/raised", str(self._number))
        keys = [f"{self._alarm}/{rank}" for rank in range(self._world_size)]
        if not wait_until(lambda: self._store.check(keys), self._timeout_s):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RuntimeError(f"rank {self._rank} waited {self._timeout_s:g} s for rank {missing[0]} to stop its step")
        self._log.catch_up(self._number, [self._store.get(key) for key in keys], self._device)

    def _end_alarm(self, failure: str | None) -> dict[int, str]:
        told = gather_objects(failure, self._group)  # by now the logs were read by all
        with self._mutex:
            self._alarm += 1
        self._log.resume()
        return {rank: text for rank, text in enumerate(told) if text is not None}

    def _publish(self, store: Store, number: int) -> None:
        if self._published < self._alarm:
            self._published = self._alarm
            store.set(f"{self._alarm}/{self._rank}", self._log.stop(number))  # type: ignore[arg-type]  # bytes too

    def _look(self) -> None:
        # Ends with the store, which ends with the run.
        with suppress(DistError):
            while not self._stop.wait(_POLL_S):
                with self._mutex:
                    key = f"{self._alarm}/raised"
                    if self._published < self._alarm and self._own_store.check([key]):
                        # Not the number of this rank, which may still be at the end of the work before.
                        self._publish(self._own_store, int(self._own_store.get(key)))
