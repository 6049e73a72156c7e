"""Trains a language model in a TorchTrainer of Ray: Ray Data tokenizes text on the cluster and streams it to the ranks.

    python examples/ray_train.py --train data/part.jsonl --tokenizer Qwen/Qwen3-0.6B --num_workers 4 --gpu

All machines have to share the folder of --out. Without code, `python -m lit_fsdp fit --launcher ray` does the same.
"""

import argparse
import os
from pathlib import Path

import ray
import ray.train
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from lit_fsdp import FSDP2Strategy
from lit_fsdp.callbacks import RayReport
from lit_fsdp.callbacks.ray_report import find_reported_checkpoint
from lit_fsdp.tasks import CausalLM, RayTextData

MODEL = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512}
MODEL |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def train(config: dict) -> None:
    """Run as one rank; each worker of Ray is one."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])  # Ray sets it, as torchrun does
    trainer = Trainer(
        strategy=FSDP2Strategy(),
        devices=ranks,
        num_nodes=int(os.environ["WORLD_SIZE"]) // ranks,
        max_steps=config["steps"],
        default_root_dir=config["out"],
        callbacks=[
            ModelCheckpoint(f"{config['out']}/checkpoints", every_n_train_steps=config["save_every"]),
            RayReport(),
        ],
        enable_progress_bar=False,
    )
    # After a failure Ray starts all workers again; they go on from the last checkpoint.
    task = CausalLM(config={**MODEL, "vocab_size": config["vocab_size"]})
    trainer.fit(task, config["data"], ckpt_path=find_reported_checkpoint())


def main() -> None:
    """Read the command line, and let Ray start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", nargs="+", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", type=Path, default=Path("ray_run"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save_every", type=int, default=50)
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--address", help="of the cluster; default: the one of this machine, else a new one")
    parser.add_argument("--num_cpus", type=int, help="of a new cluster: one for each rank, and some for Ray Data")
    options = parser.parse_args()

    ray.init(address=options.address, num_cpus=options.num_cpus)
    data = RayTextData(train=options.train, tokenizer=options.tokenizer, seq_length=128, batch_size=2)
    data.setup("fit")  # loads the tokenizer
    settings = {"data": data, "vocab_size": len(data.tokenizer), "steps": options.steps}
    out = str(options.out.absolute())
    trainer = TorchTrainer(
        train,
        train_loop_config={**settings, "out": out, "save_every": options.save_every},
        datasets=data.make_ray_datasets(),
        scaling_config=ScalingConfig(num_workers=options.num_workers, use_gpu=options.gpu),
        # gloo as well: some of what ranks tell each other is in host memory.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if options.gpu else "gloo"),
        run_config=RunConfig(storage_path=f"{out}/ray", failure_config=FailureConfig(max_failures=2)),
    )
    result = trainer.fit()
    print(f"step {result.metrics['step']}: train/loss {result.metrics['train/loss']:.3f}, {result.checkpoint}")


if __name__ == "__main__":
    main()
