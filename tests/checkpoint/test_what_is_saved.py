"""Which steps of a run are saved, and that a run goes on from the newest of them."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launches import Ended, fork_ranks, write_run
from lightning.pytorch.utilities import rank_zero_info

from lit_fsdp.checkpoint.untrusted import load_plain
from lit_fsdp.strategy import lightning_internals

SAVES = "lightning.pytorch.callbacks.ModelCheckpoint"
FOLDER = "runs/run/version_0/checkpoints"
FAILING = """
from lightning.pytorch import Callback


class Fail(Callback):
    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2 and trainer.global_rank in self.ranks:
            raise RuntimeError("it broke")
"""


def fit(*saves: dict[str, Any], args: Sequence[str] = (), more: Sequence[dict[str, Any]] = (), ranks: int = 1) -> Ended:
    """Train in the current folder; validate after every second step."""
    callbacks = [*({"class_path": SAVES, "init_args": save} for save in saves), *more]
    trainer: dict[str, Any] = {"val_check_interval": 2, "num_sanity_val_steps": 0, "limit_val_batches": 1}
    write_run(Path(), trainer={**trainer, "callbacks": callbacks}, data={"validation": "train.jsonl"})
    return fork_ranks("fit", "--config=run.yaml", *args, ranks=ranks, timeout_s=120)[0]


def list_steps(version: int = 0) -> list[int]:
    """Return the steps of the checkpoints of a run, however deep they lie."""
    found = Path(f"runs/run/version_{version}/checkpoints").rglob("meta.pt")
    return sorted(load_plain(path, path)["global_step"] for path in found if not path.parent.is_symlink())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = SimpleNamespace(warn=lambda message, **_: rank_zero_info(message))  # pytest keeps warnings of forked ranks
    monkeypatch.setattr(lightning_internals, "warnings", told)
    monkeypatch.setattr(lightning_internals, "rank_zero_warn", rank_zero_info)
    monkeypatch.setattr(lightning_internals, "_FAILURE_PATIENCE_S", 2.0)


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    ("saves", "steps", "warns"),
    [
        ([], [5], False),
        (
            [{"every_n_train_steps": 2, "save_top_k": -1, "save_last": "link"}],
            [2, 4, 5],
            False,
        ),
        ([{"monitor": "val/loss", "save_last": "link"}], [4, 5], False),
        # As asked for: the best one.
        ([{"monitor": "val/loss"}], [4], False),
        ([{"every_n_train_steps": 100}], [5], True),
        ([{"save_top_k": 0}], [], False),
        ([{"save_top_k": 0, "save_last": "link"}], [5], False),
        (
            [
                {"every_n_train_steps": 3, "save_last": True},
                {"every_n_train_steps": 1, "save_weights_only": True, "filename": "only-{step}"},
            ],
            [5, 5, 5],
            False,
        ),
    ],
)
def test_the_last_steps_are_saved_and_nothing_is_left_to_train(
    saves: list[dict[str, Any]], steps: list[int], warns: bool
) -> None:
    ended = fit(*saves, args=["--trainer.max_steps=5"])
    assert ended.code == 0, ended.err
    assert list_steps() == steps
    assert ("has saved nothing by now, so what was trained is saved at the end" in ended.err) == warns
    if any(save.get("save_last") for save in saves) or not saves:
        last = Path("runs/run/version_0/checkpoints/last.ckpt").resolve() / "meta.pt"
        assert load_plain(last, last)["global_step"] == 5
    if not steps:
        return
    again = fit(*saves, args=["--trainer.max_steps=5", "--ckpt_path=last"])
    assert again.code == 0, again.err
    assert ("nothing left to train" in again.out) == (steps[-1] == 5)
    assert list_steps(1) == ([] if steps[-1] == 5 else [5])


@pytest.mark.full
def test_a_best_checkpoint_without_a_step_in_its_name_is_not_written_over() -> None:
    assert (
        fit({"monitor": "val/loss", "filename": "best", "save_last": "link"}, args=["--trainer.max_steps=5"]).code == 0
    )
    found = {path.parent.name: load_plain(path, path)["global_step"] for path in Path().rglob("meta.pt")}
    assert {name: found[name] for name in ("best.ckpt", "best-v1.ckpt")} == {"best.ckpt": 4, "best-v1.ckpt": 5}


@pytest.mark.full
def test_a_checkpoint_with_a_metric_in_its_name_is_found() -> None:
    """The slash makes folders."""
    named = {"monitor": "val/loss", "filename": "{step}-{val/loss:.3f}"}
    assert fit(named).code == 0
    assert list_steps() == [4]
    ended = fit(named, args=["--ckpt_path=last", "--trainer.max_steps=6"])
    assert ended.code == 0, ended.err
    assert "from step 4" in ended.err + ended.out


@pytest.mark.full
def test_a_run_goes_on_from_a_full_checkpoint_beside_newer_weights_alone() -> None:
    full, weights = {"every_n_train_steps": 3}, {"save_weights_only": True, "filename": "only-{step}", "save_top_k": -1}
    assert fit(full, {**weights, "every_n_train_steps": 1}).code == 0
    assert list_steps() == [1, 2, 3, 3, 4]
    ended = fit(full, args=["--ckpt_path=last", "--trainer.max_steps=4"])
    assert ended.code == 0, ended.err
    assert "was saved with save_weights_only, and has no optimizer to go on with: taking the newest" in ended.err
    assert list_steps(1) == [4]
    for path in Path("runs/run/version_0/checkpoints").glob("epoch*"):
        path.rename(f"{path}.elsewhere")
    alone = fit(full, args=["--ckpt_path=runs/run/version_0/checkpoints/only-step=4.ckpt"])
    assert alone.code != 0
    assert "holds weights without optimizers, as save_weights_only leaves it: resume from another" in alone.errors[0]


@pytest.mark.full
@pytest.mark.parametrize("failing", [[0], [1], [0, 1]])
@pytest.mark.parametrize(
    "saver",
    [
        {"class_path": SAVES, "init_args": {"save_on_exception": True}},
        {"class_path": "lightning.pytorch.callbacks.OnExceptionCheckpoint", "init_args": {"dirpath": FOLDER}},
    ],
)
def test_what_fails_on_one_rank_alone_is_not_saved_and_its_error_is_told(
    failing: list[int], saver: dict[str, Any]
) -> None:
    Path("failing.py").write_text(FAILING)
    fail = {"class_path": "failing.Fail", "init_args": {"ranks": failing}}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path.cwd())
        write_run(Path(), trainer={"callbacks": [saver, fail]})
        options = ["--trainer.devices=2", "--trainer.strategy.timeout_s=20"]
        ended = fork_ranks("fit", "--config=run.yaml", *options, timeout_s=120)
    assert None not in [end.code for end in ended]
    assert 0 not in [end.code for end in ended]
    assert any("it broke" in end.err for end in ended)
    assert list_steps() == ([2] if len(failing) == 2 else [])
    assert any("nothing is saved, as not all ranks have failed" in end.err for end in ended) == (len(failing) == 1)
