"""Which layers of a checkpoint are quantized, and with which settings: the per-layer rules of all formats.

format               left out                                  settings of its own, the first that matches
GPTQ                 keys of `dynamic` that begin with "-:"    `dynamic`, by expressions from the beginning of the name
AWQ, fp8, torchao    `modules_to_not_convert`                  none
bitsandbytes         `llm_int8_skip_modules`                   none
AutoRound            `modules_to_not_convert`, 16 bits, and    `extra_config`, by name, else by expressions that are
                     what is in none of its blocks             found in the name
ModelOpt             `ignore`, or `exclude_modules`            `quantized_layers`, by name
Quark                `exclude`                                 `layer_quant_config`, by patterns of shells
compressed-tensors   `ignore`, and what no group names         `config_groups`, by name, then "re:", then class

The output weight (`HEAD`) is quantized by GPTQ if `lm_head` says so, by AutoRound if `extra_config` names it, and by
ModelOpt, Quark and compressed-tensors unless it is left out. The other formats never quantize it. Tensors decide for
real checkpoints: a layer is quantized if it has scales. These rules are for dummy weights, and for settings.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from octavo.protocol.errors import ConfigError

T = TypeVar("T")

HEAD = "lm_head"
_EXPRESSION = re.compile(r"[\\^$+()|{}]")


def expression(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression of the configuration.

    Raises:
        ConfigError: it is not a regular expression.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"config.json: {pattern!r} in 'quantization_config' is not a regular expression: {error}"
        ) from None


def is_listed(layer: str, patterns: Iterable[Any] | None) -> bool:
    """Return whether a list of modules contains a layer: by its name, a part of it, or a pattern.

    Patterns are shell patterns (ModelOpt, Quark) or regular expressions. An entry is an expression after "re:", and, as
    in Transformers, if it has a character that occurs neither in names nor in shell patterns. Expressions match a name,
    or its beginning up to a dot.

    Raises:
        ConfigError: an entry is not a string, or not a regular expression.
    """
    for pattern in patterns or ():
        if not isinstance(pattern, str):
            raise ConfigError(
                f"config.json: {pattern!r} is in a list of layers in 'quantization_config'; expected a name or pattern"
            )
        if pattern.startswith("re:"):
            if expression(pattern.removeprefix("re:")).match(layer):
                return True
            continue
        if re.search(rf"(^|\.){re.escape(pattern)}(\.|$)", layer) or fnmatchcase(layer, pattern):
            return True
        if _EXPRESSION.search(pattern):
            ends = [found.start() for found in re.finditer(r"\.|$", layer)]
            if any(expression(pattern).fullmatch(layer, 0, end) for end in ends):
                return True
    return False


def is_target(layer: str, target: Any) -> bool:
    """Return whether a name or, after "re:", an expression of compressed-tensors matches a layer.

    Raises:
        ConfigError: the target is not a string, or not a regular expression.
    """
    if not isinstance(target, str):
        raise ConfigError(
            f"config.json: {target!r} is in a list of layers in 'quantization_config'; expected a name or pattern"
        )
    if target.startswith("re:"):
        return expression(target.removeprefix("re:")).match(layer) is not None
    return target == layer


def first_match(rules: Mapping[str, T], layer: str, matches: Callable[[str, str], bool], default: T) -> T:
    """Return the value of the first rule whose key matches a layer, in the order of the configuration.

    Args:
        rules: rules by key.
        layer: name of the layer.
        matches: returns whether a key matches the layer.
        default: returned if no key matches.
    """
    return next((value for key, value in rules.items() if matches(key, layer)), default)
