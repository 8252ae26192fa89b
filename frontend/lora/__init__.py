"""LoRA adapters by name: their files are read and checked here once, and loaded by the workers."""
