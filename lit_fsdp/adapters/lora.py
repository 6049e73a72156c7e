"""Settings of low-rank adapters, and what peft makes of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

from lit_fsdp.adapters.layers import import_peft
from lit_fsdp.errors import check_choices

KEEPS_BASE = ("default", "gaussian")  # initializations that leave the base weight as it is
InitName = Literal["default", "gaussian", "pissa", "pissa_niter_16", "olora", "loftq"]
_DTypeName = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Train low-rank additions to frozen weights (arXiv:2106.09685), with peft.

    Args:
        pretrained: Adapters to start from: a folder of peft, as exports are, a name on the Hub, or a run of ours, over
            the same model. All settings but ``dropout`` and ``dtype`` are theirs.
        r: Rank of the additions.
        alpha: They are multiplied by ``alpha / r``.
        dropout: Of the inputs of the additions.
        target_modules: Which layers get one: ``all-linear`` for all linear layers but the output head and routers, a
            list of names or their last parts, or a string that is a regular expression of whole names. Fused experts of
            mixtures are no layers: name their weights in ``target_parameters``.
        target_parameters: Weights of fused experts that get one for each expert: names or their last parts, such as
            ``mlp.experts.gate_up_proj``. Needs ``dropout: 0``. With ``target_modules: []``, only these get one.
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

    pretrained: str | None = None
    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | Sequence[str] = "all-linear"
    target_parameters: Sequence[str] = ()
    exclude_modules: Sequence[str] = ()
    modules_to_save: Sequence[str] = ()
    use_rslora: bool = False
    use_dora: bool = False
    init_lora_weights: InitName = "default"
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    dtype: _DTypeName = "float32"

    def __post_init__(self) -> None:
        for name in ("target_parameters", "exclude_modules", "modules_to_save"):
            names = getattr(self, name)
            if isinstance(names, str):  # from Python; of a configuration the parser refuses it
                raise ValueError(f"lora.{name}: got {names!r}: expected a list of names; set it to [{names}]")  # noqa: TRY004
            object.__setattr__(self, name, tuple(names))  # YAML gives lists
        if not isinstance(self.target_modules, str):
            object.__setattr__(self, "target_modules", tuple(self.target_modules))

    def check(self, *, is_quantized: bool) -> None:
        """Refuse values with which nothing would be trained, or which contradict each other."""
        check_choices(self, "lora")
        rules = {
            "r": (_is_rank(self.r), "1 or more, and whole"),
            "rank_pattern": (all(map(_is_rank, self.rank_pattern.values())), "ranks of 1 or more, and whole"),
            "alpha": (0 < self.alpha < math.inf, "above 0, and finite"),
            "alpha_pattern": (all(0 < a < math.inf for a in self.alpha_pattern.values()), "values above 0, and finite"),
            "dropout": (0 <= self.dropout < 1, "from 0 to below 1"),
            "target_modules": (
                bool(self.target_modules or self.target_parameters),
                "all-linear, names or a regular expression",
            ),
        }
        expressions = {
            "target_modules": [self.target_modules] if isinstance(self.target_modules, str) else [],
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
        }
        for name, expression in ((name, expression) for name, found in expressions.items() for expression in found):
            try:
                re.compile(expression)
            except re.error as error:
                raise ValueError(f"lora.{name}: got {expression!r}: no regular expression: {error}") from error
        for name, (is_right, expected) in rules.items():
            if not is_right:
                raise ValueError(f"lora.{name}: got {getattr(self, name)!r}: expected {expected}")
        if self.init_lora_weights == "loftq" and not is_quantized:
            raise ValueError(
                "lora.init_lora_weights: got 'loftq': it fits adapters to the error of quantization, and there is "
                "none; set quantization, or init_lora_weights to default or pissa"
            )
        self._check_parameters()
        if self.use_dora and self.init_lora_weights not in KEEPS_BASE:
            raise ValueError(
                f"lora.init_lora_weights: got {self.init_lora_weights!r} with use_dora, which starts as the base "
                "model; leave one out"
            )

    def _check_parameters(self) -> None:
        """Refuse what adapters of parameters cannot do; peft refuses the same, or starts from a weight of a layer."""
        if not self.target_parameters:
            return
        rules = {
            "dropout": (self.dropout == 0, "0: their inputs are shared with the weights; set it to 0"),
            "use_dora": (not self.use_dora, "false: it is only for linear layers; leave it out"),
            "init_lora_weights": (
                self.init_lora_weights in KEEPS_BASE,
                "default or gaussian: others are only for linear layers",
            ),
        }
        for name, (is_right, expected) in rules.items():
            if not is_right:
                raise ValueError(
                    f"lora.{name}: got {getattr(self, name)!r} with target_parameters, which take only {expected}, or "
                    "leave target_parameters out"
                )

    # Any, as jsonargparse reads this file for types, and would import peft under TYPE_CHECKING too.
    def build_config(self) -> Any:
        """Return the ``LoraConfig`` of peft, as it is exported."""
        return import_peft().LoraConfig(
            r=self.r,
            lora_alpha=_to_whole(self.alpha),
            lora_dropout=self.dropout,
            target_modules=self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules),
            target_parameters=list(self.target_parameters) or None,
            exclude_modules=[*self.exclude_modules, *self.modules_to_save] or None,
            modules_to_save=list(self.modules_to_save) or None,
            use_rslora=self.use_rslora,
            use_dora=self.use_dora,
            rank_pattern=dict(self.rank_pattern),
            alpha_pattern={name: _to_whole(alpha) for name, alpha in self.alpha_pattern.items()},
            bias="none",
        )


def _is_rank(value: Any) -> bool:
    return isinstance(value, Integral) and int(value) >= 1


def _to_whole(alpha: float) -> Any:
    return int(alpha) if alpha == int(alpha) else alpha  # peft means an int, and takes both
