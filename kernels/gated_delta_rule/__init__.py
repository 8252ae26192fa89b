"""The gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464): a matrix per head that maps keys to values."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.gated_delta_rule import cpu, native
from octavo.kernels.gated_delta_rule.weights import DeltaWeights as DeltaWeights
from octavo.kernels.recurrence import Slots

MAX_KEY_DIM = 256

_IMPLEMENTATIONS = {
    "cpu": cpu.gated_delta_rule,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.gated_delta_rule.gpu", cpu.gated_delta_rule),
}


def gated_delta_rule(
    q_TK: Tensor,
    k_TK: Tensor,
    v_TV: Tensor,
    b_TH: Tensor,
    a_TH: Tensor,
    weights: DeltaWeights,
    state_SHKV: Tensor,
    slots: Slots,
) -> Tensor:
    """Return the outputs of all value heads, in the shape and dtype of `v`.

    For each value head and token, with queries and keys scaled to unit length, `beta = sigmoid(b)` and
    `decay = exp(-exp(a_log) * softplus(a + dt_bias))`:

        state = decay * state
        state = state + outer(k, beta * (v - k @ state))
        y = K^-0.5 * q @ state

    Computed in float32, token by token.

    Args:
        q_TK: key heads of K numbers, side by side; value heads are divided among them in order.
        k_TK: same layout as `q_TK`.
        v_TV: value heads of V numbers, side by side.
        b_TH: a number for each value head.
        a_TH: same layout as `b_TH`.
        weights: the weights of the value heads.
        state_SHKV: float32; updated in place.
        slots: state that each request reads and writes.

    Raises:
        ShapeError: the shapes do not match, or K is larger than `MAX_KEY_DIM`.
        UnsupportedDevice: no implementation for the device.
    """
    num_heads, key_dim, value_dim = state_SHKV.shape[1:]
    num_key_heads = q_TK.shape[1] // key_dim
    require(
        q_TK.shape[1] == k_TK.shape[1] == num_key_heads * key_dim
        and v_TV.shape[1] == num_heads * value_dim
        and num_key_heads > 0
        and num_heads % num_key_heads == 0
        and b_TH.shape[1] == a_TH.shape[1] == weights.num_heads == num_heads
        and key_dim <= MAX_KEY_DIM,
        f"gated_delta_rule: rows {tuple(q_TK.shape)}, {tuple(k_TK.shape)}, {tuple(v_TV.shape)}, {tuple(b_TH.shape)} "
        f"and {tuple(a_TH.shape)} for {weights.num_heads} heads and states {tuple(state_SHKV.shape)}",
    )
    implementation = choose("gated_delta_rule", _IMPLEMENTATIONS, v_TV.device)
    return implementation(q_TK, k_TK, v_TV, b_TH, a_TH, weights, state_SHKV, slots)
