"""Runs a text through a model, block by block, so that each block sees the outputs of its quantized predecessors.

The model is transformers'. Rounds nothing: `gptq.py` and `awq.py` do.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.protocol.errors import ConfigError
from octavo.protocol.quantization_job import QuantizationJob


class _Stopped(Exception):
    """Stops a pass: the following blocks need not run."""


class Blocks:
    """The decoder blocks of a model, and the inputs of the next block for every sample.

    Args:
        job: a job that has a text.

    Raises:
        ConfigError: the text cannot be read or is too short, or the model has no list of blocks.
    """

    def __init__(self, job: QuantizationJob) -> None:
        from transformers import AutoModelForCausalLM

        token_rows = _samples(job)
        self.model: nn.Module = (
            AutoModelForCausalLM.from_pretrained(job.source, dtype="auto").eval().requires_grad_(False)
        )
        blocks = getattr(self.model.base_model, "layers", None)
        if not isinstance(blocks, nn.ModuleList):
            architecture = type(self.model).__name__
            raise ConfigError(f"--format {job.format} does not know the blocks of {architecture}", hint="use int4")
        self._blocks = blocks
        self._arguments: list[dict[str, Any]] = [{} for _ in blocks]
        self._hidden = self._first_hidden(token_rows)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each block with its name. It must be quantized before the next block is requested."""
        prefix = next(name for name, module in self.model.named_modules() if module is self._blocks)
        for index, block in enumerate(self._blocks):
            self._index = index
            yield f"{prefix}.{index}", block
            self._hidden = [self._run(block, hidden) for hidden in self._hidden]

    def see_inputs(self, layers: Iterable[nn.Linear], see: Callable[[nn.Linear, Tensor], None]) -> None:
        """Run the block that `__iter__` yielded last.

        Args:
            layers: layers of this block.
            see: called with a layer and its inputs for each sample, float32, shape TI.
        """

        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            assert isinstance(module, nn.Linear)
            see(module, args[0].flatten(0, -2).float())

        with _hooked(layers, hook):
            for hidden in self._hidden:
                self._run(self._blocks[self._index], hidden)

    def with_equal_inputs(self, layers: Iterable[nn.Linear]) -> list[list[nn.Linear]]:
        """Return the layers of the block that `__iter__` yielded last, grouped by equal inputs."""
        groups: dict[int, list[nn.Linear]] = {}
        alive: list[Tensor] = []  # keeps the inputs alive, so that their addresses are not reused

        def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            assert isinstance(module, nn.Linear)
            alive.append(args[0])
            groups.setdefault(args[0].data_ptr(), []).append(module)

        with _hooked(layers, note):
            self._run(self._blocks[self._index], self._hidden[0])
        return list(groups.values())

    def _run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        out = block(hidden, **self._arguments[self._index])
        next_hidden: Tensor = out[0] if isinstance(out, tuple) else out
        return next_hidden

    def _first_hidden(self, token_rows: list[list[int]]) -> list[Tensor]:
        """Return the embedded samples. Record the other arguments of the blocks, which are the same for all samples."""
        collected: list[Tensor] = []

        def before(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            named = {key: value for key, value in kwargs.items() if key != "hidden_states"}
            self._arguments[index] = named
            if index == 0:
                collected.append(args[0] if args else kwargs["hidden_states"])
                if len(collected) > 1:
                    raise _Stopped

        def hook(index: int) -> Callable[..., None]:
            return lambda module, args, kwargs: before(index, args, kwargs)

        handles = [
            block.register_forward_pre_hook(hook(index), with_kwargs=True) for index, block in enumerate(self._blocks)
        ]
        try:
            for row in token_rows:
                try:
                    self.model(torch.tensor([row]), use_cache=False)
                except _Stopped:
                    continue
        finally:
            for handle in handles:
                handle.remove()
        return collected


@contextmanager
def _hooked(
    layers: Iterable[nn.Linear], hook: Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]
) -> Iterator[None]:
    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def linears_of(block: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a block by their names within it."""
    return {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}


def _samples(job: QuantizationJob) -> list[list[int]]:
    """Return the token ids of equally long pieces of the text, spread over the complete text."""
    from transformers import AutoTokenizer

    assert job.calibration is not None, "checked by the command"
    try:
        text = Path(job.calibration).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration {job.calibration}: {error}") from error
    tokens = AutoTokenizer.from_pretrained(job.source)(text, verbose=False)["input_ids"]
    num_pieces = len(tokens) // job.sample_tokens
    if num_pieces == 0:
        raise ConfigError(
            f"--calibration {job.calibration} has {len(tokens)} tokens, fewer than the {job.sample_tokens} of a sample",
            hint="use a longer text, or a smaller --sample-tokens",
        )
    num_samples = min(job.num_samples, num_pieces)
    chosen = [num_pieces * sample // num_samples for sample in range(num_samples)]
    return [tokens[piece * job.sample_tokens : (piece + 1) * job.sample_tokens] for piece in chosen]
