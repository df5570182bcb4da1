"""``llm-datadist replay``: a request trace through a prefill and a decode process.

| module   | content                                                                    |
| -------- | -------------------------------------------------------------------------- |
| trace    | requests: read from a file, or generated with the same distribution        |
| geometry | the shape of a block, and the sizes of pools                               |
| table    | the slot of each block: plans hits, swaps and evictions                    |
| content  | the bytes of a block as a function of its id; exact comparison             |
| node     | the caches of a process; decode's calls of the engine, timed               |
| worker   | the prefill process                                                        |
| prefill  | the prefill process as decode sees it: starts it, asks it, and replaces it |
| serve    | the life of a request on decode: admit, pull, verify, diverge, finish      |
| report   | progress, results, verdict                                                 |
| cli      | options, one replay from start to end, exit status                         |
"""
