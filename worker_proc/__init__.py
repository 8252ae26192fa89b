"""Model execution of one rank: the model, its KV tensors and sampling. Makes no decisions about requests or blocks."""
