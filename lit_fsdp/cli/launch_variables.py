"""Checks what a launcher has set in the environment, before a library reads it and fails with a traceback."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from lit_fsdp.errors import ConfigError

# Of torchrun, of Lightning's launcher and of Slurm: the least and the largest value.
_LIMITS = {
    "WORLD_SIZE": (1, None),
    "LOCAL_WORLD_SIZE": (1, None),
    "RANK": (0, None),
    "LOCAL_RANK": (0, None),
    "GROUP_RANK": (0, None),
    "NODE_RANK": (0, None),
    "MASTER_PORT": (1, 65535),
    "SLURM_RESTART_COUNT": (0, None),
    "SLURM_NNODES": (1, None),
    "SLURM_STEP_NUM_NODES": (1, None),
    "SLURM_STEP_NUM_TASKS": (1, None),
    "SLURM_NTASKS": (1, None),
    "SLURM_PROCID": (0, None),
    "SLURM_LOCALID": (0, None),
    "SLURM_NODEID": (0, None),
    "SLURM_JOB_ID": (0, None),
}
_BELOW = (
    *(("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_RANK", "WORLD_SIZE")),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def check_launch_variables(environ: Mapping[str, str]) -> None:
    """Refuse variables of a launcher that are no numbers, or that contradict each other.

    Raises:
        ConfigError: With the variable, its value and the rule.
    """
    values = {name: _read(name, environ[name]) for name in _LIMITS if name in environ}
    for rank, size in _BELOW:
        if rank in values and size in values and values[rank] >= values[size]:
            raise ConfigError(
                f"{rank}: got {values[rank]} in the environment, with {size} {values[size]}: expected 0 to "
                f"{values[size] - 1}; {_describe_fix(rank, size)}"
            )
    world, local = values.get("WORLD_SIZE"), values.get("LOCAL_WORLD_SIZE")
    if world is not None and local is not None and world % local:
        raise ConfigError(
            f"WORLD_SIZE: got {world} in the environment, with LOCAL_WORLD_SIZE {local}: expected a multiple of it, as "
            "all nodes have as many processes; start that many on each"
        )


def drop_stale_variables(environ: MutableMapping[str, str]) -> None:
    """Remove variables that no launcher can have meant, for a command to which none of them matters."""
    try:
        check_launch_variables(environ)
    except ConfigError:
        for name in _LIMITS:
            environ.pop(name, None)


def _read(name: str, text: str) -> int:
    least, largest = _LIMITS[name]
    expected = f"{least} or more" if largest is None else f"{least} to {largest}"
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (largest is not None and value > largest):
        raise ConfigError(
            f"{name}: got {text!r} in the environment, which launchers set: expected a whole number, {expected}; "
            f"{_describe_fix(name)}"
        )
    return value


def _describe_fix(*names: str) -> str:
    return f"unset {' and '.join(names)} if no launcher has started this, else mend how it starts it"
