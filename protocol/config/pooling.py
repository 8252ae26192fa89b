"""Resolves the settings of an engine for a pooling model, which computes vectors and scores instead of tokens."""

from octavo.protocol.config.engine import EngineConfig
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError

MIN_BUDGET = 2048
"""Least default number of tokens in a step. Short texts then share steps, and no request waits for the next token of
another one meanwhile."""


def is_computed_whole(facts: ModelFacts) -> bool:
    """Return whether tokens attend to later ones. If so, a step computes complete prompts, which share nothing."""
    return facts.pooling is not None and not facts.pooling.is_causal


def pooling_budget(config: EngineConfig, facts: ModelFacts, budget: int, max_model_len: int) -> int:
    """Return the most tokens of a step.

    Args:
        config: the user's settings.
        facts: facts of the model.
        budget: the user's value, or the default for a generating model.
        max_model_len: length of the longest prompt.

    Raises:
        ConfigError: the user's value is below the longest prompt, which must be computed in one step; or a setting only
            applies to models that generate.
    """
    if facts.pooling is None:
        return budget
    for name, is_given in (
        ("--enable-prompt-embeds", config.model.enable_prompt_embeds),
        ("--logits-processors", bool(config.model.logits_processors or config.processor_code)),
        ("--model-impl transformers", facts.model_impl == "transformers"),
    ):
        if is_given:
            raise ConfigError(
                f"{name}: not for models that pool, as this one does",
                hint=f"leave out {name}, or use --runner generate",
            )
    if facts.pooling.pads_texts and max_model_len < facts.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {max_model_len}: {facts.architecture} pads its texts to all of its "
            f"{facts.max_position_embeddings} positions",
            hint=f"use --max-model-len {facts.max_position_embeddings}, or leave it out",
        )
    requested, scheduler = config.scheduler.max_num_batched_tokens, config.scheduler
    if is_computed_whole(facts) and (scheduler.step_time_target or scheduler.long_prefill_token_threshold):
        raise ConfigError(
            "--step-time-target and --long-prefill-token-threshold divide prompts, but this model needs them whole: "
            "its tokens attend to later ones",
            hint="leave both out",
        )
    least = max_model_len if is_computed_whole(facts) else 1
    if requested is not None and requested < least:
        raise ConfigError(
            f"max_num_batched_tokens {requested} is below max_model_len {max_model_len}: a step computes whole "
            "prompts, because the tokens of this model attend to later ones",
            hint=f"use --max-num-batched-tokens {least} or --max-model-len {requested}",
        )
    return max(budget, least, 0 if requested else MIN_BUDGET)
