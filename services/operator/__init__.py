"""What operators do by hand: keys, audits, lag. Every command talks to Kafka, storage and ClickHouse itself.

place         which stack a command is about
commands      the commands as `openrelay` shows them
log           reading whole topics, once
keys          issuing, listing and revoking API keys
waiting       lag by partition, with the age of what waits longest

audit         a finished batch is proven, of a running one it is told where it stands
  expected      what the result files must hold, from the batch's own input
  result_files  reading them line by line: place, order, custom_id, what each line bills
  bill          that bill against the batch object and against ClickHouse
  traces        what a running batch has left in topics and storage
  whereabouts   its records, stage by stage, and which of them are stuck
  faults, telling   what was found, in data and in words
"""
