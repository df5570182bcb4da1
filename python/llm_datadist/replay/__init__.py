"""Replay of a request trace through the engine, as a serving node would: ``python -m llm_datadist replay``.

For sizing pools and for checking every byte of a real workload. Not part of the library's interface: nothing
outside this folder imports it, and it alone imports numpy.

| module   | what                                                                              |
| -------- | --------------------------------------------------------------------------------- |
| trace    | requests: read from a file, or made with the same shape                           |
| table    | which block lies where: plans hits, swaps and evictions; numbers only             |
| content  | the bytes of a block as a function of its id; exact comparison                    |
| node     | the engine with its two pools; every engine call, timed                           |
| serve    | the life of a request: admit, verify, diverge, finish                             |
| report   | results: table, JSON, progress                                                    |
| cli      | options, exit status                                                              |
"""
