"""Examines a host, and measures a link: ``llm-datadist doctor``.

| module   | content                                                                     |
| -------- | --------------------------------------------------------------------------- |
| findings | what was found, with a verdict                                              |
| host     | kernel, memory, limits, devices and networks, read from ``/proc`` and ``/sys`` |
| software | versions of the packages and of UCX                                         |
| paths    | the path that each kind of peer would use, and why it is not a faster one   |
| probe    | the engine with a small cache at either end of a measured link              |
| measure  | latency and throughput of a link                                            |
| report   | the tables                                                                  |
| cli      | options, exit status                                                        |
"""
