"""Generation writes no code that the codec has no sound for, however likely the model finds it."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from speech_families import CSM, DIA, build_model
from speech_training import make_config
from torch import Tensor, nn

from lit_fsdp.tasks.tts.codec.formants import build_small_codec
from lit_fsdp.tasks.tts.families.model_types import parse_family
from lit_fsdp.tasks.tts.generation import GREEDY, Sampling
from lit_fsdp.tasks.tts.tokenizer import build_byte_tokenizer
from lit_fsdp.tasks.tts.utterance import Utterance

QUICKSTART = Path(__file__).parents[3] / "configs" / "tts_quickstart.yaml"


def read_quickstart() -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())["model"]["init_args"]["config"]
    return raw


def make_wide_predictor() -> dict[str, Any]:
    """A code predictor with more codes than there are below the special ids of the talker."""
    raw = make_config()
    raw["talker_config"]["code_predictor_config"]["vocab_size"] = 80
    return raw


def prefer_other_codes(model: nn.Module, size: int) -> None:
    """Have each head find those codes likeliest that the codec has no sound for."""

    def prefer(_: Any, __: Any, logits: Tensor) -> Tensor:
        num_codes = model.vocab_size if hasattr(model, "num_channels") else logits.shape[-1]
        rows = logits.clone().view(-1, num_codes)  # type: ignore[arg-type]  # Dia: all codebooks in a row
        rows[:, size:] += 1e4
        return rows.view_as(logits)

    heads = ("codec_head", "lm_head", "codebooks_head", "logits_dense")
    for name, module in model.named_modules():
        if any(part in heads for part in name.split(".")[-2:]) and not isinstance(module, nn.ModuleList):
            module.register_forward_hook(prefer)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "raw", [read_quickstart(), make_wide_predictor(), CSM, DIA], ids=["quickstart", "wide predictor", "csm", "dia"]
)
def test_only_codes_of_the_codec_are_written(raw: dict[str, Any], do_sample: bool) -> None:
    family, config = parse_family(deepcopy(raw))
    model = build_model(raw).eval()
    prefer_other_codes(model, config.codebook_size)
    voice = 0 if config.voice_size is None else torch.zeros(config.voice_size).numpy()
    ids = family.encode_text(build_byte_tokenizer(), "a red boat", config, voice)
    batch = family.collate_prompts([Utterance(text_ids=ids, speaker=voice)], config)
    sampling = Sampling(max_frames=4) if do_sample else Sampling(max_frames=4, **GREEDY)
    if raw is DIA and not do_sample:
        sampling = Sampling(max_frames=4, do_sample=False)
    (speech,) = family.generate(model, batch, family.complete_sampling(sampling, None))
    assert speech.codes.shape[1] == config.num_codebooks
    assert speech.codes.numel() == 0 or int(speech.codes.max()) < config.codebook_size
    if speech.codes.shape[1] == 16:
        assert len(speech.codes) >= 2
        (audio,) = build_small_codec().decode([speech.codes])
        assert audio.isfinite().all()
