"""The ends of a link: one in this process, others in their own processes, all with the same methods.

`End` wraps one engine and its named caches; its methods take and return plain values. A test uses one `End` directly,
and others through `Peer`, which starts another interpreter (without fork), sends it every call and waits for the answer
with a time limit. Expected bytes never come from an engine: `pattern` and numpy compute them.
Not for: checking results (the tests do that).
"""

from .end import End, Held
from .peer import Ends, Peer, check_pull, linked, no_link
from .process import _over
from .sockets import Proxy, Stranger, free_ports, lingering_socket, refusing_port, split
from .values import (
    GONE,
    GRACE,
    INVALID,
    LIMIT,
    LINK_FAILED,
    OK,
    POOL,
    SOAK,
    THOROUGH,
    TIMEOUT,
    UINT64_MAX,
    UNLINKED,
    Key,
    Refused,
    another_thread_runs,
    by_blocks,
    by_request,
    by_slot,
    code,
    equal,
    eventually,
    kv_options,
    meanwhile,
    one_server,
    options,
    outcome,
    pattern,
    stop_process,
    together,
)
