"""Language models of Transformers, and whether their data and settings fit them, asked before training begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from lit_fsdp.checkpoint.sharded import agree
from lit_fsdp.errors import get_first_line, suggest
from lit_fsdp.tasks.text.tokens import find_turn_end

_PIECE = 8  # tokens of each of the two documents of the probe
# Settings with which tokens see later ones, and what to set instead.
_BOTH_WAYS: dict[str, dict[Any, Any]] = {
    "is_decoder": {False: True},
    "causal": {False: True},  # of XLM
    "attn_type": {"bi": "uni"},  # of XLNet
    "use_bidirectional_attention": {True: False, "all": False},  # of Gemma
}


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """What a task makes of an architecture.

    Args:
        auto_class: Of Transformers, which builds it.
        name: In errors.
        expected: Which architectures there are of it, in errors.
    """

    auto_class: Any
    name: str
    expected: str


CAUSAL_LM = ModelKind(
    auto_class=AutoModelForCausalLM,
    name="causal language model",
    expected="one of a decoder, such as llama, qwen3 or gpt2",
)


def build_model(config: PreTrainedConfig, attention: str, kind: ModelKind = CAUSAL_LM) -> PreTrainedModel:
    """Return a model on the meta device, in float32, with that implementation of attention.

    ``auto`` and ``varlen`` give that of Transformers' choice, for :func:`choose_attention`.
    """
    implementation = None if attention in ("auto", "varlen") else attention
    try:
        with torch.device("meta"):
            model: PreTrainedModel = kind.auto_class.from_config(
                config, attn_implementation=implementation, dtype=torch.float32
            )
    except (ImportError, ValueError) as error:
        text = str(error)
        if text.startswith("Unrecognized configuration class"):
            raise _describe_wrong_type(config, kind) from error
        if "attention" not in text:
            raise
        got = f"attention: got {attention!r}"
        if " does not support an attention implementation" in text:
            raise ValueError(f"{got}: {text.split(maxsplit=1)[0]} does not have it; set auto") from error
        raise ValueError(f"{got}: {text.strip().splitlines()[0]}; set auto") from error
    _check_heads(model)
    if kind is CAUSAL_LM:
        _refuse_looking_ahead(model)
    return model


def _check_heads(model: PreTrainedModel) -> None:
    """Refuse heads that cannot share those of keys and values, of which many configurations have a number by default.

    Only where a layer makes keys of so many heads: some architectures do not use their default.
    """
    for layer in model.modules():
        config: Any = getattr(layer, "config", None)
        heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
        if not isinstance(heads, int) or not isinstance(shared, int) or shared < 1 or not heads % shared:
            continue
        if hasattr(layer, "k_proj") and getattr(layer, "num_key_value_groups", None) == heads // shared:
            raise ValueError(
                f"config.num_key_value_heads: got {shared}: the {heads} heads of num_attention_heads share them "
                f"evenly: expected a divisor, such as {math.gcd(heads, shared)}"
            )


def _refuse_looking_ahead(model: PreTrainedModel) -> None:
    """Refuse models whose tokens see later ones, as those of BERT and its kin do, which have a head for text too."""
    config = model.config.get_text_config()
    # Those of GPT-NeoX have a setting, but not the use of it; in the Japanese one no module keeps it either.
    if any(getattr(module, "is_causal", False) for module in model.modules()):
        return
    for name, ways in _BOTH_WAYS.items():
        if name == "is_decoder" and not any(hasattr(module, name) for module in model.modules()):
            continue
        if isinstance(value := getattr(config, name, None), str | bool) and value in ways:
            given, other = (str(one).lower() for one in (value, ways[value]))
            raise ValueError(
                f"model_type: got {config.model_type!r} with {name} {given}: its tokens would see those that they are "
                f"to predict: set config.{name}: {other}, or train an encoder such as BERT with MaskedLM"
            )


def _describe_wrong_type(config: PreTrainedConfig, kind: ModelKind) -> ValueError:
    return ValueError(
        f"model_type: got {config.model_type!r}: Transformers has no {kind.name} of this type: expected {kind.expected}"
    )


def check_data(config: PreTrainedConfig, data: Any, kind: ModelKind) -> None:
    """Refuse ids and positions that the model has no row for, which would fail inside a kernel."""
    text = config.get_text_config()
    if not hasattr(text, "vocab_size"):
        if type(config) in kind.auto_class._model_mapping:  # private, seen in transformers 5.23; CANINE
            raise ValueError(
                f"model_type: got {config.model_type!r}: it reads characters, and no tokens of a tokenizer: expected "
                f"{kind.expected}"
            )
        raise _describe_wrong_type(config, kind)
    if hasattr(data, "tokenizer") and len(data.tokenizer) > text.vocab_size:
        size = len(data.tokenizer)
        raise ValueError(
            f"config.vocab_size: got {text.vocab_size}: the tokenizer has {size} tokens: expected {size} or more, "
            "or a tokenizer that belongs to the model"
        )
    check_length(config, data)


def get_max_positions(config: PreTrainedConfig) -> int | None:
    """Return how many positions a configuration has; ``None`` where it does not say, or says -1, as that of XLNet."""
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if limit and limit > 0 else None


def check_length(config: PreTrainedConfig, data: Any) -> None:
    """Refuse rows that are longer than the model has positions."""
    limit, length = get_max_positions(config), getattr(data, "seq_length", None)
    if limit and length and length > limit:
        raise ValueError(
            f"config.max_position_embeddings: got {limit}, and data.seq_length {length}: rows are longer than "
            f"the model has positions; set seq_length to {limit} or less"
        )


def count_positions(model: nn.Module) -> int | None:
    """Return how many tokens a row may have, as far as the model says: RoBERTa's positions begin after its padding."""
    config: Any = model.config
    text, limit = config.get_text_config(), get_max_positions(config)
    if getattr(text, "position_embedding_type", None) not in (None, "absolute"):  # a table may be there, unused
        return limit
    tables = [part for name, part in model.named_modules() if "position" in name and isinstance(part, nn.Embedding)]
    starts = [
        table.padding_idx + 1 for table in tables if table.num_embeddings == limit and table.padding_idx is not None
    ]
    return limit - max(starts, default=0) if limit else None


