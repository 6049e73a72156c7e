"""Predictions of all ranks end in one file, in the order of the source."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch
from launches import fork_ranks, write_run
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lit_fsdp.callbacks import WritePredictions


class Echo(LightningModule):
    """Returns its batches, the last rows first."""

    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()
        self.outputs = outputs

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.outputs[batch_idx]


def predict(outputs: list[Any], callback: WritePredictions, folder: Path, **options: Any) -> None:
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **options,
    )
    trainer.predict(Echo(outputs), DataLoader(torch.zeros(len(outputs))))  # type: ignore[arg-type]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_come_in_the_order_of_the_source_and_fillers_are_dropped(tmp_path: Path) -> None:
    outputs = [{"index": [2, -1], "prediction": ["c", "x"]}, {"index": [1, 0], "prediction": ["b\n", "ä"]}]
    predict(outputs, WritePredictions(fallback_dir=str(tmp_path / "runs")), tmp_path)
    expected = [
        {"index": 0, "prediction": "ä"},
        {"index": 1, "prediction": "b\n"},
        {"index": 2, "prediction": "c"},
    ]
    assert read(tmp_path / "runs" / "predictions.jsonl") == expected


def test_rows_of_several_loaders_come_one_loader_after_the_other(tmp_path: Path) -> None:
    class Two(Echo):
        def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {"index": [1 - batch_idx], "prediction": [f"{dataloader_idx} {batch_idx}"]}

    callback = WritePredictions(path=str(tmp_path / "out.jsonl"))
    options: Any = {"enable_progress_bar": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    trainer = Trainer(accelerator="cpu", callbacks=[callback], logger=False, **options)
    trainer.predict(Two([]), [DataLoader(torch.zeros(2)), DataLoader(torch.zeros(2))])  # type: ignore[arg-type]
    found = [(row["loader"], row["index"], row["prediction"]) for row in read(tmp_path / "out.jsonl")]
    assert found == [(0, 0, "0 1"), (0, 1, "0 0"), (1, 0, "1 1"), (1, 1, "1 0")]


def test_other_lists_are_written_beside_the_prediction(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    predict([{"index": [0], "prediction": ["cat"], "probability": [0.5]}], WritePredictions(path=str(path)), tmp_path)
    assert read(path) == [{"index": 0, "prediction": "cat", "probability": 0.5}]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_tensors_and_arrays_are_written_as_lists(suffix: str, tmp_path: Path) -> None:
    import pandas as pd  # type: ignore[import-untyped]

    path = tmp_path / f"out{suffix}"
    outputs = {
        "index": torch.tensor([1, 0]),
        "prediction": torch.eye(2, dtype=torch.bfloat16),
        "score": np.array([0.5, 0.25], dtype=np.float32),
        "label": [np.int64(3), torch.tensor(4)],
        "boxes": [[torch.tensor([1, 2])], [np.array([3, 4])]],
        "found": [["dög"], []],
    }
    predict([outputs], WritePredictions(path=str(path)), tmp_path)
    expected = [
        {"index": 0, "prediction": [0.0, 1.0], "score": 0.25, "label": 4, "boxes": [[3, 4]], "found": []},
        {"index": 1, "prediction": [1.0, 0.0], "score": 0.5, "label": 3, "boxes": [[1, 2]], "found": ["dög"]},
    ]
    if suffix == ".jsonl":
        assert read(path) == expected
    elif suffix == ".csv":
        assert pd.read_csv(path).to_dict("records") == [
            {
                name: json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
                for name, value in row.items()
            }
            for row in expected
        ]
    else:
        assert pq.read_table(path).to_pylist() == expected


@pytest.mark.parametrize("prediction", [["a"], "ab", 1.0])
def test_lists_that_do_not_fit_each_other_are_not_written_and_named(tmp_path: Path, prediction: object) -> None:
    with pytest.warns(UserWarning, match=r"predict_step returned unequal lists \(index 2, prediction (1|str|float)\)"):
        predict([{"index": [0, 1], "prediction": prediction}], WritePredictions(path=str(tmp_path / "o.csv")), tmp_path)
    assert not (tmp_path / "o.csv").exists()


def test_what_is_no_prediction_is_not_written_and_a_warning_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="predict_step returned a Tensor; expected a dict with the lists"):
        predict([torch.zeros(1)], WritePredictions(path=str(tmp_path / "out.jsonl")), tmp_path)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_predicted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.csv").mkdir()
    for path, why in (("file/out.csv", "file is no folder"), ("folder.csv", "it is a folder: expected a file")):
        with pytest.raises(ValueError, match=f"WritePredictions.path: got .*{why}"):
            predict([], WritePredictions(path=str(tmp_path / path)), tmp_path)
    with pytest.raises(ValueError, match=r"path: got 's3://bucket/out\.csv': only checkpoints can lie at an address"):
        WritePredictions(path="s3://bucket/out.csv")


def test_a_run_that_only_tries_one_batch_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (None, "out.jsonl"):
        predict([{"index": [0], "prediction": ["a"]}], WritePredictions(path=path), tmp_path, fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_of_the_same_callback_starts_empty(tmp_path: Path) -> None:
    callback = WritePredictions(path=str(tmp_path / "out.jsonl"))
    predict([{"index": [0], "prediction": ["first"]}, torch.zeros(1)], callback, tmp_path)
    predict([{"index": [0], "prediction": ["second"]}], callback, tmp_path)
    assert read(tmp_path / "out.jsonl") == [{"index": 0, "prediction": "second"}]


@pytest.mark.full
def test_two_ranks_predict_from_the_checkpoint_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, model={"generation": {"max_new_tokens": 3}})
    prompts = ["word is " * k + f"word{k} is" for k in range(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps({'prompt': p})}\n" for p in prompts))
    args = ("--config=run.yaml", "--run_name=chat", "--data.predict=prompts.jsonl", "--verbosity=full")
    ranks = fork_ranks("fit", *args)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert "FSDP units" in ranks[0].out
    for batch_size in ("2", "1"):  # with 2, rank 1 gets one filler in its only batch and three in the second
        options = ("--ckpt_path=last", f"--data.eval_batch_size={batch_size}")
        ranks = fork_ranks("predict", *args, *options)
        assert [rank.code for rank in ranks] == [0, 0], ranks
        assert "FSDP units" not in ranks[0].out  # nothing new for who has trained it
        folder = f"runs/chat/version_{3 - int(batch_size)}"
        assert f"5 predictions: {folder}/predictions.jsonl" in ranks[0].err
        assert "Loaded model weights from the checkpoint" in ranks[0].err
        found = read(tmp_path / folder / "predictions.jsonl")
        assert [row["index"] for row in found] == [0, 1, 2, 3, 4]
        assert [row["prompt"] for row in found] == prompts  # beside longer ones, which they are padded to
        assert all(isinstance(row["prediction"], str) for row in found)
    first, second = (Path(f"runs/chat/version_{k}/predictions.jsonl").read_text() for k in (1, 2))
    assert first == second


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_holds_the_same_as_lines(suffix: str, tmp_path: Path) -> None:
    import pandas as pd  # type: ignore[import-untyped]

    outputs = [
        {"index": [1], "prediction": ['a "b",\nc'], "probability": [0.25]},
        {"index": [0], "prediction": [None], "probability": [None]},
    ]
    path = tmp_path / f"out{suffix}"
    predict(outputs, WritePredictions(path=str(path)), tmp_path)
    table = pd.read_csv(path) if suffix == ".csv" else pd.read_parquet(path)
    assert table["index"].tolist() == [0, 1]
    assert table["prediction"].isna().tolist() == [True, False]
    assert table["prediction"][1] == 'a "b",\nc'
    assert table["probability"][1] == 0.25


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_has_the_columns_of_all_batches(suffix: str, tmp_path: Path) -> None:
    import pandas as pd  # type: ignore[import-untyped]

    outputs = [{"index": [0], "prediction": ["a"]}, {"index": [1], "prediction": ["b"], "label": ["c"]}]
    path = tmp_path / f"out{suffix}"
    predict(outputs, WritePredictions(path=str(path)), tmp_path)
    table = pd.read_csv(path) if suffix == ".csv" else pd.read_parquet(path)
    assert list(table.columns) == ["index", "prediction", "label"]
    assert table["label"].isna().tolist() == [True, False]
    assert table["label"][1] == "c"


def test_a_file_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"path: got 'out\.txt': expected .* \.jsonl, \.csv, \.parquet"):
        WritePredictions(path="out.txt")
