"""Runs on ranks that pass for GPUs: nothing mixes host and device, nothing reads what has not arrived.

See ``stand_in_gpu.py`` for what that checks. Each run saves a checkpoint beside or between its steps, and a second one
goes on from there to the same weights.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from gpu_cases import CASES, save_start, train_and_go_on
from stand_in_gpu import TooEarlyError, WrongPlaceError, find_place, run_as_gpus
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule

from lit_fsdp import CPUOffload, Mesh, MixedPrecision, Wrap
from lit_fsdp.checkpoint import single_file
from lit_fsdp.sharding.mesh import build_mesh
from lit_fsdp.sharding.mixed_precision import ShardedGradScaler
from lit_fsdp.sharding.parallelize import shard_module
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.torch_internals import settle_root
from ranks import RankError


def add(first: Tensor, second: Tensor) -> None:
    first + second


def copy_early(number: Tensor, use: Callable[[Tensor], Any], wait: Callable[[], None] = lambda: None) -> None:
    arriving = number.to("cpu", non_blocking=True)
    wait()
    use(arriving)


def overwrite_early(wait: Callable[[], None] = lambda: None) -> None:
    shard = torch.zeros(4).pin_memory()
    shard.to("cuda", non_blocking=True)
    wait()
    shard.add_(1)


def wait_for_event() -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def wait_for_other_stream() -> None:
    torch.cuda.Stream().record_event().synchronize()


def refuse() -> None:
    host, device = torch.ones(4), torch.ones(4, device="cuda")
    assert (host.device.type, device.device.type, nn.Parameter(device).is_cuda) == ("cpu", "cuda", True)
    assert find_place(torch.zeros_like(device)[1:].float()) == find_place(device.new_empty(2)) == "device"
    assert find_place(device.cpu()) == find_place(torch.zeros_like(device, device="cpu")) == "host"
    leaf = torch.ones(4, device="cuda", requires_grad=True)
    (leaf * torch.tensor(2.0) + device[torch.tensor([0, 1, 2, 3])]).sum().backward()  # numbers and indices may mix
    assert leaf.grad is not None and leaf.grad.is_cuda and leaf.grad.tolist() == [2.0] * 4  # noqa: PT018
    for mix in (
        lambda: add(host, device),
        lambda: torch.cat([host, device]),
        lambda: torch.ones(()).add_(device.sum()),
        lambda: host[torch.tensor([0], device="cuda")],
        lambda: torch._amp_foreach_non_finite_check_and_unscale_([device], device[0], host[0]),
        lambda: nn.functional.embedding(torch.tensor([0]), device.view(2, 2)),
        device.numpy,
        device.pin_memory,
    ):
        with pytest.raises(WrongPlaceError):
            mix()  # type: ignore[no-untyped-call]
    for early in (
        lambda: copy_early(device, lambda t: t + 1),
        lambda: copy_early(device.sum(), Tensor.item),
        lambda: copy_early(device, Tensor.numpy),
        lambda: copy_early(device, lambda t: torch.save(t, "/dev/null")),
        lambda: copy_early(device, lambda t: t + 1, wait_for_other_stream),
        overwrite_early,
    ):
        with pytest.raises(TooEarlyError):
            early()
    for wait in (wait_for_event, torch.cuda.synchronize, torch.cuda.current_stream().synchronize, device.sum().item):
        copy_early(device, Tensor.numpy, wait)
        overwrite_early(wait)
    copy_early(device, lambda t: t.to("cuda", non_blocking=True))  # in order, on one stream


def test_the_stand_in_refuses_what_mixes_and_what_comes_too_early() -> None:
    run_as_gpus(refuse)


def change_offloaded() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    mesh = build_mesh(Mesh(), device_type="cuda", world_size=dist.get_world_size(), ranks_per_node=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    settings = Settings(wrap=Wrap(module_classes=["Linear"]), cpu_offload=CPUOffload())
    shard_module(model, settings, dtypes=MixedPrecision(), mesh=mesh, device=device, leaves_whole=False)
    settle_root(cast(FSDPModule, model))
    places = set()
    model[1].register_load_state_dict_pre_hook(lambda _, values, *__: places.update(map(find_place, values.values())))
    model(torch.ones(2, 4, device=device))
    model.load_state_dict({name: torch.ones(value.shape) for name, value in model.state_dict().items()})
    assert places == {"host"}  # nothing of what is loaded is on its way through the memory of the GPU
    model(torch.ones(2, 4, device=device))
    assert model(torch.ones(2, 4, device=device)).tolist() == [[21.0] * 4] * 2
    model(torch.ones(2, 4, device=device))
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    assert model(torch.ones(2, 4, device=device)).tolist() == [[82.0] * 4] * 2


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
def test_offloaded_shards_are_assigned_and_loaded_once_copies_of_them_are_over(world_size: int) -> None:
    run_as_gpus(change_offloaded, world_size=world_size)


# Of which others have each part.
SLOW = {"float16, one file", "nf4, one file", "full, accumulated", "full offloaded, not pinned", "int8 offloaded"}
SLOW |= {
    "olora offloaded",
    "adafactor offloaded",
    "muon",
    "images, batch norm, saved beside",
    "dia offloaded",
    "speech",
}


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_a_run_keeps_host_and_device_apart_and_resumes_exactly(name: str, tmp_path: Path) -> None:
    run_as_gpus(train_and_go_on, save_start(tmp_path / "start", name), name, 0.0, world_size=2)


def unscale_too_early(folder: Path, name: str) -> None:
    unscale = ShardedGradScaler._unscale_grads_

    def copy_first(self: Any, optimizer: Any, inv_scale: Tensor, *rest: Any) -> Any:
        return unscale(self, optimizer, inv_scale.to("cpu", non_blocking=True), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedGradScaler, "_unscale_grads_", copy_first)
        train_and_go_on(folder, name, 0.0)


def load_by_torch(folder: Path, name: str) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single_file, "_spread", lambda stored, _: stored)
        patch.setattr(single_file, "set_weights", partial(set_model_state_dict, options=options))
        train_and_go_on(folder, name, 0.0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("body", "name", "message"),
    [
        (unscale_too_early, "float16 offloaded, one file", "TooEarlyError"),
        (load_by_torch, "nf4 offloaded, one file", "Multiple devices found"),
    ],
)
def test_a_run_with_a_known_fault_is_stopped(
    body: Callable[..., None], name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=message):
        run_as_gpus(body, save_start(tmp_path / "start", name), name, world_size=2)
