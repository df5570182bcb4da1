//! The greeting of every stream: who is there, whether both have the right to talk, and what the stream is for.
//!
//! The side that dials proves first. Proofs are HMAC-SHA256 over everything said before, with a name for each side, so
//! none can be sent back or used again; the second is over the welcome it is part of as well
//! (`a_welcome_cannot_be_changed_on_the_way`). They are compared in constant time (`verify_slice`). The key is the token.
//! Without one it is empty over a local socket, where the kernel says which user is at the other end, and over TCP a
//! secret that was handed out over that socket. Not for: what happens after the greeting (`accept`, `connect`).

use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::message_io;
use super::refusals::{Reason, Refusal};
use crate::config::{LinkConfig, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::same_user;
use crate::model::{ClusterId, Deadline};
use crate::net::Stream;
use crate::protocol::{self, Challenge, GREETING_LIMIT, HEADER, Hello, Party, Proof, Purpose, Welcome};

/// How long a peer may take to greet.
pub(super) const GREETING_TIME: Duration = Duration::from_secs(5);

/// Who this side is.
#[derive(Clone, Debug)]
pub(crate) struct Me {
    /// As peers see it.
    pub(crate) party: Party,
    /// Names the machine.
    pub(crate) host: String,
    /// The key of greetings over TCP where no token is set.
    secret: Key,
}

impl Me {
    /// This process as `cluster`, with a number that no other engine of this or any process has.
    pub(crate) fn new(cluster: ClusterId, remote_accessible: bool) -> Result<Me> {
        let instance = u64::from_le_bytes(random()?);
        // Without it two processes never take each other for neighbours, and talk through sockets.
        let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map_or_else(|_| format!("unknown {instance}"), |text| text.trim().to_owned());
        let party = Party { cluster: cluster.0, instance, remote_accessible };
        Ok(Me { party, host, secret: Key::Secret(random()?) })
    }

    fn cluster(&self) -> ClusterId {
        ClusterId(self.party.cluster)
    }
}

/// What a greeting is proved with. Never shown.
#[derive(Clone)]
pub(super) enum Key {
    /// The token that both sides were given.
    Token(Token),
    /// The secret of the engine that accepts, which it hands to processes of its own user.
    Secret([u8; 32]),
    /// Proves nothing by itself: the kernel says who is at the other end, or anybody may come.
    Empty,
}

impl Key {
    /// The token, if there is one.
    pub(super) fn of(token: Option<&Token>) -> Key {
        token.map_or(Key::Empty, |token| Key::Token(token.clone()))
    }

    /// Whether it proves the other side.
    pub(super) fn proves(&self) -> bool {
        !matches!(self, Key::Empty)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Key::Token(token) => token.bytes(),
            Key::Secret(secret) => secret,
            Key::Empty => &[],
        }
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Key::Token(_) => "Token(…)",
            Key::Secret(_) => "Secret(…)",
            Key::Empty => "Empty",
        })
    }
}

/// Bytes that nobody can guess.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let got = rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty());
        filled += got.map_err(|error| {
            let text = "the system gave no random bytes";
            Error::new(ErrorKind::System, text).because(std::io::Error::from(error))
        })?;
    }
    Ok(bytes)
}

/// Greets on a stream that this side dialled; returns who answered.
pub(super) fn dial(
    stream: &Stream,
    me: &Me,
    key: &Key,
    asked: Option<ClusterId>,
    purpose: Purpose,
    deadline: Deadline,
) -> Result<Welcome> {
    let hello = Hello {
        purpose,
        from: me.party,
        asked: asked.map(|id| id.0),
        host: me.host.clone(),
        nonce: random()?,
    };
    let frame = protocol::encode(&hello)?;
    stream.send(&frame, deadline)?;
    let hello = &frame[HEADER..];
    let challenge: Challenge = message_io::hear(stream, GREETING_LIMIT, Duration::ZERO, deadline)?;
    let mac = keyed(key, b"dialer", hello, &challenge)?.finalize().into_bytes().into();
    message_io::say(stream, &Proof { mac }, deadline)?;
    let welcome: Welcome = message_io::hear(stream, GREETING_LIMIT, Duration::ZERO, deadline)?;
    let expected = acceptor(key, hello, &challenge, &welcome)?;
    if expected.verify_slice(&welcome.mac).is_err() {
        return Err(other_token("the peer at this address", stream.peer()));
    }
    if let Some(asked) = asked.filter(|asked| asked.0 != welcome.from.cluster) {
        return Err(wrong_cluster(asked, ClusterId(welcome.from.cluster)));
    }
    Ok(welcome)
}

