"""Every kind of source gives the same images and labels, and names what is wrong."""

import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from image_training import list_files, write_folder, write_shards
from PIL import ExifTags, Image, PngImagePlugin, features

from lit_fsdp.tasks.image_classification.images import SUFFIXES, BadImageError, Images
from lit_fsdp.tasks.image_classification.sources import Fields, fetch_images, open_images, sort_labels

FIELDS = Fields(image="image", label="label")


def find(source: Path | str, **options: str) -> Images:
    return open_images(str(source), split=options.get("split"), split_of="train", fields=FIELDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images") / "train", {"cat": 3, "dog": 2, "eel": 1})


def write_csv(folder: Path, out: Path) -> Path:
    lines = "".join(f"{folder / name},{label}\n" for name, label in list_files(folder))
    (out / "train.csv").write_text("image,label\n" + lines)
    return out / "train.csv"


def write_jsonl(folder: Path, out: Path) -> Path:
    rows = [{"image": str(folder / name), "label": label} for name, label in list_files(folder)]
    (out / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out / "train.jsonl"


def write_parquet(folder: Path, out: Path) -> Path:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    rows = [{"image": str(folder / name), "label": label} for name, label in list_files(folder)]
    pq.write_table(pa.Table.from_pylist(rows), out / "train.parquet")
    return out / "train.parquet"


@pytest.mark.parametrize("kind", ["large_string", "string_view", "dictionary"])
def test_paths_in_parquet_are_relative_to_it_whatever_type_its_text_has(kind: str, folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.dictionary(pa.int32(), pa.string()) if kind == "dictionary" else getattr(pa, kind)()
    names, labels = zip(*list_files(folder), strict=True)
    rows = {"image": pa.array(names, pa.string()).cast(text), "label": pa.array(labels, pa.string()).cast(text)}
    table = folder / f"{kind}.parquet"  # beside the folders of the classes
    pq.write_table(pa.table(rows), table)
    found = find(table)
    table.unlink()
    assert list(found.labels or []) == list(labels)
    assert np.array_equal(np.asarray(found.read(3)), np.asarray(Image.open(folder / names[3])))


def write_parquet_with_images(folder: Path, out: Path) -> Path:
    import datasets

    rows = {"image": [str(folder / n) for n, _ in list_files(folder)], "label": [c for _, c in list_files(folder)]}
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("string"))
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(out / "inside.parquet"))
    return out / "inside.parquet"


def write_saved(folder: Path, out: Path) -> Path:
    import datasets

    names = ["cat", "dog", "eel"]
    rows = {
        "image": [str(folder / n) for n, _ in list_files(folder)],
        "label": [names.index(c) for _, c in list_files(folder)],
    }
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=names))
    datasets.DatasetDict(train=datasets.Dataset.from_dict(rows, features=features)).save_to_disk(str(out / "saved"))
    return out / "saved"


def write_json_shards(folder: Path, out: Path) -> str:
    return str(Path(write_shards(folder, out, "json")).parent)


WRITERS: list[Callable[[Path, Path], Path | str]] = [
    write_csv,
    write_jsonl,
    write_parquet,
    write_parquet_with_images,
    write_saved,
    write_shards,
    write_json_shards,
]


