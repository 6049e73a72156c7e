import re
from collections.abc import Mapping
from typing import Any

import pytest

from lit_fsdp.cli.ray_options import choose_workers, count_asked, is_ray_asked, list_worker_args, refuse_ray_keys
from lit_fsdp.errors import ConfigError

TWO_NODES = [{"CPU": 16.0, "GPU": 4.0}, {"CPU": 16.0, "GPU": 4.0}]
ONE_CPU_NODE = [{"CPU": 6.0}]
DEFAULTS = {"num_workers": None, "address": None, "max_failures": 0, "resources_per_worker": None}


def choose(
    nodes: list[dict[str, float]], *, resources: Mapping[str, float] | None = None, devices: Any = "auto", **given: Any
) -> tuple[int, Mapping[str, float]]:
    settings = {**DEFAULTS, "devices": devices, "num_nodes": 1, **given}
    asked = count_asked(settings, cpu_processes=given.get("cpu_processes"))
    workers = choose_workers(
        asked,
        nodes,
        accelerator=given.get("accelerator", "auto"),
        resources=resources or {},
        may_be_fewer=asked[0] is None and "cpu_processes" not in given,
    )
    return workers.num_workers, workers.resources


def test_each_gpu_of_the_cluster_gets_a_rank_and_two_cpus_where_there_is_none() -> None:
    assert choose(TWO_NODES) == (8, {"GPU": 1})
    assert choose(ONE_CPU_NODE) == (2, {"CPU": 1})
    assert choose([{"CPU": 1.0}]) == (1, {"CPU": 1})
    assert choose(TWO_NODES, accelerator="cpu") == (2, {"CPU": 1})
    assert choose(TWO_NODES, devices=2, num_nodes=2) == (4, {"GPU": 1})
    assert choose(ONE_CPU_NODE, cpu_processes=3) == (3, {"CPU": 1})
    assert choose(TWO_NODES, resources={"CPU": 8}) == (4, {"GPU": 1, "CPU": 8})


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"num_workers": 0}, "num_workers: got 0: expected 1 or more"),
        ({"num_workers": 9}, r"got 9: .* room for 8 with GPU 1 each \(it has GPU 8 on 2 nodes\): set 8 or less"),
        ({"num_workers": 6, "resources": {"CPU": 8}}, "room for 4 with GPU 1, CPU 8 each"),
        ({"num_workers": 4, "devices": 2}, "got 4, but trainer.devices and num_nodes make 2 ranks: leave one out"),
        ({"max_failures": -2}, "max_failures: got -2: expected 0 or more, or -1"),
        ({"resources": {"GPU": 0.5}}, "resources_per_worker: got GPU 0.5: expected 1"),
        ({"resources": {"CPU": -1}}, "resources_per_worker: got CPU -1: expected 0 or more"),
        ({"nodes": ONE_CPU_NODE, "accelerator": "gpu"}, "trainer.accelerator: got 'gpu': the Ray cluster has no GPU"),
        ({"nodes": ONE_CPU_NODE, "resources": {"CPU": 7}}, "room for 0 .*: lower resources_per_worker"),
    ],
)
def test_what_ray_would_wait_for_without_an_end_is_refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(**{"nodes": TWO_NODES, **given})
    assert re.search(line, refused.value.line)


def test_the_command_line_of_a_worker_does_not_start_ray_again() -> None:
    args = ["fit", "--config=run.yaml", "--launcher", "ray", "--num_workers=2"]
    assert is_ray_asked(args)
    assert is_ray_asked(["fit", "--launcher=ray"])
    assert not is_ray_asked(list_worker_args(args))
    assert not is_ray_asked(["fit", "--launcher", "other"])


def test_keys_of_ray_without_ray_are_refused() -> None:
    refuse_ray_keys({"launcher": None, **DEFAULTS})
    with pytest.raises(ConfigError) as refused:
        refuse_ray_keys({"launcher": None, **DEFAULTS, "num_workers": 3})
    assert "num_workers: got 3: not used without --launcher ray" in refused.value.line
    assert "data.init_args.num_workers" in refused.value.line
    with pytest.raises(ConfigError) as refused:
        refuse_ray_keys({"launcher": "ray", **DEFAULTS})
    assert "fit --launcher ray" in refused.value.line
