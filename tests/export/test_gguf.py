"""``export --gguf``: llama.cpp computes from one file what Transformers does; without it, tensors are looked at."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from launches import fork_ranks, write_run
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaTokenizer

from lit_fsdp.cli.main import main
from lit_fsdp.export.gguf_file import check_gguf, write_gguf
from lit_fsdp.weights.hub_names import list_saved_names, plan_parts

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.full
TEXTS = ["word3 is 7. A new line\n\n\tand Größe, isn't it 12345?", "  two  spaces ", "日本 <|end|> x", "a<|end|>b"]
QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 400, "num_hidden_layers": 2, "max_position_embeddings": 128}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA_3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
# Each with the tokenizer of its kind. Windows are shorter than the text.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("sentencepiece", {}),
    "llama bias": (
        "gpt2",
        {"attention_bias": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama 3": ("llama3", {"rope_parameters": LLAMA_3, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen2", {}),
    "gemma": ("sentencepiece", {}),
    "gemma2": ("sentencepiece", {"sliding_window": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 4}),
    "gemma3_text": ("sentencepiece", {"sliding_window": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}),
}


def make_tokenizer(kind: str) -> Tokenizer:
    """A tokenizer of the kind that a family has, learned from a few words."""
    corpus = [f"word{i} is {i * 7}. A new line and Größe isn't it  two  spaces" for i in range(60)]
    special = ["<pad>", "<s>", "</s>"]
    if kind == "sentencepiece":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        trainer = trainers.BpeTrainer(
            vocab_size=390, special_tokens=[*special, "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
        )
        tokenizer.train_from_iterator(corpus, trainer)
        # Bytes are no special tokens, in which text would be looked for.
        spec = json.loads(tokenizer.to_str())
        spec["added_tokens"] = [one for one in spec["added_tokens"] if not one["content"].startswith("<0x")]
        tokenizer = Tokenizer.from_str(json.dumps(spec))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        tokenizer = Tokenizer(models.BPE())
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
        rule = QWEN_2 if kind == "qwen2" else QWEN_2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
        split = pre_tokenizers.Split(pattern=Regex(rule), behavior="isolated")
        tokenizer.pre_tokenizer = byte_level if kind == "gpt2" else pre_tokenizers.Sequence([split, byte_level])
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=390, special_tokens=special, initial_alphabet=alphabet)
        tokenizer.train_from_iterator(corpus, trainer)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def make_files(kind: str) -> dict[str, str | bytes]:
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": "{{ messages }}"}
    return {"tokenizer.json": make_tokenizer(kind).to_str(), "tokenizer_config.json": json.dumps(config)}


def make_model(name: str) -> Any:
    torch.manual_seed(1)
    settings = FAMILIES[name][1]
    if name.startswith("qwen"):
        settings = {**settings, "use_sliding_window": False}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name.partition(" ")[0], **{**SIZES, **settings})
    ).eval()
    for key, parameter in model.named_parameters():
        if "norm" in key or key.endswith("bias"):
            nn.init.uniform_(parameter.data, 0.5, 1.5)
    return model


class TableGelu(nn.Module):
    """As llama.cpp computes it on CPUs: by a table of float16."""

    def forward(self, x: Tensor) -> Tensor:
        looked_up = nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, looked_up))


def write(model: Any, files: dict[str, str | bytes], path: Path, gguf_type: Any = "f32") -> Path:
    state = model.state_dict()
    check_gguf(model.config, files)
    meta = {name: state[name].to("meta") for name in list_saved_names(model)}
    read: Callable[[Any], dict[str, Tensor]] = lambda wanted: {name: state[name] for name in wanted}  # noqa: E731
    write_gguf(path, gguf_type, plan_parts(model, meta), read, model, files, "tiny")
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_computes_and_encodes_as_transformers_does(name: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    kind, model = FAMILIES[name][0], make_model(name)
    files = make_files(kind)
    path = write(model, files, tmp_path / "tiny.gguf")
    theirs = llama_cpp.Llama(
        str(path), n_ctx=64, n_batch=64, n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0
    )
    for block in model.model.layers:
        if name.startswith("gemma"):
            block.mlp.act_fn = TableGelu()
    tokens = torch.randint(3, 390, (24,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        truth = model(tokens[None]).logits[0]
    theirs.eval(tokens.tolist())
    ours = torch.from_numpy(np.array(theirs.scores[:24]))
    assert truth.std() > 0.1
    # Near a step of that table, the last bits of a float32 decide.
    near = 2e-3 if name.startswith("gemma") else 1e-4
    torch.testing.assert_close(ours, truth, rtol=0, atol=near * float(truth.std()))
    tokenizer = make_tokenizer(kind)
    for text in TEXTS:
        assert theirs.tokenize(text.encode(), add_bos=True, special=True) == tokenizer.encode(text).ids, text


@pytest.mark.parametrize(
    ("gguf_type", "worst"), [("f32", 0.0), ("f16", 5e-4), ("bf16", 4e-3), ("q8_0", 5e-3), ("q4_0", 0.1)]
)
def test_every_type_is_as_near_as_its_bits(gguf_type: str, worst: float, tmp_path: Path) -> None:
    """What the package's reader finds, against the weights with the changes that its converters document."""
    model = make_model("llama")
    reader = gguf.GGUFReader(write(model, make_files("sentencepiece"), tmp_path / "tiny.gguf", gguf_type))
    stored = {one.name: gguf.dequantize(one.data, one.tensor_type).reshape(one.shape[::-1]) for one in reader.tensors}
    state = model.state_dict()
    assert len(stored) == len(list_saved_names(model))
    keys = state["model.layers.1.self_attn.k_proj.weight"].reshape(2, 2, 8, 64)  # [heads, halves, pairs, width]
    pairs = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "blk.1.attn_k.weight": keys.transpose(1, 2).reshape(32, 64),
        "blk.1.ffn_down.weight": state["model.layers.1.mlp.down_proj.weight"],
        "blk.0.attn_norm.weight": state["model.layers.0.input_layernorm.weight"],
    }
    for name, truth in pairs.items():
        difference = np.abs(stored[name] - truth.numpy()).max() / float(truth.abs().max())
        assert difference <= (0 if "norm" in name else worst), name
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["llama.attention.head_count_kv"].contents() == 2
    assert reader.fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert reader.fields["tokenizer.chat_template"].contents() == "{{ messages }}"


