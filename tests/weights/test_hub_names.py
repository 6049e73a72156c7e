"""What the Hub calls the tensors of a model, part by part, is what ``save_pretrained`` writes as a whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import LANGUAGE_MODELS, build_language_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, conversion_mapping
from transformers.core_model_loading import GroupWeightRename

from lit_fsdp.weights.hub_names import Part, convert_part, list_saved_names, plan_parts

GATED = LANGUAGE_MODELS["llama"]
EXPERTS = {**GATED, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**GATED, "tie_word_embeddings": True},
    "mixtral": LANGUAGE_MODELS["mixtral"],  # experts one by one, and renamed
    "qwen2_moe": EXPERTS,
    "gpt_oss": {**GATED, "num_local_experts": 4},
    "hrm_text": GATED,  # four projections of the model are one on the Hub
}


def plan(model: Any) -> list[Part]:
    state = model.state_dict()
    return plan_parts(model, {name: state[name] for name in list_saved_names(model)})


@pytest.mark.parametrize("family", FAMILIES)
def test_all_parts_together_are_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    known = AutoConfig.for_model(family)
    config = AutoConfig.for_model(family, **{k: v for k, v in FAMILIES[family].items() if hasattr(known, k)})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    truth = load_file(tmp_path / "model.safetensors")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ours: dict[str, torch.Tensor] = {}
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    for part in plan(empty):
        converted = convert_part(empty, {name: state[name] for name in part.inputs})
        assert {n: (t.shape, t.dtype) for n, t in converted.items()} == {
            n: (t.shape, t.dtype) for n, t in part.outputs.items()
        }
        ours |= converted
    assert ours.keys() == truth.keys()
    assert all(torch.equal(ours[name], truth[name]) for name in truth)


def test_a_part_is_no_more_than_what_belongs_together() -> None:
    parts = plan(build_language_model("mixtral"))
    assert all(len(part.inputs) == 1 for part in parts)
    sizes = [len(part.outputs) for part in parts if "experts" in next(iter(part.inputs))]
    assert sizes == [8, 4] * 3  # of 4 experts: gate and up, then down, in each layer


def test_an_architecture_that_is_converted_only_as_a_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second name changes only if the first has been seen.
    rename = GroupWeightRename(["attn.a_query", "attn.b_key"], ["self_attn.k_proj", "self_attn.q_proj"])
    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", {"llama": [rename]}.get)
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot be exported: Transformers converts its tensors only"):
        plan(build_language_model("llama"))
