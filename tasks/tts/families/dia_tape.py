"""The step of Dia for the closed form: what ``Dia.forward`` does, operator by operator; see Note [Tape]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lit_fsdp.planning.closed_form.model_reader import ModelReader
from lit_fsdp.planning.closed_form.reader import Context
from lit_fsdp.tasks.tts.families.dia_model import Dia
from lit_fsdp.tasks.tts.families.speech_tape import INDEX, pick, read_blocks, read_losses


def read_dia(model: Dia, step: ModelReader) -> int:
    """Add forward and losses, and return the loss.

    Raises:
        UnreadableModuleError: Some of it has no rule.
    """
    reader, tape = step.reader, step.reader.tape
    encoder, decoder = model.model.encoder, model.model.decoder
    tape.batch_bytes = reader.num_bytes
    num_frames, codebooks = reader.shapes["state_index"]  # with the ends
    texts = replace(reader, length=reader.shapes["text_ids"][1])
    x = step.run(encoder.embedding, tape.add_value(0), texts)
    read = step.run(encoder.norm, read_blocks(step, encoder.layers, x, texts), texts)
    context = Context(value=read, length=texts.length, is_masked=reader.is_masked)
    if step.recomputed:
        tape.keep(read)
    frames = replace(reader, is_masked=False, context=context)
    x = read_blocks(step, decoder.layers, _read_codes(decoder.embeddings.embed, step, codebooks), frames)
    states = step.run(decoder.norm, x, frames)
    tape.release(read)
    with tape.part("head and loss"):
        every = step.run(model.logits_dense, states)
        logits = pick(tape, every, tape.sizes[every] // reader.num_tokens * num_frames)
        # What has a name in forward stays until its end.
        tape.hold(states, logits)
        return read_losses(tape, logits, num_frames * codebooks)


def _read_codes(embedding: Any, step: ModelReader, codebooks: int) -> int:
    """Add the sum of the codebooks of every position."""
    tape = step.reader.tape
    codes = replace(step.reader, length=step.reader.length * codebooks)
    embedded = step.run(embedding, tape.add("add", (), codes.num_tokens * INDEX), codes)
    return tape.add("sum", (embedded,), tape.sizes[embedded] // codebooks, splits_grad=True)
