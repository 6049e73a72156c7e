# ruff: noqa: E501  (a table of broken files and messages)
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.tasks.row_files import Row, read_csv, read_parquet
from lit_fsdp.tasks.text.data import TextData
from lit_fsdp.tasks.text.messages import RowError
from lit_fsdp.tasks.text.ray_text import tokenize
from lit_fsdp.tasks.text.rows import Chat, Columns, PromptCompletion, RowFormat, Text, parse_row
from lit_fsdp.tasks.text.tokenizer import TrainTokenizer, load_tokenizer, train_tokenizer

GOOD = '{"text": "good"}\n'
CHAT = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    trained = train_tokenizer(["good text"], TrainTokenizer(vocab_size=258))
    trained.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    trained.save_pretrained(folder)
    return str(folder)


def setup(source: Any, tokenizer: Any, cache: Path, **options: Any) -> TextData:
    data = TextData(train=source, tokenizer=tokenizer, cache_dir=str(cache), **options)
    data.setup("fit")
    return data


BROKEN: list[tuple[str, bytes, str, dict[str, Any]]] = [
    ("a.jsonl", (GOOD * 2 + '{"prompt": "p", "answer": "a"}\n').encode(), "line 3: the row has: prompt, answer: expected messages, conversations, prompt and completion, instruction and output, text; set columns, such as columns: {instruction: prompt, output: answer}", {}),
    ("b.jsonl", (GOOD + '{"text": "cut off\n').encode(), "line 2: not valid JSON: Invalid control character at column 18", {}),
    ("c.jsonl", b'{"text": 7}\n', 'line 1: "text" must be a string, it is a number (7)', {}),
    ("d.jsonl", (GOOD + "\n" + '{"text": "  "}\n').encode(), 'line 3: "text" is empty; remove the row or set bad_rows: skip', {}),
    ("e.jsonl", b'{"messages": []}\n', 'line 1: "messages" is empty; remove the row or set bad_rows: skip', {}),
    ("f.jsonl", b'{"messages": [{"role": "narrator", "content": "x"}]}\n', "line 1: message 1 has the role 'narrator'; known are system, developer, user, assistant, tool", {}),
    ("g.jsonl", (CHAT + '{"messages": [{"role": "user", "content": "hi"}]}\n').encode(), "line 2: the last message is by \"user\"; loss_on: completion needs the assistant's answer last; or set loss_on: all", {"loss_on": "completion"}),
    ("t.jsonl", b'{"messages": [{"role": "user", "content": "hi"}]}\n', "line 1: the last message is by \"user\"; loss_on: auto needs the assistant's answer last; or set loss_on: all", {}),
    ("h.jsonl", GOOD.encode() + b'{"text": "caf\xe9"}\n', "line 2: not UTF-8 (byte 0xe9 at column 14); convert the file", {}),
    ("i.jsonl", b"", "the file is empty", {}),
    ("j.parquet", b"PAR1 but no more", "not readable as Parquet: ", {}),
    ("k.jsonl", b'["text"]\n', 'line 1: must be an object like {"text": "..."}, it is a list ([\'text\'])', {}),
    ("l.csv", b"text,more\nok,1\nbad\n", "line 3: has 1 fields, the header has 2", {}),
    ("n.csv", b"Prompt,Completion,Notes\na,b,c\n", "line 2: the row has: Prompt, Completion, Notes: expected messages, conversations, prompt and completion, instruction and output, text; set columns, such as columns: {prompt: Prompt, completion: Completion}", {}),
    ("m.csv", b"body\nhello\n", "line 2: the row has: body: expected messages, conversations, prompt and completion, instruction and output, text; set columns, such as columns: {text: body}", {}),
    ("n.json", b'[{"text": "ok"}, {"text": null}]', 'row 2: "text" must be a string, it is null', {}),
    ("object.json", b'{"data": [\n{"text": "a"}\n]}\n', "one object of several lines: expected a list of rows, or one row in each line", {}),
    ("o.txt", b"fine\nnot fine \xff\n", "line 2: not UTF-8 (byte 0xff at column 10); convert the file", {}),
    ("p.jsonl", b'{"messages": [{"role": "user"}]}\n', 'line 1: message 1: "content" must be a string, it is null', {}),
    ("both.jsonl", CHAT.replace("{", '{"system": "Be brief.", ', 1).replace("[", '[{"role": "system", "content": "Be kind."}, ', 1).encode(), 'line 1: "system" is not what message 1, of the system, says; remove one of them', {}),
    ("q.jsonl", b'{"prompt": "p", "completion": ""}\n', 'line 1: "completion" is empty; remove the row or set bad_rows: skip', {}),
    ("r.jsonl", GOOD.encode(), "line 1: plain text has no completion; set loss_on: auto, or use prompt and completion", {"loss_on": "completion"}),
    ("u.csv", b"text,text\nlost,kept\n", "line 1: the header names 'text' twice; rename one of them, or remove it", {}),
    ("v.csv", b"text,more\na,b,c\n", "line 2: has 3 fields, the header has 2", {}),
    ("w.jsonl", GOOD.encode() + b'{"text": "a\\ud800"}\n', "line 2: not valid JSON: a \\ud... escape without its other half is no character", {}),
    ("x.jsonl", GOOD.encode() + b"[" * 100_000, "line 2: not valid JSON: nested too deeply", {}),
    ("y.json", b"[" * 100_000, "line 1: not valid JSON: nested too deeply", {}),
    ("z.jsonl", b'{"text": ' + b"1" * 5000 + b"}", "line 1: not valid JSON: a number of thousands of digits", {}),
    ("s.csv", b"text\n", "the file has no rows", {}),
    ("zip.jsonl", b"\x1f\x8b\x08\x00", "line 1: not text, but gzip: unpack it", {}),
    ("zst.csv", b"\x28\xb5\x2f\xfd\x00", "line 1: not text, but zstd: unpack it", {}),
    ("wide.txt", "hello".encode("utf-16"), "line 1: not text, but UTF-16: convert it to UTF-8", {}),
]  # fmt: skip


