"""A lasting record of usage: who asked for how much, and what it cost in GB·s.

``meter`` turns running counters into what was used in each period, ``file`` keeps that in SQLite,
``writer`` does both once a second beside a server, ``usage`` reads it.
"""

from moeless.telemetry.ledger.meter import KeyCounts
from moeless.telemetry.ledger.writer import LedgerConfig, LedgerWriter

__all__ = ["KeyCounts", "LedgerConfig", "LedgerWriter"]