/// A peer that has said hello and was challenged.
#[derive(Debug)]
pub(super) struct Guest {
    said: Vec<u8>,
    challenge: Challenge,
    gates: Vec<Gate>,
    /// The key that it proved to know.
    key: Key,
    /// What it said.
    pub(super) hello: Hello,
}

/// One way in.
#[derive(Debug)]
struct Gate {
    key: Key,
    /// Leads to the name of the local socket and no further.
    name_only: bool,
}

impl Guest {
    /// Takes the hello in a frame of `kind` and `said`, and gives the frame that answers it.
    pub(super) fn challenge(
        stream: &Stream,
        me: &Me,
        config: &LinkConfig,
        (kind, said): (u8, Vec<u8>),
    ) -> Result<(Guest, Vec<u8>), Refusal> {
        let hello: Hello = protocol::open(kind, &said).map_err(Refusal::unreadable)?;
        let gates = gates(stream, me, config, &hello)?;
        let challenge = Challenge { nonce: random()? };
        let frame = protocol::encode(&challenge)?;
        Ok((Guest { said, challenge, gates, key: Key::Empty, hello }, frame))
    }

    /// Takes the proof in a frame. `Ok(false)` if it opens only the way to the name of the local socket.
    pub(super) fn prove(
        &mut self,
        stream: &Stream,
        me: &Me,
        (kind, body): (u8, &[u8]),
    ) -> Result<bool, Refusal> {
        let given: Proof = protocol::open(kind, body).map_err(Refusal::unreadable)?;
        let mut open = None;
        for gate in &self.gates {
            let expected = keyed(&gate.key, b"dialer", &self.said, &self.challenge)?;
            if open.is_none() && expected.verify_slice(&given.mac).is_ok() {
                open = Some((gate.key.clone(), gate.name_only));
            }
        }
        let Some((key, name_only)) = open else {
            return Err(self.unproved(stream));
        };
        self.key = key;
        if let Some(asked) = self.hello.asked.filter(|&asked| asked != me.party.cluster) {
            return Err(Refusal::new(Reason::Cluster, wrong_cluster(ClusterId(asked), me.cluster())));
        }
        if !name_only && self.hello.from.remote_accessible != me.party.remote_accessible {
            return Err(Refusal::new(Reason::Mode, other_mode(&self.hello.from, &me.party)));
        }
        Ok(!name_only)
    }

    fn unproved(&self, stream: &Stream) -> Refusal {
        if self.gates.iter().any(|gate| matches!(gate.key, Key::Token(_))) {
            return Refusal::new(Reason::Token, other_token("the peer that dialled", stream.peer()));
        }
        // A peer without a token passes a gate with the empty key, so this one has a token.
        if self.gates.iter().any(|gate| matches!(gate.key, Key::Empty)) {
            return Refusal::new(Reason::Token, unexpected_token(stream.peer()));
        }
        Refusal::new(Reason::Stranger, stranger(stream))
    }

    /// The frame that says that it is welcome. `local` names the socket of this host that it may come to instead;
    /// `secret` whether it gets to know the key of TCP streams.
    pub(super) fn welcome(&self, me: &Me, local: Option<String>, secret: bool) -> Result<Vec<u8>> {
        let secret = match me.secret {
            Key::Secret(bytes) if secret => Some(bytes),
            _ => None,
        };
        let mut welcome = Welcome { from: me.party, mac: [0; 32], local, secret };
        welcome.mac =
            acceptor(&self.key, &self.said, &self.challenge, &welcome)?.finalize().into_bytes().into();
        protocol::encode(&welcome)
    }
}