@pytest.mark.parametrize("write", WRITERS)
def test_all_kinds_of_sources_hold_the_same(
    write: Callable[[Path, Path], Path | str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    expected, found = find(folder), find(write(folder, tmp_path))
    assert (found.class_names or sorted(set(found.labels or []))) == expected.class_names == ["cat", "dog", "eel"]
    assert list(found.labels or []) == list(expected.labels or []) == ["cat"] * 3 + ["dog"] * 2 + ["eel"]
    for i in range(len(expected)):
        assert np.array_equal(np.asarray(found.read(i)), np.asarray(expected.read(i)))


def test_hidden_files_and_folders_are_no_images(folder: Path, tmp_path: Path) -> None:
    copy = write_folder(tmp_path / "copy", {"cat": 2})
    (tmp_path / "shards").mkdir()
    shards = Path(write_json_shards(copy, tmp_path / "shards"))
    (shards / "._hidden.tar").write_bytes(b"no tar")
    for name in ("._top.png", "cat/._000.png", "cat/.thumbs/0.png", ".git/0.png"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes(b"no image")
    assert list(find(copy).labels or []) == list(find(shards).labels or []) == ["cat"] * 2


def test_digits_are_split_once_and_for_all() -> None:
    pytest.importorskip("sklearn")
    train, test = find("digits"), find("digits", split="test")
    assert (len(train), len(test)) == (1437, 360)
    pixels = {np.asarray(images.read(i)).tobytes() for images in (test,) for i in range(len(images))}
    assert len(pixels) == 360
    assert not pixels & {np.asarray(train.read(i)).tobytes() for i in range(len(train))}
    counts = [list(test.labels or []).count(str(digit)) for digit in range(10)]
    assert min(counts) >= 34
    assert np.asarray(train.read(0)).max() > 200  # 16 levels, spread over 8 bits


def test_an_image_that_is_damaged_is_named(folder: Path, tmp_path: Path) -> None:
    copy = write_folder(tmp_path / "copy", {"cat": 2})
    cut = (copy / "cat" / "000.png").read_bytes()[:60]
    (copy / "cat" / "000.png").write_bytes(cut)
    (copy / "cat" / "001.png").write_text("no image at all")
    images = find(copy)
    for i in range(2):
        with pytest.raises(BadImageError, match=rf"copy/cat/00{i}\.png: "):
            images.read(i)
    (tmp_path / "gone.csv").write_text("image,label\nnowhere.png,cat\n")
    with pytest.raises(BadImageError, match=r"nowhere\.png: .*No such file"):
        find(tmp_path / "gone.csv").read(0)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_a_damaged_avif_whose_decoder_raises_runtime_errors_is_a_bad_image(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=np.uint8)).save(tmp_path / "0.avif")
    data = (tmp_path / "0.avif").read_bytes()
    pixels = data.index(b"mdat") + 4
    for i, damaged in enumerate((data[:pixels] + b"\xff" * (len(data) - pixels), data.replace(b"pitm", b"free"))):
        (tmp_path / "a" / f"{i}.avif").write_bytes(damaged)
    (tmp_path / "0.avif").unlink()
    images = find(tmp_path)
    for i in range(2):
        with pytest.raises(BadImageError, match=rf"a/{i}\.avif: "):
            images.read(i)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_every_kind_of_pixel_becomes_rgb(mode: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    ramp = np.linspace(0, 255, 64).reshape(8, 8)
    image = (
        Image.fromarray((ramp * 257).astype(np.uint16)) if mode == "I;16" else Image.fromarray(ramp.astype(np.uint8))
    )
    image = image if mode == "I;16" else image.convert(mode)
    image.save(tmp_path / "a" / f"0.{'tif' if mode == 'CMYK' else 'png'}")
    pixels = np.asarray(find(tmp_path).read(0)).astype(float)
    assert pixels.shape == (8, 8, 3)
    assert np.abs(pixels.mean(2) - ramp).max() <= 4


@pytest.mark.parametrize("ending", SUFFIXES)
def test_every_ending_of_an_image_is_read(ending: str, tmp_path: Path) -> None:
    if not features.check({".avif": "avif", ".webp": "webp"}.get(ending, "zlib")):
        pytest.skip("Pillow was built without it")
    (tmp_path / "a").mkdir()
    Image.new("RGB", (8, 8), (200, 100, 0)).save(tmp_path / "a" / f"0{ending}")
    (tmp_path / "a" / f"0{ending}").rename(tmp_path / "a" / f"0{ending.upper()}")
    assert np.abs(np.asarray(find(tmp_path).read(0)).astype(int) - (200, 100, 0)).max() <= 4


@pytest.mark.parametrize("wide", [False, True])
def test_sixteen_bits_reach_from_black_to_white_and_what_has_no_range_is_refused(wide: bool, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()

    def read(values: list[float], kind: type) -> list[int]:
        Image.fromarray(np.array([values], dtype=kind)).save(tmp_path / "a" / "0.tif")
        return [int(value) for value in np.asarray(find(tmp_path).read(0))[0, :, 0]]

    assert read([0, 4095, 65_535], np.int32 if wide else np.uint16) == [0, 15, 255]
    refused: list[tuple[list[float], type]] = [([-1, 5], np.int32), ([0, 65_536], np.int32)]
    for values, kind in refused if wide else [([0.0, 1.0], np.float32), ([0.0, 255.0], np.float32)]:
        with pytest.raises(BadImageError, match=r"a/0\.tif: .* no defined range: convert it to 8 or 16 bits"):
            read(values, kind)


_TURN_BACK = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def make_upright() -> Image.Image:
    """Return an image without symmetry."""
    return Image.fromarray(np.arange(12 * 8, dtype=np.uint8).reshape(12, 8)).convert("RGB")


@pytest.mark.parametrize("ending", ["jpg", "png", "tif", "webp", "avif"])
def test_an_image_is_turned_as_its_exif_says(ending: str, tmp_path: Path) -> None:
    if ending == "avif" and not features.check("avif"):
        pytest.skip("Pillow was built without it")
    (tmp_path / "a").mkdir()
    upright = make_upright()
    for orientation, turn in _TURN_BACK.items():
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        stored = upright if turn is None else upright.transpose(turn)
        options: dict[str, Any] = {"lossless": True} if ending == "webp" else {}
        stored.save(tmp_path / "a" / f"{orientation}.{ending}", exif=exif, **options)
    images = find(tmp_path)
    assert len(images) == 8
    for i in range(8):
        pixels = np.asarray(images.read(i)).astype(int)
        assert pixels.shape == (12, 8, 3)
        assert np.abs(pixels - np.asarray(upright)).mean() < 4, images.locate(i)


@pytest.mark.filterwarnings("ignore")
def test_damaged_exif_makes_no_image_bad(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    exif = Image.Exif()
    exif.update({ExifTags.Base.Orientation: 6, ExifTags.Base.Make: "maker", ExifTags.Base.XResolution: 72.0})
    draw = random.Random(0)
    for i in range(150):
        data = bytearray(exif.tobytes())
        for _ in range(draw.choice([1, 2, 4])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        data = data if i % 3 else data[: draw.randrange(len(data))]
        make_upright().save(tmp_path / "a" / f"{i:03d}.webp", exif=bytes(data), lossless=True)
    text = PngImagePlugin.PngInfo()
    text.add_text("Raw profile type exif", "\nexif\n4\nno hexadecimals")
    make_upright().save(tmp_path / "a" / "999.png", pnginfo=text)
    images = find(tmp_path)
    found = [images.read(i) for i in range(len(images))]
    assert np.array_equal(np.asarray(found[-1]), np.asarray(make_upright()))
    assert {image.size for image in found} == {(8, 12), (12, 8)}  # in some of them the orientation is undamaged


@pytest.mark.full
@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({"a/0.txt": ""}, ".", r"no images: expected .*/<class>/<image>"),
        ({"a/0.png": "", "b/c.txt": ""}, ".", r"no images in b; remove empty folders"),
        ({"a/0.png": "", "1.png": ""}, ".", r"holds images beside folders of classes, such as 1\.png"),
        (
            {"a.tar": "", "b/c/0.png": ""},
            ".",
            r"holds shards such as a\.tar beside folders of images such as b/c/0\.png; name the shards alone",
        ),
        ({"t.csv": "image, label,label \nx.png,a,b\n"}, "t.csv", r"t\.csv line 2: the header names 'label' twice"),
        ({"t.csv": "image,label\nx.png,  \n"}, "t.csv", r"t\.csv line 2: label is missing"),
        (
            {"train/a/0.png": "", "val/a/0.png": ""},
            ".",
            r"several splits, such as train/ and val/: expected one, such as /\S*/train or /\S*/val; or name",
        ),
        (
            {"in-train-0.tar": "", "in-val-0.tar": ""},
            ".",
            r"one, such as /\S*/in-train-\*\.tar or /\S*/in-val-",
        ),
        ({"t.csv": "file,label\nx.png,a\n"}, "t.csv", r"has no column 'image', but file, label; set image_field"),
        ({"t.csv": "image;label\nx.png;a\n"}, "t.csv", r"t\.csv line 1: the columns are separated by semicolons"),
        ({"t.csv": 'image;label\n"x.png";"a"\n'}, "t.csv", r"t\.csv line 1: the columns are separated by semicolons"),
        ({"t.csv": "image,label\n\na.png\n"}, "t.csv", r"t\.csv line 3: has 1 fields, the header has 2; quote"),
        ({"t.csv": "image\tlabel\nx.png\ta\n"}, "t.csv", r"t\.csv line 1: the columns are separated by tabs: save it"),
        ({"t.csv": "image,label\nx.png,\n"}, "t.csv", r"t\.csv line 2: label is missing"),
        ({"t.jsonl": '{"image": 3}\n'}, "t.jsonl", r"line 1: image is a number \(3\): expected the path"),
        ({"t.jsonl": "{\n"}, "t.jsonl", r"line 1: not valid JSON"),
        (
            {"t.csv": "image,label,label\nx.png,a,b\n"},
            "t.csv",
            r"t\.csv line 1: the header names 'label' twice; rename",
        ),
        ({"t.csv": "image,label\nx.png,a\ny.png,a,b\n"}, "t.csv", r"line 3: has 3 fields, the header has 2; quote"),
        ({"t.csv": "image,label\nx.png\n"}, "t.csv", r"t\.csv line 2: has 1 fields, the header has 2; quote"),
        ({"t.jsonl": '{"image": "x", "label": ["a"]}\n'}, "t.jsonl", r"line 1: label is a list .*: expected one class"),
        (
            {"t.jsonl": '{"image": "x", "label": true}\n'},
            "t.jsonl",
            r"line 1: label is true or false \(True\): expected one class",
        ),
        ({"t.csv": "image,label\na.png,\udce4\n"}, "t.csv", r"t\.csv line 2: not UTF-8 \(byte 0xe4 at column 7\)"),
        ({"t.jsonl": "\udce4\n"}, "t.jsonl", r"t\.jsonl line 1: not UTF-8 \(byte 0xe4 at column 1\)"),
        ({"t.csv": 'image,label\na.png,a\n"b.png,b\n'}, "t.csv", r"t\.csv line 3: not valid CSV: unexpected end"),
        ({"t.jsonl": '{"image": "x", "label": NaN}\n'}, "t.jsonl", r"line 1: label is a number \(nan\): expected one"),
        ({"t.jsonl": "\x1f\udc8b\x08\0"}, "t.jsonl", r"t\.jsonl line 1: not text, but gzip: unpack it"),
        ({"t.jsonl": "[" * 99_999}, "t.jsonl", r"t\.jsonl line 1: not valid JSON: nested too deeply"),
        ({"t.parquet": "PAR1"}, "t.parquet", r"t\.parquet: not readable as Parquet"),
        ({"t.tar": "x" * 600}, "t.tar", r"not readable as a tar file"),
        ({}, "p-{0..1}.tar", r"p-0\.tar: no such file, of 2 shards"),
        ({"t.xlsx": ""}, "t.xlsx", r"expected a folder with one folder for each class"),
    ],
)
def test_what_is_no_source_is_refused_with_the_place(
    files: dict[str, str], source: str, message: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message):
        find(tmp_path / source)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "image, label\na.png, cat\n b.png ,cat \n"),
        ("t.jsonl", '{"image": "a.png", "label": "cat "}\n{"image": "b.png", "label": "\\tcat"}\n'),
    ],
)
def test_white_space_around_a_label_makes_no_other_class(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    found = find(tmp_path / name)
    assert found.labels == ["cat", "cat"]
    assert [found.locate(i) for i in range(2)] == [str(tmp_path / "a.png"), str(tmp_path / "b.png")]


def test_a_number_is_one_class_however_json_spells_it(tmp_path: Path) -> None:
    labels = ["1", "1.0", "1e0", '"1"', "10.0", "0.5"]
    rows = "".join(f'{{"image": "{i}.png", "label": {label}}}\n' for i, label in enumerate(labels))
    (tmp_path / "t.jsonl").write_text(rows)
    assert find(tmp_path / "t.jsonl").labels == ["1", "1", "1", "1", "10", "0.5"]


def test_folders_of_numbers_are_classes_by_value(tmp_path: Path) -> None:
    found = find(write_folder(tmp_path / "train", {"10": 1, "9": 2, "2": 1}))
    assert found.class_names == ["2", "9", "10"]
    assert [found.locate(i).split("/")[-2] for i in range(4)] == found.labels
    zeros = [f"{'0' * i}1" for i in range(8)]
    assert sort_labels([*zeros, "0", "12", "3"]) == ["0", *zeros[::-1], "3", "12"]


def test_a_line_separator_inside_of_json_ends_no_row(tmp_path: Path) -> None:
    rows = [{"image": "a\u2028b.png", "label": "caf\u00e9"}, {"image": "c.png", "label": "c\x85at"}]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "t.jsonl").write_bytes(text.encode())
    found = find(tmp_path / "t.jsonl")
    assert list(found.labels or []) == ["caf\u00e9", "c\x85at"]
    assert found.locate(0) == str(tmp_path / "a\u2028b.png")


def save_rows(out: Path, labels: list[Any]) -> str:
    import datasets

    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "png")
    rows = {"image": [{"bytes": buffer.getvalue(), "path": None}] * len(labels), "label": labels}
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("string"))
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(out))
    return str(out)


