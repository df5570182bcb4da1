"""The engine of the module ``hixl``, which is a distribution of its own: ``llm-datadist-hixl``. Use that module."""

from __future__ import annotations

from llm_datadist import _core

__all__ = [
    "OPTIONS",
    "STATUS",
    "Engine",
    "GetTransferStatusArgs",
    "MemDesc",
    "NotifyDesc",
    "TransferArgs",
    "TransferOpDesc",
    "capability",
]

OPTIONS = _core.hixl.OPTIONS
STATUS = _core.hixl.STATUS
Engine = _core.hixl.Engine
GetTransferStatusArgs = _core.hixl.GetTransferStatusArgs
MemDesc = _core.hixl.MemDesc
NotifyDesc = _core.hixl.NotifyDesc
TransferArgs = _core.hixl.TransferArgs
TransferOpDesc = _core.hixl.TransferOpDesc
capability = _core.hixl.capability
