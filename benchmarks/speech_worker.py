"""Generates speech on request: ``python speech_worker.py own|official FOLDER NUM_THREADS``, a JSON line for each.

A request is a line of JSON, ``{"ids": [...], "num_frames": N, "do_sample": false}``; the answer has the codes and the
seconds of CPU time that they took. ``official`` needs an environment with ``qwen-tts``, ``own`` one with lit_fsdp; of
which version is up to the environment. Neither reads more of lit_fsdp than releases before this one have.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# The official package warns on stdout, where the answers are.
_ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

_TAIL = [1, 2, 3, 4, 5]  # anything: the official package cuts it off


def load_own(folder: Path) -> Callable[[dict[str, Any]], list[Any]]:
    """Return what generates with lit_fsdp."""
    from lit_fsdp.tasks.tts.families.model_types import load_speech_model
    from lit_fsdp.tasks.tts.generation import SamplingValues
    from lit_fsdp.tasks.tts.utterance import Utterance

    family, config, model = load_speech_model(folder)
    if hasattr(family, "prepare_speaking"):  # as `speak` does
        family.prepare_speaking(model)

    def speak(request: dict[str, Any]) -> list[Any]:
        do_sample = request["do_sample"]
        sampling = SamplingValues(
            max_frames=request["num_frames"], do_sample=do_sample, predictor_do_sample=do_sample, seed=0
        )
        texts = [Utterance(text_ids=ids) for ids in request["ids"]]
        spoken = family.generate(model, family.collate_prompts(texts, config), sampling)
        return [speech.codes.tolist() for speech in spoken]

    return speak


def load_official(folder: Path) -> Callable[[dict[str, Any]], list[Any]]:
    """Return what generates with the official package."""
    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration
    from transformers import AutoConfig, AutoModel

    AutoConfig.register("qwen3_tts", Qwen3TTSConfig)
    AutoModel.register(Qwen3TTSConfig, Qwen3TTSForConditionalGeneration)
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)

    def speak(request: dict[str, Any]) -> list[Any]:
        ids = [torch.tensor([[*row, *_TAIL]]) for row in request["ids"]]
        do_sample = request["do_sample"]
        codes, _ = model.generate(
            input_ids=ids,
            speakers=[None] * len(ids),
            languages=["Auto"] * len(ids),
            non_streaming_mode=True,
            max_new_tokens=request["num_frames"] + 1,
            do_sample=do_sample,
            subtalker_dosample=do_sample,
            repetition_penalty=1.05,
        )
        return [row.tolist() for row in codes]

    return speak


def main(kind: str, folder: str, num_threads: str) -> None:
    """Answer requests until the input ends."""
    torch.set_num_threads(int(num_threads))
    speak = {"own": load_own, "official": load_official}[kind](Path(folder))
    print(json.dumps({"torch": torch.__version__}), file=_ANSWERS)
    for line in sys.stdin:
        request = json.loads(line)
        before, wall = time.process_time(), time.perf_counter()
        codes = speak(request)
        cpu_s, wall_s = time.process_time() - before, time.perf_counter() - wall
        print(json.dumps({"codes": codes, "cpu_s": cpu_s, "wall_s": wall_s}), file=_ANSWERS)


if __name__ == "__main__":
    main(*sys.argv[1:])
