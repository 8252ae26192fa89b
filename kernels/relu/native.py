"""`relu` in C++: its arguments, mirrored from `native.h`."""

from octavo.kernels.native.arguments import Arguments, Matrix


class ReluArguments(Arguments):
    """See `ReluArgs`."""

    _fields_ = (("x", Matrix), ("out", Matrix))
