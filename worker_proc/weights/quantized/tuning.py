"""AutoRound's notes in config.json about how it found the weights, in each format that it writes."""

AUTO_ROUND = (
    *("autoround_version", "amp", "batch_size", "enable_minmax_tuning", "enable_norm_bias_tuning", "supported_types"),
    *("enable_quanted_input", "gradient_accumulate_steps", "iters", "lr", "minmax_lr", "low_gpu_mem_usage"),
    *("nsamples", "seqlen", "scale_dtype", "dataset", "super_bits", "super_group_size", "quant_block_list"),
    *("static_kv_granularity", "static_attention_granularity", "to_quant_block_names", "block_name_to_quantize"),
)
"""Keys that change nothing. The last two name blocks of layers, which tensors say too."""
