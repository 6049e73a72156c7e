"""The plan of a text classifier is what its run holds."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_runs import check_held, enter_folder, fit, plan
from text_tasks import BERT, LLAMA, save_tokenizer, write_rows

from lit_fsdp.tasks import LabeledTextData, SequenceClassification, TextData


@pytest.mark.full
@pytest.mark.parametrize(("config", "options"), [(BERT, {}), (LLAMA, {"lora": {"r": 4}})], ids=["bert", "llama lora"])
def test_a_plan_is_what_a_run_on_two_ranks_holds(
    config: dict[str, Any], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_folder(tmp_path, monkeypatch)
    words = "one two three four five six seven eight nine ten " * 8
    save_tokenizer(tmp_path / "tokenizer", [words])
    # A batch of a rank has a short row, as that which is planned: or attention needs no mask.
    rows = [{"text": words if i % 2 else words[:40], "label": ["no", "yes"][i // 2 % 2]} for i in range(64)]
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "log_every_n_steps": 1}
    data = {"train": write_rows(tmp_path / "rows.jsonl", rows), "tokenizer": "tokenizer", "seq_length": 64}
    data |= {"batch_size": 8, "num_workers": 0, "classes": ["no", "yes"], "cache_dir": "cache"}
    run = {
        "trainer": {"accelerator": "cpu", "max_steps": 4, **quiet},
        "model": {"class_path": "SequenceClassification", "init_args": {"config": config, **options}},
        "data": {"class_path": "LabeledTextData", "init_args": data},
    }
    Path("run.yaml").write_text(yaml.safe_dump(run))
    planned = plan("--config=run.yaml", "--devices=2")
    assert planned["engine"] == "exact trace"
    _, report = fit("--config=run.yaml")
    check_held(planned["memory"], report["memory"]["numbers"]["step"], rel=0.02)


def test_text_without_labels_is_refused() -> None:
    task = SequenceClassification(config=BERT)
    with pytest.raises(ValueError, match="data: got TextData: its rows have no labels; set LabeledTextData"):
        task.prepare_plan(TextData(tokenizer="none"))


def test_an_example_batch_is_like_those_of_training(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", ["one two three"])
    rows: dict[str, list[dict[str, Any]]] = {
        "single_label_classification": [{"text": "one " * 99, "label": label} for label in "ab"],
        "multi_label_classification": [{"text": "one " * 99, "label": [label]} for label in "ab"],
        "regression": [{"text": "one " * 99, "label": label} for label in (0.5, 1)],
        "reward": [{"chosen": "one two", "rejected": "two"}] * 2,
    }
    for problem, found in rows.items():
        source = write_rows(tmp_path / "rows.jsonl", found)
        options: dict[str, Any] = {"tokenizer": tokenizer, "seq_length": 8, "batch_size": 2, "num_workers": 0}
        options |= {"cache_dir": str(tmp_path / "cache"), "problem_type": problem}
        options |= {"classes": ["a", "b"]} if "label" in problem else {}
        data = LabeledTextData(train=source, **options)
        example = data.make_example_batch()
        data.setup("fit")
        (batch,) = data.train_dataloader()
        for name, value in batch.items():
            assert (value.dtype, len(value)) == (example[name].dtype, len(example[name])), (problem, name)
        assert batch["labels"].shape == example["labels"].shape
