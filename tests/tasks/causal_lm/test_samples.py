"""Samples show what a model has learned, and change nothing of what it learns."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launches import fork_ranks, write_run
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.distributed import DistError
from training import build_trainer, gather_weights

from lit_fsdp import FSDP2Strategy, LoRA
from lit_fsdp.callbacks import EMA
from lit_fsdp.sharding.random_state import collect_random_state
from lit_fsdp.tasks import CausalLM, Optimizer, TextData, TrainTokenizer
from lit_fsdp.tasks.causal_lm.samples import Samples
from ranks import run_ranks

TINY = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 300}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
QUESTION = [{"role": "user", "content": "what comes after the number 7, then?"}]
TOO_LONG = "the number 1 comes after " * 20
PROMPTS = ["the number", QUESTION, TOO_LONG]
SAMPLED = {"max_new_tokens": 8, "do_sample": True}


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics["train/loss"]))


def make_data(folder: Path) -> TextData:
    path = folder / "text.jsonl"
    rows = [{"text": f"the number {i} comes after the number {i - 1}."} for i in range(1, 60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {"seq_length": 16, "num_workers": 0, "packing": False, "chat_template": TEMPLATE}
    settings |= {"tokenizer": TrainTokenizer(vocab_size=300), "cache_dir": str(folder / "cache")}
    return TextData(train=str(path), validation=str(path), **settings)


def make_plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: make_plain(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [make_plain(value) for value in state]
    return state.tolist() if isinstance(state, torch.Tensor) else state


def train(folder: Path, out: Path, prompts: list[Any], is_adapted: bool) -> None:
    seed_everything(3)
    lora = LoRA(r=4, dropout=0.2, target_modules=["c_attn"]) if is_adapted else None
    optimizer = Optimizer(learning_rate=0.05)
    task = CausalLM(config=TINY, lora=lora, sample_prompts=prompts, generation=SAMPLED, optimizer=optimizer)
    losses, ema = Losses(), EMA(decay=0.5, warmup=False)
    options: dict[str, Any] = {"max_steps": 4, "val_check_interval": 2, "limit_val_batches": 1}
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[losses, ema], **options)
    trainer.fit(task, datamodule=make_data(folder))
    state, weights = collect_random_state(), gather_weights(task)
    if trainer.is_global_zero:
        torch.save((losses.values, state, weights, task.samples.answers, task.samples.problems), out)


@pytest.mark.full
@pytest.mark.parametrize("is_adapted", [True, False])
def test_a_run_is_the_same_to_the_last_bit_with_and_without_samples(is_adapted: bool, tmp_path: Path) -> None:
    found = []
    for prompts in ([], PROMPTS):
        run_ranks(train, tmp_path, tmp_path / "out", prompts, is_adapted)
        found.append(torch.load(tmp_path / "out", weights_only=False))
    (losses, state, weights, _, _), (other_losses, other_state, other_weights, answers, problems) = found
    assert losses == other_losses
    assert len(set(losses)) == 4
    assert make_plain(other_state) == make_plain(state)
    torch.testing.assert_close(other_weights, weights, rtol=0, atol=0)
    assert list(answers) == [2, 4]
    for texts in answers.values():
        assert [text is None for text in texts] == [False, False, True]
        assert texts[0].strip()
    assert answers[2] != answers[4]
    (problem,) = problems
    assert "prompt 2 has" in problem
    assert "the model has 64 places" in problem


def read_texts(folder: Path) -> dict[str, list[tuple[int, str]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return {
        tag: [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
        if tag.startswith("samples/")
    }


@pytest.mark.full
def test_answers_are_printed_logged_and_in_the_report_at_each_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"validation": "train.jsonl", "chat_template": TEMPLATE, "seq_length": 24, "packing": False}
    model = {"config": TINY | {"vocab_size": 320}, "sample_prompts": ["word1 is", QUESTION, TOO_LONG]}
    model |= {"generation": {"max_new_tokens": 4}}
    write_run(tmp_path, model=model, data=data, trainer={"val_check_interval": 2, "limit_val_batches": 1})
    ranks = fork_ranks("fit", "--config=run.yaml", "--monitoring=true")
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
    printed = [line for line in ranks[0].err.splitlines() if " sample: " in line]
    assert [line.partition("|")[0] for line in printed] == [
        f"step {step} sample: {prompt} "
        for step in (2, 4)
        for prompt in ("word1 is", QUESTION[0]["content"][:34] + "…")
    ]
    assert "sample: " not in ranks[1].err
    folder = tmp_path / "runs/run/version_0"
    section = json.loads((folder / "report.json").read_text())["sections"]["samples"]
    answers = section["numbers"]["answers"]
    assert [entry["step"] for entry in answers] == [2, 4]
    assert all(entry["answers"][2] is None for entry in answers)
    assert "not answered (first at step 2)" in section["notes"][-1]
    texts = read_texts(folder)
    assert set(texts) == {"samples/00/text_summary", "samples/01/text_summary"}
    for number, name in enumerate(sorted(texts)):
        assert [step for step, _ in texts[name]] == [2, 4]
        for (_, text), entry in zip(texts[name], answers, strict=True):
            assert "".join(entry["answers"][number].split()) in "".join(text.split())
    page = (folder / "report.html").read_text()
    assert page.count('<table class="prose">') == 2
    assert "what comes after the number 7, then?" in page


def test_a_sample_that_fails_is_a_warning_once_and_the_others_are_answered(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    data.setup("fit")

    class Task(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.device = torch.device("cpu")
            self.generation, self.limits = {"max_new_tokens": 64}, list[int]()
            values = {"global_step": 3, "strategy": None, "datamodule": data, "world_size": 1}
            self.trainer = SimpleNamespace(**values, loggers=[], is_global_zero=True)

        def continue_rows(self, rows: list[list[int]], max_new_tokens: int) -> list[str]:
            self.limits.append(max_new_tokens)
            if len(self.limits) % 2:
                raise IndexError("index out of range in self\nmore")
            return ["answer"]

        def get_tokenizer(self) -> Any:
            return data.tokenizer

        def read_config(self) -> Any:
            return CausalLM(config=TINY).read_config()

    task, samples = Task(), Samples(["the number", "the"])
    data.eval_batch_size = 1
    with pytest.warns(UserWarning, match=r"prompts 0: IndexError: index out of range in self: training goes on"):
        samples.answer(task)
    assert samples.answers == {3: [None, "answer"]}
    assert task.training
    lengths = [len(data.tokenizer(text)["input_ids"]) for text in ("the number", "the")]
    assert task.limits == [min(64, 64 - length) for length in lengths], "more than the model has places for"
    section = samples.make_section()
    assert section is not None
    assert [table.rows for table in section.tables] == [[["3", "answer"]]]
    assert section.notes[-1].startswith("Warning: prompts 0: IndexError")


def test_a_second_run_of_a_task_has_answers_of_its_own(tmp_path: Path) -> None:
    task = CausalLM(config=TINY, sample_prompts=["the number"], generation={"max_new_tokens": 2})
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    found = []
    for max_steps in (2, 1):
        trainer = Trainer(accelerator="cpu", max_steps=max_steps, enable_model_summary=False, **quiet)
        trainer.fit(task, make_data(tmp_path))
        found.append(dict(task.samples.answers))
    assert [list(answers) for answers in found] == [[2], [1]]


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), DistError("lost")],
    ids=["device", "library", "connection"],
)
def test_a_rank_that_may_have_failed_alone_does_not_go_on_without_the_others(error: Exception, tmp_path: Path) -> None:
    data = make_data(tmp_path)
    data.setup("fit")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    task = SimpleNamespace(
        trainer=SimpleNamespace(world_size=2, global_step=1, strategy=None, datamodule=data),
        device=torch.device("cpu"),
        modules=list,
        read_config=CausalLM(config=TINY).read_config,
        get_tokenizer=lambda: data.tokenizer,
        generation={"max_new_tokens": 4},
        continue_rows=fail,
    )
    with pytest.raises(type(error)):
        Samples(["the number"]).answer(task)


def test_a_prompt_that_a_template_refuses_is_not_answered_in_an_evaluation(tmp_path: Path) -> None:
    data, asked = make_data(tmp_path), list[int]()
    data.chat_template = None
    data.setup("validate")
    task = SimpleNamespace(
        trainer=SimpleNamespace(
            world_size=1, global_step=1, strategy=None, datamodule=data, loggers=[], is_global_zero=True
        ),
        device=torch.device("cpu"),
        modules=list,
        read_config=CausalLM(config=TINY).read_config,
        get_tokenizer=lambda: data.tokenizer,
        generation={"max_new_tokens": 4},
        continue_rows=lambda rows, **_: [asked.append(len(row)) or "answer" for row in rows],
    )
    samples = Samples([QUESTION, "the number"])
    with pytest.warns(UserWarning, match=r"prompt 0: a chat, but the tokenizer has no chat template.*: not answered"):
        samples.answer(task)
    assert samples.answers == {1: [None, "answer"]}
    assert len(asked) == 1 and asked[0] > 0  # noqa: PT018


def test_a_prompt_that_cannot_be_one_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sample_prompts\[0\]: .* message 1 has the role 'me'"):
        CausalLM(config=TINY, sample_prompts=[[{"role": "me", "content": "hi"}]])
    data = make_data(tmp_path)
    data.chat_template = None
    data.setup("fit")
    with pytest.raises(ValueError, match=r"sample_prompts\[1\]: a chat, but the tokenizer has no chat template"):
        Samples(["a", QUESTION]).check(data.tokenizer)
