"""A tiny model, its reference and a batch of preferences, the same wherever they are made, and what TRL says of them.

Run as a script, by a Python that has TRL, this prints TRL's losses, rewards and gradients as JSON, which
``preference_golden.json`` holds:

    python tests/preference_cases.py > tests/preference_golden.json
"""

import json
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE, BETA = 32, 0.3
# Prompt and completion of each row: no two of a length, and one prompt that fills most of its row.
LENGTHS = ((3, 5), (6, 2), (1, 7), (4, 4), (3, 3), (6, 4), (1, 2), (4, 6))
CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss_type": "sigmoid"},
    "hinge": {"loss_type": "hinge"},
    "robust": {"loss_type": "robust", "label_smoothing": 0.2},
    "ipo": {"loss_type": "ipo"},
    "orpo": {"loss_type": "orpo"},
    "simpo": {"loss_type": "simpo", "simpo_gamma": 0.7, "label_smoothing": 0.1},
    "kto": {"loss_type": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.8},
}


def build_model(phase: float, **config: Any) -> Any:
    """Return a tiny Llama whose weights are sines, as random ones differ between versions."""
    settings = AutoConfig.for_model(
        "llama",
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **config,
        },
    )
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            places = torch.arange(parameter.numel(), dtype=torch.float64)
            values = 0.4 * torch.sin(places * (1.7 + 0.1 * number) + phase)
            parameter.copy_((values + (parameter.ndim == 1)).view_as(parameter))
    return model


def make_batch() -> dict[str, Tensor]:
    """Return eight rows: of pairs the chosen ones come first, of labelled ones those with the completions."""
    length = max(map(sum, LENGTHS))
    ids = torch.zeros(len(LENGTHS), length, dtype=torch.int64)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(LENGTHS):
        end = prompt + completion
        ids[row, :prompt] = 3 + (torch.arange(prompt) * 5 + row % 4 * 3) % (VOCAB_SIZE - 3)
        ids[row, prompt:end] = 3 + (torch.arange(completion) * 7 + row * 11) % (VOCAB_SIZE - 3)
        labels[row, prompt:end] = ids[row, prompt:end]
        mask[row, :end] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


METRICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "kl")
METRICS += ("logps/chosen", "logps/rejected")
DESIRABLE = torch.tensor([True, False, False, True])


def describe_gradients(model: nn.Module) -> dict[str, list[float]]:
    """Return norm and one projection of the gradient of each parameter."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad.double().flatten()
        probe = torch.cos(torch.arange(len(gradient), dtype=torch.float64))
        found[name] = [float(gradient.norm()), float(gradient @ probe)]
    return found


def build_trainer(name: str, model: nn.Module, folder: str) -> Any:
    """Return TRL's trainer of a case, with data that is not used."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    words = {word: n for n, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{n}" for n in range(VOCAB_SIZE - 3))])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", bos_token="<s>")
    settings: dict[str, Any] = {"output_dir": folder, "beta": BETA, "report_to": [], "use_cpu": True, **CASES[name]}
    settings |= {"per_device_train_batch_size": 4, "gradient_checkpointing": False, "bf16": False}
    kind = settings.pop("loss_type")
    rows = [{"prompt": "w1", "chosen": " w2 w3", "rejected": " w4"}] * 4
    options: dict[str, Any] = {"model": model, "processing_class": tokenizer}
    if kind == "kto":
        rows = [{"prompt": "w1", "completion": " w2 w3", "label": n % 2 == 0} for n in range(4)]
        config: Any = KTOConfig(**settings, loss_type="kto", train_sampling_strategy="sequential")
        return KTOTrainer(ref_model=build_model(0.5), args=config, train_dataset=Dataset.from_list(rows), **options)
    options["train_dataset"] = Dataset.from_list(rows)
    if kind == "orpo":
        return ORPOTrainer(args=ORPOConfig(**settings), **options)
    if kind == "simpo":
        return CPOTrainer(args=CPOConfig(**settings, loss_type="simpo", cpo_alpha=0.0), **options)
    return DPOTrainer(ref_model=build_model(0.5), args=DPOConfig(**settings, loss_type=[kind]), **options)


def compute_by_trl(name: str) -> dict[str, Any]:
    """Return what TRL says of a case."""
    kind, model, batch = CASES[name]["loss_type"], build_model(0.0), make_batch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(name, model, folder)
    trainer.model.eval()  # no dropout; figures are kept apart by mode
    first, second = ({key: value.chunk(2)[side] for key, value in batch.items()} for side in (0, 1))
    if kind in ("orpo", "simpo"):
        sides = (("chosen", first), ("rejected", second))
        given = {f"{side}_{key}": value for side, part in sides for key, value in part.items()}
        loss, metrics = trainer.get_batch_loss_metrics(model, given)
    else:
        part = first if kind == "kto" else batch
        given = {key: part[key] for key in ("input_ids", "attention_mask")}
        given["completion_mask"] = (part["labels"] != -100).long()
        if kind == "kto":
            given |= {f"KL_{key}": second[key] for key in ("input_ids", "attention_mask")}
            given |= {"KL_completion_mask": (second["labels"] != -100).long(), "label": DESIRABLE}
        loss = trainer._compute_loss(trainer.model, given, False)
        metrics = {key: value[-1] for key, value in trainer._metrics["eval"].items()}
    loss.backward()
    found = {key: float(metrics[key]) for key in METRICS if key in metrics}
    return {"loss": float(loss.detach()), "metrics": found, "gradients": describe_gradients(model)}


if __name__ == "__main__":
    json.dump({name: compute_by_trl(name) for name in CASES}, sys.stdout, indent=0)
    sys.stdout.write("\n")
