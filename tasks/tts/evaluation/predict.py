"""What ``predict`` makes of texts on this rank: codes, and audio where a codec is set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_fsdp.sharding.mesh import gather_objects
from lit_fsdp.strategy.trainer_settings import get_data_ranks
from lit_fsdp.tasks.loading import PADDING
from lit_fsdp.tasks.tts.evaluation.speech_eval import SpeechEvaluator
from lit_fsdp.tasks.tts.generation import Speech


class Prediction:
    """Turns speech into what ``predict_step`` returns, and counts what was cut off. All ranks must have one.

    Args:
        trainer: Says where WAV files go.
        evaluator: Its codec decodes them; ``None`` leaves it at codes.
    """

    def __init__(self, trainer: Trainer, evaluator: SpeechEvaluator | None) -> None:
        self.evaluator = evaluator
        self.folder = Path(trainer.log_dir or trainer.default_root_dir) / "spoken"  # log_dir is a broadcast
        self.num_cut = 0
        self._is_copy = get_data_ranks(trainer).place > 0  # of a rank that has the same texts
        if evaluator is None:
            rank_zero_info("predict writes codes; with model.speech_eval.codec set, WAV files too")

    def describe(self, spoken: Sequence[Speech], numbers: Sequence[int]) -> dict[str, Any]:
        """Return lists by name, for the texts of a batch."""
        pairs = list(zip(numbers, spoken, strict=True))
        self.num_cut += sum(not speech.has_ended for number, speech in pairs if number != PADDING)
        found = {
            "index": list(numbers),
            "prediction": [speech.codes.tolist() for speech in spoken],
            "has_ended": [speech.has_ended for speech in spoken],
        }
        if self.evaluator is None:
            return found
        paths = [self.folder / f"{number:05}.wav" for number in numbers]
        for (number, speech), path in zip(pairs, paths, strict=True):
            if number != PADDING and not self._is_copy:
                self.evaluator.decode(speech).write(path)
        return {**found, "audio": [str(path) for path in paths]}

    def finish(self, max_frames: int) -> None:
        """Say how many texts of all ranks were cut off; all must call it."""
        if num_cut := sum(gather_objects(0 if self._is_copy else self.num_cut)):
            rank_zero_warn(
                f"cut off at sampling.max_frames {max_frames}, without an end: {num_cut} of the texts; has_ended "
                "tells which"
            )