def test_slices_of_a_saved_data_set_do_not_overlap_and_unknown_splits_are_refused(tmp_path: Path) -> None:
    source = save_rows(tmp_path / "saved", [f"c{i}" for i in range(10)])
    first, rest = (
        open_images(source, split=split, split_of="train", fields=FIELDS).labels
        for split in ("train[:90%]", "train[90%:]")
    )
    assert [*(first or []), *(rest or [])] == [f"c{i}" for i in range(10)]
    assert len(rest or []) == 1
    with pytest.raises(ValueError, match=r"split 'nonsense': .* leave it out, or take a slice"):
        open_images(source, split="nonsense", split_of="train", fields=FIELDS)


def test_a_slice_of_a_split_that_was_saved_is_taken(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"cat": 4, "dog": 4})
    found = open_images(
        str(write_saved(folder, tmp_path)),
        split="train[:25%]",
        split_of="train",
        fields=FIELDS,
    )
    assert len(found) == len(found.labels or []) == 2


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_row_without_a_class_is_no_class_and_only_predicted(tmp_path: Path, nothing: str | None) -> None:
    source = save_rows(tmp_path / "saved", ["cat", nothing])
    with pytest.raises(ValueError, match="row 2: label is missing: expected the name of a class"):
        open_images(source, split=None, split_of="train", fields=FIELDS)
    assert open_images(source, split=None, split_of="predict", fields=FIELDS).labels is None


