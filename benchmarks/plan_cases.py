"""The steps that ``plan_accuracy.py`` compares, and groups of them; ``plan_steps.py`` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

from plan_models import IMAGE_FAMILIES, IMAGE_TOKENS, LARGE, TINY_FAMILIES, WRITTEN_WITH

from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.mesh import Mesh
from lit_fsdp.sharding.shard import Sharding

SMALL = {"vocab_size": 2000}
TINY = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "vocab_size": 8000}
GROUPS = ("families", "settings", "matrix", "speech", "large")
IMAGE = (3, 224, 224)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step of one model, with ``mode`` full, lora, dora, nf4 or int8; ``is_allocated``: also on real kernels.

    ``on_gpu``: predicted and traced with what kernels of GPUs keep, also without one.
    """

    family: str
    mode: str = "full"
    precision: str = "bf16-mixed"
    world_size: int = 4
    rows: int = 1
    length: int = 512
    recompute: str = "none"
    reshard: bool = True
    change: dict[str, Any] = field(default_factory=dict)
    num_micro_batches: int = 1
    is_held_out: bool = False
    is_allocated: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    loss_chunks: int = 1
    is_packed: bool = False
    dropout: float = 0.0
    on_gpu: bool = False

    @property
    def num_tokens(self) -> int:
        """Of a row: of an image its patches and what is before them, of speech its frames."""
        return IMAGE_TOKENS.get(self.family, self.length)

    def __str__(self) -> str:
        parts = [self.family, self.mode, self.precision, f"{self.world_size} ranks", f"{self.rows}x{self.num_tokens}"]
        parts += ["recompute"] if self.recompute == "full" else [self.recompute] * (self.recompute != "none")
        parts += ["no reshard"] * (not self.reshard) + ["accumulated"] * (self.num_micro_batches > 1)
        parts += ["packed"] * self.is_packed + [self.optimizer] * (self.optimizer != "adamw")
        parts += [f"{self.loss_chunks} loss chunks"] * (self.loss_chunks > 1)
        parts += [f"LoRA dropout {self.dropout}"] * bool(self.dropout) + ["as on a GPU"] * self.on_gpu
        parts += ["offload" if k == "cpu_offload" else f"{v}" for k, v in self.settings.items()]
        changed = [
            f"{key}={value}" for key, value in self.change.items() if key not in TINY or self.change[key] != TINY[key]
        ]
        return ", ".join([*parts, *["tiny"] * (TINY.items() <= self.change.items()), *changed])


def list_cases(group: Literal["families", "settings", "matrix", "speech", "large"]) -> Iterator[Case]:
    """Yield the cases of a group: tuned on first, then those held out."""
    if group == "matrix":
        for family in ("llama", "vit", "dinov2"):
            yield from _list_matrix(family, is_whole=True)
        return
    if group == "speech":
        yield from (*_list_speech(), *_list_matrix("qwen3_tts", is_whole=True))
        return
    if group == "large":
        yield from (replace(case, is_allocated=False) for case in _list_large())
        return
    cases = _list_settings() if group == "settings" else _list_families()
    # In half precision, kernels of CPUs take minutes for these.
    yield from (replace(case, is_allocated=case.precision == "32-true") for case in cases)
    if group == "families":
        yield from _list_experts()
        yield from _list_tiny()
        yield from _list_images()


def _list_families() -> Iterator[Case]:
    for family in ("llama", "qwen3", "gpt2", "vit"):
        yield Case(family=family)
        yield Case(family=family, precision="32-true", world_size=1, rows=4, length=256)
        yield Case(family=family, world_size=2, rows=2, recompute="full")
        yield Case(family=family, mode="lora", precision="bf16-true", world_size=2, rows=2, length=256)
        yield Case(family=family, reshard=False)
    yield Case(family="llama", mode="nf4", precision="bf16-true", world_size=2, rows=2, change=SMALL)
    yield Case(family="llama", precision="32-true", world_size=2, rows=2, recompute="selective", change=SMALL)
    # Gemma's soft-capped scores got their rule after its cases had been looked at.
    yield from (replace(case, is_held_out=case.family != "gemma2") for case in _list_held_out())


