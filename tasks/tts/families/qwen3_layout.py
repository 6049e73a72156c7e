"""How text, speaker and codes share the positions of the talker of Qwen3-TTS.

Note [Layout]: every position adds a text track and a codec track. First the three ids of the role, with no codec;
then ``tts_pad`` over the prefix of the codec track (``nothink, think_bos, think_eos``, or with a language ``think,
think_bos, language, think_eos``) and over the speaker; then ``tts_bos`` over ``pad``. From there on:

- not streaming: the text and ``tts_eos`` over ``pad``, then ``tts_pad`` over ``bos``, the frames, and ``eos``;
- streaming: the first text id over ``bos``, then one text id over each frame, ``tts_eos`` after the last one, and
  ``tts_pad`` from there on. Text that is longer than the frames is cut.

An instruction stands before the role, as a turn of the user, with no codec. Speech to go on from is laid out as if it
were the beginning of the same utterance: its text before the text, its frames after ``bos``, with no end in between.

The state at a position predicts what the codec track has at the *next* one: codebook 0 of a frame, or the end. The
code predictor gets the same state, that at the position before the frame, as when speech is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_fsdp.tasks.tts.config import SpeechConfig
from lit_fsdp.tasks.tts.utterance import Batch, Utterance, get_codes, get_context

TEMPLATE = "<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n"
INSTRUCT_TEMPLATE = "<|im_start|>user\n{text}<|im_end|>\n"
NUM_ROLE, NUM_TAIL = 3, 5  # ids before and after the text
NONE = -1  # on the codec track: nothing


@dataclass(frozen=True, kw_only=True)
class Tracks:
    """Both tracks of one utterance, position by position; ``NONE`` on the codec track is no codec.

    Frames to go on from stand at the end, on the codec track by their codebook 0.
    """

    text: list[int]
    codec: list[int]
    speaker_at: int | None
    trailing: list[int]  # streaming: text ids that belong to the frames


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of the role and a text, without what follows it in the template.

    Raises:
        ValueError: The text is empty, or the tokenizer is not one of these models.
    """
    text = text.strip()
    if not text:
        raise ValueError("text: empty: expected a word or more")
    ids: list[int] = tokenizer(TEMPLATE.format(text=text), add_special_tokens=False)["input_ids"]
    if ids[-2:] != ids[1:NUM_ROLE]:
        raise ValueError(
            "tokenizer: '<|im_start|>assistant' and a newline: expected three tokens of their own; take the tokenizer "
            "of the model"
        )
    return ids[:-NUM_TAIL]


def encode_instruct(tokenizer: Any, instruct: str) -> list[int]:
    """Return the ids of an instruction, with its template."""
    ids: list[int] = tokenizer(INSTRUCT_TEMPLATE.format(text=instruct.strip()), add_special_tokens=False)["input_ids"]
    return ids


def lay_out_prompt(utterance: Utterance, config: SpeechConfig, *, is_streaming: bool) -> Tracks:
    """Return the tracks up to and with the position whose state writes the first frame; see Note [Layout]."""
    ids, before = config.ids, [*utterance.instruct_ids, *utterance.text_ids[:NUM_ROLE]]
    text = [*utterance.context_ids[NUM_ROLE:], *utterance.text_ids[NUM_ROLE:], ids.tts_eos]
    codec = [ids.bos, *get_context(utterance)[:, :1].flatten().tolist()]
    prefix = [ids.nothink, ids.think_bos, ids.think_eos]
    if utterance.language is not None:
        prefix = [ids.think, ids.think_bos, utterance.language, ids.think_eos]
    speaker_at = None
    if utterance.speaker is not None:
        is_built_in = isinstance(utterance.speaker, int)
        speaker_at = None if is_built_in else len(before) + len(prefix)
        prefix.append(utterance.speaker if isinstance(utterance.speaker, int) else NONE)
    text_track = [*before, *[ids.tts_pad] * len(prefix), ids.tts_bos]
    codec_track = [*[NONE] * len(before), *prefix, ids.pad]
    if not is_streaming:
        text_track += text
        codec_track += [ids.pad] * len(text)
        text = []
    beside, trailing = text[: len(codec)], text[len(codec) :]
    text_track += [*beside, *[ids.tts_pad] * (len(codec) - len(beside))]
    codec_track += codec
    return Tracks(text=text_track, codec=codec_track, speaker_at=speaker_at, trailing=trailing)


