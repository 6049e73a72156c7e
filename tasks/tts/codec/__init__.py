"""Codecs: audio to frames of codes and back."""