def _list_held_out() -> Iterator[Case]:
    for family in ("mistral", "qwen2", "gemma2"):
        yield Case(family=family, world_size=8, length=1024)
        yield Case(family=family, precision="bf16-true", world_size=2, rows=4, length=256, recompute="full")
        yield Case(family=family, mode="lora", world_size=1, rows=3, length=384, change=SMALL)
        yield Case(family=family, mode="nf4", precision="bf16-true", rows=2, length=640, recompute="full", change=SMALL)
        yield Case(family=family, precision="32-true", world_size=2, length=768, reshard=False, change=SMALL)
    yield Case(family="llama", length=1024, recompute="full", change=WIDE)
    yield Case(family="qwen3", mode="nf4", world_size=8, length=128, change=WIDE)
    yield Case(family="gpt2", precision="bf16-true", world_size=8, rows=8, length=128, change={"n_embd": 768})
    yield Case(family="gpt2", world_size=2, rows=3, recompute="full", num_micro_batches=2, change=SMALL)
    yield Case(family="vit", world_size=8, rows=8, change={"hidden_size": 768, "intermediate_size": 3072})
    yield Case(family="vit", mode="nf4", precision="bf16-true", rows=16, recompute="full")


def _list_experts() -> Iterator[Case]:
    """Yield mixtures of experts: in bfloat16, as fake tensors have no grouped product in float32."""
    for family in ("qwen3_moe", "mixtral", "qwen2_moe"):
        # The expert for all tokens got its rule with the first of its cases.
        yield Case(family=family, precision="bf16-true", world_size=2, is_held_out=family != "qwen2_moe")
        yield Case(family=family, rows=2, recompute="full", is_held_out=True)
        yield Case(family=family, mode="lora", precision="bf16-true", world_size=1, rows=2, is_held_out=True)


def _list_tiny() -> Iterator[Case]:
    """Yield tiny models of more families: the first shape of those that rules were written with, and others."""
    for i, family in enumerate(TINY_FAMILIES):
        is_held_out = family not in WRITTEN_WITH
        yield Case(family=family, precision="32-true", world_size=2, rows=2, length=256, is_held_out=is_held_out)
        yield Case(family=family, length=448, recompute="full", is_held_out=True)
        mode, more = ("lora", {}) if i % 2 else ("nf4", {"reshard": False})
        yield Case(
            family=family,
            mode=mode,
            precision="bf16-true",
            world_size=1 + i % 2,
            rows=3,
            length=200,
            is_held_out=True,
            **more,
        )
    llama = {**TINY, "vocab_size": 3000, "intermediate_size": 704, "num_key_value_heads": 2}
    yield Case(family="llama", mode="dora", precision="bf16-true", world_size=2, rows=2, length=256, change=llama)
    for family, precision in (("llama", "bf16-mixed"), ("qwen2", "32-true")):
        held: dict[str, Any] = {"family": family, "mode": "dora", "change": llama, "is_held_out": True}
        yield Case(**held, precision=precision, length=384, recompute="full")
    yield from _list_dropped(llama)


def _list_images() -> Iterator[Case]:
    """Yield vision transformers: the first of DINOv2 is one that most rules were written with."""
    yield Case(family="dinov2", rows=4)
    dino: dict[str, Any] = {"family": "dinov2", "is_held_out": True}
    gated = {**TINY, "use_swiglu_ffn": True, "drop_path_rate": 0.2}
    held = {**dino, "change": gated}
    yield Case(**held, precision="32-true", world_size=1, rows=3)
    yield Case(**held, world_size=8, rows=5, recompute="selective")
    yield Case(**held, mode="lora", precision="bf16-true", world_size=2, rows=6, reshard=False)
    # This one showed what adapters with dropout hold.
    shown = {**held, "is_held_out": False}
    yield Case(**shown, mode="nf4", precision="bf16-true", rows=4, recompute="selective", dropout=0.1)
    yield Case(**held, precision="32-true", rows=3, num_micro_batches=2, recompute="full", optimizer="adamw_8bit")
    yield Case(**held, world_size=2, rows=4, settings={"cpu_offload": CPUOffload()})
    dropped = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    for on_gpu in (False, True):
        yield Case(**dino, world_size=2, rows=3, on_gpu=on_gpu, change={**TINY, **dropped})
        yield Case(**dino, rows=2, on_gpu=on_gpu, change={**TINY, **dropped, "attn_implementation": "eager"})
    yield Case(**dino, precision="32-true", world_size=8, change={**TINY, "image_size": 1022})
    yield Case(**dino, world_size=4, rows=4, change=LARGE["dinov2"], is_allocated=False)
    for i, family in enumerate(IMAGE_FAMILIES):
        other: dict[str, Any] = {"family": family, "is_held_out": True}
        if family != "dinov2":
            yield Case(**other, precision="32-true", world_size=2, rows=3)
            yield Case(**other, rows=4, recompute="full", reshard=i % 2 == 0)
            yield Case(**other, mode="lora", precision="bf16-true", world_size=1 + i % 2, rows=2)


