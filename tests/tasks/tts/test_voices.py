"""Who is who: numbers of speakers stay, also where the data changes between two parts of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from speech_families import CSM, build_data, build_task, make_rows
from speech_training import build_trainer
from training import build_trainer as build_ranked_trainer

from lit_fsdp import FSDP2Strategy
from lit_fsdp.tasks.tts.evaluation.prompts import PromptRow
from lit_fsdp.tasks.tts.families.model_types import parse_family
from lit_fsdp.tasks.tts.generation import Sampling
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow, write_shard
from ranks import run_ranks

SHORT = Sampling(max_frames=2)


def make_speakers(*names: str) -> list[PreparedRow]:
    return [replace(row, speaker=name) for row, name in zip(make_rows(6, len(names)), names, strict=True)]


def prepare(folder: Path, *names: str) -> Path:
    folder.mkdir()
    write_shard(folder / "shard-00000.parquet", make_speakers(*names))
    return folder


def test_speakers_keep_their_numbers_when_a_run_goes_on_with_others(tmp_path: Path) -> None:
    before, after = prepare(tmp_path / "a", "bruno", "eve"), prepare(tmp_path / "b", "ada", "bruno", "eve", "finn")
    trainer = build_trainer(max_steps=1)
    trainer.fit(build_task(CSM), build_data(before, batch_size=2))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    data = build_data(after, batch_size=4)
    build_trainer(max_steps=2).fit(build_task(CSM), data, ckpt_path=tmp_path / "run.ckpt")
    assert data.voices == {"bruno": 0, "eve": 1, "ada": 2, "finn": 3}
    batch = next(iter(data.train_dataloader()))
    told = [data.tokenizer.decode(ids, skip_special_tokens=True)[:3] for ids in batch["text_ids"]]
    assert told == ["[2]", "[0]", "[1]", "[3]"]


@pytest.mark.full
@pytest.mark.parametrize("limit", [{"max_steps": 2}, {"max_epochs": 2, "max_steps": -1}], ids=["steps", "epochs"])
def test_rows_are_trained_on_with_the_numbers_of_the_checkpoint(limit: dict[str, int], tmp_path: Path) -> None:
    names = ["ada", "bruno", "eve", "finn"]
    before, after = prepare(tmp_path / "a", "bruno", "eve"), prepare(tmp_path / "b", *names)
    told: list[str] = []

    class Listen(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
            told.extend(tokenizer.decode(ids, skip_special_tokens=True).rstrip("!") for ids in batch["text_ids"])

    def body() -> None:
        path = tmp_path / "run.ckpt"
        trainer = build_ranked_trainer(FSDP2Strategy(print_plan=False), max_steps=1)
        trainer.fit(build_task(CSM), build_data(before, batch_size=2))
        trainer.save_checkpoint(path)
        trainer = build_ranked_trainer(FSDP2Strategy(print_plan=False), callbacks=[Listen()], **limit)
        trainer.fit(build_task(CSM), build_data(after, batch_size=4), ckpt_path=path)
        numbers = dict(zip(names, (2, 0, 1, 3), strict=True))
        expected = {f"[{numbers[row.speaker]}]{row.text}" for row in make_speakers(*names)}
        assert set(told) == expected

    run_ranks(body, world_size=1)


def test_a_text_without_a_speaker_is_spoken_by_one_of_the_training(tmp_path: Path) -> None:
    data = build_data(prepare(tmp_path / "a", "3"), batch_size=1)
    data.attach(build_task(CSM).read_config())
    data.setup("fit")
    told = data.tokenizer.decode(data.encode_prompt(PromptRow(text="a")).text_ids, skip_special_tokens=True)
    assert told.startswith("[3]")


def test_weights_that_could_not_be_read_are_read_in_a_second_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, task = build_data(prepare(tmp_path / "a", "bruno"), batch_size=1), build_task(CSM)
    with monkeypatch.context() as patch, pytest.raises(ConnectionError, match="the disk is gone"):
        patch.setattr(type(task), "configure_weights", fail_to_read)
        build_trainer(max_steps=1).fit(task, data)
    assert task.model is None  # not memory without values
    build_trainer(max_steps=1).fit(task, data)
    assert task.model is not None


def fail_to_read(_: Any) -> None:
    raise ConnectionError("the disk is gone")


def test_predict_knows_the_voices_of_a_checkpoint_without_its_data(tmp_path: Path) -> None:
    trainer = build_trainer(max_steps=1)
    trainer.fit(build_task(CSM), build_data(prepare(tmp_path / "a", "bruno", "eve"), batch_size=2))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    (tmp_path / "texts.jsonl").write_text('{"text": "a", "speaker": "Eve"}\n')
    data = build_data(tmp_path, predict=str(tmp_path / "texts.jsonl"), batch_size=1)
    data.sources["train"] = (None, None)
    (rows,) = build_trainer().predict(build_task(CSM, sampling=SHORT), data, ckpt_path=tmp_path / "run.ckpt")
    assert rows["index"] == [0]


@pytest.mark.parametrize(
    ("names", "known", "message"),
    [
        (["0", "00"], {}, "speaker: got '0' and '00', both number 0: rename one of them"),
        (["0"], {"ada": 0}, "speaker: got 'ada' and '0', both number 0"),
    ],
)
def test_speakers_of_one_number_are_refused(names: list[str], known: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_family(CSM)[0].assign_voices(make_speakers(*names), known)


def test_who_was_held_out_with_all_they_say_has_a_number(tmp_path: Path) -> None:
    names = [f"speaker{i}" for i in range(8)]
    data = build_data(prepare(tmp_path / "a", *names), batch_size=2, validation_fraction=0.25)
    data.attach(build_task(CSM).read_config())
    data.setup("fit")
    assert len(data.voices) == 8
    assert all(data.encode_prompt(row) for row in data.pick_validation(2))
