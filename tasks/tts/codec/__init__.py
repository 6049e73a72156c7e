"""Audio to frames of codes and back."""
