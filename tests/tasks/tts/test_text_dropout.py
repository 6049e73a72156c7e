"""Texts are left out now and then, so that guidance keeps what it compares with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from speech_families import CSM, DIA, build_data, build_model, build_task, make_rows, make_utterances

from lit_fsdp.tasks.tts.families.model_types import parse_family
from lit_fsdp.tasks.tts.preparation.prepared import write_shard


def build(folder: Path, raw: dict[str, Any] = DIA, world_size: int = 1, rank: int = 0, **options: Any) -> Any:
    data = build_data(folder, **{"shuffle": True, "text_dropout": None, **options})
    data.attach(build_task(raw).read_config())
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        global_rank=rank, world_size=world_size, overfit_batches=0, accumulate_grad_batches=1,
        fit_loop=SimpleNamespace(_combined_loader_states_to_load=[]),
    )  # fmt: skip
    data.trainer = trainer
    data.setup("fit")
    return data.train_dataloader()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_shard(folder / "shard-00000.parquet", make_rows(4, 240))
    return folder


def find_dropped(batch: Any) -> list[bool]:
    return [not bool(row.any()) for row in batch["text_ids"]]


def test_a_share_of_texts_is_dropped_anew_in_each_epoch(prepared: Path) -> None:
    loader = build(prepared, batch_size=8)
    epochs = [[d for batch in loader for d in find_dropped(batch)] for _ in range(2)]
    for dropped in epochs:
        assert 0.09 < sum(dropped) / len(dropped) < 0.21  # 0.15 of 240, three deviations to either side
    assert epochs[0] != epochs[1]
    assert not any(d for batch in build(prepared, batch_size=8, text_dropout=0.0) for d in find_dropped(batch))


def test_the_same_texts_are_dropped_at_any_number_of_ranks_and_after_a_resume(prepared: Path) -> None:
    whole = [find_dropped(batch) for batch in build(prepared, batch_size=8)]
    halves = zip(*(build(prepared, world_size=2, rank=rank, batch_size=4) for rank in range(2)), strict=True)
    assert [find_dropped(a) + find_dropped(b) for a, b in halves] == whole
    unequal = [build(prepared, world_size=2, rank=rank, batch_size=4, share=[3, 1]) for rank in range(2)]
    assert [find_dropped(a) + find_dropped(b) for a, b in zip(*unequal, strict=True)] == whole
    first = build(prepared, batch_size=8)
    iterator = iter(first)
    for _ in range(5):
        next(iterator)
    (again := build(prepared, batch_size=8)).load_state_dict(first.state_dict())
    assert [find_dropped(batch) for batch in again] == whole[5:]


def test_a_dropped_text_is_what_guidance_compares_with(monkeypatch: pytest.MonkeyPatch) -> None:
    family, config = parse_family(DIA)
    model, utterances = build_model(DIA).eval(), make_utterances(DIA, make_rows(4, 2), {})
    seen: list[dict[str, Any]] = []
    forward = model.model.encoder.forward
    monkeypatch.setattr(model.model.encoder, "forward", lambda **given: seen.append(given) or forward(**given))
    prompts = family.collate_prompts(utterances, config)
    family.generate(model, prompts, family.default_sampling.__class__(guidance_scale=3.0, max_frames=1))
    batch = family.drop_texts(family.collate(utterances, config), [0, 1])
    assert torch.equal(seen[0]["input_ids"][2:], batch["text_ids"])
    assert torch.equal(seen[0]["attention_mask"][2:], batch["text_mask"])


def test_models_that_are_not_guided_refuse_it(prepared: Path) -> None:
    data = build_data(prepared, text_dropout=0.1)
    with pytest.raises(ValueError, match=r"text_dropout: got 0.1: csm is not guided; leave it out"):
        data.attach(build_task(CSM).read_config())
    with pytest.raises(ValueError, match="text_dropout: got 1: expected 0 to below 1"):
        build_data(prepared, text_dropout=1)
