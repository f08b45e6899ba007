"""Numbers of rows that oneDNN is asked for, few enough that what it keeps for each stays small.

oneDNN builds a product anew for each number of rows and keeps what it built: about 0.5 MB and two
milliseconds each (measured, see docs/log.md). Batches and prompts come in all sizes, so a worker
grew by hundreds of MB. Rounded up to one of eight numbers per octave, rows are at most an eighth
more, and there are 72 numbers up to 2,048 rows. Needs torch.
"""

import torch

_EXACT_UP_TO = 16
_PER_OCTAVE = 8


def round_up_rows(rows: int) -> int:
    """The number of rows to compute when so many are needed."""
    if rows <= _EXACT_UP_TO:
        return rows
    step = (1 << (rows - 1).bit_length()) // (2 * _PER_OCTAVE)
    return -(-rows // step) * step


def pad_rows(x_nI: torch.Tensor) -> torch.Tensor:
    """The rows, and as many more with any content as ``round_up_rows`` says.

    Args:
        x_nI: Contiguous rows.

    Returns:
        A view where the rows' memory goes on for long enough, as workspaces do; else a copy.
    """
    n, width = x_nI.shape
    rows = round_up_rows(n)
    if rows == n:
        return x_nI
    room = x_nI.untyped_storage().nbytes() // x_nI.element_size() - x_nI.storage_offset()
    if room >= rows * width and x_nI.is_contiguous():
        return x_nI.as_strided((rows, width), (width, 1))
    padded = x_nI.new_zeros((rows, width))
    padded[:n] = x_nI
    return padded
