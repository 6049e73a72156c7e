"""A run whose model is talked to: adapters over a tiny base, with a chat template."""

import json
from pathlib import Path
from typing import Any

import torch
from launches import fork_ranks, write_run
from training import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_fsdp.export.model import export_model

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('says no') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def make_run(folder: Path) -> None:
    """Write ``base``, ``runs/run`` and its ``exported`` adapters into the current folder."""
    save_model(folder / "base", num_key_value_heads=2, **SIZES)
    model = {"config": None, "pretrained": "base", "lora": {"r": 4}, "optimizer": {"learning_rate": 0.01}}
    write_run(folder, model=model, data={"chat_template": TEMPLATE})
    ended = fork_ranks("fit", "--config=run.yaml")
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    export_model("runs/run", Path("exported"))


def answer_plainly(prompts: list[Any], max_new_tokens: int) -> list[str]:
    """Return what Transformers alone answers, one after another, always by the likeliest token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained("exported"), AutoTokenizer.from_pretrained("exported")
    texts = []
    for prompt in prompts:
        text = prompt
        if not isinstance(prompt, str):
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        with torch.no_grad():
            output = model.generate(ids, **settings, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
        texts.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def write_prompts(path: Path, prompts: list[Any]) -> None:
    """Write rows of text and of messages."""
    rows = ({"prompt": p} if isinstance(p, str) else {"messages": p} for p in prompts)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
