"""Reads MoE-Infinity's expert activation traces: an ``.npy`` array [n, layers, experts].

Each of the n entries has the tokens of one sequence; unused entries are zero.

Source: EfficientMoE/MoE-Infinity, ``moe_infinity/memory/expert_tracer.py``.
"""

from pathlib import Path

from moeless.errors import TraceError
from moeless.workloads.formats.checks import as_counts, drop_dense_layers, sum_steps
from moeless.workloads.formats.expert_loads import ExpertLoads
from moeless.workloads.formats.npy_file import read_npy


def read_moe_infinity_loads(path: Path) -> ExpertLoads:
    """Add up the sequences.

    Args:
        path: The ``.npy`` file.

    Raises:
        TraceError: Another shape, or values that are no counts.
    """
    source = f"{path.name} (MoE-Infinity)"
    array = read_npy(path)
    if array.ndim != 3 or array.size == 0:
        raise TraceError(f"{source}: shape {array.shape}, expected [sequences, layers, experts]")
    loads_LE, steps = sum_steps(as_counts(array, source=source), source=source)
    loads_LE, layer_ids = drop_dense_layers(loads_LE, range(len(loads_LE)), source=source)
    return ExpertLoads(loads_LE=loads_LE, layer_ids=layer_ids, source=source, steps=steps)
