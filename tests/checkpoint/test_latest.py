"""A run goes on from the newest checkpoint that is complete, and says what it passed over."""

import os
import zipfile
from pathlib import Path

import pytest
import torch

from lit_fsdp.checkpoint import latest
from lit_fsdp.checkpoint.latest import (
    SAVE_NUMBER,
    describe_interruption,
    find_last_checkpoint,
    find_last_number,
    find_other_checkpoint,
    is_whole,
)
from lit_fsdp.checkpoint.manifest import MANIFEST, describe_files, read_position, write_manifest
from lit_fsdp.checkpoint.reader import check_checkpoint, find_run, resolve_checkpoint
from lit_fsdp.checkpoint.remote import Location


def make(path: Path, second: int, *, is_whole: bool = True, save_number: int = 0, step: int | None = None) -> Path:
    path.mkdir(parents=True)
    (path / "part").write_text("content")
    dated = path
    if is_whole:
        write_manifest(path, describe_files([path / "part"]), save_number=save_number, step=step)
        dated = path / MANIFEST
    os.utime(dated, (second, second))
    return path


def test_the_newest_over_all_folders_is_taken_whatever_its_step_and_name(tmp_path: Path) -> None:
    make(tmp_path / "0" / "epoch=1-step=90.ckpt", 1)
    newest = make(tmp_path / "1" / "preempted-step=5.ckpt", 3)
    make(tmp_path / "1" / "epoch=0-step=4.ckpt", 2)
    (tmp_path / "1" / "last.ckpt").symlink_to("epoch=0-step=4.ckpt")
    said: list[str] = []
    folders = [tmp_path / "0", tmp_path / "1", tmp_path / "missing"]
    assert find_last_checkpoint(folders, said.append) == newest
    assert said == []
    make(tmp_path / "0" / "step=7.ckpt", 3)
    assert find_last_checkpoint(folders) == tmp_path / "0" / "step=7.ckpt"


def test_one_that_is_put_in_its_place_meanwhile_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "old.ckpt", 1, save_number=1)
    hidden = make(tmp_path / ".new.ckpt.incomplete", 2, save_number=2)

    def put_and_read(folder: Path) -> tuple[int, int | None] | None:
        if folder == hidden:
            hidden.rename(tmp_path / "new.ckpt")
        return read_position(folder)

    monkeypatch.setattr(latest, "read_position", put_and_read)
    assert find_last_checkpoint([tmp_path], pytest.fail) == tmp_path / "new.ckpt"


def test_what_is_newer_but_incomplete_is_passed_over_with_a_line(tmp_path: Path) -> None:
    good = make(tmp_path / "good.ckpt", 1)
    make(tmp_path / "cut.ckpt", 2, is_whole=False)
    (make(tmp_path / "short.ckpt", 3) / "part").write_text("")
    make(tmp_path / ".hidden.ckpt", 5)
    make(tmp_path / ".cut.ckpt.incomplete", 5, is_whole=False)
    (tmp_path / "last.ckpt").symlink_to("removed.ckpt")
    make(tmp_path / "older.ckpt", 0, is_whole=False)
    said: list[str] = []
    assert find_last_checkpoint([tmp_path], said.append) == good
    assert [line.split(":")[0] for line in said] == [
        f"{tmp_path}/last.ckpt leads nowhere",
        f"{tmp_path}/short.ckpt is not complete",
        f"{tmp_path}/cut.ckpt is not complete",
    ]
    assert all(line.endswith(str(good)) for line in said)


def test_what_is_passed_over_is_said_beside_the_output_of_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    whole = make(tmp_path / "checkpoints" / "step=1.ckpt", 1)
    make(tmp_path / "checkpoints" / "step=2.ckpt", 2, is_whole=False)
    assert resolve_checkpoint(tmp_path) == whole
    assert "step=2.ckpt is not complete" in caplog.text
    assert capsys.readouterr().out == ""  # which may be the audio of `speak --to_stdout true`


@pytest.mark.parametrize("name", ["last.ckpt", "step=6-val/loss=0.5.ckpt", "step=6-val/text/loss=0.5.ckpt"])
def test_the_run_of_a_checkpoint_is_found_whatever_folders_its_name_makes(tmp_path: Path, name: str) -> None:
    run = tmp_path / "lr=1" / "version_0"
    checkpoint = make(run / "checkpoints" / name, 1)
    assert find_run(checkpoint) is None
    (run / "config.yaml").touch()
    assert find_run(checkpoint) == run


