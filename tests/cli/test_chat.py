"""A chat says what Transformers would, remembers what was said, and ends when its user says so."""

import io
import os
import pty
import select
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_run import TEMPLATE, answer_plainly, make_run
from transformers import GenerationConfig

from lit_fsdp.cli.chat import Answerer, Conversation, make_sampling, talk
from lit_fsdp.cli.main import main
from lit_fsdp.tasks import TrainTokenizer
from lit_fsdp.tasks.text.tokenizer import train_tokenizer


def pipe(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


@pytest.fixture
def tokenizer() -> Any:
    found = train_tokenizer(["word1 is 4, word2 is 5"] * 9, TrainTokenizer(vocab_size=300))
    found.chat_template = TEMPLATE
    return found


class Model:
    """Says ``words``, one a token, and is interrupted after that."""

    def __init__(self, tokenizer: Any, words: str, max_length: int = 4096, is_interrupted: bool = False) -> None:
        self.device, self.generation_config = torch.device("cpu"), GenerationConfig()
        text = SimpleNamespace(max_position_embeddings=max_length)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.tokenizer, self.words, self.is_interrupted = tokenizer, words, is_interrupted
        self.prompts: list[str] = []
        self.limits: list[int | None] = []

    def generate(self, *, input_ids: Any, generation_config: Any, streamer: Any, **_: Any) -> None:
        self.prompts.append(self.tokenizer.decode(input_ids[0]))
        self.limits.append(generation_config.max_new_tokens)
        streamer.put(input_ids)
        for number in self.tokenizer(self.words, add_special_tokens=False)["input_ids"]:
            streamer.put(torch.tensor([number]))
        if self.is_interrupted:
            raise KeyboardInterrupt
        streamer.end()


def converse(model: Any, tokenizer: Any, *, is_typed: bool = False, system: str | None = None) -> Conversation:
    conversation = Conversation(tokenizer, system=system)
    settings = make_sampling(max_new_tokens=50, temperature=None, top_p=None, top_k=None)
    talk(Answerer(model, tokenizer, settings), conversation, is_typed=is_typed)
    return conversation


@pytest.mark.full
def test_a_piped_chat_has_the_answers_of_transformers_and_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "cache"))
    make_run(tmp_path)
    begin = [{"role": "system", "content": "be"}]
    said = [*begin, {"role": "user", "content": "word1"}]
    (first,) = answer_plainly([said], 5)
    said += [{"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
    (second,) = answer_plainly([said], 5)
    (third,) = answer_plainly([[*begin, {"role": "user", "content": "word7"}]], 5)
    assert [second] != answer_plainly([[*begin, {"role": "user", "content": "and?"}]], 5), "it would not show"
    options = ("--temperature=0", "--max_new_tokens=5", "--system=be", "--device=cpu")
    before = sorted(tmp_path.iterdir())
    for model in ("runs/run", "exported"):
        pipe(monkeypatch, "word1", "", "and?", "/reset", "word7", "/quit", "word8")
        capsys.readouterr()
        assert main(["chat", f"--model={model}", *options]) == 0
        assert capsys.readouterr().out == f"{first}\n{second}\n{third}\n"
    assert sorted(tmp_path.iterdir()) == before, "no export is written"
    for seed in ("1", "1", "2"):
        pipe(monkeypatch, "word1 is")
        drawing = ("--temperature=2", "--max_new_tokens=20", f"--seed={seed}", "--quantization.type=nf4")
        assert main(["chat", "--model=runs/run", *drawing, "--device=cpu"]) == 0
    drawn = capsys.readouterr().out.splitlines()
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_answer_that_is_interrupted_is_kept_as_far_as_it_came(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["word1?", "more", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    model = Model(tokenizer, "word2\x1b[2J is", is_interrupted=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    conversation = converse(model, tokenizer, is_typed=True)
    said = [message["content"] for message in conversation.messages]
    assert said == ["word1?", "word2\x1b[2J is", "more", "word2\x1b[2J is"]
    assert capsys.readouterr().out == "word2␛[2J is\n" * 2, "nothing that a model says commands the terminal"
    assert model.prompts[1].endswith("[assistant]word2\x1b[2J is<|endoftext|>[user]more<|endoftext|>[assistant]")


def test_ctrl_c_ends_a_chat_in_a_pipe_and_bytes_that_are_no_text_are_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(tokenizer, "word2", is_interrupted=True)
    pipe(monkeypatch, "word1?", "more")
    with pytest.raises(KeyboardInterrupt):
        converse(model, tokenizer)
    assert len(model.prompts) == 1, "it went on to the next message"
    for errors in ("strict", "surrogateescape"):  # of most locales, and of C
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"word\xff\n"), "utf-8", errors))
        with pytest.raises(ValueError, match=r"^a message is not UTF-8: expected text$"):
            converse(Model(tokenizer, "word2"), tokenizer)


def test_in_a_pipe_a_line_that_begins_like_a_command_and_is_none_is_answered(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, "/etc/hosts says?", "/help", "/reset", "word1")
    model = Model(tokenizer, "word2")
    converse(model, tokenizer)
    assert model.prompts == [f"[user]{text}<|endoftext|>[assistant]" for text in ("/etc/hosts says?", "word1")]


def test_a_reader_that_has_left_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)  # as behind `| head -1`; PYTHONUNBUFFERED is set, as in images of containers
    output = io.TextIOWrapper(os.fdopen(write, "wb", 0), write_through=True)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr("lit_fsdp.cli.main._run_command", lambda _: print("an answer"))
    assert main(["chat"]) == 1
    output.close()


def test_commands_begin_anew_and_a_chat_that_is_full_is_told(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(tokenizer, "yes", max_length=60)
    lines = iter(["/system be short", "a", "/system", "b", "/hlp", "no", "word " * 60, "c", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    conversation = converse(model, tokenizer, is_typed=True, system="first")
    assert [m["content"] for m in conversation.messages] == ["b", "yes", "c", "yes"], "a refused message is not kept"
    assert model.prompts[0] == "[system]be short<|endoftext|>[user]a<|endoftext|>[assistant]"
    assert model.limits[0] is not None
    assert model.limits[0] < 50, "more than the model has places for"
    errors = capsys.readouterr().err
    assert "/hlp: unknown command" in errors
    assert "the model has 60 places (max_position_embeddings): /reset forgets it" in errors
    assert "error: the tokenizer's chat template refuses it: says no\n" in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model=./no"], "model: got './no': there is no such folder"),
        (["--model=x", "--max_new_tokens=0"], "max_new_tokens: got 0"),
        (["--model=x", "--temperature=-1"], "temperature: got -1.0"),
        (["--model=x", "--temperature=0", "--top_k=5"], "top_k: not used with temperature 0"),
        (["--model=x", "--top_p=1.5"], "top_p: got 1.5: expected above 0, up to 1"),
        (["--model=x", "--seed=-1"], "seed: got -1: expected 0 to 4294967295"),
        ([], "model: missing: expected a value"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["chat", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_a_system_prompt_that_the_template_refuses_is_told_at_once(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"^system: the tokenizer's chat template refuses it: says no$"):
        Conversation(tokenizer, system="no")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"^system: not used, as the tokenizer has no chat template"):
        Conversation(tokenizer, system="be short")
    assert Conversation(tokenizer).ask("word1") == tokenizer("word1")["input_ids"]


@pytest.mark.full
def test_at_a_terminal_ctrl_c_begins_a_new_line_and_ctrl_d_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "cache"))
    make_run(tmp_path)
    child, terminal = pty.fork()
    if not child:
        code = 70
        try:
            sys.stdin, sys.stdout = (os.fdopen(number, mode, closefd=False) for number, mode in ((0, "r"), (1, "w")))
            code = main(["chat", "--model=runs/run", "--temperature=0", "--device=cpu"])
        finally:  # whatever happens: a copy of pytest must not go on with the next tests
            os._exit(code)
    shown = ""

    def wait_for(text: str, count: int = 1, press: bytes = b"") -> None:
        nonlocal shown
        deadline = time.monotonic() + 240
        while shown.count(text) < count:
            assert time.monotonic() < deadline, shown
            if select.select([terminal], [], [], 2)[0]:
                shown += os.read(terminal, 4096).decode()
            elif press:
                os.write(terminal, press)

    wait_for("> ")
    assert "/runs/run/version_0/checkpoints/" in shown, "of a run, which checkpoint it is"
    assert ".ckpt: LlamaForCausalLM, float32, cpu, chat. /help shows the commands." in shown
    # Again if need be: Python does not see a signal between showing the prompt and reading.
    wait_for("Ctrl-D or /quit ends.", press=b"\x03")
    os.write(terminal, b"word1\n")
    wait_for("> ", 3)
    os.write(terminal, b"\x04")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
