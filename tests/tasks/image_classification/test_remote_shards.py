"""Tar shards behind a URL are read in place, part by part, and give the same as those on a disk."""

import re
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from image_training import write_folder, write_shards

from lit_fsdp.checkpoint.remote import RemotePath
from lit_fsdp.tasks import ImageData, Pixels
from lit_fsdp.tasks.image_classification import shards
from lit_fsdp.tasks.image_classification.images import Images
from lit_fsdp.tasks.image_classification.sources import Fields, open_images
from ranks import run_ranks


class Parts(SimpleHTTPRequestHandler):
    """Gives parts of files, as any server of data does; the standard one gives whole files only."""

    has_parts = True
    gives: list[tuple[str, int]] = []  # noqa: RUF012  what was asked for: file and number of bytes

    def do_GET(self) -> None:
        path, wanted = Path(self.translate_path(self.path)), self.headers.get("Range")
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "") if self.has_parts else None
        first, last = (int(found[1]), int(found[2] or len(data) - 1)) if found else (0, len(data) - 1)
        last = min(last, len(data) - 1)
        self.send_response(206 if found else 200)
        if found:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.gives.append((path.name, last + 1 - first))  # before whoever asked can go on
        self.wfile.write(data[first : last + 1])

    def do_HEAD(self) -> None:
        path = Path(self.translate_path(self.path))
        self.send_response(200 if path.is_file() else 404)
        self.send_header("Content-Length", str(path.stat().st_size if path.is_file() else 0))
        self.send_header("Accept-Ranges", "bytes" if self.has_parts else "none")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Whole(Parts):
    has_parts = False


@pytest.fixture(params=[Parts])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    (tmp_path / "shards").mkdir()
    write_shards(write_folder(tmp_path / "train", {"cat": 3, "dog": 2, "eel": 1}), tmp_path / "shards")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(request.param, directory=str(tmp_path / "shards"))) as made:
        Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_address[1]}"
        made.shutdown()


def find(source: Path | str) -> Images:
    return open_images(str(source), split=None, split_of="train", fields=Fields(image="image", label="label"))


def list_pixels(images: Images) -> list[np.ndarray]:
    return [np.asarray(images.read(i)) for i in range(len(images))]


@pytest.mark.full
def test_shards_of_a_server_hold_what_those_on_a_disk_hold(server: str, tmp_path: Path) -> None:
    local = find(tmp_path / "shards")
    remote = [f"{server}/part-{{000..001}}.tar", f"file://{tmp_path}/shards", f"file://{tmp_path}/shards/part-*.tar"]
    for source in remote:
        found = find(source)
        assert list(found.labels or []) == list(local.labels or []) == ["cat"] * 3 + ["dog"] * 2 + ["eel"]
        assert all(np.array_equal(a, b) for a, b in zip(list_pixels(found), list_pixels(local), strict=True))
    Parts.gives.clear()
    images = find(f"{server}/part-000.tar")
    images.read(1)
    name, size = Parts.gives[-1]
    assert name == "part-000.tar"
    assert size < (tmp_path / "shards" / name).stat().st_size / 4  # that image alone
    assert images.locate(1) == f"{server}/part-000.tar member a/01.png"


@pytest.mark.full
def test_workers_read_from_a_server(server: str) -> None:
    data = ImageData(train=f"{server}/part-{{000..001}}.tar", processor=Pixels(size=8), batch_size=3, num_workers=1)
    data.setup("fit")
    labels = torch.cat([batch["labels"] for batch in data.train_dataloader()])
    assert sorted(labels.tolist()) == [0, 0, 0, 1, 1, 2]


def count_images(url: str) -> None:
    assert len(find(url)) == 6


@pytest.mark.full
def test_the_headers_of_a_shard_are_read_by_one_rank_alone(server: str) -> None:
    Parts.gives.clear()
    run_ranks(count_images, f"{server}/part-{{000..001}}.tar")
    assert sorted(name for name, _ in Parts.gives) == ["part-000.tar", "part-001.tar"]


def fail(_: str) -> None:
    raise ValueError("nothing there")


def list_apart(url: str, fails: int) -> None:
    """Let one rank find nothing where the other finds shards."""
    if dist.get_rank() == fails:
        pytest.MonkeyPatch().setattr(shards, "_list_urls", fail)  # this process ends with the test
    if fails == 0:
        with pytest.raises(ValueError, match="nothing there"):
            find(url)
    else:
        count_images(url)


@pytest.mark.full
@pytest.mark.parametrize("fails", [0, 1])
def test_all_ranks_take_the_listing_of_the_first_and_fail_as_it_does(fails: int, server: str) -> None:
    run_ranks(list_apart, f"{server}/part-{{000..001}}.tar", fails)


