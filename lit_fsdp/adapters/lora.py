"""Low-rank adapters of peft in a model that has not been sharded yet, and which parameters train.

The adapters are peft's own layers, put into the model in place, so that names of its modules stay, and FSDP units,
checkpoints and generation need to know nothing of them.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.pytorch_utils import Conv1D

from lit_fsdp.quantization.layers import QuantizedLayer, iterate_quantized

_HELD = "held"  # the model, in what peft is given
ADAPTER = "default"  # the name under which peft keeps it
_RANDOM = ("default", "gaussian")  # initializations that leave the base weight as it is
Init = Literal["default", "gaussian", "pissa", "pissa_niter_16", "olora", "loftq"]
_DTypeName = Literal["float32", "bfloat16"]
_WRAPPERS = ("base_layer", "_checkpoint_wrapped_module")
_ADAPTER_PARTS = frozenset(LoraLayer.adapter_layer_names)


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Train low-rank additions to frozen weights (arXiv:2106.09685), with peft.

    Args:
        r: Rank of the additions.
        alpha: They are multiplied by ``alpha / r``.
        dropout: Of the inputs of the additions.
        target_modules: Which layers get one: ``all-linear`` for all linear layers but the output head, a list of names
            or their last parts, or a string that is a regular expression of whole names. Fused experts of mixtures are
            no layers, and get none.
        exclude_modules: Names, or their last parts, that get none.
        modules_to_save: Modules that are trained in full beside them, by name or last part, such as a new head.
        use_rslora: Multiply by ``alpha / sqrt(r)`` instead (arXiv:2312.03732), which suits large ranks.
        use_dora: Train the lengths of the weights' rows too (arXiv:2402.09353). Slower: dequantizes every weight
            again.
        init_lora_weights: ``default`` and ``gaussian`` start as the base model. ``pissa`` (arXiv:2404.02948) and
            ``olora`` (arXiv:2406.01775) move the strongest directions of each weight into its adapter,
            ``pissa_niter_16`` with a fast randomized decomposition; what is left may be quantized. ``loftq``
            (arXiv:2310.08659) fits the adapter to the error of quantization.
        rank_pattern: Other ranks for some layers, by name, last part or regular expression.
        alpha_pattern: The same for ``alpha``.
        dtype: Of the trained parameters and their optimizer state; computed with in the precision of the run.
    """

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | Sequence[str] = "all-linear"
    exclude_modules: Sequence[str] = ()
    modules_to_save: Sequence[str] = ()
    use_rslora: bool = False
    use_dora: bool = False
    init_lora_weights: Init = "default"
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    dtype: _DTypeName = "float32"

    def __post_init__(self) -> None:
        for name in ("exclude_modules", "modules_to_save"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # YAML gives lists
        if not isinstance(self.target_modules, str):
            object.__setattr__(self, "target_modules", tuple(self.target_modules))

    def check(self, *, is_quantized: bool) -> None:
        """Refuse values with which nothing would be trained, or which contradict each other.

        Args:
            is_quantized: Whether the base weights are.

        Raises:
            ValueError: With the setting and what is expected.
        """
        rules = {
            "r": (self.r >= 1 and all(r >= 1 for r in self.rank_pattern.values()), "1 or more"),
            "alpha": (self.alpha > 0 and all(a > 0 for a in self.alpha_pattern.values()), "above 0"),
            "dropout": (0 <= self.dropout < 1, "from 0 to below 1"),
            "target_modules": (bool(self.target_modules), "all-linear, names or a regular expression"),
        }
        try:
            re.compile(self.target_modules if isinstance(self.target_modules, str) else "")
        except re.error as error:
            raise ValueError(
                f"lora.target_modules: got {self.target_modules!r}: no regular expression: {error}"
            ) from error
        for name, (is_right, expected) in rules.items():
            if not is_right:
                raise ValueError(f"lora.{name}: got {getattr(self, name)!r}: expected {expected}")
        if self.init_lora_weights == "loftq" and not is_quantized:
            raise ValueError(
                "lora.init_lora_weights: got 'loftq': it fits adapters to the error of "
                "quantization, and there is none; set "
                "quantization, or init_lora_weights to default or pissa"
            )
        if self.use_dora and self.init_lora_weights not in _RANDOM:
            raise ValueError(
                f"lora.init_lora_weights: got {self.init_lora_weights!r} with use_dora, which "
                "starts as the base model; leave one out"
            )

    def build_config(self, base_model: str | None = None) -> LoraConfig:
        """Return the configuration of peft, as it is exported.

        Args:
            base_model: Name or folder of the model that the adapter belongs to.
        """
        return LoraConfig(
            r=self.r,
            lora_alpha=_to_whole(self.alpha),
            lora_dropout=self.dropout,
            target_modules=self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules),
            exclude_modules=[*self.exclude_modules, *self.modules_to_save] or None,
            modules_to_save=list(self.modules_to_save) or None,
            use_rslora=self.use_rslora,
            use_dora=self.use_dora,
            rank_pattern=dict(self.rank_pattern),
            alpha_pattern={name: _to_whole(alpha) for name, alpha in self.alpha_pattern.items()},
            bias="none",
            base_model_name_or_path=base_model,
        )


