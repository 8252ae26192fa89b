"""Maps architectures to the files that implement them. Importing this module imports no model."""

from dataclasses import dataclass
from importlib import import_module

import msgspec

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.pooling import is_computed_whole
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.parallel.sharding import facts_of_rank
from octavo.worker_proc.pooling.decoder_heads import decoder_head, decoder_of


@dataclass(frozen=True, slots=True)
class Family:
    """Architectures that one file implements."""

    name: str
    """Display name."""
    module: str
    """Name of its module in `octavo.worker_proc.models`; the module's `build` makes the model."""
    architectures: tuple[str, ...]
    """Architectures as in `config.json`."""
    features: str
    """Distinguishing features, for docs/models.md, like the following fields."""
    caches: str = "full"
    """Kinds of its cache groups."""
    tested: str = "`transformers`"
    """Reference that its logits and tokens are compared with."""


FAMILIES = (
    Family(
        "Llama 2, 3",
        "llama",
        ("LlamaForCausalLM",),
        "rotary embedding with every scaling, grouped heads",
    ),
    Family(
        "Mistral, Ministral",
        "llama",
        ("MistralForCausalLM", "MinistralForCausalLM"),
        "windows of all or some layers",
        caches="full, window",
    ),
    Family(
        "Qwen2, Qwen2.5",
        "llama",
        ("Qwen2ForCausalLM",),
        "biases of queries, keys and values; windows of some layers",
        caches="full, window",
    ),
    Family(
        "Qwen3",
        "llama",
        ("Qwen3ForCausalLM",),
        "norms of query and key heads; windows of some layers",
        caches="full, window",
    ),
    Family("SmolLM3", "llama", ("SmolLM3ForCausalLM",), "layers without rotary embedding", caches="full, window"),
    Family("Arcee (AFM)", "llama", ("ArceeForCausalLM",), "squared ReLU, no gate"),
    Family(
        "InternLM 2, 2.5",
        "llama",
        ("InternLM2ForCausalLM",),
        "queries, keys and values fused by key head; dynamic NTK",
        tested="a Llama with the same numbers",
    ),
    Family(
        "InternLM 3", "llama", ("InternLM3ForCausalLM",), "biases; dynamic NTK", tested="a Llama with the same numbers"
    ),
    Family(
        "Falcon",
        "falcon",
        ("FalconForCausalLM",),
        "parallel blocks, one key head or several; ALiBi or rotary embedding",
    ),
    Family("BLOOM", "falcon", ("BloomForCausalLM",), "ALiBi, normalized embeddings"),
    Family("MPT", "mpt", ("MptForCausalLM",), "ALiBi, fused projection"),
    Family(
        "Mixtral",
        "mixtral",
        ("MixtralForCausalLM",),
        "mixture of experts in every layer",
        caches="full or window",
    ),
    Family(
        "Qwen2-MoE",
        "qwen_moe",
        ("Qwen2MoeForCausalLM",),
        "mixture of experts, and a shared expert",
    ),
    Family("Qwen3-MoE", "qwen_moe", ("Qwen3MoeForCausalLM",), "mixture of experts"),
    Family("OLMoE", "olmoe", ("OlmoeForCausalLM",), "mixture of experts, norms of all query heads together"),
    Family("Granite-MoE", "granite", ("GraniteMoeForCausalLM",), "mixture of experts, factors as Granite 3"),
    Family("GLM-4.5", "glm4_moe", ("Glm4MoeForCausalLM",), "mixture of experts with sigmoid routing, shared experts"),
    Family(
        "Llama 4 (text)",
        "llama4",
        ("Llama4ForCausalLM",),
        "chunks of positions, full layers without rotary embedding, mixture of experts whose input is weighted",
        caches="full, chunk",
    ),
    Family(
        "GPT-OSS",
        "gpt_oss",
        ("GptOssForCausalLM",),
        "mixture of experts with biases, attention sinks, windows",
        caches="full, window",
    ),
    Family("DeepSeek-V2", "deepseek", ("DeepseekV2ForCausalLM",), "latent attention, mixture of experts"),
    Family("DeepSeek-V3", "deepseek", ("DeepseekV3ForCausalLM",), "latent attention, group-limited routing"),
    Family("Gemma", "gemma", ("GemmaForCausalLM",), "1 + w norms, scaled embeddings, GeGLU"),
    Family(
        "Gemma 2",
        "gemma",
        ("Gemma2ForCausalLM",),
        "windows of every other layer, soft caps of scores and logits, four norms",
        caches="full, window",
    ),
    Family(
        "Gemma 3 (text)",
        "gemma",
        ("Gemma3ForCausalLM",),
        "windows of five layers in six, with angles of their own",
        caches="full, window",
    ),
    Family(
        "Phi-3, Phi-3.5, Phi-4",
        "phi3",
        ("Phi3ForCausalLM",),
        "fused projections, LongRoPE, partial rotary embedding",
        caches="full or window",
    ),
    Family("Phi-1, Phi-2", "gpt_neox", ("PhiForCausalLM",), "parallel blocks, partial rotary embedding"),
    Family(
        "GPT-NeoX, Pythia", "gpt_neox", ("GPTNeoXForCausalLM",), "parallel blocks, interleaved queries, keys and values"
    ),
    Family("Granite 3", "granite", ("GraniteForCausalLM",), "factors of embeddings, scores, blocks and logits"),
    Family("OLMo", "olmo", ("OlmoForCausalLM",), "norms without weights, limits of queries, keys and values"),
    Family("OLMo 2", "olmo", ("Olmo2ForCausalLM",), "norms after blocks, norms of all query heads together"),
    Family(
        "OLMo 3", "olmo", ("Olmo3ForCausalLM",), "as OLMo 2; windows of three layers in four", caches="full, window"
    ),
    Family(
        "Command R",
        "cohere",
        ("CohereForCausalLM",),
        "parallel blocks, interleaved rotary embedding, scaled logits, norms of heads (R+)",
    ),
    Family(
        "Command R7B, A",
        "cohere",
        ("Cohere2ForCausalLM",),
        "as Command R; windows; full layers without rotary embedding",
        caches="full, window",
    ),
    Family(
        "StarCoder2",
        "starcoder2",
        ("Starcoder2ForCausalLM",),
        "layer norms, plain mlp, window",
        caches="full or window",
    ),
    Family("GLM-4", "glm", ("GlmForCausalLM", "Glm4ForCausalLM"), "partial interleaved rotary embedding, four norms"),
    Family(
        "EXAONE 4",
        "exaone4",
        ("Exaone4ForCausalLM",),
        "norms after blocks, windows, full layers without rotary embedding",
        caches="full, window",
    ),
    Family(
        "Mamba-2",
        "mamba2",
        ("Mamba2ForCausalLM",),
        "layers with a recurrent state, no attention",
        caches="state",
    ),
    Family(
        "Granite 4",
        "granite_hybrid",
        ("GraniteMoeHybridForCausalLM",),
        "Mamba-2 in most layers, attention without rotary embedding in the others; mixture of experts or none",
        caches="full, state",
    ),
    Family(
        "LFM2",
        "lfm2",
        ("Lfm2ForCausalLM",),
        "short convolutions in most layers, attention with norms of query and key heads in the others",
        caches="full, state",
    ),
    Family(
        "LFM2-MoE",
        "lfm2",
        ("Lfm2MoeForCausalLM",),
        "as LFM2; mixture of experts with sigmoid routing",
        caches="full, state",
    ),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        ("Qwen3NextForCausalLM",),
        "gated delta nets in most layers, gated attention in the others; mixture of experts, and a shared expert",
        caches="full, state",
    ),
    Family(
        "Falcon-H1",
        "falcon_h1",
        ("FalconH1ForCausalLM",),
        "Mamba-2 and attention side by side in every layer; factors of projections",
        caches="full, state",
    ),
    Family(
        "Nemotron-H",
        "nemotron_h",
        ("NemotronHForCausalLM",),
        "layers of one block: Mamba-2, attention without rotary embedding, mlp or mixture of experts with squared ReLU",
        caches="full, state",
    ),
    Family(
        "BERT",
        "bert",
        ("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification"),
        "encoder; learned positions, norms after sums",
    ),
    Family(
        "RoBERTa, XLM-RoBERTa, CamemBERT",
        "bert",
        tuple(
            f"{family}{kind}"
            for family in ("Roberta", "XLMRoberta", "Camembert")
            for kind in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
        ),
        "encoder; as BERT; positions after that of padding",
    ),
    Family(
        "DistilBERT",
        "bert",
        (
            *("DistilBertModel", "DistilBertForMaskedLM"),
            *("DistilBertForSequenceClassification", "DistilBertForTokenClassification"),
        ),
        "encoder; as BERT, without segments",
    ),
    Family(
        "ModernBERT",
        "modernbert",
        (
            *("ModernBertModel", "ModernBertForMaskedLM"),
            *("ModernBertForSequenceClassification", "ModernBertForTokenClassification"),
        ),
        "encoder; rotary embedding, windows of two layers in three, GeGLU",
    ),
    Family(
        "NomicBERT",
        "rotary_bert",
        (
            *("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForPreTraining"),
            *("NomicBertForSequenceClassification", "NomicBertForTokenClassification"),
        ),
        "encoder; rotary embedding, SwiGLU, norms after sums",
    ),
    Family(
        "GTE",
        "rotary_bert",
        tuple(
            f"{name}{kind}"
            for name in ("Gte", "New")
            for kind in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
        ),
        "encoder; rotary embedding with NTK scaling, GeGLU, norms after sums",
    ),
    Family(
        "CLIP, SigLIP",
        "clip",
        ("CLIPModel", "SiglipModel"),
        "vectors of texts and of images; CLIP attends to earlier tokens, SigLIP in both directions",
    ),
    Family(
        "Whisper",
        "whisper",
        ("WhisperForConditionalGeneration",),
        "speech to text; learned positions, cross-attention to an encoder of audio",
        caches="full, keys of audio",
    ),
    Family("OPT", "opt", ("OPTForCausalLM",), "learned positions, ReLU"),
    Family("GPT-2", "gpt2", ("GPT2LMHeadModel",), "learned positions, GELU"),
)

