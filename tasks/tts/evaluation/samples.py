"""The speech of a few rows at each validation of a run, which goes on where that fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.strategy.lightning_strategies import call_in_forward
from lit_fsdp.strategy.shared_errors import try_on_all
from lit_fsdp.tasks.evaluation_mode import evaluation_mode
from lit_fsdp.tasks.tts.evaluation.generated import MEASURED, Sample, SpeechReport
from lit_fsdp.tasks.tts.evaluation.speech_eval import SpeechEvaluator
from lit_fsdp.tasks.tts.generation import Speech
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow
from lit_fsdp.tasks.tts.utterance import Batch

Result = TypeVar("Result")


class SpokenSamples:
    """Has a task speak rows of its data, and compares and measures that. All ranks must call the same of it.

    Args:
        num_rows: How many.
        evaluator: Decodes the speech and measures it; ``None`` compares codes only.
    """

    def __init__(self, num_rows: int, evaluator: SpeechEvaluator | None) -> None:
        self.num_rows, self.evaluator = num_rows, evaluator
        self.report = SpeechReport()
        self.tried_step = -1  # at which rows were spoken, or that failed

    def speak(self, task: Any) -> dict[str, float]:
        """Return what is to be logged of a step; NaN for what could not be measured.

        Names stay, as a checkpoint or a schedule may go by one of them.

        Args:
            task: In a run, with data that has ``pick_validation``.
        """
        data = get_data_module(task.trainer)
        if not hasattr(data, "pick_validation"):
            raise RuntimeError("num_samples needs a data module with pick_validation, such as SpeechData")
        rows = data.pick_validation(self.num_rows)

        def encode() -> Batch:
            prompts = [data.encode_prompt(row) for row in rows]
            return task.family.collate_prompts(prompts, task.read_config(), is_streaming=data.streaming)

        with evaluation_mode(task):
            batch = self._try(task, encode)
            spoken = [] if batch is None else call_in_forward(task, partial(task.generate, batch, rows))
        self.tried_step = task.trainer.global_step
        found = self.report.summarize() if spoken else {}
        names = [*MEASURED]
        if self.evaluator is not None:
            has_voices = getattr(task.model, "speaker_encoder", None) is not None and data.speaker_embedding != "none"
            names += self.evaluator.list_metrics(has_voices=has_voices)
        missing = [name for name in names if name not in found] if self.report.problems else []
        return {f"val/{name}": value for name, value in {**found, **dict.fromkeys(missing, math.nan)}.items()}

    def compare(
        self, task: Any, generate: Callable[[], list[Speech]], rows: Sequence[PreparedRow], voices: Sequence[Tensor]
    ) -> list[Speech]:
        """Return speech, with ``report`` full of it; nothing where it fails. To be called in a gathering method.

        Args:
            task: In a run.
            generate: Makes the speech.
            rows: What was recorded.
            voices: The embedding of each row, zeros where it has none.
        """
        spoken = self._try(task, generate, is_in_forward=True)
        if spoken is None:
            return []
        report, pairs = self.report, zip(rows, spoken, strict=True)
        report.rows = [
            Sample(text=r.text, speaker=r.speaker, target=np.array(r.codes), speech=s, language=r.language)
            for r, s in pairs
        ]
        report.step, report.clips, report.recorded, report.measured = task.trainer.global_step, [], [], {}
        if self.evaluator is not None:
            evaluate = partial(self.evaluator.evaluate, report, task.trainer, task.model, voices)
            report.measured = self._try(task, evaluate, is_in_forward=True) or {}
        report.history[report.step] = report.summarize()
        return spoken

    def _try(self, task: Any, work: Callable[[], Result], *, is_in_forward: bool = False) -> Result | None:
        """Return what this gives; in ``fit``, nothing where it fails, which is said."""
        if task.trainer.state.fn != "fit":  # whoever only validates has nothing that would go on
            return work()
        found, problem = try_on_all(work, task if is_in_forward else None)
        if problem is not None:
            self.report.warn(problem, task.trainer.global_step)
        return found
