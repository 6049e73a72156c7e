"""A Whisper model with random weights and a tokenizer of bytes, as a folder like those on the Hub."""

import json
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"),
    *("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)


def save_whisper(folder: Path) -> Path:
    """Write the model and all that it is used with; what it hears is the same every time, and nonsense."""
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, *SPECIAL])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = WhisperTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    end, start = vocabulary["<|endoftext|>"], vocabulary["<|startoftranscript|>"]
    ids = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end, "decoder_start_token_id": start}
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": len(vocabulary)}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    torch.manual_seed(3)  # one with which it hears letters
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **ids))
    model.generation_config = GenerationConfig(
        **ids,
        max_new_tokens=6,
        is_multilingual=True,
        lang_to_id={name: vocabulary[name] for name in ("<|en|>", "<|de|>")},
        task_to_id={name: vocabulary[f"<|{name}|>"] for name in ("transcribe", "translate")},
        no_timestamps_token_id=vocabulary["<|notimestamps|>"],
        suppress_tokens=[vocabulary[name] for name in SPECIAL[1:]],
    )
    model.save_pretrained(folder)
    return folder
