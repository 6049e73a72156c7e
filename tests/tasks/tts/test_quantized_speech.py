"""Adapters over 4-bit weights of speech models: as stock libraries train them, kept, resumed, spoken and exported."""

import json
import warnings
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from adapter_training import TOLERANCE, Start, compare
from bitsandbytes.nn import Linear4bit, Params4bit  # type: ignore[attr-defined]
from differences import find_largest
from peft import inject_adapter_in_model
from safetensors.torch import load_file, save_file
from speech_families import CSM, DEPTH, DIA, build_model
from speech_families import make_rows as make_plain_rows
from speech_training import GLOBAL_BATCH, NUM_STEPS, build_trainer, make_config, train_model
from speech_training import make_rows as make_rows_with_voices
from torch import Tensor, nn
from training import OPTIMIZER, Recorder, Result, gather_weights

from lit_fsdp import ActivationCheckpointing, CPUOffload, FSDP2Strategy
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.reader import open_checkpoint
from lit_fsdp.quantization.layers import iterate_quantized
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks import LRSchedule, Sampling, SpeechData, TextToSpeech
from lit_fsdp.tasks.tts.checkpoint import read_checkpoint
from lit_fsdp.tasks.tts.families.model_types import parse_family
from lit_fsdp.tasks.tts.preparation.prepared import write_shard
from lit_fsdp.tasks.tts.tokenizer import build_byte_tokenizer
from lit_fsdp.tasks.tts.utterance import Utterance
from lit_fsdp.tasks.tts.voice_export import export_voice
from lit_fsdp.weights.base_weights import BASE
from ranks import run_ranks

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # rows of 64 weights make blocks
QWEN3 = make_config()
QWEN3["talker_config"] |= WIDE
QWEN3["talker_config"]["code_predictor_config"] |= WIDE
QWEN3["speaker_encoder_config"]["enc_dim"] = 64
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "csm": CSM | WIDE | {"depth_decoder_config": DEPTH | WIDE | {"backbone_hidden_size": 64}},
    "dia": DIA
    | {
        "encoder_config": DIA["encoder_config"] | WIDE,
        "decoder_config": DIA["decoder_config"] | WIDE | {"cross_hidden_size": 64, "cross_head_dim": 16},
    },
}
LORA, NF4 = LoRA(r=4, alpha=8), Quantization(double_quant=False)
VOICES: dict[str, dict[str, int]] = {"csm": {"kim": 0, "lee": 1}, "dia": {}}  # as runs number them


