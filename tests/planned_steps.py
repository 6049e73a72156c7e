"""Steps that stand for traces, in no time."""

from lit_fsdp.planning.closed_form import StepPrediction, predict_step
from lit_fsdp.planning.estimate import ModelToTrain
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.sharding.settings import Settings


def predict_512(model: ModelToTrain, settings: Settings, rows: int, num_micro_batches: int) -> StepPrediction:
    """Stands for a trace, of rows of 512 tokens on 4 ranks."""
    return predict_step(
        model.module,
        model.units,
        settings,
        dtypes=model.dtypes,
        optimizer=model.optimizer,
        micro_batch=MicroBatch(rows=rows, length=512),
        world_size=4,
        ranks_per_node=4,
        num_micro_batches=num_micro_batches,
        device_type="cuda",
    )