def make_llama_tokenizer(way: str) -> Tokenizer:
    """One of SentencePiece that puts a space before a text as its makers have done it, or puts none."""
    tokenizer = make_tokenizer("sentencepiece")
    if way == "transformers":
        spec = json.loads(tokenizer.to_str())["model"]
        made = LlamaTokenizer(vocab=spec["vocab"], merges=[tuple(pair) for pair in spec["merges"]])
        return made.backend_tokenizer
    if way == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), tokenizer.normalizer])
    elif way != "none":
        tokenizer.normalizer = None
        scheme: Any = way
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return tokenizer


@pytest.mark.parametrize("way", ["transformers", "normalizer", "always", "never", "none"])
def test_a_space_is_put_before_a_text_where_the_tokenizer_puts_one(way: str, tmp_path: Path) -> None:
    tokenizer = make_llama_tokenizer(way)
    files = make_files("sentencepiece") | {"tokenizer.json": tokenizer.to_str()}
    reader = gguf.GGUFReader(write(make_model("llama"), files, tmp_path / "tiny.gguf"))
    begins = tokenizer.encode("word", add_special_tokens=False).tokens[0].startswith("▁")
    assert begins == (way not in ("never", "none"))
    assert reader.fields["tokenizer.ggml.add_space_prefix"].contents() is begins


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters that were trained on two ranks, with a tokenizer of the data."""
    folder = tmp_path_factory.mktemp("user")
    write_run(folder)
    config = yaml.safe_load((folder / "run.yaml").read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config["model"]["init_args"]["config"]))
    model.save_pretrained(folder / "base")
    optimizer = {"learning_rate": 0.05}
    config["model"]["init_args"] = {"pretrained": "base", "lora": {"r": 4}, "optimizer": optimizer}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ended = fork_ranks("fit", "--config=run.yaml")
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    return folder


def test_merged_adapters_of_a_run_answer_in_llama_cpp_as_in_transformers(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run)
    export = ["export", "--checkpoint=runs/run", "--merge=true"]
    assert main([*export, f"--out={tmp_path / 'tiny'}", "--gguf=f32"]) == 0
    assert main([*export, f"--out={tmp_path / 'hf'}"]) == 0
    names = sorted(path.name for path in (tmp_path / "tiny").iterdir())
    assert names == ["README.md", "export_manifest.json", "tiny-f32.gguf"]
    assert "library_name: gguf" in (tmp_path / "tiny" / "README.md").read_text()
    assert "parameters, f32, 0.000 GiB" in capsys.readouterr().out
    llama_cpp = pytest.importorskip("llama_cpp")
    path = str(tmp_path / "tiny" / "tiny-f32.gguf")
    theirs = llama_cpp.Llama(path, n_ctx=64, n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    tokens = tokenizer("word3 is 7. word5 is 9.")["input_ids"]
    assert theirs.tokenize(b"word3 is 7. word5 is 9.") == tokens
    with torch.no_grad():
        truth = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(torch.tensor([tokens])).logits[0]
    theirs.eval(tokens)
    ours = torch.from_numpy(np.array(theirs.scores[: len(tokens)]))
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-4 * float(truth.std()))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--gguf=f32", "gguf: adapters alone are no model: set merge to true"),
        ("--gguf=q2_k --merge=true", "gguf: got 'q2_k': expected one of f32, f16, bf16, q8_0"),
        ("--gguf=f16 --merge=true --dtype=float16", "dtype: not used with gguf"),
        ("--gguf=f16 --merge=true --max_shard_gb=1", "max_shard_gb: not used with gguf"),
        ("--gguf=f16 --merge=true --quantization.type=nf4", "quantization: not used with gguf"),
    ],
)
def test_settings_that_it_cannot_follow_are_refused(
    options: str, expected: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["export", f"--checkpoint={run / 'runs' / 'run'}", f"--out={tmp_path / 'out'}", *options.split()]
    assert main(args) == 2
    assert capsys.readouterr().err.startswith(f"error: {expected}")
    assert list(tmp_path.iterdir()) == []


def test_models_that_llama_cpp_would_run_otherwise_are_refused() -> None:
    files = make_files("gpt2")

    def refuse(expected: str, family: str = "llama", files: dict[str, str | bytes] = files, **settings: Any) -> None:
        with pytest.raises(ValueError, match=expected):
            check_gguf(AutoConfig.for_model(family, **{**SIZES, **settings}), files)

    check_gguf(AutoConfig.for_model("llama", **SIZES), files)
    refuse("got a model of type mistral: expected one of llama, qwen2, qwen3, gemma", "mistral")
    refuse("no llama with hidden_act 'relu'", hidden_act="relu")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    refuse("no qwen3 with rope_type 'yarn'", "qwen3", rope_parameters=yarn)
    refuse("no qwen2 with layer_types", "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    refuse("no gemma2 with query_pre_attn_scalar 256, but only 16", "gemma2")
    refuse("has no tokenizer.json", files={})
    refuse("the tokenizer has 391 tokens, the model only 300", vocab_size=300, files=make_files("gpt2"))
    other = json.loads(make_files("gpt2")["tokenizer.json"])
    other["pre_tokenizer"] = {"type": "Whitespace"}
    refuse("cuts text by a rule that is none of GPT-2, Llama 3 and Qwen 2", files={"tokenizer.json": json.dumps(other)})
    other["model"] = {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}
    refuse("of type WordLevel: expected BPE", files={"tokenizer.json": json.dumps(other)})
