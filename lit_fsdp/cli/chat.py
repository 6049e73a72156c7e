"""``chat``: talk to a model in the terminal, or through a pipe: one line a message."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel, TextStreamer
from typing_extensions import override

from lit_fsdp.parsing.parser import run_function
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks.causal_lm.opened import Attention, DtypeName, load_whole, open_source, open_tokenizer
from lit_fsdp.tasks.causal_lm.samples import encode_prompts
from lit_fsdp.tasks.row_files import show_controls
from lit_fsdp.tasks.text.messages import RowError
from lit_fsdp.tasks.text.tokenizer import get_pad_id
from lit_fsdp.tasks.text_model import check_generation, get_end_ids, get_max_positions

_COMMANDS = {
    "/reset": "forget what was said",
    "/system TEXT": "set the system prompt, and forget what was said",
    "/help": "show these commands",
    "/quit": "end, as Ctrl-D does; Ctrl-C stops an answer",
}


def run_chat(args: Sequence[str]) -> int:
    """Talk to a model until the user ends it.

    Args:
        args: The command line, the command first.
    """
    run_function(
        chat,
        args[1:],
        command="chat",
        description="Talk to a model. In a pipe, each line is a message, and answers are all that stdout gets.",
    )
    return 0


def chat(
    model: str,
    *,
    system: str | None = None,
    max_new_tokens: int = 1024,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    base: str | None = None,
    quantization: Quantization | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    attention: Attention = "auto",
    device: Literal["auto", "cuda", "cpu"] = "auto",
) -> None:
    """Answer messages of the user.

    Args:
        model: Run, checkpoint, folder of a model or of adapters, or a name on the Hub.
        system: What the model is told before the first message.
        max_new_tokens: Where an answer is cut off.
        temperature: 0 always takes the likeliest token. Sampling is as ``generation_config.json`` of the model says, if
            nothing is given.
        top_p: Draw from the likeliest tokens that have this probability together.
        top_k: Draw from this many tokens.
        seed: Of the numbers drawn.
        base: Of adapters: where their base model is, if not where it was.
        quantization: Keep the weights in 4 or 8 bits, such as ``--quantization.type nf4``.
        dtype: Of weights that are not quantized; ``auto`` is as they are stored.
        attention: Implementation of attention; ``auto`` is that which Transformers chooses.
        device: ``auto`` takes the GPU if there is one.
    """
    settings = make_sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k)
    if seed is not None and not 0 <= seed < 2**32:
        raise ValueError(f"seed: got {seed}: expected 0 to {2**32 - 1}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: got 'cuda': torch sees no GPU; set cpu, or leave it out")
    source = open_source(model, base=base, quantization=quantization)
    tokenizer = open_tokenizer(source)
    conversation = Conversation(tokenizer, system=system)
    place = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    wanted: DtypeName = source.dtype if dtype == "auto" else dtype
    if place.type == "cpu" and wanted == "float16" and dtype == "auto":
        wanted = "float32"  # many operators of CPUs lack float16
    loaded = load_whole(source, dtype=wanted, attention=attention, device=place)
    if seed is not None:
        torch.manual_seed(seed)
    is_typed = sys.stdin.isatty()
    if is_typed:
        _load_line_editor()
        kind = "chat" if conversation.has_template else "no chat template: each line is continued as it is"
        place_of_weights = model if source.checkpoint is None else source.checkpoint.path  # of a run, its newest
        print(f"{place_of_weights}: {type(loaded).__name__}, {wanted}, {place.type}, {kind}. /help shows the commands.")
    talk(Answerer(loaded, tokenizer, settings), conversation, is_typed=is_typed)


def make_sampling(
    *, max_new_tokens: int, temperature: float | None, top_p: float | None, top_k: int | None
) -> dict[str, Any]:
    """Return the arguments of ``generate`` that are given.

    Raises:
        ValueError: One of them is out of its range.
    """
    rules: list[tuple[str, float | None, bool, str]] = [
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "1 or more"),
        ("temperature", temperature, temperature is None or temperature >= 0, "0 or more, such as 0.7"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0, up to 1"),
        ("top_k", top_k, top_k is None or top_k >= 1, "1 or more"),
    ]
    for name, value, is_right, expected in rules:
        if not is_right:
            raise ValueError(f"{name}: got {value}: expected {expected}")
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if temperature == 0:
        if top_p is not None or top_k is not None:
            name = "top_p" if top_p is not None else "top_k"
            raise ValueError(f"{name}: not used with temperature 0, which draws nothing; leave one of them out")
        return settings | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    given = {name: value for name, value in given.items() if value is not None}
    settings |= given | ({"do_sample": True} if given else {})
    check_generation(settings)
    return settings


class Conversation:
    """What was said so far.

    Args:
        tokenizer: With a chat template, or without one: then nothing is remembered.
        system: Prompt to begin with.
    """

    def __init__(self, tokenizer: Any, *, system: str | None = None) -> None:
        self.tokenizer, self.system = tokenizer, system
        self.messages: list[dict[str, Any]] = []
        self.begin(system)

    @property
    def has_template(self) -> bool:
        """Whether there is a chat at all, and no text that is continued."""
        return self.tokenizer.chat_template is not None

    def begin(self, system: str | None) -> None:
        """Forget what was said, and set the system prompt.

        Raises:
            ValueError: The template has no place for it.
        """
        if system is not None:
            if not self.has_template:
                raise ValueError("system: not used, as the tokenizer has no chat template; leave it out")
            said = [{"role": "system", "content": system}, {"role": "user", "content": "a"}]
            (result,) = encode_prompts(self.tokenizer, [said])
            if isinstance(result, RowError):
                raise ValueError(f"system: {_drop_advice(result)}")
        self.system = system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, text: str) -> list[int]:
        """Return the tokens of all that was said, with a new message; it is not kept yet.

        Raises:
            ValueError: The template refuses it, or it is no text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:  # what Python makes of other bytes where the locale is C
            raise ValueError("a message is not UTF-8: expected text") from error
        prompt = [*self.messages, {"role": "user", "content": text}] if self.has_template else text
        (result,) = encode_prompts(self.tokenizer, [prompt])
        if isinstance(result, RowError):
            raise ValueError(_drop_advice(result))  # noqa: TRY004
        return result.ids

    def keep(self, text: str, answer: str) -> None:
        """Remember a message and its answer."""
        if self.has_template:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