def _list_dropped(llama: dict[str, Any]) -> Iterator[Case]:
    """Yield steps in which attention drops something, and what else kernels of CPUs and GPUs do otherwise."""
    gpt2 = {"vocab_size": 3000, "n_embd": 256, "n_layer": 3, "n_head": 4, "attn_pdrop": 0.1}
    vit = {**TINY, "intermediate_size": 704, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    for on_gpu in (False, True):
        both: dict[str, Any] = {"on_gpu": on_gpu, "is_held_out": True}
        yield Case(**{**both, "is_held_out": on_gpu}, family="gpt2", world_size=2, change=gpt2)
        yield Case(**both, family="gpt2", precision="32-true", rows=2, length=320, recompute="full", change=gpt2)
        yield Case(**both, family="gpt2", mode="lora", precision="bf16-true", world_size=1, rows=2, change=gpt2)
        yield Case(**both, family="vit", world_size=2, rows=3, change=vit)
        dropped = {**llama, "attention_dropout": 0.1}
        yield Case(**both, family="llama", rows=2, length=256, is_packed=True, change=dropped)
        yield Case(**both, family="llama", rows=2, length=256, change=dropped | {"attn_implementation": "eager"})
        # Heads that are shared in float32, of which torch has no kernel for GPUs.
        yield Case(**both, family="llama", precision="32-true", world_size=2, rows=2, length=320, change=llama)


def _list_speech() -> Iterator[Case]:
    families = ("qwen3_tts", "csm", "dia")
    for family in families:
        yield Case(family=family, precision="32-true", world_size=2, rows=2, length=64)
        yield Case(family=family, length=48, recompute="full")
        yield Case(family=family, mode="lora", precision="bf16-true", world_size=1, length=48)
    for family in families:
        held: dict[str, Any] = {"family": family, "is_held_out": True}
        yield Case(**held, rows=3, length=100)
        yield Case(**held, precision="bf16-true", world_size=2, rows=2, length=150, recompute="selective")
        yield Case(**held, mode="lora", precision="32-true", length=100, reshard=False, num_micro_batches=2)
        holds = {"sharding": Sharding(no_sync=True)}
        yield Case(**held, precision="32-true", world_size=8, rows=2, length=150, num_micro_batches=2, settings=holds)
        yield Case(**held, mode="nf4", precision="bf16-true", world_size=2, rows=2, length=100, recompute="full")
    large: dict[str, Any] = {"family": "qwen3_tts_0p6b", "is_held_out": True, "is_allocated": False}
    yield Case(**large, rows=4, length=120)
    for mode in ("lora", "nf4"):
        yield Case(**large, mode=mode, precision="bf16-true", world_size=1, rows=2, length=187, recompute="full")


def _list_large() -> Iterator[Case]:
    """Yield steps of some GiB, for GPUs, the smallest first."""
    held_out: dict[str, Any] = {"is_held_out": True}
    sizes: dict[str, Any] = {"family": "qwen3", "change": LARGE["qwen3"], "rows": 2, "length": 1024}
    qwen = {**sizes, **held_out}
    for world_size in (1, 2, 8):
        yield Case(**qwen, world_size=world_size)
        # These showed that a head in chunks may share its weight.
        yield Case(**sizes, world_size=world_size, recompute="full", loss_chunks=8)
    yield Case(**qwen, precision="32-true", world_size=2, reshard=False)
    yield Case(**qwen, world_size=2, optimizer="adamw_8bit", recompute="selective")
    yield Case(**qwen, world_size=2, settings={"cpu_offload": CPUOffload()}, recompute="full")
    vit = {"family": "vit", "change": LARGE["vit"], "rows": 32, **held_out}
    yield Case(**vit, world_size=2)
    yield Case(**vit, world_size=4, mode="lora", recompute="full")
    dino = {"family": "dinov2", "change": LARGE["dinov2"], "rows": 32, **held_out}
    yield Case(**dino, world_size=2, recompute="full")
    yield Case(**dino, world_size=4, mode="nf4", precision="bf16-true")
    llama = {"family": "llama", "change": LARGE["llama"], "length": 2048, "recompute": "full", **held_out}
    for world_size in (1, 2):
        yield Case(**llama, world_size=world_size, mode="lora", precision="bf16-true")
        yield Case(**llama, world_size=world_size, mode="nf4", precision="bf16-true", loss_chunks=8)


def _list_settings() -> Iterator[Case]:
    """Yield settings of the strategy, optimizers and losses, each on a model or two."""
    llama: dict[str, Any] = {"family": "llama", "world_size": 2, "rows": 2, "length": 256, "precision": "32-true"}
    llama["is_held_out"] = True
    half = {**llama, "precision": "bf16-true"}
    for optimizer in ("adamw_8bit", "adafactor"):
        yield Case(**llama, optimizer=optimizer)
        yield Case(**{**half, "world_size": 8}, optimizer=optimizer, recompute="full")
    for chunks in (4, 8):
        yield Case(**llama, loss_chunks=chunks)
        yield Case(**half, mode="lora", loss_chunks=chunks, recompute="full")
    for family in ("llama", "qwen2"):
        yield Case(**{**llama, "family": family, "rows": 1, "length": 512}, is_packed=True)
        packed = {**half, "family": family, "world_size": 4, "length": 512}
        yield Case(**packed, is_packed=True, recompute="full")
    mistral = {**llama, "family": "mistral", "rows": 1, "length": 512}
    yield Case(**mistral, change={"sliding_window": 128})
    yield Case(**half, mode="int8")
    yield Case(**llama, mode="lora", dropout=0.1)
    yield Case(**half, mode="nf4", dropout=0.1, recompute="full")
    yield Case(**llama, settings={"cpu_offload": CPUOffload()})
    yield Case(**half, settings={"cpu_offload": CPUOffload()}, recompute="full")
    yield Case(**{**llama, "world_size": 8}, settings={"mesh": Mesh(replicate=2)}, recompute="full")
    yield Case(**{**llama, "world_size": 8}, settings={"sharding": Sharding(reshard_after_forward=2)})
    yield Case(**llama, settings={"sharding": Sharding(no_sync=True)}, num_micro_batches=2)
    yield from _list_mended(llama, half)


def _list_mended(llama: dict[str, Any], half: dict[str, Any]) -> Iterator[Case]:
    """Yield those that showed a wrong rule, and others for what was put in its place."""
    ahead, further = Sharding(backward_prefetch=2, forward_prefetch=1), Sharding(backward_prefetch=3)
    yield Case(**{**llama, "is_held_out": False}, settings={"sharding": ahead})
    yield Case(**{**half, "family": "qwen2", "world_size": 4}, settings={"sharding": further}, recompute="full")
    yield Case(family="vit", precision="32-true", is_held_out=True, settings={"sharding": further})
    head = {**half, "change": {"num_hidden_layers": 2, "vocab_size": 32000}}
    yield Case(**{**head, "world_size": 1, "is_held_out": False}, loss_chunks=8)
    yield Case(**{**head, "family": "qwen2"}, loss_chunks=8)
    yield Case(**{**head, "family": "mistral", "precision": "bf16-mixed", "world_size": 1}, loss_chunks=4)


def _list_matrix(family: str, *, is_whole: bool = False) -> Iterator[Case]:
    """Yield what trains x recomputation x resharding x ranks.

    Precision, and offload, chunked loss and 8-bit state, go round, so that each meets each of the others.
    """
    sizes: dict[str, dict[str, Any]] = {
        "llama": {"rows": 2, "length": 160, "change": {**TINY, "vocab_size": 3000, "intermediate_size": 704}},
        "vit": {"rows": 2, "change": {**TINY, "intermediate_size": 1024}},
        "dinov2": {"rows": 2, "change": {**TINY, "drop_path_rate": 0.1}},
        "qwen3_tts": {"length": 32},
    }
    precisions = ("32-true", "bf16-mixed", "bf16-true")
    extras: tuple[dict[str, Any], ...] = (
        {},
        {"settings": {"cpu_offload": CPUOffload()}},
        {"loss_chunks": 4},
        {"optimizer": "adamw_8bit"},
    )
    cells = product(("full", "lora", "nf4"), ("none", "full"), (True, False), (1, 2, 4, 8))
    for i, (mode, recompute, reshard, world_size) in enumerate(cells):
        # Every other one: each value still meets each of the others. Only these were run when rules were written.
        is_new = (i + i // 4 + i // 8 + i // 16) % 2 == 1
        if is_new and not is_whole:
            continue
        extra = extras[(i % 4 + 2 * (recompute == "full") + i // 16) % 4]
        # CPUOffload on a single rank cannot be followed, and only language models have a loss in chunks.
        if ("settings" in extra and world_size == 1) or ("loss_chunks" in extra and family != "llama"):
            extra = {}
        cell: dict[str, Any] = {"mode": mode, "recompute": recompute, "reshard": reshard, "world_size": world_size}
        precision = precisions[(i + i // 3) % 3]
        # The pixels that FSDP2 casts got their rule after a first run had been looked at.
        is_held_out = is_new or family != "vit" or mode == "full" or precision == "32-true"
        yield Case(family=family, precision=precision, is_held_out=is_held_out, **cell, **sizes[family], **extra)
