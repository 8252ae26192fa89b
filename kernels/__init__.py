"""One folder per operation: contract, reference, one implementation per kind of device. Imports nothing else of octavo.

Every operation is batch-invariant: a row of the result (a token or a request) has the same bits in every batch. The
other rows, their number and the position of the row do not matter. A new implementation must keep this property;
`tests/kernels` and `tests/gpu` check it with `torch.equal`.

A folder holds
    ``__init__.py``   the public function: contract, checks, choice of the implementation by device
    ``reference.py``  what the operation means: plain torch in float32, not optimized
    ``cpu.py``        the CPU implementation through torch
    ``gpu.py``        the implementation for NVIDIA GPUs, in Triton; imported when the first tensor is on one
    ``native.h``      the CPU implementation in C++ (``native.cpp`` if it is compiled on its own)
    ``native.py``     its ctypes arguments, and how it is recorded into a program (``record.py`` if that is longer)
    ``cases.py``      shapes, dtypes and tolerances, shared by the test and the benchmark

Names of tensors end in their dimensions, outermost first:
    T  tokens of a step            R  requests of a step
    N  query heads                 K  key/value heads          H  head dimension
    D  model dimension             F  mlp dimension            V  vocabulary
    P  blocks                      S  token slots of a block
    I  input features              O  output features          C  half the head dimension (rotary pairs)
A number before a letter multiplies it (`gate_up_T2F`).
"""
