"""Who trains in ``step.py``: one function for each variant, run on every rank in processes of its own.

This file is also what those processes run. It imports only what its variant needs, as the Python of TRL may have none
of ours.
"""

from __future__ import annotations

import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import Any

from step_cases import CASES, LEARNING_RATE, LORA_RANK, Case, fill_adapters, list_own_rows

LAYERS = {"text": "LlamaDecoderLayer", "image": "ViTLayer", "speech": "Qwen3DecoderLayer"}
RANK, NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TURN_LIMIT_S = 600  # the first one waits until all have started
_QUIET: Any = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def read_memory(name: str) -> int:
    """Return a number of bytes of this process from Linux: ``VmRSS`` of now, ``VmHWM`` the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Lets variants that run at once take turns by steps, so that what slows the machine down slows down all alike.

    Args:
        folder: With a pipe for each rank of each variant, see ``name_pipe``; somebody holds them open.
        index: Of this variant.
        num_variants: That take turns.
    """

    folder: str
    index: int
    num_variants: int

    @staticmethod
    def name_pipe(index: int, rank: int) -> str:
        """Return the pipe in which a rank of that variant hears, byte by byte, which ranks have ended their step."""
        return f"turn.{index}.{rank}"

    def _open(self, index: int, rank: int) -> FileIO:
        return FileIO(f"{self.folder}/{self.name_pipe(index % self.num_variants, rank)}", "r+")

    def pass_on(self) -> None:
        """End the turn of this rank."""
        for rank in range(NUM_RANKS):
            with self._open(self.index + 1, rank) as pipe:
                pipe.write(b".")

    def wait(self) -> None:
        """Wait until all ranks of the variant before have ended their turn."""
        with self._open(self.index, RANK) as pipe:
            for _ in range(NUM_RANKS):
                if not select.select([pipe], [], [], TURN_LIMIT_S)[0]:
                    raise RuntimeError(f"another variant has not taken its step in {TURN_LIMIT_S} s")
                pipe.read(1)


