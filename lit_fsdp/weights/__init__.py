"""Safetensors files in: each rank reads, converts and quantizes only the rows of its shards.

It hands on no names, because ``load`` needs peft and Transformers, which not every reader of a file does.
"""
