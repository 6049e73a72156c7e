"""The tokenizer of a checkpoint in a GGUF file, from its ``tokenizer.json``.

llama.cpp has two that matter here: byte-level BPE ("gpt2"), which cuts text by a rule known by a name, and that of
SentencePiece ("llama"), which joins what has the highest score: here, what was merged first.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

_FILE = "tokenizer.json"
_READ = (_FILE, "tokenizer_config.json", "config.json", "generation_config.json", "chat_template.jinja")
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_RULES = {_LLAMA_3: "llama-bpe", _LLAMA_3.replace("{1,3}", ""): "qwen2"}  # llama.cpp's names for them


def check_tokenizer(files: Mapping[str, str | bytes], vocab_size: int) -> None:
    """Refuse a tokenizer that llama.cpp has nothing like.

    Raises:
        ValueError: With what it is.
    """
    if _FILE not in files:
        raise ValueError(f"gguf: the checkpoint has no {_FILE}, which a GGUF file is made of: export it without gguf")
    spec = json.loads(files[_FILE])
    kind = spec["model"].get("type", "BPE")
    if kind != "BPE":
        raise ValueError(f"gguf: the tokenizer is of type {kind}: expected BPE; export it without gguf")
    if not _is_sentencepiece(spec) and _name_rule(spec) is None:
        raise ValueError(
            "gguf: the tokenizer cuts text by a rule that is none of GPT-2, Llama 3 and Qwen 2: export it without gguf"
        )
    num_tokens = Tokenizer.from_str(_read_text(files)).get_vocab_size()
    if num_tokens > vocab_size:
        raise ValueError(f"gguf: the tokenizer has {num_tokens} tokens, the model only {vocab_size}: expected no more")


def add_tokenizer(writer: GGUFWriter, files: Mapping[str, str | bytes], vocab_size: int) -> None:
    """Add tokens with their kinds, merges or scores, special tokens and the template of chats."""
    import gguf

    spec, tokenizer = json.loads(files[_FILE]), Tokenizer.from_str(_read_text(files))
    added = {token["id"]: token for token in spec.get("added_tokens", ())}
    tokens, kinds = [], []
    for i in range(vocab_size):
        token = tokenizer.id_to_token(i)
        tokens.append(f"[PAD{i}]" if token is None else token)
        kinds.append(_find_kind(token, added.get(i), spec))
    is_sentencepiece = _is_sentencepiece(spec)
    writer.add_tokenizer_model("llama" if is_sentencepiece else "gpt2")
    writer.add_tokenizer_pre("default" if is_sentencepiece else _name_rule(spec) or "")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if is_sentencepiece:
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(spec["model"]["merges"]):
            ranks.setdefault("".join(pair.split(" ") if isinstance(pair, str) else pair), rank)
        writer.add_token_scores([-float(ranks.get(token, 0)) for token in tokens])
        writer.add_add_space_prefix(_adds_space(spec))
    with tempfile.TemporaryDirectory() as name:
        for file in _READ:
            if file in files:
                content = files[file]
                Path(name, file).write_bytes(content if isinstance(content, bytes) else content.encode())
        special = gguf.SpecialVocab(name, load_merges=not is_sentencepiece, n_vocab=vocab_size)
    # As it encodes, whatever its configuration says.
    encoded, ids = tokenizer.encode("a").ids, special.special_token_ids
    special.add_special_token = {
        "bos": "bos" in ids and encoded[0] == ids["bos"],
        "eos": "eos" in ids and encoded[-1] == ids["eos"],
    }
    special.add_to_gguf(writer, quiet=True)


def _find_kind(token: str | None, added: Mapping[str, Any] | None, spec: Mapping[str, Any]) -> int:
    from gguf import TokenType

    if token is None:
        return TokenType.UNUSED
    if token == spec["model"].get("unk_token"):
        return TokenType.UNKNOWN
    if added is not None:
        return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    is_byte = _is_sentencepiece(spec) and len(token) == 6 and token.startswith("<0x")
    return TokenType.BYTE if is_byte else TokenType.NORMAL


def _is_sentencepiece(spec: Mapping[str, Any]) -> bool:
    return bool(spec["model"].get("byte_fallback"))


def _adds_space(spec: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text: by a normalizer or, as Transformers 5 saves it, by Metaspace."""
    rule = spec.get("pre_tokenizer") or {}
    steps = [step for step in rule.get("pretokenizers", [rule]) if step.get("type") == "Metaspace"]
    # Files of before tokenizers 0.15 have a switch, which is on by default.
    schemes = [step.get("prepend_scheme", "first" if step.get("add_prefix_space", True) else "never") for step in steps]
    return any(scheme != "never" for scheme in schemes) or '"Prepend"' in json.dumps(spec.get("normalizer"))


def _name_rule(spec: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of the rule by which byte-level BPE cuts text before it merges."""
    rule = spec.get("pre_tokenizer") or {}
    steps = rule.get("pretokenizers", [rule])
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return "gpt-2" if steps[0].get("use_regex", True) and not steps[0].get("add_prefix_space") else None
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"] or steps[1].get("use_regex", True):
        return None
    return _RULES.get(steps[0]["pattern"].get("Regex", ""))


def _read_text(files: Mapping[str, str | bytes]) -> str:
    content = files[_FILE]
    return content.decode() if isinstance(content, bytes) else content