def add_adapters(model: nn.Module, lora: LoRA) -> None:
    """Freeze a model and add adapters, in place; what trains is then what needs a gradient.

    Call it after quantizing and before sharding. On the meta device it costs nothing; ``load_weights`` and
    ``init_weights`` give values.

    Args:
        model: Changed in place.
        lora: The settings.

    Raises:
        ValueError: A target is not in the model, or cannot be trained.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("lora: the model is sharded already, and adapters would not be; add them before")
    lora.check(is_quantized=next(iterate_quantized(model), None) is not None)
    if lora.init_lora_weights not in _RANDOM and any(not parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"lora.init_lora_weights: got {lora.init_lora_weights!r}: it is made of weights "
            "while they are loaded, and the model has its "
            'already; build it under torch.device("meta")'
        )
    _check_names(model, lora)
    _inject(model, lora)
    num_owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for name, layer in iterate_adapters(model):
        if obstacle := _find_obstacle(layer, lora, num_owners):
            raise ValueError(f"lora.target_modules: {clean_name(name)}: {obstacle}")
        layer.initialization = lora.init_lora_weights
        if isinstance(layer.get_base_layer(), QuantizedLayer):
            layer.merge = _refuse_merge
    for _, module in _find_saved(model, lora):
        module.requires_grad_()
    dtype = getattr(torch, lora.dtype)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _inject(model: Any, lora: LoRA) -> None:
    config = lora.build_config()
    targets = resolve_targets(model, lora)
    patterns: dict[str, dict[str, Any]] = {}
    for setting in ("rank_pattern", "alpha_pattern"):
        patterns[setting] = getattr(config, setting)
        setattr(config, setting, _resolve_patterns(setting, patterns[setting], targets))
    config.target_modules = [f"{_HELD}.{name}" for name in targets]
    config.modules_to_save = config.exclude_modules = None  # trained in place, without the copy that peft would make
    holder = nn.Module()  # without a config, by which peft 0.21 takes names of experts for those of Transformers 4
    holder.add_module(_HELD, model)
    try:
        inject_adapter_in_model(config, holder, ADAPTER)
    except (ValueError, NotImplementedError, TypeError, AttributeError) as error:
        reason = re.sub(r"\(\n.*\n\)", "", str(error), flags=re.DOTALL)  # a module as it prints itself
        raise ValueError(
            f"lora.target_modules: got {lora.target_modules!r}: {' '.join(reason.split())[:200]}"
        ) from error
    # As peft leaves it: what it needs to find the same modules again.
    config.target_modules = sorted(name.removeprefix(f"{_HELD}.") for name in config.target_modules)
    for setting, given in patterns.items():
        setattr(config, setting, given)
    model.peft_config = {ADAPTER: config}


def _resolve_patterns(setting: str, patterns: Mapping[str, Any], targets: Sequence[str]) -> dict[str, Any]:
    """Return values by full name; each pattern must fit a target, and the first that fits counts, as in peft."""
    found: dict[str, Any] = {}
    for pattern, value in patterns.items():
        hits = [name for name in targets if re.match(rf"(.*\.)?({pattern})$", name)]
        if not hits:
            raise ValueError(f"lora.{setting}: got {pattern!r}: none of the targets has such a name")
        for name in hits:
            found.setdefault(re.escape(f"{_HELD}.{name}"), value)
    return found


def check_units(model: nn.Module, units: Sequence[str]) -> None:
    """Refuse FSDP units inside a layer of DoRA, which reads the weight of its base layer from outside of that.

    Args:
        model: Not sharded yet.
        units: Names of its modules.

    Raises:
        ValueError: With the unit.
    """
    for name, layer in iterate_adapters(model):
        inside = [unit for unit in units if unit.startswith(f"{name}.")]
        if inside and len(layer.lora_magnitude_vector):
            raise ValueError(
                f"wrap: {inside[0]} would be gathered apart from the layer around it, whose "
                "use_dora needs its weight; "
                "leave units at its default, or name larger modules"
            )


def resolve_targets(model: nn.Module, lora: LoRA) -> list[str]:
    """Return the names of the modules that get an adapter. Pure.

    Args:
        model: Without adapters.
        lora: The settings.

    Raises:
        ValueError: There are none.
    """
    left_out = (*lora.exclude_modules, *lora.modules_to_save)
    names = {n: m for n, m in model.named_modules() if n and not any(_is_inside(n, part) for part in left_out)}
    if lora.target_modules == "all-linear":
        find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = find_head()
        found = [n for n, m in names.items() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    elif isinstance(lora.target_modules, str):
        found = [name for name in names if re.fullmatch(lora.target_modules, name)]
    else:
        found = [name for name in names if any(_ends_with(name, part) for part in lora.target_modules)]
    if not found:
        raise ValueError(f"lora.target_modules: got {lora.target_modules!r}: no module of the model has such a name")
    return found


def iterate_adapters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that have an adapter, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def list_adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return all trainable parameters of a model with adapters; of one without, nothing."""
    if next(iterate_adapters(model), None) is None:
        return []
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def is_adapter_name(name: str) -> bool:
    """Whether a parameter belongs to an adapter, and so is in no file of the base model."""
    return not _ADAPTER_PARTS.isdisjoint(name.split("."))


