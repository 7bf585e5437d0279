"""Dispatch: Kafka as a fair queue in front of the model servers.

A consumer group only says which request partitions are ours. Where a batch's records lie there is known from
its `enqueued` fact, so they are read by position, for whichever batch is due, no more than can soon start.

    facts ──► jobs ──► schedule ── pick ──► backlog ── work ──► call ──► results ──► done-sets
                         ▲                                        │
                         └────────────── free slot ◄──────────────┘

What happens to a record here, and what is true if the process dies between two steps:

1. its position is covered by an acknowledged done-set (`reserve`)
      dies: the position counts as possibly running; it runs again
2. a slot of an endpoint is taken, the model is called
      dies: the call is lost and made again
3. the result is produced to `results`, in the batch's partition
      dies unacknowledged: as 2, and if it did arrive the arbiter drops the second result
4. the acknowledged position is set in the done-set, written at most a quarter of a second later
      dies in between: as 3
5. when a batch is cancelled or expired, and none of its records runs here any more, `closed` follows the
   last result of each of our partitions
      dies before: the partition's next owner says it; twice is harmless

jobs        one open batch: its state, its lanes (see `streams.core.lanes`), its tasks
backlog     records read ahead and waiting: bounded in records and bytes
calls       one record from its body to its result
lull        answers of a burst are all taken before the first is read
large       room for bodies and answers of more than 256 KiB
loops       records that are more than one call: tools between the model's turns, and workflows
starts      what goes into a free slot
done        the log of done-sets
careful     runs what may have killed us alone, one at a time, taking turns with everybody else
partitions  what is ours to run
dispatcher  joins them
"""
