"""Clones with the official package, in an environment of its own: ``official_clone.py FOLDER OUT AUDIO REQUEST``.

``FOLDER`` holds a base model with codec and tokenizer, ``AUDIO`` is the recording, ``REQUEST`` is JSON with ``texts``,
``languages``, ``ref_text``, ``is_streaming`` and ``max_frames``. Codes and audio go to ``OUT`` as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration
from qwen_tts.inference.qwen3_tts_model import Qwen3TTSModel
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

GREEDY = {"do_sample": False, "subtalker_dosample": False, "repetition_penalty": 1.05}


def main(folder: str, out: str, audio: str, request: str) -> None:
    """Write what the official package makes of texts and a recording."""
    AutoConfig.register("qwen3_tts", Qwen3TTSConfig)
    AutoModel.register(Qwen3TTSConfig, Qwen3TTSForConditionalGeneration)
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def process(text: str, **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])}

    written: list[torch.Tensor] = []
    generate = model.generate

    def record(**options: Any) -> Any:
        codes, states = generate(**options)
        written.extend(codes)
        return codes, states

    model.generate = record
    asked = json.loads(request)
    wavs, _ = Qwen3TTSModel(model, process).generate_voice_clone(
        text=asked["texts"],
        language=asked["languages"],
        ref_audio=audio,
        ref_text=asked["ref_text"],
        x_vector_only_mode=asked["ref_text"] is None,
        non_streaming_mode=not asked["is_streaming"],
        max_new_tokens=asked["max_frames"] + 1,
        **GREEDY,
    )
    spoken = [{"codes": c.tolist(), "audio": w.tolist()} for c, w in zip(written, wavs, strict=True)]
    Path(out).write_text(json.dumps(spoken))


if __name__ == "__main__":
    main(*sys.argv[1:])
