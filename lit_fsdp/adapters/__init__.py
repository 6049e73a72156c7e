"""LoRA and its relatives through peft: settings, injection, decompositions."""