@dataclass(kw_only=True)
class Run:
    """One run of a variant on this rank, and its clocks.

    Args:
        case: What is trained.
        folder: With its model and rows.
        num_steps: Optimizer steps.
        batch: Rows of a rank and step.
        is_bf16: Whether forward and backward run in bfloat16.
        launched_s: When the process was started.
        shards_4bit: Whether stock libraries get 4-bit weights in a form that they can shard.
        turns: With others, if they run at once.
    """

    case: Case
    folder: Path
    num_steps: int
    batch: int
    is_bf16: bool
    launched_s: float
    shards_4bit: bool = True
    turns: Turns | None = None
    starts: list[tuple[float, float]] = field(default_factory=list)
    marks: list[tuple[float, float]] = field(default_factory=list)
    first_s: tuple[float, float] = (0.0, 0.0)
    bytes_before: int = 0
    peak_bytes: int = 0  # on a GPU

    def start_memory(self) -> None:
        """Begin to measure memory: what a run needs is imported, and there is no model yet."""
        import torch

        if self.case.kind != "speech":
            name = json.loads((self.folder / "config.json").read_text())["model_type"]
            import_module(f"transformers.models.{name}.modeling_{name}")
        if self.case.adapters:
            import peft  # noqa: F401
        if not torch.cuda.is_available():
            Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
            self.bytes_before = read_memory("VmRSS")

    def tick(self) -> None:
        """Note wall clock and CPU time at the end of a step, and where the next one begins."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
            # Noted in each step, as callbacks that watch memory let the peak begin anew.
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())
        self.marks.append((time.perf_counter(), time.process_time()))
        if self.turns is not None:
            if len(self.marks) > 1:  # the first steps are of no turn
                self.turns.pass_on()
            if len(self.marks) < self.num_steps:
                self.turns.wait()
        self.starts.append((time.perf_counter(), time.process_time()))
        if len(self.marks) == 1:
            self.first_s = time.time() - self.launched_s, time.process_time()

    def report(self, loss: float) -> dict[str, Any]:
        """Return what this rank has measured."""
        import torch

        if len(self.marks) != self.num_steps:
            raise RuntimeError(f"{len(self.marks)} steps were taken instead of {self.num_steps}")
        peak = self.peak_bytes if torch.cuda.is_available() else read_memory("VmHWM") - self.bytes_before
        return {
            "wall_s": [b[0] - a[0] for a, b in zip(self.starts, self.marks[1:], strict=False)],
            "cpu_s": [b[1] - a[1] for a, b in zip(self.starts, self.marks[1:], strict=False)],
            "first_step_wall_s": self.first_s[0],
            "first_step_cpu_s": self.first_s[1],
            "peak_gib": peak / 2**30,
            "loss": loss,
        }

    def read_rows(self) -> list[Any]:
        """Return the rows of all ranks."""
        import torch

        rows: list[Any] = torch.load(self.folder / "rows.pt", weights_only=True)
        return rows

    @property
    def is_batched(self) -> bool:
        """Whether rows are batches already."""
        return self.case.kind == "speech"

    @property
    def collate(self) -> Callable[[list[Any]], Any] | None:
        """What makes a batch of rows, where that is not for libraries to do."""
        return (lambda rows: rows[0]) if self.is_batched else None

    def make_loader(self) -> Any:
        """Return the batches of this rank."""
        from torch.utils.data import DataLoader

        rows = self.read_rows()
        if self.is_batched:
            return DataLoader(list_own_rows(rows, 1, RANK, NUM_RANKS), batch_size=None)
        return DataLoader(list_own_rows(rows, self.batch, RANK, NUM_RANKS), batch_size=self.batch)

    def load_model(self, device: Any = None) -> Any:
        """Return the model of Transformers and peft, in training mode."""
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageClassification

        if self.case.kind == "speech":
            return load_speech(self.folder)
        given: dict[str, Any] = {"dtype": torch.float32}
        if self.case.adapters == "qlora":
            from transformers import BitsAndBytesConfig

            given["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=not self.case.is_rounded,
                bnb_4bit_compute_dtype=torch.float32,
                # As floats packed 4-bit values can be sharded by FSDP; bytes are not, each rank keeps them whole.
                bnb_4bit_quant_storage=torch.float32 if self.shards_4bit else torch.uint8,
            )
            given["device_map"] = {"": device or get_device()}
        kind = AutoModelForImageClassification if self.case.kind == "image" else AutoModelForCausalLM
        model = kind.from_pretrained(self.folder, **given)
        model.train()
        if self.case.adapters:
            from peft import LoraConfig, get_peft_model

            settings = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, **self.case.targets)
            model = get_peft_model(model, settings)
            check_adapters(fill_adapters(model.named_parameters()))
        return model


def check_adapters(count: int) -> None:
    """Refuse to go on without them."""
    if not count:
        raise RuntimeError("no adapters were found to fill")


def get_device() -> Any:
    """Return where this rank computes."""
    import torch

    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def load_speech(folder: Path) -> Any:
    """Return the speech model as its task builds it, and a loss of its batches."""
    import torch
    from transformers.modeling_outputs import CausalLMOutput

    from lit_fsdp.tasks.tts.families.model_types import parse_family

    family, config = parse_family(json.loads((folder / "config.json").read_text()))
    own, other = family.get_loss_weights(config)

    class Speech(torch.nn.Module):
        accepts_loss_kwargs = False  # says to the Trainer of Transformers that the loss is a mean

        def __init__(self) -> None:
            super().__init__()
            self.model = family.build_model(config)
            family.load_weights(self.model, folder)
            self.model.requires_grad_(True)

        def forward(self, **batch: Any) -> Any:
            output = self.model(batch)
            loss = own * output.talker_loss / output.num_tokens + other * output.predictor_loss / output.num_frames
            return CausalLMOutput(loss=loss)

    return Speech().train()


def list_blocks(model: Any) -> list[Any]:
    """Return what becomes a unit of its own in a plain loop: the blocks of the model."""
    import torch

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return [block for blocks in lists for block in blocks if type(block).__name__.endswith("Layer")]


def make_optimizer(model: Any) -> Any:
    """Return AdamW over what is trained."""
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def average(loss: Any) -> float:
    """Return the mean over ranks."""
    import torch.distributed as dist

    loss = loss.detach().float().clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()
    return float(loss)


def repeat_batches(loader: Any) -> Iterator[Any]:
    """Yield batches without end."""
    while True:
        yield from loader


def run_plain(run: Run) -> float:
    """Train in a loop over ``fully_shard``."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # FSDP2 shards onto the current one
    backend = "nccl" if device.type == "cuda" else "gloo"
    if NUM_RANKS > 1:
        dist.init_process_group(backend)
    elif "stock" not in run.case.variants:  # a loop without FSDP2, which cannot shard what bitsandbytes stores
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    run.start_memory()
    model = run.load_model().to(device)
    if dist.is_initialized():
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if run.is_bf16 else MixedPrecisionPolicy()
        for block in list_blocks(model):
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = make_optimizer(model)
    batches = repeat_batches(run.make_loader())
    for _ in range(run.num_steps):
        batch = {name: value.to(device) for name, value in next(batches).items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.tick()
    return average(loss)


def make_trainer(run: Run, strategy: Any, **options: Any) -> Any:
    """Return a Trainer of Lightning whose steps are timed."""
    import lightning.pytorch as pl

    class Tick(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            run.tick()

    callbacks = [Tick(), *options.pop("callbacks", ())]
    return pl.Trainer(
        accelerator="auto",
        devices=NUM_RANKS,
        strategy=strategy,
        precision="bf16-mixed" if run.is_bf16 else "32-true",
        max_steps=run.num_steps,
        callbacks=callbacks,
        use_distributed_sampler=False,
        **_QUIET,
        **{"logger": False, **options},
    )


def run_ours(run: Run, **options: Any) -> float:
    """Train one of our tasks."""
    import lightning.pytorch as pl

    from lit_fsdp import FSDP2Strategy
    from lit_fsdp.adapters.lora import LoRA
    from lit_fsdp.quantization.quantize import Quantization
    from lit_fsdp.tasks import CausalLM, ImageClassification, LRSchedule, Optimizer, TextToSpeech

    class FillAdapters(pl.Callback):
        def on_fit_start(self, _: Any, module: Any) -> None:
            if run.case.adapters:
                check_adapters(fill_adapters(module.named_parameters()))

    run.start_memory()
    settings: dict[str, Any] = {"pretrained": str(run.folder), "lr_scheduler": LRSchedule(type="constant")}
    settings["optimizer"] = Optimizer(learning_rate=LEARNING_RATE, weight_decay=0.0)
    if run.case.adapters:
        settings["lora"] = LoRA(r=LORA_RANK, alpha=2 * LORA_RANK, **run.case.targets)
    if run.case.adapters == "qlora":
        settings["quantization"] = Quantization(double_quant=not run.case.is_rounded)
    task: Any = {
        "text": CausalLM,
        "image": lambda **given: ImageClassification(head="keep", num_classes=100, **given),
        "speech": TextToSpeech,
    }[run.case.kind](**settings)
    callbacks = [FillAdapters(), *options.pop("callbacks", ())]
    make_trainer(run, FSDP2Strategy(print_plan=False), callbacks=callbacks, **options).fit(task, run.make_loader())
    return float(task.step_loss)


def run_ours_monitored(run: Run) -> float:
    """Train one of our tasks with all that the command line measures by default, and its report."""
    from lightning.pytorch.loggers import CSVLogger

    from lit_fsdp import callbacks as ours

    measuring = [ours.StabilityMonitor(), ours.MemoryLogger(), ours.CommunicationLogger(), ours.ThroughputLogger()]
    measuring += [ours.OOMReport(), ours.RunReport()]
    with tempfile.TemporaryDirectory() as out:
        logger = CSVLogger(out)
        return run_ours(run, callbacks=measuring, logger=logger, log_every_n_steps=10, default_root_dir=out)


def run_own_module(run: Run, strategy: Any, *, shards_itself: bool = False) -> float:
    """Train a module of a user in Lightning's Trainer."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = None if shards_itself else run.load_model()

        def configure_model(self) -> None:
            if self.model is not None:
                return
            from torch.distributed.fsdp import fully_shard

            self.model = run.load_model()
            for block in list_blocks(self.model):
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.model(**batch).loss
            self.last_loss = loss.detach()
            return loss

        def configure_optimizers(self) -> Any:
            return make_optimizer(self)

    run.start_memory()
    module = Module()
    trainer = make_trainer(run, strategy)
    trainer.fit(module, run.make_loader())
    return average(module.last_loss)


def run_ours_own_module(run: Run) -> float:
    """Train a module of a user under our strategy."""
    from lit_fsdp import FSDP2Strategy

    return run_own_module(run, FSDP2Strategy(print_plan=False))


def run_model_parallel(run: Run) -> float:
    """Train under Lightning's ModelParallelStrategy: the module calls ``fully_shard``."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=NUM_RANKS, tensor_parallel_size=1)
    return run_own_module(run, strategy, shards_itself=True)


def run_lightning_fsdp(run: Run) -> float:
    """Train under Lightning's FSDPStrategy, which is FSDP1."""
    import torch
    from lightning.pytorch.strategies import FSDPStrategy
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    kind: Any = FSDPStrategy
    if not torch.cuda.is_available():  # Lightning refuses it there, though it runs
        from lit_fsdp.strategy.cpu_trials import FSDPOnCPU as kind  # noqa: N813
    block = LAYERS[run.case.kind]
    policy = partial(lambda_auto_wrap_policy, lambda_fn=lambda module: type(module).__name__ == block)
    return run_own_module(run, kind(auto_wrap_policy=policy))


def run_ddp(run: Run) -> float:
    """Train under DDP: whole copies of everything."""
    from lightning.pytorch.strategies import DDPStrategy

    return run_own_module(run, DDPStrategy(find_unused_parameters=run.case.kind == "speech"))


def force_fsdp_on_cpus() -> None:
    """Let accelerate shard on CPUs too, where it takes DDP without a word; seen in accelerate 1.15."""
    import accelerate.state
    from accelerate.utils import DistributedType

    original = accelerate.state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            values = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": fsdp_plugin}
            self._shared_state.update(values)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    accelerate.state.AcceleratorState.__init__ = init


def check_sharded(model: Any, *, shards_4bit: bool) -> None:
    """Refuse a model that is not sharded as it should be: accelerate took another way than FSDP2."""
    from torch.distributed.tensor import DTensor

    # Bytes are 4-bit weights in the form that stays whole.
    as_asked = (isinstance(p, DTensor) == (shards_4bit or p.element_size() > 1) for p in model.parameters())
    if NUM_RANKS > 1 and not all(as_asked):
        raise RuntimeError("accelerate has not sharded the model: it took another way than FSDP2")


def run_accelerate(run: Run) -> float:
    """Train in a loop over what ``Accelerator.prepare`` returns, with FSDP2."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.utils.data import DataLoader

    is_cpu = not torch.cuda.is_available()
    if is_cpu:
        force_fsdp_on_cpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYERS[run.case.kind]],
        reshard_after_forward=True,
    )
    accelerator = Accelerator(
        cpu=is_cpu,
        mixed_precision="bf16" if run.is_bf16 else "no",
        fsdp_plugin=plugin if NUM_RANKS > 1 else None,
    )
    run.start_memory()
    model = run.load_model(accelerator.device)
    rows = DataLoader(run.read_rows(), batch_size=1 if run.is_batched else run.batch, collate_fn=run.collate)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), rows)
    check_sharded(model, shards_4bit=run.shards_4bit)
    batches = repeat_batches(loader)
    for _ in range(run.num_steps):
        loss = model(**next(batches)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.tick()
    return average(loss)


def run_accelerate_whole(run: Run) -> float:
    """Train with FSDP2 of accelerate that leaves 4-bit weights whole on each rank."""
    run.shards_4bit = False
    return run_accelerate(run)


def run_with_trainer(run: Run, kind: Any, arguments: Any, **given: Any) -> float:
    """Train in a Trainer of Transformers, or one made of it."""
    import torch
    from transformers import TrainerCallback

    class Tick(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            run.tick()

    class Keep(kind):
        last_loss: torch.Tensor

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss: Any = super().compute_loss(*given, **named)
            self.last_loss = (loss[0] if isinstance(loss, tuple) else loss).detach()
            return loss

    is_cpu = not torch.cuda.is_available()
    if is_cpu:
        force_fsdp_on_cpus()
    fsdp: dict[str, Any] = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}
    fsdp["transformer_layer_cls_to_wrap"] = [LAYERS[run.case.kind]]
    with tempfile.TemporaryDirectory() as out:
        made = arguments(
            output_dir=out,
            max_steps=run.num_steps,
            per_device_train_batch_size=1 if run.is_batched else run.batch,
            remove_unused_columns=not run.is_batched,
            train_sampling_strategy="sequential",
            use_cpu=is_cpu,
            bf16=run.is_bf16,
            report_to=[],
            save_strategy="no",
            max_grad_norm=0.0,
            learning_rate=LEARNING_RATE,
            weight_decay=0.0,
            lr_scheduler_type="constant",
            disable_tqdm=True,
            optim="adamw_torch_fused",
            dataloader_pin_memory=not is_cpu,
            **({"fsdp": True, "fsdp_config": fsdp} if NUM_RANKS > 1 else {}),
            **given.pop("settings", {}),
        )
        run.start_memory()
        trainer = Keep(model=run.load_model(), args=made, callbacks=[Tick()], **given)
        if run.case.adapters == "qlora":  # TRL has made them bfloat16
            for parameter in trainer.model.parameters():
                parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
            check_adapters(fill_adapters(trainer.model.named_parameters()))
        trainer.train()
    check_sharded(trainer.model_wrapped, shards_4bit=run.shards_4bit)
    return average(trainer.last_loss)


def run_hf_trainer(run: Run) -> float:
    """Train in the Trainer of Transformers, with FSDP2 of accelerate."""
    from transformers import Trainer, TrainingArguments

    return run_with_trainer(run, Trainer, TrainingArguments, train_dataset=run.read_rows(), data_collator=run.collate)


def run_trl(run: Run) -> float:
    """Train in the SFTTrainer of TRL, with FSDP2 of accelerate, without packing."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in run.read_rows()])
    settings = {"gradient_checkpointing": False, "max_length": None, "loss_type": "nll"}
    tokenizer = AutoTokenizer.from_pretrained(run.folder)
    return run_with_trainer(
        run, SFTTrainer, SFTConfig, train_dataset=rows, processing_class=tokenizer, settings=settings
    )


VARIANTS: dict[str, Callable[[Run], float]] = {
    "plain": run_plain,
    "stock": run_plain,
    "ours": run_ours,
    "ours_monitored": run_ours_monitored,
    "ours_own_module": run_ours_own_module,
    "model_parallel": run_model_parallel,
    "lightning_fsdp": run_lightning_fsdp,
    "ddp": run_ddp,
    "accelerate": run_accelerate,
    "accelerate_whole": run_accelerate_whole,
    "hf_trainer": run_hf_trainer,
    "trl": run_trl,
}


def be_rank(order: Mapping[str, Any]) -> None:
    """Be one rank; what it has measured goes into a file."""
    import torch

    torch.set_num_threads(1)
    out, launched_s = Path(order["out"]), order["launched_s"]
    turns = Turns(**order["turns"]) if order.get("turns") else None
    case, folder = CASES[order["case"]], Path(order["folder"])
    run = Run(case=case, folder=folder, launched_s=launched_s, turns=turns, **order["run"])
    loss = VARIANTS[order["variant"]](run)
    out.with_suffix(f".{RANK}").write_text(json.dumps(run.report(loss)))
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    be_rank(json.loads(sys.argv[1]))
