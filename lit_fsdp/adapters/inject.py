"""Adds low-rank adapters to a model that has not been sharded yet, and decides which parameters train.

The adapters are peft's own layers, put into the model in place: names of its modules stay, and FSDP units, checkpoints
and generation need to know nothing of them.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.pytorch_utils import Conv1D

from lit_fsdp.adapters.layers import ADAPTER, clean_name, import_peft, iterate_adapters
from lit_fsdp.adapters.lora import KEEPS_BASE, LoRA
from lit_fsdp.errors import join_names
from lit_fsdp.quantization.layers import (
    QuantizedLayer,
    QuantizedLinear,
    is_experts,
    is_linear,
    is_named,
    iterate_quantized,
    list_read,
)

if TYPE_CHECKING:
    from peft import LoraConfig

_HELD = "held"  # the model, in what peft is given


def add_adapters(model: nn.Module, lora: LoRA) -> None:
    """Freeze a model and add adapters, in place; its trainable parameters are then those that need a gradient.

    Call it after quantizing and before sharding. On the meta device it costs nothing; ``load_weights`` and
    ``init_weights`` give values.

    Raises:
        ValueError: A target is not in the model, or cannot be trained.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("lora: the model is sharded already, and adapters would not be; add them before")
    if lora.pretrained is not None:
        raise ValueError(
            f"lora.pretrained: got {lora.pretrained!r}: it is read by tasks for text and images, and by those that are "
            "made of PretrainedTask; merge the adapters, and start from the merged model"
        )
    lora.check(is_quantized=next(iterate_quantized(model), None) is not None)
    linear: Any = _list_linear(model, lora).values() if lora.init_lora_weights not in KEEPS_BASE else ()
    if any(not module.weight.is_meta for module in linear):
        raise ValueError(
            f"lora.init_lora_weights: got {lora.init_lora_weights!r}: it is made of weights while they are loaded, and "
            'the model has its already; build it under torch.device("meta")'
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


def list_left_out(model: nn.Module, lora: LoRA) -> list[str]:
    """Return the linear layers that ``all-linear`` leaves out, as an adapter might be wrong there, or not be used."""
    linear = _list_linear(model, lora) if lora.target_modules == "all-linear" else {}
    fitting = _choose_fitting(model, lora, linear)
    return [clean_name(name) for name in linear if name not in fitting]


def find_misreading(model: nn.Module, config: LoraConfig) -> str:
    """Return why peft would not find the targets of adapters again when it loads them; empty if it would.

    In the models of some families it takes all linear layers that are called as single experts were in Transformers 4
    for weights of fused experts, or renames some as Transformers renames weights of older files; seen in peft 0.21.

    Args:
        model: With or without the adapters.
        config: Of the adapters.
    """
    import_peft()
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return ""
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers,
        convert_peft_config_for_transformers,
    )

    targets = set(config.target_modules or ())
    if reason := next(filter(None, (_find_bypass(model, config, name) for name in sorted(targets))), ""):
        return f"peft could not load the adapters: {reason}"
    read = deepcopy(config)
    try:
        convert_peft_config_for_transformers(read, model, None)
    except ValueError as error:
        return f"peft could not load the adapters: {error}"
    if taken := targets - set(read.target_modules or ()):
        return f"peft would take {min(taken)} for a weight of fused experts when it loads the adapters"
    # In full: of many targets peft keeps last parts only, which none of its rules for names may fit.
    names = {clean_name(name) for name, _ in model.named_modules()}
    names = {name for name in names if any(_ends_with(name, target) for target in targets)}
    stored = {f"base_model.model.{name}.lora_A.weight": name for name in names}
    values = dict.fromkeys(stored, torch.empty(1, 1, device="meta"))
    found = convert_peft_adapter_state_dict_for_transformers(model, config, values)
    lost = [name for key, name in stored.items() if key not in found]
    return f"peft would give {min(lost)} another name when it loads the adapters" if lost else ""


def _inject(model: Any, lora: LoRA) -> None:
    config = lora.build_config()
    targets, weights = _resolve_targets(model, lora), _resolve_parameters(model, lora)
    ranks = _resolve_patterns(config, "rank_pattern", [*targets, *weights])
    alphas = _resolve_patterns(config, "alpha_pattern", [*targets, *weights])
    given = replace(
        config,
        target_modules=[f"{_HELD}.{name}" for name in targets],
        target_parameters=None,
        rank_pattern={re.escape(f"{_HELD}.{name}"): ranks[name] for name in targets if name in ranks},
        alpha_pattern={re.escape(f"{_HELD}.{name}"): alphas[name] for name in targets if name in alphas},
        modules_to_save=None,  # trained in place, without the copy that peft would make
        exclude_modules=None,
    )
    model.requires_grad_(requires_grad=False)  # peft does, which is not asked where only experts get adapters
    if targets:
        _inject_into_layers(model, lora, given, targets)
    if weights:
        import_peft()
        from lit_fsdp.adapters.experts import add_expert_adapter  # it imports peft

        for name in weights:
            r, alpha = ranks.get(name, config.r), alphas.get(name, config.lora_alpha)
            add_expert_adapter(model, name, config=config, r=r, alpha=alpha)
    # As peft leaves it: what it needs to find the same modules again.
    config.target_modules = sorted(name.removeprefix(f"{_HELD}.") for name in given.target_modules or ())
    config.target_parameters = sorted(weights) or None
    config.modules_to_save = config.exclude_modules = None
    config.fan_in_fan_out = given.fan_in_fan_out  # peft sets it for Conv1D
    model.peft_config = {ADAPTER: config}


