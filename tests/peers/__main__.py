"""The process of a peer: it reads calls from the pipe that its argument names, and writes the answers to it."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from llm_datadist import LLMException

from .end import End

end = End()
with Connection(int(sys.argv[1])) as pipe, suppress(EOFError):
    while True:
        answer: tuple[Any, Any]
        try:
            call, args, kwargs = pipe.recv()
            answer = getattr(end, call)(*args, **kwargs), None
        except EOFError:
            raise
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
            code = error.status_code.name if isinstance(error, LLMException) else getattr(error, "code", "")
            answer = None, (type(error).__name__, code, str(error), traceback.format_exc())
        pipe.send(answer)
end.finalize()
