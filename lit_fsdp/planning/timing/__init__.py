"""The seconds of a step: peaks of GPUs, links between them, and a timeline of compute and communication."""
