from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fsdp.tasks.text.batches import IGNORED, DocumentRows, PackedRows, stack_rows
from lit_fsdp.tasks.text.tokens import Encoded, TokenStore, TokenWriter

LENGTHS = [5, 1, 9, 3, 12, 7]
PAD = 99


def store_of(folder: Path, documents: list[list[int]]) -> TokenStore:
    with TokenWriter(folder) as writer:
        for ids in documents:
            writer.add(Encoded(ids=ids, learn=[True] * len(ids)))
        writer.finish(num_bad=0, bad=[])
    return TokenStore(folder)


def packed(folder: Path, seq_length: int = 8) -> tuple[list[list[int]], PackedRows]:
    generator = np.random.default_rng(0)
    documents = [generator.integers(1, 50, size).tolist() for size in LENGTHS]
    store = store_of(folder, documents)
    return documents, PackedRows(store, np.arange(len(store)), seq_length=seq_length, pad_id=PAD)


def pieces(row: dict[str, Any]) -> list[slice]:
    starts = [*np.flatnonzero(row["position_ids"] == 0).tolist(), len(row["position_ids"])]
    return [slice(a, b) for a, b in pairwise(starts)]


def tiny_llama(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    config._attn_implementation = attention
    return LlamaForCausalLM(config).eval()


def test_packed_rows_hold_all_tokens_in_order_in_rows_of_exactly_seq_length(tmp_path: Path) -> None:
    documents, rows = packed(tmp_path)
    flat = np.concatenate([rows[i]["input_ids"] for i in range(len(rows))])
    total = sum(LENGTHS)
    assert len(flat) == len(rows) * 8 >= total
    assert flat[:total].tolist() == sum(documents, [])
    assert set(flat[total:].tolist()) <= {PAD}
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_each_piece_starts_at_position_0_and_its_first_token_has_no_label(tmp_path: Path) -> None:
    _, rows = packed(tmp_path)
    found = []
    for i in range(len(rows)):
        row = rows[i]
        for piece in pieces(row):
            ids, labels = row["input_ids"][piece], row["labels"][piece]
            assert row["position_ids"][piece].tolist() == list(range(len(ids)))
            assert labels[0] == IGNORED
            if ids[0] != PAD:
                assert labels[1:].tolist() == ids[1:].tolist()
                found.append(len(ids))
            else:
                assert set(labels.tolist()) == {IGNORED}
    # 5 1 9 3 12 7 cut at every 8th token
    assert found == [5, 1, 2, 7, 1, 2, 6, 6, 2, 5]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_model_sees_each_piece_of_a_packed_row_as_if_it_were_alone(
    tmp_path: Path, attention: str, batch_size: int, mode: str
) -> None:
    _, rows = packed(tmp_path, seq_length=20)
    model = tiny_llama(attention).train(mode == "train")
    batch = stack_rows([rows[i] for i in range(batch_size)])
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    for i in range(batch_size):
        assert len(pieces(rows[i])) > 1
        for piece in pieces(rows[i]):
            alone = model(input_ids=batch["input_ids"][i : i + 1, piece], use_cache=False).logits
            torch.testing.assert_close(logits[i, piece], alone[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_other_tokens_in_the_first_document_change_no_logit_of_the_second(
    tmp_path: Path, attention: str, batch_size: int
) -> None:
    _, rows = packed(tmp_path, seq_length=20)
    model = tiny_llama(attention)
    batch = stack_rows([rows[i] for i in range(batch_size)])
    first, *others = pieces(rows[0])
    changed = batch["input_ids"].clone()
    changed[0, first] = 1 + (changed[0, first] + 7) % 50
    with torch.no_grad():
        before, after = (
            model(input_ids=ids, position_ids=batch["position_ids"], use_cache=False).logits
            for ids in (batch["input_ids"], changed)
        )
    assert not torch.allclose(before[0, first], after[0, first])
    for piece in others:
        assert torch.equal(before[0, piece], after[0, piece])
    assert torch.equal(before[1:], after[1:])


def test_a_row_that_is_one_document_and_a_row_of_several_can_share_a_batch(tmp_path: Path) -> None:
    store = store_of(tmp_path, [list(range(1, 9)), [1, 2, 3], [4, 5, 6, 7, 8]])
    rows = PackedRows(store, np.arange(3), seq_length=8, pad_id=PAD)
    model = tiny_llama("sdpa")
    batch = stack_rows([rows[0], rows[1]])
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    for i, piece in ((0, slice(0, 8)), (1, slice(0, 3)), (1, slice(3, 8))):
        alone = model(input_ids=batch["input_ids"][i : i + 1, piece], use_cache=False).logits
        torch.testing.assert_close(logits[i, piece], alone[0], atol=1e-5, rtol=0)


def test_long_documents_are_cut_and_counted_and_prompts_keep_their_end(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[1, 2, 3, 4, 5], [6, 7]])
    rows = DocumentRows(store, np.arange(2), seq_length=3)
    assert rows[0]["input_ids"].tolist() == [1, 2, 3]
    assert rows.describe_cuts() == "1 of 2 rows are longer than seq_length 3 and are cut"
    prompts = DocumentRows(store, np.arange(2), seq_length=3, keep_end=True)
    assert prompts[0]["input_ids"].tolist() == [3, 4, 5]
    assert DocumentRows(store, np.arange(2), seq_length=5).describe_cuts() is None
