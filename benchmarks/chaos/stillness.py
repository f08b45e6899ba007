"""How long we did not run ourselves: figures of such a time tell of the machine only."""

import asyncio
import time

_BEAT_S = 0.1
_NOTICED_S = 0.5


class Stillness:
    """Counts the seconds in which the event loop did not turn, from half a second on."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        """Run beside what is measured until cancelled."""
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(_BEAT_S)
            late_s = time.monotonic() - began_s - _BEAT_S
            if late_s > _NOTICED_S:
                self.seconds += late_s
