"""One folder per operation: contract, meaning, an implementation per kind of device. Imports nothing of octavo's.

Every operation is batch-invariant: a row (a token, a request) of the result has the same bits
whatever the other rows hold, however many there are and wherever the row lies. A new implementation must
keep that; `tests/kernels` and `tests/gpu` check it with `torch.equal`.

A folder holds
    ``__init__.py``   the public function: contract, checks, choice of the implementation by device
    ``reference.py``  the meaning, in plain torch and float32, with no thought of speed
    ``cpu.py``        the CPU implementation through torch
    ``gpu.py``        the implementation for NVIDIA GPUs, in Triton; imported by the first tensor on one
    ``native.h``      the CPU implementation in C++ (``native.cpp`` if it is a unit of compilation of its own)
    ``native.py``     its arguments, and its place in a program (``record.py`` where that is longer)
    ``cases.py``      shapes, dtypes and tolerances, shared by the test and the benchmark

Names of tensors end in their dimensions, outermost first:
    T  tokens of a step            R  requests of a step
    N  query heads                 K  key/value heads          H  head dimension
    D  model dimension             F  mlp dimension            V  vocabulary
    P  blocks                      S  token slots of a block
    I  input features              O  output features          C  half the head dimension (rotary pairs)
A number before a letter multiplies it (`gate_up_T2F`).
"""