def _inject_into_layers(model: nn.Module, lora: LoRA, given: LoraConfig, targets: Sequence[str]) -> None:
    holder = nn.Module()  # without a config, by which peft 0.21 takes names of experts for those of Transformers 4
    holder.add_module(_HELD, model)
    try:
        import_peft().inject_adapter_in_model(given, holder, ADAPTER)
    except (ValueError, NotImplementedError, TypeError, AttributeError) as error:
        reason = re.sub(r"\(\n.*\n\)", "", str(error), flags=re.DOTALL)  # a module as it prints itself
        text = " ".join(reason.split())[:200]
        if any(is_experts(model.get_submodule(name)) for name in targets):
            text = "fused experts are no layers; name their weights in target_parameters"
        raise ValueError(f"lora.target_modules: got {lora.target_modules!r}: {text}") from error
    from lit_fsdp.adapters.linear import take_over  # it imports peft

    take_over(model)


def _resolve_patterns(config: LoraConfig, setting: str, targets: Sequence[str]) -> dict[str, Any]:
    """Return values by full name; each pattern must fit a target, and the first that fits counts, as in peft."""
    get_pattern_key = import_peft().utils.other.get_pattern_key
    patterns: dict[str, Any] = getattr(config, setting)
    for pattern in patterns:
        if not any(get_pattern_key([pattern], name) == pattern for name in targets):
            raise ValueError(f"lora.{setting}: got {pattern!r}: none of the targets has such a name")
    keys = {name: get_pattern_key(list(patterns), name) for name in targets}
    return {name: patterns[key] for name, key in keys.items() if key in patterns}


def _resolve_targets(model: nn.Module, lora: LoRA) -> list[str]:
    """Return the names of the modules that get an adapter."""
    if not lora.target_modules:
        return []
    targets = lora.target_modules
    if targets == "all-linear":
        found = _choose_fitting(model, lora, _list_linear(model, lora))
    elif isinstance(targets, str):
        found = [name for name in _list_modules(model, lora) if re.fullmatch(targets, name)]
    else:
        found = [name for name in _list_modules(model, lora) if any(_ends_with(name, part) for part in targets)]
    if not found:
        raise ValueError(f"lora.target_modules: got {targets!r}: {_describe_no_target(model, lora)}")
    return found


def _describe_no_target(model: nn.Module, lora: LoRA) -> str:
    """Return why no module gets an adapter."""
    targets, names = lora.target_modules, [name for name, _ in model.named_modules() if name]
    if isinstance(targets, str) and targets != "all-linear" and not any(re.fullmatch(targets, name) for name in names):
        if any(_takes_adapter(module) for name, module in model.named_modules() if _ends_with(name, targets)):
            return f"a text is a regular expression of whole names; set a list of names, [{targets}]"
        near = difflib.get_close_matches(targets, ["all-linear"], n=1)
        return "no module of the model has such a name" + ("; did you mean all-linear?" if near else "")
    left_out = (*lora.exclude_modules, *lora.modules_to_save)
    if targets != "all-linear":
        return "exclude_modules and modules_to_save leave none"
    # By name, as a task adds the head of a classifier to what the user wrote.
    outside = f" outside of {join_names(left_out)} (exclude_modules, modules_to_save)" if left_out else ""
    return f"the model has no plain linear layers{outside}; name other modules"


def _list_modules(model: nn.Module, lora: LoRA) -> dict[str, nn.Module]:
    left_out = (*lora.exclude_modules, *lora.modules_to_save)
    return {n: m for n, m in model.named_modules() if n and not is_named(n, left_out)}


def _list_linear(model: nn.Module, lora: LoRA) -> dict[str, nn.Module]:
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head, modules = find_head(), _list_modules(model, lora)
    return {n: m for n, m in modules.items() if isinstance(m, nn.Linear | Conv1D) and m is not head}


def _choose_fitting(model: nn.Module, lora: LoRA, linear: Mapping[str, nn.Module]) -> list[str]:
    """Return the linear layers whose adapters are used, and computed with as they should be."""
    read, config = list_read(model), lora.build_config()
    found = [name for name, module in linear.items() if _takes_adapter(module) and name not in read]
    return [name for name in found if not _find_bypass(model, config, name)]


def _find_bypass(model: nn.Module, config: LoraConfig, name: str) -> str:
    """Return why peft has no adapter of a layer: in Mamba and its kin, kernels of GPUs read some weights themselves."""
    import_peft()
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba  # private, seen in peft 0.21

    try:
        _check_lora_target_modules_mamba(config, model, name.rpartition(".")[2])
    except ValueError as error:
        return str(error)
    return ""


