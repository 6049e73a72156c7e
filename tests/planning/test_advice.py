from dataclasses import replace

import pytest
import yaml

from lit_fsdp.planning.advice import Situation, suggest_settings
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.mesh import Mesh
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import Sharding

GB = 10**9
# 1 B parameters in fp32 with AdamW on 4 ranks.
HELD = {"parameters": GB, "gradients": GB, "optimizer_state": 2 * GB, "gathered": GB // 2, "activations": 8 * GB}
NOW = Situation(
    held=HELD,  # type: ignore[arg-type]
    reserved=0,
    settings=Settings(),
    num_shards=4,
    num_replicas=1,
    num_blocks=16,
    num_params=GB,
    num_trainable=GB,
    gathered_bytes=4 * GB,
    largest_unit_bytes=GB // 4,
    parameter_bytes=4,
    batch_size=8,
    can_add_adapters=True,
    can_quantize=True,
)


def suggest(situation: Situation) -> dict[str, int]:
    return {suggestion.setting.split(":")[0]: suggestion.saved_bytes for suggestion in suggest_settings(situation)}


def test_what_keeps_the_result_comes_first_and_the_largest_saving_before_smaller_ones() -> None:
    found = suggest_settings(NOW)
    keeps = [suggestion.keeps_result for suggestion in found]
    assert keeps == sorted(keeps, reverse=True)
    for tier in (True, False):
        saved = [suggestion.saved_bytes for suggestion in found if suggestion.keeps_result is tier]
        assert saved == sorted(saved, reverse=True)
    assert found[0].setting == "trainer.strategy.activation_checkpointing.mode: full"


def test_savings_follow_from_what_is_held() -> None:
    found = suggest(NOW)
    assert found["trainer.strategy.activation_checkpointing.mode"] == 8 * GB * 15 // 16
    assert found["data.batch_size"] == 4 * GB
    assert found["trainer.strategy.cpu_offload"] == 4 * GB
    assert found["twice the ranks (now 4)"] == 2 * GB
    assert found["model.optimizer.name"] == pytest.approx(2 * GB * 0.74)
    assert found["trainer.precision"] == 2 * GB
    assert found["model.lora"] == pytest.approx(3 * GB * 0.98)


def test_offload_is_not_named_beside_an_optimizer_that_it_is_refused_with() -> None:
    assert "trainer.strategy.cpu_offload" in suggest(NOW)
    assert "trainer.strategy.cpu_offload" not in suggest(replace(NOW, optimizer_name="adamw_8bit_paged"))


def test_an_optimizer_of_whole_rows_is_not_named_where_layers_are_split_by_columns() -> None:
    assert "model.optimizer.name" not in suggest(replace(NOW, settings=Settings(mesh=Mesh(tensor=2))))


@pytest.mark.parametrize(
    ("change", "setting", "saved"),
    [
        ({"sharding": Sharding(reshard_after_forward=False)}, "reshard_after_forward", 3.5 * GB),
        ({"sharding": Sharding(no_sync=True)}, "no_sync", 3 * GB),
        ({"mesh": Mesh(replicate=2)}, "mesh.replicate", 2 * GB),
    ],
    ids=str,
)
def test_a_setting_that_costs_memory_is_named(change: dict, setting: str, saved: float) -> None:
    assert f"trainer.strategy.{setting}" not in {name.replace("sharding.", "") for name in suggest(NOW)}
    situation = replace(NOW, settings=Settings(**change), num_replicas=2 if "mesh" in change else 1)
    found = {name.replace("sharding.", ""): num_bytes for name, num_bytes in suggest(situation).items()}
    assert found[f"trainer.strategy.{setting}"] == saved


@pytest.mark.parametrize("mesh", [Mesh(replicate=2), Mesh(replicate=-1, shard="node"), Mesh(replicate=2, shard=4)])
def test_one_copy_is_advised_with_a_mesh_that_the_same_ranks_can_have(mesh: Mesh) -> None:
    situation = replace(NOW, settings=Settings(mesh=mesh), num_replicas=2)
    (setting,) = (found.setting for found in suggest_settings(situation) if "mesh.replicate" in found.setting)
    values = yaml.safe_load(f"{{{setting.removeprefix('trainer.strategy.mesh.').replace(' and ', ' ')}}}")
    sizes = replace(mesh, **values).resolve(world_size=8, ranks_per_node=4)
    assert (sizes.replicate, sizes.shard) == (1, 8)


def test_what_is_set_already_is_not_suggested() -> None:
    settings = Settings(activation_checkpointing=ActivationCheckpointing(mode="full"), cpu_offload=CPUOffload())
    found = suggest(
        replace(NOW, settings=settings, batch_size=0, can_add_adapters=False, can_quantize=None, parameter_bytes=2)
    )
    assert set(found) == {"twice the ranks (now 4)", "model.optimizer.name"}
    small = replace(NOW, held={**HELD, "optimizer_state": GB // 2})  # type: ignore[arg-type]  # 2 bytes each
    assert "model.optimizer.name" not in suggest(small)


def test_a_single_sample_can_only_get_shorter() -> None:
    found = suggest(replace(NOW, batch_size=1))
    assert found["data.seq_length"] == 4 * GB
    assert "data.batch_size" not in found


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh(replicate=2), "twice the ranks (now 8)"),
        (Mesh(tensor=2, replicate=2), "twice the ranks (now 16)"),
        (Mesh(replicate=-1, shard="node"), "twice the ranks of each node (now 4)"),
        (Mesh(replicate=-1, shard=4), None),
        (Mesh(replicate=-1, shard=1), None),
    ],
    ids=str,
)
def test_more_ranks_are_named_where_shards_get_smaller_with_them(mesh: Mesh, said: str | None) -> None:
    found = suggest_settings(replace(NOW, settings=Settings(mesh=mesh), num_replicas=2))
    names = [suggestion.setting for suggestion in found if suggestion.setting.startswith("twice")]
    assert names == ([] if said is None else [said])


