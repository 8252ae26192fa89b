"""`TensorNames`: maps the tensors of a checkpoint to the tensors of a model."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from octavo.worker_proc.models.checkpoint import Rule, Values, apply_rules
from octavo.worker_proc.models.origins import Origins

Split = Callable[[str, Values], Iterable[tuple[str, Values]]]
"""Splits a tensor of the checkpoint: yields names without prefixes, and their tensors."""


class TensorNames:
    """Splits stacked tensors of a checkpoint, and renames tensors to the model's names.

    Args:
        prefixes: prefixes that names in a checkpoint may have ("model.", "transformer.").
        ignored: patterns of names that are not loaded (masks and tables that are computed here).
        rules: rules that convert tensors of a checkpoint, without their prefixes, to tensors of the model.
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

    def add_split(self, names: Sequence[str], split: Split, parts: Iterable[str], *, is_usual: bool = True) -> None:
        """Accept the checkpoint tensors `names` in place of those that `split` makes of them.

        Args:
            names: names without prefixes; `split` is called with one tensor after another.
            split: yields parts as soon as it has all tensors that they need.
            parts: names of the parts.
            is_usual: whether checkpoints usually hold `names`; False: they may hold the parts themselves.
        """
        self._splits.update(dict.fromkeys(names, split))
        self._origins.declare(names, parts, is_usual=is_usual)

    def forget_splits(self) -> None:
        """Release the tensors that unfinished splits hold. Called after the last tensor was read."""
        self._splits.clear()

    def read(self, weights: Iterable[tuple[str, Values]]) -> Iterator[tuple[str, str, Values]]:
        """Yield the name in the checkpoint, the name in the model, and the values of each tensor of a checkpoint."""
        for full_name, own_name, values in self._split(weights):
            for name, part in apply_rules(self._rules, own_name, values):
                self._origins.see(full_name, name)
                yield full_name, name, part

    def origins_of(self, missing: Iterable[str]) -> list[str]:
        """Return the checkpoint names of tensors of the model that the checkpoint lacks."""
        return self._origins.of(missing)

    def apply_rules(self, full_name: str, values: Values) -> Iterable[tuple[str, Values]]:
        """Yield the tensors of the model that an unsplit tensor of the checkpoint becomes."""
        return apply_rules(self._rules, self.without_prefix(full_name), values)

    def without_prefix(self, name: str) -> str:
        """Return a checkpoint name in the form that the rules expect."""
        for prefix in self._prefixes:
            if name.startswith(prefix):
                return name.removeprefix(prefix)
        return name

    def _split(self, weights: Iterable[tuple[str, Values]]) -> Iterator[tuple[str, str, Values]]:
        """Yield tensors with their names in the checkpoint and their names without prefix, for the rules."""
        for full_name, values in weights:
            name = self.without_prefix(full_name)
            split = self._splits.get(name)
            if split is None:
                yield full_name, name, values
                continue
            self._origins.see(full_name, name)
            for part, part_values in split(full_name, values):
                yield full_name, self.without_prefix(part), part_values
