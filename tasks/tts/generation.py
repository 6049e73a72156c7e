"""How codes are chosen from logits: greedy or sampled, as the official inference does it. Families hold the loops."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

_MIN_FRAMES = 2  # the official inference never ends before
_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How speech is generated. Defaults are those of the model's ``generation_config.json``, else the official ones.

    The official values here are those of Qwen3-TTS; CSM and Dia have some others.

    Args:
        do_sample: Draw codebook 0 at random; otherwise take the likeliest. Officially true.
        temperature: Below 1 prefers likely codes. Officially 0.9.
        top_k: Draw from the K likeliest codes; 0 draws from all. Officially 50.
        top_p: Draw from the likeliest codes that have this probability together. Officially 1.
        repetition_penalty: Above 1 makes codes of codebook 0 that were written before less likely. Officially 1.05.
        predictor_do_sample: The same as ``do_sample`` for the other codebooks.
        predictor_temperature: As ``temperature``.
        predictor_top_k: As ``top_k``.
        predictor_top_p: As ``top_p``.
        max_frames: Stop here, though no end was written; that is reported. Officially 2048, of CSM 1125 whatever its
            ``generation_config.json`` says, of Dia 3056. Models write 12.5 frames a second, Dia 86.
        seed: Of the random numbers; the same seed gives the same speech for the same texts in the same batches.
        guidance_scale: Above 1, codes that the text makes likely become likelier; every step then computes twice as
            much. Only of Dia, officially 3.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    predictor_do_sample: bool | None = None
    predictor_temperature: float | None = None
    predictor_top_k: int | None = None
    predictor_top_p: float | None = None
    max_frames: int | None = None
    seed: int = 0
    guidance_scale: float | None = None

    def complete(self, own: Mapping[str, Any] | None = None, base: SamplingValues | None = None) -> SamplingValues:
        """Return all values: those that are given, else those of a model, else the official ones.

        Args:
            own: Contents of the model's ``generation_config.json``.
            base: The official ones of its family; those of Qwen3-TTS if not given.

        Raises:
            ValueError: A setting would be ignored or fail.
        """
        given = _cast({name: value for name, value in asdict(self).items() if value is not None}, "sampling.")
        values = replace(base or SamplingValues(), **{**_parse_official(own or {}), **given})
        values.check()
        for prefix in ("", "predictor_"):
            if getattr(values, f"{prefix}do_sample"):
                continue
            for name in ("temperature", "top_k", "top_p"):
                if f"{prefix}{name}" in given:
                    raise ValueError(
                        f"sampling.{prefix}{name}: not used, as {prefix}do_sample is false"
                        f"{'' if f'{prefix}do_sample' in given else ' in the model'}; leave it out"
                    )
        return values


@dataclass(frozen=True, kw_only=True)
class SamplingValues:
    """What a ``Sampling`` comes to for one model; the defaults are the official ones of Qwen3-TTS."""

    do_sample: bool = True
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    predictor_do_sample: bool = True
    predictor_temperature: float = 0.9
    predictor_top_k: int = 50
    predictor_top_p: float = 1.0
    max_frames: int = 2048
    seed: int = 0
    guidance_scale: float = 1.0

    def check(self) -> None:
        """Refuse values that fail.

        Raises:
            ValueError: With the setting and the nearest fix.
        """
        for name in ("temperature", "predictor_temperature", "repetition_penalty"):
            if getattr(self, name) <= 0:
                raise ValueError(f"sampling.{name}: got {getattr(self, name)}: expected above 0")
        for name in ("top_p", "predictor_top_p"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"sampling.{name}: got {getattr(self, name)}: expected above 0, up to 1")
        for name in ("top_k", "predictor_top_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"sampling.{name}: got {getattr(self, name)}: expected 0 (all) or more")
        if self.max_frames < 1:
            raise ValueError(f"sampling.max_frames: got {self.max_frames}: expected 1 or more")
        if self.guidance_scale < 1:
            raise ValueError(f"sampling.guidance_scale: got {self.guidance_scale}: expected 1 (none) or above")


GREEDY = {"do_sample": False, "predictor_do_sample": False}


@dataclass(frozen=True, kw_only=True)
class Speech:
    """What was written for one prompt.

    Args:
        codes: [frames, codebooks], without the end, on the CPU.
        has_ended: Whether the end was written; otherwise ``max_frames`` cut it off.
    """

    codes: Tensor
    has_ended: bool


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What was written at one place of a batch of prompts.

    Args:
        codes: [batch, codebooks] on the device of the model; those of prompts that have ended mean nothing. ``None``
            in the last one, where all have ended or are cut off.
        is_end: Which prompts end here or before [batch].
    """

    codes: Tensor | None
    is_end: Tensor


