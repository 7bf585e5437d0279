"""The control host: what operators, finance and Prometheus read. It writes but two tables of its own.

serve         starting and stopping; it follows keys and batches
application   the routes, described by `openapi`; `callers` says who may see what
usage, prices, lag   what the routes answer
shown         the metrics of all roles at once
sampling      lag written down once a minute, and the alarm before the log forgets
board, overview, page   the dashboard: batches, everything it says, and its HTML
"""
