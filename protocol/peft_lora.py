"""LoRA adapters in PEFT's format: strict parsing of `adapter_config.json`, and the names of tensors. Reads no weights.

A field that would change the results but is not supported is rejected by name. So is an unknown field.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from octavo.protocol.config.lora import MAX_RANK
from octavo.protocol.errors import ConfigError

_PREFIX = "base_model.model."
"""Prefix of all tensor names: PEFT's wrapper around the model."""

Factor: TypeAlias = Literal["A", "B", "embedding_A", "embedding_B", "base"]
"""The role of a tensor: a factor of a linear layer or of an embedding, or a weight of the base model."""
_FACTORS: dict[str, Factor] = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "embedding_A",
    ".lora_embedding_B": "embedding_B",
    ".base_layer.weight": "base",
}
_REFUSED_TENSORS = {
    "lora_magnitude_vector": "DoRA",
    "lora_B.bias": "biases of adapters",
    "trainable_tokens": "trainable_token_indices",
    "modules_to_save": "modules_to_save",
}
AGAIN = "write the adapter again, with peft's save_pretrained"
MERGE = "merge the adapter into the model (merge_and_unload in peft) and serve the result"

_WITHOUT_EFFECT = frozenset(
    [
        "task_type",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "fan_in_fan_out",
        "layers_pattern",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "runtime_config",
        "qalora_group_size",
    ]
)
"""Fields that only affect training, or repeat information from the shapes of the tensors."""
_REFUSED: dict[str, str] = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules that the adapter replaces",
    "trainable_token_indices": "single embeddings that the adapter replaces",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "repeated layers",
    "lora_bias": "biases of adapters",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "ensure_weight_tying": "tied adapters of embedding and lm_head",
}
_HARMLESS_INITS: tuple[object, ...] = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the model's own weights unchanged."""


