"""``fully_shard`` over planned units: bottom-up, with the order in which units are prefetched."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lit_fsdp.adapters.layers import iterate_casting
from lit_fsdp.sharding.buffers import widen_norms
from lit_fsdp.sharding.low_bit import (
    GatherBits,
    LowBitAllGather,
    LowBitReduceScatter,
    ReduceBits,
    check_bits,
    check_gathered,
    check_reduced,
)
from lit_fsdp.sharding.mixed_precision import cast_inputs
from lit_fsdp.sharding.scalars import hold_scalars, reduce_after_backward, replicate_scalars
from lit_fsdp.sharding.torch_internals import (
    get_gathered,
    get_shard,
    iterate_sharded,
    let_gathers_wait,
    make_shard,
    share_groups_after_forward,
    wait_for_gathers,
)
from lit_fsdp.sharding.wrap import Unit

STEPS = ("training_step", "validation_step", "test_step", "predict_step", "generate")
_WITH_STEPS: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What happens to a unit's parameters between their uses.

    Args:
        reshard_after_forward: ``true`` frees gathered parameters after forward and gathers them again in
            backward. ``false`` keeps them (gradients and optimizer state stay sharded): one gather less per unit,
            for all parameters in memory. A number keeps them split over that many ranks, such as those of one
            node.
        reshard_after_backward: ``false`` keeps them after backward too, until the optimizer steps: each unit is
            gathered once in a step, not once in each micro-batch, and steps may differentiate inside. Needs
            ``reshard_after_forward: false``, and hardly more memory than that.
        forward_prefetch: How many units ahead to gather in forward, explicitly. 0 leaves it to the order in
            which the host issues them.
        backward_prefetch: The same in backward, 1 or more. Each unit ahead is held gathered.
        reduce_scatter_max_input_buffers: Of how many units the gradients may be on their way at once. 1 waits for
            those of one unit before those of the next are copied for sending. Each more keeps the gradients of another
            unit in memory, and helps only where reductions take longer than the compute beside them.
        no_sync: In all micro-batches of a step but the last, add gradients up without reducing them: one
            reduce-scatter per unit and micro-batch less, for all gradients at full size in memory.
        gather_bits: ``8`` gathers parameters in blocks of 256 rounded to 8 bits, for slow links; steps compute with
            rounded weights, and shards stay exact. ``null`` sends all bits.
        reduce_bits: In how many bits gradients are sent to be reduced: ``16`` (bfloat16) or ``8`` (blocks). Sums are in
            float32. ``null`` sends the dtype of reduction.
    """

    reshard_after_forward: bool | int = True
    reshard_after_backward: bool = True
    forward_prefetch: int = 0
    backward_prefetch: int = 1
    reduce_scatter_max_input_buffers: int = 1
    no_sync: bool = False
    gather_bits: GatherBits | None = None
    reduce_bits: ReduceBits | None = None

    def check(self, num_shards: int) -> None:
        """Raise a ``ValueError`` for what ``num_shards`` ranks cannot do."""
        size = self.reshard_after_forward
        if not isinstance(size, bool) and not (1 < size < num_shards and num_shards % size == 0):
            fits = [n for n in range(2, num_shards) if num_shards % n == 0]
            near = f"one of {fits}" if fits else "true or false"
            raise ValueError(
                f"sharding.reshard_after_forward: got {size}: it must divide the {num_shards} shards and be "
                f"neither 1 nor all of them: expected {near}"
            )
        if not self.reshard_after_backward and size is not False:
            raise ValueError(
                f"sharding.reshard_after_backward: got false with reshard_after_forward {str(size).lower()}: what is "
                "freed after forward is gathered again; set reshard_after_forward to false too"
            )
        if self.forward_prefetch < 0:
            raise ValueError(f"sharding.forward_prefetch: got {self.forward_prefetch}: expected 0 or more")
        if self.backward_prefetch < 1:
            raise ValueError(
                f"sharding.backward_prefetch: got {self.backward_prefetch}: torch always gathers one unit ahead "
                "in backward: expected 1 or more"
            )
        if self.reduce_scatter_max_input_buffers < 1:
            raise ValueError(
                f"sharding.reduce_scatter_max_input_buffers: got {self.reduce_scatter_max_input_buffers}: expected 1 "
                "or more, such as 2"
            )
        check_bits(self.gather_bits, self.reduce_bits)
        if self.gather_bits is not None and not isinstance(size, bool):
            raise ValueError(
                f"sharding.gather_bits: got {self.gather_bits} with reshard_after_forward {size}: backward would "
                "gather rounded weights, and round them once more; set reshard_after_forward to true or false"
            )

    def keep_least(self) -> Sharding:
        """Return the same with nothing kept between uses that another way would free."""
        return replace(self, reshard_after_forward=True, reshard_after_backward=True, no_sync=False)


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compile every block by itself with ``torch.compile``; equal blocks share one compilation.

    Args:
        backend: Of ``torch.compile``.
        mode: Of ``torch.compile``, such as ``max-autotune-no-cudagraphs``.
        fullgraph: Fail instead of leaving compiled code where Python cannot be traced.
        dynamic: Compile for changing shapes at once. ``null`` does for data whose rows are padded to other lengths in
            each batch, and else when a shape has changed.
        recompile_limit: How many compilations the code of one block may have, such as for inputs with and without
            a gradient. Inputs that fit none of them then run uncompiled, and a warning says so.
    """

    backend: str = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    recompile_limit: int = 8

    def check(self) -> None:
        """Refuse a backend or mode that torch does not know, and a limit that would compile nothing."""
        if self.recompile_limit < 1:
            raise ValueError(f"compile.recompile_limit: got {self.recompile_limit}: expected 1 or more")
        known = torch.compiler.list_backends(exclude_tags=())
        if self.backend not in known:
            usual = ", ".join(torch.compiler.list_backends())
            raise ValueError(f"compile.backend: got {self.backend!r}: expected one such as {usual}")
        try:
            torch.compile(nn.Identity(), **vars(self))  # compiles nothing yet
        except RuntimeError as error:
            raise ValueError(f"compile.mode: got {self.mode!r}: torch says: {error}") from error


def compile_blocks(
    model: nn.Module, settings: Compile, blocks: Sequence[str], *, has_changing_lengths: bool = False
) -> None:
    """Compile blocks in place, lazily at their first call. Between activation checkpointing and sharding.

    With ``has_changing_lengths`` the length of the rows, [batch, length, ...], is no constant of what is compiled, so
    that a second length is no second compilation. ``dynamic: true`` would do the same for all sizes, and take longer.
    """
    if not blocks:
        raise ValueError("compile: no blocks were found to compile; name their classes in wrap.module_classes")
    for name in blocks:
        block = model.get_submodule(name)
        block.compile(**vars(settings))
        if has_changing_lengths and settings.dynamic is None:
            block.register_forward_pre_hook(_mark_lengths(), with_kwargs=True)


def _mark_lengths() -> Any:
    """Return a hook that tells the compiler which sizes of the inputs of a block are the length of the rows.

    It runs after that of FSDP2, which makes new tensors of inputs that need a gradient.
    """
    places: dict[tuple[int, int], list[int]] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mark(_: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = list(enumerate(tree_leaves((args, kwargs))))
        tensors = {(i, leaf.ndim): leaf for i, leaf in leaves if isinstance(leaf, Tensor)}
        length = next((x.shape[1] for x in tensors.values() if x.ndim > 2), 0)
        for key, tensor in tensors.items():
            if length > 1 and key not in places:  # a size of 1 is always a constant
                # Others that happen to be as large turn out to be constants. What is marked must stay the same.
                places[key] = [i for i, size in enumerate(tensor.shape) if size == length]
            if found := places.get(key):
                torch._dynamo.maybe_mark_dynamic(tensor, found)

    return mark


def shard_model(
    model: nn.Module,
    plan: Sequence[Unit],
    *,
    mesh: DeviceMesh,
    sharding: Sharding,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    leaves_whole: bool = True,
) -> None:
    """Shard every unit of the plan in place, inner units first and the root last.

    Afterwards parameters are DTensors, on the meta device if they were before; on one rank, but those that
    ``list_whole`` names, unless ``leaves_whole`` is false. The dimensions of the mesh are ``("shard",)`` or
    ``("replicate", "shard")``.
    """
    modules = dict(model.named_modules())
    whole: set[nn.Parameter] = set()
    if leaves_whole:
        offloads = isinstance(offload_policy, CPUOffloadPolicy)
        whole = list_whole(model, dist.get_world_size(), offloads, mp_policy.param_dtype, sharding)
    _refuse_states(model, whole)
    _check_dtypes(model, plan, whole)
    check_wire(model, plan, sharding, mp_policy)
    _arrange_memory(model, whole, mesh.device_type)
    widen_norms(model, mp_policy.param_dtype)
    if mp_policy.cast_forward_inputs:
        cast_inputs(model, mp_policy.param_dtype)
    for layer, matrices in iterate_casting(model):
        layer.compute_dtype = mp_policy.param_dtype if whole.issuperset(matrices) else None
    scalars = replicate_scalars(model, mesh, leave=whole)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": mp_policy, "offload_policy": offload_policy}
    options["ignored_params"] = whole | set(scalars)
    with share_groups_after_forward():
        for unit in sorted(plan, key=_get_depth, reverse=True):
            _shard_unit(unit, [modules[name] for name in unit.names], sharding, options)
    if scalars:
        reduce_after_backward(model, list(scalars.values()), mesh)
    _set_prefetch(modules, plan, sharding)
    for module in modules.values():
        own = dict(module.named_parameters(recurse=False))
        if specs := {name: p._spec for name, p in own.items() if isinstance(p, DTensor)}:
            module.register_load_state_dict_pre_hook(partial(_shard_loaded, specs))
            if mesh.device_type != "cpu" and isinstance(offload_policy, CPUOffloadPolicy):
                module.register_load_state_dict_pre_hook(lambda *_: wait_for_gathers())
            elif mesh.device_type != "cpu":
                module.register_load_state_dict_post_hook(lambda *_: let_gathers_wait())


def _shard_loaded(
    specs: Mapping[str, Any],
    module: nn.Module,  # noqa: ARG001  may have its weights gathered now: torch reshards them after this hook
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *_: Any,
) -> None:
    """Let ``load_state_dict`` take whole tensors, of which each rank takes its part, where they are."""
    for name, spec in specs.items():
        value = state_dict.get(f"{prefix}{name}")
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == spec.shape:
            shard = make_shard(value.detach(), spec)
            is_kept = metadata.get("assign_to_params_buffers", False)
            state_dict[f"{prefix}{name}"] = shard.to(spec.mesh.device_type) if is_kept else shard


def _shard_unit(unit: Unit, members: list[nn.Module], sharding: Sharding, options: dict[str, Any]) -> None:
    # Head and root are used at the end of forward and the beginning of backward, nothing comes between.
    reshard = sharding.reshard_after_forward if unit.kind in ("block", "embedding") else unit.kind == "idle"
    fully_shard(members, reshard_after_forward=reshard, **options)
    for member in cast(list[FSDPModule], members):
        member.set_reduce_scatter_max_input_buffers(sharding.reduce_scatter_max_input_buffers, recurse=False)
        member.set_reshard_after_backward(sharding.reshard_after_backward, recurse=False)
        if not is_gathered_again(unit, sharding) and not unit.is_read_in_backward:
            member.set_unshard_in_backward(False)
    is_split = options["mesh"].size(-1) > 1
    # The modules of a unit share what they gather and reduce with.
    if sharding.gather_bits is not None and is_split:
        cast(FSDPModule, members[0]).set_custom_all_gather(LowBitAllGather(sharding.gather_bits))
    if sharding.reduce_bits is not None and is_split:
        cast(FSDPModule, members[0]).set_custom_reduce_scatter(LowBitReduceScatter(sharding.reduce_bits))


def list_whole(
    model: nn.Module, world_size: int, offloads: bool, param_dtype: torch.dtype | None, sharding: Sharding
) -> set[nn.Parameter]:
    """Return what one rank without offload computes with as it is stored, or casts in its layer.

    FSDP2 would copy it for each use. Under ``no_sync`` it adds gradients up in the dtype of reduction, so what may ever
    train is left to it.
    """
    if world_size > 1 or offloads:
        return set()
    is_cast = {matrix for _, matrices in iterate_casting(model) for matrix in matrices}
    return {
        parameter
        for parameter in model.parameters()
        if not parameter.is_floating_point()
        or (not sharding.no_sync and (param_dtype in (None, parameter.dtype) or parameter in is_cast))
    }


def check_wire(model: nn.Module, plan: Sequence[Unit], sharding: Sharding, mp_policy: MixedPrecisionPolicy) -> None:
    """Raise a ``ValueError`` if the parameters of a unit cannot be sent in the bits that ``sharding`` says."""
    parameters = dict(model.named_parameters())
    if sharding.gather_bits is not None:
        check_gathered(parameters, plan, mp_policy)
    if sharding.reduce_bits is not None:
        check_reduced(sharding.reduce_bits, parameters, plan, mp_policy)


def is_gathered_again(unit: Unit, sharding: Sharding) -> bool:
    """Whether a unit that backward reaches is gathered for it once more."""
    if unit.kind not in ("block", "embedding") or sharding.reshard_after_forward is False:
        return False
    # What stays split over fewer ranks goes back to all of them by being gathered.
    return unit.is_read_in_backward or sharding.reshard_after_forward is not True


@contextmanager
def no_sync(*roots: FSDPModule) -> Iterator[None]:
    """Skip the reduction of every backward run inside this context.

    Meant for all micro-batches of a step but the last. Each held micro-batch saves one reduce-scatter per unit
    (and one all-reduce per unit between replicas); in return every rank keeps its unreduced gradients at full
    size, as many times the sharded ones as there are shards.
    """
    for root in roots:
        hold_scalars(cast(nn.Module, root), True)
        root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        # Also on an exception: while this is off, sharded parameters get no ``.grad`` and the optimizer skips
        # them, so training would go on without learning anything.
        for root in roots:
            hold_scalars(cast(nn.Module, root), False)
            root.set_requires_gradient_sync(True)


def refuse_lazy(model: nn.Module) -> None:
    """Refuse parameters and buffers whose sizes only a forward will know, as those of ``nn.LazyLinear``."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no size before the first forward: sharding needs it; run the module once where it is "
                "built, or name its sizes, as with nn.Linear for nn.LazyLinear"
            )


