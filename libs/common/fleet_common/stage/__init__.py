"""The stage runner: everything a worker does around its engine. The only place that settles a delivery.

Read it in the order of a delivery's life:

    host       the process: opens bus, store, registry; SIGTERM drains
    runner     pulls by credits, keeps what it holds alive, starts batches, drains
    intake     decode, outrank, drop what nobody waits for, send suspects away to run alone
    batch      one engine call for several steps (preprocess, vision)
    stream     steps side by side, each writing tokens (decode)
    inputs     open what a step reads; publish its producer again when it is gone
    outputs    put what it made; publish what follows, through a join where branches meet
    events     what the ingress is told, numbered and kept until the end is confirmed
    settle     ack, nak, dead letter: every delivery ends in exactly one of them
    outage     waiting for bus and store, under heartbeat

Pure: plan (what follows a step, what repairs it), held.judge, stats, view.IngressWatch, and `scheduling`.
"""