def check_positions(model: nn.Module, data: Any) -> None:
    """Refuse rows that are longer than the model has positions for tokens, which would fail inside a kernel."""
    limit, length = count_positions(model), getattr(data, "seq_length", None)
    if limit and length and length > limit:
        raise ValueError(
            f"data.seq_length: got {length}: {type(model).__name__} begins to count positions after that of its "
            f"padding, so that rows have {limit} tokens at most; set seq_length to {limit} or less"
        )


@contextmanager
def explain_refused_inputs(model: nn.Module) -> Iterator[None]:
    """Turn what a model of Transformers refuses in its forward, such as texts without an end, into one line."""
    try:
        yield
    except ValueError as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        names = [frame.f_code.co_name for frame in frames]
        at = names.index("torch_compilable_check") if "torch_compilable_check" in names else len(names)
        last = frames[at - 1]  # which raised, or asked Transformers to
        is_its_own = names[at - 1] == "forward" and last.f_locals.get("self") in (model, model.base_model)
        if not is_its_own or not str(last.f_globals["__name__"]).startswith("transformers."):
            raise
        name, hint = type(model).__name__.removeprefix("FSDP"), ""
        if "<eos>" in str(error):
            hint = ": take a tokenizer that ends each text with the model's eos_token_id"
        raise ValueError(f"model: {name} refuses a batch: {get_first_line(error)}{hint}") from error