class PeftLora(msgspec.Struct, frozen=True, kw_only=True):
    """What an `adapter_config.json` says about the adapter's tensors."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    """Ranks by the name of a module, or by a regular expression for its end."""
    alpha_pattern: dict[str, float] = {}
    target_modules: list[str] | str | None = None
    """Module names or their ends, a regular expression for complete names, or "all-linear"."""
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    target_parameters: list[str] | None = None
    """Names of parameters or their ends. Each holds the weights of all experts of a layer in one tensor."""
    peft_version: str | None = None

    @property
    def max_rank(self) -> int:
        """The largest rank of a module."""
        return max([self.r, *self.rank_pattern.values()])

    def rank_of(self, module: str) -> int:
        """Return the rank of a module."""
        rank: int = _by_pattern(self.rank_pattern, module, self.r)
        return rank

    def scale_of(self, module: str) -> float:
        """Return the factor by which B times A is scaled."""
        rank = self.rank_of(module)
        alpha: float = _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def parameters_of(self, module: str) -> list[str]:
        """Return the names of the parameters of a module that `target_parameters` selects, as defined by its class."""
        # A name without a dot selects that parameter of any module. In transformers only modules named experts have
        # one.
        targets = [name for name in self.target_parameters or () if "." in name or module.endswith(".experts")]
        names = {name for target in targets if _is_named([target], f"{module}.{(name := target.rpartition('.')[2])}")}
        return sorted(names, key=lambda name: (name.startswith("down"), name))

    def targets(self, module: str) -> bool:
        """Return whether the adapter may change a module, judged by its name. `all-linear` may change any."""
        if self.exclude_modules and _is_named(self.exclude_modules, module):
            return False
        targets = self.target_modules
        if self.parameters_of(module):
            return True
        if targets not in (None, "all-linear") and not _is_named(targets, module):
            return False
        layers = self.layers_to_transform
        if layers is None or layers == []:
            return True
        index = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        return index is not None and int(index[1]) in ([layers] if isinstance(layers, int) else layers)


def read_peft_lora(content: bytes, where: str) -> PeftLora:
    """Parse an `adapter_config.json`.

    Args:
        content: content of the file.
        where: its path, for errors.

    Raises:
        ConfigError: it is not the configuration of a LoRA adapter, or a field is not supported.
    """
    try:
        fields: Any = json.loads(content)
    except ValueError as error:
        raise _refused(where, f"it is not JSON: {error}", AGAIN) from error
    if not isinstance(fields, dict):
        raise _refused(where, "it is not a JSON object", AGAIN)
    kind = fields.pop("peft_type", None)
    if kind != "LORA":
        raise _refused(where, f"peft_type is {kind!r}, and only 'LORA' is supported", MERGE)
    for name, meaning in _REFUSED.items():
        if value := fields.pop(name, None):
            raise _refused(where, f"{name} ({meaning}) is not supported, and it is {value!r}", MERGE)
    if (bias := fields.pop("bias", "none")) != "none":
        raise _refused(where, f"bias is {bias!r}, and only 'none' is supported", MERGE)
    if (init := fields.pop("init_lora_weights", True)) not in _HARMLESS_INITS:
        raise _refused(
            where,
            f"init_lora_weights is {init!r}, which changes the model's own weights",
            "save the adapter with path_initial_model_for_weight_conversion, which makes it a plain LoRA",
        )
    known = {name: value for name in PeftLora.__struct_fields__ if (value := fields.pop(name, None)) is not None}
    if unknown := sorted(name for name, value in fields.items() if name not in _WITHOUT_EFFECT and value):
        raise _refused(where, f"the field {unknown[0]!r} is not known", MERGE)
    try:
        config = msgspec.convert(known, PeftLora)
    except msgspec.ValidationError as error:
        raise _refused(where, str(error), AGAIN) from error
    _check(config, where)
    return config


def module_of(name: str, where: str) -> tuple[str, Factor]:
    """Return the module of the base model to which a tensor belongs, and which factor it is.

    Args:
        name: name of the tensor.
        where: path of its file, for errors.

    Raises:
        ConfigError: the tensor does not belong to a LoRA adapter, or its kind is not supported.
    """
    for part, meaning in _REFUSED_TENSORS.items():
        if part in name:
            raise _refused(where, f"the tensor {name!r} is not supported: {meaning}", MERGE)
    for ending, factor in _FACTORS.items():
        if name.startswith(_PREFIX) and name.endswith(ending):
            return name.removeprefix(_PREFIX).removesuffix(ending), factor
    if name.startswith(_PREFIX) and name.endswith(".weight") and ".lora_" not in name:
        problem = f"{name!r} is a whole weight of the model, which PEFT saves if tokens were added before training"
        raise _refused(where, problem, MERGE)
    raise _refused(
        where,
        f"the tensor {name!r} is not a part of a LoRA adapter",
        f"its name should be {_PREFIX}<module>.lora_A.weight, as peft's save_pretrained writes it",
    )


def has_oriented_stacks(peft_version: str | None) -> bool:
    """Return whether A is certainly on the input side of stacked weights, even square ones: from PEFT 0.21 on."""
    numbers = re.match(r"(\d+)\.(\d+)", peft_version or "")
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (0, 21)


def _check(config: PeftLora, where: str) -> None:
    ranks = {"r": config.r, **{f"rank_pattern[{key!r}]": rank for key, rank in config.rank_pattern.items()}}
    for name, rank in ranks.items():
        if not 1 <= rank <= MAX_RANK:
            raise _refused(where, f"{name} is {rank}, and ranks are from 1 to {MAX_RANK}", MERGE)
    patterns = [*config.rank_pattern, *config.alpha_pattern]
    patterns += [named for named in (config.target_modules, config.exclude_modules) if isinstance(named, str)]
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise _refused(where, f"{pattern!r} is not a regular expression: {error}", "correct it") from error
    alphas = [config.lora_alpha, *config.alpha_pattern.values()]
    if not all(map(math.isfinite, alphas)):
        raise _refused(where, f"lora_alpha or alpha_pattern is not finite: {alphas}", "correct it")


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module, with PEFT's matching rules."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _is_named(names: list[str] | str | None, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names or ())


def _refused(where: str, problem: str, hint: str) -> ConfigError:
    return ConfigError(f"{where}: {problem}", hint=hint)
