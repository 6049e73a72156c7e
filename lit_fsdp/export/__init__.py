"""A run leaves as a Hugging Face folder: whole, as an adapter, merged, or quantized."""
