"""Generated speech in validation and prediction: compared with recordings, decoded, transcribed and measured."""
