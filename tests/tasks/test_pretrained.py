"""Configurations of models: what a model reads is taken, what none could be made of is refused with its setting."""

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from adapter_training import SIZES
from lightning.pytorch.strategies import SingleDeviceStrategy
from training import Rows, build_task, build_trainer, save_model
from transformers import AutoConfig, AutoModelForSequenceClassification

from lit_fsdp import FSDP2Strategy
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.reader import open_checkpoint
from lit_fsdp.cli.messages import describe_exception
from lit_fsdp.tasks import CausalLM
from lit_fsdp.tasks.model_config import explain_build_errors, load_config, make_config
from lit_fsdp.tasks.pretrained import load_stored_tokenizer
from lit_fsdp.tasks.text_model import build_model, count_positions
from lit_fsdp.tasks.text_task import TextTask
from lit_fsdp.weights.base_weights import BASE, fetch_pretrained
from lit_fsdp.weights.safetensors_io import sample_fingerprint
from ranks import run_ranks

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = {"model_type": "llama", **TINY}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "qwen3_moe", "num_experts": 4},
        {"model_type": "glm4_moe", "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
        {"model_type": "dots1", "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    ],
    ids=lambda settings: settings["model_type"],
)
def test_a_setting_that_only_the_model_reads_is_taken_and_shapes_it(settings: dict[str, Any]) -> None:
    model = build_model(make_config({**TINY, **EXPERTS, **settings}), "sdpa")
    shapes = {name.split(".")[-2]: tuple(p.shape) for name, p in model.named_parameters() if "self_attn" in name}
    assert (shapes["q_proj"], shapes["k_proj"]) == ((4 * 16, 32), (2 * 16, 32))


def test_gemma_4_takes_a_head_dim_that_only_some_of_its_layers_have() -> None:
    settings = {
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "head_dim": 8,
        "global_head_dim": 16,
    }
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    model = build_model(make_config({**TINY, **settings, **layers, "model_type": "gemma4_text"}), "sdpa")
    assert [layer.self_attn.q_proj.weight.shape[0] for layer in model.model.layers] == [4 * 8, 4 * 16]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "it holds adapters and no model: set pretrained to the model below them, and lora"),
        ("model.safetensors", "it has no config.json: expected a model's folder, such as `python -m lit_fsdp export`"),
    ],
)
def test_a_folder_without_a_model_is_told_from_one(file: str, message: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ValueError, match=f"pretrained: got '{tmp_path}': {re.escape(message)}"):
        load_config(str(tmp_path))


REFUSED = [
    ({"hidden_size": 0}, "config.hidden_size: got 0: expected 1 or more"),
    ({"hidden_size": "x"}, "config.hidden_size: got 'x': Field 'hidden_size' expected int"),
    ({"hidden_size": 30}, "config.hidden_size: got 30: The hidden size (30) is not a multiple"),
    ({"num_attention_heads": 0}, "config.num_attention_heads: got 0: expected 1 or more"),
    ({"num_key_value_heads": 3}, "config.num_key_value_heads: got 3: the 4 heads of num_attention_heads share them"),
    ({"num_hidden_layers": -1}, "config.num_hidden_layers: got -1: expected 1 or more"),
    ({"attention_dropout": 2.0}, "config.attention_dropout: got 2.0: expected 0 to below 1"),
    ({"initializer_range": -1.0}, "config.initializer_range: got -1.0: Value must be greater or equal to 0.0"),
    ({"dtype": "foo"}, "config.dtype: got 'foo': AttributeError"),
    ({"hiden_size": 8}, "config: hiden_size: no settings of LlamaConfig: did you mean hidden_size?"),
    ({"to_dict": 3}, "config: to_dict: no settings of LlamaConfig"),
    ({"_attn_implementation": "eager"}, "config: _attn_implementation: no settings of LlamaConfig"),
    ({3: 4}, "config: 3: no settings of LlamaConfig"),
    ({"model_type": "llamaa"}, "config.model_type: got 'llamaa': Transformers has no such model"),
    ({"model_type": "qwen3_moe", "num_experts": 4}, "config.num_experts_per_tok: got 8: there are 4 experts"),
]


