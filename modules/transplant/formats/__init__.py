"""How quantized layers are stored. So far: recognised, so that no quantized file is loaded as if it were not."""