def clean_name(name: str) -> str:
    """Return a name in the model as files and users know it, without the wrappers around a module."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def reset_adapter(module: nn.Module) -> bool:
    """Give an adapter its first values, if ``module`` is a layer that has one; returns whether it is."""
    if not isinstance(module, LoraLayer):
        return False
    layer: Any = module
    layer.reset_lora_parameters(ADAPTER, True if layer.initialization == "default" else layer.initialization)
    for magnitude in layer.lora_magnitude_vector.parameters():
        nn.init.ones_(magnitude)  # until the base weight is in place
    return True


def is_decomposed(layer: Any) -> bool:
    """Whether the adapter of a layer starts from its base weight, see :func:`decompose`."""
    return ADAPTER in layer.lora_A and layer.initialization not in _RANDOM


def decompose(layer: Any, weight: Tensor, requantize: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return where an adapter starts that is made of its base weight, and what becomes of that.

    Args:
        layer: Whose rank, scaling and initialization count.
        weight: Dense, ``float32`` [out, in].
        requantize: Returns what quantization makes of a weight, for LoftQ.

    Returns:
        ``A`` [r, in], ``B`` [out, r], and the base weight to store [out, in].
    """
    r, scaling = layer.r[ADAPTER], layer.scaling[ADAPTER]
    if layer.initialization == "olora":
        q, triangle = torch.linalg.qr(weight)
        left, right = q[:, :r].contiguous(), triangle[:r].contiguous()
        return right, left, weight - scaling * left @ right
    # LoftQ: its algorithm 1 with one iteration, the default of peft.
    strong = weight - requantize(weight) if layer.initialization == "loftq" else weight
    left, right = _find_strongest(strong, r, is_exact=layer.initialization != "pissa_niter_16")
    rest = weight if layer.initialization == "loftq" else weight - left @ right
    return right / math.sqrt(scaling), left / math.sqrt(scaling), rest


