"""Safetensors files in: each rank reads, converts and quantizes only the rows it keeps."""
