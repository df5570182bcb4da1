"""A class with the calls of Mooncake's transfer engine: it reads and writes memory of peers by addresses.

Programs that use ``mooncake.engine.TransferEngine`` by its Python interface, for example disaggregation back ends of
SGLang, can use this class instead. Calls return numbers, as there: 0 for success and -1 for a failure, whose reason is
in the log (logger ``llm_datadist.transfer_engine``). The how-to page "Transfer engine" lists what differs.
"""

from llm_datadist.integrations.transfer_engine.engine import TransferEngine, TransferNotify, TransferOpcode

__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]