@pytest.mark.full
def test_a_signed_url_is_read_and_its_signature_is_not_told(server: str) -> None:
    images = find(f"{server}/part-{{000..001}}.tar?token=secret")
    assert len(images) == len(list_pixels(images)) == 6
    assert images.locate(1) == f"{server}/part-000.tar member a/01.png"
    with pytest.raises(ValueError, match=r"part-009\.tar: not to be read in parts") as caught:
        find(f"{server}/part-009.tar?token=secret")
    assert "secret" not in str(caught.value)


def test_a_server_that_answers_later_is_asked_again_for_headers(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, answer = [503, 503], Parts.do_GET
    monkeypatch.setattr(shards, "_WAIT_S", 0)
    monkeypatch.setattr(Parts, "do_GET", lambda self: self.send_error(answers.pop()) if answers else answer(self))
    assert len(find(f"{server}/part-000.tar")) == 4
    assert answers == []


def test_a_listing_that_fails_is_tried_again_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [PermissionError("no access"), OSError("slow down"), OSError("slow down")]

    def glob(*_: Any, **__: Any) -> None:
        raise errors.pop()

    monkeypatch.setattr(shards, "_WAIT_S", 0)
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.glob", glob)
    with pytest.raises(ValueError, match=r"file://.*: not to be listed: no access; see whether it is there"):
        find(f"file://{tmp_path}/*.tar")
    assert errors == []


def test_what_is_no_tar_file_is_said_as_of_one_on_a_disk(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_text("x" * 600)
    with pytest.raises(ValueError, match=r"^train: file://.*a\.tar: not readable as a tar file without") as caught:
        ImageData(train=f"file://{tmp_path}/a.tar").setup("fit")
    assert "in parts" not in str(caught.value)


@pytest.mark.parametrize("server", [Whole], indirect=True)
def test_a_server_that_gives_whole_files_only_is_refused(server: str) -> None:
    with pytest.raises(ValueError, match=r"part-000\.tar: not to be read in parts: Cannot seek.*; see whether"):
        find(f"{server}/part-000.tar")


def test_what_is_not_there_is_named_and_a_server_that_is_gone_is_no_bad_image(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"part-009\.tar: not to be read in parts: .*; see whether it is there"):
        find(f"{server}/part-009.tar")
    with pytest.raises(ValueError, match=r"got 'nothing://x\.tar': fsspec knows no scheme 'nothing'"):
        find("nothing://x.tar")
    images = find(f"{server}/part-000.tar")
    monkeypatch.setattr(shards, "_WAIT_S", 0)
    monkeypatch.setattr(Parts, "do_GET", lambda self: self.send_error(503))
    with pytest.raises(RuntimeError, match=r"part-000\.tar: \d+ bytes at \d+ could not be read, tried 4 times: 503"):
        images.read(0)


@pytest.mark.parametrize("name", ["memory", pytest.param("s3", marks=pytest.mark.full)])
def test_a_folder_in_a_store_holds_what_one_on_a_disk_holds(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store: RemotePath = request.getfixturevalue(name)
    folder = write_folder(tmp_path / "train", {"cat": 3, "dog": 2, "eel": 1})
    for path in folder.rglob("*.png"):
        with (store / str(path.relative_to(folder))).open("wb") as file:
            file.write(path.read_bytes())
    local, found = find(folder), find(str(store))
    assert list(found.labels or []) == list(local.labels or []) == ["cat"] * 3 + ["dog"] * 2 + ["eel"]
    assert all(np.array_equal(a, b) for a, b in zip(list_pixels(found), list_pixels(local), strict=True))
    assert found.measure is not None
    assert found.measure(1) == (folder / "cat" / "001.png").stat().st_size
    loose = find(f"{store}/cat")
    assert (loose.labels, len(loose)) == (None, 3)
    data = ImageData(train=str(store), processor=Pixels(size=8), batch_size=3, num_workers=0)
    data.setup("fit")
    assert data.train_dataloader().fingerprint
    (store / "loose.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds images beside folders of classes, such as loose\.png"):
        find(str(store))
    mixed = open_images(str(store), split=None, split_of="predict", fields=Fields(image="image", label="label"))
    assert (len(mixed), mixed.labels) == (7, None)
    (store / "cat" / "000.png").remove()
    with pytest.raises(RuntimeError, match=r"cat/000\.png: could not be read"):
        loose.read(0)


def test_a_folder_in_a_store_holds_shards_or_folders_of_images(memory: RemotePath, tmp_path: Path) -> None:
    write_shards(write_folder(tmp_path / "train", {"cat": 3, "dog": 2}), tmp_path)
    (memory / "part-000.tar").write_bytes((tmp_path / "part-000.tar").read_bytes())
    (memory / "preview.png").write_bytes(b"")
    assert len(find(str(memory))) == 4
    (memory / "cat" / "000.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"shards such as part-000\.tar beside folders of images such as cat/000\.png"):
        find(str(memory))
    assert len(find(f"{memory}/*.tar")) == 4
    (memory / "part-000.tar").rename(memory / "cat" / "part-000.tar")
    (memory / "preview.png").remove()
    assert find(str(memory)).labels == ["cat"]
