"""The process of a peer: one JSON line per call on the standard input, one per answer on the standard output."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from llm_datadist import LLMException

from .end import End
from .peer import plain


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    end = End()
    while True:
        try:
            line = sys.stdin.readline()
            if not line:
                break
            call, args, kwargs = json.loads(line)
            told: dict[str, Any] = {"value": plain(getattr(end, call)(*args, **kwargs))}
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
            told = {"error": type(error).__name__, "text": str(error), "where": traceback.format_exc()}
            if isinstance(error, LLMException):
                told["code"] = error.status_code.name
        answers.write(json.dumps(told) + "\n")
        answers.flush()
    end.finalize()


serve()
