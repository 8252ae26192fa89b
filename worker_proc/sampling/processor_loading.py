"""Finds the configured logits processors of an engine. Runs none of them."""

import importlib
import inspect
from importlib.metadata import entry_points
from typing import Any

import torch

from octavo.protocol.code import ProcessorSource, unpack
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError
from octavo.protocol.logits_processor import AdapterLogitsProcessor, LogitsProcessor, RowProcessor
from octavo.protocol.module_files import NotAPythonFileError, load_module_of_file
from octavo.protocol.params import SamplingParams
from octavo.worker_proc.sampling.processors import ProcessorFactory, Processors

ENTRY_POINTS = "octavo.logits_processors"
"""Entry point group of logits processors that can be named."""

_METHODS = ("is_argmax_invariant", "update_state", "apply")


def load_processors(config: ResolvedConfig, device: torch.device) -> Processors | None:
    """Return the processors of an engine; `None` if it has none.

    Raises:
        ConfigError: a processor cannot be found, imported or made.
    """
    if not config.logits_processors:
        return None
    factories = [_factory(source, config, device) for source in config.logits_processors]
    return Processors(factories)


def _factory(source: ProcessorSource, config: ResolvedConfig, device: torch.device) -> ProcessorFactory:
    try:
        loaded = unpack(source) if source.code else _named(source.name)
        kind = _class_of(source.name, loaded)
        is_pin_memory = device.type == "cuda"
        factory = ProcessorFactory(source.name, lambda: kind(config, device, is_pin_memory), _validator(kind))
        factory.make()
    except ConfigError:
        raise
    except Exception as error:  # user code, which may raise anything
        raise ConfigError(
            f"logits processor {source.name}: {type(error).__name__}: {error}",
            phase="loading logits processors",
            hint="workers import it by its name: is its directory in PYTHONPATH?",
        ) from error
    return factory


def _named(name: str) -> Any:
    place, separator, attribute = name.rpartition(":")
    if not separator:
        found = entry_points(group=ENTRY_POINTS, name=name)
        if not found:
            raise _error(
                f"logits processor {name!r}: no installed package has an entry point of this name",
                f"use module:Class, file.py:Class, or the name of an entry point of the group {ENTRY_POINTS}",
            )
        return next(iter(found)).load()
    module = _module_of_file(place) if place.endswith(".py") else importlib.import_module(place)
    for part in attribute.split("."):
        module = getattr(module, part)
    return module


def _module_of_file(path: str) -> Any:
    try:
        return load_module_of_file(path, "octavo_logits_processor")
    except NotAPythonFileError as error:
        raise _error(f"logits processor: {error}") from None


def _class_of(name: str, loaded: Any) -> Any:
    """Return a class with the interface of `LogitsProcessor`. A function becomes a class that changes every row."""
    if isinstance(loaded, type):
        if missing := [method for method in _METHODS if not callable(getattr(loaded, method, None))]:
            raise _error(f"logits processor {name} has no method {missing[0]}", "see octavo.LogitsProcessor")
        return loaded
    if not callable(loaded):
        raise _error(f"logits processor {name} is neither a class nor a function")
    if len(inspect.signature(loaded).parameters) not in (2, 3):
        raise _error(
            f"logits processor {name} must take (output_token_ids, logits) or "
            "(prompt_token_ids, output_token_ids, logits)"
        )
    function: RowProcessor = loaded

    class FunctionProcessor(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: SamplingParams) -> RowProcessor:
            return function

    return FunctionProcessor


def _validator(kind: Any) -> Any:
    """Return the function that checks a request's parameters. A class need not derive from `LogitsProcessor`."""
    return getattr(kind, "validate_params", LogitsProcessor.validate_params)


def _error(message: str, hint: str = "") -> ConfigError:
    return ConfigError(message, phase="loading logits processors", hint=hint)
