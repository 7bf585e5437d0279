"""The edge to the model servers: which of them takes the next call, and the call itself.

    pool        all servers of one model, and the right to one call at one of them
    endpoint    one server: how many calls it takes at once, and whether it is out
    openai      the call over HTTP, and the probes of health and load

A call never raises for what a server does: its outcome is a value, and `streams.core.judge` says what it
means for the record and for the server.
"""
