"""Prepared speech as batches for a speech model, and texts to speak."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader
from typing_extensions import override

from lit_fsdp.cache import get_cache_dir
from lit_fsdp.tasks.data import Split, TaskData, check_least
from lit_fsdp.tasks.length_groups import Ints, bundle_by_length
from lit_fsdp.tasks.loading import PADDING, ResumableLoader, build_eval_loader, get_data, hash_rows
from lit_fsdp.tasks.shares import Share, count_largest
from lit_fsdp.tasks.tts.batch_places import StepCounts, TextDropout
from lit_fsdp.tasks.tts.codec.formants import SPOKEN, make_corpus
from lit_fsdp.tasks.tts.evaluation.prompts import PromptRow, read_prompts
from lit_fsdp.tasks.tts.families.family import Family, FamilyConfig, Voice, get_voice
from lit_fsdp.tasks.tts.families.model_types import get_family
from lit_fsdp.tasks.tts.preparation.mapped_rows import map_rows
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow
from lit_fsdp.tasks.tts.rows import check_row, name_speakers, refuse_unnamed
from lit_fsdp.tasks.tts.tokenizer import load_tokenizer
from lit_fsdp.tasks.tts.utterance import Batch, Utterance

_CHARACTERS_PER_S = 20  # more than anybody speaks, for an example batch


class SpeechData(TaskData):
    """Speech that ``python -m lit_fsdp prepare tts`` has written, and texts to speak.

    Args:
        train: Prepared folder to train on, or ``formants``: a few sentences of two synthetic voices, without a
            download.
        validation: Prepared folder to validate on.
        validation_fraction: Without ``validation``, hold out this share of the training rows, always the same.
        predict: Texts to generate speech for: a ``.txt`` file of lines, or JSON lines with ``text`` and maybe
            ``speaker``, ``language`` and ``instruct``.
        tokenizer: Of the text: model name on the Hub, folder, or ``bytes`` for one without a download.
        default_speaker: Who speaks in rows that name no speaker. Without it such rows are refused where a voice is made
            of all rows of a speaker, as they may be of many people.
        speaker_embedding: ``row`` gives each row the embedding of its own reference audio, which teaches to clone
            voices. ``mean`` gives it the mean over all training rows of its speaker, as for voices that will be built
            in. ``none`` trains without. The default is ``mean`` for models that take embeddings of speakers, else
            ``none``, also for those that make voices of instructions.
        streaming: Lay text beside frames, one id a frame, as the official inference does for text that arrives bit
            by bit. Otherwise all text comes before the speech.
        text_dropout: Leave the text out of this share of the training rows, drawn anew in each epoch. Guidance
            compares with speech without text, which the model would otherwise forget. The default is 0.15 for Dia,
            and 0 for models that are not guided.
        max_seconds: Leave longer rows out: the longest ones set the memory of a step. Speech that a row goes on from
            counts.
        batch_size: Rows in a micro-batch of one rank.
        max_frames_per_batch: Instead, as many rows of like lengths as have up to N frames when all are padded to the
            longest of them. Which rows come together stays; their order is new in each epoch.
        global_batch_size: Rows in an optimizer step, of all ranks and accumulated micro-batches together. Each start
            sets ``trainer.accumulate_grad_batches`` by it, so a run keeps it on another number of ranks, and an epoch
            is a whole number of steps. ``null`` leaves both to you.
        share: For ranks that are not equally fast: the share of each in the rows of a step, such as ``[3, 1]``.
            ``auto`` measures in the first steps and then gives faster ranks more rows, which takes more memory there.
            Steps, losses and evaluation stay the same; ``batch_size`` becomes the mean over the ranks.
        eval_batch_size: Rows of a batch of validation and prediction; ``batch_size`` if not given.
        num_workers: Processes per rank that read ahead; 0 reads in the main process.
        repeat: Count this many passes over the rows as one epoch. With few rows, what happens once an epoch, such as
            a checkpoint, would else happen every few steps.
        shuffle: Train in a new order each epoch, the same for any number of ranks.
        seed: Of that order.
        cache_dir: Where codes are kept for all ranks to read from disk; else ``LIT_FSDP_CACHE`` or
            ``~/.cache/lit_fsdp``.
    """

    source_kinds = f"a folder that `lit_fsdp prepare tts` wrote, or {SPOKEN}"
    has_changing_lengths = True

    def __init__(
        self,
        *,
        train: str | None = None,
        validation: str | None = None,
        validation_fraction: float = 0.0,
        predict: str | None = None,
        tokenizer: str,
        default_speaker: str | None = None,
        speaker_embedding: Literal["row", "mean", "none"] | None = None,
        streaming: bool = False,
        text_dropout: float | None = None,
        max_seconds: float = 30.0,
        batch_size: int = 1,
        max_frames_per_batch: int | None = None,
        global_batch_size: int | None = None,
        share: Share = None,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        repeat: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            sources={"train": (train, None), "validation": (validation, None), "predict": (predict, None)},
            validation_fraction=validation_fraction,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            shuffle=shuffle,
            seed=seed,
            global_batch_size=global_batch_size,
            share=share,
        )
        check_least(1, repeat=repeat)
        if text_dropout is not None and not 0 <= text_dropout < 1:
            raise ValueError(f"text_dropout: got {text_dropout}: expected 0 to below 1, such as 0.15")
        if default_speaker is not None and not default_speaker.strip():
            raise ValueError(f"default_speaker: got {default_speaker!r}: expected a name")
        if not max_seconds > 0:
            raise ValueError(f"max_seconds: got {max_seconds}: expected above 0")
        if max_frames_per_batch is not None:
            _check_frame_bound(max_frames_per_batch, batch_size=batch_size, others=(global_batch_size, share))
        self.max_frames_per_batch = max_frames_per_batch
        self.max_seconds, self.repeat = max_seconds, repeat
        self.tokenizer_name, self.speaker_embedding, self.streaming = tokenizer, speaker_embedding, streaming
        self.text_dropout, self.default_speaker = text_dropout, default_speaker
        # As they were set, and as they are for the model.
        self._given = self._resolved = speaker_embedding, text_dropout
        self.cache_dir = get_cache_dir(cache_dir)
        self.speech_config: FamilyConfig | None = None
        self.voices: dict[str, Voice] = {}
        self._rows: dict[str, list[PreparedRow]] = {}
        self._voiced_rows: list[PreparedRow] = []  # whose voices are known
        self._known: dict[str, Voice] = {}  # of a checkpoint

    def attach(self, config: FamilyConfig) -> None:
        """Tell the data which model it is for, where no Trainer does: ids in batches are the model's.

        Raises:
            ValueError: The model cannot be trained on data that is laid out so.
        """
        if (found := (self.speaker_embedding, self.text_dropout)) != self._resolved:  # set since
            self._given = found
        choice, dropout = self._given
        if choice is None:
            choice = "none" if config.voice_size is None or config.designs_voices else "mean"
        family = get_family(config.raw["model_type"])
        dropout = (family.default_text_dropout or 0.0) if dropout is None else dropout
        family.check_data(config, speaker_embedding=choice, is_streaming=self.streaming, text_dropout=dropout)
        if self.speech_config is not None and config.raw != self.speech_config.raw:  # rows were read for that one
            self._rows, self._voiced_rows, self._known, self.voices = {}, [], {}, {}
        self.speaker_embedding, self.text_dropout, self.speech_config = choice, dropout, config
        self._resolved = choice, dropout

    def restore_voices(self, voices: Mapping[str, Any]) -> None:
        """Go on with the voices of a checkpoint: numbers stay those that were trained on.

        Args:
            voices: As ``describe_run`` has them.

        Raises:
            ValueError: A speaker of the training data could not be told from another one.
        """
        self._known = {
            name: np.asarray(voice, dtype=np.float32) if isinstance(voice, list) else int(voice)
            for name, voice in voices.items()
        }
        self.voices = self._assign_voices(self._voiced_rows)

    @property
    def family(self) -> Family:
        """That of the model."""
        return get_family(self._get_config().raw["model_type"])

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the text."""
        return load_tokenizer(self.tokenizer_name)

    def check_rows(self, stage: str, config: FamilyConfig) -> None:
        """Read and check the rows that a stage needs, before the processes of a run are started.

        Args:
            stage: Of a Trainer.
            config: Of the model.

        Raises:
            ValueError: With the row and what is wrong with it.
        """
        self.attach(config)
        if stage == "predict" and (source := self.sources["predict"][0]) is not None:
            for row in read_prompts(Path(source)):
                try:
                    config.get_language_id(row.language, row.speaker)
                    self.family.check_prompt(instruct=row.instruct)
                except ValueError as error:
                    raise ValueError(f"predict: {source}: {error}, for {row.text[:40]!r}") from error
        self._read_all(stage)

    def setup(self, stage: str | None = None) -> None:
        """Read the rows that a stage needs."""
        _ = self.tokenizer  # now, as one that is not there is no fault of a row
        if (config := self._read_config()) is not None:
            self.attach(config)
        self._read_all(stage)

    def _read_all(self, stage: str | None) -> None:
        if stage == "fit" and self.sources["train"][0] is None:
            raise self.describe_missing("train")
        if self.sources["train"][0] is not None and "train" not in self._rows:
            rows = self._read("train")
            kept = [rows[i] for i in self.choose_rows("train", len(rows))]
            # Numbers of speakers also for those who were held out with all they say.
            self._voiced_rows = rows if self._get_config().voice_size is None else kept
            self.voices = self._assign_voices(self._voiced_rows)
            self._rows["train"] = kept
            if self.holds_out:
                self._rows["validation"] = [rows[i] for i in self.choose_rows("validation", len(rows))]
        if stage in ("fit", None) and self._voiced_rows:  # also where an evaluation has read them
            self._refuse_unnamed()
        if self.sources["validation"][0] is not None and "validation" not in self._rows:
            self._rows["validation"] = self._read("validation")

    def _read(self, split: Split) -> list[PreparedRow]:
        source, _ = self.sources[split]
        assert source is not None
        rows = make_corpus(self._get_config()) if source == SPOKEN else map_rows(source, self.cache_dir)
        rows = name_speakers(rows, self.default_speaker, is_needed=split == "train", source=source)
        kept = [row for row in rows if row.num_frames <= self.max_seconds * self._get_config().frames_per_s]
        for row in kept:
            check_row(row, self.family, self._get_config())
        if not kept:
            raise ValueError(f"max_seconds: got {self.max_seconds}: all {len(rows)} rows of {split} are longer")
        if len(kept) < len(rows):
            rank_zero_warn(
                f"{split}: {len(rows) - len(kept)} of {len(rows)} rows are longer than max_seconds "
                f"{self.max_seconds:g} and left out"
            )
        return kept

    # Batches

    def train_dataloader(self) -> ResumableLoader:
        """Return this rank's training batches; the loader's place is part of every checkpoint."""
        rows = self._rows["train"]
        bound = self.max_frames_per_batch
        lengths = np.array([row.num_frames for row in rows])  # with what rows go on from, which is not learned
        bundles = [[row] for row in range(len(rows))] if bound is None else _bundle(lengths, bound, self.seed)
        num_ranks = get_data(self.trainer).count
        if bound is not None and len(bundles) * self.repeat < num_ranks:
            raise ValueError(
                f"max_frames_per_batch: got {bound}: all {len(rows)} rows come together in {len(bundles)} batches, for "
                f"{num_ranks} ranks: expected fewer frames, or more data"
            )
        num_frames = np.array([sum(len(rows[i].codes) for i in bundle) for bundle in bundles] * self.repeat)
        num_rows = np.array([len(bundle) for bundle in bundles] * self.repeat)
        trainer: Any = self.trainer
        encoded = self._encode(rows)
        loader = self.load_train(
            [[encoded[row] for row in bundle] for bundle in bundles] * self.repeat,
            partial(_collate_bundles, self._fill_in(self.family.collate)),
            what=f"train ({len(rows)} clips)",
            fingerprint=hash_rows([*chain(*map(_list_contents, rows)), *([] if bound is None else [bound])]),
        )
        counts = StepCounts(loader, num_frames, num_rows, trainer, predicts_ends=self.family.predicts_ends)
        dropout = TextDropout(loader, self.family, self.text_dropout, num_rows) if self.text_dropout else None
        loader.annotate = counts if dropout is None else lambda batch, place: counts(dropout(batch, place), place)
        return loader

    @override
    def build_eval_loader(self, split: Split) -> DataLoader[Any]:
        if split not in self._rows:
            raise self.describe_missing(split)
        return self.load_eval(
            self._encode(self._rows[split]), partial(_collate_eval, self._fill_in(self.family.collate))
        )

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return this rank's prompts, with ``index`` to put what the model makes of them in order."""
        source, _ = self.sources["predict"]
        if source is None:
            raise ValueError("predict: not set; name a .txt file with a text in each line, or JSON lines")
        rows = read_prompts(Path(source))
        if not rows:
            raise ValueError(f"predict: {source}: empty: expected a text in each line")
        utterances = [self.encode_prompt(row) for row in rows]
        return build_eval_loader(
            utterances,
            batch_size=self.eval_batch_size,
            collate=partial(_collate_prompts, self._fill_in(self.family.collate_prompts)),
            num_workers=0,
            trainer=self.trainer,
        )

    def make_example_batch(self) -> Batch:
        """Return a micro-batch of the largest size that training can have, without reading data."""
        config = self._get_config()
        batch = self.family.make_example_batch(
            config,
            batch_size=count_largest(self.share, self._count_rows(int(self.max_seconds * config.frames_per_s))),
            num_text_ids=int(self.max_seconds * _CHARACTERS_PER_S),
            num_frames=int(self.max_seconds * config.frames_per_s),
            is_streaming=self.streaming,
        )
        return {**batch, "step_counts": torch.ones(2, dtype=torch.int64)}

    def _count_rows(self, num_frames: int) -> int:
        """Return the rows of a micro-batch where each is this long."""
        return self.batch_size if self.max_frames_per_batch is None else max(1, self.max_frames_per_batch // num_frames)

    def _fill_in(self, collate: Callable[..., Batch]) -> Callable[[list[Utterance]], Batch]:
        return partial(collate, config=self._get_config(), is_streaming=self.streaming)

    # Utterances

    def encode_prompt(self, row: PromptRow | PreparedRow) -> Utterance:
        """Return a text as what is to be spoken; a voice of the training data, or one that is built in.

        Raises:
            ValueError: Nobody knows the speaker.
        """
        config = self._get_config()
        if isinstance(row, PreparedRow):
            speaker = self._choose_voice(row)
        elif row.speaker or config.voice_size is None or self.speaker_embedding != "none":
            speaker = get_voice(row.speaker or None, self.voices, config)
        else:  # nobody speaks in what it is trained on
            speaker = None
        return self._build(row, speaker)

    def pick_validation(self, num_rows: int) -> list[PreparedRow]:
        """Return the first rows of validation, or of training where nothing is held out; the same on all ranks."""
        return (self._rows.get("validation") or self._rows.get("train") or [])[:num_rows]

    def _refuse_unnamed(self) -> None:
        takes_embeddings = self._get_config().voice_size is not None
        if takes_embeddings and self.speaker_embedding == "mean" and self.default_speaker is None:
            refuse_unnamed(self._voiced_rows)

    def _assign_voices(self, rows: Sequence[PreparedRow]) -> dict[str, Voice]:
        if self._get_config().voice_size is not None and self.speaker_embedding == "none":
            return {}
        return self.family.assign_voices(rows, self._known)

    def _choose_voice(self, row: PreparedRow) -> Voice | None:
        size = self._get_config().voice_size
        if size is None:
            return self._get_speaker_number(row)
        if self.speaker_embedding == "none":
            return None
        own = row.speaker_embedding if len(row.speaker_embedding) else None
        found: Any = own if self.speaker_embedding == "row" else self.voices.get(row.speaker, own)
        if found is None:
            raise ValueError(
                f"speaker_embedding: got {self.speaker_embedding!r}: {row.place} has no embedding: expected "
                "data prepared with a base model, or speaker_embedding: none"
            )
        if len(found) != size:
            raise ValueError(
                f"train: {row.place} has a speaker embedding of {len(found)} numbers: expected {size}: "
                "prepare the data with the model that is trained"
            )
        return found

    def _get_speaker_number(self, row: PreparedRow) -> Voice | None:
        """Return the number of a speaker, where the model has numbers for them."""
        known = {**self._get_config().speakers, **self.voices}
        if known and row.speaker not in known:
            names = ", ".join(sorted(self.voices)) or "none"
            raise ValueError(f"{row.place}: got speaker {row.speaker!r}: expected one of the training data: {names}")
        return known.get(row.speaker)

    def _encode(self, rows: Sequence[PreparedRow]) -> list[Utterance]:
        return [self._encode_row(row) for row in rows]

    def _encode_row(self, row: PreparedRow) -> Utterance:
        speaker = self._choose_voice(row)
        try:
            return replace(self._build(row, speaker), codes=row.codes)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from error

    def _build(self, row: PromptRow | PreparedRow, speaker: Any) -> Utterance:
        """Return a text, with what it goes on from, as what is to be spoken."""
        config = self._get_config()
        encode = partial(self.family.encode_text, self.tokenizer, config=config, speaker=speaker)
        context = row.ref_codes if isinstance(row, PreparedRow) else None
        return Utterance(
            text_ids=encode(row.text),
            language=config.get_language_id(row.language, row.speaker),
            speaker=speaker,
            context_ids=encode(row.ref_text) if isinstance(row, PreparedRow) and context is not None else (),
            context_codes=context,
            instruct_ids=self.family.encode_instruct(self.tokenizer, row.instruct) if row.instruct else (),
        )

    def _get_config(self) -> FamilyConfig:
        if self.speech_config is None:
            config = self._read_config()
            if config is None:
                raise RuntimeError("the data does not know its model: call attach(config), or train TextToSpeech")
            self.attach(config)
        assert self.speech_config is not None
        return self.speech_config

    def _read_config(self) -> FamilyConfig | None:
        module: Any = getattr(self.trainer, "lightning_module", None)
        return module.read_config() if hasattr(module, "read_config") else None


def _check_frame_bound(bound: int, *, batch_size: int, others: tuple[int | None, Share]) -> None:
    if bound < 1:
        raise ValueError(f"max_frames_per_batch: got {bound}: expected 1 or more, such as 1500 for two minutes")
    if batch_size != 1 or others != (None, None):
        raise ValueError(
            "max_frames_per_batch: it decides how many rows a batch has: leave out batch_size, global_batch_size and "
            "share, which count rows"
        )


def _bundle(lengths: Ints, bound: int, seed: int) -> list[Ints]:
    """Return which rows come together."""
    if (longest := int(lengths.max(initial=0))) > bound:
        raise ValueError(
            f"max_frames_per_batch: got {bound}: the longest row has {longest} frames: expected {longest} or more, or "
            "max_seconds to leave such rows out"
        )
    return bundle_by_length(lengths, bound, seed)


def _list_contents(row: PreparedRow) -> list[str | bytes]:
    """Return what tells a row from others; of what most rows do not have only what there is, as it always was."""
    parts: list[str | bytes] = [row.speaker, row.text, row.codes.astype(np.int64).tobytes()]
    if row.instruct:
        parts.append(row.instruct)
    if row.ref_codes is not None:
        parts += [row.ref_text, row.ref_codes.astype(np.int64).tobytes()]
    return parts


def _collate_bundles(collate: Callable[[list[Utterance]], Batch], bundles: list[list[Utterance]]) -> Batch:
    return collate(list(chain(*bundles)))


def _collate_eval(collate: Callable[[list[Utterance]], Batch], rows: list[tuple[int, Utterance]]) -> Batch:
    return collate([replace(u, is_counted=index != PADDING) for index, u in rows])


def _collate_prompts(collate: Callable[[list[Utterance]], Batch], rows: list[tuple[int, Utterance]]) -> Batch:
    return {**collate([u for _, u in rows]), "index": torch.tensor([index for index, _ in rows])}
