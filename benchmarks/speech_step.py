"""What the Trainer and FSDP2 add to a training step of a speech model: a step of theirs and a plain one in turn.

    python benchmarks/speech_step.py --out PAGE

One process, one rank, CPU. After each step of the Trainer, a callback takes a step on a copy of the model with the same
batch, by torch alone: forward, backward, clipping, and fused AdamW, which ours has too. Compared is CPU time, as the
machine may be shared. What the Trainer does between two steps (reading data, moving it, metrics, schedule) counts as
its own; the plain loop has none.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from speech import CONFIG
from typing_extensions import override

from lit_fsdp import FSDP2Strategy
from lit_fsdp.tasks import LRSchedule, SpeechData, TextToSpeech
from lit_fsdp.tasks.tts.config import parse_config
from lit_fsdp.tasks.tts.families.qwen3_model import PREDICTOR_WEIGHT, Qwen3TTS
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow, write_shard


class PlainSteps(pl.Callback):
    """Takes a plain step after each step of the Trainer.

    Args:
        config: Of the model.
        num_warmup: Steps at first that do not count.
    """

    def __init__(self, config: dict[str, Any], num_warmup: int) -> None:
        self.model = Qwen3TTS(parse_config(deepcopy(config)))
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5, fused=True)
        self.num_warmup = num_warmup
        self.seconds: list[tuple[float, float]] = []  # of the Trainer, and plain
        self.losses: list[float] = []
        self._begin = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin = time.process_time()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        middle = time.process_time()
        output = self.model(batch)
        loss = output.talker_loss / output.num_tokens
        loss = loss + PREDICTOR_WEIGHT * output.predictor_loss / output.num_frames
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        end = time.process_time()
        if batch_idx >= self.num_warmup:
            self.seconds.append((middle - self._begin, end - middle))
        self._begin = time.process_time()


def main() -> None:
    """Compare, and print or write a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, nargs=2, default=(6, 3), help="of the talker and of the predictor")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = json.loads(json.dumps(CONFIG))
    talker = config["talker_config"]
    sizes = {"hidden_size": args.width, "intermediate_size": 3 * args.width}
    talker |= {**sizes, "num_hidden_layers": args.blocks[0]}
    talker["code_predictor_config"] |= {**sizes, "num_hidden_layers": args.blocks[1]}
    config["speaker_encoder_config"]["enc_dim"] = args.width
    plain = PlainSteps(config, args.warmup)
    with tempfile.TemporaryDirectory() as folder:
        write_shard(Path(folder) / "shard-00000.parquet", make_rows(2 * args.steps, args.width))
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=FSDP2Strategy(print_plan=False),
            max_steps=args.steps,
            gradient_clip_val=1.0,
            callbacks=[plain],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        data = SpeechData(
            train=folder, tokenizer="bytes", batch_size=2, num_workers=0, speaker_embedding="row", cache_dir=folder
        )
        trainer.fit(TextToSpeech(config=config, lr_scheduler=LRSchedule(type="constant")), data)
    ratios = [own / other for own, other in plain.seconds]
    own, other = (median(column) for column in zip(*plain.seconds, strict=True))
    line = (
        f"torch {torch.__version__}, 1 thread, {len(ratios)} steps of each in turn, 2 clips of 40 to 60 frames, "
        f"{args.width} wide, {args.blocks[0]} and {args.blocks[1]} blocks: Trainer with FSDP2 {own:.3f} CPU s, plain "
        f"{other:.3f} CPU s a step, ratio of medians {own / other:.3f} [{min(ratios):.3f}-{max(ratios):.3f}]\n"
    )
    print(line)
    if args.out is not None:
        args.out.write_text(line)


def make_rows(count: int, width: int) -> list[PreparedRow]:
    """Return clips with random codes."""
    draw = np.random.default_rng(0)
    rows = []
    for i in range(count):
        codes = draw.integers(0, 2048, (int(draw.integers(40, 61)), 16))
        voice = draw.standard_normal(width).astype(np.float32)
        about = {"audio": f"{i}.wav", "text": "a" * 50, "speaker": "kim"}
        rows.append(PreparedRow(**about, codes=codes, seconds=len(codes) / 12.5, speaker_embedding=voice))
    return rows


if __name__ == "__main__":
    main()
