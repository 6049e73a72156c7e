"""What a run of speech keeps and says: checkpoints, validation, predictions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from speech_training import (
    build_data,
    build_task,
    build_trainer,
    make_config,
    make_rows,
)

from lit_fsdp.tasks import Sampling
from lit_fsdp.tasks.tts.config import parse_config
from lit_fsdp.tasks.tts.evaluation.prompts import PromptRow, read_prompts
from lit_fsdp.tasks.tts.preparation.prepared import write_shard
from ranks import run_ranks

GREEDY = Sampling(do_sample=False, predictor_do_sample=False, max_frames=6)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    rows = make_rows()
    write_shard(folder / "shard-00000.parquet", rows[:10])
    write_shard(folder / "shard-00001.jsonl", rows[10:])
    return folder


def test_the_speaker_encoder_stays_in_checkpoints_and_a_run_goes_on(prepared: Path, tmp_path: Path) -> None:
    task = build_task(freeze=["text_embedding"])
    trainer = build_trainer(max_steps=1)
    trainer.fit(task, build_data(prepared, batch_size=2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    stored = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert any(name.startswith("model.speaker_encoder.") for name in stored["state_dict"])
    assert set(stored["speech"]["voices"]) == {"kim", "lee"}
    assert "config.json" in stored["export"]
    again = build_task(freeze=["text_embedding"])
    build_trainer(max_steps=2).fit(again, build_data(prepared, batch_size=2), ckpt_path=tmp_path / "a.ckpt")
    assert int(again.targets_seen) > int(task.targets_seen)


def test_a_run_that_goes_on_with_data_of_another_layout_says_so(
    prepared: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    trainer = build_trainer(max_steps=1)
    trainer.fit(build_task(), build_data(prepared, batch_size=2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    def list_changes(run: str = "fit", **layout: Any) -> list[str]:
        recwarn.clear()
        data = build_data(prepared, batch_size=2, validation=str(prepared), **layout)
        getattr(build_trainer(max_steps=2), run)(build_task(), data, ckpt_path=tmp_path / "a.ckpt")
        return [text for warning in recwarn if " is used; the checkpoint" in (text := str(warning.message))]

    assert list_changes() == []
    assert list_changes(streaming=True, speaker_embedding="mean") == [
        "data.streaming: True is used; the checkpoint was trained with False",
        "data.speaker_embedding: mean is used; the checkpoint was trained with row",
    ]
    assert list_changes("validate") == []
    assert list_changes("validate", speaker_embedding="none") == [
        "data.speaker_embedding: none is used; the checkpoint was trained with row"
    ]
    stored = torch.load(tmp_path / "a.ckpt", weights_only=False)
    del stored["speech"]["speaker_embedding"]  # as of an earlier release
    torch.save(stored, tmp_path / "a.ckpt")
    assert list_changes(speaker_embedding="mean") == []


def test_without_speakers_in_training_there_are_none_when_it_speaks(prepared: Path) -> None:
    data = build_data(prepared, batch_size=2, speaker_embedding="none")
    data.attach(parse_config(make_config()))
    data.setup("fit")
    assert data.voices == {}
    assert data.encode_prompt(PromptRow(text="a")).speaker is None
    with pytest.raises(ValueError, match="speaker: got 'kim': expected one of"):
        data.encode_prompt(PromptRow(text="a", speaker="kim"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('\n{"text": 7}', "line 2: text: got 7: expected text"),
        ('{"speaker": "kim"}', "line 1: text: missing"),
        ('{"text": "a", "speaker": ["kim"]}', r"line 1: speaker: got \['kim'\]: expected text"),
        ('{"te', "line 1: not valid JSON: Unterminated"),
        ("[1]", r"line 1: must be an object like .*, it is a list"),
        (b"\xff", "line 1: not UTF-8"),
    ],
)
def test_a_text_that_cannot_be_spoken_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=f"predict: .*texts.jsonl:? {message}"):
        read_prompts(path)


@pytest.mark.parametrize("name", ["p.md", "p.TXT", "p", "p.JSONL", "p.jsonl"])
def test_texts_are_the_lines_of_a_file_or_the_rows_of_json_lines(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n')
    said = "a" if name.lower().endswith(".jsonl") else '{"text": "a"}'
    assert read_prompts(tmp_path / name) == [PromptRow(text=said)]


def test_names_in_texts_have_no_white_space_around_them(tmp_path: Path) -> None:
    rows = ['{"text": "a", "speaker": "kim ", "language": " english"}', '{"text": "b", "speaker": " "}']
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    wanted = [PromptRow(text="a", speaker="kim", language="english"), PromptRow(text="b")]
    assert read_prompts(tmp_path / "p.jsonl") == wanted


@pytest.mark.parametrize("name", ["p.csv", "p.Parquet", "p.json"])
def test_tables_are_no_texts(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("text\na\n")
    with pytest.raises(ValueError, match=r"^predict: \S+: expected lines of text in a \.txt file, or rows in"):
        read_prompts(tmp_path / name)


def test_texts_may_hold_breaks_of_other_kinds_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('\ufeff{"text": "a\u2028b"}\r\n{"text": "c"}\r\n', encoding="utf-8")
    assert [row.text for row in read_prompts(path)] == ["a\u2028b", "c"]


def test_codes_that_the_model_has_not_are_named_before_training(tmp_path: Path) -> None:
    row, *_ = make_rows(1)
    write_shard(tmp_path / "shard-00000.parquet", [replace(row, codes=np.full_like(row.codes, 5000))])
    data = build_data(tmp_path)
    with pytest.raises(ValueError, match=r"0.wav: got codes from 5000 to 5000: expected 0 to 63"):
        build_task().check_data(data, "fit")


def test_a_row_with_a_language_that_the_model_has_not_is_named(tmp_path: Path) -> None:
    row, *_ = make_rows(1)
    write_shard(tmp_path / "shard-00000.parquet", [replace(row, language="klingon")])
    data = build_data(tmp_path)
    with pytest.raises(ValueError, match=r"0.wav: language: got 'klingon': expected auto or one of"):
        build_task().check_data(data, "fit")
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n{"text": "b", "language": "klingon"}\n')
    data = build_data(tmp_path, predict=str(tmp_path / "texts.jsonl"))
    with pytest.raises(ValueError, match=r"predict: .*texts.jsonl: language: got 'klingon': .* for 'b'"):
        build_task().check_data(data, "predict")


def test_rows_without_a_speaker_are_one_voice_only_by_name(tmp_path: Path) -> None:
    rows = [replace(row, speaker="default") if i % 3 == 0 else row for i, row in enumerate(make_rows(6))]
    write_shard(tmp_path / "shard-00000.parquet", rows)
    refused = (
        r"speaker_embedding: got 'mean': 2 of 6 rows name no speaker, such as \S+ row 1, 0.wav: .* default_speaker"
    )
    with pytest.raises(ValueError, match=refused):
        build_task().check_data(build_data(tmp_path, speaker_embedding="mean"), "fit")
    data = build_data(tmp_path, speaker_embedding="mean")
    build_task().check_data(data, "validate")
    with pytest.raises(ValueError, match=refused):  # also where rows and voices are there by then
        build_task().check_data(data, "fit")
    for name in ("Ann", "default"):
        data = build_data(tmp_path, speaker_embedding="mean", default_speaker=name)
        build_task().check_data(data, "fit")
        assert set(data.voices) == {"kim", "lee", name.lower()}
        wanted = np.stack([rows[i].speaker_embedding for i in (0, 3)]).mean(0)
        np.testing.assert_allclose(data.voices[name.lower()], wanted, rtol=1e-6)
    build_task().check_data(build_data(tmp_path, speaker_embedding="row"), "fit")
    write_shard(tmp_path / "shard-00000.parquet", make_rows(6))
    with pytest.raises(ValueError, match=r"default_speaker: not used, as all rows of .* name a speaker; leave it out"):
        build_task().check_data(build_data(tmp_path, default_speaker="ann"), "fit")


def test_models_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer_type: got 'qwen3_tts_tokenizer_25hz'"):
        parse_config({**make_config(), "tokenizer_type": "qwen3_tts_tokenizer_25hz"})
    raw = make_config()
    raw["talker_config"]["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0}
    with pytest.raises(ValueError, match="rope_scaling: got 'yarn': expected default"):
        parse_config(raw)
    raw["talker_config"]["rope_scaling"] = {"interleaved": True, "mrope_section": [24, 20, 20], "type": "default"}
    parse_config(raw)


def test_the_language_of_a_row_is_on_its_codec_track(tmp_path: Path) -> None:
    config = parse_config(make_config())
    (language, number), *_ = config.languages.items()
    rows = make_rows(2)
    write_shard(tmp_path / "shard-00000.parquet", [replace(rows[0], language=language), rows[1]])
    data = build_data(tmp_path, batch_size=2)
    data.attach(config)
    data.setup("fit")
    told, untold = next(iter(data.train_dataloader()))["codec_ids"]
    assert number in told
    assert number not in untold


def validate(folder: Path, out: Path) -> None:
    pl.seed_everything(0, verbose=False)
    task = build_task(sampling=GREEDY, num_samples=2)
    (found,) = build_trainer().validate(task, build_data(folder, validation=str(folder), batch_size=2), verbose=False)
    if dist.get_rank() == 0:
        torch.save(found, out / "metrics.pt")


@pytest.mark.full
def test_validation_is_the_same_on_any_number_of_ranks(prepared: Path, tmp_path: Path) -> None:
    found = []
    for world_size in (1, 2):  # 18 rows are 9 batches: the last one of rank 1 only fills up
        (folder := tmp_path / str(world_size)).mkdir()
        run_ranks(validate, prepared, folder, world_size=world_size)
        found.append(torch.load(folder / "metrics.pt"))
    names = {f"val/accuracy_codebook_{i:02}_pct" for i in range(16)}
    names |= {"val/loss", "val/talker_loss", "val/sub_talker_loss", "val/eos_recall_pct"}
    names |= {"val/duration_ratio", "val/missed_eos_pct", "val/equal_codes_pct"}
    assert found[0].keys() == names
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[0]["val/loss"] == pytest.approx(
        found[0]["val/talker_loss"] + 0.3 * found[0]["val/sub_talker_loss"], rel=1e-6
    )
