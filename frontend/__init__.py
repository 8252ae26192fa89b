"""Text, HTTP and the public Python API. Decides nothing about batches and computes nothing on tensors."""
