"""Which modules form an FSDP unit: the parameters that are gathered, and whose gradients are reduced, together.

Everything here is decided on the module tree alone, so it works on the meta device and without ranks.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lit_fsdp.sharding.tensor_parallel import get_split_shape

Policy = Literal["auto", "module_classes", "model_plan", "no_split_modules", "repeated_blocks", "min_size"]
Kind = Literal["block", "embedding", "head", "idle", "root"]


@dataclass(frozen=True, kw_only=True)
class Wrap:
    """Which modules form an FSDP unit.

    Larger units mean fewer and larger collectives, and more gathered parameters in memory at a time.

    Args:
        policy: How units are found. ``module_classes``: the modules of the classes named below. ``model_plan``: what
            the model itself says (``fsdp_plan`` of Transformers 5). ``no_split_modules``: the classes that Transformers
            marks as blocks. ``repeated_blocks``: the elements of each list of equal modules. ``min_size``: the
            smallest modules of at least ``min_num_params``. ``auto``: ``module_classes`` if any are named, else the
            first of the model's plan, its marked blocks and repeated blocks that finds any, else the model as one
            unit.
        module_classes: Class names, also as patterns such as ``*DecoderLayer``.
        min_num_params: For ``min_size`` only.
        own_embeddings: Make input embeddings a unit of their own. Otherwise they stay in the root unit, which
            is gathered for the whole step.
    """

    policy: Policy = "auto"
    module_classes: Sequence[str] = ()
    min_num_params: int | None = None
    own_embeddings: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "module_classes", tuple(self.module_classes))  # YAML gives a list

    def check(self) -> None:
        """Raise a ``ValueError`` for combinations in which one setting would be ignored."""
        if self.module_classes and self.policy not in ("auto", "module_classes"):
            raise ValueError(f"wrap.module_classes: not used by policy {self.policy!r}; set policy to 'module_classes'")
        if self.policy == "module_classes" and not self.module_classes:
            raise ValueError(
                "wrap.module_classes: empty, and policy is 'module_classes'; name some, or set policy to 'auto'"
            )
        if (self.policy == "min_size") != (self.min_num_params is not None):
            raise ValueError(
                f"wrap.min_num_params: got {self.min_num_params} with policy {self.policy!r}; "
                "it belongs to policy 'min_size', such as policy=min_size min_num_params=1000000"
            )
        if self.policy == "min_size" and not self.own_embeddings:
            raise ValueError("wrap.own_embeddings: not used by policy 'min_size', which goes by size; leave it out")
        if self.min_num_params is not None and self.min_num_params < 1:
            raise ValueError(f"wrap.min_num_params: got {self.min_num_params}: expected 1 or more")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One FSDP unit.

    Args:
        names: Names of its modules; several are gathered together. ``""`` is the root.
        kind: What it is. A head is used last in forward and first in backward, so it is not resharded between. Of an
            idle one no step of training has a use, so it is never gathered there.
        parameters: Names of the parameters it holds, without those of units inside it.
        num_params: Elements of these.
        num_trainable: Elements of those that need a gradient.
        is_read_in_backward: Whether backward computes with its parameters. That of plain embeddings does not.
    """

    names: tuple[str, ...]
    kind: Kind
    parameters: tuple[str, ...] = ()
    num_params: int = 0
    num_trainable: int = 0
    is_read_in_backward: bool = field(default=True, compare=False)  # follows from the modules


def plan_units(model: nn.Module, wrap: Wrap, *, idle: Sequence[str] = ()) -> list[Unit]:
    """Return the units of ``model`` in the order of its modules, the root last.

    Parameters that two units would share (tied embeddings) go to the root unit, which holds them gathered from
    the first use in forward to the last in backward.

    Args:
        model: The root that will be sharded; parameters may be on the meta device.
        wrap: The policy; a ``ValueError`` says where it does not fit the model.
        idle: Names of modules without trainable parameters, which no step of training uses.
    """
    wrap.check()
    modules = dict(model.named_modules())
    found = [*_find_units(model, modules, wrap), *(Unit(names=(name,), kind="idle") for name in idle)]
    found = [unit for unit in found if any(_has_parameters(modules[name]) for name in unit.names)]
    found = _drop_shared(model, found)
    return _count_parameters(model, [*found, Unit(names=("",), kind="root")])


