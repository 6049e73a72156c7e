"""Settings may be mappings in Python, and are refused as they are in YAML."""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, get_type_hints

import pytest
from lightning.pytorch import Callback

import lit_fsdp
from lit_fsdp import LoRA, Mesh, Optimizer, callbacks, tasks
from lit_fsdp.cli.main import main
from lit_fsdp.parsing.mappings import TakesMappings, list_settings
from lit_fsdp.planning.auto_strategy import AutoFSDP2Strategy
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.tasks import CausalLM, ImageClassification, TextData, TrainTokenizer

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}

# Each with what YAML answers; the class checks its values itself.
WRONG = {
    "unknown key": ({"lora": {"rr": 8}}, "lora.rr: unknown key of lit_fsdp.LoRA: did you mean r?"),
    "old name": ({"lora": {"targets": "q_proj"}}, "lora.targets: renamed: target_modules"),
    "type": ({"lora": {"r": "eight"}}, "lora.r: got 'eight': expected int"),
    "null": ({"lora": {"r": None}}, "lora.r: got null: expected int, or leave it out"),
    "no mapping": ({"lora": 8}, "lora: got 8: expected a mapping of the keys of LoRA, {} for its defaults"),
    "choice": ({"optimizer": {"name": "adafaktor"}}, "did you mean adafactor?"),
    "word": ({"attention": "sdqa"}, "did you mean sdpa?"),
    "value": ({"optimizer": {"learning_rate": -1}}, "optimizer.learning_rate: got -1.0: expected above 0, and finite"),
}


@dataclass(frozen=True, kw_only=True)
class Beam:
    """Settings of a user's own."""

    width: int = 1


class OwnTask(CausalLM):
    """Adds a setting, and hands on all others."""

    def __init__(self, beam: Beam | None = None, note: str = "", **kwargs: Any) -> None:
        super().__init__(optimizer={"learning_rate": 0.5}, **kwargs)  # type: ignore[arg-type]
        self.beam, self.note = beam, note


class Noted(TakesMappings, Callback):
    """A callback with settings."""

    def __init__(self, beams: list[Beam]) -> None:
        self.beams = beams


def list_public_classes() -> Iterator[type]:
    for module in (lit_fsdp, tasks, callbacks):
        yield from (found for name in module.__all__ if inspect.isclass(found := getattr(module, name)))


def build(**settings: Any) -> CausalLM:
    return CausalLM(config=LLAMA, **settings)


def test_mappings_become_the_dataclasses_of_the_annotations() -> None:
    task = build(optimizer={"learning_rate": 1e-3, "betas": (0.8, 0.9)}, lora={"r": 8})
    assert (task.optimizer_settings, task.lora) == (Optimizer(learning_rate=1e-3, betas=(0.8, 0.9)), LoRA(r=8))
    assert FSDP2Strategy({"replicate": 2}).settings.mesh == Mesh(replicate=2)  # type: ignore[arg-type]
    assert AutoFSDP2Strategy(wrap={"policy": "repeated_blocks"}).settings.wrap.policy == "repeated_blocks"
    vit = ImageClassification(config={"model_type": "vit"}, mixup={"cutmix_alpha": 1.0})  # type: ignore[arg-type]
    assert vit.mixup is not None
    assert vit.mixup.cutmix_alpha == 1.0
    data = TextData(train="pydoc", tokenizer={"vocab_size": 300}, batch_size=1, seq_length=8)  # type: ignore[arg-type]
    assert data.tokenizer_setting == TrainTokenizer(vocab_size=300)
    kept = LoRA(r=2)
    assert build(lora=kept).lora is kept