@pytest.mark.parametrize(("change", "line"), REFUSED, ids=[str(change) for change, _ in REFUSED])
def test_a_config_that_no_model_can_be_made_of_is_refused_when_the_task_is_made(
    change: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        CausalLM(config={**LLAMA, **change})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"hidden_act": "foo"}, "config.hidden_act: got 'foo': KeyError: 'foo'"),
        ({"pad_token_id": 99}, "no model can be built: AssertionError: Padding_idx must be within"),
    ],
)
def test_what_only_the_model_refuses_names_the_setting_too(change: dict[str, Any], line: str) -> None:
    settings = {**LLAMA, **change}
    with pytest.raises(ValueError, match=re.escape(line)), explain_build_errors(settings):
        build_model(make_config(settings), "sdpa")


def test_heads_of_keys_that_are_so_many_by_default_are_refused_where_a_layer_makes_them() -> None:
    settings = {name: value for name, value in TINY.items() if name != "num_key_value_heads"}
    with pytest.raises(ValueError, match=r"config.num_key_value_heads: got 32: the 4 heads .* a divisor, such as 4"):
        build_model(make_config({**settings, "model_type": "qwen3"}), "auto")
    latent = {"model_type": "deepseek_v3", "kv_lora_rank": 8, "q_lora_rank": 8}  # 128 by default, of no use
    build_model(make_config({**settings, **latent}), "auto")


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "deberta-v2", "type_vocab_size": 0},
        {"model_type": "granitemoeshared", "shared_intermediate_size": 0},
        {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 0},
    ],
    ids=lambda settings: settings["model_type"],
)
def test_a_size_of_0_is_taken_where_it_means_that_a_part_is_left_out(settings: dict[str, Any]) -> None:
    config = make_config(settings)
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        dist.DistNetworkError("connection reset"),
        MemoryError(),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_what_no_value_has_caused_stays_what_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, explain_build_errors(LLAMA):
        raise error
    assert caught.value is error


def test_an_error_of_our_own_code_is_not_blamed_on_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(LLAMA)
    monkeypatch.setattr("lit_fsdp.tasks.text_model.torch", None)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute"), explain_build_errors(LLAMA):
        build_model(config, "sdpa")


def test_a_package_that_a_model_needs_is_named_with_how_to_install_it() -> None:
    with pytest.raises(ImportError, match=r"^It needs this: pip install this$") as caught, explain_build_errors(LLAMA):
        raise ImportError("\nIt needs this:\npip install this\n")
    assert describe_exception(caught.value) == "It needs this: pip install this"


@pytest.mark.parametrize("is_named_too_long", [False, True])
def test_what_is_no_folder_of_a_model_is_not_looked_for_on_the_hub(tmp_path: Path, is_named_too_long: bool) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    name = "a" * 400 if is_named_too_long else str(path)
    line = f"model: got '{'a' * 40}'...: File name too long" if is_named_too_long else f"model: got '{path}': no folder"
    with pytest.raises(ValueError, match=re.escape(line)):
        fetch_pretrained(name, "model")


def train_while_the_base_is_read(folder: Path, out: Path) -> None:
    """Train adapters over a base that is not read before the run ends, and resume; every rank notes what it reads."""
    may_read = threading.Event()

    def read(_: Path) -> str:
        (out / f"read by {dist.get_rank()}").touch()
        assert may_read.wait(60)
        return "xxh3:all"

    def fit(ckpt_path: Path | None = None, **options: Any) -> pl.Trainer:
        task = build_task(folder, lora=LoRA(r=4))
        trainer = build_trainer(FSDP2Strategy(), max_steps=1, **options)
        trainer.fit(task, Rows(67, 2), ckpt_path=ckpt_path)
        return trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_fsdp.weights.base_weights.compute_fingerprint", read)
        patch.setattr("lit_fsdp.weights.base_weights._PATIENCE_S", 0.01)
        trainer = fit()
        assert [path.name for path in out.iterdir()] == ["read by 0"]  # from the start on, and no save has begun yet
        dist.barrier()
        trainer.save_checkpoint(out / "early.ckpt")
        may_read.set()
        patch.setattr("lit_fsdp.weights.base_weights._PATIENCE_S", 60)
        trainer.save_checkpoint(out / "late.ckpt")
        found = [open_checkpoint(out / name).meta[BASE]["fingerprint"] for name in ("early.ckpt", "late.ckpt")]
        assert found == [sample_fingerprint(folder), "xxh3:all"]
        dist.barrier()
        fit(out / "late.ckpt")
        assert (out / f"read by {dist.get_rank()}").exists()  # none waits for another in a collective
        fit(out / "early.ckpt")


