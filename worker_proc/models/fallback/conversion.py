"""Converts the tensors of a checkpoint to those of a `transformers` model: old names, and stacked experts."""

from collections.abc import Iterable, Iterator
from copy import deepcopy

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.checkpoint import Values
from octavo.worker_proc.models.fallback.probe import Structure
from octavo.worker_proc.models.origins import layer_pattern, missing_tensors, with_layer_of

Parts = dict[str, tuple[str, Tensor]]
"""Tensors that become one: by name, with the pattern of `transformers` that the name matches."""


class Conversion:
    """Converts the tensors of a checkpoint to those of a model, by the rules of `transformers`."""

    def __init__(self, model: PreTrainedModel, structure: Structure) -> None:
        self._model = model
        transforms = get_model_conversion_mapping(model)
        self._renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        self._converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        self._of_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        buffers = (name for name, _ in model.named_buffers())
        self._names = dict.fromkeys([*structure.weights, *structure.other_names, *buffers], "")

    def own_name(self, name: str) -> tuple[str, str | None]:
        """Return the model's name of a tensor, and the pattern of those that become one with it; `None` if it is
        alone."""
        own_name, pattern = rename_source_key(
            name, self._renamings, self._converters, self._model.base_model_prefix, self._names
        )
        return own_name, pattern

    def reads(self, name: str) -> bool:
        """Return whether a tensor of a checkpoint becomes one of the model's, or a part of one."""
        return self.own_name(name)[0] in self._names

    def __call__(self, weights: Iterable[tuple[str, Values]]) -> Iterator[tuple[str, Values]]:
        """Yield tensors under the names of the model.

        Those that become one are kept until the end, in most cases as views of mapped files.

        Raises:
            ConfigError: some of them are missing, or do not fit together.
        """
        parts: dict[str, Parts] = {}
        whole = set()
        for name, values in weights:
            own_name, pattern = self.own_name(name)
            if pattern is None:
                whole.add(own_name)
                yield own_name, values
            elif isinstance(values, Tensor):
                parts.setdefault(own_name, {})[name] = pattern, values
            else:
                raise ConfigError(f"the quantized tensor {name} would have to be converted", hint="use other weights")
        self._check(parts, whole)
        for own_name in list(parts):
            yield from self._convert_one(own_name, parts.pop(own_name))

    def _convert_one(self, own_name: str, parts: Parts) -> Iterator[tuple[str, Values]]:
        converter = deepcopy(self._of_pattern[next(iter(parts.values()))[0]])
        for name in sorted(parts, key=dot_natural_key):
            converter.add_tensor(own_name, name, *parts[name])
        try:
            converted = converter.convert(own_name, model=self._model, config=self._model.config)
        except (RuntimeError, ValueError) as error:  # of torch, about shapes
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"the tensors of the checkpoint that become {own_name!r} do not fit together: {reason}",
                hint="check that config.json and the weights belong to the same model",
            ) from error
        yield from converted.items()

    def _check(self, parts: dict[str, Parts], whole: set[str]) -> None:
        """Refuse layers that lack a part that others have; they may have a tensor as a whole."""
        expected: dict[str, set[str]] = {}
        for own_name, those in parts.items():
            expected.setdefault(layer_pattern(own_name), set()).update(map(layer_pattern, those))
        missing = [
            full_name
            for own_name in self._names.keys() - whole
            for pattern in expected.get(layer_pattern(own_name), ())
            if (full_name := with_layer_of(own_name, pattern)) not in parts.get(own_name, {})
        ]
        if missing:
            raise missing_tensors(sorted(missing))
