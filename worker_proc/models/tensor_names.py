"""`TensorNames`: which tensors of a model the tensors of a checkpoint become."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from octavo.worker_proc.models.checkpoint import Rule, Values, apply_rules
from octavo.worker_proc.models.origins import Origins

Split = Callable[[str, Values], Iterable[tuple[str, Values]]]
"""Takes a tensor with its name in the checkpoint apart: names without prefixes, and their tensors."""


class TensorNames:
    """Takes tensors apart, and gives them the model's names.

    Args:
        prefixes: prefixes that names in a checkpoint may have ("model.", "transformer.").
        ignored: patterns of names that are not loaded (masks and tables that are computed here).
        rules: rules that turn the tensors of a checkpoint, without their prefixes, into those of the model.
    """

    def __init__(self, prefixes: Sequence[str], ignored: Sequence[str], rules: Sequence[Rule]) -> None:
        self._prefixes = sorted(prefixes, key=len, reverse=True)
        self._ignored = list(ignored)
        self._rules = rules
        self._splits: dict[str, Split] = {}
        self._origins = Origins()

    def ignore(self, pattern: str) -> None:
        """Do not load tensors whose names, without prefixes, match a pattern."""
        self._ignored.append(pattern)

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor of this name, without prefix, is not loaded."""
        return any(re.search(pattern, name) for pattern in self._ignored)

    def takes_apart(self, names: Sequence[str], split: Split, parts: Iterable[str], *, is_usual: bool = True) -> None:
        """Accept tensors `names` of the checkpoint in place of those that `split` makes of them.

        Args:
            names: without prefixes; `split` is called with one after the other.
            split: returns the tensors as soon as it can.
            parts: the names of those tensors.
            is_usual: False: checkpoints may hold the parts themselves.
        """
        self._splits.update(dict.fromkeys(names, split))
        self._origins.declare(names, parts, is_usual=is_usual)

    def forget_splits(self) -> None:
        """Release tensors that unfinished splits hold. Called when nothing more is read."""
        self._splits.clear()

    def read(self, weights: Iterable[tuple[str, Values]]) -> Iterator[tuple[str, str, Values]]:
        """Yield the name in the checkpoint, the name in the model, and the values of each tensor of a checkpoint."""
        for full_name, own_name, values in self._apart(weights):
            for name, part in apply_rules(self._rules, own_name, values):
                self._origins.see(full_name, name)
                yield full_name, name, part

    def origins_of(self, missing: Iterable[str]) -> list[str]:
        """Return the names in the checkpoint of tensors of the model that it lacks."""
        return self._origins.of(missing)

    def apply_rules(self, full_name: str, values: Values) -> Iterable[tuple[str, Values]]:
        """Yield the tensors of the model that a tensor of the checkpoint becomes, which is not taken apart."""
        return apply_rules(self._rules, self.without_prefix(full_name), values)

    def without_prefix(self, name: str) -> str:
        """Return a name of the checkpoint as the rules know it."""
        for prefix in self._prefixes:
            if name.startswith(prefix):
                return name.removeprefix(prefix)
        return name

    def _apart(self, weights: Iterable[tuple[str, Values]]) -> Iterator[tuple[str, str, Values]]:
        """Yield tensors with their names in the checkpoint and those, without prefix, of which the rules know."""
        for full_name, values in weights:
            name = self.without_prefix(full_name)
            split = self._splits.get(name)
            if split is None:
                yield full_name, name, values
                continue
            self._origins.see(full_name, name)
            for part, part_values in split(full_name, values):
                yield full_name, self.without_prefix(part), part_values
