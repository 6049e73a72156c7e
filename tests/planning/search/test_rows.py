"""What ``plan --search`` shows of all that it tries, and what it says of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from closed_form_models import Model
from launches import write_run
from plan_runs import enter_folder, plan
from planned_steps import describe_module
from search_problems import BIGGER, describe

from lit_fsdp.planning.search.search import Candidate, Variant, choose, search
from lit_fsdp.sharding.settings import Settings


def search_trainings(device_bytes: int, **more: Any) -> list[Candidate]:
    """Search with a training that is faster and smaller than any other, as adapters over 4-bit weights are."""
    problem = describe(device_bytes, **more)
    configured = problem.variants[0]
    model = describe_module(Model(num_hidden_layers=1), Settings(), precision="bf16-mixed")
    return search(replace(problem, variants=[configured, Variant(model=model, changes={"model.lora": {"r": 16}})]))


def split_trainings(candidates: list[Candidate]) -> dict[tuple[str, ...], list[Candidate]]:
    found: dict[tuple[str, ...], list[Candidate]] = {}
    for candidate in candidates[1:]:
        kind = next((name for name in ("model.lora", "model.optimizer.name") if name in candidate.changes), None)
        found.setdefault(() if kind is None else (kind,), []).append(candidate)
    return found


@pytest.mark.full
def test_a_training_that_is_faster_and_smaller_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found = split_trainings(search_trainings(2**40))
    fast, hidden = found["model.lora",], found["model.optimizer.name",]
    assert all(len(rows) == 2 for rows in (fast, hidden))  # the fastest, and the smallest
    beaten = [any(f.time.step_s < c.time.step_s and f.peak_bytes < c.peak_bytes for f in fast) for c in hidden]
    assert all(beaten)
    monkeypatch.setattr("lit_fsdp.planning.search.search._pick", list)
    tried = split_trainings(search_trainings(2**40))
    for training, rows in found.items():
        assert rows[0].time.step_s == min(c.time.step_s for c in tried[training])
        smallest = min(c.peak_bytes for c in tried[training])
        assert rows[-1].peak_bytes == smallest or (len(rows) == 1 and smallest > 0.95 * rows[0].peak_bytes)


@pytest.mark.full
def test_of_a_training_that_does_not_fit_the_nearest_is_shown_after_what_fits() -> None:
    sizes = {name: min(c.needed_bytes for c in rows) for name, rows in split_trainings(search_trainings(2**40)).items()}
    fast, hidden = sizes["model.lora",], sizes["model.optimizer.name",]
    candidates = search_trainings((fast + hidden) // 2, host_bytes=0)
    found = split_trainings(candidates)
    (missed,) = found["model.optimizer.name",]
    assert not missed.fits
    assert missed.needed_bytes == pytest.approx(hidden, rel=0.05)
    assert all(c.fits for c in found["model.lora",])
    others = [c.fits for c in candidates[1:] if not c.keeps_result]
    assert others == sorted(others, reverse=True)
    chosen = choose(candidates)
    assert chosen is next(c for c in candidates if c.fits)
    assert "model.lora" in chosen.changes


@pytest.mark.slow
def test_what_is_chosen_is_what_would_be_chosen_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sorted({c.needed_bytes for c in search_trainings(2**40)})
    for device_bytes in sizes:
        chosen = choose(search_trainings(device_bytes))
        with monkeypatch.context() as patch:
            patch.setattr("lit_fsdp.planning.search.search._pick", list)
            first, *others = search_trainings(device_bytes)
        fitting = sorted((c for c in others if c.fits), key=lambda c: (not c.keeps_result, c.time.step_s))
        assert chosen is not None
        best = fitting[0]
        expected = first if first.fits and first.time.step_s < 1.02 * best.time.step_s else best
        assert (chosen.keeps_result, chosen.time.step_s) == (expected.keeps_result, expected.time.step_s)


@pytest.mark.slow
def test_what_other_trainings_warn_of_is_said_only_of_the_one_that_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    enter_folder(tmp_path, monkeypatch)
    write_run(tmp_path, model={"config": BIGGER}, data={"seq_length": 128, "batch_size": 4})
    warning = "bf16-mixed keeps frozen weights in float32"
    options = ["--config=run.yaml", "--devices=2", "--trainer.precision=bf16-mixed", "--search=true"]
    options.append("--device-memory=8GiB")
    found = plan(*options)["search"]
    assert any("model.lora" in candidate["changes"] for candidate in found["candidates"])
    assert found["notes"] == []
    assert warning not in "".join(capfd.readouterr())
    plan(*options, "--model.lora.r=4")
    assert warning in capfd.readouterr().err  # of the user's own run

    def choose_adapters(candidates: Sequence[Candidate]) -> Candidate:
        return next(c for c in candidates if "model.lora" in c.changes)

    monkeypatch.setattr("lit_fsdp.cli.plan.choose", choose_adapters)
    (note,) = plan(*options)["search"]["notes"]
    assert warning in note
    said = capfd.readouterr()
    assert f"note: chosen: {note}\n" in said.out
    assert warning not in said.err
