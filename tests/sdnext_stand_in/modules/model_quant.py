def create_config(kwargs=None, allow=True, module="Model", modules_to_not_convert=None, modules_dtype_dict=None):
    from modules import shared

    kwargs = {} if kwargs is None else kwargs
    if shared.opts.sdnq_quantize_mode in ("pre", "auto") and module in shared.opts.sdnq_quantize_weights:
        from modules.sdnq import SDNQConfig

        kwargs["quantization_config"] = SDNQConfig(
            weights_dtype=shared.opts.sdnq_quantize_weights_mode,
            modules_to_not_convert=modules_to_not_convert or [],
            modules_dtype_dict=dict(modules_dtype_dict or {}),
        )
    return kwargs
