"""Good starting points for inputs, each a small folder as a user has it, and rows that spoil them in one place."""

import csv
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile  # type: ignore[import-untyped]
import yaml
from image_training import VIT
from launches import ROOT, Ended, Start, fork_commands, write_run
from models import LANGUAGE_MODELS
from PIL import Image
from speech_training import make_config, make_rows, save_model
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.tasks.text.tokenizer import TrainTokenizer, train_tokenizer
from lit_fsdp.tasks.tts.preparation.prepared import write_shard
from lit_fsdp.tasks.tts.tokenizer import build_byte_tokenizer

GONE = object()  # in place of a value or a file: it is removed
FIT = "fit --config run.yaml"
TRAINER = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "enable_progress_bar": False}
SHORT = {"model": "model.init_args", "data": "data.init_args", "strategy": "trainer.strategy.init_args"}
LIMIT_S, MAX_LINES = 20.0, 3

Edit = Any  # a text, bytes, GONE, or a function of the path


@dataclass(frozen=True, kw_only=True)
class Row:
    """One input.

    Args:
        name: What is wrong with it, unique.
        args: The command line.
        settings: Changes of ``run.yaml`` by dotted key; ``model.``, ``data.`` and ``strategy.`` stand for their
            ``init_args``.
        files: Files to write, to change or to remove.
        environ: Variables to set.
        words: Each must be in the message.
        code: How it must end.
        is_late: Only training can find it: what a run prints and leaves when it begins is there.
    """

    name: str
    args: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Edit] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    words: Sequence[str] = ()
    code: int = 2
    is_late: bool = False


def fit(name: str, settings: Mapping[str, Any], *words: str, options: str = "", **more: Any) -> Row:
    """Return a run with other settings."""
    return Row(name=name, args=f"{FIT} {options}", settings=settings, words=words, **more)


def data(name: str, files: Mapping[str, Edit], *words: str, is_late: bool = False, **settings: Any) -> Row:
    """Return a run with other files, and settings of the data."""
    changes = {f"data.{k}": v for k, v in settings.items()}
    return Row(name=name, args=FIT, files=files, settings=changes, words=words, is_late=is_late)


def run(name: str, args: str, *words: str, **more: Any) -> Row:
    """Return another command."""
    return Row(name=name, args=args, words=words, **more)


# Edits of files


def cut(share: float = 0.5) -> Callable[[Path], None]:
    """Keep only the first part of a file, as after an interrupted copy."""

    def edit(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return edit


def edit_json(**changes: Any) -> Callable[[Path], None]:
    """Change keys of a JSON file."""

    def edit(path: Path) -> None:
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not GONE}))

    return edit


def edit_line(number: int, text: str | bytes) -> Callable[[Path], None]:
    """Replace a line, counted from 1."""

    def edit(path: Path) -> None:
        lines = path.read_bytes().split(b"\n")
        lines[number - 1] = text.encode() if isinstance(text, str) else text
        path.write_bytes(b"\n".join(lines))

    return edit


def link(target: str) -> Callable[[Path], None]:
    """Make a link."""
    return lambda path: path.symlink_to(target)


# Starting points


def make_text(folder: Path) -> None:
    """A tiny language model of random weights, and its text."""
    write_run(folder, trainer=TRAINER, data={"cache_dir": None})


