"""Opens files that were written with ``torch.save``, for readers that must do without torch.

Reading formats is the job of ``moeless.workloads.formats``, which imports no torch so that plans
and replays run without it; the command line hands it this function.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeless.errors import MissingExtraError, TraceError


def load_torch_file(path: Path) -> Any:
    """Load a file of tensors and plain values; nothing in it is executed.

    Args:
        path: The ``.pt`` file.

    Returns:
        What was saved, with numpy arrays in place of tensors.

    Raises:
        MissingExtraError: torch is not installed.
        TraceError: Damaged, or it holds other objects than tensors and plain values.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{path.name}: .pt files need torch; run pip install 'moeless[transformers]', or save "
            f"logical_count as JSON"
        ) from error
    from pickle import UnpicklingError  # noqa: TID251 - only the exception's name

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise TraceError(
            f"{path.name}: holds other objects than tensors and plain values, which could run "
            f"code; save counts alone"
        ) from error
    except Exception as error:
        # A damaged file may fail anywhere inside torch.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise TraceError(f"{path.name}: damaged .pt file: {reason}") from error
    return _to_numpy(loaded)


def _to_numpy(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    if isinstance(value, Mapping):
        return {key: _to_numpy(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_numpy(entry) for entry in value]
    return value
