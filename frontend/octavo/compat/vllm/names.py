"""The names of vLLM's modules and the octavo modules that define them, for scripts and plugins."""

_HERE = "octavo.compat.vllm."
_PLUGINS = "octavo.frontend.plugins."
_FUNCTIONS = f"{_PLUGINS}vllm_functions"

_POOLING_OUTPUTS = (
    "ClassificationOutput ClassificationRequestOutput EmbeddingOutput EmbeddingRequestOutput PoolingOutput "
    "PoolingRequestOutput ScoringOutput ScoringRequestOutput"
)

_ROWS = (
    # Columns: vLLM's modules; the defining octavo module; the names, `theirs=ours` if they differ.
    ("vllm vllm.entrypoints.llm", "llm", "LLM"),
    ("vllm vllm.engine.arg_utils", "engine_args", "EngineArgs AsyncEngineArgs"),
    ("vllm vllm.engine.llm_engine vllm.v1.engine.llm_engine", "llm_engine", "LLMEngine"),
    ("vllm vllm.engine.async_llm_engine", "async_llm", "AsyncLLMEngine=AsyncLLM"),
    ("vllm.v1.engine.async_llm", "async_llm", "AsyncLLM"),
    ("vllm.engine.protocol", "async_llm", "EngineClient=AsyncLLM"),
    ("vllm vllm.sampling_params", "sampling", "SamplingParams"),
    ("vllm.sampling_params", "sampling", "BeamSearchParams RequestOutputKind"),
    ("vllm.sampling_params", "octavo.protocol.structured", "StructuredOutputsParams"),
    ("vllm.sampling_params", "octavo.protocol.repetition", "RepetitionDetectionParams"),
    ("vllm vllm.pooling_params", "octavo.protocol.pooling_params", "PoolingParams"),
    ("vllm vllm.outputs", "request_outputs", "CompletionOutput RequestOutput"),
    ("vllm vllm.outputs", "octavo.frontend.pooling.outputs", _POOLING_OUTPUTS),
    ("vllm.beam_search vllm.entrypoints.generate.beam_search.utils", "octavo.frontend.outputs", "BeamSearchOutput"),
    ("vllm.beam_search vllm.entrypoints.generate.beam_search.utils", "octavo.frontend.outputs", "BeamSearchSequence"),
    ("vllm.logprobs", "request_outputs", "FlatLogprobs Logprob"),
    ("vllm.v1.metrics.stats", "request_outputs", "RequestStateStats"),
    ("vllm vllm.inputs", "prompts", "PromptType TextPrompt TokensPrompt"),
    ("vllm.inputs", "prompts", "EmbedsPrompt"),
    ("vllm.lora.request", "octavo.frontend.lora.request", "LoRARequest"),
    ("vllm.config", "engine_view", "ModelConfig PoolerConfig ProfilerConfig VllmConfig"),
    ("vllm.v1.metrics.reader", "metrics", "Counter Gauge Histogram Metric Vector"),
    ("vllm.v1.sample.logits_processor", "octavo.protocol.logits_processor", "AdapterLogitsProcessor BatchUpdate"),
    ("vllm.v1.sample.logits_processor", "octavo.protocol.logits_processor", "LogitsProcessor MoveDirectionality"),
    ("vllm.v1.sample.logits_processor", "octavo.protocol.logits_processor", "RequestLogitsProcessor=RowProcessor"),
    ("vllm.v1.sample.logits_processor.builtin", "processor_state", "process_dict_updates"),
    ("vllm.exceptions", "octavo.protocol.errors", "VLLMValidationError=InvalidRequestError"),
    ("vllm.v1.engine.exceptions", "octavo.protocol.errors", "EngineDeadError"),
    ("vllm.tokenizers vllm.transformers_utils.tokenizer", "tokenizer", "get_tokenizer"),
    ("vllm.tokenizers vllm.transformers_utils.tokenizer", _FUNCTIONS, "TokenizerLike"),
    ("vllm.utils vllm.utils.argparse_utils", "argument_parser", "FlexibleArgumentParser"),
    ("vllm.utils vllm.utils.network_utils", "scripting", "get_ip get_open_port"),
    ("vllm.utils.counter vllm.utils", "scripting", "Counter"),
    ("vllm.utils.print_utils", "scripting", "print_embeddings"),
    ("vllm.utils.system_utils", "scripting", "set_ulimit"),
    ("vllm.distributed vllm.distributed.parallel_state", "scripting", "cleanup_dist_env_and_memory"),
    ("vllm.logger", _FUNCTIONS, "init_logger"),
    ("vllm.usage.usage_lib", "scripting", "UsageContext"),
    ("vllm.platforms", "scripting", "current_platform"),
    ("vllm.transformers_utils.repo_utils", "scripting", "hf_api"),
    ("vllm.entrypoints.launchers.launcher", "serving", "serve_http"),
    ("vllm.entrypoints.serve.utils.api_utils", "serving", "with_cancellation"),
)


