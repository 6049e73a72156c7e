"""What a model answers to the same few prompts while it trains: shown in the terminal, logged, and in the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.distributed import DistError

from lit_fsdp.errors import join_names
from lit_fsdp.profiling.device_memory import is_out_of_memory
from lit_fsdp.reporting.lost_logs import outlive_lost_log
from lit_fsdp.reporting.sections import Section, Table
from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.strategy.lightning_strategies import call_in_forward
from lit_fsdp.tasks.evaluation_mode import evaluation_mode
from lit_fsdp.tasks.row_files import show_controls
from lit_fsdp.tasks.text.messages import MessageFields, RowError, parse_messages
from lit_fsdp.tasks.text.rows import Chat, RowFormat, Text
from lit_fsdp.tasks.text.tokens import Encoded, Encoder
from lit_fsdp.tasks.text_model import get_max_positions

Prompt = str | list[dict[str, Any]]

_NUM_SHOWN = 12  # steps in a table; report.json has all
_LINE = 70  # characters of an answer, and half as many of a prompt, in the terminal


def parse_prompt(prompt: Prompt) -> Text | Chat:
    """Return a prompt as what is encoded: text is continued as it is, messages are put into the chat template.

    Raises:
        RowError: It is empty, or its messages cannot be read.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise RowError("it is empty; expected a word or more")
        return Text(text=prompt)
    return Chat(messages=parse_messages(prompt, "messages", MessageFields())[0])


def encode_prompts(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Encoded | RowError]:
    """Return the tokens of each prompt as ``predict`` has them, or what is wrong with it."""
    return Encoder(tokenizer, RowFormat(is_prompt=True)).encode([parse_prompt(prompt) for prompt in prompts])


