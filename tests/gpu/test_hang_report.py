"""Reports of hangs where NCCL's recorder has to tell: Python is ahead of the GPU, and its stack says little."""

import io
import re
import time
from contextlib import redirect_stderr
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from training import EVEN, GLOBAL_BATCH, Rows, build_task, build_trainer, save_model

from lit_fsdp import FSDP2Strategy
from lit_fsdp.profiling.flight_recorder import count_collectives, list_collectives
from ranks import count_gpus, run_ranks

pytestmark = pytest.mark.gpu


def test_nccl_tells_which_collectives_are_over() -> None:
    def body() -> None:
        ones = torch.ones(8, device="cuda")
        dist.all_reduce(ones)
        torch.cuda._sleep(int(5e9))  # some seconds, in the stream that the next collective waits for
        dist.all_reduce(ones)
        of_nccl = [c for c in list_collectives() if c.group == "nccl 0"]
        assert [c.number for c in of_nccl] == [1, 2]
        assert [c.operation for c in of_nccl] == ["nccl:all_reduce"] * 2
        assert not of_nccl[-1].is_over
        (key,) = {c.key for c in of_nccl}
        assert count_collectives()[key][0] == 2
        torch.cuda.synchronize()
        time.sleep(1)  # torch's watchdog looks ten times a second
        assert [c.is_over for c in list_collectives() if c.group == "nccl 0"] == [True, True]
        assert count_collectives()[key] == (2, 2)

    run_ranks(body, world_size=1, backend="cpu:gloo,cuda:nccl", is_on_gpus=True)


class Sleep(pl.Callback):
    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_rank == 1 and batch_idx == 2:
            time.sleep(5)


@pytest.mark.skipif(count_gpus() < 2, reason="NCCL needs a GPU for each rank")
def test_a_rank_that_sleeps_is_named_where_the_others_wait_on_the_gpu(tmp_path: Path) -> None:
    def body(folder: Path) -> None:
        strategy = FSDP2Strategy(print_plan=False, hang_report_s=1.5)
        trainer = build_trainer(strategy, callbacks=[Sleep()], accelerator="gpu", default_root_dir=str(folder))
        printed = io.StringIO()
        with redirect_stderr(printed):
            trainer.fit(build_task(folder), Rows(EVEN["vocab_size"], GLOBAL_BATCH // 2))
        lines = [line for line in printed.getvalue().splitlines() if line.startswith("hang: ")]
        if dist.get_rank() == 0:
            place = r"for rank 1 on \S+, which is at step 2 in .*in on_train_batch_start"
            assert any(re.search(rf"rank 0 has waited \d+ s in nccl:.* {place}", line) for line in lines), lines
            assert any("went on after" in line for line in lines)
        else:
            assert lines == []

    run_ranks(body, save_model(tmp_path, **EVEN), backend="cpu:gloo,cuda:nccl")
