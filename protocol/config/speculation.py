"""`--speculative-config`: how an engine drafts tokens that one step then verifies, with vLLM's names."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from octavo.protocol.config.division import division_problem, has_experts
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.model import QuantizationChoice
from octavo.protocol.errors import ConfigError
from octavo.protocol.params import MAX_SPECULATION

SpeculationMethod: TypeAlias = Literal["ngram", "suffix", "grammar", "draft_model", "eagle", "eagle3", "mtp"]

DEFAULT_DEPTH = 8
"""The depth adapts to each request. Up to about this many rows of a step cost a CPU little."""
DEFAULT_HEAD_DEPTH = 3
"""Each token drafted by a head or a draft model costs one more pass over its weights."""

_HEADS = ("eagle", "eagle3")
_DRAFTERS = ("draft_model", *_HEADS)
"""Methods whose layers are named by `model`."""
_MTP = ("mtp", "deepseek_mtp", "glm4_moe_mtp")
"""vLLM's names for draft layers that are part of the model."""
_MISSING_METHODS = ("medusa", "mlp_speculator")

_NO_MODEL = "leave the model out"
_HINT = (
    'use {"method": "ngram"}, {"method": "suffix"}, {"method": "draft_model", "model": PATH} or, with a head, '
    '{"method": "eagle3", "model": PATH}'
)


class SpeculationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding: several tokens of a request in one step, with the same output as without."""

    speculative_config: Annotated[
        dict[str, Any] | str | None,
        Meta(
            description='JSON with vLLM\'s names: {"method": "ngram", "num_speculative_tokens": 8}. '
            "docs/speculative-decoding.md lists the methods and fields.",
            extra={"short": ("-sc",)},
        ),
    ] = None
    spec_method: Annotated[str | None, Meta(description="Shorthand for the method of --speculative-config.")] = None
    spec_model: Annotated[str | None, Meta(description="Shorthand for the model of --speculative-config.")] = None
    spec_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Shorthand for num_speculative_tokens of --speculative-config. 0: no speculation."),
    ] = None


class ResolvedSpeculation(Struct, frozen=True, kw_only=True):
    """Speculative decoding of a running engine."""

    method: SpeculationMethod
    max_depth: int
    """Most tokens drafted for one request in one step."""
    is_adaptive: bool = True
    """Whether drafting adapts to its measured benefit. If not, each draft has the maximum depth."""
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 5
    suffix_max_tree_depth: int = 24
    suffix_max_cached_requests: int = 10_000
    suffix_max_spec_factor: float = 1.0
    suffix_min_token_prob: float = 0.1
    head: ModelFacts | None = None
    """What workers draft with: a smaller model, or the layers of `eagle` and `eagle3`; for `mtp` the model itself. None
    if the core drafts."""
    quantization: QuantizationChoice | None = None
    """Quantization of the draft model's weights. None for that of its checkpoint."""
    draft_ranks: int | None = None
    """`draft_tensor_parallel_size`, which must equal that of the model. None if it was not given."""


_Depth = Annotated[int, Meta(ge=1, le=MAX_SPECULATION)]
_Count = Annotated[int, Meta(ge=1)]


class _SpeculativeConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of vLLM's class that apply here, and `adaptive`."""

    method: str | None = None
    model: str | None = None
    quantization: QuantizationChoice | None = None
    draft_tensor_parallel_size: _Count | None = None
    num_speculative_tokens: _Depth | None = None
    adaptive: bool = True
    prompt_lookup_max: _Count | None = None
    prompt_lookup_min: _Count | None = None
    suffix_decoding_max_tree_depth: _Count = 24
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0)] = 10_000
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0, le=1)] = 0.1


def head_path(config: SpeculationConfig) -> str | None:
    """Return the path of the draft model or draft head. Return None if there is none.

    Raises:
        ConfigError: see `resolve_speculation`.
    """
    given = _read(config)
    return given.model if given is not None and _method(given) in _DRAFTERS else None


def is_draft_model(config: SpeculationConfig) -> bool:
    """Return whether `head_path` is a complete model with its own vocabulary.

    Raises:
        ConfigError: see `resolve_speculation`.
    """
    given = _read(config)
    return given is not None and _method(given) == "draft_model"


