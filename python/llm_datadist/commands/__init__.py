"""The commands ``llm-datadist`` and ``python -m llm_datadist``. They use the native API only.

| module  | content                                                                                 |
| ------- | --------------------------------------------------------------------------------------- |
| main    | the command line                                                                        |
| output  | writes results and errors, and numbers as text                                          |
| options | every option as plain text                                                              |
| doctor  | examines a host, and measures the link to another one                                   |
| replay  | replays a request trace through a prefill and a decode process. Only it imports numpy   |
"""
