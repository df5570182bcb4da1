"""``llm-datadist doctor``: examines a host, and measures links.

| module       | content                                                                          |
| ------------ | -------------------------------------------------------------------------------- |
| finding      | one fact about the host, its verdict, and what to do; reading small files        |
| host         | kernel, CPUs, memory, limits of control groups, user                             |
| kernel_calls | tries the system calls that the engine needs, and opens an engine                |
| limits       | open files, locked memory, reads of other processes, huge pages                  |
| devices      | networks, RDMA devices, accelerators                                             |
| libraries    | versions of Python packages and of UCX; whether a token is set                   |
| paths        | which path each kind of peer would use, and why not a faster one                 |
| link         | measures a link (``--to``), and is the other end of a measurement (``--serve``)  |
| report       | tables                                                                           |
| cli          | options, exit status                                                             |
"""
