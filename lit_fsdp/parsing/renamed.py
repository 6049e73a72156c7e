"""Settings that have another name now: an old one is refused with the new one. To be emptied at 1.0."""

# The old name below the new name of what holds it, and the new name; of a class, just the names.
RENAMED = {
    "strategy.recompute": "activation_checkpointing",
    "activation_checkpointing.every": "every_n_blocks",
    "strategy.units": "wrap",
    "wrap.rule": "policy",
    "wrap.policy=classes": "module_classes",
    "wrap.classes": "module_classes",
    "sharding.hold_gradients": "no_sync",
    "strategy.offload": "cpu_offload",
    "strategy.async_checkpoints": "async_save",
    "quantization.double": "double_quant",
    "quantization.skip": "skip_modules",
    "lora.targets": "target_modules",
    "lora.exclude": "exclude_modules",
    "lora.init": "init_lora_weights",
    "lora.rslora": "use_rslora",
    "lora.dora": "use_dora",
    "model.schedule": "lr_scheduler",
    "lr_scheduler.shape": "type",
    "lr_scheduler.warmup_fraction": "warmup_ratio",
    "lr_scheduler.min_factor": "min_lr_rate",
    "model.mixing": "mixup",
    "mixup.mixup": "mixup_alpha",
    "mixup.cutmix": "cutmix_alpha",
    "mixup.cutmix_share": "switch_prob",
    "mixup.probability": "prob",
    "model.listening": "speech_eval",
    "model.speak_rows": "num_samples",
    "TrafficLogger": "CommunicationLogger",
}


def rename_key(path: str) -> str:
    """Return a dotted path with all names that are new, the same path if none is."""
    known = [part for part in path.split(".") if part != "init_args"]
    for index in range(1, len(known)):
        known[index] = RENAMED.get(".".join(known[index - 1 : index + 1]), known[index])
    names = iter(known)
    return ".".join(part if part == "init_args" else next(names) for part in path.split("."))
