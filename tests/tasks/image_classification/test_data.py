"""Images reach the model once, in one order, the same at any number of ranks and workers."""

import io
import shutil
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from image_training import write_folder
from PIL import Image
from transformers import AutoImageProcessor

from lit_fsdp.tasks import Augmentation, ImageData, Pixels
from lit_fsdp.tasks.classifier import list_classes
from lit_fsdp.tasks.image_classification.augmentation import change_colors, crop_and_flip, erase
from lit_fsdp.tasks.image_classification.preprocessing import Preprocessing, compare_colors, load_processor

PIXELS = Pixels(size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "train", {"cat": 5, "dog": 4})


def build(folder: Path, **options: Any) -> ImageData:
    settings = {"train": str(folder), "processor": PIXELS, "batch_size": 2, "num_workers": 0, **options}
    data = ImageData(**settings)
    data.setup("fit")
    return data


def read_epochs(data: ImageData, count: int = 2) -> list[torch.Tensor]:
    loader = data.train_dataloader()
    return [torch.cat([batch["pixel_values"] for batch in loader]) for _ in range(count)]


@pytest.mark.full
@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(),
        Augmentation(policy="randaugment", color_jitter=0.4, erasing=0.5),
        Augmentation(policy="trivialaugment"),
        Augmentation(policy="autoaugment"),
    ],
)
def test_augmentation_depends_on_seed_epoch_and_image_and_not_on_workers(
    augmentation: Augmentation, folder: Path
) -> None:
    options: dict[str, Any] = {"augmentation": augmentation, "shuffle": False}
    torch.manual_seed(1)
    first, second = read_epochs(build(folder, **options))
    assert not torch.equal(first, second)
    torch.manual_seed(2)
    again = read_epochs(build(folder, **options, num_workers=2))
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    other = read_epochs(build(folder, **options, seed=1))[0]
    assert not torch.equal(first, other)


def test_colors_need_a_library_and_erasing_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    settings = Augmentation(erasing=1.0)
    settings.check()
    pixels = torch.zeros(3, 16, 16)
    assert (erase(change_colors(pixels.to(torch.uint8), settings).float(), settings) != 0).any()
    with pytest.raises(ValueError, match=r"policy and color_jitter need torchvision or kornia"):
        Augmentation(color_jitter=0.1).check()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "kornia" or None)
    for magnitude, nearest in ((0, 1), (30, 29)):  # of which kornia makes no policy
        with pytest.raises(ValueError, match=rf"got {magnitude}: kornia takes 1 to 29: set {nearest}, or install"):
            Augmentation(policy="randaugment", policy_magnitude=magnitude).check()


def test_drawing_for_images_leaves_the_generator_of_the_model_alone(folder: Path) -> None:
    data = build(folder, augmentation=Augmentation(policy="randaugment"))
    state = torch.get_rng_state()
    rows = data.train_dataloader().dataset
    rows[0]
    assert torch.equal(torch.get_rng_state(), state)


def test_the_part_that_is_cut_out_has_the_share_and_ratio_that_were_asked_for() -> None:
    settings = Augmentation(crop_scale=(0.25, 0.5), crop_ratio=(0.5, 2.0), flip=0.0)
    ramp = np.stack(np.meshgrid(np.arange(200), np.arange(100)), -1)  # column, row
    image = Image.fromarray(np.concatenate([ramp, np.zeros((100, 200, 1))], -1).astype(np.uint8))
    torch.manual_seed(0)
    shares, ratios = [], []
    for _ in range(60):
        part = np.asarray(crop_and_flip(image, settings, (64, 64), Image.Resampling.NEAREST)).astype(float)
        width, height = (part[..., c].max() - part[..., c].min() + 1 for c in (0, 1))
        shares.append(width * height / 20000)
        ratios.append(width / height)
    assert 0.22 < min(shares) < 0.3
    assert 0.42 < max(shares) < 0.53
    assert 0.45 < min(ratios) < 0.7
    assert 1.5 < max(ratios) < 2.2


def test_evaluation_sees_what_the_exported_processor_makes(folder: Path, tmp_path: Path) -> None:
    for pixels in (PIXELS, Pixels(size=8, crop_fraction=0.8, mean=(0.1, 0.2, 0.3), std=(0.5, 0.4, 0.3))):
        data = build(folder, validation=str(folder), processor=pixels)
        (tmp_path / "preprocessor_config.json").write_text(data.preprocessing.describe())
        processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
        batch = next(iter(data.val_dataloader()))
        images = [Image.open(file) for file in batch["files"]]
        assert torch.equal(processor(images, return_tensors="pt")["pixel_values"], batch["pixel_values"])
        assert batch["pixel_values"].shape == (2, 3, 8, 8)


