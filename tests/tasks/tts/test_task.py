"""Training of speech: sharded as on one device, normalised by global counts, and what a run tells and keeps."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from differences import find_largest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from speech_families import fit
from speech_training import (
    GLOBAL_BATCH,
    NUM_STEPS,
    build_data,
    build_task,
    build_trainer,
    make_config,
    make_rows,
    save_model,
    train_model,
)
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.data import DataLoader
from training import Recorder, Result

from lit_fsdp import FSDP2Strategy, Sharding
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.profiling.communication_meter import CommunicationMeter
from lit_fsdp.profiling.expected_communication import estimate_bytes
from lit_fsdp.sharding.mesh import DataRanks
from lit_fsdp.tasks import Sampling, SpeechEval, TextToSpeech
from lit_fsdp.tasks.tts.checkpoint import describe_run
from lit_fsdp.tasks.tts.config import parse_config
from lit_fsdp.tasks.tts.families.qwen3_layout import collate_training, encode_text
from lit_fsdp.tasks.tts.families.qwen3_model import Qwen3TTS
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow, average_speakers, read_rows, write_shard
from lit_fsdp.tasks.tts.tokenizer import build_byte_tokenizer
from lit_fsdp.tasks.tts.utterance import Utterance
from lit_fsdp.weights.load import init_weights, materialize
from ranks import run_ranks

GREEDY = Sampling(do_sample=False, predictor_do_sample=False, max_frames=6)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    rows = make_rows()
    write_shard(folder / "shard-00000.parquet", rows[:10])
    write_shard(folder / "shard-00001.jsonl", rows[10:])
    return folder


def train_plainly() -> Result:
    with torch.device("meta"):
        model = Qwen3TTS(parse_config(make_config()))
    materialize(model, torch.device("cpu"))
    init_weights(model, 0)
    tokenizer = build_byte_tokenizer()
    utterances = [
        Utterance(text_ids=encode_text(tokenizer, row.text), codes=row.codes, speaker=row.speaker_embedding)
        for row in make_rows()
    ]
    steps = [utterances[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH] for step in range(NUM_STEPS)]
    return train_model(model, [collate_training(step, model.config) for step in steps], (1.0, 0.3))


@pytest.fixture(scope="module")
def truth() -> Result:
    return train_plainly()


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    ("world_size", "accumulate", "share"),
    [(1, 1, None), (2, 1, [2, 1]), (2, 1, None), (3, 1, None), (1, 3, None), (3, 2, None)],
)
def test_training_is_the_same_on_any_number_of_ranks(
    prepared: Path, tmp_path: Path, truth: Result, world_size: int, accumulate: int, share: Any
) -> None:
    train = partial(fit, share=share, speaker_embedding="row")
    run_ranks(train, make_config(), prepared, tmp_path, accumulate, {}, world_size=world_size)
    result = Result(**torch.load(tmp_path / "result.pt"))
    for own, wanted in ((result.losses, truth.losses), (result.grad_norms, truth.grad_norms)):
        assert find_largest(abs(a - b) / abs(b) for a, b in zip(own, wanted, strict=True)) < 1e-6
    assert result.weights.keys() == truth.weights.keys()
    assert find_largest(float((result.weights[n] - w).abs().max()) for n, w in truth.weights.items()) < 1e-5


def fit_as_scheduled(folder: Path, out: Path) -> None:
    pl.seed_everything(0, verbose=False)
    recorder = Recorder()
    trainer = build_trainer(callbacks=[recorder, GradientAccumulationScheduler({0: 3})])
    trainer.fit(build_task(), build_data(folder, batch_size=2))
    torch.save(recorder.result.losses, out)


@pytest.mark.full
def test_accumulation_that_a_callback_schedules_is_normalised_alike(
    prepared: Path, tmp_path: Path, truth: Result
) -> None:
    run_ranks(fit_as_scheduled, prepared, tmp_path / "losses.pt", world_size=1)
    assert torch.load(tmp_path / "losses.pt") == pytest.approx(truth.losses, rel=1e-6)


def test_counts_of_a_step_are_those_of_all_its_micro_batches_and_ranks(prepared: Path) -> None:
    data = build_data(prepared, batch_size=3, shuffle=True)
    data.attach(parse_config(make_config()))
    data.setup("fit")
    loader = data.train_dataloader()
    loader.annotate.trainer = SimpleNamespace(accumulate_grad_batches=4)  # 6 batches: a step of 4, and one of 2
    batches = list(loader)
    for group in (batches[:4], batches[4:]):
        tokens, frames = (sum(len(b[name]) for b in group) for name in ("labels", "frame_index"))
        assert all(b["step_counts"].tolist() == [tokens, frames] for b in group)
    loader.sampler.batches_per_step = 4  # as global_batch_size has it: an epoch of whole steps
    batches = list(loader)
    tokens, frames = (sum(len(b[name]) for b in batches) for name in ("labels", "frame_index"))
    assert [b["step_counts"].tolist() for b in batches] == [[tokens, frames]] * 4


def fit_bundles(folder: Path, out: Path, accumulate: int) -> None:
    pl.seed_everything(0, verbose=False)
    recorder = Recorder()
    trainer = build_trainer(callbacks=[recorder], accumulate_grad_batches=accumulate, max_steps=4)
    trainer.fit(build_task(), build_data(folder, max_frames_per_batch=30, shuffle=True))
    if trainer.is_global_zero:
        torch.save(vars(recorder.result), out)


@pytest.mark.full
def test_batches_bounded_by_frames_train_the_same_on_any_number_of_ranks(prepared: Path, tmp_path: Path) -> None:
    found = []
    for world_size, accumulate in ((1, 2), (2, 1)):
        run_ranks(fit_bundles, prepared, tmp_path / "result.pt", accumulate, world_size=world_size)
        found.append(torch.load(tmp_path / "result.pt"))
    for name in ("losses", "grad_norms"):
        assert len(found[0][name]) == 4
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-6)


def test_batches_bounded_by_frames_have_like_lengths_and_go_on_after_a_resume(prepared: Path) -> None:
    def build(bound: int = 30) -> Any:
        data = build_data(prepared, max_frames_per_batch=bound, shuffle=True, repeat=2)
        data.attach(parse_config(make_config()))
        data.setup("fit")
        return data.train_dataloader()

    lengths = sorted(len(row.codes) for row in make_rows())
    batches = list(build())
    counts = [batch["frame_mask"].sum(1).tolist() for batch in batches]
    assert sorted(n for own in counts for n in own) == sorted(2 * lengths)
    assert all(len(own) * max(own) <= 30 for own in counts)
    assert len(counts) < 1.5 * 2 * sum(lengths) / 30  # they are nearly full
    assert any(len(own) > 5 for own in counts)
    assert any(len(own) == 2 for own in counts)
    for batch in batches:
        assert batch["step_counts"].tolist() == [len(batch["labels"]), len(batch["frame_index"])]
    first = build()
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    (again := build()).load_state_dict(first.state_dict())
    assert [batch["frame_mask"].sum(1).tolist() for batch in again] == counts[3:]
    with pytest.raises(ValueError, match="the rows are others"):
        build(40).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 2}, "leave out batch_size, global_batch_size and share"),
        ({"global_batch_size": 4}, "leave out batch_size, global_batch_size and share"),
        ({"max_frames_per_batch": 0}, "max_frames_per_batch: got 0: expected 1 or more"),
        ({"max_frames_per_batch": 13}, "the longest row has 14 frames: expected 14 or more"),
    ],
)
def test_bounds_on_frames_that_cannot_be_are_refused(prepared: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data = build_data(prepared, **{"max_frames_per_batch": 30, **options})
        data.attach(parse_config(make_config()))
        data.setup("fit")
        data.train_dataloader()


def test_a_bound_that_leaves_a_rank_without_a_batch_is_refused_by_its_name(prepared: Path) -> None:
    data = build_data(prepared, max_frames_per_batch=500)
    data.attach(parse_config(make_config()))
    data.setup("fit")
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(data_ranks=DataRanks(count=2, index=0)))
    data.trainer = trainer
    with pytest.raises(ValueError, match="got 500: all 18 rows come together in 1 batches, for 2 ranks: expected"):
        data.train_dataloader()


def test_checkpoints_of_other_adapters_are_passed_over() -> None:
    def describe(saved: LoRA | None, now: LoRA | None) -> str | None:
        kept = describe_run(parse_config(make_config()), None, pretrained=None, lora=saved, quantization=None)
        return TextToSpeech(config=make_config(), lora=now).describe_misfit(kept)

    assert describe(None, None) is None
    assert describe(LoRA(r=2), LoRA(r=2, dropout=0.1)) is None
    assert describe(None, LoRA(r=2)) == "lora: it holds whole weights, this run has adapters"
    assert describe(LoRA(r=2), LoRA(r=4)) == "lora.r: it was saved with 2, this run has 4"


def test_accumulated_batches_that_say_nothing_of_their_step_are_refused() -> None:
    class Rows(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            config = parse_config(make_config())
            ids = encode_text(build_byte_tokenizer(), "hi")
            row = Utterance(text_ids=ids, codes=np.zeros((3, 16), dtype=np.int64))
            return DataLoader([row] * 2, batch_size=1, collate_fn=lambda rows: collate_training(rows, config))

    trainer = build_trainer(accumulate_grad_batches=2, max_steps=1)
    with pytest.raises(ValueError, match="accumulate_grad_batches: got 2: batches say nothing of the step"):
        trainer.fit(build_task(), Rows())


class MeterSteps(pl.Callback):
    """Measures what FSDP2 sends in each step."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.meter = CommunicationMeter(module, torch.device("cpu"))
        self.meter.attach()

    def on_train_batch_start(self, *_: Any) -> None:
        self.meter.resume()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.meter.pause()
        self.meter.end_step(trainer.global_step)


