"""``generate``: a file of prompts becomes one of answers. It is ``predict`` with a model that is there already."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from lit_fsdp.callbacks import WritePredictions
from lit_fsdp.cli.chat import make_sampling
from lit_fsdp.cli.train import TrainerCLI, run_trainer
from lit_fsdp.files import describe_special_file, refuse_no_folder
from lit_fsdp.parsing.config_files import check_options
from lit_fsdp.parsing.parser import run_function
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks import TextData
from lit_fsdp.tasks.causal_lm.opened import ModelSource, OpenedLM, open_source, open_tokenizer
from lit_fsdp.tasks.text.files import READERS
from lit_fsdp.tasks.text_model import get_max_positions

_LONGEST = 2**20  # tokens of a prompt, where a model has no limit
_OF_PREDICT = re.compile(r"--((trainer|model|data|progress_bar)\.|cpu_processes(=|$))")
PRECISIONS = {"bfloat16": "bf16-true", "float32": "32-true", "float16": "bf16-true"}  # FSDP2 has no float16-true


def run_generate(args: Sequence[str]) -> int:
    """Answer the prompts of a file.

    Args:
        args: The command line, the command first.
    """
    own, others = split_options(args[1:])
    planned, out = run_function(
        plan_run,
        own,
        command="generate",
        description="Answer the prompts of a file with a model. Options of predict are taken too, such as "
        "--trainer.devices=2, --trainer.strategy.mesh.replicate=2 or --data.format=chat.",
    )
    return run_trainer(["predict", *planned, *others], partial(GenerateCLI, out=out))


def split_options(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of ``generate`` itself, and those of ``predict``."""
    check_options(args)
    own: list[str] = []
    others: list[str] = []
    is_other = False
    for arg in args:
        if arg.startswith("--"):
            is_other = _OF_PREDICT.match(arg) is not None
        (others if is_other else own).append(arg)
    return own, others


def plan_run(
    model: str,
    prompts: Path,
    out: Path,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    batch_size: int = 8,
    base: str | None = None,
    quantization: Quantization | None = None,
) -> tuple[list[str], Path]:
    """Answer the prompts of a file, in their order.

    Each rank answers its share of them with its part of the weights; all ranks generate together. Results do not
    depend on ``batch_size`` or the number of ranks, unless they are sampled.

    Args:
        model: Run, checkpoint, folder of a model or of adapters, or a name on the Hub.
        prompts: A ``.txt`` file with one in each line, or rows with ``prompt`` or ``messages`` in a file of
            ``.jsonl``, ``.csv`` or ``.parquet``.
        out: The file to write, of ``.jsonl``, ``.csv`` or ``.parquet``; one that is there is replaced.
        max_new_tokens: Where an answer is cut off.
        temperature: 0 always takes the likeliest token; above, tokens are drawn.
        top_p: Draw from the likeliest tokens that have this probability together.
        top_k: Draw from this many tokens.
        seed: Of the numbers drawn.
        batch_size: Prompts that a rank answers at once.
        base: Of adapters: where their base model is, if not where it was.
        quantization: Keep the weights in 4 or 8 bits, such as ``--quantization.type nf4``.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: got {batch_size}: expected 1 or more")
    _check_prompts(prompts)
    _check_out(out)
    if out.exists() and out.samefile(prompts):
        raise ValueError(f"out: got {str(out)!r}: it holds the prompts, which answers would replace: choose another")
    sampling = make_sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k)
    source = open_source(model, base=base, quantization=quantization)
    open_tokenizer(source)
    settings: dict[str, Any] = {
        "model": {"class_path": f"{OpenedLM.__module__}.{OpenedLM.__name__}"},
        "model.generation": {"do_sample": False, **sampling},
        "data": {"class_path": f"{TextData.__module__}.{TextData.__name__}"},
        "data.predict": str(prompts),
        "data.tokenizer": source.tokenizer,
        "data.txt_documents": "line",
        "data.seq_length": _choose_length(source, max_new_tokens),
        "data.eval_batch_size": batch_size,
        "data.num_workers": 0,
        "trainer.precision": PRECISIONS[source.dtype],
        "seed_everything": seed,
        "run_summary": False,
    }
    return spell_options(settings, source, base=base, quantization=quantization), out


def spell_options(
    settings: Mapping[str, Any], source: ModelSource, *, base: str | None, quantization: Quantization | None
) -> list[str]:
    """Return settings of ``predict`` as options, with those that open the model as it has been opened here."""
    # The checkpoint itself: of a run that still trains, each rank might find a newer one.
    found = source.given if source.checkpoint is None else str(source.checkpoint.path)
    opened: dict[str, Any] = {"model.source": found, "model.base": base}
    opened["model.quantization"] = None if quantization is None else asdict(quantization)
    opened["ckpt_path"] = None if source.checkpoint is None else found
    given = {name: value for name, value in {**settings, **opened}.items() if value is not None}
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in given.items()]


class GenerateCLI(TrainerCLI):
    """Predicts, and leaves one file: no logs, no configuration.

    Args:
        args: The command line, as for ``predict``.
        out: The file, if there is one.
        options: Of ``TrainerCLI``.
    """

    def __init__(self, args: list[str], *, out: Path | None, **options: Any) -> None:
        self._out = out
        super().__init__(args, **options)

    @override
    def before_instantiate_classes(self) -> None:
        self.settings["trainer"]["logger"] = False
        super().before_instantiate_classes()

    @override
    def _add_path(self, line: str, path: str = "") -> str:
        """Name what the user has called ``prompts``, and settings of the data as options: there is no YAML."""
        named = super()._add_path(line, path).replace("data.init_args.predict: ", "prompts: ", 1)
        named = re.sub(r"such as columns: (\{[^}]*\})", r"such as --data.columns='\1'", named)
        ours = "|".join(self.settings["data"].init_args.keys())
        return re.sub(rf"(?<!data )\bset (?=({ours})\b)", "set --data.", named)

    @override
    def choose_parts(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        self.save_config_callback = None
        chosen = super().choose_parts(settings)
        others = [callback for callback in chosen["callbacks"] if not isinstance(callback, WritePredictions)]
        writers = [] if self._out is None else [WritePredictions(path=str(self._out))]
        return {**chosen, "callbacks": [*others, *writers]}


def _check_prompts(path: Path) -> None:
    if (problem := describe_special_file(path)) is not None:
        raise ValueError(f"prompts: {str(path)!r} {problem}")
    if not path.is_file():
        raise ValueError(f"prompts: got {str(path)!r}: no such file, seen from {Path.cwd()}")
    if path.suffix.lower() not in READERS:
        raise ValueError(f"prompts: got {str(path)!r}: expected a file that ends in {', '.join(READERS)}")


def _check_out(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"out: {path} is a folder: expected a file")
    try:
        WritePredictions(path=str(path))
    except ValueError as error:
        raise ValueError(str(error).replace("path: ", "out: ", 1)) from error
    refuse_no_folder("out", path.parent)  # or the answers of hours would be lost


def _choose_length(source: ModelSource, max_new_tokens: int) -> int:
    """Return how long a prompt may be, so that an answer has its places."""
    limit = get_max_positions(source.read_config()) or _LONGEST
    if limit - max_new_tokens < 2:
        raise ValueError(
            f"max_new_tokens: got {max_new_tokens}: the model has {limit} places (max_position_embeddings), also for "
            f"the prompt: expected {max(limit // 2, 1)} or less"
        )
    return int(limit - max_new_tokens)
