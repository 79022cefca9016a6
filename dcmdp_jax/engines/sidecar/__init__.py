"""An inference engine in a process of its own, whichever engine it is.

The trainer starts the process, hands it weights through shared memory and restarts it when it
breaks. The program that the process runs answers these requests; `wire.PROTOCOL` counts every
change of them:

    start     engine arguments, manifest, segments      -> ready
    sync      segment, policy version, adapters         -> synced, checksums, cache's reset
    generate  prompts, seeds, sampling, level of sleep  -> progress ..., generated, what ended since
    score     rows, level of sleep                      -> progress ..., scored
    observe   rows, names of modules, level of sleep    -> progress ..., observed: inputs, outputs
    cancel                                              -> cancelled, in place of an answer
    health                                              -> healthy
    close                                               -> closed, and the process ends

With a level of sleep above 0 the engine gives up its devices' memory before it answers, until the
next request; at level 2 its weights too, which are then synced again.

`refused` answers a request that was not started and leaves everything as it was; `failed` says why
the process ends.
"""