def make_image(folder: Path) -> None:
    """A tiny classifier of images in a table."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir()
    names = [f"images/{i}.png" for i in range(12)]
    for name in names:
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / name)
    with (folder / "images.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "label"), *((n, "cat" if i % 2 else "dog") for i, n in enumerate(names))])
    sources = {"train": "images.csv", "processor": {"size": 16}, "batch_size": 4, "num_workers": 0}
    _write(folder, "lit_fsdp.tasks.ImageClassification", {"config": VIT}, "lit_fsdp.tasks.ImageData", sources)


def make_speech(folder: Path) -> None:
    """A tiny speech model and prepared rows, and clips to prepare."""
    (folder / "prepared").mkdir()
    write_shard(folder / "prepared" / "shard-00000.jsonl", make_rows(8))
    tone = np.sin(np.arange(24000) / 20).astype(np.float32) / 2
    for name in ("a", "b"):
        soundfile.write(folder / f"{name}.wav", tone, 24000)
    lines = [json.dumps({"audio": f"{name}.wav", "text": f"This is {name}."}) + "\n" for name in ("a", "b")]
    (folder / "clips.jsonl").write_text("".join(lines))
    sources = {"train": "prepared", "tokenizer": "bytes", "batch_size": 2, "num_workers": 0}
    _write(folder, "lit_fsdp.tasks.TextToSpeech", {"config": make_config()}, "lit_fsdp.tasks.SpeechData", sources)


def make_voice(folder: Path) -> None:
    """A speech model with its codec, to speak with."""
    (folder / "voice").mkdir()
    save_model(folder / "voice")
    build_byte_tokenizer().save_pretrained(folder / "voice")
    (folder / "texts.txt").write_text("one\ntwo\n")


def make_own(folder: Path) -> None:
    """The task of the example."""
    shutil.copytree(ROOT / "examples" / "own_task", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__*"))
    change_settings(folder / "run.yaml", {f"trainer.{key}": value for key, value in TRAINER.items()})


def make_base(folder: Path) -> None:
    """A pretrained model in a folder, with its tokenizer."""
    make_text(folder)
    config = AutoConfig.for_model("llama", **{**LANGUAGE_MODELS["llama"], "vocab_size": 320})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    tokenizer = train_tokenizer((folder / "train.jsonl").read_text().split("\n"), TrainTokenizer(vocab_size=300))
    tokenizer.save_pretrained(folder / "base")
    changes = {"model.pretrained": "base", "model.config": GONE, "data.tokenizer": "base"}
    change_settings(folder / "run.yaml", changes)


def make_trained(folder: Path) -> None:
    """A run of ``make_text`` with its checkpoint."""
    make_text(folder)
    _train(folder)


def make_adapted(folder: Path) -> None:
    """A run of adapters over ``make_base`` with its checkpoint."""
    make_base(folder)
    change_settings(folder / "run.yaml", {"model.lora": {"r": 2}})
    _train(folder)


def make_single(folder: Path) -> None:
    """A run of ``make_text`` with a checkpoint in one file."""
    make_text(folder)
    change_settings(folder / "run.yaml", {"strategy.checkpoint_format": "single_file"})
    _train(folder)


def make_spoken(folder: Path) -> None:
    """A run of ``make_speech`` with its checkpoint."""
    make_speech(folder)
    _train(folder)


POINTS = {
    make.__name__.removeprefix("make_"): make
    for make in (
        *(make_text, make_image, make_speech, make_voice, make_own),
        *(make_base, make_trained, make_adapted, make_single, make_spoken),
    )
}


def _write(folder: Path, task: str, model: Mapping[str, Any], source: str, options: Mapping[str, Any]) -> None:
    content = {
        "monitoring": False,
        "trainer": TRAINER,
        "model": {"class_path": task, "init_args": model},
        "data": {"class_path": source, "init_args": options},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content))


def _train(folder: Path) -> None:
    (ended,) = fork_commands([Start(args=[*FIT.split(), "--trainer.logger=false"], folder=folder)])
    assert ended.code == 0, ended.err
    assert (folder / "checkpoints" / "last.ckpt").exists()


# Rows


def change_settings(path: Path, changes: Mapping[str, Any]) -> None:
    """Set or remove values of a configuration by their dotted keys."""
    config = yaml.safe_load(path.read_text())
    for dotted, value in changes.items():
        first, _, rest = dotted.partition(".")
        is_short = first in SHORT and rest.partition(".")[0] not in ("class_path", "init_args", "")
        *parents, last = f"{SHORT[first]}.{rest}".split(".") if is_short else dotted.split(".")
        if is_short and first == "strategy":
            config["trainer"].setdefault("strategy", {"class_path": "lit_fsdp.FSDP2Strategy"})
        inside = config
        for part in parents:
            inside = inside.setdefault(part, {})
        if value is GONE:
            inside.pop(last, None)
        else:
            inside[last] = value
    path.write_text(yaml.safe_dump(config, sort_keys=False))


def run_rows(rows: Sequence[tuple[str, Row]], points: Mapping[str, Path], folder: Path) -> list[str]:
    """Run rows, each on a copy of its starting point; return what is wrong with each, or an empty text."""
    starts, before = [], []
    for number, (point, row) in enumerate(rows):
        place = folder / str(number) / "user"
        shutil.copytree(points[point], place, symlinks=True)
        if row.settings:
            change_settings(place / "run.yaml", row.settings)
        for name, edit in row.files.items():
            _edit(place / name, edit)
        starts.append(
            Start(args=row.args.split(), folder=place, environ={"LIT_FSDP_CACHE": str(folder / "cache"), **row.environ})
        )
        before.append(list_contents(place))
    return [
        check_row(row, end, compare_contents(found, list_contents(start.folder)))
        for (_, row), end, start, found in zip(rows, fork_commands(starts), starts, before, strict=True)
    ]


def check_row(row: Row, ended: Ended, changes: Mapping[str, Sequence[str]]) -> str:
    """Return what is wrong with the end of a row; an empty text where all is well."""
    wrong = []
    lines = [line for line in ended.err.splitlines() if line.strip()]
    if ended.code != row.code:
        wrong.append(f"code {ended.code}")
    if ended.took_s is None or ended.took_s > LIMIT_S:
        wrong.append(f"took {ended.took_s} s")
    if row.code == 0:
        return f"{', '.join(wrong)}: {lines[-3:]}" if wrong else ""
    if not 0 < len(lines) <= MAX_LINES and not row.is_late:
        wrong.append(f"{len(lines)} lines")
    if "Traceback" in ended.err:
        wrong.append("traceback")
    wrong += [f"no {word!r}" for word in row.words if word not in ended.err]
    if ended.out and not row.is_late:
        wrong.append(f"printed {ended.out.splitlines()[0]!r}")
    seen = {what: names for what, names in changes.items() if names and not (row.is_late and what == "left")}
    wrong += [f"{what} {', '.join(names[:3])}" for what, names in seen.items()]
    return f"{', '.join(wrong)}: {lines[-3:]}" if wrong else ""


def list_contents(folder: Path) -> dict[str, bytes]:
    """Return what lies below a folder and what each file holds, nothing for all else; not what Python compiles."""
    found = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in found}


def compare_contents(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> dict[str, list[str]]:
    """Return the names that a command has left, removed or changed."""
    changed = sorted(name for name in before.keys() & after.keys() if before[name] != after[name])
    left, gone = sorted(after.keys() - before.keys()), sorted(before.keys() - after.keys())
    return {"left": left, "gone": gone, "changed": changed}


def _edit(path: Path, edit: Edit) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if edit is GONE:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif isinstance(edit, str):
        path.write_text(edit)
    elif isinstance(edit, bytes):
        path.write_bytes(edit)
    else:
        edit(path)
