"""Optimizers whose state shards with the parameters."""
