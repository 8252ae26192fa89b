"""The parameters of a model's attention, equal in all steps. Computes nothing."""

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
    """A token attends to the last `window` positions, including its own; to all if `None`. Without `is_causal`: to
    positions at most `window // 2` away."""
    soft_cap: float | None = None
    """Scaled scores become soft_cap * tanh(score / soft_cap)."""
    slopes: tuple[float, ...] | None = None
    """Per query head: slope * (key's position - query's position) is added to its scores (ALiBi)."""
    is_chunked: bool = False
    """Whether positions are divided into chunks of `window`; a token then attends to its chunk, up to its own
    position."""
    key_value_dim: int | None = None
    """Values are the first `key_value_dim` elements of keys and are not stored; `None` if they are stored, as long as
    keys."""
    is_causal: bool = True
    """Whether a token attends only to itself and earlier ones. If False, it attends to later ones too, and a step must
    have complete requests."""
    is_span: bool = False
    """Whether rows of a causal model also attend to the later keys of their request, as the rows of an image do. For
    GPUs, where the spans of a step are separate requests of their own step; no span is split."""
    is_local: bool = False
    """Whether a token attends only to its part of an image (Qwen2.5-VL's windows). Kernels read each part as a request,
    and ignore this flag; layers with other keys are in other cache groups."""

    def __post_init__(self) -> None:
        """Check that bidirectional attention is not combined with unsupported features.

        Raises:
            ValueError: no kernel computes this combination.
        """
        if not self.is_causal and (self.slopes is not None or self.is_chunked or self.key_value_dim is not None):
            raise ValueError(f"attention in both directions has no slopes, chunks or latent keys: {self}")

    def first_key(self, position: int) -> int:
        """Return the first position that the token at `position`, or any later token, attends to."""
        if self.window is None:
            return 0
        if not self.is_causal:
            return max(0, position - self.window // 2)
        return position // self.window * self.window if self.is_chunked else max(0, position - self.window + 1)

    def end_key(self, position: int, context_len: int, *, is_span: bool = False) -> int:
        """Return the end of the positions that the token at `position`, or any earlier token, attends to.

        Args:
            position: position of the token.
            context_len: number of keys of its request.
            is_span: whether it also attends to later positions, although others do not: see `paged_attention.plan`.
        """
        if self.is_causal:
            return context_len if is_span else position + 1
        return context_len if self.window is None else min(context_len, position + self.window // 2 + 1)

    @property
    def value_dim(self) -> int:
        """V: elements of a value, and of a head's output."""
        return self.head_dim if self.key_value_dim is None else self.key_value_dim

    @property
    def group(self) -> int:
        """G: query heads per key head."""
        return self.num_heads // self.num_kv_heads
