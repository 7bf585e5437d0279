"""The edge to Kafka: the only package that imports `confluent_kafka`.

producer   send and be told, per record, whether and where it landed
follow     read whole topics from the start and keep up (facts, compacted views)
group      read a share of a topic as a member of a consumer group, by position
reader     read a given range of one partition, with a few pooled consumers
membership hold a share of topics without reading them
admin      create topics from the catalogue, ask for offsets, measure lag

Library defaults that lose or double data (no idempotence, auto-commit, `auto.offset.reset=latest`,
unchecked deliveries) are overridden in `config`, in one place.
"""
