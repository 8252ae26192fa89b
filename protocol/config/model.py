"""`ModelConfig`: which model runs, and how its files are read."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from octavo.protocol.params import LogprobsMode

LoadFormat: TypeAlias = Literal["auto", "hf", "safetensors", "pt", "mistral", "gguf", "dummy"]
ConfigFormat: TypeAlias = Literal["auto", "hf", "mistral"]
TokenizerMode: TypeAlias = Literal["auto", "hf", "fast", "slow", "mistral"]
ModelImpl: TypeAlias = Literal["auto", "octavo", "transformers"]
ModelImplChoice: TypeAlias = Literal["auto", "octavo", "vllm", "transformers"]
RunnerChoice: TypeAlias = Literal["auto", "generate", "pooling"]
ConvertChoice: TypeAlias = Literal["auto", "embed", "classify", "none"]
DtypeName: TypeAlias = Literal["bfloat16", "float16", "float32"]
DtypeChoice: TypeAlias = Literal["auto", "bfloat16", "float16", "float32", "half", "float"]
QuantizationName: TypeAlias = Literal[
    "none",
    "w8a8",
    "int8",
    "int4",
    "gguf",
    "gptq",
    "awq",
    "compressed-tensors",
    "fp8",
    "bitsandbytes",
    "torchao",
    "mxfp4",
    "modelopt",
    "auto-round",
    "quark",
]
QuantizationChoice: TypeAlias = QuantizationName | Literal["gptq_marlin", "awq_marlin", "fbgemm_fp8", "modelopt_fp4"]


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how its weights and texts are read."""

    model: Annotated[str, Meta(description="Directory in Hugging Face layout, a .gguf file, or a hub id (org/name).")]
    tokenizer: Annotated[
        str | None, Meta(description="Directory or hub id of the tokenizer. Default: the model's own.")
    ] = None
    revision: Annotated[str | None, Meta(description="Branch, tag or commit on the hub.")] = None
    tokenizer_revision: Annotated[str | None, Meta(description="Branch, tag or commit of --tokenizer on the hub.")] = (
        None
    )
    tokenizer_mode: Annotated[
        TokenizerMode,
        Meta(
            description="Which tokenizer files are read. auto, hf, fast: tokenizer.json, else older formats (auto: "
            "tekken.json first); slow: the files that tokenizer.json was made from; mistral: tekken.json."
        ),
    ] = "auto"
    skip_tokenizer_init: Annotated[
        bool,
        Meta(
            description="Load no tokenizer: prompts and outputs are token ids (return_token_ids). Everything that "
            "needs text is rejected: text prompts, chat, stop strings, bad_words, structured output, "
            "echo."
        ),
    ] = False
    hf_token: Annotated[
        str | None, Meta(description="Access token of the hub. Default: from `hf auth login`, or HF_TOKEN.")
    ] = None
    download_dir: Annotated[
        str | None, Meta(description="Directory for downloads from the hub. Default: the hub's own cache.")
    ] = None
    hf_overrides: Annotated[
        dict[str, Any] | str | None,
        Meta(description='JSON that overrides members of the model\'s config.json, such as {"rope_theta": 1e6}.'),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        Meta(description="Model names that the API accepts; the first one is reported. Default: MODEL."),
    ] = None
    load_format: Annotated[
        LoadFormat,
        Meta(
            description="Format of the weights. auto, hf: safetensors, else pt, else mistral; pt: pytorch_model.bin or "
            "other files of torch.save; mistral: consolidated*.safetensors; dummy: random weights, no files are read."
        ),
    ] = "auto"
    config_format: Annotated[
        ConfigFormat,
        Meta(description="Format of the configuration. hf: config.json; mistral: params.json; auto: whichever exists."),
    ] = "auto"
    model_impl: Annotated[
        ModelImplChoice,
        Meta(
            description="Implementation of the model: octavo (a family in docs/models.md; vllm means the same), "
            "transformers (its code, with octavo's attention and products), or auto: octavo if there is a "
            "family."
        ),
    ] = "auto"
    runner: Annotated[
        RunnerChoice,
        Meta(
            description="generate: text; pooling: vectors, scores or classes of texts (docs/pooling.md); auto: pooling "
            "for encoders, models of Sentence Transformers, classifiers and reward models."
        ),
    ] = "auto"
    convert: Annotated[
        ConvertChoice,
        Meta(
            description="Turn a generating model into a pooling model: return its hidden states as vectors (embed), "
            "or apply its classification head (classify). none: only pool models that were trained for "
            "it."
        ),
    ] = "auto"
    pooler_config: Annotated[
        dict[str, Any] | str | None,
        Meta(description='JSON that overrides how a pooling model pools, such as {"pooling_type": "MEAN"}.'),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Meta(description="Run code from the model's repository, for architectures that transformers does not have."),
    ] = False
    dtype: Annotated[
        DtypeChoice,
        Meta(
            description="Data type of weights and activations. auto: that of the checkpoint, but bfloat16 for float32."
        ),
    ] = "auto"
    quantization: Annotated[
        QuantizationChoice | None,
        Meta(
            description="Format of the weights of linear layers. w8a8: quantized while loading, 8 bits with a scale "
            "for each output, the fastest in batches; int8, int4: in groups of 32; fp8, bitsandbytes (nf4): the same "
            "for a checkpoint that is not quantized; none: --dtype. All others, and these two, name the format of the "
            "checkpoint. Default: that format unless --dtype is float32, else none.",
            extra={"short": ("-q",)},
        ),
    ] = None
    packed_weights_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Size limit of the packed weights in the cache directory (16G, 512M). Later starts map them "
            "instead of loading the model again. 0: keep none.",
        ),
    ] = 16 * 2**30
    max_model_len: Annotated[
        int | Literal["auto"] | None,
        Meta(
            description="Longest prompt plus output, in tokens (32k = 32 000, 32K = 32 768). Default: the model's own; "
            "auto: the longest that fits in memory."
        ),
    ] = None
    seed: Annotated[int, Meta(description="Seed for dummy weights and for requests without a seed.")] = 0
    max_logprobs: Annotated[
        int, Meta(ge=-1, description="Most logprobs per token that a request may ask for; -1: no limit.")
    ] = 20
    logprobs_mode: Annotated[
        LogprobsMode,
        Meta(
            description="What is reported as a token's logprob: its log-probability or its logit, raw (from the model) "
            "or processed (after biases, penalties, temperature and filters). Prompt tokens are always raw."
        ),
    ] = "raw_logprobs"
    logits_processors: Annotated[
        list[str] | None,
        Meta(
            description="Code that changes logits before tokens are sampled: module:Class, file.py:Class, or the name "
            "of an entry point in the group octavo.logits_processors."
        ),
    ] = None
    enable_prompt_embeds: Annotated[
        bool, Meta(description="Accept prompt_embeds: given rows instead of a prompt's token embeddings.")
    ] = False
    generation_config: Annotated[
        str,
        Meta(
            description="Source of default sampling parameters: auto (the model's generation_config.json), vllm (none) "
            "or a directory."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | str | None,
        Meta(description='JSON that overrides members of the generation configuration, such as {"temperature": 0.5}.'),
    ] = None
    chat_template: Annotated[
        str | None,
        Meta(description="Jinja chat template: a file, or the text itself. Default: the model's own."),
    ] = None