class Chooser:
    """Picks codes from logits, with the processors of Transformers in its order.

    Args:
        sampling: How.
        generator: For what is drawn, on the device of the logits.
        suppressed: Codes that codebook 0 must not have.
        late: Code that it must not begin with.
    """

    def __init__(
        self, sampling: SamplingValues, generator: torch.Generator, *, suppressed: list[int], late: int | None = None
    ) -> None:
        device = generator.device
        self.generator, self.sampling = generator, sampling
        self.processors: list[Callable[..., Tensor]] = []
        if sampling.repetition_penalty != 1:
            self.processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if late is not None:
            self.processors.append(MinNewTokensLengthLogitsProcessor(0, _MIN_FRAMES, late, device=str(device)))
        if suppressed:
            self.processors.append(SuppressTokensLogitsProcessor(suppressed, device=str(device)))
        first, other = (
            build_warpers(*(getattr(sampling, f"{prefix}{name}") for name in ("temperature", "top_k", "top_p")))
            for prefix in ("", "predictor_")
        )
        if sampling.do_sample:
            self.processors += first
        self.others = other if sampling.predictor_do_sample else []

    def pick_first(self, logits: Tensor, written: list[Tensor]) -> Tensor:
        """Return codes [batch] of codebook 0 from its logits, after those that were written."""
        before = torch.stack(written, dim=1) if written else logits.new_zeros(len(logits), 0, dtype=torch.int64)
        return self._pick(logits, before, self.processors, self.sampling.do_sample)

    def pick_other(self, logits: Tensor) -> Tensor:
        """Return codes [batch] of another codebook."""
        before = logits.new_zeros(len(logits), 0, dtype=torch.int64)
        return self._pick(logits, before, self.others, self.sampling.predictor_do_sample)

    def _pick(self, scores: Tensor, before: Tensor, processors: list[Any], is_drawn: bool) -> Tensor:
        for process in processors:
            scores = process(before, scores)
        if not is_drawn:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1, generator=self.generator).squeeze(1)


def build_warpers(temperature: float, top_k: int, top_p: float, *, keep_all: bool = False) -> list[Any]:
    """Return processors of Transformers for what is drawn.

    Args:
        temperature: As in ``Sampling``.
        top_k: The same.
        top_p: The same.
        keep_all: Have the one of the temperature also where that is 1.
    """
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)] if temperature != 1 or keep_all else []
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    return warpers + ([TopPLogitsWarper(top_p)] if top_p < 1 else [])


def is_any(is_open: Tensor) -> bool:
    """Tell whether any prompt of any rank is still open."""
    count = is_open.sum()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(count)
    return bool(count)


def cut_at_ends(codes: Tensor, is_end: Tensor) -> list[Speech]:
    """Return speech without what was written after an end.

    Args:
        codes: [batch, frames, codebooks].
        is_end: [batch, frames or one more].
    """
    speech = []
    for own, ends in zip(codes.cpu(), is_end.cpu(), strict=True):
        num_frames = int(ends.float().argmax()) if ends.any() else len(own)
        speech.append(Speech(codes=own[:num_frames].clone(), has_ended=bool(ends.any())))
    return speech


def _parse_official(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of ``generation_config.json`` under our names, as far as it has any."""
    known = {field.name for field in fields(SamplingValues)}
    renamed = {"max_new_tokens": "max_frames", "subtalker_dosample": "predictor_do_sample"}
    found = {}
    for name, value in settings.items():
        ours = renamed.get(name, re.sub("^(subtalker|depth_decoder)_", "predictor_", name))
        if ours in known and value is not None:
            found[ours] = value
    return _cast(found, "generation_config.json: ")


def _cast(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return settings in their own types: processors of Transformers refuse a temperature of 1 that is an integer."""
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(SamplingValues)}
    for name, value in values.items():
        kind = kinds[name]
        is_right = type(value) is kind or (kind is float and type(value) is int)
        if not is_right:
            raise ValueError(f"{where}{name}: got {value!r}: expected {_WORDS[kind]}")
    return {name: kinds[name](value) for name, value in values.items()}