def test_data_sets_and_tables_of_them_name_classes_and_spaces_around_make_no_other(tmp_path: Path) -> None:
    import datasets

    assert find(save_rows(tmp_path / "text", ["cat", " cat"])).labels == ["cat", "cat"]
    rows = {"image": [{"bytes": b"", "path": None}] * 3, "label": [0, 1, 2]}
    kind = datasets.ClassLabel(names=["eel", "cat ", "cat"])
    features = datasets.Features(image=datasets.Image(), label=kind)
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "names"))
    paths = rows | {"image": ["0.png", "1.png", "2.png"]}
    of_paths = datasets.Features(image=datasets.Value("string"), label=kind)
    datasets.Dataset.from_dict(paths, features=of_paths).to_parquet(tmp_path / "names.parquet")
    for place in ("names", "names.parquet"):
        found = find(tmp_path / place)
        assert (found.class_names, found.labels) == (["eel", "cat"], ["eel", "cat", "cat"])


def write_cells(path: Path, cells: list[Any], kind: Any) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"image": pa.array(cells, kind), "label": ["cat"] * len(cells)}), path)
    return path


def test_paths_in_structs_of_parquet_are_relative_to_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    expected = np.asarray(Image.open(folder / "cat" / "001.png"))
    alone, both = pa.struct({"path": pa.string()}), pa.struct({"bytes": pa.binary(), "path": pa.string()})
    for number, kind in enumerate((alone, both)):
        table = write_cells(folder / f"{number}.parquet", [{"path": "cat/001.png"}], kind)
        found = find(table)
        table.unlink()
        assert np.array_equal(np.asarray(found.read(0)), expected)
        assert found.fetch is not None
        assert found.fetch(0) == (folder / "cat" / "001.png").read_bytes()


