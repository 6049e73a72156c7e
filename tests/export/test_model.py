"""Models out: what is exported is what was trained, for Transformers and for other tools."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from export_runs import check_memory, refuse, train
from models import LANGUAGE_MODELS, build_language_model, make_tokens
from safetensors import safe_open
from torch import Tensor
from training import EVEN, Rows, build_trainer, save_model
from transformers import AutoModelForCausalLM

from lit_fsdp import FSDP2Strategy
from lit_fsdp.checkpoint import manifest
from lit_fsdp.checkpoint.manifest import MANIFEST, describe_files, write_manifest
from lit_fsdp.checkpoint.reader import EXPORT
from lit_fsdp.checkpoint.sharded import META, join_states, save_checkpoint
from lit_fsdp.checkpoint.single_file import save_single_file
from lit_fsdp.checkpoint.untrusted import load_plain
from lit_fsdp.export.model import export_model
from lit_fsdp.tasks import CausalLM
from ranks import run_ranks

MODELS = {
    "llama": {"model_type": "llama", **LANGUAGE_MODELS["llama"]},
    "tied": {"model_type": "llama", **LANGUAGE_MODELS["llama"], "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", **LANGUAGE_MODELS["gpt2"]},
    "mixtral": {"model_type": "mixtral", **LANGUAGE_MODELS["mixtral"]},
}


def run_model(folder: Path, **options: Any) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        return model(input_ids=make_tokens(), use_cache=False).logits


def read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


ALSO = [pytest.param(name, marks=pytest.mark.full) for name in MODELS if name != "mixtral"]


@pytest.fixture(scope="module", params=["mixtral", *ALSO])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint of two ranks, and its logits."""
    folder = tmp_path_factory.mktemp(request.param)
    run_ranks(train, folder, {"config": MODELS[request.param]})
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a llama whose values are all different, beside ``truth``, the model itself."""
    path = tmp_path_factory.mktemp("llama") / "last.ckpt"
    model = build_language_model("llama", "cpu")
    save_random(path, model)
    model.save_pretrained(path.with_name("truth"))
    return path


def save_random(path: Path, model: Any, **meta: Any) -> None:
    model.config.architectures = [type(model).__name__]
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    files = {"config.json": model.config.to_json_string()}
    save_checkpoint(path, join_states(state, []), meta={EXPORT: files, **meta})


def test_transformers_loads_it_with_the_logits_of_the_training_model(trained: Path, tmp_path: Path) -> None:
    export_model(trained / "last.ckpt", tmp_path / "out")
    logits = torch.load(trained / "logits.pt")
    assert (run_model(tmp_path / "out") - logits).abs().max() == 0.0


def test_the_files_hold_what_save_pretrained_writes(trained: Path, tmp_path: Path) -> None:
    exported = export_model(trained / "last.ckpt", tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    model.save_pretrained(tmp_path / "truth")
    ours, truth = read_tensors(tmp_path / "out"), read_tensors(tmp_path / "truth")
    assert ours.keys() == truth.keys()
    assert all(torch.equal(ours[name], truth[name]) for name in truth)
    assert exported.num_parameters == model.num_parameters()
    ours, truth = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "truth"))
    assert ours == truth


@pytest.mark.full
def test_parameters_that_a_model_never_trains_leave_with_it(tmp_path: Path) -> None:
    config = {"vocab_size": 67, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
    folder = save_model(tmp_path / "model", model_type="ernie4_5_moe", **{**EVEN, **config})
    run_ranks(train, tmp_path, {"pretrained": str(folder)})
    export_model(tmp_path / "last.ckpt", tmp_path / "out")
    ours, base = read_tensors(tmp_path / "out"), read_tensors(folder)
    assert ours.keys() == base.keys()
    assert any("e_score_correction_bias" in name and ours[name].equal(base[name]) for name in ours)
    assert (run_model(tmp_path / "out") - torch.load(tmp_path / "logits.pt")).abs().max() == 0.0
    run_ranks(resume_without_frozen, folder, tmp_path)


def resume_without_frozen(base: Path, folder: Path) -> None:
    """Go on from a checkpoint that leaves out what is frozen, as older ones of such models do."""
    trainer = build_trainer(FSDP2Strategy(print_plan=False, save_frozen=False), max_steps=1)
    trainer.fit(CausalLM(pretrained=str(base)), Rows(67, 2))
    trainer.save_checkpoint(folder / "part.ckpt")
    assert load_plain(folder / "part.ckpt" / "meta.pt", folder)["leaves_out_frozen"] is True
    trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=2)
    trainer.fit(CausalLM(pretrained=str(base)), Rows(67, 2), ckpt_path=folder / "part.ckpt")
    assert trainer.global_step == 2


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dtype_is_a_cast_of_every_weight(trained: Path, tmp_path: Path, dtype: str) -> None:
    exported = export_model(trained / "last.ckpt", tmp_path / "cast", dtype=dtype)
    export_model(trained / "last.ckpt", tmp_path / "kept")
    cast, kept = read_tensors(tmp_path / "cast"), read_tensors(tmp_path / "kept")
    assert cast.keys() == kept.keys()
    assert all(torch.equal(cast[name], kept[name].to(getattr(torch, dtype))) for name in kept)
    assert exported.dtype == json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == dtype
    logits = run_model(tmp_path / "cast")
    assert logits.dtype == getattr(torch, dtype)
    assert torch.equal(logits, run_model(tmp_path / "kept", dtype=getattr(torch, dtype)))


def test_weights_are_split_over_files_below_the_size_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    exported = export_model(checkpoint, tmp_path / "out", max_shard_gb=20e-6)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(9)]
    assert {path.name for path in files} < set(exported.files)
    assert all(path.stat().st_size < 20_000 + 4_000 for path in files)  # with its header
    ours, truth = read_tensors(tmp_path / "out"), read_tensors(checkpoint.with_name("truth"))
    assert ours.keys() == truth.keys()
    assert all(torch.equal(ours[name], truth[name]) for name in truth)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "truth", max_shard_size=20_000)
    ours, truth = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text()) for name in ("out", "truth")
    )
    assert ours["metadata"] == truth["metadata"]
    assert ours["weight_map"].keys() == truth["weight_map"].keys()


def test_tensors_of_several_dtypes_keep_theirs(tmp_path: Path) -> None:
    model = build_language_model("llama", "cpu", vocab_size=65)
    for layer in model.model.layers:
        layer.mlp.to(torch.bfloat16)
        layer.input_layernorm.to(torch.float64)
    save_random(tmp_path / "last.ckpt", model)
    exported = export_model(tmp_path / "last.ckpt", tmp_path / "out")
    tensors = read_tensors(tmp_path / "out")
    assert {t.dtype for t in tensors.values()} == {torch.float32, torch.bfloat16, torch.float64}
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items())
    assert exported.dtype == "float64"  # loaded in which, nothing is lost


@pytest.mark.full
def test_a_pretrained_model_keeps_its_generation_config(tmp_path: Path) -> None:
    start = save_model(
        tmp_path / "start", **{k: v for k, v in LANGUAGE_MODELS["llama"].items() if k != "num_hidden_layers"}
    )
    (start / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": true}')
    run_ranks(train, tmp_path, {"pretrained": str(start)})
    export_model(tmp_path / "last.ckpt", tmp_path / "out")
    assert (tmp_path / "out" / "generation_config.json").read_text() == (start / "generation_config.json").read_text()
    assert (run_model(tmp_path / "out") - torch.load(tmp_path / "logits.pt")).abs().max() == 0.0


# What is refused


def test_what_is_no_complete_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "does not exist" in refuse(tmp_path / "nothing", out)
    (tmp_path / "file.ckpt").touch()
    assert "is a file" in refuse(tmp_path / "file.ckpt", out)
    (tmp_path / "empty").mkdir()
    assert "no run that wrote one" in refuse(tmp_path / "empty", out)
    single = tmp_path / "run" / "checkpoints" / "last.ckpt"
    single.parent.mkdir(parents=True)
    save_single_file(single, {"state_dict": {}})
    assert refuse(tmp_path / "run", out) == (
        f"checkpoint: the newest checkpoint of {tmp_path / 'run'} is a single file, {single}; resume the run with "
        "trainer.strategy.checkpoint_format: sharded, and take what it saves then"
    )
    for name, message in ((MANIFEST, "is no complete checkpoint"), ("__0_0.distcp", "is missing")):
        broken = copy_checkpoint(checkpoint, tmp_path / f"without_{name}")
        (broken / name).unlink()
        assert message in refuse(broken, out)


def copy_checkpoint(checkpoint: Path, copy: Path) -> Path:
    copy.mkdir()
    for path in checkpoint.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


@pytest.mark.parametrize("name", ["__0_0.distcp", META])
def test_damage_inside_of_a_file_is_found(
    checkpoint: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "VERIFIED_BYTES", 0)  # as with files that are not small
    broken = copy_checkpoint(checkpoint, tmp_path / "broken")
    content = bytearray((broken / name).read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(byte ^ 0xFF for byte in content[middle : middle + 64])
    (broken / name).write_bytes(content)
    assert str(broken) in refuse(broken, tmp_path / "out")


def test_a_checkpoint_of_another_task_or_model_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    state = {"model.model.embed_tokens.weight": torch.ones(67, 32)}
    files = torch.load(checkpoint / META, weights_only=True)[EXPORT]
    save_checkpoint(tmp_path / "own", join_states(state, []), meta={})
    assert "its task is not one of ours" in refuse(tmp_path / "own", out)
    save_checkpoint(tmp_path / "part", join_states(state, []), meta={EXPORT: files})
    assert "lacks model.layers.0.self_attn.q_proj.weight" in refuse(tmp_path / "part", out)
    save_checkpoint(tmp_path / "head", join_states({**state, "head.weight": torch.ones(2)}, []), meta={EXPORT: files})
    assert "holds head.weight, which is no part of its Transformers model" in refuse(tmp_path / "head", out)
    model = build_language_model("llama", "cpu")
    model.extra = torch.nn.Linear(2, 2)
    save_random(tmp_path / "more", model)
    assert "holds extra.weight, extra.bias: it is no LlamaForCausalLM" in refuse(tmp_path / "more", out)
    wide = build_language_model("llama", "cpu", vocab_size=70)
    wide.config.vocab_size = 67
    save_random(tmp_path / "wide", wide)
    message = "model.embed_tokens.weight has shape (70, 32), that of LlamaForCausalLM (67, 32)"
    assert message in refuse(tmp_path / "wide", out)
    config = files["config.json"].replace("LlamaForCausalLM", "LlamaForPoetry")
    for content in (config, config.encode()):
        save_checkpoint(tmp_path / "unknown", join_states(state, []), meta={EXPORT: {"config.json": content}})
        assert "holds a LlamaForPoetry" in refuse(tmp_path / "unknown", out)


def test_wrong_settings_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    assert "dtype: got 'int8'" in refuse(checkpoint, tmp_path / "out", dtype="int8")
    assert "max_shard_gb: got 0" in refuse(checkpoint, tmp_path / "out", max_shard_gb=0)
    assert "holds or lies in the checkpoint" in refuse(checkpoint, checkpoint / "out")
    assert "holds or lies in the checkpoint" in refuse(checkpoint, checkpoint.parent, overwrite=True)


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    model = build_language_model("llama", "cpu")
    model.lm_head.weight.data[3, 5] = 1e5
    save_random(tmp_path / "last.ckpt", model)
    message = refuse(tmp_path / "last.ckpt", tmp_path / "out", dtype="float16")
    assert "lm_head.weight holds values beyond those of float16" in message


@pytest.mark.parametrize("dtype", ["keep", "float16"])
def test_a_model_whose_training_broke_down_is_refused(tmp_path: Path, dtype: str) -> None:
    model = build_language_model("llama", "cpu")
    model.lm_head.weight.data[3, 5] = torch.nan
    save_random(tmp_path / "last.ckpt", model)
    message = refuse(tmp_path / "last.ckpt", tmp_path / "out", dtype=dtype)
    assert "lm_head.weight holds NaN: training broke down before this checkpoint" in message
    assert not (tmp_path / "out").exists()


def test_only_an_exported_model_is_replaced_and_only_if_asked(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "letter.txt").touch()
    assert "is not empty" in refuse(checkpoint, out)
    assert "out is not replaced, as it has no export_manifest.json" in refuse(checkpoint, out, overwrite=True)
    (out / "letter.txt").unlink()
    export_model(checkpoint, out, max_shard_gb=20e-6)
    assert "is not empty" in refuse(checkpoint, out)
    exported = export_model(checkpoint, out, overwrite=True)
    assert exported.files == ["README.md", "config.json", "export_manifest.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == exported.files


def test_the_newest_run_is_taken(tmp_path: Path) -> None:
    for version, step in (("version_0", 1), ("version_1", 2)):
        save_random(
            tmp_path / "x" / version / "checkpoints" / "last.ckpt",
            build_language_model("llama", "cpu"),
            global_step=step,
        )
    export_model(tmp_path / "x", tmp_path / "out")
    assert "from step 2" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("cut", [b"1e-,3,1", b"0.25,-", b"0.25,1,2,\xff", b"\x00\x00\x00"])
def test_metrics_that_a_killed_run_has_cut_are_left_out_of_the_model_card(tmp_path: Path, cut: bytes) -> None:
    run = tmp_path / "x" / "version_0"
    save_random(run / "checkpoints" / "last.ckpt", build_language_model("llama", "cpu"), global_step=9)
    (run / "config.yaml").write_text("seed: 3\n")
    (run / "metrics.csv").write_bytes(b"loss,step\n0.75,0\n0.5,1\n0.1,9\n" + cut)
    export_model(run, tmp_path / "out")
    (row,) = [line for line in (tmp_path / "out" / "README.md").read_text().splitlines() if "| loss |" in line]
    assert row == "| loss | 0.5 | 2 |"


def test_the_model_card_tells_no_credentials_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "x" / "version_0"
    save_random(run / "checkpoints" / "last.ckpt", build_language_model("llama", "cpu"))
    (run / "config.yaml").write_text("data: {url: 'https://anna:hunter2@host/a', api_key: hunter2}\nseed: 3\n")
    export_model(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "hunter2" not in card
    assert "@host/a" in card
    assert "seed: 3" in card


def test_code_that_comes_with_a_model_is_not_even_offered_to_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run it"))
    hostile = copy_checkpoint(checkpoint, tmp_path / "hostile")
    meta = torch.load(hostile / META, weights_only=True)
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "somebody/model--code.Config"}}
    meta[EXPORT]["config.json"] = json.dumps(config)
    torch.save(meta, hostile / META)
    write_manifest(hostile, describe_files(path for path in hostile.iterdir() if path.name != MANIFEST))
    with pytest.raises(ValueError, match="trust_remote_code"):
        export_model(hostile, tmp_path / "out")


# Memory


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_memory_is_that_of_one_tensor_not_of_the_model(checkpoint: Path, tmp_path: Path, family: str) -> None:
    layers = {"llama": 18, "mixtral": 5}[family]
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": layers, "head_dim": 128}
    model = build_language_model(family, "cpu", **size)
    save_random(tmp_path / "last.ckpt", model)
    largest = max(p.numel() * 4 for p in model.parameters()) / 1e6
    del model
    check_memory(checkpoint, tmp_path / "last.ckpt", tmp_path, "whole", 4 * largest + 20)
