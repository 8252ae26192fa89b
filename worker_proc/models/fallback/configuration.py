"""The class of `transformers` that implements an architecture, its configuration, and an instance without weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.fallback.hooks import PROBE, use_attention

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rope types whose angles depend on the longest sequence of the batch. All steps must use equal angles: keys are
cached."""


def refusal(facts: ModelFacts, reason: str) -> ConfigError:
    """Return the error of a model that cannot run through `transformers`."""
    return ConfigError(
        f"{facts.architecture} cannot run through transformers: {reason}",
        hint="see docs/models.md for what the fallback needs of a model",
    )


@contextmanager
def refusing_errors(facts: ModelFacts, what_failed: str) -> Iterator[None]:
    """Raise whatever the code of `transformers` or of a repository raises as a `refusal` with its text in one line."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise refusal(facts, f"{what_failed}: {type(error).__name__}: {reason}") from error


def is_known(facts: ModelFacts) -> bool:
    """Whether `transformers`, or code in the model's repository, implements the architecture as a causal model."""
    has_remote_code = "AutoModelForCausalLM" in (facts.hf_config.get("auto_map") or {})
    return has_remote_code or facts.architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def empty_model(facts: ModelFacts, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model, whose architecture `is_known`, with its parameters on the device "meta".

    Its buffers are computed.

    Raises:
        ConfigError: `transformers` has no such model, it is of a kind that cannot be served, or its code is remote and
            `--trust-remote-code` was not given.
    """
    if facts.hf_config.get("quantization_config"):
        raise refusal(facts, "its checkpoint is quantized")
    model_class, config = _class_and_config(facts)
    if config.is_encoder_decoder:
        raise refusal(facts, "it has an encoder and a decoder")
    if model_class._is_stateful:
        raise refusal(facts, "its layers have a recurrent state")
    if depends_on_length(config) and facts.architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise refusal(facts, "the angles of its rotary embedding depend on the longest request")
    with refusing_errors(facts, f"{model_class.__name__} was not built"), no_init_weights(), _parameters_on_meta():
        model: PreTrainedModel = model_class._from_config(
            config, dtype=dtype, attn_implementation=_initial_attention(config), **_experts(config)
        )
        use_attention(model, PROBE)
        model.tie_weights()
    return model.eval()


def _initial_attention(config: PreTrainedConfig) -> str:
    """Return the implementation with which a model is built; some have a table of classes that does not know ours."""
    return "eager" if config.model_type in ("gptj", "gpt_neo") else PROBE


def _experts(config: PreTrainedConfig) -> dict[str, Any]:
    """Choose the loop over experts: products of sorted rows have shapes that depend on all rows."""
    return {"experts_implementation": "eager"}


def _class_and_config(facts: ModelFacts) -> tuple[Any, PreTrainedConfig]:
    name, auto_map = facts.architecture, facts.hf_config.get("auto_map") or {}
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        with refusing_errors(facts, "its config.json was not understood"):
            model_class = getattr(transformers, name)
            return model_class, model_class.config_class.from_dict(_with_floats(facts.hf_config))
    if not facts.trust_remote_code:
        raise ConfigError(
            f"the architecture {name} is implemented by code in the model's repository, which is not run",
            hint="read that code, and run with --trust-remote-code if you trust it",
        )
    with refusing_errors(facts, "the code in the model's repository failed"):
        model_class = get_class_from_dynamic_module(auto_map["AutoModelForCausalLM"], facts.model_path)
        if "AutoConfig" in auto_map:
            config_class = get_class_from_dynamic_module(auto_map["AutoConfig"], facts.model_path)
        else:
            model_type = facts.hf_config.get("model_type")
            if model_type not in CONFIG_MAPPING:
                raise refusal(facts, f"transformers has no model_type {model_type!r}, and auto_map names no AutoConfig")
            config_class = CONFIG_MAPPING[model_type]
        if not issubclass(model_class, PreTrainedModel):
            raise TypeError(f"{model_class.__name__} is no PreTrainedModel")
        return model_class, config_class.from_dict(_with_floats(facts.hf_config))


def _with_floats(value: Any) -> Any:
    """Return a configuration with infinite numbers in place of the objects that stand for them in JSON."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(item) for key, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def depends_on_length(config: PreTrainedConfig) -> bool:
    """Return whether the angles of positions depend on the highest position of a step."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    kinds = {str(part.get("rope_type") or part.get("type")) for part in (parameters, *nested)}
    return not kinds.isdisjoint(_LENGTH_DEPENDENT_ROPE)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the device "meta" as soon as a module has it; its memory was never touched."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