def test_training_without_changes_sees_what_evaluation_sees(folder: Path) -> None:
    plain = read_epochs(build(folder, augmentation=None, shuffle=False), 1)[0]
    whole = read_epochs(build(folder, augmentation=Augmentation(crop_scale=(1, 1), flip=0.0), shuffle=False), 1)[0]
    assert torch.allclose(plain, whole, atol=1e-6)


def test_the_processor_of_a_model_is_read_from_its_folder(tmp_path: Path, folder: Path) -> None:
    load_processor(Pixels(size=12, mean=(0.1, 0.2, 0.3))).save_pretrained(tmp_path)
    data = build(folder, processor=str(tmp_path))
    assert data.preprocessing.size == (12, 12)
    assert data.preprocessing.processor.image_mean == (0.1, 0.2, 0.3)
    with pytest.raises(ValueError, match=r"processor: got '.*nowhere': there is no such folder"):
        _ = ImageData(train=str(folder), processor=f"{tmp_path}/nowhere").preprocessing


def test_what_is_on_the_hub_is_fetched_before_the_ranks_set_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Any] = []
    monkeypatch.setattr("datasets.load_dataset", lambda *where, **options: fetched.append((*where, options["split"])))
    monkeypatch.setattr(
        "lit_fsdp.tasks.image_classification.data.fetch_pretrained", lambda name, *_: fetched.append(name)
    )
    ImageData(train=str(folder), test="digits", processor=PIXELS).prepare_data()
    assert fetched == []
    sources = {"train": "org/name", "validation": str(folder), "test": "org/name:small", "test_split": "test[:5]"}
    ImageData(**sources, processor="org/model").prepare_data()
    assert fetched == [("org/name", None, "train"), ("org/name", "small", "test[:5]"), "org/model"]


def test_held_out_images_are_not_trained_on(folder: Path) -> None:
    data = build(folder, validation_fraction=0.3, augmentation=None, batch_size=1)
    train = {batch["pixel_values"].numpy().tobytes() for batch in data.train_dataloader()}
    held = {batch["pixel_values"].numpy().tobytes() for batch in data.val_dataloader()}
    assert (len(train), len(held)) == (6, 3)
    assert not train & held


def test_classes_are_those_of_the_training_data_also_for_a_test_that_lacks_some(folder: Path, tmp_path: Path) -> None:
    test = write_folder(tmp_path / "test", {"dog": 2})
    data = ImageData(train=str(folder), test=str(test), processor=PIXELS, num_workers=0, batch_size=2)
    data.setup("test")
    assert data.classes == ["cat", "dog"]
    assert [batch["labels"].tolist() for batch in data.test_dataloader()] == [[1, 1]]
    numbers = "".join(f"{folder}/cat/000.png,{n}\n" for n in (10, 9, 2))
    (tmp_path / "n.csv").write_text("image,label\n" + numbers)
    data = build(tmp_path / "n.csv")
    assert data.classes == ["2", "9", "10"]


def test_a_class_that_training_does_not_know_is_refused_with_its_image(folder: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "val", {"ape": 1, "cat": 1})
    with pytest.raises(ValueError, match=r"validation: .*ape/000\.png: class 'ape' is not one of cat, dog"):
        build(folder, validation=str(other))


def test_a_table_whose_files_are_not_there_is_refused_before_training(folder: Path, tmp_path: Path) -> None:
    lines = [f"{path},{path.parent.name}\n" for path in sorted(folder.rglob("*.png"))]
    table = tmp_path / "table.csv"
    table.write_text("image,label\n" + "".join([*lines, "gone.png,cat\n", "lost.png,dog\n"]))
    expected = (
        rf"line 11: no such file: \S*gone\.png; 2 of 11 are not there: paths are relative to {tmp_path}; mend them"
    )
    with pytest.raises(ValueError, match=f"train: .*{expected}, or set bad_images to skip"):
        build(table)
    with pytest.raises(ValueError, match=f"validation: .*{expected}"):
        build(folder, validation=str(table))
    (skipped,) = [batch["problems"] for batch in build(table, bad_images="skip", batch_size=11).train_dataloader()]
    assert len(skipped) == 2
    table.write_text("image,label\nhttps://host/a.png,cat\n")
    with pytest.raises(
        ValueError, match=r"line 2: image is a string \('https://host/a\.png'\): expected a path of this"
    ):
        build(table)


