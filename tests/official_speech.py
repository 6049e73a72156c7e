"""Speaks with the official package, in an environment of its own: ``python official_speech.py FOLDER OUT``.

The folder was written by ``export-voice``; what is spoken goes to ``OUT`` as JSON.
"""

import json
import sys
from pathlib import Path

import torch
from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration
from transformers import AutoConfig, AutoModel

GREEDY = {"do_sample": False, "subtalker_dosample": False, "repetition_penalty": 1.05}


def main(folder: str, out: str, texts: str, speakers: str, max_frames: str) -> None:
    """Write the codes of texts (lists of ids), spoken by built-in voices."""
    AutoConfig.register("qwen3_tts", Qwen3TTSConfig)
    AutoModel.register(Qwen3TTSConfig, Qwen3TTSForConditionalGeneration)
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    ids = [torch.tensor([row]) for row in json.loads(texts)]
    names = json.loads(speakers)
    options = {"languages": ["Auto"] * len(names), "non_streaming_mode": True, "max_new_tokens": int(max_frames) + 1}
    codes, _ = model.generate(input_ids=ids, speakers=names, **options, **GREEDY)
    wavs, _ = model.speech_tokenizer.decode([{"audio_codes": row} for row in codes])
    spoken = [{"codes": c.tolist(), "audio": w[::480].tolist()} for c, w in zip(codes, wavs, strict=True)]
    Path(out).write_text(json.dumps(spoken))


if __name__ == "__main__":
    main(*sys.argv[1:])
