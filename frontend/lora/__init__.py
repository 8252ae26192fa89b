"""LoRA adapters by name: read and checked once here, loaded by the workers."""
