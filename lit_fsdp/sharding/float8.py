"""Linear layers that multiply in float8, by torchao: more products a second on GPUs that have them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from lit_fsdp.adapters.layers import iterate_adapters
from lit_fsdp.quantization.layers import find_named, iterate_quantized
from lit_fsdp.sharding.mixed_precision import MixedPrecision

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
_FIRST_CAPABILITY = (8, 9)
_MULTIPLE = 16  # of the sizes of a weight, which the kernels ask for


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Multiply in float8 in the linear layers of the model; shards, gradients and optimizer keep their dtypes.

    Both factors of a product are rounded when it is computed, so parameters are gathered and activations kept as they
    are without it. It pays for large layers and many tokens, and with ``compile``. Layers whose sizes do not divide by
    16 stay as they are.

    Args:
        recipe: How numbers are scaled before they are rounded, by the names of torchao: ``tensorwise`` by the largest
            of a tensor, the fastest; ``rowwise`` by the largest of each row; ``rowwise_with_gw_hp`` likewise, with
            gradients of weights that are not rounded, the most exact.
        skip_modules: Linear layers to leave as they are, by name or last part; ``null`` leaves the output head.
        emulate: Round to float8, and multiply in the dtype of the compute: to try it on devices without such products.
            Slower than none.
    """

    recipe: Recipe = "tensorwise"
    skip_modules: tuple[str, ...] | None = None
    emulate: bool = False

    def check_machine(self, device: torch.device, dtypes: MixedPrecision) -> None:
        """Refuse a device without products in float8, and a dtype of the compute that its kernels do not have.

        Raises:
            ValueError: With what would work.
            ModuleNotFoundError: torchao is not installed.
        """
        _import_torchao()
        if self.emulate:
            return
        if device.type != "cuda":
            raise ValueError(
                f"float8: got a {device.type} device, which has no products in float8; set float8.emulate to try it "
                "there, or leave it out"
            )
        if torch.version.hip is None and (found := torch.cuda.get_device_capability(device)) < _FIRST_CAPABILITY:
            raise ValueError(
                f"float8: {torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}: expected "
                "8.9 or more, such as RTX 4090 or H100; leave it out"
            )
        self.check_dtypes(dtypes)

    def check_dtypes(self, dtypes: MixedPrecision) -> None:
        """Refuse a dtype of the compute that its kernels do not have.

        Raises:
            ValueError: With what would work.
        """
        if not self.emulate and dtypes.param_dtype != "bfloat16":
            raise ValueError(
                f"float8: got a compute in {dtypes.param_dtype or 'float32'}: its kernels return bfloat16; set "
                "trainer.precision to bf16-mixed or bf16-true"
            )


def check_unadapted(model: nn.Module) -> None:
    """Refuse a model that gains nothing by products in float8.

    Raises:
        ValueError: It has adapters or quantized weights.
    """
    if next(iterate_quantized(model), None) is not None:
        raise ValueError(
            "float8: the model has quantized weights, which are dequantized for products in the dtype of the compute; "
            "leave float8 or quantization out"
        )
    if next(iterate_adapters(model), None) is not None:
        raise ValueError(
            "float8: the model has adapters, and torchao would compute gradients of the frozen weights below them too, "
            "which takes longer than without it; leave float8 or lora out"
        )


def convert_linears(model: nn.Module, settings: Float8) -> list[str]:
    """Make linear layers multiply in float8, in place; names and values of parameters stay. Before sharding.

    Returns:
        Layers that stay as they are because their sizes do not divide by 16.

    Raises:
        ValueError: The model has adapters or quantized weights, a name to skip is none of it, or nothing is left.
    """
    check_unadapted(model)
    float8 = _import_torchao()
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    skipped = _find_skipped(model, settings, linears)
    odd = [
        name
        for name, module in linears.items()
        if name not in skipped and (module.in_features % _MULTIPLE or module.out_features % _MULTIPLE)
    ]
    chosen = linears.keys() - skipped - set(odd)
    if not chosen:
        why = f"; sizes of {odd[0]} do not divide by {_MULTIPLE}" if odd else ""
        raise ValueError(f"float8: {type(model).__name__} has no linear layer that could multiply in it{why}")
    made = float8.Float8LinearConfig.from_recipe_name(settings.recipe)
    # Tokens of a batch need not divide by 16 either, and they are the inner size of the product for the gradient.
    object.__setattr__(made, "pad_inner_dim", True)
    object.__setattr__(made, "emulate", settings.emulate)
    float8.convert_to_float8_training(model, config=made, module_filter_fn=lambda _, name: name in chosen)
    return odd


def _import_torchao() -> ModuleType:
    try:
        from torchao import float8
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torchao":
            raise
        raise ModuleNotFoundError('float8 needs the package torchao: pip install "lit_fsdp[float8]"') from error
    found: ModuleType = float8
    return found


def _find_skipped(model: nn.Module, settings: Float8, linears: dict[str, nn.Linear]) -> set[str]:
    if settings.skip_modules is None:
        parts: Iterable[Any] = model.modules()
        heads = [part.get_output_embeddings() for part in parts if hasattr(part, "get_output_embeddings")]
        return {name for name, module in linears.items() if any(module is head for head in heads)}
    return find_named(linears, settings.skip_modules, "float8.skip_modules", "no linear layer of the model")