def test_a_cell_without_an_image_is_a_bad_image_and_lists_are_no_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    cells: list[tuple[list[Any], Any]] = [([b"", None], pa.binary()), ([None, {"path": None}], struct)]
    for number, (values, kind) in enumerate(cells):
        found = find(write_cells(tmp_path / f"{number}.parquet", values, kind))
        with pytest.raises(BadImageError, match=r"\.parquet row 2: image is null: expected an image"):
            found.read(1)
    for kind, cell in ((pa.list_(pa.binary()), [b"a"]), (pa.struct({"x": pa.string()}), {"x": "a"})):
        with pytest.raises(ValueError, match=r"t\.parquet row 1: image is .*: expected the path of an image"):
            find(write_cells(tmp_path / "t.parquet", [cell], kind))


@pytest.mark.parametrize("label", [[["a"], ["b"]], [True, False], [{"a": 1}, {"a": 2}]])
def test_a_label_of_a_data_set_is_one_class(tmp_path: Path, label: list[Any]) -> None:
    import datasets

    rows = {"image": [{"bytes": b"", "path": None}] * 2, "label": label}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"saved train row 1: label is .*: expected one class"):
        find(tmp_path / "saved")


@pytest.mark.parametrize("name", ["typo.csv", "typo.jsonl", "typo.parquet", "typo.tar", "typo.png"])
def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("asked the Hub"))
    fetch_images(name, split=None, split_of="train")
    with pytest.raises(ValueError, match=rf"{name}: no such file"):
        open_images(name, split=None, split_of="train", fields=FIELDS)


