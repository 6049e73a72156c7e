"""Which methods of a task a subclass has replaced, so that rules made for the task know nothing of its step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from torch import nn

# By one of these a class says what its step is made of. Who replaces another method in a class below says nothing.
_RULES = ("measure_batch", "read_step")
_STEP = {
    *("forward", "__call__", "training_step", "backward", "optimizer_step", "optimizer_zero_grad"),
    *("configure_model", "configure_units", "configure_optimizers", "configure_gradient_clipping"),
    *("train", "parameters", "named_parameters"),
}
# What tasks have besides: it runs outside of the step, or changes no tensor of it.
_HARMLESS = {
    *("setup", "teardown", "prepare_data", "prepare_plan", "read_config", "enter_dry_run", "restores_frozen"),
    "leaves_out_frozen",
    *("configure_weights", "configure_callbacks", "get_seed", "get_lr_factors", "generate", "complete_sampling"),
    *("log", "log_dict", "log_step", "log_evaluation", "update_eval_loss"),
    *("state_dict", "load_state_dict", "lr_scheduler_step"),
    *("get_grad_norm", "check_loss_chunks", "check_sequence", "class_names", "skipped_images", "collect_export_files"),
    *("is_sum_of_rows", "longest_row"),
}
_HARMLESS_PREFIXES = ("__", "on_", "validation_", "test_", "predict_")
_LIBRARIES = {"lightning", "torch", "torchmetrics", "builtins", "abc", "typing"}
# What follows a step on tensors without values leaves these out.
_UNTRACED = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")


def list_overrides(module: nn.Module) -> tuple[str, list[str]]:
    """Return which methods of the step a module's class replaces, and the name of the class that does.

    Replaced is what belongs to a class more derived than the one that defines ``measure_batch`` or ``read_step``, and
    was there before: hooks for logging, evaluation and checkpoints are not of the step.
    A module without these two methods replaces nothing.
    """
    classes = type(module).__mro__
    ruled = next((i for i, owner in enumerate(classes) if any(name in vars(owner) for name in _RULES)), 0)
    if any(name in vars(module) for name in _RULES):
        return type(module).__name__, []
    of_task = {name for owner in classes[ruled:] if not _is_library(owner) for name in vars(owner)}
    owner_name = type(module).__name__
    found: list[str] = []
    for owner in classes[:ruled]:
        if not _is_library(owner) and (names := [n for n in _list_step_methods(owner) if n in of_task | _STEP]):
            owner_name = owner.__name__ if not found else owner_name
            found += [name for name in names if name not in found]
    return owner_name, found


def list_untraced(module: nn.Module) -> list[str]:
    """Return which methods of a user's class take part in a step, and are left out by whoever follows it."""
    found = []
    for name in _UNTRACED:
        owner = next((owner for owner in type(module).__mro__ if name in vars(owner)), nn.Module)
        if not _is_library(owner) and owner.__module__.partition(".")[0] != "lit_fsdp":
            found.append(name)
    return found


def keeps_gradients(module: nn.Module) -> bool:
    """Return whether gradients live until the backward of the next step, as in Lightning's loop (2.6).

    It lets go of them only before backward, unless the module itself does after the optimizer step, and says so by
    ``releases_gradients``, which holds up to a class that has another ``optimizer_step``. A module that is none of
    Lightning's has a loop of its own, which is taken to let go.
    """
    if not hasattr(module, "optimizer_zero_grad"):
        return False
    classes = type(module).__mro__
    said = next((i for i, owner in enumerate(classes) if "releases_gradients" in vars(owner)), None)
    if said is None or any("optimizer_step" in vars(owner) for owner in classes[:said]):
        return not vars(module).get("releases_gradients", False)
    return not module.releases_gradients


def _list_step_methods(owner: type) -> Iterator[str]:
    for name, value in vars(owner).items():
        is_method = callable(value) or isinstance(value, property | cached_property | staticmethod | classmethod)
        is_harmless = name in _HARMLESS or name.startswith(_HARMLESS_PREFIXES)
        if is_method and (name in _STEP or not is_harmless):
            yield name


def _is_library(owner: type) -> bool:
    return owner.__module__.partition(".")[0] in _LIBRARIES
