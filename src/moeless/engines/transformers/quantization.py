"""Which quantised checkpoints can be served, read from a model's configuration."""

from typing import Any

from moeless.errors import CheckpointError


def check_quantization(config: Any, directory: Any) -> None:
    """Refuse quantisation that cannot be decoded.

    MXFP4 (experts only) and FP8 with 2-D block scales are decoded while weights are read.

    Args:
        config: The model's configuration.
        directory: The checkpoint, for the message.

    Raises:
        CheckpointError: Any other method.
    """
    fields = _fields(config)
    if not fields:
        return
    method = str(fields.get("quant_method", "unknown")).lower()
    if method == "mxfp4" or (method == "fp8" and fp8_block_size(config) is not None):
        return
    if method == "fp8":
        method = "fp8 without weight_block_size"
    raise CheckpointError(
        f"{directory} is quantised with {method}, which is not served; use the unquantised "
        f"checkpoint, or one in MXFP4 or block FP8"
    )


def fp8_block_size(config: Any) -> tuple[int, int] | None:
    """Rows and columns that share one FP8 scale, or None if the configuration names none."""
    block = _fields(config).get("weight_block_size")
    if not isinstance(block, (list, tuple)) or len(block) != 2:
        return None
    rows, columns = (int(size) for size in block)
    return (rows, columns) if rows > 0 and columns > 0 else None


def _fields(config: Any) -> dict[str, Any]:
    for name in ("quantization_config", "compression_config"):
        fields = getattr(config, name, None)
        if fields:
            return dict(fields if isinstance(fields, dict) else fields.to_dict())
    return {}
