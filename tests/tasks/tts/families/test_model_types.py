"""All families through one interface: CSM and Dia sharded as on one device, and no rank waits for another for ever."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from differences import find_largest
from speech_families import CSM, DIA, fit, make_rows, speak_unequally, train_plainly
from speech_training import make_config
from training import Result

from lit_fsdp.tasks.tts.preparation.prepared import write_shard
from ranks import run_ranks


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family: its tiny model, speakers, what writes codes, the code that is the end, and the fewest frames."""

    raw: dict[str, Any]
    num_codebooks: int
    find_heads: Callable[[Any], list[Any]]
    end: int
    fewest: int = 0
    voices: dict[str, Any] = field(default_factory=dict)


def find_heads_of_csm(model: Any) -> list[Any]:
    return [model.lm_head, model.depth_decoder.codebooks_head]


def find_heads_of_dia(model: Any) -> list[Any]:
    return [model.logits_dense]


def find_heads_of_qwen3(model: Any) -> list[Any]:
    return [model.talker.codec_head]


CASES = [
    Case(raw=CSM, num_codebooks=6, find_heads=find_heads_of_csm, end=0, voices={"kim": 0, "lee": 1}),
    Case(raw=DIA, num_codebooks=4, find_heads=find_heads_of_dia, end=64),
]
QWEN3 = Case(raw=make_config(), num_codebooks=16, find_heads=find_heads_of_qwen3, end=66, fewest=2)


def name(case: Case) -> str:
    return str(case.raw["model_type"])


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def prepared(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_shard(folder / "shard-00000.parquet", make_rows(case.num_codebooks))
    return folder


@pytest.fixture(scope="module")
def truth(case: Case) -> Result:
    return train_plainly(case.raw, case.voices)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=name, indirect=True, scope="module")
@pytest.mark.parametrize(
    ("world_size", "accumulate"), [(1, 1), (2, 1), (1, 3), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_training_is_the_same_on_any_number_of_ranks(
    case: Case, prepared: Path, tmp_path: Path, truth: Result, world_size: int, accumulate: int
) -> None:
    run_ranks(fit, case.raw, prepared, tmp_path, accumulate, {}, world_size=world_size)
    result = Result(**torch.load(tmp_path / "result.pt"))
    for own, wanted in ((result.losses, truth.losses), (result.grad_norms, truth.grad_norms)):
        assert find_largest(abs(a - b) / abs(b) for a, b in zip(own, wanted, strict=True)) < 1e-6
    others = result.weights.keys() - truth.weights.keys()
    assert not truth.weights.keys() - result.weights.keys()
    assert case.raw is CSM or not others
    assert find_largest(float((result.weights[n] - w).abs().max()) for n, w in truth.weights.items()) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("case", [*CASES, QWEN3], ids=name, indirect=True, scope="module")
def test_ranks_whose_speech_ends_at_different_frames_do_not_wait_for_each_other(
    case: Case, prepared: Path, tmp_path: Path
) -> None:
    run_ranks(speak_unequally, case.raw, prepared, tmp_path, case.find_heads, case.end, world_size=2)
    (early, late) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert early == ([case.fewest] * 2, [True, True])
    assert late == ([5, 5], [False, False])
    written = [json.loads(line) for line in (tmp_path / "spoken.jsonl").read_text().splitlines()]
    assert [row["index"] for row in written] == [0, 1, 2]
    assert [len(row["prediction"]) for row in written] == [case.fewest, 5, case.fewest]
    assert all(len(frame) == case.num_codebooks for row in written for frame in row["prediction"])