_CAUSAL = ("ForCausalLM", "LMHeadModel")
ARCHITECTURES = {architecture: family for family in FAMILIES for architecture in family.architectures}


def build_model(facts: ModelFacts, placement: Placement) -> Model:
    """Make the model that `facts` describes, or one rank's part of it. Its parameters are uninitialized.

    Raises:
        ConfigError: the architecture, or something in its configuration, is not supported, or it cannot be divided.
    """
    architecture = facts.architecture
    if facts.pooling is not None and architecture not in ARCHITECTURES:
        architecture = decoder_of(architecture)
    family = ARCHITECTURES.get(architecture)
    if family is None and facts.pooling is not None:
        raise ConfigError(f"the architecture {facts.architecture} cannot pool", hint=f"use {_one_of_the_families()}")
    if facts.model_impl == "transformers" or (facts.model_impl == "auto" and family is None):
        return _build_fallback(facts, placement)
    if family is None:
        raise ConfigError(
            f"the architecture {facts.architecture} has no family (--model-impl octavo)",
            hint=f"use --model-impl auto, or {_one_of_the_families()}",
        )
    own_facts = facts_of_rank(facts, placement.sharding.size)
    config = CheckedConfig(own_facts.hf_config)
    build = import_module(f"octavo.worker_proc.models.{family.module}").build
    model: Model = build(msgspec.structs.replace(own_facts, architecture=architecture, hf_config=config), placement)
    if facts.pooling is not None and architecture.endswith(_CAUSAL):
        model.pooling_head = decoder_head(model.parameters, msgspec.structs.replace(facts, hf_config=config))
    if facts.pooling is not None:
        ignore(config, "is_causal")  # the facts have it
    config.reject_unread(facts.architecture)
    if is_computed_whole(facts) and (model.state_group or any(group.shape.is_causal for group in model.cache_groups)):
        raise ConfigError(
            f"config.json asks for attention in both directions, which {family.name} does not have here",
            hint="use a model whose tokens attend to those before them, or an encoder",
        )
    return model


def _build_fallback(facts: ModelFacts, placement: Placement) -> Model:
    from octavo.worker_proc.models.fallback.configuration import is_known  # imports transformers: seconds
    from octavo.worker_proc.models.fallback.model import build

    if not is_known(facts):
        raise ConfigError(
            f"the architecture {facts.architecture} is not supported, and unknown to transformers as a causal model",
            hint=f"use {_one_of_the_families()}",
        )
    return build(facts, placement)


def fallback_reads(facts: ModelFacts, placement: Placement, tensor: str) -> bool:
    """Return whether `--model-impl transformers` would run a model, and read this tensor of its checkpoint."""
    from octavo.worker_proc.models.fallback.model import TransformersModel

    try:
        model = _build_fallback(facts, placement)
    except ConfigError:
        return False
    assert isinstance(model, TransformersModel)
    return model.reads(tensor)


def _one_of_the_families() -> str:
    return f"one of {', '.join(sorted(ARCHITECTURES))}"