def _takes_adapter(module: Any) -> bool:
    """Whether the output is that of a linear layer, as that of Llama 4's router is not.

    Not known of classes with a constructor and a ``forward`` of their own.
    """
    if isinstance(module, Conv1D | QuantizedLinear) or type(module).forward is nn.Linear.forward:
        return True
    return is_linear(module.__class__)


def _resolve_parameters(model: nn.Module, lora: LoRA) -> list[str]:
    """Return the names of the weights of experts that get an adapter, in the order in which peft would add them.

    Each that the user wrote must be one; peft would leave it out in silence.
    """
    if not lora.target_parameters:
        return []
    import_peft()
    from lit_fsdp.adapters.experts import list_expert_weights  # it imports peft

    known = [f"{n}.{key}" for n, m in model.named_modules() if is_experts(m) for key in list_expert_weights(m)]
    for part in lora.target_parameters:
        if any(_ends_with(name, part) for name in known):
            continue
        raise ValueError(f"lora.target_parameters: got {part!r}: {_describe_unknown(model, part, known)}")
    left_out = (*lora.exclude_modules, *lora.modules_to_save)
    found = [n for n in known if any(_ends_with(n, part) for part in lora.target_parameters)]
    kept = [name for name in found if not is_named(name, left_out)]
    if not kept:
        raise ValueError(
            f"lora.target_parameters: got {lora.target_parameters!r}: exclude_modules and modules_to_save leave none"
        )
    return kept


def _describe_unknown(model: nn.Module, part: str, known: Sequence[str]) -> str:
    """Return why a name is none of a weight of experts, and which may be meant."""
    owner = next(
        (m for n, m in model.named_modules() for key in _list_stacked(m) if _ends_with(f"{n}.{key}", part)), None
    )
    if owner is not None and not is_experts(owner):
        return (
            f"{type(owner).__name__} computes with its weights in a way that takes no adapters yet; leave it out, and "
            "name linear layers in target_modules"
        )
    if not known:
        return "the model has no fused experts; leave it out"
    num_parts = part.count(".") + 1
    shorts = sorted({".".join(name.split(".")[-num_parts:]) for name in known})
    if any(_ends_with(name, part) for name, _ in model.named_parameters()):
        return f"no weight of fused experts, such as {shorts[0]}; name linear layers in target_modules"
    near = difflib.get_close_matches(part, shorts, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"expected one such as {', '.join(shorts[:4])}"
    return f"the model has no such weight of fused experts; {hint}"


def _list_stacked(module: nn.Module) -> list[str]:
    """Return the names of weights that are matrices side by side, as those of experts; not of convolutions of torch."""
    if type(module).__module__.startswith("torch."):
        return []
    return [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3]


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
            raise ValueError(
                f"lora.modules_to_save: {name} is quantized, and cannot be trained; name it in "
                "quantization.skip_modules too"
            )
        for parameter in module.parameters():
            if others := sorted(n for n in owners[id(parameter)] if not n.startswith(f"{name}.")):
                raise ValueError(
                    f"lora.modules_to_save: {name} shares its weight with {others[0].rpartition('.')[0]}, and the "
                    "exported adapter could not; make it one of target_modules instead"
                )


def _find_saved(model: nn.Module, lora: LoRA) -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in model.named_modules() if any(_ends_with(n, part) for part in lora.modules_to_save)]


def _ends_with(name: str, part: str) -> bool:
    return name == part or name.endswith(f".{part}")


def _find_obstacle(layer: Any, lora: LoRA, num_owners: Mapping[int, int]) -> str:
    """Return why an adapter could not work: what peft would compute, or we, is not what the setting says."""
    base = layer.get_base_layer()
    is_linear = ADAPTER in layer.lora_A and not getattr(layer, "fan_in_fan_out", False)
    if lora.use_dora and not is_linear:
        return "use_dora is only for linear layers; leave it out, or name other target_modules"
    if lora.init_lora_weights in KEEPS_BASE:
        return ""
    init = f"init_lora_weights {lora.init_lora_weights!r}"
    shape = getattr(base, "dense_shapes", {}).get("weight", getattr(base, "weight", torch.empty(0)).shape)
    if not is_linear or len(shape) != 2:
        return f"{init} is only for linear layers; set it to default, or name other target_modules"
    if layer.r[ADAPTER] > min(shape):
        return f"{init} has no rank {layer.r[ADAPTER]} in a weight of {tuple(shape)}; set a smaller r"
    if num_owners[id(base.weight)] > 1:
        return f"{init} would change the weight that it shares; set it to default, or name other target_modules"
    if lora.init_lora_weights == "loftq" and not isinstance(base, QuantizedLayer):
        return f"{init} fits the error of quantization, and this layer is not quantized; name other target_modules"
    return ""


def _refuse_merge(*_: Any, **__: Any) -> None:
    raise ValueError(
        "an adapter cannot be merged into quantized weights without rounding them again; "
        "`python -m lit_fsdp export --merge true` merges it into the original ones"
    )