def send(folder: Path, prefetch: int) -> None:
    meter = MeterSteps()
    strategy = FSDP2Strategy(print_plan=False, sharding=Sharding(forward_prefetch=prefetch))
    trainer = build_trainer(strategy=strategy, callbacks=[meter], max_steps=2)
    task = build_task()
    trainer.fit(task, build_data(folder, batch_size=3))
    predicted = estimate_bytes(
        task, strategy.plan, strategy.settings.sharding, strategy.precision_plugin.mixed_precision, num_shards=2
    )
    steps = meter.meter.take()
    assert len(steps) == 2
    for step in steps:
        gathers = {unit.unit: unit.num_bytes for unit in step.units if unit.collective == "all_gather"}
        assert gathers == {unit.unit: unit.gather_step for unit in predicted if unit.gather_step}
        assert "model.speaker_encoder" not in gathers
    assert "model.speaker_encoder" in {name for unit in strategy.plan for name in unit.names}


@pytest.mark.full
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_speaker_encoder_is_sharded_and_costs_a_step_nothing(prepared: Path, prefetch: int) -> None:
    run_ranks(send, prepared, prefetch, world_size=2)


# What trains


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({}, 181_840),
        ({"freeze": ["text_embedding"]}, 181_840 - 12_624),
        ({"freeze": ["text_embedding", "code_predictor"]}, 181_840 - 12_624 - 70_864),
        ({"freeze": ["talker", "text_embedding"]}, 70_864),
        # 2 blocks: 4 linears of attention and 3 of the MLP, rank 2.
        ({"lora": LoRA(r=2)}, 2 * 2 * ((32 + 64) + 2 * (32 + 32) + (64 + 32) + 3 * (32 + 64))),
    ],
)
def test_freezing_and_adapters_leave_what_they_say_to_train(
    prepared: Path, options: dict[str, Any], trained: int
) -> None:
    task = build_task(**options)
    trainer = build_trainer(max_steps=1)
    trainer.fit(task, build_data(prepared, batch_size=2))
    assert task.model is not None
    assert sum(p.numel() for p in task.model.parameters() if p.requires_grad) == trained
    assert not any(p.requires_grad for p in task.model.speaker_encoder.parameters())
    assert not any("code_predictor" in n for n, p in task.named_parameters() if "lora" in n)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": ["speaker"]}, "freeze: got speaker: expected some of talker, text_embedding, code_predictor"),
        ({"freeze": ["talker", "text_embedding", "code_predictor"]}, "freeze: got all parts: nothing is left to train"),
        ({"freeze": ["talker"], "lora": LoRA()}, "freeze: not used with lora"),
        ({"pretrained": "x"}, "pretrained or config: expected one of them"),
        ({"num_samples": -1}, "num_samples: got -1: expected 0 or more"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_task(**options)


@pytest.mark.parametrize(
    ("name", "value", "least"), [("batch_size", 0, 1), ("eval_batch_size", 0, 1), ("repeat", 0, 1), ("seed", -1, 0)]
)
def test_settings_of_data_that_are_too_small_are_refused(prepared: Path, name: str, value: int, least: int) -> None:
    with pytest.raises(ValueError, match=f"{name}: got {value}: expected {least} or more"):
        build_data(prepared, **{name: value})


def test_nothing_to_validate_on_is_an_error_where_that_is_asked_for(prepared: Path) -> None:
    with pytest.raises(ValueError, match="validation: not set; name a folder that `lit_fsdp prepare tts` wrote"):
        build_trainer().validate(build_task(), build_data(prepared), verbose=False)


def test_a_run_samples_as_its_pretrained_model_says(tmp_path: Path) -> None:
    base = str(save_model(tmp_path))
    task = TextToSpeech(pretrained=base, sampling=Sampling(predictor_top_k=50))
    values = task.complete_sampling()
    assert (values.top_k, values.predictor_top_k, values.temperature) == (7, 50, 0.9)
    task = TextToSpeech(pretrained=base, sampling=Sampling(temperature=0.5))
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')
    with pytest.raises(ValueError, match=r"sampling.temperature: not used, as do_sample is false in the model"):
        task.setup("fit")


# Speakers


def test_speakers_are_averaged_in_float32() -> None:
    # 300 embeddings near 1: a sum in bfloat16 stops at 256.
    rows = [
        PreparedRow(
            audio="", text="a", codes=np.zeros((1, 16), dtype=np.int64), seconds=1.0, speaker="kim",
            speaker_embedding=np.full(4, 1 + i / 1000, dtype=np.float32),
        )
        for i in range(300)
    ]  # fmt: skip
    mean = average_speakers(rows)["kim"]
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, 1.1495, rtol=1e-6)


