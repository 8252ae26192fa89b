"""Integer keys in the order of floats, for kernels that select values. Selects nothing."""

import triton
import triton.language as tl


@triton.jit
def order_key(values):
    """Return uint32 keys in the order of the float32 `values`; both zeros have the same key."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def value_of_key(key):
    """Return the float32 value of an order key."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (((bits ^ -1) >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def is_kept(keys, ids, least_key, last_id):
    """Return which values are above the smallest key, or equal to it and not after the last index."""
    return (keys > least_key) | ((keys == least_key) & (ids <= last_id))