class Samples:
    """The answers to some prompts at each validation of a run.

    Args:
        prompts: Texts and chats.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = list(prompts)
        for number, prompt in enumerate(self.prompts):
            try:
                parse_prompt(prompt)
            except RowError as error:
                raise ValueError(f"sample_prompts[{number}]: got {prompt!r}: {error}") from error
        self.answers: dict[int, list[str | None]] = {}  # of each prompt, by step; none where it failed
        self.problems: dict[str, int] = {}  # the step at which each came first

    def check(self, tokenizer: Any) -> None:
        """Refuse chats that the template cannot render, before training.

        Raises:
            ValueError: With the prompt and the reason.
        """
        for number, result in enumerate(encode_prompts(tokenizer, self.prompts)):
            if isinstance(result, RowError):
                raise ValueError(f"sample_prompts[{number}]: {result}")  # noqa: TRY004  a setting, not a type

    def forget_after(self, step: int) -> None:
        """Leave out what comes after a step: it is of another run, which this one does not go on from."""
        self.answers = {number: answers for number, answers in self.answers.items() if number <= step}
        self.problems = {problem: number for problem, number in self.problems.items() if number <= step}

    def answer(self, task: Any) -> None:
        """Answer all, and leave no trace in what is trained: no gradient, no random number drawn. All ranks call it.

        Args:
            task: A ``CausalLM`` in a run.
        """
        trainer, devices = task.trainer, [task.device] if task.device.type == "cuda" else []
        # Each time with the same numbers, so that answers differ by what was learned.
        with evaluation_mode(task), torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            answers = call_in_forward(task, partial(self._try_all, task, trainer.global_step))
        self._add(trainer.global_step, answers, trainer)

    def _try_all(self, task: Any, step: int) -> list[str | None]:
        """Return the answer to each prompt, ``None`` where there is none."""
        limit = get_max_positions(task.read_config()) or sys.maxsize
        encoded = encode_prompts(task.get_tokenizer(), self.prompts)
        rows = [[] if isinstance(result, RowError) else result.ids for result in encoded]
        answers: list[str | None] = [None] * len(rows)
        for number, result in enumerate(encoded):
            if isinstance(result, RowError):  # where an evaluation came before it was checked
                self._warn(step, f"prompt {number}: {result}: not answered")
        for number, row in enumerate(rows):
            if len(row) >= limit:
                limits = f"the model has {limit} places (max_position_embeddings)"
                self._warn(step, f"prompt {number} has {len(row)} tokens, {limits}: not answered")
        numbers = [number for number, row in enumerate(rows) if 0 < len(row) < limit]
        at_once = getattr(get_data_module(task.trainer), "eval_batch_size", None) or len(rows)
        for begin in range(0, len(numbers), at_once):
            part = numbers[begin : begin + at_once]
            room = limit - max(len(rows[number]) for number in part)
            new_tokens = min(task.generation["max_new_tokens"], room)
            try:
                texts = task.continue_rows([rows[number] for number in part], max_new_tokens=new_tokens)
            except (RuntimeError, ValueError, LookupError, TypeError) as error:
                is_full = is_out_of_memory(error)
                if task.trainer.world_size > 1 and (is_full or isinstance(error, DistError)):
                    raise  # it may be this rank alone, for which the others would wait; in all else ranks fail alike
                reason = next(iter(str(error).splitlines()), "")
                problem = "out of memory" if is_full else f"{type(error).__name__}: {reason}"
                self._warn(step, f"prompts {join_names([*map(str, part)])}: {problem}")
            else:
                for number, text in zip(part, texts, strict=True):
                    answers[number] = text
        return answers

    def describe(self, number: int) -> str:
        """Return a prompt as text: of a chat, its last message."""
        prompt = self.prompts[number]
        return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))

    def _warn(self, step: int, problem: str) -> None:
        """Say once what failed."""
        if problem not in self.problems:
            self.problems[problem] = step
            rank_zero_warn(f"sample_prompts: {problem}: training goes on")

    def _add(self, step: int, answers: list[str | None], trainer: Trainer) -> None:
        """Keep, print and log the answers of a step; ``None`` is that of a prompt that failed."""
        self.answers[step] = answers
        for number, answer in enumerate(answers):
            if answer is not None:
                prompt = _shorten(self.describe(number), _LINE // 2)
                rank_zero_info(f"step {step} sample: {prompt} | {_shorten(answer, _LINE)}")
        for logger in trainer.loggers if trainer.is_global_zero else ():
            add: Any = getattr(getattr(logger, "experiment", None), "add_text", None)  # of TensorBoard
            for number, answer in enumerate(answers):
                if add is not None and answer is not None:
                    with outlive_lost_log(trainer, type(logger).__name__, logger.save_dir or "its server"):
                        # As a block of Markdown, or TensorBoard would take what is written for markup.
                        add(f"samples/{number:02}", _indent(f"{self.describe(number)}\n\n{answer}"), step)

    def make_section(self) -> Section | None:
        """Return a table of steps and answers for each prompt; ``None`` where nothing was asked."""
        if not self.answers and not self.problems:
            return None
        steps = list(self.answers)
        kept = steps
        if len(steps) > _NUM_SHOWN:  # the first, the last, and some evenly between
            kept = [steps[round(i * (len(steps) - 1) / (_NUM_SHOWN - 1))] for i in range(_NUM_SHOWN)]
        tables, notes = [], [f"What the model answers to sample_prompts at {len(steps)} validations."]
        if len(kept) < len(steps):
            notes.append(f"{len(kept)} of them are shown; report.json has all.")
        notes += [f"Warning: {problem} (first at step {step:,})." for problem, step in self.problems.items()]
        for number in range(len(self.prompts)):
            rows = [[f"{step:,}", answer] for step in kept if (answer := self.answers[step][number]) is not None]
            if rows:
                title = _shorten(self.describe(number), 2 * _LINE)
                tables.append(Table(title=title, columns=["step", "answer"], rows=rows, is_prose=True))
        numbers = {
            "prompts": self.prompts,
            "answers": [{"step": step, "answers": answers} for step, answers in self.answers.items()],
            "warnings": list(self.problems),
        }
        return Section(title="Samples", name="samples", numbers=numbers, tables=tables, notes=notes)


def _shorten(text: str, length: int) -> str:
    text = show_controls(" ".join(text.split()))
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _indent(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