def weigh_aux_loss(model: Any, output: Any) -> Tensor | None:
    """Return what the routers of a mixture of experts add to a mean loss, ``None`` if there is nothing.

    Most models keep the factor as an attribute; in the configurations of DBRX and JetMoE it has other names.

    Raises:
        ValueError: Neither the model nor its configuration has a factor.
    """
    if getattr(output, "aux_loss", None) is None:
        return None
    holders = (model, model.config.get_text_config())
    found = (value for holder in holders for name, value in vars(holder).items() if name.endswith("aux_loss_coef"))
    if (factor := next(found, None)) is None:
        raise ValueError(
            f"config.output_router_logits: {type(model).__name__} returns a loss of its routers, and has no factor to "
            "weigh it by, a name that ends in aux_loss_coef; set it to false"
        )
    weighed: Tensor = factor * output.aux_loss
    return weighed


def check_generation(generation: Mapping[str, Any]) -> None:
    """Refuse settings that ``generate`` does not know, now instead of when training ends."""
    known = set(GenerationConfig().to_dict())
    for name in generation:
        if name not in known:
            hint = suggest(name, known, "expected an argument of Transformers' GenerationConfig")
            raise ValueError(f"generation.{name}: no setting of generate: {hint}")
    try:
        GenerationConfig(**generation)
    except (ValueError, TypeError) as error:
        raise ValueError(f"generation: {get_first_line(error)}") from error


def get_end_ids(model: Any, tokenizer: Any) -> int | list[int]:
    """Return what ends a text: of chat models several tokens, that of a turn among them."""
    ends: Any = getattr(model.generation_config, "eos_token_id", None)
    known = isinstance(ends, list) and tokenizer.eos_token_id in ends
    return add_turn_end(ends if known else int(tokenizer.eos_token_id), tokenizer)


def add_turn_end(ends: int | list[int], tokenizer: Any) -> int | list[int]:
    """Return what ends a text, the end of an answer added: base models learn it when they are trained to chat."""
    turn, known = find_turn_end(tokenizer), ends if isinstance(ends, list) else [ends]
    return ends if turn is None or turn in known else [*known, turn]


@torch.no_grad()
def check_packing(compute_logits: Callable[..., Tensor], vocab_size: int, device: torch.device, model: str) -> None:
    """Refuse a model that looks from one document of a packed row into another.

    Most models of Transformers tell documents apart by positions that start again; some do not, and train on the
    mixture without a word. So rows of two short documents run twice, half of them with other tokens in the first: the
    first logits of the second must not change by more than those of the other rows do, where experts are given other
    tokens beside these and round otherwise. Medians over rows, as rounding may send a token to another expert. Two
    forward passes of eight rows of 16 tokens; all ranks must call it.

    Args:
        compute_logits: From ``input_ids`` and ``position_ids`` [8, length] to logits [8, length, vocabulary].
        vocab_size: Ids are drawn below it.
        device: Of the inputs.
        model: Names it in the error.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (8, 2 * _PIECE), generator=generator).to(device)
    other = ids.clone()
    other[:4, :_PIECE] = (ids[:4, :_PIECE] + 1) % vocab_size  # of several, as some models look at the first row only
    positions = torch.arange(_PIECE, device=device).repeat(8, 2)
    try:
        first, second = (compute_logits(input_ids=i, position_ids=positions)[:, _PIECE].float() for i in (ids, other))
    except (TypeError, AttributeError) as error:  # of arguments that it has not, or of a mask that is none
        raise ValueError(
            f"data.packing: got true: {model} takes no packed rows: {error}; set data.packing: false, or another "
            "attention"
        ) from error
    differences = (first - second).abs().amax(-1) / first.std()  # [8]
    # As one rank found them, for all: they may round apart.
    change, rounding = agree(lambda: [float(part.median()) for part in (differences[:4], differences[4:])])[0]
    if change > max(1e-3, 4 * rounding):
        raise ValueError(
            f"data.packing: got true: {model} lets the documents of a packed row see each other (logits change by "
            f"{change:.1%} of their spread); set data.packing: false, or another attention"
        )
