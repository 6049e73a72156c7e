"""The task: its head, what trains, its losses, and evaluation on any number of ranks."""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from image_training import CONVNEXT, NUM_CLASSES, VIT, make_data, save_classifier, train_sharded
from torch import nn
from training import build_trainer, gather_weights
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

from lit_fsdp import FSDP2Strategy
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.reader import EXPORT
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks import ImageClassification, ImageData, Mixup, Pixels
from lit_fsdp.tasks.classifier import find_head, keeps_head
from lit_fsdp.tasks.image_classification.layers import list_blocks, measure_distances
from lit_fsdp.tasks.image_classification.mixup import mix
from lit_fsdp.tasks.image_classification.model import build_classifier, set_classes
from lit_fsdp.weights.base_weights import IMAGE_SIZE
from ranks import run_ranks


def read_start(folder: Path, out: Path, model: Path, options: dict[str, Any]) -> None:
    trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=1)
    options = {"pretrained": str(model), **options}
    task = ImageClassification(**options)

    def keep() -> None:
        out_weights.update({name: w.clone() for name, w in gather_weights(task).items()})  # type: ignore[arg-type]

    task.on_train_start = keep  # type: ignore[method-assign]
    out_weights: dict[str, torch.Tensor] = {}
    trainer.fit(task, datamodule=make_data(folder))
    assert task.model is not None
    if trainer.is_global_zero:
        torch.save((out_weights, task.model.config.id2label, task.model.config.num_labels), out)


@pytest.mark.full
@pytest.mark.parametrize("config", [VIT, CONVNEXT], ids=["vit", "convnext"])
def test_the_head_is_made_anew_for_the_classes_and_the_rest_is_loaded(config: dict[str, Any], tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", config, 7)
    stock = AutoModelForImageClassification.from_pretrained(model).state_dict()
    starts = []
    for world_size in (1, 2):
        run_ranks(read_start, tmp_path, tmp_path / "out", model, {}, world_size=world_size)
        weights, names, num_labels = torch.load(tmp_path / "out")
        assert (names, num_labels) == ({0: "cat", 1: "dog", 2: "eel"}, 3)
        assert weights["classifier.weight"].shape[0] == 3
        assert weights["classifier.weight"].std() == pytest.approx(0.02, rel=0.4)
        assert weights["classifier.bias"].abs().max() == 0
        same = [name for name in stock if not name.startswith("classifier")]
        assert all(torch.equal(weights[name], stock[name]) for name in same)
        starts.append(weights["classifier.weight"])
    assert torch.equal(starts[0], starts[1])


@pytest.mark.full
def test_a_head_of_the_same_classes_is_kept_and_one_of_others_is_not(tmp_path: Path) -> None:
    for names, keeps in ((["cat", "dog", "eel"], True), (["ant", "bee", "cow"], False)):
        torch.manual_seed(0)
        config = AutoConfig.for_model(**VIT, id2label=dict(enumerate(names)))
        model = AutoModelForImageClassification.from_config(config)
        model.save_pretrained(tmp_path / "model")
        run_ranks(read_start, tmp_path, tmp_path / "out", tmp_path / "model", {}, world_size=2)
        weights, found, _ = torch.load(tmp_path / "out")
        assert found == {0: "cat", 1: "dog", 2: "eel"}
        assert torch.equal(weights["classifier.weight"], model.classifier.weight) is keeps


def test_a_head_whose_classes_stand_in_another_order_is_refused_and_one_drawn_anew_is_told(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**VIT, id2label={0: "dog", 1: "cat"})
    AutoModelForImageClassification.from_config(config).save_pretrained(tmp_path / "model")
    model = str(tmp_path / "model")
    with pytest.raises(ValueError, match=r"the classes of the data in another order \(dog, cat\): set data"):
        keeps_head(model, "keep", ["cat", "dog"])
    with pytest.warns(UserWarning, match=r"head: drawn anew: .* was trained for 2 classes \(dog, cat\)"):
        assert not keeps_head(model, "auto", ["cat", "dog"])
    assert keeps_head(model, "auto", ["dog", "cat"])
    with warnings.catch_warnings(record=True) as caught:
        keeps_head(model, "auto", ["cat", "dog"], is_told=False)  # weights will come from a checkpoint
    assert caught == []


@pytest.mark.parametrize(
    "stored",
    [
        {"architecture": "vit_tiny_patch16_224", "num_classes": 2, "label_names": ["cat", "dog"]},
        {
            "model_type": "deit",
            "architectures": ["DeiTForImageClassificationWithTeacher"],
            "id2label": {"0": "cat", "1": "dog"},
        },
    ],
    ids=["timm", "teacher"],
)
def test_a_head_is_known_whatever_the_class_of_the_model_is_called(stored: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**stored, "pretrained_cfg": {"tag": "a"}}))
    assert keeps_head(str(tmp_path), "auto", ["cat", "dog"])
    with pytest.warns(UserWarning, match=r"head: drawn anew: .* for 2 classes \(cat, dog\)"):
        assert not keeps_head(str(tmp_path), "auto", ["cat", "eel"])
    backbone = {"model_type": "deit", "architectures": ["DeiTModel"], "id2label": {"0": "cat", "1": "dog"}}
    (tmp_path / "config.json").write_text(json.dumps(backbone))
    assert not keeps_head(str(tmp_path), "auto", ["cat", "dog"])


