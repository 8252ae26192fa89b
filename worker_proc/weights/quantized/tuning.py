"""Keys of config.json in which AutoRound records its settings, whichever format it writes."""

AUTO_ROUND = (
    *("autoround_version", "amp", "batch_size", "enable_minmax_tuning", "enable_norm_bias_tuning", "supported_types"),
    *("enable_quanted_input", "gradient_accumulate_steps", "iters", "lr", "minmax_lr", "low_gpu_mem_usage"),
    *("nsamples", "seqlen", "scale_dtype", "dataset", "super_bits", "super_group_size", "quant_block_list"),
    *("static_kv_granularity", "static_attention_granularity", "to_quant_block_names", "block_name_to_quantize"),
)
"""Keys without effect on the loaded model. The last two name blocks of layers, which the tensors show, too."""
