"""What follows from what happened, as pure functions and small machines: no I/O, no clock, no chance.

A stage hands in what it read and, where it matters, the time; it gets back a new state and what to do next.
So each decision is a test of microseconds, a log replayed gives the state it gave, and a stage that dies
between asking and acting asks again and hears the same.

    before a batch   validate, strictjson, toolconfig, addresses
    its life         lifecycle (its facts folded), deletion, pricing
    a dispatcher     extents, schedule, lanes, stuck, judge, limits, load
    a record         toolloop, workflow, answers, bodies, sse, sealing
    its one line     verdicts (the arbiter), merge
"""
