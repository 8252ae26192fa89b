"""Steps on a GPU: static buffers, decodes as CUDA graphs, two steps in flight."""
