"""Examines a host and measures links: ``llm-datadist doctor``.

It uses the public calls of the package only, and the standard library. No module outside this folder imports this
package at its top level.

| module       | content                                                                        |
| ------------ | ------------------------------------------------------------------------------ |
| finding      | one fact about the host, its verdict, and what to do; reading small files      |
| cgroup       | limits of the control groups of this process                                   |
| host         | kernel, CPUs, memory, user                                                     |
| kernel_calls | tries the system calls that the engine needs                                   |
| limits       | open files, locked memory, reads of other processes, huge pages                |
| devices      | networks, RDMA devices, accelerators                                           |
| fabrics      | loads UCX: its version, or why it cannot be used                               |
| libraries    | versions of Python packages and of UCX; whether a token is set                 |
| paths        | which path each kind of peer would use, and why not a faster one               |
| probe        | what both ends of a measurement share: caches, options, metadata               |
| serve        | the end that waits for measurements: ``--serve``                               |
| measure      | the end that measures: ``--to``                                                |
| report       | tables                                                                         |
| cli          | options, exit status                                                           |
"""
