"""A model's files: locates them, reads their metadata, and converts GGUF metadata to Hugging Face format."""

from octavo.frontend.model_files.facts import read_model_facts
from octavo.frontend.model_files.locate import locate_model

__all__ = ["locate_model", "read_model_facts"]
