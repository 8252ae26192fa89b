"""The parameters of a model's attention, the same in all steps. Computes nothing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads, and how scores are computed before the softmax."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores."""
    window: int | None = None
    """A token attends to the last `window` positions, its own included; None: to all. Without `is_causal`: to those at
    most `window // 2` away."""
    soft_cap: float | None = None
    """Scaled scores become soft_cap * tanh(score / soft_cap)."""
    slopes: tuple[float, ...] | None = None
    """Of each query head: slope * (key's position - query's position) is added to its scores (ALiBi)."""
    is_chunked: bool = False
    """Positions are divided into chunks of `window`, and a token attends to those of its chunk up to its own."""
    key_value_dim: int | None = None
    """Values are the first numbers of keys, this many, and are not stored; None: they are stored, as long as keys."""
    is_causal: bool = True
    """A token attends to itself and those before it. False: to those after it too; a step then has whole requests."""
    is_span: bool = False
    """Rows of a causal model that see the keys behind them too, as far as their request has any: those of an image. For
    GPUs, where the spans of a step are requests of a step of their own; none of them is split."""
    is_local: bool = False
    """A token attends to its part of an image alone (Qwen2.5-VL's windows). Kernels read parts as requests, and do not
    look at this; layers with other keys are in other cache groups."""

    def __post_init__(self) -> None:
        """Check what attention in both directions goes with.

        Raises:
            ValueError: no kernel computes this.
        """
        if not self.is_causal and (self.slopes is not None or self.is_chunked or self.key_value_dim is not None):
            raise ValueError(f"attention in both directions has no slopes, chunks or latent keys: {self}")

    def first_key(self, position: int) -> int:
        """Return the first position that the token at `position`, or a later one, attends to."""
        if self.window is None:
            return 0
        if not self.is_causal:
            return max(0, position - self.window // 2)
        return position // self.window * self.window if self.is_chunked else max(0, position - self.window + 1)

    def end_key(self, position: int, context_len: int, *, is_span: bool = False) -> int:
        """Return the end of the positions that the token at `position`, or an earlier one, attends to.

        Args:
            position: of the token.
            context_len: keys of its request.
            is_span: whether it attends to those after it too, though others do not: see `paged_attention.plan`.
        """
        if self.is_causal:
            return context_len if is_span else position + 1
        return context_len if self.window is None else min(context_len, position + self.window // 2 + 1)

    @property
    def value_dim(self) -> int:
        """V: numbers of a value, and of a head's output."""
        return self.head_dim if self.key_value_dim is None else self.key_value_dim

    @property
    def group(self) -> int:
        """G: query heads of a key head."""
        return self.num_heads // self.num_kv_heads
