"""What ranks compare of their devices and rows before the first step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_fsdp.sharding.mixed_precision import MixedPrecision, read_precision
from lit_fsdp.strategy.rank_facts import list_device_facts, list_device_notes, list_row_facts
from lit_fsdp.strategy.roll_call import Presence, describe_difference, describe_notes

GPU = torch.device("cuda", 0)
CARDS = {"a": ("NVIDIA A100-SXM4-80GB", 79.3, True), "b": ("Tesla T4", 14.6, False)}


def come(monkeypatch: pytest.MonkeyPatch, rank: int, host: str, dtypes: MixedPrecision, nccl: int = 28) -> Presence:
    """The presence of a rank on a GPU of that host."""
    name, gib, has_bfloat16 = CARDS[host]
    card = SimpleNamespace(name=name, total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, nccl, 3))
    facts, notes = list_device_facts(GPU, dtypes), list_device_notes(GPU)
    return Presence(rank=rank, host=host, pid=rank, facts=facts, notes=notes)


def test_unequal_gpus_are_told_and_refused_only_where_one_lacks_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision, refusal in (("32-true", None), ("16-mixed", None), ("bf16-mixed", "(bfloat16 emulated: this GPU")):
        dtypes = read_precision(precision)
        present = [come(monkeypatch, rank, host, dtypes) for rank, host in enumerate("aab")]
        cards = "NVIDIA A100-SXM4-80GB (79 GiB) on ranks 0-1 on a; Tesla T4 (15 GiB) on rank 2 on b"
        assert describe_notes(present) == [f"GPU differs between ranks: {cards}"]
        line = describe_difference(present)
        assert (line is None) == (refusal is None)
        assert refusal is None or (line and refusal in line and "dtypes: rank 0 on a has kept in float32, " in line)
    same = [come(monkeypatch, rank, "b", read_precision("bf16-mixed")) for rank in range(2)]
    assert describe_difference(same) is None
    assert describe_notes(same) == []


def test_a_dtype_or_an_nccl_of_ones_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = (
        MixedPrecision(param_dtype="bfloat16"),
        MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32"),
    )
    line = describe_difference([come(monkeypatch, 0, "a", wide), come(monkeypatch, 1, "a", narrow)])
    assert line is not None
    assert "rank 1 on a has kept in that of the model, computed in bfloat16, reduced in float32: expected" in line
    line = describe_difference([come(monkeypatch, 0, "a", wide), come(monkeypatch, 1, "a", wide, nccl=27)])
    assert line == "NCCL: rank 0 on a has 2.28.3, rank 1 on a has 2.27.3: expected the same on all ranks"
    cpu = Presence(rank=1, host="b", pid=1, facts=list_device_facts(torch.device("cpu"), wide))
    assert str(describe_difference([come(monkeypatch, 0, "a", wide), cpu])).startswith("device: rank 0 on a has cuda")
    assert list_device_notes(torch.device("cpu")) == {}


def test_rows_are_known_by_number_and_digest_where_a_loader_has_one() -> None:
    own: Any = SimpleNamespace(fingerprint="0123456789abcdef", dataset=range(1200))
    other: Any = SimpleNamespace(fingerprint="", dataset=range(3))
    trainer: Any = SimpleNamespace(train_dataloader={"a": own, "b": other})
    assert list_row_facts(trainer) == {"training data": "1,200 rows (digest 0123456789ab)"}
    trainer.train_dataloader = [torch.utils.data.DataLoader([1, 2])]  # type: ignore[arg-type]
    assert list_row_facts(trainer) == {}