def make_rows(name: str) -> list[Any]:
    if name == "qwen3":
        return [replace(row, speaker_embedding=row.speaker_embedding.repeat(2)) for row in make_rows_with_voices()]
    return make_plain_rows(6 if name == "csm" else 4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like those on the Hub, and clips, for each family."""
    root = tmp_path_factory.mktemp("speech")
    for name, raw in FAMILIES.items():
        (folder := root / name).mkdir()
        # Cloned, as CSM shares an embedding.
        state = {n: tensor.clone() for n, tensor in build_model(raw, seed=5).state_dict().items()}
        save_file(state, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(raw))
        build_byte_tokenizer().save_pretrained(folder)
        (clips := root / f"{name}_clips").mkdir()
        write_shard(clips / "shard-00000.parquet", make_rows(name))
    return root


def build_task(root: Path, name: str, **options: Any) -> TextToSpeech:
    own: dict[str, Any] = {"lora": LORA, "quantization": NF4, **options}
    return TextToSpeech(
        pretrained=str(root / name), optimizer=OPTIMIZER, lr_scheduler=LRSchedule(type="constant"), **own
    )


def build_data(root: Path, name: str, batch_size: int) -> SpeechData:
    own = {"qwen3": {"speaker_embedding": "row"}, "csm": {}, "dia": {"text_dropout": 0.0}}[name]
    options: dict[str, Any] = {"tokenizer": "bytes", "shuffle": False, "num_workers": 0, **own}
    return SpeechData(train=str(root / f"{name}_clips"), batch_size=batch_size, **options)


def fit(root: Path, name: str, out: Path, options: dict[str, Any]) -> None:
    pl.seed_everything(0, verbose=False)
    warnings.filterwarnings("error", message="quantization: not quantized")  # heads are left on purpose
    accumulate, ckpt_path = options.get("accumulate_grad_batches", 1), options.get("ckpt_path")
    recorder, start = Recorder(), Start()
    strategy = FSDP2Strategy(print_plan=False, **options.get("strategy", {}))
    trainer = build_trainer(
        callbacks=[start] if ckpt_path else [recorder, start],
        accumulate_grad_batches=accumulate,
        strategy=strategy,
        max_steps=options.get("max_steps", NUM_STEPS),
    )
    task = build_task(root, name, **options.get("task", {}))
    data = build_data(root, name, GLOBAL_BATCH // dist.get_world_size() // accumulate)
    trainer.fit(task, data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(out.with_suffix(".ckpt"))
    weights = gather_weights(task)
    if trainer.is_global_zero:
        recorder.result.weights = dict(weights)
        torch.save({"result": vars(recorder.result), "start": start.weights}, out)


def train_sharded(root: Path, name: str, out: Path, world_size: int, **options: Any) -> tuple[Result, dict[str, Any]]:
    run_ranks(fit, root, name, out, options, world_size=world_size)
    found = torch.load(out)
    return Result(**found["result"]), found["start"]


def quantize_by_stock(model: nn.Module, quantized: set[str]) -> None:
    """Put bitsandbytes' own layers into a model."""
    for name in quantized:
        old = model.get_submodule(name)
        assert isinstance(old, nn.Linear)
        new = Linear4bit(
            old.in_features,
            old.out_features,
            bias=old.bias is not None,
            compute_dtype=torch.float32,
            compress_statistics=False,
            quant_type="nf4",
        )
        new.weight = Params4bit(old.weight.data, requires_grad=False, compress_statistics=False, quant_type="nf4")
        new.bias = old.bias
        model.set_submodule(name, new.to("cpu"))


def train_plainly(root: Path, name: str, start: dict[str, Tensor], quantized: set[str]) -> Result:
    """Train on one device by bitsandbytes and peft, with one forward for the whole step."""
    raw = FAMILIES[name]
    family, config = parse_family(raw)
    model = build_model(raw)
    model.load_state_dict(load_file(root / name / "model.safetensors"))
    quantize_by_stock(model, quantized)
    lora = LoRA(r=4, alpha=8, target_modules=family.linears).build_config()
    inject_adapter_in_model(lora, model, "default")
    trained = {n: p for n, p in model.named_parameters() if "lora_" in n}
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is p for p in trained.values()))
    with torch.no_grad():
        for n, parameter in trained.items():
            parameter.copy_(start[n])
    tokenizer, rows = build_byte_tokenizer(), make_rows(name)
    voices: Any = [row.speaker_embedding if name == "qwen3" else VOICES[name].get(row.speaker) for row in rows]
    clips = [
        Utterance(text_ids=family.encode_text(tokenizer, row.text, config, voice), codes=row.codes, speaker=voice)
        for row, voice in zip(rows, voices, strict=True)
    ]
    steps = [clips[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH] for step in range(NUM_STEPS)]
    result = train_model(model, [family.collate(step, config) for step in steps], family.get_loss_weights(config))
    result.weights = {n: result.weights[n] for n in trained}
    return result


def find_quantized(name: str) -> set[str]:
    """All linear layers of blocks, and no others, as the names have it."""
    with torch.device("meta"):
        family, config = parse_family(FAMILIES[name])
        model = family.build_model(config)
    found = {n for n, m in model.named_modules() if type(m) is nn.Linear and ".layers." in n}
    assert len(found) >= 7 * 4
    return found


