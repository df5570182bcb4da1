"""Replay of a request trace through two engines, as serving nodes would: ``python -m llm_datadist replay``.

A prefill process writes blocks; a decode process, the one that is started, pulls them, swaps under pressure and checks
every byte. For sizing pools and for checking a real workload. Not part of the library's interface: nothing outside this
folder imports it, and it alone imports numpy.

| module   | what                                                                              |
| -------- | --------------------------------------------------------------------------------- |
| trace    | requests: read from a file, or made with the same shape                           |
| table    | which block lies where: plans hits, swaps and evictions; numbers only             |
| geometry | the shape of a block and the sizes of pools; numbers only                         |
| content  | the bytes of a block as a function of its id; exact comparison                    |
| engine   | one process' engine: pools, caches, their bytes                                   |
| node     | the decode node: every engine call, timed                                         |
| channel  | messages between the two processes, every wait bounded                            |
| worker   | the prefill process                                                               |
| prefill  | the prefill process as decode sees it: started, asked, replaced when it dies      |
| serve    | the life of a request: admit, pull, verify, diverge, finish                       |
| report   | results: table, JSON, progress                                                    |
| cli      | options, exit status                                                              |
"""
