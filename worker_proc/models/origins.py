"""Finds the checkpoint names of tensors that a checkpoint lacks, also for stacked experts and fused projections."""

import re
from collections.abc import Iterable, Sequence

from octavo.protocol.errors import ConfigError

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


class UnreadTensorError(ConfigError):
    """A checkpoint holds a tensor that no layer reads."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the checkpoint holds {name!r}, which this architecture does not have",
            hint="check that config.json and the weights belong to the same model",
        )
        self.name = name
        """Name in the checkpoint."""


class MissingTensorsError(ConfigError):
    """A checkpoint lacks tensors. All tensors that it has were read."""


class Origins:
    """Records the tensor names of a checkpoint, and derives from them the names of missing tensors.

    Layers are assumed to use the same names: a tensor name under `layers.0` is also used under `layers.1`.
    """

    def __init__(self) -> None:
        self._stacks: list[tuple[Sequence[str], frozenset[str], bool]] = []
        self._full_names: set[str] = set()
        self._patterns: dict[str, str] = {}
        """Checkpoint names by our names. Both have braces in place of the layer index."""

    def declare(self, stack: Sequence[str], parts: Iterable[str], *, is_usual: bool) -> None:
        """Declare that some tensors of a checkpoint together hold `parts` of the model.

        Args:
            stack: names in the checkpoint, without prefixes.
            parts: our names of the parts.
            is_usual: whether checkpoints always hold the stack, and never its parts.
        """
        self._stacks.append((stack, frozenset(parts), is_usual))

    def see(self, full_name: str, name: str) -> None:
        """Record that the checkpoint tensor `full_name` filled the model's tensor `name`."""
        self._full_names.add(full_name)
        self._patterns.setdefault(layer_pattern(name), layer_pattern(full_name))

    def of(self, missing: Iterable[str]) -> list[str]:
        """Return the sorted checkpoint names of the tensors that would fill the model's `missing` ones."""
        return sorted({name for part in missing for name in self._names(part)})

    def _names(self, part: str) -> list[str]:
        stacks = [(names, is_usual) for names, parts, is_usual in self._stacks if part in parts]
        seen = [names for names, _ in stacks if any(layer_pattern(name) in self._patterns for name in names)]
        if not seen and layer_pattern(part) not in self._patterns:
            seen = [names for names, is_usual in stacks if is_usual]
        full_names = [self._full_name(name) for name in (seen[0] if seen else [part])]
        # If the stack has two tensors, the checkpoint may hold one of them.
        return [name for name in full_names if name not in self._full_names] or full_names

    def _full_name(self, name: str) -> str:
        """Return the checkpoint name of a tensor, as other layers of the checkpoint spell it."""
        return with_layer_of(name, self._patterns.get(layer_pattern(name), name))


def missing_tensors(names: Sequence[str]) -> MissingTensorsError:
    """Return the error for a checkpoint that lacks these tensors."""
    return MissingTensorsError(
        f"the checkpoint lacks {len(names)} tensors of this architecture: {', '.join(names[:4])}"
        + (", ..." if len(names) > 4 else ""),
        hint="check that config.json and the weights belong to the same model, and that no file is missing",
    )


def with_layer_of(name: str, pattern: str) -> str:
    """Replace the braces of a pattern with the layer index of a name."""
    layer = _LAYER.search(name)
    return pattern.replace("{}", layer[0]) if layer else pattern


def layer_pattern(name: str) -> str:
    """Return a name with braces in place of its first number, which is the layer index."""
    return _LAYER.sub("{}", name, count=1)
