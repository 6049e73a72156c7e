"""The step of CSM for the closed form: what ``Csm.forward`` does, operator by operator; see Note [Tape]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lit_fsdp.planning.closed_form.model_reader import ModelReader
from lit_fsdp.tasks.tts.families.csm_model import Csm
from lit_fsdp.tasks.tts.families.speech_tape import INDEX, pick, read_blocks, read_losses


def read_csm(model: Csm, step: ModelReader) -> int:
    """Add forward and losses, and return the loss.

    Raises:
        UnreadableModuleError: Some of it has no rule.
    """
    reader, tape, backbone = step.reader, step.reader.tape, model.backbone_model
    num_frames, codebooks = reader.shapes["targets"]  # with the ends
    tape.batch_bytes = reader.num_bytes
    x = _read_inputs(model, step, codebooks)
    states = step.run(backbone.norm, read_blocks(step, backbone.layers, x, reader))
    with tape.part("head and loss"):
        before = pick(tape, states, tape.sizes[states] // reader.num_tokens * num_frames)
        logits = step.run(model.lm_head, before)
        # What has a name in forward stays until its end.
        tape.hold(x, states, before, logits)
    predicted = _read_predictor(model, step, before, (num_frames, codebooks))
    with tape.part("head and loss"):
        tape.hold(predicted)
        own = read_losses(tape, logits, num_frames)
        num_others = num_frames * (codebooks - 1)
        tape.hold(tape.add("index", (), num_others * INDEX))  # targets in one row
        return tape.add_sum(own, read_losses(tape, predicted, num_others))


def _read_inputs(model: Csm, step: ModelReader, codebooks: int) -> int:
    """Add texts and frames; of a frame the sum of its codebooks."""
    reader, tape = step.reader, step.reader.tape
    embedding: Any = model.backbone_model.embed_tokens.embed_audio_tokens
    codes = replace(reader, length=reader.length * codebooks)
    text = step.run(model.embed_text_tokens, tape.add_value(0))
    numbers = tape.add("add", (), codes.num_tokens * INDEX)
    audio = step.run(embedding, numbers, codes)
    # Backward has the gradient of a sum in one piece for all codebooks.
    summed = tape.add("sum", (audio,), tape.sizes[text], splits_grad=True)
    return tape.add("where", (summed, text), tape.sizes[text])


def _read_predictor(model: Csm, step: ModelReader, before: int, shape: tuple[int, int]) -> int:
    """Add the depth decoder, for which a frame is a row and its codebooks are the tokens."""
    tape, decoder = step.reader.tape, model.depth_decoder
    num_frames, codebooks = shape
    num_frames += num_frames == codebooks  # see Csm.forward
    tokens = replace(step.reader, rows=num_frames, length=codebooks)
    given = tape.add("pad", (), tokens.num_tokens * INDEX)
    numbers = tape.add("add", (), tokens.num_tokens * INDEX)
    embedded = step.run(decoder.model.embed_tokens, numbers, tokens)
    # The states take the place of the first codebook, in place: here both are counted for a moment. Backward copies the
    # gradient for it, whether the embedding trains or not.
    size = tape.sizes[embedded]
    extra = 0 if tape.needs_grad[embedded] else size
    x = tape.add("copy", (embedded, before), size, backward_temp=tape.sizes[before] + extra)
    x = step.run(decoder.model.inputs_embeds_projector, x, tokens)
    states = step.run(decoder.model.norm, read_blocks(step, decoder.model.layers, x, tokens))
    tape.release(x)
    with tape.part("head and loss"):
        joined = _read_heads(step, decoder.codebooks_head, states, tokens.rows)
    tape.release(given, states)
    return joined


def _read_heads(step: ModelReader, head: Any, states: int, num_frames: int) -> int:
    """Add the heads of all codebooks, slices of one weight that forward copies."""
    reader, tape = step.reader, step.reader.tape
    num_heads, num_in, num_out = head.weight.shape
    one = num_in * num_out * tape.itemsize
    copied = tape.add("index", (), num_heads * one, weights=reader.list_trained(head.weight))
    flops = 2 * num_frames * num_in * num_out
    pairs = ((states, copied), (copied, states))
    logits = [
        tape.add(
            "mm_of_slices",
            (states, copied),
            num_frames * num_out * tape.itemsize,
            saves=[value for value, other in pairs if tape.needs_grad[other]],
            # Of a slice each; those of all are zeros but for it.
            backward_temp=one * tape.needs_grad[copied] + num_frames * num_in * tape.itemsize,
            flops=flops,
            backward_flops=flops * (tape.needs_grad[copied] + tape.needs_grad[states]),
        )
        for _ in range(num_heads)
    ]
    joined = tape.add("stack", logits, sum(tape.sizes[value] for value in logits), splits_grad=True)
    tape.release(copied, *logits)
    return joined
