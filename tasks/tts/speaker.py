"""A model that speaks, opened from a checkpoint, a folder or the Hub, outside of any Trainer."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lit_fsdp.checkpoint.remote import RemotePath, locate
from lit_fsdp.export.folder import write_small_files
from lit_fsdp.tasks.tts.checkpoint import GENERATION, SpeechCheckpoint, build_model, read_checkpoint
from lit_fsdp.tasks.tts.codec.frame_codec import FrameCodec
from lit_fsdp.tasks.tts.codec.loading import has_codec
from lit_fsdp.tasks.tts.families.family import Family, Voice, get_voice
from lit_fsdp.tasks.tts.families.model_types import is_speech_model, load_speech_model
from lit_fsdp.tasks.tts.families.speaker_encoder import compute_mels
from lit_fsdp.tasks.tts.generation import Sampling, SamplingValues, Speech
from lit_fsdp.tasks.tts.preparation.audio import Audio
from lit_fsdp.tasks.tts.pretrained import fetch_speech_model
from lit_fsdp.tasks.tts.tokenizer import load_tokenizer
from lit_fsdp.tasks.tts.utterance import Batch, Codes, Utterance, get_context
from lit_fsdp.weights.base_weights import get_pretrained_folder


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Speech that another one is to sound like: an embedding of the voice, text and codes to go on from, or both."""

    embedding: NDArray[np.float32] | None = None
    text: str | None = None
    codes: Codes | None = None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some frames of a text that is being spoken.

    Args:
        audio: [samples] on the CPU.
        codes: [frames, codebooks] on the CPU.
        has_ended: As in ``Speech``; ``None`` in all pieces but the last.
    """

    audio: Tensor
    codes: Tensor
    has_ended: bool | None


@dataclass(kw_only=True)
class Speaker:
    """A model that speaks.

    Args:
        family: What kind of model it is.
        config: Of the model.
        model: In evaluation mode, on its device.
        tokenizer: Of the text.
        sampling: How codes are chosen.
        voices: Embeddings or numbers by name, of the training data.
        codec_source: Folder or name of a model with the codec that belongs to it.
        is_streaming: Which layout it was trained with.
    """

    family: Family
    config: Any
    model: Any
    tokenizer: Any
    sampling: SamplingValues
    voices: dict[str, Voice]
    codec_source: str | None
    is_streaming: bool

    def encode(
        self,
        text: str,
        speaker: str | None,
        language: str | None,
        *,
        reference: Reference | None = None,
        instruct: str | None = None,
    ) -> Utterance:
        """Return a text as what is to be spoken.

        Args:
            text: What to say.
            speaker: A voice of the model or of its training data; any of them if not given.
            language: Of the text.
            reference: Speech to take the voice from instead.
            instruct: How to say it.

        Raises:
            ValueError: Nobody knows the speaker or the language, or the model takes no instructions.
        """
        config = self.config
        self.family.check_prompt(instruct=instruct)
        found: Any = reference.embedding if reference is not None else get_voice(speaker, self.voices, config)
        ids = self.family.encode_text(self.tokenizer, text, config, found)
        utterance = Utterance(
            text_ids=ids,
            language=config.get_language_id(language, speaker),
            speaker=found,
            instruct_ids=self.family.encode_instruct(self.tokenizer, instruct) if instruct else (),
        )
        if reference is None or reference.text is None:
            return utterance
        told = self.family.encode_text(self.tokenizer, reference.text, config, found)
        return replace(utterance, context_ids=told, context_codes=reference.codes)

    @property
    def takes_embeddings(self) -> bool:
        """Whether the model is told by an embedding who speaks."""
        return self.config.voice_size is not None

    def check_reference(self, ref_text: str | None) -> None:
        """Refuse a recording that the model has no use for.

        Args:
            ref_text: What is said in it, if that is known.

        Raises:
            ValueError: With what the model needs.
        """
        kind = self.family.model_type
        if ref_text is not None and not ref_text.strip():
            raise ValueError("ref_text: empty: expected what is said in ref_audio, or no ref_text at all")
        if self.family.reads_context and not self.takes_embeddings and not ref_text:
            raise ValueError(f"ref_text: missing: {kind} goes on from ref_audio: expected what is said in it")
        self.family.check_prompt(ref_text=ref_text)

    def embed(self, audio: Audio) -> NDArray[np.float32]:
        """Return the embedding of a voice.

        Raises:
            ValueError: The model has no speaker encoder.
        """
        if not self.takes_embeddings:
            raise ValueError(f"ref_audio: {self.family.model_type} has no speaker encoder: leave it out")
        if self.config.designs_voices:
            raise ValueError("ref_audio: the model makes voices of instructions: expected instruct, or a base model")
        encoder, config = self.model.speaker_encoder, self.config.speaker_encoder
        if encoder is None or config is None:
            raise ValueError("ref_audio: the model has built-in voices and no speaker encoder: expected a base model")
        device = next(self.model.parameters()).device
        with torch.inference_mode():
            embedding = encoder(compute_mels(torch.from_numpy(audio)[None].to(device), config))
        return np.asarray(embedding[0].float().cpu().numpy())

    def speak(self, utterances: Sequence[Utterance], *, is_streaming: bool) -> list[Speech]:
        """Return the speech of several texts, generated together."""
        return self.family.generate(self.model, self._collate(utterances, is_streaming=is_streaming), self.sampling)

    def stream(
        self, utterance: Utterance, codec: FrameCodec, *, is_streaming: bool, num_frames: int = 4
    ) -> Iterator[Piece]:
        """Yield the speech of a text piece by piece while it is written: the same codes as of ``speak``, with audio.

        Args:
            utterance: What to say.
            codec: Of the model; decodes nothing else until the last piece.
            is_streaming: As in ``speak``.
            num_frames: Of a piece; fewer are heard sooner, more take less time in all.

        Raises:
            ValueError: The model or the codec cannot do so.
        """
        batch = self._collate([utterance], is_streaming=is_streaming)
        before = torch.from_numpy(get_context(utterance))
        with codec.open_stream() as stream:
            if len(before) and self.family.decodes_context:  # as in ``decode``: heard by the codec, and by nobody else
                stream.decode(before.to(codec.device))
            waiting: list[Tensor] = []
            for frame in self.family.write(self.model, batch, self.sampling):
                # Closed for good: there is but one text.
                is_last = frame.codes is None
                waiting += [] if frame.codes is None else [frame.codes]
                if is_last or len(waiting) == num_frames:
                    codes = torch.cat(waiting) if waiting else torch.zeros(0, codec.num_codebooks, dtype=torch.int64)
                    audio = stream.decode(codes.to(codec.device)).float().cpu()
                    yield Piece(audio=audio, codes=codes.cpu(), has_ended=bool(frame.is_end.all()) if is_last else None)
                    waiting = []

    def _collate(self, utterances: Sequence[Utterance], *, is_streaming: bool) -> Batch:
        self.family.check_data(self.config, speaker_embedding="none", is_streaming=is_streaming)
        batch = self.family.collate_prompts(utterances, self.config, is_streaming=is_streaming)
        device = next(self.model.parameters()).device
        return {name: value.to(device) for name, value in batch.items()}

    def decode(self, codec: FrameCodec, codes: Tensor, utterance: Utterance) -> Tensor:
        """Return the audio [samples] of codes [frames, codebooks] that were generated.

        As officially, what an utterance goes on from is decoded before it and cut off: the codec looks back.
        """
        before = torch.from_numpy(get_context(utterance))
        if not len(before) or not len(codes) or not self.family.decodes_context:
            return codec.decode([codes])[0]
        return codec.decode([torch.cat([before, codes])])[0][len(before) * codec.samples_per_frame :]


def open_speaker(source: str, sampling: Sampling | None = None, *, base: str | None = None) -> Speaker:
    """Return the model of a checkpoint, a folder or the Hub, on a GPU if there is one.

    Args:
        source: Path or name.
        sampling: What differs from the defaults wins over what comes with the model.
        base: Of a checkpoint: where the model is that its run started from, if not where it was.

    Raises:
        ValueError: There is nothing that speaks.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sampling = sampling or Sampling()
    try:
        path = locate(source)
    except ValueError as error:
        raise ValueError(f"model: {error}") from None
    path = path.expanduser() if isinstance(path, Path) else path
    # A single file too, which is refused as a checkpoint and not as the name of a model.
    if path.exists() and (isinstance(path, RemotePath) or not is_speech_model(path)):
        checkpoint, model = _read_checkpoint(path, base)
        files = {name: text for name, text in checkpoint.files.items() if isinstance(text, str)}
        found = Speaker(
            family=checkpoint.family,
            config=checkpoint.config,
            model=model.to(device),
            tokenizer=_build_tokenizer(files),
            sampling=checkpoint.family.complete_sampling(sampling, files.get(GENERATION)),
            voices={name: voice.numpy() if voice.ndim else int(voice) for name, voice in checkpoint.voices.items()},
            codec_source=checkpoint.pretrained,
            is_streaming=checkpoint.is_streaming,
        )
    else:
        if base is not None:
            raise ValueError("base: not used, as model is no checkpoint; leave it out")
        fetch_speech_model(source, "model")
        folder = get_pretrained_folder(source)
        settings = folder / GENERATION
        family, config, model = load_speech_model(folder)
        found = Speaker(
            family=family,
            config=config,
            model=model.to(device),
            tokenizer=load_tokenizer(str(folder)),
            sampling=family.complete_sampling(sampling, settings.read_text() if settings.is_file() else None),
            voices={},
            codec_source=source if has_codec(folder) else None,
            is_streaming=False,
        )
    found.family.prepare_speaking(found.model)
    return found


def _read_checkpoint(path: Path | RemotePath, base: str | None) -> tuple[SpeechCheckpoint, nn.Module]:
    """Return a checkpoint and its model; errors name the option ``model``."""
    try:
        checkpoint = read_checkpoint(path, base)
        return checkpoint, build_model(checkpoint)
    except ValueError as error:
        raise ValueError(re.sub("^checkpoint: ", "model: ", str(error))) from error


def _build_tokenizer(files: dict[str, str]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        # AutoTokenizer does not know the model of that config.json.
        write_small_files(Path(folder), {name: text for name, text in files.items() if name != "config.json"})
        return load_tokenizer(folder)