def _find_strongest(weight: Tensor, r: int, *, is_exact: bool) -> tuple[Tensor, Tensor]:
    """Return the factors of the best approximation of rank ``r``: [out, r] and [r, in]."""
    if is_exact:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # of the CPU: the same on all ranks and machines
            u, s, v = (factor.to(weight.device) for factor in torch.svd_lowrank(weight.cpu(), q=r, niter=16))
        vh = v.T
    root = s[:r].sqrt()
    return u[:, :r] * root, root[:, None] * vh[:r]


def _to_whole(alpha: float) -> Any:
    return int(alpha) if alpha == int(alpha) else alpha  # peft means an int, and takes both


def _check_names(model: nn.Module, lora: LoRA) -> None:
    """Refuse names that no module has; peft would leave them out in silence."""
    names = [name for name, _ in model.named_modules() if name]
    wanted = {
        "target_modules": () if isinstance(lora.target_modules, str) else lora.target_modules,
        "exclude_modules": lora.exclude_modules,
    }
    for setting, parts in {**wanted, "modules_to_save": lora.modules_to_save}.items():
        for part in parts:
            if not any(_ends_with(name, part) for name in names):
                near = difflib.get_close_matches(part, {name.rpartition(".")[2] for name in names}, n=1)
                hint = f"did you mean {near[0]}?" if near else "expected the name of a module, or its last part"
                raise ValueError(f"lora.{setting}: got {part!r}: the model has no such module; {hint}")
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name)
    for name, module in _find_saved(model, lora):
        if next(iterate_quantized(module), None) is not None:
            raise ValueError(f"lora.modules_to_save: {name} is quantized, and cannot be trained; name it in skip too")
        for parameter in module.parameters():
            if others := sorted(n for n in owners[id(parameter)] if not n.startswith(f"{name}.")):
                raise ValueError(
                    f"lora.modules_to_save: {name} shares its weight with {others[0].rpartition('.')[0]}, and the "
                    "exported adapter could not; make it one of targets instead"
                )


def _find_saved(model: nn.Module, lora: LoRA) -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in model.named_modules() if any(_ends_with(n, part) for part in lora.modules_to_save)]


def _ends_with(name: str, part: str) -> bool:
    return name == part or name.endswith(f".{part}")


def _is_inside(name: str, part: str) -> bool:
    return f".{name}.".find(f".{part}.") >= 0


def _find_obstacle(layer: Any, lora: LoRA, num_owners: Mapping[int, int]) -> str:
    """Return why an adapter could not work: what peft would compute, or we, is not what the setting says."""
    base = layer.get_base_layer()
    is_linear = ADAPTER in layer.lora_A and not getattr(layer, "fan_in_fan_out", False)
    if lora.use_dora and not is_linear:
        return "use_dora is only for linear layers; leave it out, or name other target_modules"
    if lora.init_lora_weights in _RANDOM:
        return ""
    shape = getattr(base, "dense_shapes", {}).get("weight", getattr(base, "weight", torch.empty(0)).shape)
    if not is_linear or len(shape) != 2:
        return (
            f"init_lora_weights {lora.init_lora_weights!r} is only for linear layers; set it to "
            "default, or name other target_modules"
        )
    if layer.r[ADAPTER] > min(shape):
        return (
            f"init_lora_weights {lora.init_lora_weights!r} has no rank {layer.r[ADAPTER]} in a "
            f"weight of {tuple(shape)}; set a smaller r"
        )
    if num_owners[id(base.weight)] > 1:
        return (
            f"init_lora_weights {lora.init_lora_weights!r} would change the weight that it shares; "
            "set it to default, or name other target_modules"
        )
    if lora.init_lora_weights == "loftq" and not isinstance(base, QuantizedLayer):
        return (
            "init_lora_weights 'loftq' fits the error of quantization, and this layer is not "
            "quantized; name other target_modules"
        )
    return ""


def _refuse_merge(*_: Any, **__: Any) -> None:
    raise ValueError(
        "an adapter cannot be merged into quantized weights without rounding them again; "
        "`python -m lit_fsdp export --merge true` merges it into the original ones"
    )