_TYPES = (
    "ChatCompletionNamedFunction ChatCompletionNamedToolChoiceParam ChatCompletionRequest ChatCompletionToolsParam "
    "DeltaFunctionCall DeltaMessage DeltaToolCall ExtractedToolCallInformation FunctionCall FunctionDefinition "
    "OpenAIBaseModel ResponsesRequest ToolCall"
)
_TOOLS = "Tool ToolParser ToolParserManager"
_REASONING = "BaseThinkingReasoningParser DeepSeekR1ReasoningParser ReasoningParser ReasoningParserManager"
_TOOL_TEXTS = (
    "coerce_to_schema_type consume_space extract_types_from_schema find_common_prefix find_tool_name "
    "find_tool_properties is_complete_json partial_tag_overlap safe_literal_eval"
)

_OPENAI = "vllm.entrypoints.openai."
_OF_TOOLS = f"{_OPENAI}tool_parsers vllm.tool_parsers"
_ABOUT_TOOLS = f"{_OPENAI}tool_parsers.abstract_tool_parser vllm.tool_parsers.abstract_tool_parser"
_ABOUT_REASONING = "vllm.reasoning.abs_reasoning_parsers vllm.reasoning.basic_parsers"
_PROTOCOLS = (
    f"{_OPENAI}protocol {_OPENAI}engine.protocol {_OPENAI}chat_completion.protocol {_OPENAI}responses.protocol "
    "vllm.entrypoints.generate.base.protocol"
)
_CHAT = "vllm.entrypoints.chat_utils vllm.renderers.chat_utils"

_PLUGIN_ROWS = (
    # Names that parsers import, for all vLLM releases since 0.8.
    (f"{_PROTOCOLS} {_ABOUT_TOOLS} {_ABOUT_REASONING}", f"{_PLUGINS}vllm_types", _TYPES),
    (f"{_OF_TOOLS} {_ABOUT_TOOLS}", f"{_PLUGINS}vllm_api", _TOOLS),
    (
        f"vllm.reasoning {_ABOUT_REASONING} vllm.reasoning.deepseek_r1_reasoning_parser",
        f"{_PLUGINS}vllm_api",
        _REASONING,
    ),
    (f"{_OPENAI}tool_parsers.utils vllm.tool_parsers.utils", _FUNCTIONS, _TOOL_TEXTS),
    (_CHAT, _FUNCTIONS, "make_tool_call_id"),
    (_CHAT, "octavo.frontend.tools.call_id", "random_tool_call_id=new_call_id"),
    ("vllm.tokenizers vllm.transformers_utils.tokenizer", _FUNCTIONS, "AnyTokenizer=TokenizerLike"),
    ("vllm.utils vllm.utils.collection_utils", _FUNCTIONS, "is_list_of random_uuid"),
    ("vllm.utils.mistral", _FUNCTIONS, "is_mistral_tokenizer"),
)


def _read(rows: tuple[tuple[str, str, str], ...]) -> dict[str, dict[str, tuple[str, str]]]:
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for modules, home, names in rows:
        home = home if home.startswith("octavo.") else _HERE + home
        for module in modules.split():
            for name in names.split():
                theirs, _, ours = name.partition("=")
                found.setdefault(module, {})[theirs] = home, ours or theirs
    return found


NAMES = _read(_ROWS + _PLUGIN_ROWS)
"""For each of vLLM's modules: its names, each with the defining module and the name there."""

NAMES["vllm.version"] = {name: (_HERE.rstrip("."), name) for name in ("__version__", "__version_tuple__")}
NAMES["vllm.envs"] = {}
