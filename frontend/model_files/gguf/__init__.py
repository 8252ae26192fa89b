"""GGUF files: their metadata as files in Hugging Face layout."""
