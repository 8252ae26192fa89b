"""LoRA adapters in a worker: read, kept in host memory, and put into the slots of the layers that they change."""
