"""The tokenizer: loaded, or trained on the run's own documents."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fsdp.errors import nearest
from lit_fsdp.files import refuse_special_file
from lit_fsdp.tasks.pretrained import load_stored_tokenizer, read_tokenizer_files

END = "<|endoftext|>"
PAD = "<|pad|>"
MASK = "<|mask|>"
MIN_VOCAB_SIZE = 256 + 2  # every byte, and the two above


@dataclass(frozen=True, kw_only=True)
class TrainTokenizer:
    """Train a byte-level BPE tokenizer on the training source, held-out documents included.

    It has two special tokens: ``<|endoftext|>`` begins nothing and ends every document, ``<|pad|>`` fills up.

    Args:
        vocab_size: How many tokens to end up with, at least 258. Small data may not yield as many.
        mask_token: Add ``<|mask|>`` to the special tokens, for a masked language model.
    """

    vocab_size: int = 4096
    mask_token: bool = False

    def __post_init__(self) -> None:
        if self.vocab_size < MIN_VOCAB_SIZE:
            raise ValueError(f"vocab_size {self.vocab_size} is below {MIN_VOCAB_SIZE}, 256 bytes and 2 special tokens")


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a folder or of a model on the Hub. Its end token must be known."""
    tokenizer = load_stored_tokenizer(name)
    if get_end_id(tokenizer) is None:
        raise ValueError(
            f"tokenizer: got {name!r}: it has no eos_token to end documents with; set it in tokenizer_config.json"
        )
    return tokenizer


def read_chat_template(setting: str) -> str:
    """Return the text of a chat template, given as text or as the path of a file."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    text, where = setting, "the text"
    if "{" not in setting:
        path = Path(setting).expanduser()
        refuse_special_file(path, f"chat_template: got {setting!r}")
        if not path.is_file():
            near = nearest(path.name, [other.name for other in path.parent.glob("*") if other.is_file()])
            hint = f"did you mean {path.parent / near}?" if near else "expected a .jinja file, or the template's text"
            raise ValueError(f"chat_template: got {setting!r}: no such file, seen from {Path.cwd()}: {hint}")
        text, where = path.read_text(), str(path)
    try:
        render_jinja_template(conversations=[], chat_template=text)  # compiles it as Transformers will
    except TemplateSyntaxError as error:
        raise ValueError(f"chat_template: {where} is not valid Jinja: line {error.lineno}: {error.message}") from error
    return text


def train_tokenizer(texts: Iterable[str], setting: TrainTokenizer) -> Any:
    """Return a tokenizer trained on texts. The same texts in the same order give the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=setting.vocab_size,
        special_tokens=[END, PAD, *([MASK] if setting.mask_token else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    names = {
        "bos_token": END,
        "eos_token": END,
        "pad_token": PAD,
        **({"mask_token": MASK} if setting.mask_token else {}),
    }
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def get_end_id(tokenizer: Any) -> int | None:
    """Return the id that ends a text: the end token, or of an encoder that has none the one between texts."""
    found: int | None = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return found


def get_pad_id(tokenizer: Any) -> int:
    """Return the id to fill rows up with: the pad token, or where there is none the end token."""
    return int(get_end_id(tokenizer) if tokenizer.pad_token_id is None else tokenizer.pad_token_id)  # type: ignore[arg-type]


def identify_tokenizer(tokenizer: Any) -> str:
    """Return a hash of all files the tokenizer consists of, its chat template included."""
    return hashlib.sha256(repr(read_tokenizer_files(tokenizer)).encode()).hexdigest()
