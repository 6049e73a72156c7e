"""What searches are asked to solve, and steps that stand for traces, in no time."""

from typing import Any

from closed_form_models import Model
from planned_steps import describe_module

from lit_fsdp.planning.closed_form.engine import StepEstimate, estimate_step
from lit_fsdp.planning.estimate import Hardware
from lit_fsdp.planning.search.search import Problem, Variant
from lit_fsdp.planning.step_parts import MicroBatch, ModelToTrain, Ranks
from lit_fsdp.planning.timing.hardware import find_gpu
from lit_fsdp.planning.timing.links import parse_links
from lit_fsdp.sharding.settings import Settings

BIGGER = {"model_type": "llama", "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512}
BIGGER |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def describe(
    device_bytes: int, *, num_nodes: int = 1, rows: int = 4, settings: Settings | None = None, **more: Any
) -> Problem:
    """Return a search for a small model on nodes of 4 RTX 4090."""
    gpu = find_gpu("RTX 4090")
    assert gpu is not None
    options: dict[str, Any] = {
        "variants": [Variant(model=describe_module(Model(num_hidden_layers=4), Settings(), precision="bf16-mixed"))],
        "settings": settings or Settings(),
        "ranks": Ranks(num_nodes=num_nodes, per_node=4),
        "micro_batch": MicroBatch(rows=rows, length=512),
        "num_micro_batches": 1,
        "splits_batch": True,
        "hardware": Hardware(gpu=gpu, links=parse_links("pcie4,ethernet25")),
        "device_bytes": device_bytes,
    }
    return Problem(**{**options, **more})


def estimate_512(model: ModelToTrain, settings: Settings, rows: int, num_micro_batches: int) -> StepEstimate:
    """Stands for a trace, of rows of 512 tokens on 4 ranks."""
    ranks, micro_batch = Ranks(num_nodes=1, per_node=4), MicroBatch(rows=rows, length=512)
    return estimate_step(model, settings, micro_batch, ranks=ranks, num_micro_batches=num_micro_batches)