RUNS: dict[str, dict[str, Any]] = {
    "2 ranks": {"world_size": 2},
    "3 ranks": {"world_size": 3, "strategy": {"activation_checkpointing": ActivationCheckpointing(mode="full")}},
    "offloaded": {"world_size": 2, "strategy": {"cpu_offload": CPUOffload()}, "accumulate_grad_batches": 3},
}
SLOW_RUNS = [
    (name, run) for name in FAMILIES for run in RUNS if (name, run) != ("qwen3", "2 ranks") and run != "2 ranks"
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "run"),
    [*((name, "2 ranks") for name in FAMILIES), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_RUNS)],
)
def test_sharded_adapters_train_as_stock_libraries_do_on_one_device(
    root: Path, tmp_path: Path, name: str, run: str
) -> None:
    result, start = train_sharded(root, name, tmp_path / "out", **RUNS[run])
    truth = train_plainly(root, name, start, find_quantized(name))
    assert result.losses[-1] != result.losses[0]
    differences = compare(result, truth)
    assert max(differences.values()) <= TOLERANCE, differences
    kept = {
        n.removesuffix(".base_layer.weight").removesuffix(".weight") for n, w in start.items() if w.dtype == torch.uint8
    }
    assert {n for n in kept if not n.endswith(("_absmax", "_nested"))} == find_quantized(name)


@pytest.mark.full
def test_a_run_goes_on_over_the_same_base_and_is_exported_over_the_model_in_full(root: Path, tmp_path: Path) -> None:
    whole, _ = train_sharded(root, "qwen3", tmp_path / "whole", 2)
    train_sharded(root, "qwen3", tmp_path / "part", 2, max_steps=1)
    rest, _ = train_sharded(root, "qwen3", tmp_path / "rest", 1, ckpt_path=str(tmp_path / "part.ckpt"))
    trained = {n for n in whole.weights if "lora_" in n}
    assert find_largest(float((rest.weights[n] - whole.weights[n]).abs().max()) for n in trained) <= TOLERANCE
    weights, before = read_checkpoint(tmp_path / "whole.ckpt").weights, load_file(root / "qwen3" / "model.safetensors")
    assert weights.keys() == before.keys()
    train_sharded(root, "qwen3", tmp_path / "kept", 2, strategy={"save_frozen": True})
    kept = read_checkpoint(tmp_path / "kept.ckpt").weights  # which has the base as it was quantized, too
    assert all(torch.equal(kept[name], weights[name]) for name in weights)
    name = "talker.model.layers.1.mlp.down_proj"
    a, b = (whole.weights[f"{name}.lora_{part}.default.weight"] for part in "AB")
    torch.testing.assert_close(weights[f"{name}.weight"], before[f"{name}.weight"] + 2 * b @ a)
    kept = "talker.code_predictor.model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights[kept], before[kept])
    export_voice(tmp_path / "whole.ckpt", tmp_path / "voice", first_row=1070)
    assert (tmp_path / "voice" / "model.safetensors").is_file()


def go_on_in_full(root: Path, ckpt_path: str) -> None:
    task = build_task(root, "csm", quantization=None)
    with pytest.warns(UserWarning, match="quantization: the adapters of the checkpoint were trained with .*nf4"):
        build_trainer(max_steps=2).fit(task, build_data(root, "csm", GLOBAL_BATCH), ckpt_path=ckpt_path)


@pytest.mark.full
def test_another_rounding_of_the_base_is_warned_of(root: Path, tmp_path: Path) -> None:
    run_ranks(fit, root, "csm", tmp_path / "first", {"max_steps": 1}, world_size=1)
    run_ranks(go_on_in_full, root, str(tmp_path / "first.ckpt"), world_size=1)


