"""What operators do by hand: keys, audits, lag. Every command talks to Kafka, storage and ClickHouse itself.

place      which stack a command is about
log        reading whole topics, once
keys       issuing, listing and revoking API keys
commands   the commands as `openrelay` shows them
"""
