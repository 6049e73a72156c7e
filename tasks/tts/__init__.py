"""Speech: fine-tuning of text-to-speech models."""
