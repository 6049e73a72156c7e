"""From audio files to rows with codes and speaker embeddings, on this machine or a Ray cluster."""