def plan_module(module: nn.Module, wrap: Wrap) -> list[Unit]:
    """Return the units of a module: those of its method ``configure_units(model)``, or else those of the policy."""
    configure: Any = getattr(module, "configure_units", None)
    if configure is None:
        return plan_units(module, wrap)
    if wrap != Wrap():
        raise ValueError(
            f"wrap: {type(module).__name__}.configure_units decides, so this would be ignored; leave it out"
        )
    return list(configure(module))


def count_shard_bytes(model: nn.Module, unit: Unit, num_shards: int) -> int:
    """Return the bytes of the first rank's shard of a unit: ``fully_shard`` gives no rank more rows of a parameter."""
    return sum(count_rank_bytes(model.get_parameter(name), num_shards) for name in unit.parameters)


def count_rank_bytes(parameter: nn.Parameter, num_shards: int) -> int:
    """Return the bytes of the first rank's shard of a parameter."""
    shape = get_split_shape(parameter)
    rows = shape[0] if shape else 1
    return -(-rows // num_shards) * (shape.numel() * parameter.element_size() // max(rows, 1))


def _find_units(model: nn.Module, modules: dict[str, nn.Module], wrap: Wrap) -> list[Unit]:
    if wrap.policy == "module_classes" or (wrap.policy == "auto" and wrap.module_classes):
        blocks = _find_by_class(modules, wrap.module_classes)
        if not blocks:
            have = ", ".join(sorted({type(module).__name__ for module in filter(_has_parameters, modules.values())}))
            raise ValueError(
                f"wrap.module_classes: got {list(wrap.module_classes)}: no module has such a class; "
                f"the model has: {have}"
            )
        return _add_ends(modules, map(_block, blocks), wrap)
    if wrap.policy == "min_size":
        assert wrap.min_num_params is not None
        return [_block(name) for name in _find_by_size(model, wrap.min_num_params)]
    if wrap.policy in ("auto", "model_plan") and (plan := _read_model_plan(modules, wrap)):
        # A plan that fits in part only names no ends (seen in Transformers 5.23: GPT-NeoX has embed_in).
        return _add_ends(modules, plan, wrap)
    if wrap.policy in ("auto", "no_split_modules"):
        classes = {c for module in modules.values() for c in getattr(module, "_no_split_modules", None) or ()}
        if blocks := _find_by_class(modules, sorted(classes)):
            return _add_ends(modules, map(_block, blocks), wrap)
    if wrap.policy in ("auto", "repeated_blocks") and (blocks := _find_repeated(modules)):
        return _add_ends(modules, map(_block, blocks), wrap)
    if wrap.policy != "auto":
        raise ValueError(
            f"wrap.policy: got {wrap.policy!r}: it finds nothing in {type(model).__name__}; set policy to 'auto'"
        )
    return []


def _block(name: str) -> Unit:
    return Unit(names=(name,), kind="block")


def _find_by_class(modules: dict[str, nn.Module], patterns: Sequence[str]) -> list[str]:
    return [
        name
        for name, module in modules.items()
        if name and any(fnmatch.fnmatchcase(get_class(module).__name__, pattern) for pattern in patterns)
    ]


def get_class(module: nn.Module) -> type:
    """Return the class of a module before ``fully_shard`` made one of its own from it."""
    kinds = type(module).__mro__
    return kinds[kinds.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else kinds[0]


def _find_repeated(modules: dict[str, nn.Module]) -> list[str]:
    """Return the elements of every list with at least two modules of one class that have parameters."""
    names: list[str] = []
    for name, module in modules.items():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(name.startswith(f"{n}.") for n in names):
            continue
        counts = Counter(get_class(child) for child in module if _has_parameters(child))
        repeated = {kind for kind, count in counts.items() if count > 1 and not _is_leaf(kind)}
        names += [f"{name}.{i}" for i, child in enumerate(module) if get_class(child) in repeated]
    # A module that is there twice, to be computed twice, has its first name only.
    return [name for name in (name.removeprefix(".") for name in names) if name in modules]


def _is_leaf(kind: type) -> bool:
    # A stack of plain linears is one small network, not a stack of blocks.
    blocks = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Sequential)
    return kind.__module__.startswith("torch.nn.modules.") and kind not in blocks


def _find_by_size(model: nn.Module, min_num_params: int) -> list[str]:
    """Return the modules of which no child is large enough, but which are, what is left of them counted."""
    names: list[str] = []

    def visit(name: str, module: nn.Module) -> int:
        # Attention of torch uses the weights of its output projection without calling it.
        is_atomic = isinstance(module, nn.MultiheadAttention)
        left = sum(p.numel() for p in module.parameters(recurse=is_atomic))
        if not is_atomic:
            left += sum(visit(f"{name}.{n}" if name else n, child) for n, child in module.named_children())
        is_callable = not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
        if name and is_callable and left >= min_num_params:
            names.append(name)
            return 0
        return left

    visit("", model)
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return sorted(names, key=order.__getitem__)


def _read_model_plan(modules: dict[str, nn.Module], wrap: Wrap) -> list[Unit]:
    """Read ``fsdp_plan`` of the outermost models that have one, where it fits their modules.

    Transformers 5 maps patterns such as ``model.layers.*`` to ``free_full_weight`` (reshard after forward) or
    ``keep_full_weight``. A default plan is inherited by models it does not fit (seen in 5.23: GPT-2 has ``h``,
    not ``layers``); those are left to the next rule.
    """
    found: list[Unit] = []
    done: list[str] = []
    for root, module in modules.items():
        plan = getattr(module, "fsdp_plan", None)
        if not plan or any(not outer or root.startswith(f"{outer}.") for outer in done):
            continue
        prefix = f"{root}." if root else ""
        inside = [name for name in modules if name.startswith(prefix) and name != root]
        hits = {p: [n for n in inside if _matches(n, prefix + p)] for p in plan}
        if not any(hits[pattern] for pattern in plan if pattern.endswith(".*")):
            continue
        done.append(root)
        embeddings = _find_ends(modules, root, "get_input_embeddings")
        free = {n for p, how in plan.items() if how == "free_full_weight" for n in hits[p]}
        keep = {n for p, how in plan.items() if how != "free_full_weight" for n in hits[p]}
        head = tuple(name for name in inside if name in keep)
        kinds: dict[str, Kind] = {name: "embedding" if name in embeddings else "block" for name in inside}
        skipped = () if wrap.own_embeddings else embeddings
        found += [Unit(names=(n,), kind=kinds[n]) for n in inside if n in free and n not in skipped]
        if head:
            found.append(Unit(names=head, kind="head"))
    return found


def _matches(name: str, pattern: str) -> bool:
    """Whether a module's name fits a pattern, in which ``*`` stands for one part of the name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name) is not None


def _add_ends(modules: dict[str, nn.Module], found: Iterable[Unit], wrap: Wrap) -> list[Unit]:
    """Add embeddings and heads, which the model names itself, where they are in no unit yet; in module order."""
    inputs = _find_ends(modules, "", "get_input_embeddings")
    found = _tell_embeddings(list(found), inputs, keeps=wrap.own_embeddings or bool(wrap.module_classes))
    # Of images, it is a small convolution inside of what also adds positions.
    embeddings = [name for name in inputs if wrap.own_embeddings and isinstance(modules[name], nn.Embedding)]
    heads = _find_ends(modules, "", "get_output_embeddings")
    kinds: dict[str, Kind] = dict.fromkeys(heads, "head")
    kinds |= dict.fromkeys(embeddings, "embedding")
    owners = _number_owners(found)
    found += [Unit(names=(name,), kind=kind) for name, kind in kinds.items() if _find_owner(f"{name}.", owners) is None]
    order = {name: i for i, name in enumerate(modules)}
    return sorted(found, key=lambda unit: order[unit.names[0]])


def _tell_embeddings(found: list[Unit], inputs: Sequence[str], *, keeps: bool) -> list[Unit]:
    """Tell what embeds the inputs from blocks, among which Transformers names it: nothing repeats or recomputes it."""
    names = [name for unit in found for name in unit.names]
    around = {n for n in names if any(f"{end}.".startswith(f"{n}.") for end in inputs)}
    around = {n for n in around if not any(other.startswith(f"{n}.") for other in names)}  # holds the blocks as well
    if not any(unit.kind == "block" and not set(unit.names) & around for unit in found):
        return found  # no blocks beside it: they may be inside
    told = [replace(u, kind="embedding") if u.kind == "block" and set(u.names) & around else u for u in found]
    return [unit for unit in told if keeps or unit.kind != "embedding"]


def _find_ends(modules: dict[str, nn.Module], root: str, getter: str) -> list[str]:
    names = {id(module): name for name, module in modules.items()}
    found = []
    for name, module in modules.items():
        if (name == root or name.startswith(f"{root}." if root else "")) and hasattr(module, getter):
            try:
                end = getattr(module, getter)()
            except (NotImplementedError, AttributeError, TypeError):
                continue  # Transformers' way of saying that a model has none
            if isinstance(end, nn.Module) and id(end) in names and names[id(end)] not in found:
                found.append(names[id(end)])
    return found


def _has_parameters(module: nn.Module | None) -> bool:
    # In a Sequential or a list, None may stand for a layer that is left out.
    return module is not None and next(module.parameters(), None) is not None


def _drop_shared(model: nn.Module, units: list[Unit]) -> list[Unit]:
    """Leave out embeddings and heads that share a parameter with another unit, and all blocks that do.

    What one of them held belongs to the unit around it then, which may share it with another in its turn.
    """
    numbers = _number_owners(units)
    owners: dict[int, set[int]] = {}
    # Not named_parameters(remove_duplicate=False): it also lists a module again that has two names.
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owner = _find_owner(f"{name}.{key}" if name else key, numbers)
            owners.setdefault(id(parameter), set()).add(-1 if owner is None else owner)
    shared = {i for indices in owners.values() if len(indices) > 1 for i in indices}
    left = [unit for i, unit in enumerate(units) if i not in shared]
    return _drop_shared(model, left) if len(left) < len(units) else left


def find_around(name: str, known: Container[str]) -> str | None:
    """Return which of some modules, by name, is the innermost around a parameter or module; the root is ``""``."""
    while name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return None


def _number_owners(units: Sequence[Unit]) -> dict[str, int]:
    return {name: i for i, unit in enumerate(units) for name in unit.names}


def _find_owner(parameter: str, owners: Mapping[str, int]) -> int | None:
    """Return the index of the innermost unit around a parameter; ``owners`` gives those of units by their names."""
    around = find_around(parameter, owners)
    return None if around is None else owners[around]


def _count_parameters(model: nn.Module, units: list[Unit]) -> list[Unit]:
    parts: list[list[tuple[str, nn.Parameter]]] = [[] for _ in units]
    owners = _number_owners(units)
    for name, parameter in model.named_parameters():
        owner = _find_owner(name, owners)
        assert owner is not None  # the root holds everything
        parts[owner].append((name, parameter))
    return [
        replace(
            unit,
            parameters=tuple(name for name, _ in part),
            num_params=sum(p.numel() for _, p in part),
            num_trainable=sum(p.numel() for _, p in part if p.requires_grad),
            is_read_in_backward=unit.kind != "embedding"
            or not _is_looked_up([model.get_submodule(n) for n in unit.names]),
        )
        for unit, part in zip(units, parts, strict=True)
    ]


def _is_looked_up(modules: Sequence[nn.Module]) -> bool:
    """Whether modules do nothing but look up rows: whatever a user adds to that may read the weights in backward."""
    return all(
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        # One that is split has a forward of Transformers around it, which looks up rows too.
        and ("forward" not in vars(module) or isinstance(module.weight, DTensor))
        and [name for name, _ in module.named_parameters()] == ["weight"]  # computed from no others
        and not (module._forward_hooks or module._forward_pre_hooks)
        for module in modules
    )


def iterate_blocks(units: Sequence[Unit]) -> Iterator[str]:
    """Yield the names of the modules that repeat, which is what is recomputed and compiled."""
    return (name for unit in units if unit.kind == "block" for name in unit.names)
