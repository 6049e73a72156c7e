"""``loss_chunks``: the same training, without the logits of all tokens at once."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from training import EVEN, GLOBAL_BATCH, LENGTH, TIED, UNEVEN, Recorder, Rows, build_task, build_trainer, save_model
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp import FSDP2Strategy
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.callbacks import MemoryLogger
from lit_fsdp.tasks import CausalLM
from lit_fsdp.tasks.causal_lm.chunked_loss import install_chunked_loss, sum_chunked_losses
from ranks import run_ranks

VOCAB_SIZE = 2001  # so that logits rule the memory
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def fit(folder: Path, out: Path, chunks: int, **options: Any) -> tuple[list[float], list[float], int]:
    torch.manual_seed(0)  # adapters are drawn from it
    recorder, memory = Recorder(), MemoryLogger()
    trainer = build_trainer(
        FSDP2Strategy(print_plan=False), callbacks=[recorder, memory], default_root_dir=out, max_steps=4
    )
    task = build_task(folder, loss_chunks=chunks, **options)
    trainer.fit(task, Rows(VOCAB_SIZE, GLOBAL_BATCH // dist.get_world_size()))
    section = memory.make_section()
    assert section is not None
    if dist.get_rank() == 0 and not options:  # adapters on a head in chunks have no rule
        assert abs(section.numbers["predicted"]["difference_pct"]) < 1
    return recorder.result.losses, recorder.result.grad_norms, section.numbers["step"]["peak_bytes"]


def compare(folder: Path, out: Path, options: dict[str, Any]) -> None:
    losses, norms, peak = fit(folder, out, 1, **options)
    for chunks in (3, 8):
        chunked_losses, chunked_norms, chunked_peak = fit(folder, out, chunks, **options)
        assert chunked_losses == pytest.approx(losses, rel=1e-6)
        assert chunked_norms == pytest.approx(norms, rel=1e-5)
        assert chunked_peak < peak


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "options", "num_ranks"),
    [
        pytest.param(EVEN, {}, 2, id="2 ranks"),
        pytest.param(TIED, {}, 2, id="tied", marks=pytest.mark.slow),
        pytest.param(UNEVEN, {}, 1, id="uneven"),
        pytest.param(EVEN, {"lora": LoRA(r=2, target_modules=["q_proj", "lm_head"])}, 2, id="lora on the head"),
    ],
)
def test_losses_and_gradients_are_those_of_all_logits_at_once_with_less_memory(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any], num_ranks: int
) -> None:
    folder = save_model(tmp_path / "model", **{**config, "vocab_size": VOCAB_SIZE})
    run_ranks(compare, folder, tmp_path, options, world_size=num_ranks)


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "gpt2", "qwen3", "llama4_text"])
def test_what_a_family_does_with_its_logits_is_done_to_chunks(family: str) -> None:
    torch.manual_seed(0)
    known = AutoConfig.for_model(family)
    sizes = {name: value for name, value in SMALL.items() if hasattr(known, name)}
    if family == "cohere":
        sizes |= {"logit_scale": 0.7, "pad_token_id": 0}
    if family == "granite":
        sizes |= {"logits_scaling": 3.0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, use_cache=False)).eval()
    ids = torch.randint(60, (2, 16))
    labels = ids.masked_fill(torch.rand(2, 16) < 0.3, -100)
    whole = model.loss_function(
        logits=model(input_ids=ids).logits, labels=labels, vocab_size=model.config.vocab_size, num_items_in_batch=1
    )
    install_chunked_loss(model, 5)
    chunked = sum_chunked_losses(model, {"input_ids": ids}, labels)
    assert float(chunked) == pytest.approx(float(whole), rel=1e-5)


# With weights as they are drawn, a cap of 30 changes nothing.
@pytest.mark.full
@pytest.mark.parametrize("change", [lambda logits: 2 * logits, lambda logits: 30 * torch.tanh(logits / 30)])
def test_a_model_that_changes_its_logits_otherwise_is_refused_when_fit_starts(
    change: Callable[[Tensor], Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    forward = CausalLM.forward
    monkeypatch.setattr(CausalLM, "forward", lambda self, **inputs: change(forward(self, **inputs)))

    def body() -> None:
        trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=1)
        with pytest.raises(ValueError, match="loss_chunks: LlamaForCausalLM computes its loss otherwise"):
            trainer.fit(build_task(folder, loss_chunks=4), Rows(EVEN["vocab_size"], GLOBAL_BATCH))

    run_ranks(body, world_size=1)


class Mine(CausalLM):
    """Has a loss of its own."""

    def sum_losses(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        return output.logits.sum(), (labels != -100).sum()


def test_settings_that_cannot_work_are_refused() -> None:
    config = {"model_type": "llama"}
    with pytest.raises(ValueError, match="loss_chunks: got 0: expected 1 or more"):
        CausalLM(config=config, loss_chunks=0)
    with pytest.raises(ValueError, match=r"Mine\.sum_losses takes the logits of all tokens"):
        Mine(config=config, loss_chunks=2)
    settings = SimpleNamespace(output_router_logits=True, get_text_config=lambda: settings)
    model: Any = SimpleNamespace(config=settings, get_output_embeddings=lambda: None)
    with pytest.raises(ValueError, match="the loss of routers needs the whole model's output"):
        install_chunked_loss(model, 2)


def test_more_chunks_than_tokens_are_as_many_as_tokens() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    ids = torch.randint(60, (1, LENGTH))
    whole = torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum")
    install_chunked_loss(model, 10 * LENGTH)
    chunked = sum_chunked_losses(model, {"input_ids": ids}, ids)
    assert float(chunked.detach()) == pytest.approx(float(whole.detach()), rel=1e-5)
