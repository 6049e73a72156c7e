"""The keys of a run whose ranks Ray starts, and how many that are. Needs no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch.cli import LightningArgumentParser

from lit_fsdp.errors import ConfigError, join_names
from lit_fsdp.strategy.processes import count_devices

_DEFAULTS: dict[str, Any] = {"num_workers": None, "address": None, "max_failures": 0, "resources_per_worker": None}
_ON_CPU = 2  # workers, where nobody says how many


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What Ray is asked for.

    Args:
        num_workers: Processes, each of them a rank.
        resources: Of each, in Ray's words.
    """

    num_workers: int
    resources: Mapping[str, float]

    @property
    def has_gpus(self) -> bool:
        """Whether each has a GPU."""
        return bool(self.resources.get("GPU"))


def add_ray_arguments(parser: LightningArgumentParser) -> None:
    """Add the keys of a run on Ray."""
    parser.add_argument(
        "--launcher",
        type=Literal["ray"] | None,
        default=None,
        help="`ray`, on the command line of `fit`, lets Ray Train start the ranks. Default: Lightning starts them on "
        "this machine, or torchrun or SLURM have.",
    )
    parser.add_argument(
        "--num_workers",
        type=int | None,
        default=None,
        help="With Ray: how many ranks. Default: what trainer.devices and num_nodes say, else one for each GPU of the "
        "cluster. Without GPUs cpu_processes, else 2 if there are as many CPUs.",
    )
    parser.add_argument(
        "--address",
        type=str | None,
        default=None,
        help="With Ray: the cluster, as host:port. `auto` takes the one of this machine, `local` starts one for this "
        "run. Default: RAY_ADDRESS, else the one of this machine, else one for this run.",
    )
    parser.add_argument(
        "--max_failures",
        type=int,
        default=0,
        help="With Ray: how often all ranks start again after one has failed, from the last checkpoint. -1: always.",
    )
    parser.add_argument(
        "--resources_per_worker",
        type=dict[str, float] | None,
        default=None,
        help='With Ray: what each rank takes, such as \'{"GPU": 1, "CPU": 4}\'. Default: one GPU, or one CPU where '
        "the cluster has no GPUs.",
    )


def is_ray_asked(args: Sequence[str]) -> bool:
    """Whether a command line names Ray as its launcher; its parser checks the rest."""
    given = [*args, ""]
    named = [
        given[i + 1] if one == "--launcher" else one.partition("=")[2] for i, one in enumerate(args) if _is_it(one)
    ]
    return named[-1:] == ["ray"]


def _is_it(argument: str) -> bool:
    return argument == "--launcher" or argument.startswith("--launcher=")


def list_worker_args(args: Sequence[str]) -> list[str]:
    """Return the command line of a worker: the same run, whose ranks are there already."""
    own = [f"--{name}={'null' if value is None else value}" for name, value in {"launcher": None, **_DEFAULTS}.items()]
    return [*args, *own, "--trainer.devices=auto", "--trainer.num_nodes=1"]


def refuse_ray_keys(settings: Mapping[str, Any]) -> None:
    """Refuse keys of Ray in a run that it does not start.

    Raises:
        ConfigError: With what to write instead.
    """
    if settings["launcher"] is not None:
        raise ConfigError(
            "launcher: got 'ray' in a file, or for another command than fit: expected it on the command line: "
            "fit --launcher ray"
        )
    if given := [name for name, default in _DEFAULTS.items() if settings[name] != default]:
        hint = "; that of the data is data.init_args.num_workers" if given == ["num_workers"] else ""
        raise ConfigError(f"{given[0]}: got {settings[given[0]]}: not used without --launcher ray: leave it out{hint}")


def count_asked(settings: Mapping[str, Any], *, cpu_processes: int | None) -> tuple[int | None, int]:
    """Return how many workers a configuration asks for with GPUs, ``None`` for all, and how many without.

    Args:
        settings: ``num_workers``, ``max_failures``, and ``devices`` and ``num_nodes`` of the Trainer.
        cpu_processes: Where nothing else says how many.

    Raises:
        ConfigError: A number that means nothing, or two that differ.
    """
    given, failures = settings["num_workers"], settings["max_failures"]
    if given is not None and given < 1:
        raise ConfigError(f"num_workers: got {given}: expected 1 or more")
    if failures < -1:
        raise ConfigError(f"max_failures: got {failures}: expected 0 or more, or -1 for no limit")
    try:
        devices = count_devices(settings["devices"])
    except ValueError as error:
        raise ConfigError(str(error)) from None
    configured = None if devices is None else devices * settings["num_nodes"]
    if given is not None and configured not in (None, given):
        raise ConfigError(
            f"num_workers: got {given}, but trainer.devices and num_nodes make {configured} ranks: leave one out"
        )
    asked = given or configured
    return asked, asked or cpu_processes or _ON_CPU


def choose_workers(
    asked: tuple[int | None, int],
    nodes: Sequence[Mapping[str, float]],
    *,
    accelerator: str,
    resources: Mapping[str, float],
    may_be_fewer: bool,
) -> Workers:
    """Return the workers that a cluster gets, each with one GPU where it has any.

    Args:
        asked: See ``count_asked``.
        nodes: The resources of each machine.
        accelerator: Of the Trainer.
        resources: Of each worker, beside its GPU or in place of its CPU.
        may_be_fewer: Whether ``asked`` without GPUs is only a wish.

    Raises:
        ConfigError: The cluster has no room for them; Ray would wait for it without an end.
    """
    has_gpus = accelerator != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes)
    if accelerator in ("gpu", "cuda") and not has_gpus:
        raise ConfigError(f"trainer.accelerator: got {accelerator!r}: the Ray cluster has no GPU: set auto, or cpu")
    if resources.get("GPU", int(has_gpus)) != int(has_gpus):
        raise ConfigError(
            f"resources_per_worker: got GPU {resources['GPU']:g}: expected {int(has_gpus)}, as each rank has "
            f"{'one of its own' if has_gpus else 'a CPU only'}: leave it out"
        )
    if bad := [name for name, amount in resources.items() if amount < 0]:
        raise ConfigError(f"resources_per_worker: got {bad[0]} {resources[bad[0]]:g}: expected 0 or more")
    needed = {"GPU" if has_gpus else "CPU": 1.0, **resources}
    room = sum(_count_room(node, needed) for node in nodes)
    num_workers = asked[0] or room if has_gpus else min(asked[1], room) if may_be_fewer else asked[1]
    if not 1 <= num_workers <= room:
        each = join_names([f"{name} {amount:g}" for name, amount in needed.items()])
        has = {name: sum(node.get(name, 0) for node in nodes) for name in needed}
        total = join_names([f"{name} {amount:g}" for name, amount in has.items()])
        raise ConfigError(
            f"num_workers: got {num_workers}: the Ray cluster has room for {room} with {each} each (it has {total} "
            f"on {len(nodes)} nodes): " + (f"set {room} or less, or " if room else "") + "lower resources_per_worker"
        )
    return Workers(num_workers=num_workers, resources={k: v for k, v in needed.items() if v})


def _count_room(node: Mapping[str, float], needed: Mapping[str, float]) -> int:
    return int(min((node.get(name, 0) // amount for name, amount in needed.items() if amount), default=_NO_LIMIT))


_NO_LIMIT = 1024  # of one machine, where a worker takes nothing
