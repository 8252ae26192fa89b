"""Keys of `config.json` that no architecture has to read."""

_FACTS = """
architectures vocab_size num_hidden_layers n_layer n_layers num_attention_heads n_head n_heads num_key_value_heads
head_dim hidden_size n_embd d_model max_position_embeddings n_positions n_ctx max_seq_len seq_length dtype torch_dtype
eos_token_id quantization_config
is_causal use_bidirectional_attention is_matryoshka matryoshka_dimensions sentence_transformers
sbert_ce_default_activation_function classifier_from_token is_original_qwen3_reranker method
"""

_IDENTITY = """
model_type transformers_version _name_or_path name_or_path _commit_hash auto_map tokenizer_class is_llama_config
_attn_implementation _attn_implementation_autoset attn_implementation use_flash_attn unsloth_fixed unsloth_version
transformers.js_config max_sequence_length model_max_length tokenizer_model_max_length
bos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id decoder_start_token_id
forced_bos_token_id forced_eos_token_id prefix begin_suppress_tokens suppress_tokens bad_words_ids
"""

_TRAINING = """
initializer_range initializer_factor init_std attention_dropout attention_probs_dropout_prob attn_pdrop resid_pdrop
embd_pdrop dropout hidden_dropout hidden_dropout_prob residual_dropout resid_dropout ffn_dropout embedding_dropout
classifier_dropout activation_dropout layerdrop gradient_checkpointing pretraining_tp slow_but_exact
init_method router_aux_loss_coef router_z_loss_coef router_jitter_noise output_router_logits
"""

_OUTPUTS = """
use_cache cache_implementation return_dict output_attentions output_hidden_states output_scores torchscript is_decoder
is_encoder_decoder cross_attention_hidden_size tie_encoder_decoder use_bfloat16 chunk_size_feed_forward
return_dict_in_generate pruned_heads finetuning_task task_specific_params problem_type id2label label2id num_labels
tf_legacy_loss summary_type summary_use_proj summary_activation summary_first_dropout summary_proj_to_labels
reorder_and_upcast_attn num_logits_to_keep logits_to_keep
"""

_SAMPLING = """
do_sample temperature top_k top_p typical_p repetition_penalty length_penalty min_length max_length num_beams
num_beam_groups diversity_penalty early_stopping no_repeat_ngram_size encoder_no_repeat_ngram_size
num_return_sequences remove_invalid_values exponential_decay_length_penalty
"""

READ_ELSEWHERE = frozenset(_FACTS.split())
"""Keys that `octavo.frontend.model_files` reads for all models, in `facts` and `pooling`."""

HARMLESS = frozenset((_IDENTITY + _TRAINING + _OUTPUTS + _SAMPLING).split())
"""Keys that do not affect what is computed for a prompt. Sampling defaults are read from generation_config.json."""