def test_a_users_class_takes_them_for_its_own_settings_and_for_those_it_hands_on() -> None:
    task = OwnTask(beam={"width": 3}, note="x", config=LLAMA, lora={"r": 4})  # type: ignore[arg-type]
    assert (task.beam, task.note, task.lora, task.optimizer_settings.learning_rate) == (
        Beam(width=3),
        "x",
        LoRA(r=4),
        0.5,
    )
    assert list(inspect.signature(OwnTask.__init__).parameters) == ["self", "beam", "note", "kwargs"]
    assert Noted([{"width": 1}, Beam(width=2)]).beams == [Beam(width=1), Beam(width=2)]  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"^beams\[1\]\.widht: unknown key of .*Beam: did you mean width\?$"):
        Noted([{"width": 1}, {"widht": 2}])  # type: ignore[list-item]


def test_what_is_given_by_place_stays_in_its_place() -> None:
    class Placed(TakesMappings):
        def __init__(self, beam: Beam, *others: int, more: Beam | None = None, **kwargs: int) -> None:
            self.found = (beam, others, more, kwargs)

    placed: Any = Placed
    found = placed({"width": 2}, 3, 4, more={"width": 5}, six=6).found
    assert found == (Beam(width=2), (3, 4), Beam(width=5), {"six": 6})


@pytest.mark.parametrize("case", WRONG)
def test_what_yaml_would_refuse_is_refused_in_the_same_words(case: str) -> None:
    settings, line = WRONG[case]
    with pytest.raises(ValueError, match=f"{re.escape(line)}$"):
        build(**settings)


def test_words_that_there_are_not_are_refused_in_the_same_words_in_a_dataclass() -> None:
    found = []
    for name in ({"name": "adafaktor"}, Optimizer(name="adafaktor")):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^optimizer.name: got 'adafaktor'") as error:
            build(optimizer=name)
        found.append(str(error.value))
    assert found[0] == found[1]
    options: dict[str, Any] = {"train": "pydoc", "tokenizer": "gpt2", "batch_size": 1, "seq_length": 8}
    assert TextData(loss_on="all", **options).row_format.loss_on == "all"
    with pytest.raises(ValueError, match=r"^loss_on: got 'completions': .* did you mean completion\?$"):
        TextData(loss_on="completions", **options)


@pytest.mark.full
@pytest.mark.parametrize("case", WRONG)
def test_the_command_line_says_it_in_these_words(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """So that the two cannot drift apart."""
    settings, line = WRONG[case]
    given = {"init_args": {"config": LLAMA, **settings}}
    assert main(["fit", "--model=CausalLM", f"--model={json.dumps(given)}"]) == 2
    assert capsys.readouterr().err.strip().endswith(line)


def test_every_settings_class_is_public_and_every_class_that_has_one_takes_mappings() -> None:
    public = {getattr(module, name) for module in (lit_fsdp, tasks) for name in module.__all__}
    owners: list[Any] = list(list_public_classes())
    for owner in owners:  # grows
        init = owner if is_dataclass(owner) else owner.__init__
        found = [one for hint in get_type_hints(init).values() for one in list_settings(hint)]
        assert not found or is_dataclass(owner) or issubclass(owner, TakesMappings), f"{owner} takes no mappings"
        for settings in found:
            assert settings in public, f"{settings} of {owner} cannot be imported from lit_fsdp or its tasks"
        owners += [one for one in found if one not in owners]
    assert {LoRA, Mesh, TrainTokenizer} <= set(owners)


class Saving(tasks.Task):
    """Saves what its constructor was given, for itself and for subclasses."""

    def __init__(self, width: int = 3, optimizer: Optimizer | None = None) -> None:
        super().__init__(optimizer)
        width += 1
        self.save_hyperparameters()


class SavingMore(Saving):
    """Has an argument of its own."""

    def __init__(self, depth: int = 7, optimizer: Optimizer | None = None) -> None:
        super().__init__(width=4, optimizer=optimizer)


def test_saved_hyperparameters_have_the_arguments_of_subclasses_as_without_mappings() -> None:
    optimizer = Optimizer(eps=1e-4)
    assert dict(Saving(optimizer={"eps": 1e-4}).hparams) == {"width": 4, "optimizer": optimizer}  # type: ignore[arg-type]
    assert dict(SavingMore(depth=9, optimizer=optimizer).hparams) == {"width": 5, "optimizer": optimizer, "depth": 9}
