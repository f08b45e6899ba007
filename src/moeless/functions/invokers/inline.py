"""Invoke instances in the engine's own process, one device after another."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.functions.host.host import ExpertHost
from moeless.functions.token_path.dispatch import Answer


class InlineInvoker:
    """Runs hosts directly.

    Args:
        model: Model id.
        hosts: One per device.
        max_rows: Input rows per invocation; longer inputs come in pieces.
    """

    def __init__(self, model: str, hosts: Sequence[ExpertHost], *, max_rows: int = 8192) -> None:
        self._model = model
        self._hosts = hosts
        self.max_rows = max_rows

    def begin(
        self,
        layer: int,
        *,
        x_TH: torch.Tensor,
        token_S: torch.Tensor,
        segments: Sequence[NDArray[np.int32]],
        y_SH: torch.Tensor | None = None,
    ) -> None:
        """Take the work; it is done in ``finish``."""
        if y_SH is None:
            y_SH = torch.empty(len(token_S), x_TH.shape[1], dtype=x_TH.dtype, device=x_TH.device)
        self._work = (layer, x_TH, token_S, segments)
        self._y_SH = y_SH

    def finish(self) -> Answer:
        """Compute and return."""
        layer, x_TH, token_S, segments = self._work
        status: list[NDArray[np.uint8]] = []
        busy_ns = []
        for host, segments_n3 in zip(self._hosts, segments, strict=True):
            status_n = np.zeros(len(segments_n3), dtype=np.uint8)
            busy_ns.append(
                host.invoke(
                    self._model,
                    layer,
                    x_TH=x_TH,
                    token_S=token_S,
                    segments_n3=segments_n3,
                    y_SH=self._y_SH,
                    status_n=status_n,
                )
                if len(segments_n3)
                else 0
            )
            status.append(status_n)
        return Answer(y_SH=self._y_SH, status=status, busy_ns=busy_ns)

    def close(self) -> None:
        """Nothing to give back."""