def test_a_head_that_nothing_has_trained_is_told_when_it_is_evaluated(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", VIT, 3)
    data = make_data(tmp_path)
    with pytest.warns(UserWarning, match=r"head: its weights are random, and no checkpoint replaces them"):
        trainer = build_for_one(ImageClassification(pretrained=str(model)), data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    for options in ({"pretrained": str(model)}, {"pretrained": str(model), "head": "keep"}):
        with warnings.catch_warnings(record=True) as caught:
            task = ImageClassification(**options)  # type: ignore[arg-type]
            is_loaded = "head" not in options
            build_for_one(task, data, ckpt_path=str(tmp_path / "last.ckpt") if is_loaded else None)
        assert not [warning for warning in caught if str(warning.message).startswith("head:")]


def test_what_is_frozen_computes_as_in_evaluation(tmp_path: Path) -> None:
    _, task = list_trained(VIT, tmp_path, freeze=["layers.0"])
    task.train()
    assert not task.model.vit.layers[0].training
    assert not task.model.vit.layers[0].mlp.fc1.training
    assert task.model.vit.layers[1].training
    assert task.training


def test_a_fit_leaves_the_statistics_of_frozen_norms_which_exported_adapters_do_not_hold(tmp_path: Path) -> None:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    model = save_classifier(tmp_path / "model", {"model_type": "resnet", **sizes}, 3)
    stock = AutoModelForImageClassification.from_pretrained(model).state_dict()
    for frozen, is_changed in (["backbone"], False), ([], True):
        task = ImageClassification(pretrained=str(model), head="keep", freeze=frozen)
        build_for_one(task, make_data(tmp_path), num_steps=1)
        buffers = [(name, buffer) for name, buffer in task.model.named_buffers() if "running" in name]  # type: ignore[union-attr]
        assert len(buffers) >= 8
        assert all(torch.equal(buffer, stock[name]) is not is_changed for name, buffer in buffers)


def test_a_model_whose_logits_have_another_name_is_evaluated(tmp_path: Path) -> None:
    blocks = [[[3, 16, 16, 1, False]]] * 5
    config = {"model_type": "pp_lcnet", "block_configs": blocks, "scale": 1.0, "class_expand": 16}
    _, task = list_trained(config, tmp_path)
    pixels = torch.randn(2, 3, 16, 16)
    assert torch.equal(task.eval()(pixels), task.model(pixels).last_hidden_state)


def test_images_of_another_size_get_interpolated_positions(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", VIT, 3)
    data = make_data(tmp_path, processor=Pixels(size=24))
    trainer = build_for_one(ImageClassification(pretrained=str(model), head="keep"), data)
    batch = next(iter(trainer.datamodule.val_dataloader()))
    stock = AutoModelForImageClassification.from_pretrained(model)
    with torch.no_grad():
        expected = stock(batch["pixel_values"], interpolate_pos_encoding=True).logits
        assert torch.allclose(trainer.lightning_module(batch["pixel_values"]), expected, atol=1e-6)


def test_a_second_run_may_have_images_of_another_size(tmp_path: Path) -> None:
    task = ImageClassification(pretrained=str(save_classifier(tmp_path / "model", VIT, 3)), head="keep")
    for size in (16, 24, 32):  # the first is its own
        trainer = build_for_one(task, make_data(tmp_path, processor=Pixels(size=size)))
        checkpoint: dict[str, Any] = {EXPORT: {}}
        task.on_save_checkpoint(checkpoint)
        assert checkpoint.get(IMAGE_SIZE, [16, 16]) == [size, size]
        assert trainer.callback_metrics["val/loss"] > 0


def build_for_one(task: ImageClassification, data: ImageData, ckpt_path: str | None = None, num_steps: int = 0) -> Any:
    """Train for some steps, if any, and validate, in this process and without FSDP."""
    import lightning.pytorch as pl

    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, max_steps=num_steps, **options)
    if num_steps:
        trainer.fit(task, datamodule=data)
    trainer.validate(task, datamodule=data, verbose=False, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.full
@pytest.mark.parametrize(
    "model_type",
    [
        "vit",
        "convnext",
        "swin",
        "dinov2",
        "siglip",
        "beit",
        "resnet",
        "deit",
        "levit",
        "perceiver",
        "pvt",
        "swiftformer",
    ],
)
def test_the_head_is_found_in_all_kinds_of_models(model_type: str) -> None:
    names = [f"class {i}" for i in range(12)]
    config = AutoConfig.for_model(model_type)
    set_classes(config, names, None)
    model = build_classifier(config, None)
    heads = find_head(config, model, build_classifier)
    assert sum(p.numel() for h in heads for p in model.get_submodule(h).parameters()) < 12 * 5000
    assert all(p.shape[0] == 12 for h in heads for p in model.get_submodule(h).parameters())


def list_trained(config: dict[str, Any], tmp_path: Path, **options: Any) -> tuple[set[str], Any]:
    save_classifier(tmp_path / "model", config, 3)
    task = ImageClassification(pretrained=str(tmp_path / "model"), **options)
    build_for_one(task, make_data(tmp_path))
    assert task.model is not None
    return {name for name, p in task.model.named_parameters() if p.requires_grad}, task


def test_a_linear_probe_trains_the_head_alone(tmp_path: Path) -> None:
    trained, _ = list_trained(VIT, tmp_path, freeze=["backbone"])
    assert trained == {"classifier.weight", "classifier.bias"}


def test_named_parts_are_frozen(tmp_path: Path) -> None:
    trained, task = list_trained(VIT, tmp_path, freeze=["embeddings", "layers.0", "*.layernorm_before"])
    frozen = {name for name, _ in task.model.named_parameters()} - trained
    assert frozen >= {"vit.embeddings.cls_token", "vit.layers.0.mlp.fc1.weight", "vit.layers.2.layernorm_before.bias"}
    assert trained >= {"vit.layers.1.mlp.fc1.weight", "classifier.weight", "vit.layers.1.layernorm_after.weight"}
    with pytest.raises(ValueError, match=r"freeze: got 'layers\.9': the model has no such module"):
        list_trained(VIT, tmp_path, freeze=["layers.9"])
    with pytest.raises(ValueError, match=r"nothing is left to train"):
        list_trained(VIT, tmp_path, freeze=["vit", "classifier"])


def test_lora_trains_adapters_and_the_head(tmp_path: Path) -> None:
    trained, _ = list_trained(VIT, tmp_path, lora=LoRA(r=2))
    assert {name.split(".")[-1] for name in trained} == {"weight", "bias"}
    assert {"classifier.weight", "classifier.bias"} < trained
    assert all("lora_" in name or name.startswith("classifier") for name in trained)


def test_learning_rates_fall_with_the_distance_from_the_head(tmp_path: Path) -> None:
    model = build_classifier(AutoConfig.for_model(**VIT), None)
    distances = measure_distances(model, list_blocks(model), 0.5)
    assert distances["vit.embeddings.cls_token"] == distances["vit.embeddings.patch_embeddings.projection.weight"] == 4
    assert [distances[f"vit.layers.{i}.mlp.fc1.weight"] for i in range(3)] == [3, 2, 1]
    assert distances["vit.layernorm.weight"] == distances["classifier.bias"] == 0
    model = build_classifier(AutoConfig.for_model(**CONVNEXT), None)
    distances = measure_distances(model, list_blocks(model), 0.5)
    assert max(distances.values()) == 5
    assert [*distances.values()] == sorted(distances.values(), reverse=True)
    (down,) = {distance for name, distance in distances.items() if "stages.1.downsampling" in name}
    assert down == 2  # with the first block of its stage


@pytest.mark.parametrize(
    ("model_type", "count", "first"),
    [
        ("vit", 12, "vit.layers.0"),
        ("swin", 12, "swin.encoder.layers.0.blocks.0"),  # not its four stages
        ("resnet", 16, "resnet.encoder.stages.0.layers.0"),  # not its 48 convolutions
        ("pvt", 8, "pvt.encoder.block.0.0"),  # not its embeddings
        ("convnext", 18, "convnext.encoder.stages.0.layers.0"),
    ],
)
def test_layers_are_counted_and_not_their_parts_nor_stages(model_type: str, count: int, first: str) -> None:
    blocks = list_blocks(build_classifier(AutoConfig.for_model(model_type), None))
    assert (len(blocks), blocks[0]) == (count, first)


def test_layer_decay_says_how_many_blocks_there_are(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("INFO")
    list_trained(VIT, tmp_path, layer_decay=0.5, lora=LoRA(r=2))
    assert "layer_decay: 3 blocks, from vit.layers.0 to vit.layers.2" in caplog.text
    with pytest.raises(ValueError, match=r"layer_decay: got 0\.5: no blocks found in Linear; leave it out"):
        measure_distances(nn.Linear(2, 2), [], 0.5)


@pytest.mark.full
def test_layer_decay_reaches_the_optimizer_of_a_sharded_model(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model", VIT)
    plain = train_sharded(folder, tmp_path, world_size=2, strategy={}, max_steps=1)
    decayed = train_sharded(folder, tmp_path, world_size=2, strategy={}, task={"layer_decay": 0.5}, max_steps=1)
    start = AutoModelForImageClassification.from_pretrained(folder).state_dict()
    for name, depth in (("classifier.bias", 0), ("vit.layers.2.mlp.fc1.bias", 1), ("vit.layers.0.mlp.fc1.bias", 3)):
        full, less = (run.weights[name] - start[name] for run in (plain, decayed))
        assert torch.allclose(less, full * 0.5**depth, rtol=1e-3, atol=1e-8)
        assert full.abs().max() > 1e-4


def test_mixing_weighs_both_classes_and_leaves_images_without_a_class_alone() -> None:
    pixels = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 8).clone()
    is_valid = torch.tensor([True, True, True, False])
    seen = set()
    for seed in range(40):
        random.seed(seed)
        mixed = mix(pixels, is_valid, Mixup(mixup_alpha=1.0, cutmix_alpha=1.0))
        partner = mixed.partners.float()[:, None, None, None]
        own = torch.arange(4.0)[:, None, None, None]
        assert mixed.partners[3] == 3
        assert torch.allclose(mixed.pixels[3], pixels[3])
        share = mixed.pixels.mean((1, 2, 3))
        expected = (mixed.share * own + (1 - mixed.share) * partner).flatten()
        assert torch.allclose(share, expected, atol=1e-5)  # the share in the loss is that in the image
        is_pasted = bool(((mixed.pixels == own) | (mixed.pixels == partner)).all())
        seen.add(is_pasted)
    assert seen == {True, False}


def test_the_loss_is_the_same_as_of_soft_targets(tmp_path: Path) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(6, NUM_CLASSES), torch.tensor([0, 1, 2, 3, 4, -100])
    task = ImageClassification(config={"model_type": "vit"})
    soft = nn.functional.one_hot(labels[:5], NUM_CLASSES) * 0.9 + 0.1 / NUM_CLASSES
    expected = -(soft * logits[:5].log_softmax(1)).sum()
    assert float(task.sum_losses(logits, labels, 0.1)) == pytest.approx(float(expected), rel=1e-6)


def test_stochastic_depth_is_set_where_the_model_has_it(tmp_path: Path) -> None:
    _, task = list_trained(CONVNEXT, tmp_path, drop_path=0.3)
    rates = [m.drop_prob for m in task.model.modules() if type(m).__name__ == "ConvNextDropPath"]
    assert max(rates) == pytest.approx(0.3)
    with pytest.raises(ValueError, match=r"drop_path: got 0\.3: ViTConfig has no stochastic depth"):
        list_trained(VIT, tmp_path, drop_path=0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"pretrained or config: expected one of them"),
        ({"config": {"hidden_size": 8}}, r"config\.model_type: missing"),
        ({"config": {"model_type": "vit"}, "head": "keep"}, r"head: got 'keep': a model from config has none"),
        ({"config": {"model_type": "vit"}, "num_classes": 1}, r"num_classes: got 1: expected 2 or more"),
        ({"config": {"model_type": "vit"}, "layer_decay": 1.5}, r"layer_decay: got 1\.5: expected above 0"),
        ({"config": {"model_type": "vit"}, "label_smoothing": 1}, r"label_smoothing: got 1"),
        ({"config": {"model_type": "vit"}, "mixup": Mixup()}, r"mixup: got mixup_alpha 0\.0, cutmix_alpha 0\.0"),
        ({"config": {"model_type": "vit"}, "lora": LoRA(r=2), "freeze": ["x"]}, r"freeze: lora freezes all"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageClassification(**options)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"model_type": "vitt"}}, r"config\.model_type: got 'vitt': Transformers has no such model"),
        ({"config": {"model_type": "vit", "size": 3}}, r"config: size: no settings of ViTConfig"),
        ({"config": {"model_type": "llama"}}, r"LlamaConfig: no image classifier"),
        ({"config": {**CONVNEXT}, "attention": "sdpa"}, r"attention: got 'sdpa': .*; leave it out"),
        (
            {"config": {"model_type": "imagegpt", "n_layer": 1}},
            r"ImageGPTForImage.* says: .*cannot be trained",
        ),
        ({"config": {"model_type": "siglip2"}}, r"Siglip2ForImageClassification says: .*it cannot be trained here"),
        ({"config": {"model_type": "levit"}}, r"become 16 x 16 pixels, and Levit.* it takes 224 x 224; set the size"),
        ({"config": {"model_type": "vit"}, "num_classes": 4}, r"num_classes: got 4: the data has 3 classes"),
        ({"config": VIT, "quantization": Quantization()}, r"quantization: quantized weights cannot be trained"),
        (
            {"config": VIT, "layer_decay": 0.5, "freeze": ["backbone"]},
            r"layer_decay: got 0\.5: no block trains, .*; leave it out",
        ),
    ],
)
def test_a_model_that_cannot_be_is_refused_in_a_sentence(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    import lightning.pytorch as pl

    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_steps=1)
    with pytest.raises(ValueError, match=message):
        trainer.fit(ImageClassification(**options), datamodule=make_data(tmp_path))


