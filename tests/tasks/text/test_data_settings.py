import json
from pathlib import Path
from typing import Any, get_args

import pytest
from launches import write_run
from lightning.pytorch import Trainer

from lit_fsdp.cli.train import run_trainer
from lit_fsdp.tasks import LabeledTextData
from lit_fsdp.tasks.pretrained import read_tokenizer_files
from lit_fsdp.tasks.text.data import TextData
from lit_fsdp.tasks.text.sources import TxtDocuments, list_parts
from lit_fsdp.tasks.text.tokenizer import TrainTokenizer, train_tokenizer

TEXT = "[user] word / [assistant] says / [me]"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    trained = train_tokenizer([TEXT], TrainTokenizer(vocab_size=280))
    trained.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    trained.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"text": TEXT}))
    return path


def make(source: Path | str, tokenizer: str, cache: Path, **options: Any) -> TextData:
    return TextData(train=str(source), tokenizer=tokenizer, cache_dir=str(cache), num_workers=0, **options)


OWN_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} / {% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
)


@pytest.mark.parametrize("is_file", [False, True])
def test_chats_are_rendered_and_exported_with_the_template_that_is_set(
    tmp_path: Path, tokenizer: str, is_file: bool
) -> None:
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "word"}, {"role": "assistant", "content": "says"}]
    chats.write_text(json.dumps({"messages": turns}))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": turns[:1]}))
    template = tmp_path / "own.jinja"
    template.write_text(OWN_TEMPLATE)

    def build(**options: Any) -> TextData:
        options = {
            "loss_on": "completion",
            "packing": False,
            "batch_size": 1,
            "seq_length": 64,
            "predict": str(prompts),
            **options,
        }
        data = make(chats, tokenizer, tmp_path / "cache", **options)
        data.setup("fit")
        data.setup("predict")
        return data

    build()  # so that its tokens are in the cache
    data = build(chat_template=str(template) if is_file else OWN_TEMPLATE)
    (batch,) = data.train_dataloader()
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    assert data.tokenizer.decode(ids) == "[user] word / [assistant] says / "
    assert data.tokenizer.decode(ids[labels >= 0]).strip() == "says /"
    (batch,) = data.predict_dataloader()
    assert data.tokenizer.decode(batch["input_ids"][0]) == "[user] word / [me]"
    assert read_tokenizer_files(data.tokenizer)["chat_template.jinja"] == OWN_TEMPLATE


def test_a_template_that_is_no_file_or_no_jinja_is_refused_at_once(tmp_path: Path, source: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    for setting, reason in [
        (str(tmp_path / "onw.jinja"), r"chat_template: got '.*onw.jinja': no such file.*did you mean .*own.jinja\?"),
        (str(tmp_path / "own.jinja"), r"chat_template: .*own.jinja is not valid Jinja: line 2: unexpected '}'"),
        ("{{ messages | nonsense }}", "chat_template: the text is not valid Jinja: line 1: No filter named 'nonsense'"),
    ]:
        with pytest.raises(ValueError, match=reason):
            make(source, "made/up", tmp_path, chat_template=setting)


def test_the_language_reference_is_split_as_text_files_are() -> None:
    texts = {
        kind: [row.fields["text"] for row in list_parts("pydoc", split="train", txt_documents=kind)[0].read()]
        for kind in get_args(TxtDocuments)
    }
    words = {kind: " ".join(found).split() for kind, found in texts.items()}
    assert words["file"] == words["line"] == words["paragraph"]
    assert 50 < len(texts["file"]) < len(texts["paragraph"]) < len(texts["line"])


def test_before_a_run_starts_it_is_known_which_data_is_not_there(
    tmp_path: Path, source: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"train: trian.jsonl: no such file or folder.*did you mean train.jsonl\?"):
        make("trian.jsonl", tokenizer, tmp_path).check_stage("fit")
    data = make(source, tokenizer, tmp_path, validation_fraction=0.1)
    data.check_stage("fit")
    data.check_stage("validate")
    make("trian.jsonl", tokenizer, tmp_path).check_stage("plan")
    for stage in ("test", "predict"):
        with pytest.raises(ValueError, match=f"{stage}: not set"):
            data.check_stage(stage)


def test_the_command_line_refuses_a_missing_file_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "fit", lambda *_, **__: pytest.fail("the run was started"))
    with pytest.raises(ValueError, match=r"^data.init_args.train: trian.jsonl: no such file.*did you mean train.jsonl"):
        run_trainer(["fit", "--config=run.yaml", "--data.train=trian.jsonl"])


@pytest.mark.parametrize("kind", [TextData, LabeledTextData])
def test_data_that_prepare_data_will_make_is_not_looked_for(kind: Any, tmp_path: Path, tokenizer: str) -> None:
    class Downloaded(kind):
        def prepare_data(self) -> None: ...

    Downloaded(train=str(tmp_path / "later.jsonl"), tokenizer=tokenizer).check_stage("fit")
