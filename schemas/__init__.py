"""Everything on the wire: HTTP objects, Kafka messages, JSONL lines, settings.

Only msgspec structs and the standard library; nothing here opens, reads or decides anything.
Messages between our own processes ignore fields they do not know, so that versions can mix;
what people send us is strict about unknown fields, so that a typo is an error.
"""
