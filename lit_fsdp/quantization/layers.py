"""Layers whose frozen weights are rows of bytes, and a model whose linear layers become such layers.

See Note [Rows of bytes] in ``quantize.py``. No tensor subclass and no hook is involved: for FSDP2, for
checkpoints and for state dicts these are ``uint8`` parameters.
"""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.conv import _ConvNd  # private, seen in torch 2.13: what all convolutions are
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from lit_fsdp.errors import suggest
from lit_fsdp.quantization.groups import GroupedExperts, multiply_groups
from lit_fsdp.quantization.kernels import load_kernels
from lit_fsdp.quantization.quantize import Quantization, dequantize, multiply

ABSMAX, NESTED = "_absmax", "_nested"  # what stands beside the codes of a weight
_READ_OUTSIDE, _CAST_OUTSIDE = "the module around it reads its weight", "its input is cast to the dtype of its weight"
_READ = re.compile(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape))")
_PASSED = re.compile(r"\w=self\.(\w+)\.weight\b(?!\.)")
_CAST = re.compile(r"\.to\((?:dtype=)?self\.(\w+)\.weight\.dtype\b")


class QuantizedLayer(nn.Module):
    """What all quantized layers have in common: weights, of which each is a parameter and what stands beside it.

    ``<name>`` holds codes, ``<name>_absmax`` the maxima of blocks, with double quantization as codes as well, and the
    buffer ``<name>_nested`` then the second level. Weights of three dimensions are several matrices, quantized one
    by one.
    """

    quantization: Quantization
    dense_shapes: dict[str, torch.Size]  # of its quantized weights, by name

    def add_quantized(self, name: str, dense: Tensor) -> None:
        """Make room for a weight in place of a dense one [out, in] or [matrices, out, in], without values."""
        settings = self.quantization
        *rows, num_columns = dense.shape
        num_blocks = settings.count_blocks(num_columns)
        absmax_bytes = num_blocks if settings.is_double else 4 * num_blocks
        self.dense_shapes[name] = dense.shape
        for key, width in ((name, num_columns // settings.codes_per_byte), (name + ABSMAX, absmax_bytes)):
            empty = torch.empty(*rows, width, dtype=torch.uint8, device=dense.device)
            setattr(self, key, nn.Parameter(empty, requires_grad=False))
        if settings.is_double:
            width = settings.count_nested_bytes(rows[-1] * num_blocks)
            empty = torch.empty(*rows[:-1], width, dtype=torch.uint8, device=dense.device)
            self.register_buffer(name + NESTED, empty)

    def get_stored(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes, absmax and second level of a weight; gathered ones."""
        return getattr(self, name), getattr(self, name + ABSMAX), getattr(self, name + NESTED, None)


class QuantizedLinear(QuantizedLayer, nn.Linear):
    """A frozen linear layer that stores its weight as rows of bytes.

    Args:
        dense: The layer in whose place it comes; gives sizes, device and bias.
        settings: How to quantize.
    """

    def __init__(self, dense: nn.Linear, settings: Quantization) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = dense.in_features, dense.out_features
        self.quantization = settings
        self.dense_shapes = {}
        self.kept: list[Tensor] = []  # the dense weight, between recomputation and backward
        self.add_quantized("weight", dense.weight)
        self.bias = dense.bias
        self.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out]; ``x`` is [..., in], and the weight is computed with in its dtype."""
        bias: Any = self.bias
        bias = None if bias is None else bias.to(x.dtype)
        # Compiled code keeps nothing outside itself, and takes the function of bitsandbytes, which it knows.
        kept = None if torch.compiler.is_compiling() else self.kept
        return multiply(x, *self.get_stored("weight"), self.quantization, bias=bias, kept=kept)

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """Codes. The name by which peft, seen in 0.21, knows that a layer has ``dequantize``."""
        return self.weight

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [out, in]; the layer must be gathered."""
        return dequantize(*self.get_stored("weight"), self.quantization, dtype)

    def extra_repr(self) -> str:
        """Describe it in ``print(model)``."""
        settings = self.quantization
        double = ", double" if settings.is_double else ""
        return f"{self.in_features}, {self.out_features}, {settings.type}, block_size={settings.block_size}{double}"


class QuantizedExperts(QuantizedLayer, GroupedExperts):
    """Experts of a mixture whose matrices are rows of bytes; mixed into the class of Transformers that they have."""

    @override
    def get_compute_dtype(self, x: Tensor) -> torch.dtype:
        return x.dtype

    @override
    def list_widths(self) -> list[int]:
        return [size for shape in self.dense_shapes.values() for size in shape[1:]]

    @override
    def multiply(self, name: str, x: Tensor, ends: Any) -> Tensor:
        return multiply_groups(x, ends, *self.get_stored(name), self.quantization, is_transposed=self.is_transposed)


def quantize_model(model: nn.Module, settings: Quantization, *, keep: Sequence[str] = ()) -> list[str]:
    """Replace linear layers, and experts of mixtures, by quantized ones without values, in place.

    Call it on the meta device, before adapters and sharding; ``load_weights`` or ``init_weights`` gives them values.

    Args:
        model: Changed in place. A layer whose rows do not divide into blocks, or which shares its weight with another,
            stays as it is.
        settings: How to quantize.
        keep: More modules to leave as they are, by name or last part, such as those that shall train.

    Returns:
        Names of layers that were left although nothing said so, with the reason, to be told to the user.

    Raises:
        ValueError: A name to skip is none of the model, nothing is left to quantize, or the model is sharded.
    """
    settings.check()
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("quantization: the model is sharded already; quantize it before")
    candidates = list_quantizable(model)
    # Of these alone: some models draw other parameters with what heeds no device, as DiffLlama does.
    if any(not parameter.is_meta for module in candidates.values() for parameter in module.parameters(recurse=False)):
        raise ValueError(
            "quantization: weights are quantized while they are loaded, and the model has its already; build it under "
            'torch.device("meta")'
        )
    if getattr(getattr(model, "config", None), "rescale_every", 0):
        raise ValueError(
            f"quantization: {type(model).__name__} divides its weights for an evaluation (config.rescale_every), which "
            "codes of weights cannot be; leave it out, or set rescale_every to 0 in config.json"
        )
    load_kernels("quantization")  # now, not in a step that is measured or that has no values
    skipped = _find_skipped(model, settings, candidates) | {n for n in candidates if is_named(n, keep)}
    num_owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    left = _list_unknown(model, candidates, (*(settings.skip_modules or ()), *keep))
    unfit = list_unfit(model)
    done = 0
    for name, module in candidates.items():
        if name in skipped:
            continue
        weights = {key: p for key, p in module.named_parameters(recurse=False) if _is_weight(key, p)}
        if reason := unfit.get(name) or _find_obstacle(weights, settings, num_owners):
            left.append(f"{name} ({reason})")
            continue
        if isinstance(module, nn.Linear):
            model.set_submodule(name, QuantizedLinear(module, settings))
        else:
            _quantize_experts(module, weights, settings)
        done += 1
    if not done:
        reasons = f": {', '.join(left[:3])}" if left else ""
        raise ValueError(f"quantization: nothing to quantize in {type(model).__name__}{reasons}; leave it out")
    return left


def list_quantizable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a model that could be quantized, by name."""
    kinds: dict[str, Any] = {name: type(module) for name, module in model.named_modules()}
    return {n: m for n, m in model.named_modules() if is_linear(kinds[n]) or is_experts(m)}


def is_experts(module: nn.Module) -> bool:
    """Whether Transformers could run it with any of its implementations of experts; seen in 5.23."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def iterate_quantized(model: nn.Module) -> Iterator[tuple[str, QuantizedLayer]]:
    """Yield the quantized layers of a model with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLayer))


def count_weights(model: nn.Module) -> dict[str, int]:
    """Map the names of parameters to the numbers of weights that they stand for: codes are not elements."""
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for name, layer in iterate_quantized(model):
        for key, shape in layer.dense_shapes.items():
            counts[f"{name}.{key}"] = shape.numel()
            counts[f"{name}.{key}{ABSMAX}"] = 0
    return counts


def list_unfit(model: nn.Module) -> dict[str, str]:
    """Return the layers that codes of weights cannot stand in for, with the reason, as the modules around them."""
    return dict.fromkeys(_list_cast(model), _CAST_OUTSIDE) | dict.fromkeys(list_read(model), _READ_OUTSIDE)


def list_read(model: nn.Module) -> set[str]:
    """Return the layers of models of Transformers whose weights the modules around them read themselves.

    As Mamba does with ``dt_proj``, which it never calls: it would take codes for weights, and never use an adapter. So
    does Jamba unless Transformers has quantized it (``_is_quantized``), and so do kernels that are passed a weight by
    name, as ``outproj_weight`` of Mamba 2 is, where the layer is called without them.
    """
    kinds = {name: kind for name, kind in _list_kinds(model).items() if not hasattr(kind, "_init_weights")}
    return {f"{name}.{key}".removeprefix(".") for name, kind in kinds.items() for key in _list_read_by(kind)}


def _list_cast(model: nn.Module) -> set[str]:
    """Return the layers whose input is cast to the dtype of their weight, as by some indexers and heads."""
    kinds = _list_kinds(model)
    return {f"{name}.{key}".removeprefix(".") for name, kind in kinds.items() for key in _list_cast_by(kind)}


def _list_kinds(model: nn.Module) -> dict[str, Any]:
    modules = model.named_modules()
    return {name: type(m) for name, m in modules if type(m).__module__.startswith("transformers.models.")}


@cache
def _list_read_by(kind: Any) -> set[str]:
    code = _get_code(kind)
    read, called = {*_READ.findall(code)}, r"\bself\.{}\b(?!\.(?:weight|bias)| =)"
    if "_is_quantized" not in code:
        read = {name for name in read if not re.search(called.format(name), code)}
    return {*read, *_PASSED.findall(code)}


@cache
def _list_cast_by(kind: Any) -> set[str]:
    code = _get_code(kind)
    return {name for name in _CAST.findall(code) if f"self.{name}.weight.dtype != torch.uint8" not in code}


@cache
def _get_code(kind: Any) -> str:
    code = ""
    for base in kind.__mro__:
        if base.__module__.startswith("transformers.models."):
            for function in filter(inspect.isfunction, vars(base).values()):
                with suppress(OSError):  # without a file
                    code += inspect.getsource(function)
    return code


def _find_skipped(model: nn.Module, settings: Quantization, candidates: dict[str, nn.Module]) -> set[str]:
    # Private, seen in transformers 5.23, which leaves them out, too: the indexer of DeepSeek V3.2 reads its weight.
    kept: Any = getattr(model, "_keep_in_fp32_modules", None) or ()
    skipped = {name for name in candidates if is_named(name, [*kept])}
    if settings.skip_modules is None:
        find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = find_head()
        return skipped | {name for name, module in candidates.items() if module is head}
    return skipped | find_named(
        candidates, settings.skip_modules, "quantization.skip_modules", "no layer that could be quantized"
    )


def _list_unknown(model: nn.Module, candidates: Mapping[str, nn.Module], skipped: Sequence[str]) -> list[str]:
    """Return large weights that other libraries might quantize, and this one does not know how to."""
    unknown = []
    for name, module in model.named_modules():
        is_large = any(p.dim() == 3 for p in module.parameters(recurse=False)) or isinstance(module, Conv1D)
        if is_large and name not in candidates and not isinstance(module, _ConvNd) and not is_named(name, skipped):
            unknown.append(f"{name} (a {type(module).__name__} cannot be quantized)")
    return unknown


def find_named(names: Iterable[str], patterns: Sequence[str], setting: str, problem: str) -> set[str]:
    """Return the names that fit a pattern, as in ``is_named``; refuse a pattern that none fits."""
    fitting = {pattern: {name for name in names if is_named(name, [pattern])} for pattern in patterns}
    for pattern, found in fitting.items():
        if not found:
            known = {name.rpartition(".")[2] for name in names}
            hint = suggest(pattern.rpartition(".")[2], known, f"expected one such as {', '.join(sorted(known)[:8])}")
            raise ValueError(f"{setting}: got {pattern!r}: {problem}; {hint}")
    return set().union(*fitting.values())


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a module, or one around it, has a name that fits a pattern, in full or in its last parts."""
    parts = name.split(".")
    around = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatch.fnmatchcase(n, p) or fnmatch.fnmatchcase(n, f"*.{p}") for n in around for p in patterns)


@cache
def is_linear(kind: Any) -> bool:
    """Whether layers of a class do what ``nn.Linear`` does: itself, and subclasses that only write it otherwise.

    Falcon's does. Those with a constructor of their own are left alone: they may hold more, or others read them.
    """
    if kind is nn.Linear or not issubclass(kind, nn.Linear) or kind.__init__ is not nn.Linear.__init__:
        return kind is nn.Linear
    weight, x = torch.arange(6.0).view(2, 3) - 2.5, torch.tensor([[1.0, -2.0, 4.0]])
    for bias in (None, torch.tensor([0.5, -1.5])):
        with torch.device("cpu"):
            layer = kind(3, 2, bias=bias is not None)
        values = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        layer.load_state_dict(values)
        if not torch.equal(layer(x), nn.functional.linear(x, weight, bias)):
            return False
    return True


def _is_weight(key: str, parameter: Tensor) -> bool:
    return parameter.dim() == 3 or key == "weight"


def _find_obstacle(weights: Mapping[str, nn.Parameter], settings: Quantization, num_owners: Mapping[int, int]) -> str:
    for weight in weights.values():
        if num_owners[id(weight)] > 1:
            return "its weight is that of another layer too"
        if settings.type != "int8" and weight.shape[-1] % settings.block_size:
            return f"its rows of {weight.shape[-1]} do not divide into blocks of {settings.block_size}"
        if settings.type == "int8" and weight.shape[-1] <= 4:  # as those that Gemma 3n clamps in place
            return f"its rows of {weight.shape[-1]} and their scale take as much as in 16 bits"
    return ""


def _quantize_experts(module: nn.Module, weights: dict[str, nn.Parameter], settings: Quantization) -> None:
    kind: Any = type(module)
    module.__class__ = _mix_into(kind)
    assert isinstance(module, QuantizedExperts)
    module.quantization = settings
    module.dense_shapes = {}
    for key, weight in weights.items():
        delattr(module, key)
        module.add_quantized(key, weight)
    module.requires_grad_(requires_grad=False)


@cache
def _mix_into(kind: Any) -> Any:
    # Still one of its own class, so that the model's initializer knows it.
    return type(f"Quantized{kind.__name__}", (QuantizedExperts, kind), {})