def resolve_speculation(
    config: SpeculationConfig, facts: ModelFacts, head: ModelFacts | None = None
) -> ResolvedSpeculation | None:
    """Return how an engine speculates. Return None if it does not.

    Args:
        config: the user's settings.
        facts: facts of the model.
        head: facts of the model at `head_path`.

    Raises:
        ConfigError: the settings are invalid, contradict each other, or need something that this release or model
            lacks.
    """
    given = _read(config)
    if given is None:
        return None
    if facts.pooling is not None:
        raise _error("a model that computes vectors or scores generates no tokens to draft", "leave it out")
    method, depth = _method(given), given.num_speculative_tokens
    lookup = (given.prompt_lookup_min, given.prompt_lookup_max)
    shortest, longest = (3, 5) if lookup == (None, None) else (lookup[0] or lookup[1], lookup[1] or lookup[0])
    assert shortest and longest
    _check_draft_settings(given, method)
    if shortest > longest:
        raise _error(f"prompt_lookup_min {shortest} is above prompt_lookup_max {longest}", "exchange them")
    if method == "suffix":
        depth = min(depth or MAX_SPECULATION, given.suffix_decoding_max_tree_depth)
    if method in _DRAFTERS:
        _check_head(method, facts, head)
    elif method == "mtp":
        head = _own_head(facts)
    if head is not None:
        depth = depth or DEFAULT_HEAD_DEPTH
    return ResolvedSpeculation(
        method=method,
        max_depth=min(depth or DEFAULT_DEPTH, MAX_SPECULATION),
        is_adaptive=given.adaptive,
        prompt_lookup_min=shortest,
        prompt_lookup_max=longest,
        suffix_max_tree_depth=given.suffix_decoding_max_tree_depth,
        suffix_max_cached_requests=given.suffix_decoding_max_cached_requests,
        suffix_max_spec_factor=given.suffix_decoding_max_spec_factor,
        suffix_min_token_prob=given.suffix_decoding_min_token_prob,
        head=head,
        quantization=given.quantization,
        draft_ranks=given.draft_tensor_parallel_size,
    )


def check_head_engine(
    speculation: ResolvedSpeculation | None,
    *,
    num_ranks: int,
    num_stages: int,
    is_lock_step: bool,
    has_embeds: bool,
) -> None:
    """Reject engines that cannot draft with a head or a draft model.

    Args:
        speculation: how the engine speculates.
        num_ranks: number of ranks that share each layer.
        num_stages: number of pipeline stages.
        is_lock_step: whether engines share the experts of the model.
        has_embeds: whether prompts may have embeddings instead of tokens.

    Raises:
        ConfigError: the engine is configured to draft with one, but cannot.
    """
    if speculation is None or speculation.head is None:
        return
    method = speculation.method
    if num_stages > 1:
        raise _error(
            f"method {method} does not draft across pipeline stages in this release",
            'use --tensor-parallel-size, or {"method": "suffix"}',
        )
    if is_lock_step:
        raise _error(
            f"method {method} does not draft in engines that divide the experts in this release",
            'leave --enable-expert-parallel out, or use {"method": "suffix"}',
        )
    if speculation.draft_ranks not in (None, num_ranks):
        raise _error(
            f"draft_tensor_parallel_size is {speculation.draft_ranks}, and --tensor-parallel-size is {num_ranks}: what "
            "drafts has the ranks of the model",
            "leave draft_tensor_parallel_size out",
        )
    if num_ranks > 1 and method == "draft_model" and has_experts(speculation.head):
        raise _error("model: ranks do not divide a draft model that is a mixture of experts", "name a dense one")
    if problem := division_problem(speculation.head, num_ranks):
        raise _error(f"model: --tensor-parallel-size {num_ranks} {problem} that drafts", "use another number of ranks")
    if has_embeds:
        raise _error(
            f"method {method} reads tokens, and prompts of this engine may have embeddings or media",
            'use {"method": "suffix"}, or leave --enable-prompt-embeds out',
        )


