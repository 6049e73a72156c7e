"""``speak``: text to WAV files from a checkpoint or a folder. ``export-voice``: a checkpoint to such a folder."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_fsdp.export.out_folder import lock_out
from lit_fsdp.files import refuse_unwritable, remove_parts, write_whole
from lit_fsdp.parsing.parser import run_function
from lit_fsdp.tasks.row_files import read_jsonl
from lit_fsdp.tasks.tts.codec.formants import SPOKEN
from lit_fsdp.tasks.tts.codec.frame_codec import FrameCodec
from lit_fsdp.tasks.tts.codec.loading import check_codec, fetch_codec, open_codec
from lit_fsdp.tasks.tts.evaluation.generated import Clip, make_open_header, to_samples
from lit_fsdp.tasks.tts.evaluation.prompts import PromptRow, read_prompts
from lit_fsdp.tasks.tts.generation import Sampling, Speech
from lit_fsdp.tasks.tts.preparation.audio import AudioError, Limits, check_audio, read_audio
from lit_fsdp.tasks.tts.speaker import Piece, Reference, Speaker, open_speaker
from lit_fsdp.tasks.tts.utterance import Utterance
from lit_fsdp.tasks.tts.voice_export import export_voice

_LOCK = ".speak.lock"
_LIST = "spoken.jsonl"
_AUDIO = re.compile(r"[0-9]{5,}\.wav")  # what is listed there
_REFERENCE = Limits(min_seconds=0.1, max_seconds=float("inf"), max_clipped_pct=100)

log = logging.getLogger(__name__)


def run_speak(args: Sequence[str]) -> int:
    """Speak texts and print what was written.

    Args:
        args: The command line, the command first.
    """
    spoken_files = run_function(
        speak_texts,
        args[1:],
        command="speak",
        description="Speak texts with a checkpoint of TextToSpeech, or with the folder of a model.",
    )
    for spoken in spoken_files:
        cut = f", cut off at sampling.max_frames {spoken.max_frames}: no end was written"
        told = sys.stderr if spoken.is_on_stdout else sys.stdout
        print(f"{spoken.path}  {spoken.seconds:.2f} s{'' if spoken.has_ended else cut}", file=told)
    return 0


def run_export_voice(args: Sequence[str]) -> int:
    """Export a speech model and print where to.

    Args:
        args: The command line, the command first.
    """
    exported = run_function(
        export_voice,
        args[1:],
        command="export-voice",
        description="Write the model of a speech checkpoint as a folder that qwen-tts or Transformers loads.",
    )
    print(f"folder  {exported.folder}")
    for note in exported.notes:
        print(f"note    {note}")
    return 0


@dataclass(frozen=True, kw_only=True)
class SpokenFile:
    """A text that was spoken; without an end it was cut off at ``max_frames``."""

    path: Path
    seconds: float
    has_ended: bool
    max_frames: int
    is_on_stdout: bool = False


def speak_texts(
    model: str,
    out: Path,
    *,
    text: str | None = None,
    texts: Path | None = None,
    speaker: str | None = None,
    language: str | None = None,
    ref_audio: Path | None = None,
    ref_text: str | None = None,
    instruct: str | None = None,
    streaming: bool | None = None,
    batch_size: int = 4,
    codec: str | None = None,
    base: str | None = None,
    sampling: Sampling | None = None,
    to_stdout: bool = False,
) -> list[SpokenFile]:
    """Speak texts into WAV files, one for each.

    Args:
        model: Checkpoint or run of TextToSpeech, folder of a model, or its name on the Hub.
        out: Folder for ``00000.wav`` and so on, and ``spoken.jsonl`` with their texts and settings. WAV files that an
            earlier ``spoken.jsonl`` lists there are removed; other files stay.
        text: What to say.
        texts: Instead, a ``.txt`` file of lines, or JSON lines with ``text`` and maybe ``speaker``, ``language`` and
            ``instruct``.
        speaker: Whose voice: one that is built in, or one of the training data. The first of these if not given.
        language: Of the text; the model finds out if not given.
        ref_audio: Clone the voice in this file, which needs a base model of Qwen3-TTS, or CSM with ``ref_text``.
        ref_text: What is said in ``ref_audio``. Qwen3-TTS and CSM then go on from there.
        instruct: How to say it, or by what kind of voice, in plain words: of Qwen3-TTS, for models that were trained
            with instructions.
        streaming: Lay text beside frames; as the checkpoint was trained if not given, and not for folders.
        batch_size: Texts spoken at once.
        codec: Folder or name of a codec, such as descript/dac_44khz for Dia, or of a model whose codec to use;
            ``formants`` is that of the quickstart. That of the model if not given.
        base: Of a checkpoint: where the model is that its run started from, if not where it was.
        sampling: How codes are chosen; what is not given comes from the model's ``generation_config.json``.
        to_stdout: Also write the audio of a single text to stdout while it is spoken, as a WAV stream. Only Qwen3-TTS.
    """
    if (text is None) == (texts is None):
        raise ValueError("text or texts: expected one of them: what to say, or a file of it")
    if speaker is not None and ref_audio is not None:
        raise ValueError("ref_audio: not used, as speaker names a voice; leave one of them out")
    if ref_text is not None and ref_audio is None:
        raise ValueError("ref_text: not used without ref_audio, in which it is said; set that, or leave it out")
    if to_stdout and text is None:
        raise ValueError("to_stdout: one text at a time: expected text instead of texts")
    if batch_size < 1:
        raise ValueError(f"batch_size: got {batch_size}: expected 1 or more")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file: expected a folder, or the name of a new one")
    rows = [PromptRow(text=text or "", speaker=speaker, language=language, instruct=instruct)]
    if texts is not None:
        rows = _read_texts(texts, rows[0], is_cloned=ref_audio is not None)
    opened = open_speaker(model, sampling, base=base)
    decoder = _open_codec(codec, opened)
    reference = _read_reference(ref_audio, ref_text, opened, decoder) if ref_audio is not None else None
    utterances = [
        opened.encode(row.text, row.speaker, row.language, reference=reference, instruct=row.instruct) for row in rows
    ]
    _warn_of_instructions(opened, rows)
    written, listed = [], ""
    streaming = opened.is_streaming if streaming is None else streaming
    settings = {"model": model, "sampling": asdict(opened.sampling)}
    with lock_out(out, out / _LOCK), refuse_unwritable("out", out):
        for begin in range(0, len(rows), batch_size):
            speak = _speak_aloud if to_stdout else _speak_batch
            spoken = speak(opened, decoder, utterances[begin : begin + batch_size], is_streaming=streaming)
            if not begin:
                _remove_spoken(out, kept=ref_audio)
            listed += _describe_spoken(begin, rows, [speech for speech, _ in spoken], settings)
            write_whole(out / _LIST, listed)  # first: a command that is killed leaves no audio that nothing lists
            for i, (speech, audio) in enumerate(spoken, start=begin):
                path, seconds = out / _name_audio(i), len(audio) / decoder.sample_rate
                Clip(audio=audio, sample_rate=decoder.sample_rate).write(path)
                file = SpokenFile(
                    path=path,
                    seconds=seconds,
                    has_ended=speech.has_ended,
                    max_frames=opened.sampling.max_frames,
                    is_on_stdout=to_stdout,
                )
                written.append(file)
    return written


def _name_audio(number: int) -> str:
    return f"{number:05}.wav"


def _describe_spoken(
    begin: int, rows: Sequence[PromptRow], speeches: Sequence[Speech], settings: Mapping[str, Any]
) -> str:
    """Return the lines about some speeches, the first of row ``begin``."""
    lines = []
    for i, speech in enumerate(speeches, start=begin):
        about = {"audio": _name_audio(i), **asdict(rows[i]), "has_ended": speech.has_ended}
        line = {**about, "num_frames": len(speech.codes), **settings}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)


def _remove_spoken(out: Path, kept: Path | None) -> None:
    """Remove the audio files that an earlier list in a folder names, but for one of some name."""
    remove_parts(out)
    for row in read_jsonl(out / _LIST) if (out / _LIST).is_file() else ():
        name = row.fields.get("audio")
        if not isinstance(name, str) or not _AUDIO.fullmatch(name) or (kept is not None and name == kept.name):
            continue
        if (out / name).is_file():
            (out / name).unlink()


def _speak_batch(
    speaker: Speaker, codec: FrameCodec, utterances: Sequence[Utterance], *, is_streaming: bool
) -> list[tuple[Speech, Tensor]]:
    """Return the speech of texts with its audio."""
    speeches = speaker.speak(utterances, is_streaming=is_streaming)
    pairs = zip(speeches, utterances, strict=True)
    return [(speech, speaker.decode(codec, speech.codes, utterance)) for speech, utterance in pairs]


def _speak_aloud(
    speaker: Speaker, codec: FrameCodec, utterances: Sequence[Utterance], *, is_streaming: bool
) -> list[tuple[Speech, Tensor]]:
    """Do the same with one text, and write its audio to stdout as it is made."""
    out = sys.stdout.buffer
    pieces: list[Piece] = []
    for piece in speaker.stream(utterances[0], codec, is_streaming=is_streaming):
        out.write((b"" if pieces else make_open_header(codec.sample_rate)) + to_samples(piece.audio))
        out.flush()
        pieces.append(piece)
    codes, audio = torch.cat([p.codes for p in pieces]), torch.cat([p.audio for p in pieces])
    return [(Speech(codes=codes, has_ended=bool(pieces[-1].has_ended)), audio)]


def _read_texts(path: Path, default: PromptRow, *, is_cloned: bool) -> list[PromptRow]:
    """Return the rows of a file, with what they do not say from the command line."""
    rows = [
        PromptRow(
            text=row.text,
            speaker=row.speaker or default.speaker,
            language=row.language or default.language,
            instruct=row.instruct or default.instruct,
        )
        for row in read_prompts(path, "texts")
    ]
    if not rows:
        raise ValueError(f"texts: {path}: empty: expected a text in each line")
    named = next((row.speaker for row in rows if row.speaker is not None), None)
    if is_cloned and named is not None:
        raise ValueError(
            f"ref_audio: not used for the rows of {path} that name a speaker, such as {named!r}: expected texts "
            "without speakers, or no ref_audio"
        )
    return rows


def _read_reference(path: Path, text: str | None, speaker: Speaker, codec: FrameCodec) -> Reference:
    """Return what a model takes of a recording."""
    speaker.check_reference(text)
    try:
        audio = read_audio(path, codec.sample_rate)
        check_audio(audio, codec.sample_rate, _REFERENCE)
    except AudioError as error:
        raise ValueError(f"ref_audio: {path}: {error}") from error
    embedding = speaker.embed(audio) if speaker.takes_embeddings or text is None else None
    if text is None:
        return Reference(embedding=embedding)
    (codes,) = codec.encode([torch.from_numpy(audio)])
    return Reference(embedding=embedding, text=text, codes=codes.numpy())


def _warn_of_instructions(speaker: Speaker, rows: Sequence[PromptRow]) -> None:
    size = speaker.config.raw.get("tts_model_size")
    if size == "0b6" and any(row.instruct for row in rows):
        log.warning(
            "instruct: published models of 0.6B were not trained to follow it, and qwen-tts leaves it out for them; a "
            "model that you trained with instructions follows it"
        )


def _open_codec(name: str | None, speaker: Speaker) -> FrameCodec:
    source = name or speaker.codec_source
    if source is None:
        raise ValueError(
            "codec: not given, and the model has none: expected the name or folder of a model with one, or of a codec "
            "such as descript/dac_44khz, or formants for a model of the quickstart"
        )
    fetch_codec(source, "codec")
    config = speaker.config
    check_codec(source, "codec", num_codebooks=config.num_codebooks, codebook_size=config.codebook_size)
    is_on_gpu = torch.cuda.is_available() and source != SPOKEN
    return open_codec(source, "cuda" if is_on_gpu else "cpu")
