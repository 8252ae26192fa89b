"""A model's files: where they are, what they say about the model, and GGUF metadata in Hugging Face form."""

from octavo.frontend.model_files.facts import read_model_facts
from octavo.frontend.model_files.locate import locate_model

__all__ = ["locate_model", "read_model_facts"]