@pytest.mark.parametrize(("size", "parts"), [(8, 2), (9, 3), (7, 7)])
def test_smaller_batches_make_up_the_same_step(size: int, parts: int) -> None:
    (found,) = (s for s in suggest_settings(replace(NOW, batch_size=size)) if s.setting.startswith("data.batch_size"))
    times = "twice" if parts == 2 else f"{parts} times"
    smaller = f"data.batch_size: {size // parts} (now {size})"
    assert found.setting == f"{smaller}, with {times} the trainer.accumulate_grad_batches"
    assert found.saved_bytes == 8 * GB * (parts - 1) // parts
    # There the accumulation follows, and is refused as a setting.
    decided = suggest_settings(replace(NOW, batch_size=size, has_global_batch=True))
    assert smaller in [suggestion.setting for suggestion in decided]


def test_smaller_batches_of_a_loss_that_compares_rows_are_another_training() -> None:
    for is_sum in (True, False):
        found = suggest_settings(replace(NOW, is_sum_of_rows=is_sum))
        assert [s.keeps_result for s in found if s.setting.startswith("data.batch_size")] == [is_sum]


def test_an_evaluation_has_a_batch_size_of_its_own() -> None:
    held = replace(NOW, settings=Settings(sharding=Sharding(no_sync=True)), is_evaluating=True, is_sum_of_rows=False)
    found = suggest_settings(replace(held, batch_setting="data.eval_batch_size"))
    assert not any("no_sync" in suggestion.setting or "AdamW" in suggestion.cost for suggestion in found)
    (size,) = (suggestion for suggestion in found if "batch_size" in suggestion.setting)
    assert size.setting == "data.eval_batch_size: 4 (now 8)"
    assert size.keeps_result
    assert "data.batch_size: 4 (now 8)" in [suggestion.setting for suggestion in suggest_settings(held)]


def test_memory_lost_between_tensors_is_named() -> None:
    assert suggest(replace(NOW, reserved=GB))["environment variable PYTORCH_CUDA_ALLOC_CONF=expandable_segments"] == GB


def test_what_saves_next_to_nothing_is_left_out() -> None:
    assert "trainer.strategy.activation_checkpointing.mode" not in suggest(
        replace(NOW, held={**HELD, "activations": GB // 100})
    )  # type: ignore[arg-type]


def test_only_settings_that_there_are_are_suggested() -> None:
    own = replace(NOW, batch_size=1, has_seq_length=False, optimizer_name=None)
    assert {"data.seq_length", "model.optimizer.name"} <= suggest(replace(NOW, batch_size=1)).keys()
    assert not {"data.seq_length", "model.optimizer.name"} & suggest(own).keys()