def test_without_a_complete_one_there_is_none(tmp_path: Path) -> None:
    make(tmp_path / "cut.ckpt", 2, is_whole=False)
    said: list[str] = []
    assert find_last_checkpoint([tmp_path], said.append) is None
    assert said == [f"{tmp_path}/cut.ckpt is not complete, and there is no other checkpoint"]


@pytest.mark.parametrize("content", ["meta.pt", "checkpoint/shard.pt"], ids=["model_parallel", "deepspeed"])
def test_a_folder_of_another_strategy_is_not_taken_for_nothing(content: str, tmp_path: Path) -> None:
    for name, is_complete in (("epoch=0-step=1.ckpt", True), ("copied.ckpt", False)):
        own = make(tmp_path / name, 1, is_whole=is_complete)
        for kept in ("meta.pt", "random_0.pt"):
            (own / kept).touch()
    assert find_other_checkpoint([tmp_path]) is None
    other = tmp_path / "epoch=0-step=2.ckpt"
    (other / content).parent.mkdir(parents=True)
    (other / content).touch()
    os.utime(other, (2, 2))
    (tmp_path / "last.ckpt").symlink_to(other.name)
    assert find_other_checkpoint([tmp_path]) == other.resolve()
    assert f"--ckpt_path {other.resolve()} goes on" in describe_interruption([tmp_path])
    make(tmp_path / "epoch=0-step=3.ckpt", 3)
    assert find_other_checkpoint([tmp_path]) is None


def test_a_single_file_counts_if_it_is_not_cut_short(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(9)}, tmp_path / "whole.ckpt")
    os.utime(tmp_path / "whole.ckpt", (1, 1))
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "whole.ckpt").read_bytes()[:-30])
    assert find_last_checkpoint([tmp_path], lambda _: None) == tmp_path / "whole.ckpt"


def test_the_number_of_the_save_counts_whatever_clocks_and_copies_make_of_the_time(tmp_path: Path) -> None:
    make(tmp_path / "step=90.ckpt", 9, save_number=4, step=90)  # copied later
    newest = make(tmp_path / "went_back.ckpt", 1, save_number=5, step=50)  # after a resume from an earlier step
    make(tmp_path / "step=99.ckpt", 8)  # written before there were numbers
    (tmp_path / "last.ckpt").symlink_to("step=90.ckpt")
    said: list[str] = []
    assert find_last_checkpoint([tmp_path], said.append) == newest
    assert said == []
    assert find_last_number([tmp_path]) == 5
    later = make(tmp_path / "other.ckpt", 1, save_number=5, step=51)  # of a run beside it
    assert find_last_checkpoint([tmp_path]) == later
    single = tmp_path / "single.ckpt"
    torch.save({"state_dict": {}, "global_step": 3, SAVE_NUMBER: 6}, single)
    os.utime(single, (0, 0))
    assert find_last_checkpoint([tmp_path]) == single
    make(tmp_path / "cut.ckpt", 10, is_whole=False)
    (make(tmp_path / "short.ckpt", 1, save_number=7) / "part").write_text("")
    assert find_last_checkpoint([tmp_path], said.append) == single
    assert [Path(line.split(" is not complete")[0]).name for line in said] == ["cut.ckpt", "short.ckpt"]


def test_a_newer_file_of_a_strategy_that_numbers_no_saves_is_passed_over_with_a_line(tmp_path: Path) -> None:
    numbered = make(tmp_path / "0" / "step=5.ckpt", 2, save_number=1, step=5)
    for name, second in (("step=3", 1), ("step=7", 2.5), ("step=9", 3), ("other", 4)):  # of many, the newest is said
        (tmp_path / "1").mkdir(exist_ok=True)
        torch.save({"state_dict": {}, "global_step": 9}, tmp_path / "1" / f"{name}.ckpt")
        os.utime(tmp_path / "1" / f"{name}.ckpt", (second, second))
    (tmp_path / "1" / "last.ckpt").symlink_to("step=9.ckpt")
    said: list[str] = []
    folders = [tmp_path / "0", tmp_path / "1"]
    misfits: dict[Location, str] = {tmp_path / "1" / "other.ckpt": "it is another model"}
    assert find_last_checkpoint(folders, said.append, misfits.get) == numbered
    assert [Path(line.split()[0]).name for line in said] == ["other.ckpt", "step=9.ckpt"]
    assert "does not fit: it is another model" in said[0]
    assert "was saved by another strategy, which numbers no saves" in said[1]