def speak(root: Path) -> None:
    task = build_task(root, "dia", num_samples=1, sampling=Sampling(do_sample=False, max_frames=3))
    build_trainer(max_steps=1).fit(task, build_data(root, "dia", GLOBAL_BATCH // 2))
    assert len(task.report.rows) == 1
    assert len(task.report.rows[0].speech.codes) <= 3


@pytest.mark.full
def test_a_quantized_model_speaks(root: Path) -> None:
    run_ranks(speak, root, world_size=2)


def test_what_is_named_is_left_as_well(root: Path) -> None:
    task = build_task(root, "qwen3", quantization=Quantization(skip_modules=["q_proj", "code_predictor"]))
    trainer = build_trainer(max_steps=1)
    trainer.fit(task, build_data(root, "qwen3", 3))
    left = {n.removeprefix("model.").replace(".base_layer", "") for n, _ in iterate_quantized(task)}
    assert left == {n for n in find_quantized("qwen3") if "q_proj" not in n and "code_predictor" not in n}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": None}, r"quantization: quantized weights cannot be trained; set lora, such as \{r: 16\}"),
        (
            {"lora": LoRA(init_lora_weights="pissa")},
            r"lora.init_lora_weights: got 'pissa' with quantization: .* set default or gaussian",
        ),
        ({"quantization": Quantization(block_size=48)}, "quantization.block_size: got 48: expected one of"),
        ({"quantization": Quantization(skip_modules=["conv9"])}, r"quantization.skip_modules: got 'conv9': no layer"),
    ],
)
def test_what_could_not_train_or_be_exported_is_refused(root: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_trainer(max_steps=1).fit(build_task(root, "qwen3", **options), build_data(root, "qwen3", 3))


def test_a_model_that_is_stored_quantized_is_refused(root: Path, tmp_path: Path) -> None:
    name = "backbone_model.layers.0.self_attn.q_proj"
    state = load_file(root / "csm" / "model.safetensors")
    layer = Linear4bit(64, 64, bias=False, quant_type="nf4")
    layer.weight = Params4bit(state.pop(f"{name}.weight"), requires_grad=False, quant_type="nf4")
    layer.to("cpu")
    (folder := tmp_path / "csm").mkdir()
    stored = {f"{name}.{key}": value.contiguous() for key, value in layer.state_dict().items()}
    save_file({**state, **stored}, folder / "model.safetensors")
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (folder / "config.json").write_text(json.dumps({**deepcopy(FAMILIES["csm"]), "quantization_config": settings}))
    build_byte_tokenizer().save_pretrained(folder)
    with pytest.raises(ValueError, match="its weights are stored quantized"):
        build_task(tmp_path, "csm").prepare_plan(build_data(root, "csm", 3))
    with pytest.raises(
        ValueError, match=r"its weights are stored quantized, which is not read for speech: set pretrained"
    ):
        build_trainer(max_steps=1).fit(build_task(tmp_path, "csm"), build_data(root, "csm", 3))


def train_from_scratch(root: Path, out: Path) -> None:
    options = {"config": FAMILIES["csm"], "lora": LORA, "quantization": NF4, "optimizer": OPTIMIZER}
    trainer = build_trainer(max_steps=1)
    trainer.fit(TextToSpeech(**options), build_data(root, "csm", 3))
    trainer.save_checkpoint(out)


@pytest.mark.full
def test_quantized_weights_of_no_model_are_not_exported(root: Path, tmp_path: Path) -> None:
    run_ranks(train_from_scratch, root, tmp_path / "run.ckpt", world_size=1)
    with pytest.raises(ValueError, match="holds quantized weights that are of no model: start from pretrained"):
        read_checkpoint(tmp_path / "run.ckpt")


@pytest.mark.full
def test_the_checkpoint_says_how_its_base_was_rounded(root: Path, tmp_path: Path) -> None:
    run_ranks(fit, root, "dia", tmp_path / "run", {"max_steps": 1}, world_size=2)
    stored = open_checkpoint(tmp_path / "run.ckpt")
    assert stored.meta[BASE]["quantization"]["type"] == "nf4"
    assert all("lora_" in name for name in stored.tensors)
