"""Replays a request trace through a prefill and a decode engine: ``llm-datadist replay``.

A prefill process writes blocks. A decode process pulls them, swaps blocks when its device pool is full, and verifies
every byte. Use it to choose the sizes of pools, or to check a workload. No module outside this folder imports this
package at its top level, so that only the command needs numpy at import.

| module     | content                                                                           |
| ---------- | --------------------------------------------------------------------------------- |
| trace      | requests: read from a file, or generated with the same distribution               |
| table      | the slot of each block: plans hits, swaps and evictions; makes no engine calls    |
| geometry   | the shape of a block and the sizes of pools; makes no engine calls                |
| content    | the bytes of a block as a function of its id; exact comparison                    |
| engine     | the engine of one process: pools, caches, their bytes                             |
| node       | the decode node: makes and times every engine call                                |
| channel    | messages between the two processes; every wait has a time limit                   |
| worker     | the prefill process                                                               |
| prefill    | starts the prefill process from decode, and replaces it when it dies              |
| serve      | the life of a request: admit, pull, verify, diverge, finish                       |
| plain_copy | the rate of a plain copy between the pools, for comparison with pulls             |
| late_pull  | a pull under an expired grant, which the engine must refuse                       |
| progress   | what a running replay shows                                                       |
| report     | results: table, JSON, verdict                                                     |
| run        | one replay from start to end                                                      |
| cli        | options, exit status                                                              |
"""
