"""What a family of speech models answers for the task, its data, a speaker and an export: the one interface to it.

Note [Two losses]: all families write codes in two parts. A talker writes codebook 0 and the end; what writes the other
codebooks is called predictor, whether it is a model of its own or not. Each part has a loss, a mean over the whole
optimizer step by a count of its own, and the loss is their weighted sum.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lit_fsdp.planning.closed_form.model_reader import ModelReader
from lit_fsdp.planning.closed_form.reader import UnreadableModuleError
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.tasks.tts.families.speech_tape import describe_batch
from lit_fsdp.tasks.tts.generation import Frame, Sampling, SamplingValues, Speech
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow
from lit_fsdp.tasks.tts.utterance import Batch, Utterance, get_codes
from lit_fsdp.weights.load import load_weights

Voice = NDArray[np.float32] | int  # an embedding, or the number under which a model knows a speaker


class FamilyConfig(Protocol):
    """What is known of a model of any family from its ``config.json``."""

    @property
    def raw(self) -> dict[str, Any]:
        """``config.json`` as it is."""

    @property
    def num_codebooks(self) -> int:
        """Codes in a frame."""

    @property
    def codebook_size(self) -> int:
        """Codes of speech are below it."""

    @property
    def frames_per_s(self) -> float:
        """Of the codec."""

    @property
    def voice_size(self) -> int | None:
        """Numbers in the embedding of a speaker; ``None`` where the model takes none."""

    @property
    def designs_voices(self) -> bool:
        """Whether the voice is made of an instruction, so that nobody is to be named."""

    @property
    def speakers(self) -> Mapping[str, int]:
        """Numbers of speakers that the model knows, by lower-cased name."""

    def get_language_id(self, name: str | None, speaker: str | None = None) -> int | None:
        """Return the id of a language; ``None`` for ``auto``.

        Raises:
            ValueError: The model does not know it.
        """


def get_voice(name: str | None, voices: Mapping[str, Voice], config: FamilyConfig) -> Voice | None:
    """Return a voice of the training data, or one that is built into the model.

    Args:
        name: Whose; without one the first of the training data, else of the model, ``None`` where there is none.
        voices: Of the training data.
        config: Of the model.

    Raises:
        ValueError: Nobody knows it.
    """
    if name is None:
        return next(iter([*voices.values(), *config.speakers.values()]), None)
    known = {**config.speakers, **voices}
    if name.lower() not in known:
        raise ValueError(f"speaker: got {name!r}: expected one of: {', '.join(sorted(known)) or 'none'}")
    return known[name.lower()]


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """The configuration of a model of Transformers that speaks English and takes no embeddings of speakers.

    Args:
        raw: ``config.json`` as it is.
        model: What Transformers makes of it.
    """

    kind: ClassVar[type[PreTrainedConfig]]
    raw: dict[str, Any]
    model: Any  # of ``kind``, whose fields are typed as if its parts could be missing

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> Self:
        """Return what the contents of ``config.json`` say; see ``Family.parse_config``."""
        try:
            return cls(raw=dict(raw), model=cls.kind.from_dict(deepcopy(dict(raw))))
        except (TypeError, ValueError, StrictDataclassError) as error:
            raise ValueError(f"{where}: {' '.join(str(error).split())}") from error

    def copy_model_config(self, attention: str) -> Any:
        """Return ``model`` for one model, with an implementation of attention for all its parts."""
        config = deepcopy(self.model)
        config._attn_implementation = attention  # private, seen in transformers 5.23
        return config

    @property
    def voice_size(self) -> None:
        """It takes no embeddings of speakers."""

    @property
    def designs_voices(self) -> bool:
        """It makes no voices of instructions."""
        return False

    @property
    def speakers(self) -> Mapping[str, int]:
        """It knows none by name."""
        return {}

    def get_language_id(self, name: str | None, speaker: str | None = None) -> None:  # noqa: ARG002
        """Refuse all languages but English, as the model is not told a language.

        Raises:
            ValueError: Another one is asked for.
        """
        if (name or "auto").lower() not in ("auto", "english", "en"):
            kind = self.model.model_type
            raise ValueError(f"language: got {name!r}: {kind} is not told a language: expected auto or english")


class Family(ABC):
    """One architecture of speech models. It has no state: all that differs between models is in their configuration."""

    model_type: ClassVar[str]  # in config.json
    parts: ClassVar[Mapping[str, tuple[str, ...]]]  # that can be frozen, with the beginnings of their parameters' names
    linears: ClassVar[str]  # what lora.target_modules 'all-linear' means: a pattern of names
    blocks: ClassVar[tuple[str, ...]]  # patterns of the classes that are FSDP units
    has_streaming: ClassVar[bool] = False
    reads_context: ClassVar[bool] = False  # speech that it goes on from, with what is said there
    decodes_context: ClassVar[bool] = False  # codes of such speech before those that follow it, for the codec's memory
    reads_instructions: ClassVar[bool] = False  # how a text shall be said
    has_kinds: ClassVar[bool] = False  # of exports: with voices built in, or a base model
    predicts_ends: ClassVar[bool] = True  # whether the predictor's loss has ends too
    unused_sampling: ClassVar[tuple[str, ...]] = ("guidance_scale",)
    default_text_dropout: ClassVar[float | None] = None  # None where texts cannot be left out
    unread_generation: ClassVar[tuple[str, ...]] = ()  # names in generation_config.json that are not followed

    @abstractmethod
    def parse_config(self, raw: Mapping[str, Any], *, where: str = "config") -> FamilyConfig:
        """Return what the contents of ``config.json`` say.

        Args:
            raw: Left as it is.
            where: Names it in errors.

        Raises:
            ValueError: It cannot be.
        """

    @abstractmethod
    def build_model(self, config: Any, attention: str = "sdpa") -> nn.Module:
        """Return the model, whose ``forward`` maps a batch of :meth:`collate` to ``SpeechOutput``."""

    def load_weights(self, model: nn.Module, folder: Path, *, seed: int = 0) -> None:
        """Read the shards of a model from a folder.

        Raises:
            ValueError: The files do not fit, tensor by tensor.
        """
        load_weights(model, folder, seed=seed)

    @abstractmethod
    def get_loss_weights(self, config: Any) -> tuple[float, float]:
        """Return the weights of the talker's and the predictor's loss; see Note [Two losses]."""

    @abstractmethod
    def encode_text(self, tokenizer: Any, text: str, config: Any, speaker: Voice | None) -> list[int]:
        """Return a text as ids.

        Raises:
            ValueError: The text is empty, or the tokenizer is not one of these models.
        """

    def encode_instruct(self, tokenizer: Any, instruct: str) -> list[int]:
        """Return as ids how a text shall be said."""
        raise NotImplementedError(f"{self.model_type} takes no instructions")

    def check_prompt(self, *, ref_text: str | None = None, instruct: str | None = None) -> None:
        """Refuse what the model cannot be told beside a text.

        Args:
            ref_text: What is said in speech that it goes on from.
            instruct: How the text shall be said.

        Raises:
            ValueError: With the setting.
        """
        if ref_text and not self.reads_context:
            raise ValueError(f"ref_text: {self.model_type} does not read what is said before; leave it out")
        if instruct and not self.reads_instructions:
            raise ValueError(f"instruct: {self.model_type} takes no instructions; leave it out")

    @abstractmethod
    def assign_voices(self, rows: Sequence[PreparedRow], known: Mapping[str, Voice]) -> dict[str, Voice]:
        """Return what tells the model who speaks, by the name of each speaker of the training data.

        Args:
            rows: Training data.
            known: Voices that the model was trained on before.

        Raises:
            ValueError: Two speakers could not be told apart.
        """

    @abstractmethod
    def collate(self, utterances: Sequence[Utterance], config: Any, *, is_streaming: bool = False) -> Batch:
        """Return a batch for training.

        Any model can name its tensors as it likes, but for ``label_weights`` [tokens] and ``frame_weights`` [frames]:
        0 or 1, for what counts in the talker's and in the predictor's loss.
        """

    @abstractmethod
    def collate_prompts(self, utterances: Sequence[Utterance], config: Any, *, is_streaming: bool = False) -> Batch:
        """Return a batch for :meth:`generate`."""

    def make_example_batch(
        self, config: Any, *, batch_size: int, num_text_ids: int, num_frames: int, is_streaming: bool = False
    ) -> Batch:
        """Return a batch for training of the given size, without data."""
        codes = np.zeros((num_frames, config.num_codebooks), dtype=np.int64)
        utterance = Utterance(text_ids=[0] * num_text_ids, codes=codes, language=0, speaker=0)
        return self.collate([utterance] * batch_size, config, is_streaming=is_streaming)

    def measure_batch(self, batch: Mapping[str, Any]) -> MicroBatch:
        """Return the shape of a batch, for the closed form of a plan."""
        rows, length = batch["text_ids"].shape
        return describe_batch(batch, rows=rows, length=length)

    def read_step(self, model: Any, step: ModelReader) -> int:  # noqa: ARG002
        """Put forward and losses on the tape of a plan, and return the loss.

        Raises:
            UnreadableModuleError: There are no rules for it, so that plans trace it.
        """
        raise UnreadableModuleError(self.model_type, "a family whose step was not written down")

    def drop_texts(self, batch: Batch, rows: Sequence[int]) -> Batch:
        """Return a batch of :meth:`collate` of which some rows have no text, as guidance has it."""
        raise NotImplementedError(f"{self.model_type} is not guided")

    @abstractmethod
    def generate(self, model: Any, batch: Batch, sampling: SamplingValues) -> list[Speech]:
        """Return the speech for prompts.

        Under a sharding strategy all ranks must call it, inside a method that gathers like ``forward``. Every rank goes
        on until the last prompt of the last rank has ended, as each frame gathers the model.
        """

    def write(self, model: Any, batch: Batch, sampling: SamplingValues) -> Iterator[Frame]:  # noqa: ARG002
        """Yield what :meth:`generate` returns frame by frame, as it is written.

        Raises:
            ValueError: The model does not write frame by frame, or its codec does not decode so.
        """
        raise ValueError(f"to_stdout: {self.model_type} has no audio before its last code; leave it out")

    def prepare_speaking(self, model: Any) -> None:  # noqa: B027 - most have nothing to prepare
        """Arrange the weights of a model that only speaks from now on, so that it speaks faster.

        To be called on its device; afterwards its weights must not move.
        """

    @property
    def default_sampling(self) -> SamplingValues:
        """How speech is generated where neither the user nor the model says anything."""
        return SamplingValues()

    def check_sampling(self, sampling: Sampling) -> None:
        """Refuse settings that the model would ignore.

        Args:
            sampling: What the user wants.

        Raises:
            ValueError: With the setting.
        """
        for name in self.unused_sampling:
            if getattr(sampling, name) not in (None, getattr(self.default_sampling, name)):
                raise ValueError(f"sampling.{name}: not used by {self.model_type}; leave it out")

    def complete_sampling(self, sampling: Sampling, official: str | bytes | None) -> SamplingValues:
        """Return how speech is generated: as the user wants, else as the model says, else as its family does.

        Args:
            sampling: What the user wants.
            official: Contents of the model's ``generation_config.json``, if it has one.

        Raises:
            ValueError: A setting would be ignored or fail.
        """
        self.check_sampling(sampling)
        try:
            own = dict(json.loads(official or "{}"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"generation_config.json: cannot read it: {error}") from error
        known = {name: value for name, value in own.items() if name not in self.unread_generation}
        return sampling.complete(known, self.default_sampling)

    def read_extra(self, folder: Path) -> dict[str, Tensor]:  # noqa: ARG002
        """Return tensors of a folder that the model leaves out and an export needs, such as those of a codec."""
        return {}

    @abstractmethod
    def list_parts(self, model: nn.Module) -> dict[str, nn.Module | None]:
        """Return the modules that parameters are counted by, by name."""

    def check_data(
        self, config: FamilyConfig, *, speaker_embedding: str, is_streaming: bool, text_dropout: float = 0.0
    ) -> None:
        """Refuse ways to lay out data that the model has not.

        Raises:
            ValueError: With the setting.
        """
        if is_streaming and not self.has_streaming:
            raise ValueError(f"streaming: got true: {self.model_type} does not read text beside frames; leave it out")
        if text_dropout and self.default_text_dropout is None:
            raise ValueError(f"text_dropout: got {text_dropout:g}: {self.model_type} is not guided; leave it out")
        if speaker_embedding != "none" and config.voice_size is None:
            raise ValueError(
                f"speaker_embedding: got {speaker_embedding!r}: {self.model_type} takes no embeddings; leave it out"
            )


def collate_targets(utterances: Sequence[Utterance], state_index: Sequence[Tensor], eos: int) -> Batch:
    """Return the targets of a batch of which the end is a frame of ``eos`` in all codebooks.

    Args:
        utterances: With codes.
        state_index: Of each utterance: which states predict its frames and its end.
        eos: The code.
    """
    targets: dict[str, list[Tensor]] = {"targets": [], "is_end": [], "label_weights": []}
    for utterance in utterances:
        codes = torch.from_numpy(get_codes(utterance))
        targets["targets"].append(torch.cat([codes, torch.full((1, codes.shape[1]), eos)]))
        targets["is_end"].append(torch.arange(len(codes) + 1) == len(codes))
        targets["label_weights"].append(torch.full((len(codes) + 1,), int(utterance.is_counted)))
    batch = {name: torch.cat(parts) for name, parts in targets.items()}
    return {**batch, "state_index": torch.cat(list(state_index)), "frame_weights": batch["label_weights"]}


@dataclass(frozen=True, kw_only=True)
class SpeechOutput:
    """What a batch gives: sums of losses, counts, and what metrics need.

    Args:
        talker_loss: Sum over the talker's targets.
        predictor_loss: Sum over the predictor's frames of the mean over codebooks.
        num_tokens: Targets of the talker: frames and ends.
        num_frames: Frames of the predictor.
        logits: Of the talker at its targets: [tokens, vocabulary].
        predictor_logits: [frames, codebooks - 1, vocabulary].
        labels: Of the talker: [tokens].
        is_end: Which of them are ends: [tokens].
        predictor_labels: [frames, codebooks - 1].
        is_frame: Which frames of the predictor are speech, not ends; ``None`` if all are.
    """

    talker_loss: Tensor
    predictor_loss: Tensor
    num_tokens: Tensor
    num_frames: Tensor
    logits: Tensor
    predictor_logits: Tensor
    labels: Tensor
    is_end: Tensor
    predictor_labels: Tensor
    is_frame: Tensor | None = None

    @classmethod
    def add_up(
        cls, batch: Mapping[str, Tensor], losses: Tensor, others: Tensor, logits: Tensor, predictor_logits: Tensor
    ) -> Self:
        """Return what a batch gives whose codebooks all have an end, from what codebook 0 and the others have."""
        weights, is_end, targets = batch["label_weights"], batch["is_end"], batch["targets"]
        return cls(
            talker_loss=(losses * weights).sum(),
            predictor_loss=(others.mean(1) * weights).sum(),
            num_tokens=weights.sum(),
            num_frames=weights.sum(),
            logits=logits,
            predictor_logits=predictor_logits,
            labels=targets[:, 0],
            is_end=is_end,
            predictor_labels=targets[:, 1:],
            is_frame=~is_end,
        )