def test_rows_get_the_embedding_that_is_asked_for(prepared: Path) -> None:
    def find_speakers(choice: str) -> list[Tensor]:
        data = build_data(prepared, batch_size=4, speaker_embedding=choice)
        data.attach(parse_config(make_config()))
        data.setup("fit")
        return [batch.get("speaker") for batch in data.train_dataloader()]

    rows = make_rows()
    own, mean, none = (find_speakers(choice) for choice in ("row", "mean", "none"))
    torch.testing.assert_close(own[0][1], torch.from_numpy(rows[1].speaker_embedding))
    wanted = np.mean([r.speaker_embedding for r in rows if r.speaker == "kim"], axis=0, dtype=np.float64)
    torch.testing.assert_close(mean[0][1], torch.from_numpy(wanted.astype(np.float32)))
    torch.testing.assert_close(mean[0][1], mean[0][3])
    assert none[0] is None


def test_embeddings_of_another_model_are_refused(prepared: Path) -> None:
    raw = make_config()
    raw["talker_config"]["hidden_size"] = 64
    data = build_data(prepared, batch_size=4)
    data.attach(parse_config(raw))
    data.setup("fit")
    with pytest.raises(ValueError, match=r"0\.wav has a speaker embedding of 32 numbers: expected 64"):
        data.train_dataloader()


