"""Audio of requests: from files to spectrograms, and prompts of models that transcribe speech."""
