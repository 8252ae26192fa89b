"""From the tensors of a checkpoint to those of a model of `transformers`: old names, and experts that are stacked."""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.checkpoint import Values
from octavo.worker_proc.models.fallback.probe import Structure

Tensors = Iterable[tuple[str, Values]]


def conversion_of(model: PreTrainedModel, structure: Structure) -> Callable[[Tensors], Iterator[tuple[str, Values]]]:
    """Return what turns the tensors of a checkpoint into those of the model, by the rules of `transformers`.

    Tensors that become one are kept until the end, in most cases as views of mapped files.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    buffers = (name for name, _ in model.named_buffers())
    own_names = dict.fromkeys([*structure.weights, *structure.other_names, *buffers], "")

    def converted(weights: Tensors) -> Iterator[tuple[str, Values]]:
        parts: dict[str, list[tuple[str, str, Tensor]]] = {}
        for name, values in weights:
            own_name, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own_names)
            if pattern is None:
                yield own_name, values
            elif isinstance(values, Tensor):
                parts.setdefault(own_name, []).append((name, pattern, values))
            else:
                raise ConfigError(f"the quantized tensor {name} would have to be converted", hint="use other weights")
        for own_name in list(parts):
            converter = deepcopy(of_pattern[parts[own_name][0][1]])
            for name, pattern, tensor in sorted(parts.pop(own_name), key=lambda part: dot_natural_key(part[0])):
                converter.add_tensor(own_name, name, pattern, tensor)
            yield from converter.convert(own_name, model=model, config=model.config).items()

    return converted
