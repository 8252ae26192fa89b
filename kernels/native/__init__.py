"""The native CPU path: a C++ library built on this machine, and programs of its operations.

Holds what all operations share. An operation's own code lies in its folder: `native.h` or `native.cpp`, and
`native.py`, which mirrors its arguments.
"""
