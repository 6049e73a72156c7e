"""``evaluate``: tasks of lm-evaluation-harness, on a run, a checkpoint, a folder or a model of the Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lit_fsdp.checkpoint.reader import find_run
from lit_fsdp.cli.generate import PRECISIONS, GenerateCLI, spell_options, split_options
from lit_fsdp.cli.train import run_trainer
from lit_fsdp.files import refuse_no_folder, refuse_unwritable, write_whole
from lit_fsdp.parsing.parser import run_function
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.reporting.report_files import add_section, make_plain
from lit_fsdp.reporting.sections import Section, Table, print_table
from lit_fsdp.tasks.causal_lm.harness import HarnessData, HarnessLM, find_tasks
from lit_fsdp.tasks.causal_lm.opened import open_source, open_tokenizer

FILE_NAME = "evaluation.json"
_KEPT = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")  # of what the harness returns


def run_evaluate(args: Sequence[str]) -> int:
    """Measure a model by tasks.

    Args:
        args: The command line, the command first.
    """
    own, others = split_options(args[1:])
    planned, place = run_function(
        plan_evaluation,
        own,
        command="evaluate",
        description="Measure a language model by tasks of lm-evaluation-harness. Options of predict are taken too, "
        "such as --trainer.devices=2 or --trainer.strategy.sharding.reshard_after_forward=false.",
    )
    return run_trainer(["predict", *planned, *others], partial(EvaluateCLI, place=place))


def plan_evaluation(
    model: str,
    tasks: str | list[str],
    *,
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    apply_chat_template: bool = False,
    out: Path | None = None,
    seed: int = 0,
    base: str | None = None,
    quantization: Quantization | None = None,
) -> tuple[list[str], tuple[Path | None, Path | None]]:
    """Measure a language model by tasks of lm-evaluation-harness; they are shown as a table.

    On several ranks the model is sharded. All of them answer the same questions, so they take memory off each other,
    not time. Results of a run also go into its folder, and into its report.

    Args:
        model: Run, checkpoint, folder of a model or of adapters, or a name on the Hub.
        tasks: Names of tasks, groups or tags, such as ``hellaswag,arc_easy``.
        include_path: A folder with the YAML files of your own tasks.
        num_fewshot: Examples before each question; as the task says if not given.
        limit: Only the first so many questions of each task, to try it.
        batch_size: Rows that go through the model at once.
        apply_chat_template: Put questions as messages of a chat.
        out: A ``.json`` file for the results. By default ``evaluation.json`` in the folder of the run; of a model
            without one, nothing is written.
        seed: Of the numbers drawn.
        base: Of adapters: where their base model is, if not where it was.
        quantization: Keep the weights in 4 or 8 bits, such as ``--quantization.type nf4``.
    """
    names = tasks.split(",") if isinstance(tasks, str) else tasks
    if not all(name.strip() for name in names) or not names:
        raise ValueError(f"tasks: got {tasks!r}: expected the name of one, such as hellaswag")
    names = [name.strip() for name in names]
    for name, value, least in (("batch_size", batch_size, 1), ("limit", limit, 1), ("num_fewshot", num_fewshot, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name}: got {value}: expected {least} or more")
    if include_path is not None and not include_path.is_dir():
        raise ValueError(f"include_path: got {str(include_path)!r}: expected a folder with YAML files of tasks")
    if out is not None and (out.suffix != ".json" or out.is_dir()):
        raise ValueError(f"out: got {str(out)!r}: expected a file that ends in .json")
    if out is not None:
        refuse_no_folder("out", out.parent)  # now, not when all is measured
    find_tasks(names, None if include_path is None else str(include_path))
    source = open_source(model, base=base, quantization=quantization)
    tokenizer = open_tokenizer(source)
    if apply_chat_template and not tokenizer.chat_template:
        raise ValueError(f"apply_chat_template: got true: the tokenizer of {model} has no chat template; leave it out")
    run = None if source.checkpoint is None else find_run(source.checkpoint.path)
    settings: dict[str, Any] = {
        "model": {"class_path": f"{HarnessLM.__module__}.{HarnessLM.__name__}"},
        "model.tasks": names,
        "model.batch_size": batch_size,
        "model.apply_chat_template": apply_chat_template,
        "data": {"class_path": f"{HarnessData.__module__}.{HarnessData.__name__}"},
        "trainer.precision": PRECISIONS[source.dtype],
        "trainer.enable_progress_bar": False,  # the harness has its own
        "seed_everything": seed,
        "run_summary": False,
    }
    settings |= {
        "model.include_path": None if include_path is None else str(include_path),
        "model.num_fewshot": num_fewshot,
        "model.limit": limit,
    }
    options = spell_options(settings, source, base=base, quantization=quantization)
    return options, (out or (None if run is None else run / FILE_NAME), run)


class EvaluateCLI(GenerateCLI):
    """Predicts, and leaves the results: no logs, no configuration.

    Args:
        args: The command line, as for ``predict``.
        place: The file of the results, and the folder of the run.
        options: Of ``TrainerCLI``.
    """

    def __init__(self, args: list[str], *, place: tuple[Path | None, Path | None], **options: Any) -> None:
        self._place = place
        super().__init__(args, out=None, **options)

    def after_predict(self) -> None:
        """Show and write what was measured, on the first rank."""
        assert isinstance(self.model, HarnessLM)
        if not self.trainer.is_global_zero:
            return
        assert self.model.results is not None
        file, run = self._place
        found = make_plain({name: self.model.results[name] for name in _KEPT if name in self.model.results})
        source = self.model.source
        about = {
            "version": 1,
            "model": source.given if source.checkpoint is None else str(source.checkpoint.path),
            "step": None if source.checkpoint is None else source.checkpoint.meta.get("global_step"),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "lm_eval": version("lm_eval"),
            "limit": self.model.limit,
            "apply_chat_template": self.model.apply_chat_template,
        }
        section = make_section(found, about)
        print_table(section.tables[0])
        if file is None:
            return
        with refuse_unwritable("out", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps({**about, **found}, indent=1) + "\n")
        is_added = run is not None and add_section(run, section)
        print(f"written: {file}{f', and into the report in {run}' if is_added else ''}")


def make_section(found: Mapping[str, Any], about: Mapping[str, Any]) -> Section:
    """Return results of the harness as a part of a report, with a row for each metric of a task."""
    rows = []
    for task, metrics in found["results"].items():
        shots, num = found.get("n-shot", {}).get(task, ""), found.get("n-samples", {}).get(task, {})
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not kind:
                continue
            error = metrics.get(f"{metric}_stderr,{kind}")
            name = metric if kind == "none" else f"{metric} ({kind})"
            spread = f"{error:.4f}" if isinstance(error, int | float) else "-"
            rows.append([task, name, f"{value:.4f}", spread, str(shots), str(num.get("effective", ""))])
    limit = f", the first {about['limit']} questions of each task" if about["limit"] else ""
    step = "" if about["step"] is None else f"The model of step {about['step']:,}, "
    return Section(
        title="Evaluation",
        name="evaluation",
        numbers={**about, **found},
        notes=[f"{step}measured with lm_eval {about['lm_eval']} at {about['time']}{limit}."],
        tables=[
            Table(title="", columns=("task", "metric", "value", "standard error", "shots", "questions"), rows=rows)
        ],
    )
