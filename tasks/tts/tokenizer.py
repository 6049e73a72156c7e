"""The text tokenizer: that of a model, or one of plain bytes that needs no download."""

from __future__ import annotations

from typing import Any

from lit_fsdp.tasks.pretrained import load_stored_tokenizer, quiet_transformers

BYTES = "bytes"
_SPECIAL = ("<|im_start|>", "<|im_end|>", "assistant", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a folder or of a model on the Hub, or the one of bytes.

    Raises:
        ValueError: There is none.
    """
    if name == BYTES:
        return build_byte_tokenizer()
    with quiet_transformers():  # it warns of config.json, whose type of model it does not know and need not
        return load_stored_tokenizer(name)


def build_byte_tokenizer() -> Any:
    """Return a tokenizer with an id for each byte, and the special tokens of speech models after them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<tts_pad>")