def _own_head(facts: ModelFacts) -> ModelFacts:
    if not facts.hf_config.get("num_nextn_predict_layers"):
        raise _error(
            f"method mtp needs a model with layers for it, and config.json of {facts.architecture} has no "
            "num_nextn_predict_layers",
            'use {"method": "suffix"}, or a head',
        )
    if facts.load_format not in ("safetensors", "pt"):
        raise _error(
            f"method mtp reads its layers from safetensors or *.bin files, not from {facts.load_format}",
            "name such a checkpoint as model",
        )
    return facts


def _check_head(method: SpeculationMethod, facts: ModelFacts, head: ModelFacts | None) -> None:
    assert head is not None, "facts of the model at `head_path`"
    is_head = method in _HEADS
    if is_head and head.embedding_width != facts.embedding_width:
        raise _error(
            f"model: the head's hidden_size is {head.embedding_width}, the model's is {facts.embedding_width}",
            "name the head that was trained for this model",
        )
    if head.vocab_size != facts.vocab_size:
        raise _error(
            f"model: the {'head' if is_head else 'draft model'}'s vocab_size is {head.vocab_size}, "
            f"the model's is {facts.vocab_size}",
            "name the head that was trained for this model" if is_head else "name a smaller model of the same family",
        )


def _check_draft_settings(given: _SpeculativeConfig, method: SpeculationMethod) -> None:
    if given.quantization is not None and method != "draft_model":
        raise _error(f"quantization is for method draft_model, and this is {method}", "leave it out")
    if given.draft_tensor_parallel_size is not None and method not in _DRAFTERS:
        raise _error(f"draft_tensor_parallel_size is for methods that draft, and this is {method}", "leave it out")


def _read(config: SpeculationConfig) -> _SpeculativeConfig | None:
    """Return the settings as one object. Return None if there are none, or if they disable speculation."""
    setting = config.speculative_config
    try:
        fields = dict(msgspec.json.decode(setting or "{}") if isinstance(setting, str) else setting or {})
        short = {
            "method": config.spec_method,
            "model": config.spec_model,
            "num_speculative_tokens": config.spec_tokens,
        }
        for name, value in short.items():
            if value is None:
                continue
            if fields.get(name) not in (None, value):
                raise _error(f"{name} is {fields[name]!r} in the JSON and {value!r} in its own flag", "leave one out")
            fields[name] = value
        if fields.get("num_speculative_tokens") == 0:
            return None
        return msgspec.convert(fields, _SpeculativeConfig) if fields else None
    except (msgspec.DecodeError, TypeError, ValueError, AttributeError) as error:
        names = ", ".join(_SpeculativeConfig.__struct_fields__)
        raise _error(str(error), f"it is a JSON object with some of {names}") from None


def _method(given: _SpeculativeConfig) -> SpeculationMethod:
    method: str | None = given.method or (given.model if given.model in ("ngram", "suffix") else None)
    if method in ("ngram", "suffix", "grammar"):
        if given.model not in (None, method, f"[{method}]"):
            raise _error(f"method {method} reads no model, but model is {given.model!r}", _NO_MODEL)
        return "grammar" if method == "grammar" else "ngram" if method == "ngram" else "suffix"
    if method in _MTP:
        if given.model is not None:
            raise _error(f"method {method} reads layers of the model itself, but model is {given.model!r}", _NO_MODEL)
        return "mtp"
    if method in _HEADS:
        if given.model is None:
            raise _error(f"method {method} needs the model of a head", "add its path or name as model")
        return "eagle" if method == "eagle" else "eagle3"
    if method == "draft_model" or (method is None and given.model is not None):
        if given.model is None:
            raise _error("method draft_model needs a smaller model", "add its path or name as model")
        return "draft_model"
    if method in _MISSING_METHODS:
        raise _error(
            f"method {method}: this release drafts by lookups, with draft models, EAGLE heads and MTP layers only",
            _HINT,
        )
    if method is None:
        raise _error("no method is given", _HINT)
    raise _error(f"there is no method {method!r}", _HINT)


def _error(problem: str, hint: str) -> ConfigError:
    return ConfigError(f"speculative_config: {problem}", hint=hint)