def test_a_backbone_with_more_than_is_needed_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    backbone = AutoModel.from_config(AutoConfig.for_model(**VIT), add_pooling_layer=True)
    backbone.save_pretrained(tmp_path / "model")
    with pytest.warns(UserWarning, match=r"pretrained: 2 tensors are not used, such as pooler\.dense"):
        task = ImageClassification(pretrained=str(tmp_path / "model"))
        build_for_one(task, make_data(tmp_path))
    assert task.model is not None
    state = task.model.state_dict()
    names = [name for name in backbone.state_dict() if not name.startswith("pooler")]
    assert len(names) > 40
    assert all(torch.equal(state[f"vit.{name}"], backbone.state_dict()[name]) for name in names)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_step_on_mixtures_has_the_loss_of_their_soft_targets(
    smoothing: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0)
    _, task = list_trained(VIT, tmp_path, mixup=settings, label_smoothing=smoothing)
    found: list[torch.Tensor] = []
    monkeypatch.setattr(task, "weigh_loss", lambda *sums: found.extend(sums))
    torch.manual_seed(0)
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 2, -100])}
    random.seed(8)
    task.training_step(batch, 0)
    random.seed(8)
    mixed = mix(batch["pixel_values"], batch["labels"] >= 0, settings)
    assert 0.1 < mixed.share < 0.9
    assert mixed.partners[0] != 0
    targets = nn.functional.one_hot(batch["labels"].clamp(min=0), 3).float()
    targets = mixed.share * targets + (1 - mixed.share) * targets[mixed.partners]
    targets = targets * (1 - smoothing) + smoothing / 3
    with torch.no_grad():
        logits = task(mixed.pixels)
    expected = -(targets * logits.log_softmax(1))[:3].sum()  # the last has no class
    assert float(found[0].detach()) == pytest.approx(float(expected), rel=1e-5)
    assert int(found[1]) == 3
