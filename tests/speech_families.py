"""Tiny models of the families of Transformers, clips for them, and runs that are the same for each family."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import speech_training as training
import torch
import torch.distributed as dist
from speech_training import GLOBAL_BATCH, NUM_STEPS, build_trainer
from training import OPTIMIZER, Recorder, Result, fit_and_write

from lit_fsdp.callbacks import WritePredictions
from lit_fsdp.tasks import LRSchedule, SpeechData, TextToSpeech
from lit_fsdp.tasks.tts.families.model_types import parse_family
from lit_fsdp.tasks.tts.generation import Sampling
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow
from lit_fsdp.tasks.tts.tokenizer import build_byte_tokenizer
from lit_fsdp.tasks.tts.utterance import Utterance
from lit_fsdp.weights.load import init_weights, materialize

MIMI = {
    "model_type": "mimi", "hidden_size": 32, "num_filters": 4, "codebook_size": 64, "codebook_dim": 16,
    "vector_quantization_hidden_dimension": 16, "num_quantizers": 6, "num_semantic_quantizers": 1,
    "upsample_groups": 32, "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "upsampling_ratios": [8, 6, 5, 4],
}  # fmt: skip
DEPTH = {
    "num_codebooks": 6, "backbone_hidden_size": 32, "vocab_size": 67, "hidden_size": 24, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 7,
}  # fmt: skip
CSM: dict[str, Any] = {
    "model_type": "csm", "num_codebooks": 6, "vocab_size": 67, "text_vocab_size": 270, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "codebook_pad_token_id": 66, "codebook_eos_token_id": 0, "audio_token_id": 268,
    "audio_eos_token_id": 269, "pad_token_id": 267, "bos_token_id": 266, "tie_codebooks_embeddings": True,
    "depth_decoder_config": DEPTH, "codec_config": MIMI,
}  # fmt: skip

DIA: dict[str, Any] = {
    "model_type": "dia", "delay_pattern": [0, 2, 3, 4],
    "encoder_config": {
        "model_type": "dia_encoder", "max_position_embeddings": 64, "num_hidden_layers": 2, "hidden_size": 24,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48, "vocab_size": 256,
    },
    "decoder_config": {
        "model_type": "dia_decoder", "max_position_embeddings": 128, "num_hidden_layers": 2, "hidden_size": 32,
        "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "cross_num_attention_heads": 4, "cross_head_dim": 8, "cross_num_key_value_heads": 4, "cross_hidden_size": 24,
        "vocab_size": 68, "num_channels": 4, "eos_token_id": 64, "pad_token_id": 65, "bos_token_id": 66,
    },
}  # fmt: skip
DAC = {
    "model_type": "dac", "encoder_hidden_size": 8, "downsampling_ratios": [2, 4, 8, 8],
    "upsampling_ratios": [8, 8, 4, 2], "decoder_hidden_size": 64, "n_codebooks": 4, "codebook_size": 64,
    "codebook_dim": 4, "sampling_rate": 44100,
}  # fmt: skip


_PLAIN: dict[str, Any] = {"shuffle": False, "num_workers": 0, "text_dropout": 0.0}


def make_rows(num_codebooks: int, num_rows: int = NUM_STEPS * GLOBAL_BATCH) -> list[PreparedRow]:
    return training.make_rows(num_rows, num_codebooks=num_codebooks, syllable="ab", voice_size=0)


def make_utterances(raw: dict[str, Any], rows: list[PreparedRow], voices: dict[str, Any]) -> list[Utterance]:
    family, config = parse_family(raw)
    tokenizer = build_byte_tokenizer()
    return [
        Utterance(
            text_ids=family.encode_text(tokenizer, row.text, config, voices.get(row.speaker)),
            codes=row.codes,
            speaker=voices.get(row.speaker),
        )
        for row in rows
    ]


def build_model(raw: dict[str, Any], seed: int = 0) -> Any:
    family, config = parse_family(raw)
    with torch.device("meta"):
        model = family.build_model(config)
    materialize(model, torch.device("cpu"))
    init_weights(model, seed)
    return model


def train_plainly(raw: dict[str, Any], voices: dict[str, Any]) -> Result:
    family, config = parse_family(raw)
    utterances = make_utterances(raw, make_rows(config.num_codebooks), voices)
    steps = [utterances[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH] for step in range(NUM_STEPS)]
    batches = [family.collate(step, config) for step in steps]
    return training.train_model(build_model(raw), batches, family.get_loss_weights(config))


def learn(raw: dict[str, Any], rows: list[PreparedRow], voices: dict[str, Any], num_steps: int, below: float) -> Any:
    """Return a model that knows clips by heart, with a loss below that, and the clips."""
    family, config = parse_family(raw)
    model, utterances = build_model(raw), make_utterances(raw, rows, voices)
    batch, weights = family.collate(utterances, config), family.get_loss_weights(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(num_steps):
        loss = training.compute_loss(model, batch, weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < below
    return model.eval(), utterances


def build_task(raw: dict[str, Any], **options: Any) -> TextToSpeech:
    source = {} if "pretrained" in options else {"config": raw}
    return TextToSpeech(**source, optimizer=OPTIMIZER, lr_scheduler=LRSchedule(type="constant"), **options)


def build_data(folder: Path, **options: Any) -> SpeechData:
    return SpeechData(train=str(folder), tokenizer="bytes", **{**_PLAIN, **options})


def fit(raw: dict[str, Any], folder: Path, out: Path, accumulate: int, options: dict[str, Any], **of_data: Any) -> None:
    pl.seed_everything(0, verbose=False)
    trainer = build_trainer(callbacks=[Recorder()], accumulate_grad_batches=accumulate)
    data = build_data(folder, batch_size=GLOBAL_BATCH // dist.get_world_size() // accumulate, **of_data)
    fit_and_write(trainer, build_task(raw, **options), data, out / "result.pt", save=out / "run.ckpt")


def speak_unequally(raw: dict[str, Any], folder: Path, out: Path, find_heads: Any, end: int) -> None:
    """Speak texts on ranks of which the first ends at once, and the others never."""
    pl.seed_everything(0, verbose=False)
    task = build_task(raw, sampling=Sampling(do_sample=False, max_frames=5))

    def hurry(module: Any, _: Any, logits: torch.Tensor) -> torch.Tensor | None:
        if task.model is None or not any(module is head for head in find_heads(task.model)):
            return None
        away = torch.zeros(logits.shape[-1])
        away[end] = -1e4 if dist.get_rank() else 1e4
        return logits + away

    torch.nn.modules.module.register_module_forward_hook(hurry)
    (out / "texts.txt").write_text("a\nab\nabc\n")
    trainer = build_trainer(callbacks=[WritePredictions(path=str(out / "spoken.jsonl"))])
    rows = trainer.predict(task, build_data(folder, predict=str(out / "texts.txt"), batch_size=1))
    lengths = [len(codes) for batch in rows for codes in batch["prediction"]]
    ended = [has_ended for batch in rows for has_ended in batch["has_ended"]]
    torch.save((lengths, ended), out / f"{dist.get_rank()}.pt")


def make_checkpoint(raw: dict[str, Any], folder: Path, seed: int = 5) -> Path:
    """Write a folder like those on the Hub, with the codec where that is part of the model."""
    from transformers import AutoConfig, CsmForConditionalGeneration, DiaForConditionalGeneration

    torch.manual_seed(seed)
    kind: Any = CsmForConditionalGeneration if raw["model_type"] == "csm" else DiaForConditionalGeneration
    model = kind(AutoConfig.for_model(**raw))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("embed_sum"):  # else all sounds have the same codes, and all codes sound the same
                tensor.copy_(torch.randn(tensor.shape) * 0.5)
            elif name.startswith("codec_model.") and tensor.dim() == 3:
                tensor.mul_(1.6)  # torch's initialization lets sound fade from layer to layer
    model.save_pretrained(folder)
    build_byte_tokenizer().save_pretrained(folder)
    return folder