def test_one_image_may_be_predicted(folder: Path) -> None:
    images = open_images(str(folder / "cat" / "000.png"), split=None, split_of="predict", fields=FIELDS)
    assert (len(images), images.labels) == (1, None)
    assert np.array_equal(np.asarray(images.read(0)), np.asarray(find(folder).read(0)))


def test_images_beside_folders_of_them_are_predicted_without_classes(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "mixed")
    shutil.copy(folder / "eel" / "000.png", tmp_path / "mixed" / "loose.png")
    images = open_images(str(tmp_path / "mixed"), split=None, split_of="predict", fields=FIELDS)
    assert (len(images), images.labels) == (7, None)
    places = sorted(str(Path(images.locate(i)).relative_to(tmp_path / "mixed")) for i in range(7))
    assert places == [*sorted(name for name, _ in list_files(folder)), "loose.png"]


def test_pipes_and_links_to_nothing_are_no_sources(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "link.csv").symlink_to("gone.csv")
    with pytest.raises(ValueError, match=r"pipe\.csv: is a pipe, a socket or a device"):
        find(tmp_path / "pipe.csv")
    with pytest.raises(ValueError, match=r"link\.csv: is a link to gone\.csv, which is not there"):
        find(tmp_path / "link.csv")


def test_folders_behind_links_are_read_and_broken_links_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "store", {"one": 3, "dog": 2})
    write_folder(tmp_path / "data", {"cat": 1})
    (tmp_path / "data" / "dog").symlink_to("../store/dog")
    (tmp_path / "data" / "cat" / "more").symlink_to("../../store/one")
    (tmp_path / "store" / "one" / "up").symlink_to("../../data")
    images = find(tmp_path / "data")
    assert images.labels is not None
    names = [(str(Path(images.locate(i)).relative_to(tmp_path / "data")), images.labels[i]) for i in range(len(images))]
    more = [(f"cat/more/{i:03}.png", "cat") for i in range(3)]
    inside = [(f"cat/more/up/dog/{i:03}.png", "cat") for i in range(2)]  # a folder that does not lead back up
    assert names == [("cat/000.png", "cat"), *more, *inside, ("dog/000.png", "dog"), ("dog/001.png", "dog")]
    (tmp_path / "data" / "cat" / "rest").symlink_to("gone")
    with pytest.raises(ValueError, match=r"data/cat/rest: is a link to gone, which is not there; mend the link"):
        find(tmp_path / "data")
    (tmp_path / "data" / "cat" / "rest").unlink()
    (tmp_path / "data" / "eel").symlink_to("eel")
    with pytest.raises(ValueError, match=r"data/eel: is a link to eel, which is not there; mend the link"):
        find(tmp_path / "data")
    (tmp_path / "data" / "eel").unlink()
    (tmp_path / "data" / "gnu").symlink_to("n" * 300)  # of which nothing can be asked, as behind a closed folder
    with pytest.raises(ValueError, match=r"data/gnu: cannot be read: File name too long"):
        find(tmp_path / "data")


