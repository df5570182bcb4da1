"""A client of the wire protocol that shares no code with the engine, and a description of the protocol.

The tests use this package to play peers that misbehave. `postcard` has the encoding, `messages` has every message,
`client` has sockets, frames and greetings, `trial` has the honest peers that must not notice an attack, and `budgets`
has the limits of what an attack may cost. The client implements version 18 of the protocol, as follows.

Two engines exchange frames over TCP, or over a Unix stream socket with an abstract name. A frame is a header of eight
bytes (`b"LD"`, version, kind, length of the body as a little-endian `u32`) and a body. Kind 1 is a message: one value
in the postcard format, which the state of the stream names, and the XXH64 of its bytes as a little-endian `u64`. A side
that receives a message with another checksum ends the stream. A body has at most 4 KiB during a greeting and on control
streams (`Confirm` and its answer: 29,704 bytes), and at most 64 MiB on call streams. Kind 255 is a refusal,
which may come in place of any message, from any version: the number of an error kind as a `u32`, then UTF-8 text.
Descriptors travel as SCM_RIGHTS with the first byte of a frame, at most eight. Only `Attach`, `RingOffer` and
`RingAnswer` carry any.

A *link* joins two engines. It has one *control stream*, and any number of *call streams*, each with one call at a time.
Every stream starts with a greeting. The side that dialled the control stream also dials the call streams; the other
side sends `ControlMessage::Dial` when it wants one more. (D is the side that dials, A is the side that accepts.)::

    D -> A   Hello      purpose, party, expected cluster, boot id of the host, nonce
    A -> D   Challenge  nonce
    D -> A   Proof      HMAC-SHA256(key, "dialer" 00 hello-body challenge-nonce)
    A -> D   Welcome    party, HMAC-SHA256(key, "acceptor" 00 hello-body challenge-nonce welcome-body with a zero mac),
                        name of the local socket, secret

The bodies in the HMAC include their checksums. The key is the token if there is one. Without a token, the key is empty
over the local socket, where the kernel names the user of each side, and over TCP it is the *secret* of A, which a
process of the same user obtains with a `Meet` greeting over the local socket. The purpose says what follows:

- `Link` with `probe_local`, over TCP: if `host` equals the boot id of A, A answers with the abstract name of its local
  socket in `Welcome.local` and closes the stream. D dials that socket next.
- `Link`: over the local socket, both sides send `Attach` with descriptors of their memory, then `Attached`. Then D
  sends `Confirm` with its name and the metadata of its program, and A answers with `LinkAnswer::Entered` and its own,
  and with the addresses at which it listens for call streams. Both may offer pools to be read by UCX in these messages.
  From then on the stream is the control stream of a link. If `ensure` is set, A may answer `LinkAnswer::Later`
  instead, because another link between the two exists or is being made; then it closes the stream.
- `Call`: a call stream of the link that it names. D calls on it, or A if `reverse` is set. With `rings`, over the
  local socket, D sends `RingOffer` with the descriptor of its rings, and A answers with `RingAnswer::Used` and that of
  its own. From then on, frames go through the rings for messages, and cache bytes through those for payload. The socket
  carries only zeros, each of which wakes the other side. If A answers `RingAnswer::Refused` instead, the socket carries
  everything.
- `Meet`: `Welcome.secret` holds the key for TCP streams to A. Nothing follows.
- `Announce`: D tells A that it has entered a communicator of a rank table. Nothing follows.

Control streams carry `Ping` (answered with `Pong`), `Pong`, `Dial`, `Polled`, by which the receiver of notifications
reports how many have arrived and were polled, and `Bye`, which ends the link. On call streams the
caller sends one `Request` behind the milliseconds that it waits, the owner answers with one `Reply`. Cache bytes follow
some of them, outside of any frame:
after the `Ready` that answers a `Read`; from the caller after the `Ready` that answers a `Write`, and then `Done`
comes; with `ahead` set, at most 48 KiB right behind the `Write`. With `shared` set, further bytes of the plan follow in
`WritePart`s on other streams, which are answered as a `Write` is. Cache bytes travel in the order of the plan:
tensor after tensor, in each tensor span after span. Where more than 48 KiB are still to come,
zero bytes stand before byte 0 and before every 4 MiB after it: 64 on a socket, and in a ring as many
as bring the number of bytes that were ever written to it to a multiple of 4,096.

The rings of a side are a sealed memfd that only this side writes: 4,096 bytes with words, then a ring buffer of 65,536
bytes for messages, then one of 1,048,576 bytes for payload. The words are `u64`, for messages from byte 0 on and for
payload from byte 2,048 on: at 0 how many bytes the side has written to its ring, at 64 how many it has read from that
of the other side, at 128 whether it sleeps until there are bytes to read, at 192 whether it sleeps until there is room
to write, and at 256, for messages only, whether it has closed the stream.
"""
