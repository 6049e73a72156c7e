"""Reads a whole model onto a tape: embeddings, blocks, head and loss, with the FSDP units around them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from lit_fsdp.planning.closed_form.block_reader import read_block, read_embedding
from lit_fsdp.planning.closed_form.image_reader import (
    count_tokens,
    find_embeddings,
    list_parents,
    read_classifier,
    read_patches,
    read_pixels,
    read_tokens,
)
from lit_fsdp.planning.closed_form.linear_reader import read_linear
from lit_fsdp.planning.closed_form.norm_reader import is_norm, read_norm
from lit_fsdp.planning.closed_form.overrides import keeps_gradients, list_overrides
from lit_fsdp.planning.closed_form.reader import (
    Reader,
    UnreadableModuleError,
    check_dropouts,
    get_dropout,
    get_forward,
    list_filled,
)
from lit_fsdp.planning.closed_form.tape import FLOAT32, INDEX, Tape
from lit_fsdp.sharding.wrap import Unit, find_around, iterate_blocks

_OWN_MASK = r"\battention_mask = torch\.ones"  # which only its values could tell to be none
_DROPOUTS = ("drop", "emb_dropout", "embed_dropout", "embedding_dropout", "dropout")  # of embeddings


@dataclass
class ModelReader:
    """Reads one model.

    Args:
        model: The root of the plan.
        plan: Its units.
        recomputed: Names of the blocks that are computed again in backward.
        reader: For the modules inside.
    """

    model: nn.Module
    plan: Sequence[Unit]
    recomputed: Sequence[str]
    reader: Reader
    blocks: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = {name: i for i, name in enumerate(iterate_blocks(self.plan))}
        self._names = {id(module): name for name, module in self.model.named_modules()}
        self._units = {name: i for i, unit in enumerate(self.plan) for name in unit.names}
        self._root = next(i for i, unit in enumerate(self.plan) if unit.kind == "root")

    def read(self) -> Tape:
        """Add the forward of the model, and return the tape.

        Raises:
            UnreadableModuleError: Some of it has no rule.
        """
        tape = self.reader.tape
        owner, replaced = list_overrides(self.model)
        if replaced:
            raise UnreadableModuleError(owner, f"overrides {', '.join(replaced)}, which the closed form cannot see")
        if keeps_gradients(self.model):
            raise UnreadableModuleError(
                type(self.model).__name__, "keeps gradients through the next forward (no releases_gradients)"
            )
        if not self.blocks:
            raise UnreadableModuleError(type(self.model).__name__, "no blocks")
        for unit in self.plan:
            if inner := [n for n in unit.names if find_around(n, self.blocks) is not None]:
                raise UnreadableModuleError(inner[0], "a unit inside a block")
        tape.mark("enter_unit", self._root, tape.add_value(0))
        read_own: Any = getattr(self.model, "read_step", None)
        end = self._read_stack() if read_own is None else read_own(self)
        tape.mark("leave_unit", self._root, end)
        if self.recomputed:  # which keeps what it is called with; else they are gone when memory is at its largest
            tape.tables |= tape.passed
        return tape

    def run(self, module: nn.Module, x: int, reader: Reader | None = None) -> int:
        """Add a block, an embedding, a norm or a linear layer, with its unit if it is one, and return its output.

        For models that read their own step.
        What goes into an embedding may be anything, as ids are of the batch.

        Raises:
            UnreadableModuleError: It has no rule.
        """
        name, reader = self._names[id(module)], reader or self.reader
        if name in self.blocks:
            return self.read_block(name, x, reader)
        with self.unit(name, x) as leave:
            if isinstance(module, nn.Embedding):
                y = read_embedding(reader, module, x)
            else:
                y = (read_norm if is_norm(module) else read_linear)(reader, name, module, x)
            leave(y)
        return y

    def read_block(self, name: str, x: int, reader: Reader | None = None) -> int:
        """Add one of the blocks, with its unit, and return its output.

        Raises:
            UnreadableModuleError: It has no rule.
        """
        tape, is_recomputed = self.reader.tape, name in self.recomputed
        reader = reader or self.reader
        # A unit has ended its backward when the gradients of all that went in are there, if any has one.
        given = x if reader.context is None or tape.needs_grad[x] else reader.context.value
        with self.unit(name, given) as leave:
            if is_recomputed:
                tape.mark("enter_block", self.blocks[name], x)
            with tape.part("residual stream"):
                y = read_block(reader, name, self.model.get_submodule(name), x)
            if is_recomputed:
                tape.mark("leave_block", self.blocks[name], y)
            leave(y)
        tape.release(x)  # by who called it
        return y

    @contextmanager
    def unit(self, name: str, x: int, last: str | None = None) -> Any:
        """Put marks around what a module does, if it is one of a unit; ``last`` is the last module of that."""
        index = self._units.get(name)
        if index is not None:
            self.reader.tape.mark("enter_unit", index, x)

        def leave(y: int) -> None:
            last_index = self._units.get(last or name)
            if index is not None and last_index == index:
                self.reader.tape.mark("leave_unit", index, y)

        yield leave

    def _read_stack(self) -> int:
        """Add a stack of blocks between embeddings, or patches, and a head; return the loss."""
        convolutions = [name for name, m in self.model.named_modules() if isinstance(m, nn.Conv2d)]
        base = self._find_base()
        x = self._read_patches(base, convolutions) if convolutions else self._read_embeddings(base)
        for name in self.blocks:
            x = self.read_block(name, x)
        with self.reader.tape.part("head and loss"):
            return self._read_classifier(base, x) if convolutions else self._read_head(base, x)

    def _find_base(self) -> str:
        """Return the name of the module around the list of blocks, and what else they need."""
        around = {name.rpartition(".")[0].rpartition(".")[0] for name in self.blocks}
        if len(around) > 1:
            raise UnreadableModuleError(", ".join(sorted(around)), "several stacks of blocks")
        base = around.pop()
        while base and len(list_filled(module := self.model.get_submodule(base))) == 1:
            check_dropouts(base, module, ())
            base = base.rpartition(".")[0]
        return base

    def _read_embeddings(self, base: str) -> int:
        reader, tape = self.reader, self.reader.tape
        outside = {
            name: module
            for name, module in self.model.get_submodule(base).named_modules(prefix=base)
            if isinstance(module, nn.Embedding) and not any(name.startswith(f"{b}.") for b in self.blocks)
        }
        if len(outside) not in (1, 2):
            raise UnreadableModuleError(base, f"{len(outside)} embeddings")
        # Labels as well, and positions or padding.
        tape.batch_bytes = (3 if reader.is_masked else 2) * reader.num_tokens * INDEX
        ids = tape.add_value(0)
        parts = []
        for i, (name, module) in enumerate(outside.items()):
            # Positions are those of one row, but where they depend on what is padded.
            is_each = i == 0 or "attention_mask" in inspect.signature(type(module).forward).parameters
            rows = reader.rows if is_each else 1
            with self.unit(name, ids) as leave:
                parts.append(read_embedding(replace(reader, rows=rows), module, ids))
                leave(parts[-1])
        x = parts[0] if len(parts) == 1 else tape.add_sum(*parts)
        if len(parts) > 1:  # the model has names for them
            tape.hold(*parts)
        if getattr(next(iter(outside.values())), "embed_scale", None) is not None:
            x = tape.add_pointwise("mul", x)
        around = self.model.get_submodule(base)
        for key, child in around.named_children():
            inside = [f"{base}.{key}" if base else key, *(f"{base}.{key}.{n}" for n, _ in child.named_modules() if n)]
            is_known = is_norm(child) or any(n in outside or n in self.blocks for n in inside)
            if not is_known and any(True for _ in child.parameters()):
                raise UnreadableModuleError(base, f"{key} ({type(child).__name__}) beside its blocks")
        check_dropouts(base, around, _DROPOUTS)
        if "super().forward" in get_forward(around):
            raise UnreadableModuleError(base, f"a {type(around).__name__}, part of whose forward is that of its parent")
        if re.search(_OWN_MASK, get_forward(around)):
            raise UnreadableModuleError(base, "a mask of attention that it makes for every batch")
        used = [name for name in _DROPOUTS if f"self.{name}" in get_forward(around)]
        return tape.add_dropout(x, get_dropout(around, *used))

    def _read_patches(self, base: str, convolutions: Sequence[str]) -> int:
        reader, tape = self.reader, self.reader.tape
        if len(convolutions) > 1:
            raise UnreadableModuleError(convolutions[1], "a second convolution")
        name = convolutions[0]
        around = find_embeddings(self.model, name)
        if around is None or around.rpartition(".")[0] != base:
            raise UnreadableModuleError(name, f"patches that {base} makes tokens of")
        convolution: Any = self.model.get_submodule(name)
        embeddings = self.model.get_submodule(around)
        num_patches = reader.length - count_tokens(embeddings, convolution.out_channels)
        owners = [n for n in (name, *list_parents(name)) if n in self._units]
        if len(owners) > 1:
            raise UnreadableModuleError(name, f"a unit inside {owners[1]}")
        x = read_pixels(reader, convolution, num_patches)
        is_inside = not owners or not f"{around}.".startswith(f"{owners[0]}.")
        with self.unit(owners[0] if owners else name, x) as leave:
            y = read_patches(reader, convolution, x, num_patches)
            if is_inside:
                leave(y)
            embedded = read_tokens(reader, around, embeddings, y, num_patches)
            if not is_inside:
                leave(embedded)
        tape.hold(embedded)  # as does the model around the blocks
        return embedded

    def _find_final_norm(self, base: str) -> tuple[str, Any]:
        prefix = f"{base}." if base else ""
        norms = [(f"{prefix}{key}", m) for key, m in self.model.get_submodule(base).named_children() if is_norm(m)]
        if len(norms) != 1:
            raise UnreadableModuleError(base, f"{len(norms)} norms beside its blocks")
        return norms[0]

    def _read_head(self, base: str, x: int) -> int:
        reader, tape = self.reader, self.reader.tape
        norm_name, norm = self._find_final_norm(base)
        head, config = self._find_head()
        head_name = self._names[id(head)]
        index = self._units.get(norm_name)
        is_shared = index is not None and index == self._units.get(head_name)
        with self.unit(norm_name, x, head_name if is_shared else None) as leave:
            y = read_norm(reader, norm_name, norm, x)
            if not is_shared:
                leave(y)
        num_chunks = getattr(head, "num_loss_chunks", 1)
        if num_chunks == 1:
            tape.hold(y)
            read = partial(read_linear, reader, head_name, head, y)
        else:
            read = partial(self._read_chunks, head_name, head, y, num_chunks)
        if is_shared:  # entered before the norm, and reduced once
            logits = read()
            tape.mark("leave_unit", index, logits)  # type: ignore[arg-type]
        else:
            with self.unit(head_name, y) as leave:
                logits = read()
                leave(logits)
        if num_chunks > 1:
            return logits  # which is the loss
        if getattr(config, "final_logit_softcapping", None) is not None:
            logits = tape.add_pointwise("tanh", tape.add_pointwise("div", logits), saves_output=True)
            logits = tape.add_pointwise("mul", logits)
        if getattr(config, "logit_scale", None) is not None:  # Cohere
            logits = tape.add_pointwise("mul", logits)
        return self._read_loss(logits)

    def _read_chunks(self, name: str, head: Any, x: int, num_chunks: int) -> int:
        """Add head and loss in chunks, each computed again in backward."""
        reader, tape = self.reader, self.reader.tape
        if not isinstance(head, nn.Linear):
            raise UnreadableModuleError(name, f"loss chunks over a {type(head).__name__}")
        rows = -(-reader.num_tokens // min(num_chunks, reader.num_tokens))
        wide = rows * head.out_features * FLOAT32
        weights = reader.list_trained(head.weight, head.bias)
        # Of a chunk. In the last one, all of the gradient of ``x`` but its part is there; in the second, that of two
        # chunks, but also the sum of the weight's gradients, as the first is a view and takes no sum in place.
        part = rows * head.in_features * tape.itemsize if tape.needs_grad[x] else 0
        last = 3 * wide - part
        second = 2 * sum(size for _, size in weights) - (-(-reader.num_tokens // rows) - 2) * part
        flops = 2 * reader.num_tokens * head.in_features * head.out_features
        # As of the loss of all logits, but forward twice: its cast, the softmax and the choice of the targets.
        cast = 0 if tape.itemsize == FLOAT32 else tape.itemsize + FLOAT32
        logits = reader.num_tokens * head.out_features
        return tape.add(
            "chunked_loss",
            (x,),
            FLOAT32,
            saves=(x,),
            weights=weights,
            forward_temp=2 * wide,
            backward_temp=max(last, second),
            flops=flops,
            backward_flops=flops * (bool(weights) + tape.needs_grad[x]),
            again_flops=flops,
            forward_moved=logits * (3 * FLOAT32 + cast),
            backward_moved=logits * (3 * FLOAT32 + cast + 5 * FLOAT32 + cast),
        )

    def _find_head(self) -> tuple[Any, Any]:
        for module in self.model.modules():
            find: Any = getattr(module, "get_output_embeddings", None)
            try:
                head = None if find is None else find()
            except (NotImplementedError, AttributeError):
                continue  # Transformers' way of saying that a model has none
            if head is not None:
                return head, getattr(module, "config", None)
        raise UnreadableModuleError(type(self.model).__name__, "no output head")

    def _read_loss(self, logits: int) -> int:
        """Add cross-entropy in float32, as the loss of causal models in Transformers."""
        tape = self.reader.tape
        wide = tape.add_cast(logits, tape.itemsize, FLOAT32)
        tape.hold(logits, wide)
        logs = tape.add_pointwise("log_softmax", wide, saves_output=True)
        return tape.add("nll_loss", (logs,), FLOAT32, saves=(logs,))

    def _read_classifier(self, base: str, x: int) -> int:
        norm_name, norm = self._find_final_norm(base)
        if len(children := list_filled(self.model.get_submodule(base))) != 3:
            raise UnreadableModuleError(base, f"blocks beside {', '.join(children)}")
        with self.unit(norm_name, x) as leave:
            y = read_norm(self.reader, norm_name, norm, x)
            leave(y)
        self.reader.tape.hold(y)
        parent = base.rpartition(".")[0]
        return self._read_loss(read_classifier(self.reader, parent, self.model.get_submodule(parent), y))