/// The ways in for whoever said `hello` on `stream`; a refusal if there is none (docs/security.md).
fn gates(stream: &Stream, me: &Me, config: &LinkConfig, hello: &Hello) -> Result<Vec<Gate>, Refusal> {
    let gate = |key| Gate { key, name_only: false };
    if let Some(token) = &config.token {
        return Ok(vec![gate(Key::Token(token.clone()))]);
    }
    let local = stream.carries_descriptors();
    if config.accept_remote {
        return Ok(vec![gate(me.secret.clone()), gate(Key::Empty)]);
    }
    if local {
        return match stream.credentials() {
            Some(peer) if same_user(peer) => Ok(vec![gate(Key::Empty)]),
            _ => Err(Refusal::new(Reason::User, other_user("the peer that dialled", stream))),
        };
    }
    if !stream.same_host() {
        return Err(Refusal::new(Reason::Stranger, stranger(stream)));
    }
    let mut gates = vec![gate(me.secret.clone())];
    // Two processes of one host first meet at the local socket; its name is no secret.
    if matches!(hello.purpose, Purpose::Link { probe_local: true, .. }) && hello.host == me.host {
        gates.push(Gate { key: Key::Empty, name_only: true });
    }
    Ok(gates)
}

fn keyed(key: &Key, side: &[u8], hello: &[u8], challenge: &Challenge) -> Result<Hmac<Sha256>> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key.bytes())
        .map_err(|_| Error::new(ErrorKind::System, "the token cannot be used as a key"))?;
    mac.update(side);
    mac.update(&[0]);
    mac.update(hello);
    mac.update(&challenge.nonce);
    Ok(mac)
}

/// The proof of the side that accepts: over its welcome too, whose own proof counts as zeros.
fn acceptor(key: &Key, hello: &[u8], challenge: &Challenge, welcome: &Welcome) -> Result<Hmac<Sha256>> {
    let mut mac = keyed(key, b"acceptor", hello, challenge)?;
    mac.update(&protocol::encode(&Welcome { mac: [0; 32], ..welcome.clone() })?[HEADER..]);
    Ok(mac)
}

/// What lets a peer in that was refused for want of proof.
const REMEDY: &str = "set the same token on both sides (llm.LinkToken or llm.LinkTokenFile; in Python also \
                      LLM_DATADIST_TOKEN_FILE or LLM_DATADIST_TOKEN), or llm.LinkAcceptRemote = 1 (in Python \
                      link_accept_remote = True) on both to admit everybody who can reach them";

#[cold]
fn other_token(who: &str, address: &str) -> Error {
    let text = format!(
        "{who} does not know this side's token; set the same token on both sides (llm.LinkToken or llm.LinkTokenFile; in \
         Python also LLM_DATADIST_TOKEN_FILE or LLM_DATADIST_TOKEN)"
    );
    Error::new(ErrorKind::LinkFailed, text).with("peer", address)
}

#[cold]
fn unexpected_token(address: &str) -> Error {
    let text = "the peer that dialled uses a token, and this side has none; set the same token on both sides \
                (llm.LinkToken or llm.LinkTokenFile; in Python also LLM_DATADIST_TOKEN_FILE or LLM_DATADIST_TOKEN)";
    Error::new(ErrorKind::LinkFailed, text).with("peer", address)
}

/// Neither side has a token, and the kernel does not say that the other belongs to the same user.
#[cold]
pub(super) fn other_user(who: &str, stream: &Stream) -> Error {
    let text = format!("{who} is not known to run as this process's user, and no token is set; {REMEDY}");
    let own = rustix::process::geteuid().as_raw();
    let uid = stream.credentials().map_or_else(|| "unknown".into(), |peer| peer.uid.to_string());
    Error::new(ErrorKind::LinkFailed, text)
        .with("peer", stream.peer())
        .with("peer_uid", uid)
        .with("own_uid", own)
}

/// Neither side has a token, and the two did not meet at a local socket.
#[cold]
pub(super) fn stranger(stream: &Stream) -> Error {
    let text = format!(
        "no token is set, and the other side has not proved that it runs on this host as the same user; {REMEDY}"
    );
    Error::new(ErrorKind::LinkFailed, text).with("peer", stream.peer())
}

#[cold]
fn wrong_cluster(asked: ClusterId, found: ClusterId) -> Error {
    let text = format!("cluster {asked} was asked for, and cluster {found} answered");
    Error::new(ErrorKind::LinkFailed, text)
}

#[cold]
fn other_mode(peer: &Party, own: &Party) -> Error {
    let say = |on: bool| if on { "1" } else { "0" };
    let text = format!(
        "llm.EnableRemoteCacheAccessible is {} at cluster {} and {} at cluster {}; both sides need the same",
        say(peer.remote_accessible),
        peer.cluster,
        say(own.remote_accessible),
        own.cluster,
    );
    Error::new(ErrorKind::InvalidArgument, text)
}
