"""The native CPU path: a C++ library built on this machine, and programs of its operations.

Holds the code that all operations share. The code of one operation is in its folder: the kernel in `native.h` or
`native.cpp`, and its argument structure in `native.py`.
"""