def collate_training(utterances: Sequence[Utterance], config: SpeechConfig, *, is_streaming: bool = False) -> Batch:
    """Return a batch for ``Qwen3TTS.forward``, padded on the right.

    ``text_ids``, ``codec_ids``, ``attention_mask``, ``codec_mask``, ``speaker_mask`` [batch, length]; ``codes``
    [batch, length, codebooks], 0 but at frames; ``frame_mask`` [batch, length]; ``speaker`` [batch, size]. Targets
    are given by their places in [batch * length]: ``state_index``, ``labels`` and ``label_weights`` [tokens] of
    the talker, ``frame_index`` and ``frame_weights`` [frames] of the code predictor. Frames to go on from are no
    targets.

    Weights are 0 or 1, and integers: under bf16 FSDP2 casts what is floating, and counts above 256 would be rounded.

    Args:
        utterances: With codes and a speaker.
        config: Of the model.
        is_streaming: See Note [Layout].
    """
    prompts = [lay_out_prompt(u, config, is_streaming=is_streaming) for u in utterances]
    length = max(len(p.text) + len(get_codes(u)) + 1 for p, u in zip(prompts, utterances, strict=True))
    batch = _stack_prompts(prompts, length, config, on_left=False)
    shape = len(utterances), length
    codes = torch.zeros(*shape, config.num_codebooks, dtype=torch.int64)
    frame_mask = torch.zeros(shape, dtype=torch.bool)
    targets: dict[str, list[Tensor]] = {name: [] for name in ("state_index", "labels", "label_weights")}
    targets |= {name: [] for name in ("frame_index", "frame_weights")}
    for row, (utterance, prompt) in enumerate(zip(utterances, prompts, strict=True)):
        frames = torch.from_numpy(get_codes(utterance))
        num_frames, begin = len(frames), len(prompt.text)
        end = begin + num_frames  # where the end stands
        if len(context := get_context(utterance)):
            codes[row, begin - len(context) : begin] = torch.from_numpy(context)
            frame_mask[row, begin - len(context) : begin] = True
        first = torch.cat([frames[:, 0], torch.tensor([config.ids.eos])])
        batch["codec_ids"][row, begin : end + 1] = first
        batch["codec_mask"][row, begin : end + 1] = True
        batch["attention_mask"][row, begin : end + 1] = 1
        trailing = [*prompt.trailing, *[config.ids.tts_pad] * (num_frames + 1)][: num_frames + 1]
        batch["text_ids"][row, begin : end + 1] = torch.tensor(trailing)
        codes[row, begin:end] = frames
        frame_mask[row, begin:end] = True
        places = row * length + torch.arange(begin, end + 1)
        weight = int(utterance.is_counted)
        targets["state_index"].append(places - 1)
        targets["labels"].append(first)
        targets["label_weights"].append(torch.full((num_frames + 1,), weight))
        targets["frame_index"].append(places[:-1])
        targets["frame_weights"].append(torch.full((num_frames,), weight))
    batch |= {name: torch.cat(parts) for name, parts in targets.items()}
    return {**batch, "codes": codes, "frame_mask": frame_mask, **_stack_speakers(utterances)}


def collate_prompts(utterances: Sequence[Utterance], config: SpeechConfig, *, is_streaming: bool = False) -> Batch:
    """Return a batch for ``generate_codes``, padded on the left.

    As ``collate_training``, without codes and targets, and with ``trailing_ids`` [batch, longest]. Frames to go on from
    are in ``context_codes`` [batch, length, codebooks], at ``context_mask`` [batch, length], where there are any.
    """
    prompts = [lay_out_prompt(u, config, is_streaming=is_streaming) for u in utterances]
    batch = _stack_prompts(prompts, max(len(p.text) for p in prompts), config, on_left=True)
    longest = max(1, *(len(p.trailing) for p in prompts))
    trailing = torch.full((len(prompts), longest), config.ids.tts_pad)
    for row, prompt in enumerate(prompts):
        trailing[row, : len(prompt.trailing)] = torch.tensor(prompt.trailing, dtype=torch.int64)
    batch |= _move_context(batch, utterances, config)
    return {**batch, "trailing_ids": trailing, **_stack_speakers(utterances)}


def _move_context(batch: Batch, utterances: Sequence[Utterance], config: SpeechConfig) -> Batch:
    """Return frames to go on from as tensors of their own, and the codec track without them."""
    contexts = [get_context(u) for u in utterances]
    if not any(map(len, contexts)):
        return {}
    codes = torch.zeros(*batch["text_ids"].shape, config.num_codebooks, dtype=torch.int64)
    mask = torch.zeros(batch["text_ids"].shape, dtype=torch.bool)
    for row, context in enumerate(contexts):
        if len(context):
            codes[row, -len(context) :] = torch.from_numpy(context)
            mask[row, -len(context) :] = True
    return {"codec_mask": batch["codec_mask"] & ~mask, "context_codes": codes, "context_mask": mask}


def _stack_prompts(prompts: Sequence[Tracks], length: int, config: SpeechConfig, *, on_left: bool) -> Batch:
    shape = len(prompts), length
    batch = {
        "text_ids": torch.full(shape, config.ids.tts_pad),
        "codec_ids": torch.zeros(shape, dtype=torch.int64),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
        "codec_mask": torch.zeros(shape, dtype=torch.bool),
        "speaker_mask": torch.zeros(shape, dtype=torch.bool),
    }
    for row, prompt in enumerate(prompts):
        size = len(prompt.text)
        begin = length - size if on_left else 0
        place = slice(begin, begin + size)
        codec = torch.tensor(prompt.codec)
        batch["text_ids"][row, place] = torch.tensor(prompt.text)
        batch["codec_ids"][row, place] = codec.clamp(min=0)
        batch["codec_mask"][row, place] = codec != NONE
        batch["attention_mask"][row, place] = 1
        if prompt.speaker_at is not None:
            batch["speaker_mask"][row, begin + prompt.speaker_at] = True
    return batch


def _stack_speakers(utterances: Sequence[Utterance]) -> Batch:
    """Return embeddings as ``speaker`` [batch, size], zeros where there is none, or nothing if nobody has one."""
    given = [u.speaker for u in utterances]
    size = next((len(s) for s in given if isinstance(s, np.ndarray)), None)
    if size is None:
        return {}
    rows = [s if isinstance(s, np.ndarray) else np.zeros(size, dtype=np.float32) for s in given]
    return {"speaker": torch.from_numpy(np.stack(rows).astype(np.float32))}
