"""Text, HTTP and the public Python API. It makes no batches and computes nothing on tensors."""