class Printer(TextStreamer):
    """Prints text as it comes, and keeps it; what would command a terminal is shown there instead."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""

    @override
    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        sys.stdout.write(show_controls(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


class Answerer:
    """Generates answers, token by token.

    Args:
        model: In evaluation mode, on its device.
        tokenizer: Of the model.
        settings: Arguments of ``generate``.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, settings: Mapping[str, Any]) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, dict(settings)
        self.limit = get_max_positions(model.config) or sys.maxsize

    def answer(self, ids: Sequence[int], *, is_typed: bool = True) -> str:
        """Print and return the answer to a prompt; Ctrl-C ends it where it is, if a person is there to go on.

        Raises:
            ValueError: The prompt leaves no place for one.
        """
        if len(ids) >= self.limit:
            raise ValueError(
                f"what was said has {len(ids)} tokens, the model has {self.limit} places (max_position_embeddings): "
                "/reset forgets it"
            )
        settings = self.settings | {"max_new_tokens": min(self.settings["max_new_tokens"], self.limit - len(ids))}
        prompt = torch.tensor([list(ids)], device=self.model.device)
        printer = Printer(self.tokenizer)
        generate: Any = self.model.generate
        config = GenerationConfig.from_dict({**self.model.generation_config.to_dict(), **settings})
        config.eos_token_id = get_end_ids(self.model, self.tokenizer)
        config.pad_token_id = get_pad_id(self.tokenizer)
        try:
            generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), generation_config=config, streamer=printer
            )
        except KeyboardInterrupt:
            if not is_typed:
                raise
            printer.end()  # type: ignore[no-untyped-call]  # what it holds back until a word is whole
        sys.stdout.write("\n")
        sys.stdout.flush()
        return printer.text


def talk(answerer: Answerer, conversation: Conversation, *, is_typed: bool) -> None:
    """Answer each line until there are no more.

    Args:
        answerer: The model.
        conversation: What was said before.
        is_typed: Whether a person types, who is told where to; else errors end it.
    """
    for line in _read_lines(is_typed):
        text = line.strip()
        command, _, rest = text.partition(" ")
        if command in ("/quit", "/exit"):
            return
        try:
            if command == "/reset":
                conversation.begin(conversation.system)
            elif command == "/system":
                conversation.begin(rest.strip() or None)
            elif text.startswith("/") and (is_typed or command == "/help"):  # in a pipe, a path may begin a message
                _print_help(None if command == "/help" else command)
            elif text:
                conversation.keep(text, answerer.answer(conversation.ask(text), is_typed=is_typed))
        except ValueError as error:
            if not is_typed:
                raise
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:  # before or after an answer
            if not is_typed:
                raise


def _read_lines(is_typed: bool) -> Iterator[str]:
    """Yield lines until the end of the input; Ctrl-C begins a new one."""
    if not is_typed:
        try:
            yield from sys.stdin
        except UnicodeDecodeError as error:
            raise ValueError("a message is not UTF-8: expected text") from error
        return
    hint = ""
    while True:
        try:
            if hint:
                print(hint)  # here, where a second Ctrl-C is caught too
                hint = ""
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            hint = "\nCtrl-D or /quit ends."
        else:
            yield line


def _print_help(unknown: str | None) -> None:
    if unknown is not None:
        print(f"{unknown}: unknown command", file=sys.stderr)
    for name, what in _COMMANDS.items():
        print(f"{name:14}{what}", file=sys.stderr)


def _drop_advice(error: RowError) -> str:
    """Return what is wrong, without settings of training data."""
    return str(error).partition("; set ")[0]


def _load_line_editor() -> None:
    """Let ``input`` edit lines and remember them, where Python was built with that."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
