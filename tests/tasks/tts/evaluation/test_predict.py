"""``predict`` speaks on sharded models: codes, WAV files where a codec is set, and a word about what was cut off."""

import json
import warnings
import wave
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from speech_training import build_data, build_task, build_trainer, make_config, make_rows

from lit_fsdp.callbacks import WritePredictions
from lit_fsdp.tasks import Sampling, SpeechEval
from lit_fsdp.tasks.tts.codec.formants import build_small_codec
from lit_fsdp.tasks.tts.config import parse_config
from lit_fsdp.tasks.tts.preparation.prepared import write_shard
from ranks import run_ranks

SHORT = Sampling(do_sample=False, predictor_do_sample=False, max_frames=3)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_shard(folder / "shard-00000.parquet", make_rows(4))
    return folder


def predict(folder: Path, out: Path) -> None:
    pl.seed_everything(0, verbose=False)
    trainer = build_trainer(
        default_root_dir=out, callbacks=[WritePredictions(path=str(out / "spoken.jsonl"))], logger=False
    )
    task = build_task(sampling=SHORT, speech_eval=SpeechEval(codec="formants"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.predict(task, build_data(folder, predict=str(out / "texts.txt"), batch_size=1))
    torch.save([str(w.message) for w in seen], out / f"{dist.get_rank()}.pt")


@pytest.mark.full
def test_on_two_ranks_there_is_a_wav_file_of_each_text(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a\nab\nabc\n")
    run_ranks(predict, prepared, tmp_path, world_size=2)
    rows = [json.loads(line) for line in (tmp_path / "spoken.jsonl").read_text().splitlines()]
    assert sorted(path.name for path in (tmp_path / "spoken").iterdir()) == ["00000.wav", "00001.wav", "00002.wav"]
    for row in rows:
        (audio,) = build_small_codec().decode([torch.tensor(row["prediction"])])
        with wave.open(row["audio"]) as file:
            assert (file.getframerate(), file.getnframes()) == (24000, len(audio))
    num_cut = sum(not row["has_ended"] for row in rows)
    assert num_cut
    warned = [text for text in torch.load(tmp_path / "0.pt") if "cut off" in text]
    assert warned == [
        f"cut off at sampling.max_frames 3, without an end: {num_cut} of the texts; has_ended tells which"
    ]


def test_a_file_without_texts_is_refused(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n")
    data = build_data(prepared, predict=str(tmp_path / "texts.txt"), batch_size=1)
    data.attach(parse_config(make_config()))
    with pytest.raises(ValueError, match=r"texts.txt: empty: expected a text in each line"):
        data.predict_dataloader()


def test_speech_of_validation_stops_at_three_times_what_was_recorded(prepared: Path) -> None:
    task = build_task(sampling=Sampling(do_sample=False, predictor_do_sample=False), num_samples=1)
    data = build_data(prepared, batch_size=2, validation=str(prepared))
    eos = parse_config(make_config()).ids.eos
    spoken: list[int] = []

    def never_end(module: torch.nn.Module, _: object, logits: torch.Tensor) -> torch.Tensor | None:
        if task.model is None or module is not task.model.talker.codec_head:
            return None
        away = torch.zeros(logits.shape[-1])
        away[eos] = -1e4
        return logits + away

    generate = task.generate
    task.generate = lambda *args: spoken.append(1) or generate(*args)  # type: ignore[func-returns-value, method-assign]
    handle = torch.nn.modules.module.register_module_forward_hook(never_end)
    try:
        build_trainer(max_steps=2, val_check_interval=2).fit(task, data)
    finally:
        handle.remove()
    (row,) = task.report.rows
    assert (len(row.speech.codes), row.speech.has_ended) == (3 * len(row.target), False)
    assert len(spoken) == 1  # not again at the end of training, at the same step


def test_two_losses_have_no_perplexity(prepared: Path) -> None:
    trainer = build_trainer(max_steps=1)
    trainer.fit(build_task(), build_data(prepared, batch_size=2))
    assert {"train/loss", "train/talker_loss"} <= trainer.callback_metrics.keys()
    assert "train/perplexity" not in trainer.callback_metrics


class Fail(pl.Callback):
    def on_train_batch_end(self, *_: object) -> None:
        raise RuntimeError("the first micro-batch of a step")


def test_a_second_run_of_a_task_has_nothing_of_the_first(prepared: Path) -> None:
    losses = []
    for is_second in (False, True):
        pl.seed_everything(0, verbose=False)
        task = build_task()
        if is_second:
            with pytest.raises(RuntimeError, match="first micro-batch"):
                build_trainer(accumulate_grad_batches=2, callbacks=[Fail()]).fit(task, build_data(prepared))
        trainer = build_trainer(max_steps=1, accumulate_grad_batches=2)
        trainer.fit(task, build_data(prepared))
        losses.append(float(trainer.callback_metrics["train/talker_loss"]))
    assert losses[0] == losses[1]


def test_a_second_run_speaks_when_it_ends_at_the_step_of_the_first(prepared: Path) -> None:
    task, spoken = build_task(sampling=SHORT, num_samples=1), []
    generate = task.generate
    task.generate = lambda *args: spoken.append(1) or generate(*args)  # type: ignore[func-returns-value, method-assign]
    for _ in range(2):
        build_trainer(max_steps=1).fit(task, build_data(prepared, batch_size=2))
    assert len(spoken) == 2