def test_folders_that_links_lead_to_by_many_ways_are_read_once(tmp_path: Path) -> None:
    folders = [tmp_path / "data" / name for name in "abcdef"]
    for folder in folders:
        write_folder(folder, {"images": 1})
    for folder in folders:
        for other in folders:
            (folder / f"to_{other.name}").symlink_to(other)
    images = find(tmp_path / "data")
    assert images.labels == [name for name in "abcdef" for _ in folders]  # of each class, all of the folders
    assert len({images.locate(i) for i in range(len(images))}) == 36


def test_images_that_are_not_read_are_warned_of(tmp_path: Path) -> None:
    write_folder(tmp_path / "data", {"cat": 1, "dog": 1})
    (tmp_path / "data" / "dog" / "001.HEIC").touch()
    (tmp_path / "data" / "cat" / "notes.txt").touch()
    store = fsspec.filesystem("memory")
    store.pipe({f"/mixed/{name}": b"" for name in ("cat/0.jpg", "dog/0.jpg", "dog/001.HEIC")})
    try:
        for source in (str(tmp_path / "data"), "memory://mixed"):
            with pytest.warns(UserWarning, match=r"1 files there are not read, such as 001\.HEIC: expected \.avif, "):
                assert len(find(source)) == 2
    finally:
        store.rm("/mixed", recursive=True)


def write_tar(path: Path, members: dict[str, bytes]) -> str:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


@pytest.mark.parametrize("sidecar", [b'{"label": ["a", "b"]}', b'{"label": true}', b'{"label": ""}', b"\xe4", b"{"])
def test_what_says_no_class_is_not_needed_where_another_member_does_or_nobody_asks(
    sidecar: bytes, tmp_path: Path
) -> None:
    alone = write_tar(tmp_path / "alone.tar", {"0.png": b"", "0.json": sidecar})
    assert open_images(alone, split=None, split_of="predict", fields=FIELDS).labels is None
    if sidecar == b'{"label": ""}':
        assert find(alone).labels is None
    else:
        with pytest.raises(ValueError, match=r"alone\.tar member 0\.json: (label is .*: expected one|not )"):
            find(alone)
    for name, order in (("before", ("json", "cls")), ("after", ("cls", "json"))):
        both = {"0.png": b"", **{f"0.{kind}": sidecar if kind == "json" else b"cat" for kind in order}}
        assert find(write_tar(tmp_path / f"{name}.tar", both)).labels == ["cat"]


