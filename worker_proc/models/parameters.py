"""A model's tensors and how a checkpoint's tensors fill them. Does not read files."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.linear import Packer
from octavo.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """Where one tensor of the checkpoint goes."""

    target: Tensor
    is_transposed: bool


class Parameters:
    """The tensors of one model, uninitialized until a checkpoint, or dummy values, fill them.

    Args:
        dtype: of all tensors; a checkpoint's are converted.
        prefixes: what a checkpoint may put before the names used here ("model.", "transformer.").
        ignored: patterns of names that hold nothing to load (masks and tables that are computed here).
    """

    def __init__(self, dtype: torch.dtype, *, prefixes: Sequence[str], ignored: Sequence[str] = ()) -> None:
        self._dtype = dtype
        self._prefixes = sorted(prefixes, key=len, reverse=True)
        self._ignored = re.compile("|".join(ignored) or r"(?!)")
        self._tensors: dict[str, Tensor] = {}
        self._sources: dict[str, _Source] = {}
        self._num_packed_bytes = 0
        self._packs: list[Callable[[Packer], int]] = []

    def new(self, name: str, *shape: int, is_transposed: bool = False) -> Tensor:
        """Make a tensor that the checkpoint's tensor `name` fills.

        Args:
            name: in the checkpoint, without prefix.
            shape: here.
            is_transposed: the checkpoint holds the transposed matrix.
        """
        tensor = torch.empty(shape, dtype=self._dtype)
        self._tensors[name] = tensor
        self._sources[name] = _Source(tensor, is_transposed)
        return tensor

    def stacked(self, name: str, parts: dict[str, int], *columns: int) -> Tensor:
        """Make a tensor that holds several of the checkpoint's tensors, one below the other.

        Args:
            name: its name in `named()`.
            parts: the names in the checkpoint, and the rows of each.
            columns: the further dimensions, common to all parts.
        """
        tensor = torch.empty((sum(parts.values()), *columns), dtype=self._dtype)
        self._tensors[name] = tensor
        for part, rows_P in zip(parts, tensor.split(list(parts.values())), strict=True):
            self._sources[part] = _Source(rows_P, False)
        return tensor

    def when_filled(self, pack: Callable[[Packer], int]) -> None:
        """Have `pack` called when the weights are there; it returns the bytes it needs beside the tensors made here."""
        self._packs.append(pack)

    def pack(self) -> None:
        """Let every layer bring its filled weights into the form it computes with, and let go of the tensors.

        Nothing can be loaded afterwards; a tensor lives on where a layer still has it.
        """
        packer = Packer(next(iter(self._tensors.values())).device)
        self._num_packed_bytes = self.num_bytes
        self._sources.clear()
        self._tensors.clear()
        while self._packs:
            self._num_packed_bytes += self._packs.pop()(packer)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over all tensors, stacked ones under their own name; over nothing once they are packed."""
        yield from self._tensors.items()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, packed or not."""
        return self._num_packed_bytes + sum(tensor.nbytes for tensor in self._tensors.values())

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every tensor from a checkpoint.

        Raises:
            ConfigError: a tensor is missing, unexpected, or of another shape.
        """
        missing = set(self._sources)
        for full_name, tensor in weights:
            name = self._without_prefix(full_name)
            if name not in self._sources:
                if self._ignored.search(name):
                    continue
                raise ConfigError(
                    f"the checkpoint holds {full_name!r}, which this architecture does not have",
                    hint="check that config.json and the weights belong to the same model",
                )
            _fill(self._sources[name], tensor, full_name)
            missing.discard(name)
        if missing:
            some = ", ".join(sorted(missing)[:4])
            raise ConfigError(
                f"the checkpoint lacks {len(missing)} tensors of this architecture: {some}"
                + (", ..." if len(missing) > 4 else ""),
                hint="check that config.json and the weights belong to the same model, and that no file is missing",
            )

    def _without_prefix(self, name: str) -> str:
        for prefix in self._prefixes:
            if name.startswith(prefix):
                return name.removeprefix(prefix)
        return name


def _fill(source: _Source, tensor: Tensor, name: str) -> None:
    values = tensor.t() if source.is_transposed else tensor
    if values.shape != source.target.shape:
        expected = source.target.t() if source.is_transposed else source.target
        raise ConfigError(
            f"{name!r} has shape {tuple(tensor.shape)} in the checkpoint; "
            f"its config.json asks for {tuple(expected.shape)}"
        )
    source.target.copy_(values)