def test_what_was_complete_when_its_writer_was_killed_counts_under_its_hidden_name(tmp_path: Path) -> None:
    make(tmp_path / ".last.ckpt.replaced", 1, save_number=1)
    newest = make(tmp_path / ".last.ckpt.incomplete", 1, save_number=2)
    make(tmp_path / ".other.ckpt.incomplete", 1, is_whole=False)
    said: list[str] = []
    assert find_last_checkpoint([tmp_path], said.append) == newest
    assert said == []


def test_a_link_to_itself_and_a_manifest_that_is_none_are_passed_over(tmp_path: Path) -> None:
    good = make(tmp_path / "good.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to("last.ckpt")
    for name, text in (("list", "[]"), ("number", "7"), ("deep", "[" * 100_000), ("files", '{"files": {"part": 3}}')):
        (make(tmp_path / f"{name}.ckpt", 2) / MANIFEST).write_text(text)
    said: list[str] = []
    assert find_last_checkpoint([tmp_path], said.append) == good
    assert len(said) == 5


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[1]", "{}", '{"files": [1]}', '{"files": {}}', "[" * 99_999, '{"files": {"a": {"bytes": 1}}}'),
        *('{"files": {"a": {"bytes": 1e999, "crc32": 1}}}', '{"files": {"a": {"bytes": true, "crc32": -1}}}'),
        *('{"files": {"a": {"bytes": [1], "crc32": {}}}}', '{"files": {"a": {"bytes": 1' + "1" * 5000 + "}}}"),
    ],
    ids=range(12),
)
def test_a_list_of_files_that_is_none_is_said_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=r"complete\.json is damaged; choose another checkpoint$"):
        check_checkpoint(tmp_path)
    assert not is_whole(tmp_path)
    assert read_position(tmp_path) is None


def test_nobody_waits_for_a_pipe_or_follows_a_link_to_itself(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(ValueError, match=r"complete\.json is damaged"):
        check_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe.ckpt")
    (tmp_path / "last.ckpt").symlink_to("last.ckpt")
    with pytest.raises(ValueError, match=r"^checkpoint: \S+pipe.ckpt: is a pipe, a socket or a device"):
        resolve_checkpoint(tmp_path / "pipe.ckpt")
    with pytest.raises(ValueError, match=r"^checkpoint: \S+last.ckpt: is a link to last.ckpt, which is not there"):
        resolve_checkpoint(tmp_path / "last.ckpt")


def test_no_damage_ends_the_search_and_what_has_its_end_is_refused_when_it_is_read(tmp_path: Path) -> None:
    good = tmp_path / "good.ckpt"
    torch.save({"state_dict": {}, "global_step": 3}, good)
    os.utime(good, ns=(0, 0))
    for number in ("Infinity", "NaN", "1e999", "9" * 5000, "[" * 100_000):
        (tmp_path / "folder.ckpt").mkdir(exist_ok=True)
        (tmp_path / "folder.ckpt" / MANIFEST).write_text(f'{{"files": {{"a": {{"bytes": {number}, "crc32": 0}}}}}}')
        assert find_last_checkpoint([tmp_path], lambda _: None) == good
    # Each raises another error: of an index, a key, a type, an assertion, ...
    for damaged in (
        b"",
        b".",
        b"0.",
        b"h\x05.",
        b"K\x01b.",
        b"R.",
        b"(u.",
        b"K\x01K\x02s.",
        b"]K\x01K\x02s.",
        b"K\x01Q.",
    ):
        with zipfile.ZipFile(good) as read, zipfile.ZipFile(tmp_path / "damaged.ckpt", "w") as written:
            for name in read.namelist():
                written.writestr(name, b"\x80\x02" + damaged if name.endswith("data.pkl") else read.read(name))
        found = find_last_checkpoint([tmp_path], lambda _: None)
        assert found == tmp_path / "damaged.ckpt"
        with pytest.raises(ValueError, match=r"damaged\.ckpt cannot be read safely: .*; choose another checkpoint$"):
            check_checkpoint(found)