def break_image(folder: Path, tmp_path: Path) -> Path:
    copy = write_folder(tmp_path / "broken", {"cat": 5, "dog": 4})
    (copy / "dog" / "000.png").write_text("no image")
    return copy


def test_a_bad_image_stops_the_run_and_is_named(folder: Path, tmp_path: Path) -> None:
    data = build(break_image(folder, tmp_path), shuffle=False)
    with pytest.raises(ValueError, match=r"dog/000\.png: cannot identify .*; remove it, or set bad_images to skip"):
        list(data.train_dataloader())


def test_a_skipped_image_counts_nowhere_and_is_named(folder: Path, tmp_path: Path) -> None:
    broken = str(break_image(folder, tmp_path))
    data = build(Path(broken), shuffle=False, bad_images="skip", validation=broken, predict=broken)
    batches = [*data.train_dataloader()]
    assert [batch["labels"].tolist() for batch in batches] == [[0, 0], [0, 0], [0, -100], [1, 1]]
    (problem,) = [problem for batch in batches for problem in batch["problems"]]
    assert "dog/000.png: cannot identify" in problem
    labels = torch.cat([batch["labels"] for batch in data.val_dataloader()])
    assert (labels >= 0).sum() == 8
    data.setup("predict")
    bad = torch.cat([batch["is_bad"] for batch in data.predict_dataloader()])
    assert bad.tolist() == [False] * 5 + [True] + [False] * 4  # the last one is filler


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"batch_size: got 0: expected 1 or more"),
        ({"test_split": "test"}, r"test_split: not used, as test names no data set"),
        ({"validation_fraction": 1.0}, r"validation_fraction: got 1\.0: expected 0 to below 1"),
        ({"validation": "x", "validation_fraction": 0.1}, r"validation names a source; leave one"),
        ({"classes": ["a", "a"]}, r"classes: got \['a', 'a'\]: expected names, each once"),
        ({"processor": Pixels(std=(1, 0, 1))}, r"processor\.std: got \(1, 0, 1\): expected three numbers above 0"),
        ({"processor": Pixels(crop_fraction=2)}, r"processor\.crop_fraction: got 2"),
        ({"augmentation": Augmentation(crop_scale=(0.5, 0.1))}, r"augmentation\.crop_scale: got \(0\.5, 0\.1\)"),
        ({"augmentation": Augmentation(policy_num_ops=3)}, r"policy_num_ops: not used by policy 'none'"),
        ({"augmentation": Augmentation(flip=1.5)}, r"augmentation\.flip: got 1\.5: expected a probability"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageData(train="digits", **options)


def test_where_nothing_is_named_it_is_the_digits_and_that_is_told() -> None:
    pytest.importorskip("sklearn")
    with pytest.warns(UserWarning, match="no source is named, so it is scikit-learn's 1,797 handwritten digits"):
        data = ImageData(processor=PIXELS, num_workers=0)
    data.setup()
    assert data.count_classes() == len(data.classes) == 10
    loaders = (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader())
    assert [len(loader.dataset) for loader in (data.train_dataloader(), *loaders)] == [1437, 360, 360, 360]
    with pytest.warns(UserWarning, match="no source is named"):
        data = ImageData(processor=PIXELS, num_workers=0, validation_fraction=0.2)
    data.setup("fit")
    assert [len(loader.dataset) for loader in (data.train_dataloader(), data.val_dataloader())] == [1150, 287]


def test_where_something_is_named_nothing_is_added(folder: Path) -> None:
    with pytest.raises(ValueError, match="train: not set; name a folder"):
        ImageData(validation=str(folder)).setup("fit")


def test_other_colors_than_a_pretrained_model_has_seen_are_told(
    folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    load_processor(Pixels(size=12, mean=(0.1, 0.2, 0.3))).save_pretrained(tmp_path)
    for processor in (str(tmp_path), Pixels(size=8, mean=(0.1, 0.2, 0.3))):
        compare_colors(build(folder, processor=processor).preprocessing, "org/model", tmp_path)
    compare_colors(build(folder).preprocessing, "org/model", folder)  # which has none
    assert not [warning for warning in recwarn if "processor" in str(warning.message)]
    with pytest.warns(UserWarning, match=r"image_mean is \[0\.5, .*org/model was trained with \[0\.1, 0\.2"):
        compare_colors(build(folder).preprocessing, "org/model", tmp_path)


def test_without_data_the_number_of_classes_is_asked_for() -> None:
    with pytest.raises(ValueError, match="num_classes: not set, and there is no data module that says it"):
        list_classes(None, None)
    assert list_classes(None, 3) == ["0", "1", "2"]


class Flipped:
    """Swaps red and blue, as that of MobileViT does."""

    do_rescale, do_normalize, rescale_factor, resample = True, False, 1 / 255, None

    def __call__(self, images: Any, return_tensors: str) -> dict[str, torch.Tensor]:
        pixels = torch.from_numpy(np.array(images.resize((8, 8)))).permute(2, 0, 1).flip(0) / 255
        return {"pixel_values": pixels[None]}


class Unsized(Flipped):
    """Keeps the shape of an image."""

    def __call__(self, images: Any, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.from_numpy(np.array(images)).permute(2, 0, 1)[None] / 255}


def test_processors_that_training_could_not_follow_are_refused() -> None:
    with pytest.raises(ValueError, match=r"processor: Flipped does more to colors"):
        Preprocessing(Flipped(), Augmentation())
    assert Preprocessing(Flipped(), None).size == (8, 8)
    with pytest.raises(ValueError, match=r"processor: Unsized makes images of \(48, 64\) and \(64, 48\)"):
        Preprocessing(Unsized(), None)


def test_a_checkpoint_knows_the_order_of_the_images(folder: Path, tmp_path: Path) -> None:
    lines = [f"{path},{path.parent.name}\n" for path in sorted(folder.rglob("*.png"))]
    found = []
    for order in (lines, lines[::-1], lines):
        (tmp_path / "train.csv").write_text("image,label\n" + "".join(order))
        found.append(build(tmp_path / "train.csv").train_dataloader().state_dict()["fingerprint"])
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("kind", ["folder", "shard", "parquet", "data set"])
def test_a_checkpoint_knows_an_image_from_another_of_its_name_but_not_from_a_copy(tmp_path: Path, kind: str) -> None:
    def digest(source: Path) -> str:
        return str(build(source, batch_size=2).train_dataloader().state_dict()["fingerprint"])

    def convert(folder: Path) -> Path:
        files = sorted(folder.rglob("*.png"))
        out = folder.with_name(f"{folder.name} as {kind}")
        if kind == "folder":
            return folder
        out.mkdir()
        if kind == "shard":
            with tarfile.open(out / "a.tar", "w") as tar:
                for i, file in enumerate(files):
                    for ending, data in ((".png", file.read_bytes()), (".cls", file.parent.name.encode())):
                        info = tarfile.TarInfo(f"{i}{ending}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
            return out / "a.tar"
        cells = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
        rows = datasets.Dataset.from_dict({"image": cells, "label": [file.parent.name for file in files]})
        if kind == "parquet":
            rows.cast_column("image", datasets.Image(decode=False)).to_parquet(out / "train.parquet")
            return out / "train.parquet"
        rows.cast_column("image", datasets.Image()).save_to_disk(str(out))
        return out

    folder = write_folder(tmp_path / "one", {"cat": 3, "dog": 2})
    first = digest(convert(folder))
    copied = Path(shutil.copytree(folder, tmp_path / "elsewhere" / folder.name, copy_function=shutil.copyfile))
    assert digest(convert(copied)) == first
    replaced = sorted(folder.rglob("*.png"))[1]
    if kind == "folder":  # of the very same size
        data = bytearray(replaced.read_bytes())
        data[len(data) // 2] ^= 1
        replaced.write_bytes(data)
    else:
        Image.effect_noise((40, 30), 60).convert("RGB").save(replaced)
        shutil.rmtree(tmp_path / f"one as {kind}")
    assert digest(convert(folder)) != first


def test_the_images_whose_contents_a_checkpoint_knows_are_spread_over_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_fsdp.tasks.image_classification.data._NUM_SAMPLED", 3)
    folder = write_folder(tmp_path / "one", {"cat": 3, "dog": 2})
    fingerprints = []
    for _ in range(2):
        fingerprints.append(build(folder, batch_size=2).train_dataloader().state_dict()["fingerprint"])
        last = sorted(folder.rglob("*.png"))[-1]
        data = bytearray(last.read_bytes())
        data[len(data) // 2] ^= 1
        last.write_bytes(data)
    assert fingerprints[0] != fingerprints[1]


def test_one_class_is_nothing_to_learn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train: .*all images are of the class 'cat': expected two classes or more"):
        build(write_folder(tmp_path, {"cat": 5}))
    with pytest.raises(ValueError, match=r"classes: got \['cat'\]: expected names, each once, and two or more"):
        build(tmp_path, classes=["cat"])
