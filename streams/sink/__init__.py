"""Sink: turns accepted lines into result files.

Reads `outputs` and `errors` as a member of group `sink`; partition p of both comes to the same member. What
happens, and what is true if the process dies between two steps:

1. lines are buffered per batch and written as immutable segments, sorted by index
      dies: the offset below the lines is not committed, they are read again; segments may overlap, and
      their common lines are identical
2. the offset below every line not yet in a segment is committed
3. a batch is settled, and everything its partitions held by then is read: its last segments are written and
   merged with the rejected lines and the remainder, by index, dropping repeats
      dies: merged again, byte for byte the same
4. the files appear whole, durable, under their final names
      dies: they are replaced by equal ones
5. `ended` is acknowledged: from here on the customer sees the files and the terminal status
      dies before: as 4; two sinks at once: the first `ended` holds
6. segments are deleted
      dies: a sink that starts looks after the batches that ended lately

segments    writing and reading one segment
files       merging a batch's segments into its two files
sink        the loop
"""

from streams.sink.sink import Sink

__all__ = ["Sink"]
