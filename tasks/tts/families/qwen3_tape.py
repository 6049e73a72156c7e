"""The step of Qwen3-TTS for the closed form: what ``Qwen3TTS.forward`` does, operator by operator; see Note [Tape]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from lit_fsdp.planning.closed_form.model_reader import ModelReader
from lit_fsdp.planning.closed_form.reader import UnreadableModuleError
from lit_fsdp.tasks.tts.families.qwen3_model import Qwen3TTS
from lit_fsdp.tasks.tts.families.speech_tape import INDEX, add_masked, pick, read_blocks, read_losses


def read_qwen3(model: Qwen3TTS, step: ModelReader) -> int:
    """Add forward and losses, and return the loss.

    Raises:
        UnreadableModuleError: Some of it has no rule.
    """
    reader, tape = step.reader, step.reader.tape
    talker, codebooks = model.talker, model.config.num_codebooks
    num_tokens, num_frames = (reader.shapes[name][0] for name in ("state_index", "frame_index"))
    width = talker.model.norm.weight.numel() * tape.itemsize  # of a state
    tape.batch_bytes = reader.num_bytes
    states = _read_talker(model, step)
    with tape.part("head and loss"):
        # What has a name in forward stays until its end.
        tape.hold(states, tape.add("index", (), num_frames * codebooks * INDEX))
        logits = step.run(talker.codec_head, pick(tape, states, num_tokens * width))
        before = pick(tape, states, num_frames * width)
        tape.hold(logits, before)
    predicted = _read_predictor(model, step, before, num_frames)
    with tape.part("head and loss"):
        tape.hold(predicted)
        own = read_losses(tape, logits, num_tokens)
        return tape.add_sum(own, read_losses(tape, predicted, num_frames * (codebooks - 1)))


def _read_talker(model: Qwen3TTS, step: ModelReader) -> int:
    reader, tape, talker = step.reader, step.reader.tape, model.talker
    projection = talker.text_projection
    ids = tape.add_value(0)
    text = step.run(talker.model.text_embedding, ids)
    text = tape.add_pointwise("silu", step.run(projection.linear_fc1, text), saves_input=True)
    text = add_masked(tape, step.run(projection.linear_fc2, text))
    codec = add_masked(tape, step.run(talker.model.codec_embedding, ids))
    if "speaker" in reader.shapes:
        codec = tape.add_sum(codec, tape.add("mul", (), tape.sizes[codec]))
    x = tape.add_sum(text, codec)
    tables = [talker.model.codec_embedding, *talker.code_predictor.model.codec_embedding]
    embedded = [step.run(table, ids) for table in tables]
    tape.release(embedded[0])
    for value in embedded[1:]:
        x = tape.add_sum(x, add_masked(tape, value))
    tape.release(*embedded[1:-1])
    states: Any = step.run(talker.model.norm, read_blocks(step, talker.model.layers, x, reader))
    tape.release(x, embedded[-1])  # the last one has a name of its own
    return int(states)


def _read_predictor(model: Qwen3TTS, step: ModelReader, before: int, num_frames: int) -> int:
    """Add the code predictor, for which a frame is a row and its codebooks are the tokens."""
    tape, talker, predictor = step.reader.tape, model.talker, model.talker.code_predictor
    codebooks = model.config.num_codebooks
    frames = replace(step.reader, rows=num_frames, length=1)
    tokens = replace(step.reader, rows=num_frames, length=codebooks)
    tables = [talker.model.codec_embedding, *predictor.model.codec_embedding]
    ids = tape.add_value(0)
    *embedded, last = [step.run(table, ids, frames) for table in tables]
    tape.release(last)
    tape.hold(*embedded)
    inputs = tape.add("stack", (before, *embedded), tape.sizes[before] * codebooks, splits_grad=True)
    x = projected = inputs
    if any(True for _ in predictor.small_to_mtp_projection.parameters()):
        x = projected = step.run(predictor.small_to_mtp_projection, inputs)
    states = step.run(predictor.model.norm, read_blocks(step, predictor.model.layers, x, tokens))
    tape.release(projected)
    with tape.part("head and loss"):
        logits = [_read_head(step, head, states, num_frames, codebooks) for head in predictor.lm_head]
        joined = tape.add("stack", logits, sum(tape.sizes[value] for value in logits), splits_grad=True)
    tape.release(inputs, states, *logits)
    return joined


def _read_head(step: ModelReader, head: Any, states: int, num_frames: int, codebooks: int) -> int:
    """Add the head of one codebook, which reads one position of every frame."""
    reader, tape = step.reader, step.reader.tape
    if not isinstance(head, nn.Linear):  # with an adapter
        raise UnreadableModuleError("code_predictor.lm_head", f"a {type(head).__name__}")
    flops = 2 * num_frames * head.in_features * head.out_features
    is_trained = head.weight.requires_grad
    return tape.add(
        "mm",
        (states,),
        num_frames * head.out_features * tape.itemsize,
        saves=(states,) if is_trained else (),
        weights=reader.list_trained(head.weight),
        # Of the position; that of all positions is zeros but for it.
        backward_temp=tape.sizes[states] // codebooks,
        flops=flops,
        backward_flops=flops * (is_trained + tape.needs_grad[states]),
    )
