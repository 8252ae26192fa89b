"""Converts the metadata of GGUF files to files in Hugging Face layout."""
