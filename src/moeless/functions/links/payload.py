"""Torch views of a channel's payload region. Needs torch."""

from typing import Any

import torch

from moeless.functions.links.channel import ChannelShape


class Payload:
    """The rows that an engine and its workers share.

    Args:
        buffer: The mapped region.
        shape: Sizes.
    """

    def __init__(self, buffer: Any, shape: ChannelShape) -> None:
        dtype = getattr(torch, shape.dtype)
        rows, slots, hidden = shape.max_rows, shape.max_assignments, shape.hidden
        self.x_TH = torch.frombuffer(buffer, dtype=dtype, count=rows * hidden).view(rows, hidden)
        self.token_S = torch.frombuffer(
            buffer, dtype=torch.int64, count=slots, offset=shape.x_bytes
        )
        self.y_SH = torch.frombuffer(
            buffer,
            dtype=dtype,
            count=slots * hidden,
            offset=shape.x_bytes + shape.token_bytes,
        ).view(slots, hidden)