@pytest.mark.parametrize("order", [("cls", "label", "json"), ("json", "label", "cls"), ("label", "json", "cls")])
def test_of_several_members_with_a_class_the_order_of_their_kinds_decides(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    says = {"cls": b"by cls", "label": b" by label\n", "json": b'{"label": " by json"}'}
    kinds = [*order, "png"]
    for missing, expected in (((), "by cls"), (("cls",), "by label"), (("cls", "label"), "by json")):
        members = {f"0.{kind}": says.get(kind, b"") for kind in kinds if kind not in missing}
        assert find(write_tar(tmp_path / "t.tar", members)).labels == [expected]


def test_an_image_that_would_be_left_out_for_a_dot_in_its_name_is_refused(tmp_path: Path) -> None:
    good = {"b/000.jpg": b"", "b/000.cls": b"cat"}
    dotted = {"a/photo 2024-05-01 10.32.11.JPG": b"", "a/photo 2024-05-01 10.32.11.cls": b"cat"}
    for members in (dotted, good | dotted, dotted | good):
        with pytest.raises(ValueError, match=r"t\.tar member a/photo .*11\.JPG: .* at its first dot, .*; rename it"):
            find(write_tar(tmp_path / "t.tar", members))
    more = {"a/._1.jpg": b"", "a/1.cls": b"dog", "a/._1.cls": b"?", "a/1.seg.png": b"", "a/1.png": b"", "a/2.txt": b""}
    found = find(write_tar(tmp_path / "t.tar", more | good))
    assert found.labels == ["dog", "cat"]
    assert [found.locate(i).rpartition(" ")[2] for i in range(2)] == ["a/1.png", "b/000.jpg"]


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_an_image_of_a_shard_that_is_a_link_is_refused_and_not_left_out(link: Any, tmp_path: Path) -> None:
    write_folder(tmp_path / "files", {"a": 1})
    (first := tmp_path / "files" / "a" / "000.png").with_suffix(".cls").write_text("a")
    link(first, first.with_name("001.png"))
    first.with_name("001.cls").write_text("a")
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        tar.add(tmp_path / "files", arcname=".")
    expected = r"t\.tar member \S*/00[01]\.png: is a link to \S*\.png: expected the image itself"
    with pytest.raises(ValueError, match=expected):
        find(tmp_path / "t.tar")


def test_shards_of_several_splits_in_a_store_are_refused() -> None:
    store = fsspec.filesystem("memory")
    for name in ("train-0.tar", "val-0.tar"):
        store.pipe(f"/of_splits/{name}", b"")
    with pytest.raises(ValueError, match=r"memory://of_splits: holds several splits, such as train-0\.tar and val-0"):
        find("memory://of_splits")


@pytest.mark.parametrize("at", ["", "file://"])
def test_a_tar_file_is_read_whole_or_refused(at: str, tmp_path: Path) -> None:
    path = tmp_path / "t.tar"
    write_tar(path, {f"{i}.{kind}": b"x" * 600 for i in range(3) for kind in ("png", "cls")})
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        begins = [member.offset for member in tar]
    end = begins[-1] + 512 + 1024

    def check(data: bytes, message: str = "") -> None:
        path.write_bytes(data)
        if not message:
            assert len(find(f"{at}{path}")) == 3
            return
        with pytest.raises(ValueError, match=rf"^{at}{path}: {message}"):
            find(f"{at}{path}")

    for place in (*begins[1:], end):
        check(whole[:place], f"has no end at byte {place:,}: ")
        if place < end:
            check(whole[: place + 100], f"has no end at byte {place:,}: ")
            check(whole[: place + 8] + b"?" + whole[place + 9 :], f"has no end at byte {place:,}: ")
    check(whole + whole, f"goes on behind its end, at byte {len(whole):,}, as several archives joined do; list them")
    check(whole + bytes(200_000) + b"x", f"goes on behind its end, at byte {len(whole) + 200_000:,}, ")
    for rest in (512, 1024, 200_000):
        check(whole[:end] + bytes(rest))
