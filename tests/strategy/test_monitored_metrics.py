"""What a callback monitors and nothing logs ends the run in one line, as early as it can be known."""

import csv
from pathlib import Path

import pytest
from launches import Ended, fork_ranks, write_run

CALLBACKS = "lightning.pytorch.callbacks"


def run(
    folder: Path, callback: str, more: dict[str, int] | None = None, *, validates: bool = True, **settings: object
) -> Ended:
    callbacks = [{"class_path": f"{CALLBACKS}.{callback}", "init_args": settings}]
    strategy = {"class_path": "lit_fsdp.FSDP2Strategy", "init_args": {"async_save": True}}
    trainer = {"callbacks": callbacks, "limit_val_batches": 1, "strategy": strategy}
    trainer |= more or {"val_check_interval": 2}
    if callback == "EarlyStopping":
        trainer["num_sanity_val_steps"] = 0
    write_run(folder, trainer=trainer, data={"validation": "train.jsonl"} if validates else {})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (ended,) = fork_ranks("fit", "--config=run.yaml", ranks=1)
    return ended


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    ("callback", "settings", "word", "num_steps"),
    [
        ("ModelCheckpoint", {"monitor": "val/los"}, "did you mean val/loss?", 0),  # in the sanity check
        ("ModelCheckpoint", {"monitor": "train/los", "every_n_train_steps": 1}, "did you mean train/loss?", 2),
        ("ModelCheckpoint", {"monitor": "accuracy", "every_n_train_steps": 1}, "expected one of ", 2),
        ("ModelCheckpoint", {"monitor": "val/accuracy"}, "expected one of ", 2),
        ("ModelCheckpoint", {"monitor": "los", "every_n_train_steps": 1, "validates": False}, "expected one of ", 1),
        ("EarlyStopping", {"monitor": "val/los"}, "did you mean val/loss?", 2),
    ],
)
def test_a_metric_that_nothing_logs_is_refused_with_the_nearest_and_the_known(
    tmp_path: Path, callback: str, settings: dict[str, object], word: str, num_steps: int
) -> None:
    ended = run(tmp_path, callback, **settings)  # type: ignore[arg-type]
    assert ended.code == 2, ended.err
    assert len(ended.errors) == 1, ended.err
    assert f"{callback}.monitor: got {settings['monitor']!r}: nothing logs it: {word}" in ended.errors[0]
    assert "/loss" in ended.errors[0].split("nothing logs it")[1]
    assert "Traceback" not in ended.err
    saved = {path.resolve() for path in tmp_path.glob("runs/run/version_0/checkpoints/*/complete.json")}
    assert len(saved) == (num_steps > 0)  # what was trained is not lost
    assert ("what was trained is saved: " in ended.errors[0]) == bool(saved)
    metrics = tmp_path / "runs" / "run" / "version_0" / "metrics.csv"
    rows = list(csv.DictReader(metrics.read_text().splitlines())) if metrics.exists() else []
    assert max((int(row["step"]) for row in rows), default=-1) < num_steps


@pytest.mark.full
@pytest.mark.parametrize("when", [{"val_check_interval": 10}, {"check_val_every_n_epoch": 2}])
def test_a_run_that_waited_for_a_validation_that_never_came_does_not_end_well(
    tmp_path: Path, when: dict[str, int]
) -> None:
    settings = {"monitor": "val/accuracy", "every_n_train_steps": 1}
    ended = run(tmp_path, "ModelCheckpoint", {"num_sanity_val_steps": 0, **when}, **settings)
    assert ended.code == 1, ended.err
    assert "came to its end, but ModelCheckpoint waited for 'val/accuracy'" in ended.errors[0]
    assert [path.parent.name for path in tmp_path.glob("runs/*/version_0/checkpoints/*/complete.json")] == [
        "epoch=1-step=4.ckpt"
    ]


@pytest.mark.full
def test_what_is_logged_at_the_end_of_an_epoch_or_in_training_is_waited_for(tmp_path: Path) -> None:
    settings = {"monitor": "train/loss", "every_n_train_steps": 2, "save_top_k": 2}
    ended = run(tmp_path, "ModelCheckpoint", **settings)
    assert ended.code == 0, ended.err
    assert len(list(tmp_path.glob("runs/run/version_0/checkpoints/*.ckpt"))) == 2
