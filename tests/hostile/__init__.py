"""A client of the wire protocol that shares no code with the engine, and the protocol as it reads it.

The tests use this package to play peers that misbehave. It is also the description of the protocol, version 5.
`postcard` has the encoding, `messages` has every message, `client` has sockets, frames and greetings, `trial` has the
honest peers that must not notice an attack, and `budgets` has the numbers that bound what an attack may cost.

Frames
======

Two engines exchange frames over TCP, or over a Unix stream socket with an abstract name. A frame is a header of eight
bytes and a body::

    offset  bytes  meaning
    0       2      the magic number, b"LD"
    2       1      version of the protocol, 5
    3       1      kind: 1 is a message, 255 is a refusal
    4       4      length of the body in bytes, little endian

The body of a message is one value in the postcard format (see `postcard`), with nothing behind it. The receiver knows
from the state of the stream which message must come, so a frame does not name its message. A body has at most 4 KiB
during a greeting and on control streams, and at most 64 MiB on call streams. A frame that breaks one of these rules
ends the stream.

The body of a refusal has the same layout in every version: the number of an error kind as a little-endian `u32`, then
UTF-8 text. A refusal may arrive in place of any message, also with another version number in its header.

Descriptors travel as SCM_RIGHTS with the first byte of a frame, at most eight with one frame. Only `Attach` carries
any.

Streams
=======

A *link* joins two engines. It has one *control stream*, and any number of *call streams*, each with one call at a time.
Every stream starts with a greeting, in which the dialler names the purpose of the stream. The side that dialled the
control stream also dials the call streams. The other side sends `Control::Dial` when it wants one more.

The greeting (D is the side that dials, A is the side that accepts)::

    D -> A   Hello      purpose, party, expected cluster, boot id of the host, nonce
    A -> D   Challenge  nonce
    D -> A   Proof      HMAC-SHA256(key, "dialer" 00 hello-body challenge-nonce)
    A -> D   Welcome    party, HMAC-SHA256(key, "acceptor" 00 hello-body challenge-nonce welcome-body with a zero mac),
                        name of the local socket, secret

The key is the token if there is one. Without a token, the key is empty over the local socket, where the kernel names
the user of each side (SO_PEERCRED). Without a token the key over TCP is the *secret* of the engine that accepts. A
process of the same user obtains that secret with a `Meet` greeting over the local socket.

The purpose says what follows the greeting:

`Link`, with `probe_local`, over TCP
    If `host` equals the boot id of A, A answers with the abstract name of its local socket in `Welcome.local` and
    closes the stream. D dials that socket next. Otherwise the stream becomes a link over TCP.
`Link`, over TCP
    A sends `Control::Pong`. From then on the stream is the control stream of a link.
`Link`, over the local socket
    Both sides send `Attach` with descriptors of their memory. Then both sides send `Attached`. Then A sends
    `Control::Pong`, as over TCP.
`Call`
    The stream is a call stream of the link that it names. D calls on it, or A if `reverse` is set.
`Meet`
    `Welcome.secret` holds the key for TCP streams to A. Nothing follows.
`Knock`
    Names a communicator of a rank table. D tells A that it has entered this communicator. Nothing follows.

Control streams carry `Control` messages in both directions, in any order. `Ping` is answered with `Pong`. A side that
hears nothing for half a heartbeat sends `Ping`; a side that hears nothing for `link_silence` drops the link. `Bye` ends
the link.

Call streams alternate: the caller sends one `Request`, the owner answers with one `Reply`. Cache bytes follow some of
them, outside of any frame:

========================== ===================================================================================
request                    what follows
========================== ===================================================================================
`Describe`                 `Described`, or `Failed`
`Read`                     `Ready` and then the bytes, or `Stale`, or `Failed`
`Write`, `ahead` unset     `Ready`, then the caller sends the bytes, then `Done`; or `Stale`, or `Failed`
`Write`, `ahead` set       the caller sends the bytes (at most 48 KiB) at once, then `Done`, `Stale` or `Failed` comes
`Fetch`                    the owner reads the caller's memory; `Done`, `Stale`, `Unreachable` or `Failed`
`Consume`, `Ping`          `Done`, or `Failed`
`Locate`                   `Located`, or `Failed`
`Unlink`                   `Done`; the link has ended
========================== ===================================================================================

Cache bytes travel in the order of the plan: wave after wave, in each wave tensor after tensor, in each tensor span
after span. Where more than 48 KiB are still to come, 64 zero bytes stand before byte 0 and before every 4 MiB after it.
"""
