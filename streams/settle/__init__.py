"""Settle: gives every record its verdict and lets the world know.

Reads `results` as a member of group `settle` and asks `streams.core.verdicts` about each record. What follows
from the verdicts is written in this order, and the next step begins when the one before is acknowledged:

1. lines to `outputs` and `errors`, usage to `usage`
      dies: nothing says that these results were read; they are read again and give identical lines and usage
2. `settled` facts of batches whose last verdict this was
      dies: written again, identical; the first one holds
3. the ledger: what the verdicts were, as far as they matter for the next ones
      dies: read again from the committed offset, or below it when a ledger is older; what a ledger already
      contains is ignored batch by batch
4. the committed offset
5. `progress`, for people; the newest one holds

A settler that was stopped for minutes and wakes up only writes what its successor wrote too, except for the
ledger, whose older version sends the next reader further back.
"""

from streams.settle.settler import Settler

__all__ = ["Settler"]
