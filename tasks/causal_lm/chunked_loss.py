"""Output head and loss, a chunk of tokens after another: the logits of all tokens never exist at once.

Each chunk is computed again in backward, so that of the logits only one chunk is alive, forward and backward. All of it
happens inside the head's own ``forward``: FSDP2 has its weight gathered there, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from lit_fsdp.sharding.tensor_parallel import INNER
from lit_fsdp.tasks.evaluation_mode import evaluation_mode
from lit_fsdp.tasks.text.batches import IGNORED

_Reduction = Literal["sum", "none"]  # the second keeps the loss of each token
_PROBE = (1, 8)  # rows and tokens on which both ways are compared
_SPREAD = 50.0  # of their logits


def install_chunked_loss(model: PreTrainedModel, num_chunks: int) -> None:
    """Let the output head of a model take ``labels`` and return a loss, in place. Before the model is sharded.

    Args:
        model: With an output head, and no loss besides that of its tokens.
        num_chunks: Into how many parts the tokens of a micro-batch are split.
    """
    head: Any = model.get_output_embeddings()
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise ValueError("loss_chunks: the loss of routers needs the whole model's output; set loss_chunks: 1")
    if head is None:
        raise ValueError(f"loss_chunks: {type(model).__name__} has no output head; set loss_chunks: 1")
    setattr(head, INNER, head.forward)  # which tensor parallelism replaces
    head.forward = partial(_run_head, head, partial(_finish_logits, config), num_chunks)
    head.num_loss_chunks = num_chunks  # for whoever plans


def sum_chunked_losses(
    model: PreTrainedModel, inputs: dict[str, Any], labels: Tensor, *, is_shifted: bool = False
) -> Tensor:
    """Return the sum of the losses of all target tokens.

    Args:
        model: After :func:`install_chunked_loss`.
        inputs: Of the model.
        labels: [batch, length]; -100 is no target.
        is_shifted: Whether the label of a token is what it predicts, not the token itself.
    """
    targets = labels if is_shifted else functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return _run_model(model, inputs, targets, "sum")


def list_chunked_losses(model: PreTrainedModel, inputs: dict[str, Any], targets: Tensor) -> Tensor:
    """Return the loss of each token, [batch, length] in float32.

    Args:
        model: After :func:`install_chunked_loss`.
        inputs: Of the model.
        targets: What each token predicts, [batch, length]; -100 is no target, and its loss is 0.
    """
    return _run_model(model, inputs, targets, "none").view(targets.shape)


def _run_model(model: PreTrainedModel, inputs: dict[str, Any], targets: Tensor, reduction: _Reduction) -> Tensor:
    head: Any = model.get_output_embeddings()
    hidden = _get_decoder(model, head)(**inputs, use_cache=False).last_hidden_state
    losses: Tensor = head(hidden, labels=targets, reduction=reduction)
    return losses


def _get_decoder(model: PreTrainedModel, head: nn.Module) -> Any:
    found = model.get_decoder()
    if found in (model, head):  # of Llama 4 and Mllama, and of ModernBERT's decoder; seen in transformers 5.24
        found = next(part for part in model.children() if isinstance(part, PreTrainedModel))
    return found


@torch.no_grad()
def check_chunked_loss(task: Any, model: PreTrainedModel) -> None:
    """Refuse a model that does something of its own between its head and its loss. All ranks must call it.

    Args:
        task: A LightningModule around the model, with ``sum_losses``.
        model: After :func:`install_chunked_loss`.
    """
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab_size, _PROBE, generator=torch.Generator().manual_seed(0)).to(task.device)
    head: Any = model.get_output_embeddings()
    # Logits as large as those of a trained model and larger, or a soft cap on them would not show.
    with evaluation_mode(task):
        spread = float(task(input_ids=ids).float().std())
        handle = head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * (_SPREAD / spread), *inputs[1:]))
        whole = float(task.sum_losses(SimpleNamespace(logits=task(input_ids=ids)), ids)[0])
        chunked = float(sum_chunked_losses(model, {"input_ids": ids}, ids))
        handle.remove()
    if not abs(chunked / whole - 1) < 0.01:  # rounding of half precision is less; not a number is never less
        name = type(model).__name__.removeprefix("FSDP")
        raise ValueError(
            f"loss_chunks: {name} computes its loss otherwise than from its head alone (sum {whole:.4f}, in chunks "
            f"{chunked:.4f}); set loss_chunks: 1"
        )


def _run_head(
    head: nn.Module,
    finish: Callable[[Tensor], Tensor],
    num_chunks: int,
    hidden: Tensor,
    labels: Tensor | None = None,
    reduction: _Reduction = "sum",
) -> Tensor:
    forward: Callable[[Tensor], Tensor] = getattr(head, INNER)
    if labels is None:
        return forward(hidden)

    def compute_losses(part: Tensor, targets: Tensor) -> Tensor:
        logits = finish(forward(part)).float()  # as the losses of Transformers
        return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction)

    parts = zip(hidden.flatten(0, 1).chunk(num_chunks), labels.flatten().chunk(num_chunks), strict=True)
    losses: list[Any] = [checkpoint(compute_losses, part, targets, use_reentrant=False) for part, targets in parts]
    return torch.stack(losses).sum() if reduction == "sum" else torch.cat(losses)


def _finish_logits(config: PreTrainedConfig, logits: Tensor) -> Tensor:
    """Do what families of models do with their logits, by the names of their settings."""
    if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits = logits * scale
    if (scaling := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / scaling
    for name in ("final_logit_softcapping", "logits_soft_cap"):  # Gemma, RecurrentGemma
        if (cap := getattr(config, name, None)) is not None:
            logits = torch.tanh(logits / cap) * cap
    return logits
