"""Lists of vLLM's test files that run, the models that they use, and the tests that are left out."""

FILES = (
    "anthropic/test_messages.py",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_completion_with_prompt_embeds.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/chat_completion/test_thinking_token_budget.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_completion_with_prompt_embeds.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/responses/test_simple.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/test_stop_token_ids.py",
    "scale_out/token_in_token_out/test_serving_tokens.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_orca_metrics.py",
    "serve/instrumentator/test_uds.py",
    "serve/middleware/test_optional_middleware.py",
    "serve/tokenize/test_tokenization.py",
    "llm/test_chat.py",
    "llm/test_generate.py",
    "llm/test_prompt_validation.py",
)
"""Test files below `tests/entrypoints/`; all of them pass."""

MODELS = (
    "HuggingFaceH4/zephyr-7b-beta",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
    "distilbert/distilgpt2",
    "facebook/opt-125m",
    "hmellor/tiny-random-LlamaForCausalLM",
    "meta-llama/Llama-3.2-1B-Instruct",
    "openai-community/gpt2",
    "unsloth/llama-3.2-1b-Instruct",
)
"""Names that the files use; all of them are one checkpoint."""

EMBEDDING_MODELS = ("intfloat/multilingual-e5-small",)
"""Names of embedding models that the files use; all of them are all-MiniLM-L6-v2."""

ADAPTERS = (
    "charent/self_cognition_Alice",
    "charent/self_cognition_Bob",
    "peft-internal-testing/opt-125m-dummy-lora",
    "typeof/zephyr-7b-beta-lora",
)
"""Names of LoRA adapters that the files use."""

_COMPLETION = "openai/completion/test_completion.py::"
_EMBEDS = "openai/completion/test_completion_with_prompt_embeds.py::"
_CHAT = "openai/chat_completion/test_chat.py::"
_BUDGET = "openai/chat_completion/test_thinking_token_budget.py::"

DESELECTED: dict[str, str] = {
    "openai/chat_completion/test_batched_chat_completions.py::test_batched_chat_completions_with_json_schema": (
        "the stand-in writes more keys than its limit has room for"
    ),
    _COMPLETION + "test_single_completion[facebook/opt-125m]": "counts the tokens of OPT's tokenizer",
    **{
        f"{_COMPLETION}{name}[facebook/opt-125m]": "the stand-in ends this prompt at once"
        for name in ("test_completion_streaming", "test_parallel_no_streaming", "test_parallel_streaming")
    },
    "openai/test_return_token_ids.py::test_chat_completion_with_tool_use": "needs a model that calls tools",
    "openai/test_return_token_ids.py::test_comparison_with_prompt_logprobs_and_logprobs": (
        "needs a model that does not end within 20 tokens"
    ),
    **{
        f"anthropic/test_messages.py::{name}": "message_start counts cached tokens apart here, as Anthropic's API does"
        for name in ("test_anthropic_streaming", "test_anthropic_streaming_cache_usage")
    },
    "anthropic/test_messages.py::test_anthropic_tool_call": "needs a model that calls tools",
    "openai/responses/test_simple.py::test_enable_response_messages[Qwen/Qwen3-8B]": (
        "wants input_messages and output_messages, which are not here"
    ),
    **{
        f"openai/responses/test_simple.py::{name}[Qwen/Qwen3-8B]": "needs a model that reasons"
        for name in (
            "test_reasoning_item",
            "test_streaming_reasoning_tokens_e2e",
            "test_non_streaming_reasoning_tokens_e2e",
        )
    },
    **{
        f"{_BUDGET}test_thinking_token_budget_limits_reasoning[{server}]": (
            "counts the line break behind <think>, which belongs to the prompt here"
        )
        for server in ("default", "auto_config")
    },
    "serve/instrumentator/test_basic.py::test_show_version": "/version is octavo's own",
    "serve/instrumentator/test_uds.py::test_show_version": "/version is octavo's own",
    **{
        f"openai/chat_completion/test_include_reasoning.py::{name}": "needs a model that reasons"
        for name in (
            "test_include_reasoning_true_non_streaming",
            "test_reasoning_tokens_in_usage",
            "test_include_reasoning_true_streaming",
            "test_default_includes_reasoning",
        )
    },
    "serve/instrumentator/test_orca_metrics.py::test_chat_completion_with_orca_header": (
        "waits for an answer of up to 8,000 tokens, which the stand-in does not end"
    ),
    "openai/completion/test_prompt_validation.py::test_load_prompt_embeds": "tests vLLM's own function",
    "serve/instrumentator/test_orca_metrics.py::test_single_completion": "usage has prompt_tokens_details here",
    "openai/completion/test_prompt_validation.py::test_empty_prompt": "looks for the words of vLLM's error",
    "llm/test_chat.py::test_chat_batch_failure_cleanup": "looks for the words of vLLM's error",
    "llm/test_chat.py::test_chat_extra_kwargs": "looks for Qwen3's token <think>",
    **{
        f"{_EMBEDS}{name}": "the stand-in ends this prompt at once"
        for name in (
            "test_completions_with_prompt_embeds[use-lora-facebook/opt-125m]",
            "test_completions_with_prompt_embeds[use-lora-opt125m-lora]",
            "test_completions_with_logprobs_and_prompt_embeds[use-lora-facebook/opt-125m-1]",
            "test_completions_with_logprobs_and_prompt_embeds[use-lora-facebook/opt-125m-0]",
            "test_completions_with_logprobs_and_prompt_embeds[use-lora-opt125m-lora-1]",
            "test_completions_with_logprobs_and_prompt_embeds[use-lora-opt125m-lora-0]",
        )
    },
    f"{_EMBEDS}test_prompt_logprobs_raises_error[use-lora]": "looks for the words of vLLM's error",
    f"{_CHAT}test_invocations": "SageMaker's route is not here",
    **{
        f"{_CHAT}{name}": "needs what a larger model writes"
        for name in (
            "test_more_than_one_prompt_logprobs_chat[HuggingFaceH4/zephyr-7b-beta]",
            "test_chat_streaming[HuggingFaceH4/zephyr-7b-beta]",
            "test_chat_streaming[zephyr-lora]",
            "test_structured_outputs_json_chat",
            "test_response_format_json_object",
            "test_response_format_json_schema",
            "test_complex_message_content",
            "test_custom_role",
        )
    },
    **{
        f"{_CHAT}test_single_chat_session[{model}]": "usage has prompt_tokens_details here"
        for model in ("HuggingFaceH4/zephyr-7b-beta", "zephyr-lora")
    },
    **{
        f"{_CHAT}test_structured_outputs_{kind}_chat": "wants another answer, and the stand-in may give the same again"
        for kind in ("choice", "regex")
    },
    f"{_CHAT}test_long_seed": "looks for the words of vLLM's error",
    f"{_CHAT}test_chat_completion_request_n_parameter_exceeds_default_limit": "tests vLLM's own class",
    "llm/test_prompt_validation.py::test_empty_prompt": "looks for the words of vLLM's error",
    "llm/test_prompt_validation.py::test_require_mm_embeds": "needs images",
    "serve/middleware/test_optional_middleware.py::test_no_request_id_header": "octavo always sends the header",
    **{
        f"openai/chat_completion/test_chat_logit_bias_validation.py::{name}": "builds vLLM's own ModelConfig"
        for name in ("test_chat_logit_bias_valid", "test_chat_logit_bias_invalid")
    },
    "openai/chat_completion/test_chat_echo.py::test_top_logprobs": (
        "sends logprobs as a string, which octavo refuses as OpenAI does"
    ),
}
"""Tests that do not apply, with the reasons."""