def test_damaged_pages_of_parquet_are_named_and_text_that_is_none_is_one_bad_row(
    tmp_path: Path, tokenizer: str
) -> None:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    path = tmp_path / "x.parquet"
    texts = [f"good text {i:04}" for i in range(3000)]
    options: Any = {"compression": "none", "use_dictionary": False, "row_group_size": 1500}
    pq.write_table(pa.table({"text": texts}), path, write_page_checksum=True, **options)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"good text 2500", b"good text 9500"))  # the same length: only the checksum knows
    with pytest.raises(ValueError, match=r"^train: \S*x\.parquet after row 1024: not readable as Parquet: .*CRC"):
        setup(str(path), tokenizer, tmp_path / "c")
    pq.write_table(pa.table({"text": texts}), path, **options)
    path.write_bytes(path.read_bytes().replace(b"good text 2500", b"good t\xe4xt 2500"))
    with pytest.raises(ValueError, match=r"^train: \S*x\.parquet row 2501: has text that is not UTF-8$"):
        setup(str(path), tokenizer, tmp_path / "c")
    with pytest.warns(UserWarning, match="1 bad rows are skipped, 2999 are good"):
        setup(str(path), tokenizer, tmp_path / "c", bad_rows="skip")


@pytest.mark.full
@pytest.mark.parametrize("trains_tokenizer", [False, True])
@pytest.mark.parametrize(("name", "content", "reason", "options"), BROKEN, ids=[case[0] for case in BROKEN])
def test_a_broken_file_gives_one_line_with_file_line_and_reason(
    tmp_path: Path,
    tokenizer: str,
    name: str,
    content: bytes,
    reason: str,
    options: Any,
    trains_tokenizer: bool,
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        setup(
            str(path),
            TrainTokenizer(vocab_size=258) if trains_tokenizer else tokenizer,
            tmp_path / "c",
            **options,
        )
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"train: {path}")
    assert message.removeprefix(f"train: {path}").lstrip(": ").startswith(reason)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("*.parquet", "no file matches .*"),
        ("missing.jsonl", "missing.jsonl: no such file or folder"),
        ("MISSING.CSV", "MISSING.CSV: no such file or folder"),  # nor a data set that is asked for at the Hub
        ("chat.jsonl", r"train: chat.jsonl: no such file or folder, seen from .*; did you mean chats.jsonl\?"),
        ("empty", "empty: no file in this folder ends in .txt, .jsonl"),
        ("image.png", "image.png: cannot read .png; known are .txt, .jsonl"),
        (
            ["no/such-dataset"],
            "'no/such-dataset' is neither a file or folder here .* nor a data set that could be loaded",
        ),
        ([], "the list of sources is empty"),
        ("pipe.jsonl", "pipe.jsonl: is a pipe, a socket or a device; write it to a file first"),
        ("link.jsonl", "link.jsonl: is a link to gone.jsonl, which is not there; mend the link"),
        ("rows", "rows/b.jsonl: is a pipe, a socket or a device; write it to a file first"),
        ("rows/*.txt", "rows/c.txt: is a link to gone.txt, which is not there; mend the link"),
    ],
)
def test_a_source_that_is_not_there_is_named(
    tmp_path: Path, tokenizer: str, source: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "image.png").touch()
    (tmp_path / "chats.jsonl").touch()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to("gone.jsonl")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text(GOOD)
    os.mkfifo(tmp_path / "rows" / "b.jsonl")
    (tmp_path / "rows" / "c.txt").symlink_to("gone.txt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=reason):
        setup(source, tokenizer, tmp_path / "c")


def test_skipped_bad_rows_are_counted_and_named_every_time(tmp_path: Path, tokenizer: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(GOOD * 3 + '{"text": 1}\n' * 7)
    for _ in range(2):  # the second reads the cache
        with pytest.warns(UserWarning, match=r"train: 7 bad rows are skipped, 3 are good") as caught:
            setup(str(path), tokenizer, tmp_path / "c", bad_rows="skip")
        (text,) = [str(w.message) for w in caught if "bad rows" in str(w.message)]
        assert [f"line {n}:" in text for n in range(3, 10)] == [False, True, True, True, True, True, False]


def test_if_all_rows_are_bad_there_is_nothing_to_skip_to(tmp_path: Path, tokenizer: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": 1}\n' * 3)
    with pytest.raises(ValueError, match=r'all 3 rows are bad, the first: .*x.jsonl line 1: "text" must be'):
        setup(str(path), tokenizer, tmp_path / "c", bad_rows="skip")


def documents(data: TextData) -> list[str]:
    rows = data.train_dataloader().dataset
    return [data.tokenizer.decode(rows[i]["input_ids"]).removesuffix("<|endoftext|>") for i in range(len(rows))]


def read_all(source: Any, tokenizer: str, cache: Path, **options: Any) -> list[str]:
    options = {"packing": False, "num_workers": 0, **options}
    return documents(setup(source, tokenizer, cache, **options))


def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, tokenizer: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset, DatasetDict

    folder = tmp_path / "d"
    folder.mkdir()
    texts = ["one, two", 'a "quote"\nand a new line', "three"]
    rows = [{"text": text} for text in texts]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "lines.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "list.json").write_text(json.dumps(rows, indent=2))
    (folder / "b.csv").write_text('text\n"one, two"\n"a ""quote""\nand a new line"\nthree\n')
    pq.write_table(pa.table({"text": texts}), folder / "c.parquet")
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(tmp_path / "splits")
    for name in ("a.jsonl", "lines.json", "list.json", "b.csv", "c.parquet", "saved", "splits", "*.csv"):
        assert (
            read_all(str((tmp_path if name in {"saved", "splits"} else folder) / name), tokenizer, tmp_path / "c")
            == texts
        ), name
    several = [str(folder / "a.jsonl"), str(folder / "c.parquet")]
    assert read_all(several, tokenizer, tmp_path / "c") == texts * 2
    assert read_all(str(folder), tokenizer, tmp_path / "c") == texts * 5
    with pytest.raises(ValueError, match="has no split 'test'; it has train"):
        read_all(str(tmp_path / "splits"), tokenizer, tmp_path / "c", train_split="test")
    assert read_all([*several, str(tmp_path / "splits")], tokenizer, tmp_path / "c", train_split="train") == texts * 3
    for without in (str(folder / "a.jsonl"), str(tmp_path / "saved"), "pydoc"):
        with pytest.raises(ValueError, match=r"train_split: got 'train': .* has no splits"):
            read_all(without, tokenizer, tmp_path / "c", train_split="train")
    for name in ("saved", "splits"):
        read = [
            read_all(str(tmp_path / name), tokenizer, tmp_path / "c", train_split=split)
            for split in ("train[:1]", "train[1:]", "train[:67%]", "train[2:]+train[:1]")
        ]
        assert read == [texts[:1], texts[1:], texts[:2], [texts[2], texts[0]]], name
        with pytest.raises(ValueError, match=rf"{name}: split 'train\[:x\]': "):
            read_all(str(tmp_path / name), tokenizer, tmp_path / "c", train_split="train[:x]")


@pytest.mark.parametrize(
    ("txt_documents", "expected"),
    [
        ("file", ["\ufeffone\r\ntwo\n\n\nthree\n".removeprefix("\ufeff")]),
        ("line", ["one", "two", "three"]),
        ("paragraph", ["one\r\ntwo", "three"]),
    ],
)
def test_a_text_file_is_one_document_or_one_a_line_or_one_a_paragraph(
    tmp_path: Path, tokenizer: str, txt_documents: str, expected: list[str]
) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\n\nthree\n")
    assert read_all(str(tmp_path / "x.txt"), tokenizer, tmp_path / "c", txt_documents=txt_documents) == expected


def test_one_column_of_a_table_may_have_any_name_and_lines_that_are_no_text_are_found_late(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('"text; or not"\n\n"one, two"\nthree\n')
    assert [(row.where, row.fields) for row in read_csv(tmp_path / "a.csv")] == [
        (f"{tmp_path / 'a.csv'} line 3", {"text; or not": "one, two"}),
        (f"{tmp_path / 'a.csv'} line 4", {"text; or not": "three"}),
    ]
    (tmp_path / "b.csv").write_bytes(b"text\n" + b"one\n" * 100_000 + b"\xe4\n")
    *rows, last = read_csv(tmp_path / "b.csv")
    assert {row.problem for row in rows} == {None}
    assert (last.where, last.problem) == (
        f"{tmp_path / 'b.csv'} line 100002",
        "not UTF-8 (byte 0xe4 at column 1); convert the file",
    )


USER, ANSWER = {"role": "user", "content": "What is two?"}, {"role": "assistant", "content": "One more than one."}
SYSTEM, MORE = {"role": "system", "content": "Count."}, {"role": "user", "content": "And three?"}
PLAIN = Chat(messages=[USER, ANSWER])
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
HEAD = "Below is an instruction that describes a task"
ALPACA = PromptCompletion(
    prompt=f"{HEAD}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nWhat is two?\n\n### Response:\n",
    completion="One more than one.",
)


@pytest.mark.parametrize(
    ("fields", "settings", "expected"),
    [
        ({"messages": [USER, ANSWER]}, {}, PLAIN),
        ({"messages": [USER, ANSWER], "text": None, "tools": None}, {}, PLAIN),
        ({"messages": [USER, {**ANSWER, "weight": 0}, MORE, ANSWER]}, {}, Chat(messages=[USER, ANSWER, MORE, ANSWER], context=frozenset({1}))),
        ({"messages": [USER, {**ANSWER, "train": False}, MORE, {**ANSWER, "train": True}]}, {}, Chat(messages=[USER, ANSWER, MORE, ANSWER], context=frozenset({1}))),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "two?"}]}, ANSWER]}, {}, PLAIN),
        ({"messages": [USER, ANSWER], "system": "Count.", "tools": '[{"name": "add"}]'}, {}, Chat(messages=[SYSTEM, USER, ANSWER], tools=[{"name": "add"}])),
        ({"conversations": [{"from": "human", "value": "What is two?"}, {"from": "gpt", "value": "One more than one."}]}, {}, PLAIN),
        ({"conversations": [USER, ANSWER]}, {}, PLAIN),
        (
            {"conversations": [
                {"from": "human", "value": "What is two?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "One more than one."},
            ]},
            {},
            Chat(messages=[USER, {"role": "assistant", "tool_calls": CALL}, {"role": "tool", "content": "2"}, ANSWER]),
        ),
        ({"dialog": [{"speaker": "user", "said": "What is two?"}, {"speaker": "model", "said": "One more than one."}]}, {"columns": {"messages": "dialog", "role": "speaker", "content": "said"}}, PLAIN),
        ({"instruction": "What is two?", "input": "", "output": "One more than one."}, {}, Chat(messages=[USER, ANSWER], plain=ALPACA)),
        ({"instruction": "What is two?", "output": "One more than one.", "text": "all of it"}, {"format": "prompt_completion"}, ALPACA),
        ({"instruction": "And three?", "history": [["What is two?", "One more than one."]], "output": "One more than one."}, {}, Chat(messages=[USER, ANSWER, MORE, ANSWER])),
        ({"q": "What is two?", "a": "One more than one.", "s": "Count."}, {"columns": {"instruction": "q", "output": "a", "system": "s"}}, Chat(messages=[SYSTEM, USER, ANSWER])),
        ({"prompt": "What is two?", "completion": " One more."}, {}, PromptCompletion(prompt="What is two?", completion=" One more.")),
        ({"prompt": "What is two?", "completion": "One more than one."}, {"format": "chat"}, PLAIN),
        ({"prompt": [USER, ANSWER, MORE], "completion": [ANSWER]}, {}, Chat(messages=[USER, ANSWER, MORE, ANSWER], context=frozenset({0, 1, 2}))),
        ({"messages": [USER, ANSWER], "body": "all of it"}, {"columns": {"text": "body"}}, Text(text="all of it")),
        ({"instruction": "What is two?", "output": "never seen"}, {"is_prompt": True, "format": "chat"}, Chat(messages=[USER])),
        ({"prompt": [USER]}, {"is_prompt": True}, Chat(messages=[USER])),
        ({"text": "What is two?"}, {"is_prompt": True, "format": "chat"}, Chat(messages=[USER])),
        ({"text": "What is two?", "more": "Count."}, {"is_prompt": True, "format": "chat", "columns": {"system": "more"}}, Chat(messages=[SYSTEM, USER])),
        ({"text": "all of it", "prompt": "What is two?"}, {"is_prompt": True, "format": "chat"}, Chat(messages=[USER])),
        ({"text": "What is two?"}, {"is_prompt": True}, Text(text="What is two?")),
    ],
)  # fmt: skip
def test_a_row_is_read_by_what_it_holds(fields: Any, settings: Any, expected: Any) -> None:
    columns = Columns(**settings.pop("columns", {}))
    assert parse_row(Row(where="", fields=fields), RowFormat(columns=columns, **settings)) == expected


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"question": "q", "answer": "a"}, "columns: {instruction: question, output: answer}"),
        ({"system_prompt": "s", "response": "r", "question": "q"}, "columns: {instruction: question, output: response, system: system_prompt}"),
        ({"id": 1, "dialog": [{"speaker": "user", "said": "hi"}]}, "columns: {messages: dialog, role: speaker, content: said}"),
        ({"id": 1, "turns": [{"content": "hi", "role": "user"}]}, r"columns: \{messages: turns\}"),
        ({"instruction": "i", "context": "c", "response": "r"}, "columns: {instruction: instruction, output: response, input: context}"),
        ({"instruction": "i", "input": 12, "output": "o"}, '"input" must be a string, it is a number'),
        ({"id": 1, "body": "b"}, "columns: {text: body}"),
        ({}, "no fields: expected messages"),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, "a preference pair; PreferenceTuning and PreferenceData learn"),
        ({"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [1, 2]}, "labels: rows of tokens are not read; name data"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "all answers have the weight 0"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "message 2 has the weight 0.5: expected 0 or 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type 'image_url'"),
        ({"messages": [{"speaker": "user", "content": "x"}]}, r"role None \(it has: speaker\)"),
        ({"messages": [USER, ANSWER], "tools": "{"}, '"tools" is not valid JSON'),
        ({"messages": [USER, ANSWER], "tools": {"name": "add"}}, '"tools" must be a list'),
        ({"conversations": [{"from": "function_call", "value": "add"}]}, 'a function_call must be like {"name"'),
        ({"prompt": [USER], "completion": "x"}, '"completion" must be a list'),
        ({"prompt": "x", "completion": [ANSWER]}, '"completion" must be a string'),
        ({"instruction": "i", "output": "o", "history": ["x"]}, '"history" must be a list of a question'),
    ],
)  # fmt: skip
def test_an_unknown_layout_is_answered_with_the_mapping_to_write(fields: Any, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        parse_row(Row(where="", fields=fields), RowFormat())


@pytest.mark.parametrize(
    ("columns", "kind", "reason"),
    [
        ({"system": "more"}, "auto", 'columns.system: "more" has no place in a prompt with its completion; set format: chat'),
        ({"tools": "more"}, "auto", 'columns.tools: "more" has no place'),
        ({"input": "more"}, "auto", 'columns.input: "more" has no place .*; name instruction and output instead'),
        ({"input": "more"}, "chat", 'columns.input: "more" has no place'),
        ({"system": "more", "text": "prompt"}, "auto", 'columns.system: "more" has no place in a row of text'),
    ],
)  # fmt: skip
def test_what_a_named_column_holds_is_not_dropped(columns: Any, kind: Any, reason: str) -> None:
    row_format = RowFormat(columns=Columns(**columns), format=kind)
    fields = {"prompt": "p", "completion": "c", "more": "[1]"}
    with pytest.raises(RowError, match=reason):
        parse_row(Row(where="", fields=fields), row_format)
    parse_row(Row(where="", fields={**fields, "more": None}), row_format)  # nothing would be lost


def test_a_column_that_no_row_has_is_refused(tmp_path: Path, tokenizer: str) -> None:
    row = {"instruction": "i", "output": "o"}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "context": "c"}) + "\n")
    with pytest.raises(ValueError, match=r'^train: columns.input: got "contxt": no row has it; they have: instruction'):
        setup(str(path), tokenizer, tmp_path / "c", columns=Columns(input="contxt"))
    setup(str(path), tokenizer, tmp_path / "c", columns=Columns(input="context"))


def test_names_in_bad_rows_do_not_command_the_terminal(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"\x1b[2J": "x"}))
    with pytest.raises(ValueError, match=r"the row has: ␛\[2J"):
        setup(str(tmp_path / "a.jsonl"), tokenizer, tmp_path / "c")


def test_tables_hand_on_no_nulls_that_arrow_made(tmp_path: Path, tokenizer: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "find", "arguments": {"word": "two"}}]
    rows = [{"messages": [USER, {"role": "assistant", "tool_calls": [call]}], "text": None} for call in calls]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    read = [row.fields for row in read_parquet(tmp_path / "a.parquet")]
    assert read == rows
    template = "{% for m in messages %}{{ m.role }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    made = tokenize(
        pa.Table.from_pylist(rows),
        tokenizer=tokenizer,
        chat_template=template,
        row_format=RowFormat(loss_on="all"),
        skips_bad_rows=False,
    )
    texts = load_tokenizer(tokenizer).batch_decode(made.column("ids").to_pylist())
    assert texts == [f"userassistant{json.dumps([call])}" for call in calls]