@pytest.mark.full
def test_no_checkpoint_and_no_collective_waits_for_the_base_of_adapters_to_be_read(tmp_path: Path) -> None:
    folder, out = save_model(tmp_path / "base", **SIZES), tmp_path / "out"
    out.mkdir()
    run_ranks(train_while_the_base_is_read, folder, out)


@pytest.mark.parametrize("make_strategy", [FSDP2Strategy, SingleDeviceStrategy])
def test_a_second_run_of_a_task_whose_weights_could_not_be_read_reads_them(
    make_strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "base", **SIZES)

    def fit(task: CausalLM) -> torch.Tensor:
        options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False}
        options |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        pl.Trainer(strategy=make_strategy(), **options).fit(task, Rows(SIZES["vocab_size"], 8))
        assert task.step_loss is not None
        return task.step_loss

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("the disk is gone")

    task = build_task(folder)
    with monkeypatch.context() as patch, pytest.raises(ConnectionError, match="the disk is gone"):
        patch.setattr("lit_fsdp.tasks.pretrained.load_weights", fail)
        fit(task)
    losses = fit(task), fit(build_task(folder))
    if dist.is_initialized():
        dist.destroy_process_group()
    assert torch.equal(*losses)


def test_a_model_that_is_refused_is_refused_again_in_a_second_run() -> None:
    task, tried = CausalLM(pretrained="none"), [0]
    task.model = torch.nn.Module()  # type: ignore[assignment]
    task.model.config = make_config(LLAMA)
    task.trainer = SimpleNamespace(datamodule=SimpleNamespace(packing=True))  # type: ignore[assignment]
    task._strategy = SimpleNamespace(sequence_group=object())

    def refuse(*_: Any) -> None:
        tried[0] += 1
        raise ValueError("documents see each other")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_fsdp.tasks.text_task.call_in_forward", refuse)
        patch.setattr("lit_fsdp.tasks.causal_lm.task.check_split", refuse)
        for check in (TextTask.on_fit_start, CausalLM._check_split) * 2:
            with pytest.raises(ValueError, match="documents see each other"):
                check(task)
    assert tried == [4]


@pytest.mark.parametrize("method", ["mxfp4", "fp8", "gptq"])
def test_weights_in_a_format_that_no_layer_holds_are_refused_by_their_name(tmp_path: Path, method: str) -> None:
    settings = {"model_type": "llama", "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=f"its weights are stored as {method}: only those of bitsandbytes"):
        CausalLM(pretrained=str(tmp_path), lora=LoRA(r=4)).read_config()
    settings["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert not hasattr(CausalLM(pretrained=str(tmp_path), lora=LoRA(r=4)).read_config(), "quantization_config")


@pytest.mark.parametrize(
    ("model_type", "options", "expected"),
    [
        ("bert", {}, 32),
        ("roberta", {"pad_token_id": 1}, 30),
        ("roberta", {"pad_token_id": 3}, 28),
        ("esm", {"pad_token_id": 1, "position_embedding_type": "absolute"}, 30),
        ("esm", {"pad_token_id": 1, "position_embedding_type": "rotary"}, 32),  # has the table too, and leaves it alone
        ("canine", {"pad_token_id": 0}, 32),  # has no embeddings of words
        ("xlnet", {"d_head": 16}, None),  # says -1, as its positions are relative
    ],
)
def test_rows_are_as_long_as_positions_go_from_the_first_token(
    model_type: str, options: dict[str, Any], expected: int | None
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {} if expected is None else {"max_position_embeddings": 32}
    config = AutoConfig.for_model(model_type, **sizes, vocab_size=40, **options)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    assert count_positions(model) == expected


def test_a_folder_without_a_tokenizer_is_refused_in_a_whole_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(
        ValueError, match=r"can be loaded: it has no tokenizer\.json, nor files that one is made of; name"
    ):
        load_stored_tokenizer(str(tmp_path))
