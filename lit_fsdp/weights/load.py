"""From the meta device to real shards: random weights, or rows read from safetensors. No rank holds the model.

Note [Filling a sharded model]: a model is built on the meta device, sharded, given memory by
:func:`materialize`, and then filled here. Random weights are drawn unit by unit: each module's initializer
writes full tensors on the CPU, seeded by the module's name, of which every rank keeps its shard. So the
same seed gives the same model at every world size, and a rank holds at most one unit at full size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Private, seen in torch 2.13.
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lit_fsdp.adapters.initialization import is_decomposed, reset_adapter
from lit_fsdp.adapters.layers import clean_name, is_adapter_name, is_own_part, iterate_adapters
from lit_fsdp.errors import join_names
from lit_fsdp.quantization.layers import iterate_quantized
from lit_fsdp.sharding.scalars import link_scalars
from lit_fsdp.sharding.wrap import find_around
from lit_fsdp.weights.convert import Conversion, convert_rows, describe_sources, list_optional, plan_conversions
from lit_fsdp.weights.prequantized import QuantizedFiles
from lit_fsdp.weights.safetensors_io import StoredTensor, TensorFiles, split_rows
from lit_fsdp.weights.shard_writer import ShardWriter, build_shard_writers, init_magnitudes


def materialize(model: nn.Module, device: torch.device, *, parameter_device: torch.device | None = None) -> None:
    """Give memory to everything on the meta device, and move buffers to ``device``; values are not set yet.

    Buffers that had no values get an impossible one, such as NaN, so that one which nothing fills is found. The
    states of torchmetrics, which are no buffers, move along.

    Args:
        model: Sharded or not, changed in place. Shared parameters stay shared.
        device: Where the model computes.
        parameter_device: Where parameters are kept, if not there too.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device=parameter_device or device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[key] = made[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            if not buffer.is_meta:
                module._buffers[key] = buffer.to(device)
                continue
            module._buffers[key] = torch.full_like(buffer, _choose_sentinel(buffer.dtype), device=device)
    stays = {id(p.grad) for p in model.parameters() if p.grad is not None}  # an earlier run's, where its shard is
    # Of those without values torch would make others, and cannot (seen in 2.13). They are made already.
    fakes = [
        (m, key, p)
        for m in model.modules()
        for key, p in m._parameters.items()
        if p is not None and isinstance(p.data, FakeTensor)
    ]
    for module, key, _ in fakes:
        module._parameters[key] = None
    # Also tells FSDP about its new parameters.
    model._apply(lambda t: t if isinstance(t, nn.Parameter) or id(t) in stays else t.to(device))
    for module, key, parameter in fakes:
        setattr(module, key, parameter)  # which layers that list their weights see
    link_scalars(model)


def init_weights(model: nn.Module, seed: int) -> None:
    """Draw random weights, the same at every world size; see Note [Filling a sharded model].

    Modules of a Transformers model are initialized as that model does it, all others by their
    ``reset_parameters``. The model must be materialized, and the seed the same on all ranks.

    Raises:
        ValueError: A parameter or buffer was left without a value.
    """
    owners = _map_initializers(model)
    writers = {id(writer.target): writer for writer in build_shard_writers(model).values()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for unit in _group_modules(model):
            _init_unit(unit, owners, seed, writers)
        _init_adapters(model, seed)
    _refuse_unset_buffers(model)


def load_weights(
    model: nn.Module, folder: Path, *, seed: int = 0, new: Collection[str] = (), takes_part: bool = False
) -> list[str]:
    """Read this rank's rows of every tensor from a folder of safetensors, and rebuild what is not stored.

    Files of a Transformers model may have all names and layouts that Transformers itself loads: of older releases,
    with experts one by one, with or without the prefix of the base model. A rank reads what its rows are made of, and
    takes little beside its shards: nothing where files hold what the model holds, and up to 32 MiB to cast or quantize.
    To fuse experts it takes three times 32 MiB, or three times an expert if that is more. See Note [Rows of converted
    tensors] for conversions that take more.

    Args:
        model: Materialized, sharded or not. Unless it is a model of Transformers, the names in the files must be
            those in the model. All ranks must call it if weights are quantized twice or adapters made of them.
        folder: Holds ``model.safetensors`` or ``model.safetensors.index.json`` with its parts.
        seed: For adapters and ``new``, the same on all ranks.
        new: Modules that get random values whatever the files hold for them, such as another classification head.
        takes_part: Let files hold tensors that the model has no use for, such as those of a text encoder.

    Returns:
        The names of those tensors.

    Raises:
        ValueError: Files or tensors are missing, unknown to the model, or of another shape.
    """
    with QuantizedFiles(folder) as files, torch.no_grad():
        if files.quantized and next(iterate_quantized(model), None) is None:
            raise ValueError(f"{folder} holds quantized weights, and {_name_class(model)} has none; quantize it alike")
        targets = build_shard_writers(model, is_quantized=bool(files.quantized))
        try:
            conversions, unknown = plan_conversions(model, files.tensors, targets)
        except ValueError as error:
            raise ValueError(f"{folder} does not fit {_name_class(model)}: {error}") from error
        drawn = {name for name in targets if name.rpartition(".")[0] in new}
        conversions = [conversion for conversion in conversions if drawn.isdisjoint(conversion.shapes)]
        unused = unknown if takes_part else []
        absent = _check_names(model, conversions, [] if takes_part else unknown, targets, folder, drawn)
        _check_shapes(conversions, files, targets)
        init_unstored(model, absent, seed)
        filled: dict[int, Conversion] = {}
        for conversion in conversions:
            before = filled.setdefault(id(targets[conversion.first_target].target), conversion)
            if before is not conversion:
                _check_same(before, conversion, files)
                continue
            if conversion.converter is None:
                _copy_stored(conversion.sources[0][1], files, targets[conversion.first_target])
            else:
                _copy_converted(model, conversion, files, targets)
            for name in conversion.shapes:
                targets[name].finish()
        _init_adapters(model, seed)
    _refuse_unset_buffers(model)
    return unused


def init_unstored(model: nn.Module, optional: Sequence[str] = (), seed: int = 0) -> None:
    """Set what files and checkpoints do not hold, as its module does it: buffers such as rotary frequencies.

    Args:
        model: Materialized.
        optional: Names of tensors that files may lack, which are drawn.
        seed: Of these.
    """
    owners = _map_initializers(model)
    writers = {id(writer.target): writer for writer in build_shard_writers(model).values()} if optional else {}
    holders = {name.rpartition(".")[0] for name in optional}
    with torch.random.fork_rng(devices=[]):
        for unit in _group_modules(model):
            if unstored := [(name, module) for name, module in unit if clean_name(name) in holders]:
                _init_unit(unstored, owners, seed, writers)
            for name, module in unit:
                if module._non_persistent_buffers_set and clean_name(name) not in holders:
                    # An embedding may have a buffer beside its weight.
                    with _put_aside((module._parameters, key) for key in module._parameters):
                        _init_module(name, module, owners, 0)
        _init_from_around(model, owners)


def _group_modules(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Return the modules unit by unit, inner modules first; a model that is not sharded is one unit.

    Adapters are left out.
    """
    adapters = {name for name, _ in iterate_adapters(model)}
    groups: dict[str, list[tuple[str, nn.Module]]] = {}
    roots: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            roots.add(name)
        if name not in adapters and not is_adapter_name(name):
            groups.setdefault(find_around(f"{name}.", roots) or "", []).append((name, module))
    return [list(reversed(group)) for group in groups.values()]


def _map_initializers(model: nn.Module) -> dict[str, Any]:
    """Map the name of each Transformers model inside to its way of initializing one module."""
    return {name: m._init_weights for name, m in model.named_modules() if hasattr(m, "_init_weights")}


def _init_unit(
    unit: list[tuple[str, nn.Module]], owners: dict[str, Any], seed: int, writers: dict[int, ShardWriter]
) -> None:
    drawn: dict[nn.Parameter, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for name, module in unit:
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in writers:
                if parameter not in drawn:
                    drawn[parameter] = _make_full(writers[id(parameter)], parameter, f"{name}.{key}")
                places.append((module, key, parameter))
                module._parameters[key] = drawn[parameter]
    try:
        for name, module in unit:
            _init_module(name, module, owners, seed)
    finally:
        for module, key, parameter in places:
            module._parameters[key] = parameter
    names = {id(parameter): key for _, key, parameter in places}
    for parameter, full in drawn.items():
        if full.numel() and torch.isnan(full.amax()):  # which is NaN if any is, and takes no mask of them all
            where = next(f"{n}.{k}" for n, m in unit for k, p in m._parameters.items() if p is parameter)
            where = clean_name(where).removeprefix(".")
            raise ValueError(
                f"{where}: nothing initializes this parameter; give its module a reset_parameters() that "
                f"sets {names[id(parameter)]}, or build the model on the CPU; of a model of Transformers, whose "
                "constructor alone draws it, start from weights: set pretrained in place of config"
            )
        writer = writers[id(parameter)]
        writer.write(writer.begin, (full if full.dim() else full.view(1))[writer.begin : writer.end])
        writer.finish()


def _is_undrawn(parameter: nn.Parameter | None) -> bool:
    if parameter is None or isinstance(parameter, DTensor) or parameter.is_meta or not parameter.numel():
        return False
    return bool(torch.isnan(parameter.detach().flatten()[0]))


def _make_full(writer: ShardWriter, parameter: nn.Parameter, name: str) -> nn.Parameter:
    if not writer.dtype.is_floating_point:
        where = clean_name(name).removeprefix(".")
        raise ValueError(f"{where}: a {parameter.dtype} parameter has no random values; load it from a checkpoint")
    full = torch.full(writer.shape, float("nan"), dtype=writer.dtype)
    return nn.Parameter(full, requires_grad=parameter.requires_grad)


def _init_module(name: str, module: nn.Module, owners: dict[str, Any], seed: int) -> None:
    digest = hashlib.sha256(f"{seed}/{clean_name(name)}".encode()).digest()
    # Not torch.manual_seed, which takes milliseconds to seed devices that nothing is drawn on.
    own_seed = int.from_bytes(digest[:8], "little") % 2**63
    torch.default_generator.manual_seed(own_seed)
    if reset_adapter(module):
        return
    inside = [owner for owner in owners if not owner or name == owner or name.startswith(f"{owner}.")]
    if inside:
        init = owners[max(inside, key=len)]
        init(module)
        reset = getattr(module, "reset_parameters", None)
        # RegNet leaves biases as torch has made them; what _make_full gave is NaN throughout.
        if reset is not None and any(_is_undrawn(parameter) for parameter in module._parameters.values()):
            reset()
            torch.default_generator.manual_seed(own_seed)
            init(module)
        return
    for method in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, method):
            getattr(module, method)()
            return


def _choose_sentinel(dtype: torch.dtype) -> float | int:
    """Return a value that no buffer holds; 0 for those dtypes in which every value is plausible."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min if dtype in (torch.int32, torch.int64) else 0


def _is_unset(buffer: Tensor) -> bool:
    sentinel = _choose_sentinel(buffer.dtype)
    return sentinel != 0 and bool((torch.isnan(buffer) if sentinel != sentinel else buffer == sentinel).any())


def _refuse_unset_buffers(model: nn.Module) -> None:
    unset = [clean_name(name) for name, buffer in model.named_buffers() if _is_unset(buffer)]
    if unset:
        raise ValueError(
            f"{', '.join(unset)}: nothing sets these buffers after they were built on the meta device; give "
            "their modules a reset_parameters() that does, or build the model on the CPU"
        )


def _check_names(
    model: nn.Module,
    conversions: list[Conversion],
    unknown: list[str],
    targets: dict[str, ShardWriter],
    folder: Path,
    drawn: Collection[str],
) -> list[str]:
    """Return the names that files may lack and do lack; refuse all others that do not fit."""
    made = {name for conversion in conversions for name in conversion.shapes}
    filled = {id(targets[name].target) for name in made & targets.keys()}
    absent = sorted(name for name, writer in targets.items() if id(writer.target) not in filled)
    patterns = list_optional(model)
    optional = [name for name in absent if name in drawn or any(pattern.search(name) for pattern in patterns)]
    missing = [name for name in absent if name not in optional]
    strange = sorted([*unknown, *(made - targets.keys())])
    for what, names in (("lacks", missing), ("has tensors unknown to the model:", strange)):
        if names:
            raise ValueError(f"{folder} does not fit {_name_class(model)}: it {what} {join_names(names)}")
    return optional


def _check_shapes(conversions: list[Conversion], files: TensorFiles, targets: dict[str, ShardWriter]) -> None:
    for conversion in conversions:
        first = files.tensors[conversion.sources[0][1]]
        for name, shape in conversion.shapes.items():
            _check_kind(first, name, targets[name].dtype)
            if shape != targets[name].shape:
                made = f", made of {describe_sources(conversion)}," if conversion.converter else ""
                raise ValueError(f"{first.path}: {name}{made} has shape {shape}, the model's {targets[name].shape}")


def _check_kind(stored: StoredTensor, name: str, dtype: torch.dtype) -> None:
    """Refuse integers for a floating tensor and the reverse: codes of a quantized model are no weights."""
    if stored.dtype.is_floating_point != dtype.is_floating_point:
        raise ValueError(f"{stored.path}: {name} is made of {stored.dtype}, which cannot be cast to {dtype}")


def _init_adapters(model: nn.Module, seed: int) -> None:
    """Draw what adapters start with, unless it was made of the base weights, which must be in place."""
    with torch.random.fork_rng(devices=[]):
        for name, layer in iterate_adapters(model):
            if not is_decomposed(layer):
                inside = [(f"{name}.{n}", m) for n, m in layer.named_modules() if is_own_part(n)]
                parameters = {id(p): ShardWriter(p) for _, m in inside for p in m.parameters(recurse=False)}
                drawn_as = f"{name}.{layer.parameter_name}" if hasattr(layer, "parameter_name") else name
                _init_unit([*inside, (drawn_as, layer)], {}, seed, parameters)
            init_magnitudes(layer)


def _init_from_around(model: nn.Module, owners: dict[str, Any]) -> None:
    """Set buffers that only a module around theirs sets, as the model of Falcon-H1 does those of its layers."""
    modules, tried = dict(model.named_modules()), set()
    unstored = [f"{name}.{key}" for name, module in modules.items() for key in module._non_persistent_buffers_set]
    for name in unstored:
        around = name.rpartition(".")[0]
        while around and _is_unset(model.get_buffer(name)):
            around = around.rpartition(".")[0]
            if around not in tried:
                tried.add(around)
                inside = [*modules[around].modules()]
                parameters = ((m._parameters, key) for m in inside for key in m._parameters)
                buffers = ((m._buffers, key) for m in inside for key, b in m._buffers.items() if b is not None)
                with _put_aside((*parameters, *(place for place in buffers if not _is_unset(place[0][place[1]])))):
                    _init_module(around, modules[around], owners, 0)


@contextmanager
def _put_aside(places: Iterable[tuple[dict[str, Any], str]]) -> Iterator[None]:
    """Keep tensors from initializers inside of a context, which find some on the meta device in their places."""
    kept = [(holder, key, holder[key]) for holder, key in places if holder[key] is not None]
    try:
        for holder, key, tensor in kept:
            meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            holder[key] = nn.Parameter(meta, requires_grad=False) if is_parameter else meta
        yield
    finally:
        for holder, key, tensor in kept:
            holder[key] = tensor


def _check_same(first: Conversion, second: Conversion, files: TensorFiles) -> None:
    """Refuse two stored tensors for one parameter that differ. Read in full, so that all ranks decide alike."""
    (_, a), (_, b) = first.sources[0], second.sources[0]
    for begin, end in split_rows(0, files.tensors[a].num_rows, files.tensors[a].row_bytes):
        if not torch.equal(files.read_rows(a, begin, end), files.read_rows(b, begin, end)):
            raise ValueError(
                f"{files.tensors[b].path}: {a} and {b} differ, but the model shares one parameter between "
                f"{first.first_target} and {second.first_target}; set tie_word_embeddings to false in config.json"
            )


def _copy_stored(name: str, files: TensorFiles, target: ShardWriter) -> None:
    """Copy the rows of a shard as they are stored: at once into place, or in blocks if they are changed on the way."""
    if type(target) is ShardWriter and target.holds_rows:
        files.copy_rows(name, target.begin, target.local)
        return
    for begin, end in split_rows(target.begin, target.end, files.tensors[name].row_bytes):
        target.write(begin, files.read_rows(name, begin, end))


def _copy_converted(
    model: nn.Module, conversion: Conversion, files: TensorFiles, targets: dict[str, ShardWriter]
) -> None:
    """Convert a shard in blocks where rows stay apart, else at once."""
    writers = {name: targets[name] for name in conversion.shapes}
    spans = {(writer.begin, writer.end) for writer in writers.values()}
    dtype = targets[conversion.first_target].dtype
    convert = partial(convert_rows, model, conversion, files.tensors, files.read_rows, dtype)
    if conversion.rows is None or len(spans) > 1:
        for name, tensor in convert().items():
            writers[name].write(writers[name].begin, tensor[writers[name].begin : writers[name].end])
        return
    ((first, last),) = spans
    row_bytes = sum(math.prod(shape[1:]) for shape in conversion.shapes.values()) * dtype.itemsize
    for begin, end in split_rows(first, last, row_bytes):
        for name, rows in convert((begin, end)).items():
            writers[name].write(begin, rows)


def _name_class(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP") if isinstance(model, FSDPModule) else type(model).__name__


def iterate_meta(model: nn.Module) -> Iterator[str]:
    """Yield the names of parameters and buffers that have no memory."""
    return (name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta)
