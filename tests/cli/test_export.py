"""``export`` on the command line, from a real run; and what other tools make of the folder."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from launches import fork_ranks, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_fsdp.cli.main import main
from lit_fsdp.export.model import Exported, export_model

CHECKPOINT = "runs/run/version_0/checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a user started a real run in, on two ranks, with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("user")
    write_run(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ended = fork_ranks("fit", "--config=run.yaml")
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    return folder


@pytest.fixture(scope="module")
def exported(run: Path) -> Exported:
    """What the command line makes of the run."""
    assert main(["export", f"--checkpoint={run / 'runs' / 'run'}", f"--out={run / 'out'}"]) == 0
    return export_model(run / "runs" / "run", run / "again")


@pytest.mark.full
def test_a_run_leaves_by_the_command_line(
    run: Path, exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["export", "--checkpoint", str(run / CHECKPOINT), "--out", str(tmp_path)]
    capsys.readouterr()
    assert main([*args, "--dtype", "bfloat16", "--max_shard_gb", "5", "--overwrite", "true"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (str(tmp_path), *exported.files))
    assert f"{exported.num_parameters:,} parameters, bfloat16, 0.000 GiB" in printed
    assert sorted(path.name for path in (run / "out").iterdir()) == exported.files
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16


def test_the_tokenizer_encodes_alike_and_generation_ends_with_its_end(run: Path, exported: Exported) -> None:
    ours = AutoTokenizer.from_pretrained(exported.folder)
    trained = next((run / "cache" / "tokenizers").glob("*/tokenizer.json")).parent
    truth = AutoTokenizer.from_pretrained(trained)
    text = "word3 is 7. A new line\n\tand Größe<|endoftext|>"
    assert ours(text) == truth(text)
    assert ours.decode(ours(text)["input_ids"]) == text
    model = AutoModelForCausalLM.from_pretrained(exported.folder)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == truth.eos_token_id
    assert model.generation_config.pad_token_id == truth.pad_token_id


def test_the_model_card_says_what_it_is(run: Path, exported: Exported) -> None:
    card = (exported.folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# again\n")
    assert f"LlamaForCausalLM, {exported.num_parameters:,} parameters in float32, from step 4 after" in card
    rows = (run / "runs/run/version_0/metrics.csv").read_text().splitlines()
    loss = dict(zip(rows[0].split(","), rows[-1].split(","), strict=True))["train/loss"]
    assert f"| train/loss | {float(loss):.6g} | 4 |" in card
    assert (run / "runs/run/version_0/config.yaml").read_text().rstrip() in card


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        ("--out=new", 2, "checkpoint: missing: expected a value"),
        ("--checkpoint={ckpt} --out=new --dtyp=bfloat16", 2, "dtyp: unknown key: did you mean dtype?"),
        ("--checkpoint={ckpt} --out=new --dtype=int8", 2, "dtype: got 'int8': expected one of keep, float32, bfloat16"),
        ("--checkpoint={ckpt} --out=new --max_shard_gb=big", 2, "max_shard_gb: got 'big': expected float"),
        ("--checkpoint={ckpt} --out=new --max_shard_gb=-1", 2, "max_shard_gb: got -1.0: expected above 0"),
        ("--checkpoint=nowhere --out=new", 2, "checkpoint: nowhere does not exist: expected the folder of"),
        ("--checkpoint={ckpt}x --out=new", 2, "x does not exist: did you mean {ckpt}?"),
        ("--checkpoint={ckpt} --out={ckpt}", 2, "holds or lies in the checkpoint"),
        ("{ckpt}", 2, "unexpected argument: expected --key=value"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: str,
    code: int,
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", *options.format(ckpt=run / CHECKPOINT).split()]) == code
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert expected.format(ckpt=run / CHECKPOINT) in lines[0]
    assert not list(tmp_path.iterdir())


# Other tools


LM_EVAL_TASK = """
task: local_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


@pytest.mark.slow
def test_lm_evaluation_harness_runs_a_local_task(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [{"question": f"word{i} is", "choices": [f"{i}", "green"], "answer": 0} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "local_words.yaml").write_text(LM_EVAL_TASK.format(rows=tmp_path / "rows.jsonl"))
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(exported.folder), "dtype": "float32"},
        tasks=["local_words"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        batch_size=4,
        log_samples=True,
    )
    assert 0 <= results["results"]["local_words"]["acc,none"] <= 1
    tokenizer = AutoTokenizer.from_pretrained(exported.folder)
    model = AutoModelForCausalLM.from_pretrained(exported.folder).eval()
    for sample in results["samples"]["local_words"]:
        for choice, (log_likelihood, _) in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            num_context = len(tokenizer(sample["doc"]["question"])["input_ids"])
            ids = torch.tensor(tokenizer(sample["doc"]["question"] + " " + choice)["input_ids"])
            with torch.no_grad():
                scores = torch.log_softmax(model(ids[None]).logits[0], -1)
            own = sum(float(scores[i - 1, ids[i]]) for i in range(num_context, len(ids)))
            assert own == pytest.approx(float(log_likelihood), abs=1e-4)


@pytest.mark.slow
def test_ctranslate2_converts_it_and_agrees(exported: Exported, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    converter = ctranslate2.converters.TransformersConverter(str(exported.folder))
    converter.convert(str(tmp_path / "ct2"))
    tokenizer = AutoTokenizer.from_pretrained(exported.folder)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("word7 is 12. word3 is")["input_ids"])
    generator = ctranslate2.Generator(str(tmp_path / "ct2"), compute_type="float32")
    theirs = torch.from_numpy(np.array(generator.forward_batch([tokens])))[0]
    model = AutoModelForCausalLM.from_pretrained(exported.folder).eval()
    with torch.no_grad():
        ours = model(torch.tensor([tokenizer.convert_tokens_to_ids(tokens)])).logits[0]
    assert theirs.shape == ours.shape
    assert (theirs - ours).abs().max() < 1e-5
