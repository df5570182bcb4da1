"""Replays a request trace through a prefill and a decode engine: ``llm-datadist replay``.

A prefill process writes blocks. A decode process pulls them, swaps blocks when its device pool is full, and verifies
every byte. Use it to choose the sizes of pools, or to check a workload. No module outside this folder imports it, and
no module outside this folder imports numpy when it is imported itself.

| module   | content                                                                           |
| -------- | --------------------------------------------------------------------------------- |
| trace    | requests: read from a file, or generated with the same shape                      |
| table    | the place of each block: plans hits, swaps and evictions; numbers only            |
| geometry | the shape of a block and the sizes of pools; numbers only                         |
| content  | the bytes of a block as a function of its id; exact comparison                    |
| engine   | the engine of one process: pools, caches, their bytes                             |
| node     | the decode node: every engine call, timed                                         |
| channel  | messages between the two processes, every wait bounded                            |
| worker   | the prefill process                                                               |
| prefill  | the prefill process as the decode process sees it; replaced when it dies          |
| serve    | the life of a request: admit, pull, verify, diverge, finish                       |
| report   | results: table, JSON, progress                                                    |
| cli      | options, exit status                                                              |
"""
