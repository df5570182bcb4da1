"""Two ends of a link: one in this process, others in real processes of their own, all spoken to in the same words.

`End` wraps one engine and a handful of named caches; its methods take and return plain values. A test holds one `End`
itself and drives others through `Peer`, which starts a second interpreter (no fork), sends it every call
and waits a bounded time for the answer. What bytes must be is never asked of an engine: `pattern` and numpy say it.
Not for: judging results (that is the tests').
"""

from .end import End, Held
from .peer import Ends, Peer, check_pull, linked, no_link
from .process import _over
from .sockets import Proxy, Stranger, free_port, free_ports, split
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
    together,
)