def test_rows_are_read_as_they_were_written(prepared: Path) -> None:
    for own, row in zip(read_rows(prepared), make_rows(), strict=True):
        assert (own.text, own.speaker, own.audio) == (row.text, row.speaker, row.audio)
        np.testing.assert_array_equal(own.codes, row.codes)
        np.testing.assert_allclose(own.speaker_embedding, row.speaker_embedding, rtol=1e-6)


def test_a_checkpoint_knows_the_codes_of_its_rows(tmp_path: Path) -> None:
    found = []
    for codes in (None, 1, None):
        rows = make_rows()
        rows[-1].codes[0, 0] = rows[-1].codes[0, 0] if codes is None else (rows[-1].codes[0, 0] + codes) % 8
        write_shard(tmp_path / "mine.jsonl", rows)
        data = build_data(tmp_path, batch_size=1)
        data.attach(parse_config(make_config()))
        data.setup("fit")
        found.append(data.train_dataloader().state_dict()["fingerprint"])
    assert found[0] == found[2] != found[1]


def fit_in_bf16(folder: Path, out: Path) -> None:
    pl.seed_everything(0, verbose=False)
    trainer = build_trainer(max_steps=1, precision="bf16-true")
    task = build_task(sampling=GREEDY, num_samples=1, speech_eval=SpeechEval(codec="formants"))
    trainer.fit(task, build_data(folder, batch_size=90, repeat=5))
    trainer.save_checkpoint(out / "run.ckpt")
    if trainer.is_global_zero:
        torch.save((int(task.targets_seen), float(task.step_loss), dict(task.report.measured)), out / "found.pt")


@pytest.mark.full
def test_in_bf16_counts_stay_exact_and_speech_is_generated(prepared: Path, tmp_path: Path, truth: Result) -> None:
    run_ranks(fit_in_bf16, prepared, tmp_path, world_size=1)
    tokens, loss, measured = torch.load(tmp_path / "found.pt")
    assert tokens == 5 * sum(len(row.codes) + 1 for row in make_rows())
    assert tokens == 750  # which bfloat16 rounds to 752
    assert loss == pytest.approx(truth.losses[0], rel=0.02)
    assert set(measured) == {"speaker_similarity"}
    names = FileSystemReader(tmp_path / "run.ckpt").read_metadata().state_dict_metadata
    assert all(n.startswith("state_dict.model.") for n in names if n.startswith("state_dict."))