def broadcast_parameters(model: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0, as DDP does. Before sharding.

    Ranks that drew their own random numbers would shard different models. One broadcast per tensor; those on
    the meta device are left out, as they hold nothing yet. What is expanded, or a part of another tensor, becomes one
    of its own where it was not that of rank 0.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and tensor.numel():
            # As gloo writes past the elements of other ones (seen in torch 2.13), and does not know every dtype.
            whole = tensor.data.contiguous()
            dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
            if not (tensor.is_contiguous() or torch.equal(whole, tensor.data)):
                tensor.data = whole


def reshard(model: nn.Module) -> None:
    """Let go of all gathered parameters; whatever needs them next gathers them again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reshard_when_toggled(root: FSDPModule) -> RemovableHandle:
    """Let a forward of ``root`` see which parameters need a gradient by now; return what undoes it."""
    follow = follow_toggles(root)
    # Before the hook of FSDP2, which gathers.
    return cast(nn.Module, root).register_forward_pre_hook(lambda *_: follow(), prepend=True)


def follow_toggles(root: FSDPModule) -> Callable[[], None]:
    """Return a function that lets shards need a gradient where what is gathered of them was toggled since.

    Gathered parameters learn that when they are gathered, and those of a root stay gathered after a forward. Until then
    the module has them, and an optimizer has the shards: either may be what was toggled.
    """
    module = cast(nn.Module, root)
    pairs = [parameter for _, parameter in iterate_sharded(module)]
    known = _read_flags(pairs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def follow() -> None:
        nonlocal known
        if (flags := _read_flags(pairs)) == known:
            return
        of_shards = {pair: of_shard for pair, (of_shard, _) in zip(pairs, known, strict=True)}
        gathered = {pair: value for pair in pairs if (value := get_gathered(pair)) is not None}
        toggled = [pair for pair, value in gathered.items() if value.requires_grad != get_shard(pair).requires_grad]
        if toggled:
            present = {id(parameter) for parameter in module.parameters()}
            for pair in toggled:
                if id(gathered[pair]) in present and get_shard(pair).requires_grad == of_shards[pair]:
                    get_shard(pair).requires_grad_(gathered[pair].requires_grad)
            reshard(module)
        known = _read_flags(pairs) if toggled else flags

    return follow


def _read_flags(pairs: Sequence[Any]) -> list[tuple[bool, bool | None]]:
    """Return which parameters need a gradient: as shards, and gathered."""
    gathered = ((pair, get_gathered(pair)) for pair in pairs)
    return [(get_shard(pair).requires_grad, None if g is None else g.requires_grad) for pair, g in gathered]


def register_steps(root: nn.Module, names: Iterable[str]) -> None:
    """Let these methods of a sharded root gather and reshard like its ``forward``; once, however often it is called."""
    if isinstance(root, FSDPModule) and root not in _WITH_STEPS:  # each registration wraps a method once more
        _WITH_STEPS.add(root)
        for name in names:
            if hasattr(root, name):
                register_fsdp_forward_method(root, name)


def find_roots(model: nn.Module) -> list[Any]:
    """Return the outermost sharded modules: ``model`` itself, or some inside it, or none.

    Each is an ``FSDPModule`` and an ``nn.Module``, which no annotation can say.
    """
    roots: list[Any] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule) and module not in inside:
            roots.append(module)
            inside.update(module.modules())
    return roots


def _check_dtypes(model: nn.Module, plan: Sequence[Unit], whole: Container[nn.Parameter]) -> None:
    """Refuse what FSDP2 would fail on in backward: it reduces the gradients of a unit together, but those of whole."""
    parameters = dict(model.named_parameters())
    for unit in plan:
        trained = {name: parameters[name] for name in unit.parameters if parameters[name].requires_grad}
        trained = {name: p for name, p in trained.items() if p.ndim and p not in whole}
        first = next(iter(trained), "")
        for name, parameter in trained.items():
            if parameter.is_complex():  # reduced in a real dtype, which drops a part
                raise ValueError(
                    f"{name} is {parameter.dtype}: gradients of complex parameters cannot be reduced; keep "
                    "torch.view_as_real of it as the parameter, and use torch.view_as_complex in forward"
                )
            if parameter.dtype != trained[first].dtype:
                raise ValueError(
                    f"{name} is {parameter.dtype} and {first} is {trained[first].dtype}: the trainable parameters of "
                    "one unit must have one dtype; set mixed_precision.storage_dtype, or lora.dtype for adapters"
                )


def _refuse_states(model: nn.Module, whole: Container[nn.Parameter]) -> None:
    """Refuse parameters of bitsandbytes, which FSDP2 replaces by plain ones, and gradients that it cannot reduce.

    Scripts too: they keep the parameters that they were compiled with.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(p not in whole for p in module.parameters()):
            raise ValueError(f"{name} is a script of torch.jit: its parameters cannot be sharded; leave torch.jit out")
        # Asked for there only: a computed weight, as of spectral_norm, is a step of its own.
        weight = module.weight if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse else None
        if weight is not None and weight.requires_grad and weight not in whole:
            raise ValueError(f"{name}.sparse: got True: sparse gradients cannot be reduced to shards; leave it out")
    for name, parameter in model.named_parameters():
        if type(parameter).__module__.startswith("bitsandbytes.") and parameter not in whole:
            raise ValueError(
                f"{name} is a {type(parameter).__name__} of bitsandbytes: what its codes mean is kept in "
                "the parameter, which sharding replaces; load it in 4 bits, or set quantization of CausalLM or of a "
                "task of your own (see docs/own_task.md)"
            )


def _arrange_memory(model: nn.Module, whole: Container[nn.Parameter], device_type: str) -> None:
    for parameter in model.parameters():
        if parameter not in whole:
            if not parameter.numel():  # FSDP2 cannot reduce a gradient without elements
                parameter.requires_grad_(False)
            if not parameter.is_contiguous():  # transposed, or in channels_last: FSDP2 refuses it
                parameter.data = parameter.data.contiguous()  # as it is gathered
        elif not parameter.is_meta:  # those are made where they are needed
            parameter.data = parameter.data.to(device_type)  # of a GPU the current one, as FSDP2 has it


def _get_depth(unit: Unit) -> int:
    return -1 if unit.kind == "root" else max(name.count(".") for name in unit.names)


def _set_prefetch(modules: dict[str, nn.Module], plan: Sequence[Unit], sharding: Sharding) -> None:
    # Of several modules in one unit, each can start its gather.
    used = [unit for unit in plan if unit.kind not in ("root", "idle")]
    order = [[cast(FSDPModule, modules[name]) for name in unit.names] for unit in used]
    # Backward never reaches what is frozen before the first unit that trains.
    trains = [any(p.requires_grad for m in members for p in cast(nn.Module, m).parameters()) for members in order]
    last = trains.index(True) if True in trains else 0
    for i, members in enumerate(order):
        before = [group[0] for group in reversed(order[max(i - sharding.backward_prefetch, last) : i])]
        for member in members:
            if depth := sharding.forward_prefetch:
                # Tables may be looked up in another order than the model has them: what was used is not gathered again.
                later = [
                    group[0]
                    for unit, group in zip(used[i + 1 :], order[i + 1 :], strict=True)
                    if unit.kind != "embedding"
                ]
                member.set_modules_to_forward_prefetch(later[:depth])
            if sharding.backward_prefetch > 1:
                member.set_modules_to_backward_prefetch(before)
            if i == last:
                # Itself, which is gathered already: of nothing FSDP makes its default, the unit before. Before the
                # first one that is the last one of a pass without gradients, such as that of a reference.
                member.set_modules_to_backward_prefetch([member])
