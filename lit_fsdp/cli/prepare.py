"""``prepare tts``: audio files become rows with codes and speaker embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from lit_fsdp.errors import ConfigError
from lit_fsdp.parsing.parser import run_function
from lit_fsdp.tasks.tts.codec.formants import SPOKEN
from lit_fsdp.tasks.tts.codec.loading import fetch_codec
from lit_fsdp.tasks.tts.preparation.audio import Limits
from lit_fsdp.tasks.tts.preparation.cleaning import Cleaning
from lit_fsdp.tasks.tts.preparation.manifest import read_manifest
from lit_fsdp.tasks.tts.preparation.preparer import Preparer
from lit_fsdp.tasks.tts.preparation.runners import Prepared, prepare_shards
from lit_fsdp.tasks.tts.preparation.transcribe import fetch_transcriber

_GPU_BATCH = 8


def run_prepare(args: Sequence[str]) -> int:
    """Prepare data and print what came of it.

    Args:
        args: The command line, the command first.
    """
    if args[1:2] != ["tts"] and args[1:2] not in (["-h"], ["--help"]):
        got = args[1] if len(args) > 1 else "nothing"
        raise ConfigError(f"prepare: got {got}: expected `prepare tts`, the only data that is prepared")
    done = run_function(
        prepare_tts,
        args[2:] if args[1] == "tts" else args[1:],
        command="prepare tts",
        description="Turn audio files into rows with codes and speaker embeddings, for SpeechData.",
    )
    resumed = f", {done.num_resumed} shards were there already" if done.num_resumed else ""
    print(f"folder    {done.folder}{resumed}")
    print(f"rows      {done.num_rows}, {done.seconds / 3600:.3f} h")
    if done.num_rejected:
        print(f"rejected  {done.num_rejected}, see {done.folder / 'rejects.jsonl'}")
    if done.cleaned:
        print(f"cleaned   {', '.join(f'{name} {count}' for name, count in sorted(done.cleaned.items()))}")
    return 0 if done.num_rows else 1


def prepare_tts(
    manifest: Path,
    out: Path,
    *,
    model: str = "Qwen/Qwen3-TTS-12Hz-1.7B-Base",
    transcriber: str | None = None,
    limits: Limits | None = None,
    cleaning: Cleaning | None = None,
    batch_size: int | None = None,
    backend: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
    num_processes: int = 1,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    rows_per_shard: int = 256,
    format: Literal["parquet", "jsonl"] = "parquet",  # noqa: A002
) -> Prepared:
    """Prepare a manifest. Interrupted, it goes on where it was when it is started again.

    Args:
        manifest: JSON lines with ``audio`` (WAV, FLAC, MP3 or OGG; relative to the manifest) and maybe ``text``,
            ``speaker``, ``language``, ``instruct``, ``ref_audio`` and ``ref_text``: with this, the row goes on from
            ``ref_audio``.
        out: The folder to fill. What was left out, and why, is in ``rejects.jsonl`` there.
        model: Whose codec and, if it has one, speaker encoder: name on the Hub or folder of the model to train, or of a
            codec, such as descript/dac_44khz for Dia; ``formants`` takes the small codec of the quickstart.
        transcriber: A Whisper model for clips without text, such as openai/whisper-large-v3-turbo. Without one they
            are left out.
        limits: Which clips are good enough.
        cleaning: What is done to recordings and texts before that; nothing if not given.
        batch_size: Clips of similar length that are encoded, or written down, at once; 8 on a GPU and 1 on a CPU, where
            more gain nothing, if not given. A GPU may round a code otherwise in another batch, so a folder keeps the
            size it was begun with.
        backend: ``local`` uses processes of this machine; ``ray`` those of a Ray cluster, which must all see the audio
            and ``out`` under the same paths. The files are the same, byte for byte.
        ray_address: Of the cluster, ``auto`` for the one that is running here; one is started on this machine if not
            given.
        num_processes: How many work side by side. Each holds a codec and a speaker encoder.
        device: Where they compute; ``auto`` takes GPUs if there are any. Several processes share several GPUs out.
            Another device may round other codes, so a folder is finished on the kind that it was begun on.
        rows_per_shard: Lines of the manifest in one file, and lost at most by an interruption, per process.
        format: Of the files.
    """
    if ray_address is not None and backend != "ray":
        raise ValueError("ray_address: not used by backend 'local'; set backend to ray, or leave it out")
    for name, value in (
        ("num_processes", num_processes),
        ("rows_per_shard", rows_per_shard),
        ("batch_size", batch_size),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name}: got {value}: expected 1 or more")
    limits = limits or Limits()
    limits.check()
    cleaning = cleaning or Cleaning()
    cleaning.check(max_seconds=limits.max_seconds, has_transcriber=transcriber is not None)
    chosen = _choose_device(device, model, backend)
    batch_size = batch_size or (_GPU_BATCH if chosen == "cuda" else 1)
    read_manifest(manifest)  # before gigabytes are downloaded for it
    fetch_codec(model, "model")
    if transcriber is not None:
        fetch_transcriber(transcriber)
    return prepare_shards(
        manifest,
        out,
        Preparer(
            model=model,
            limits=limits,
            transcriber=transcriber,
            device=chosen,
            cleaning=cleaning,
            batch_size=batch_size,
        ),
        num_processes=num_processes,
        rows_per_shard=rows_per_shard,
        shard_format=format,
        ray_address=(ray_address or "local") if backend == "ray" else None,
    )


def _choose_device(device: str, model: str, backend: str) -> Literal["cpu", "cuda"]:
    """Return where models compute; the GPUs of a Ray cluster need not be here."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and (model == SPOKEN or (backend == "local" and not has_gpu)):
        why = "the small codec computes on the CPU" if model == SPOKEN else "there is no GPU"
        raise ValueError(f"device: got 'cuda': {why}; set cpu or auto")
    is_gpu = device == "cuda" or (device == "auto" and has_gpu and model != SPOKEN)
    return "cuda" if is_gpu else "cpu"
