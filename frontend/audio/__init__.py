"""Audio of requests: from files to spectrograms, prompts of models that read audio, and transcription."""
