//! The handshake that opens every stream: it identifies and authenticates both sides and states the purpose
//! of the stream.
//!
//! The dialing side proves its identity first. Each proof is an HMAC-SHA256 over the preceding messages of
//! the handshake and a label for the side, so it can neither be reflected nor replayed. The proof of the
//! accepting side also covers the welcome message that contains it
//! (`a_welcome_cannot_be_changed_on_the_way`). Proofs are compared in constant time (`KeyProof::is`).
//!
//! The key is the token. Without a token, the key is empty over a local socket, where the kernel reports the
//! user of the peer; over TCP it is a secret that the accepting side hands out over its local socket.

use std::time::Duration;

use super::message_io;
use super::proof::KeyProof;
use super::refusals::{Reason, Refusal};
use crate::config::{Config, LinkConfig, Token};
use crate::error::{Error, ErrorKind, OptionName, Result};
use crate::memory::{random, same_user};
use crate::model::{ClusterId, Deadline};
use crate::net::Stream;
use crate::protocol::{self, Challenge, HANDSHAKE_LIMIT, HEADER, Hello, Party, Proof, Purpose, Welcome};

/// How long a peer may take for the handshake.
pub(super) const HANDSHAKE_TIME: Duration = Duration::from_secs(5);

/// The file that identifies the host.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Beginning of the host name of a process that cannot read [`BOOT_ID`].
const UNKNOWN: &str = "unknown ";

/// The identity of this engine.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// The identity that peers see.
    pub(crate) party: Party,
    /// Identifies the host (the kernel's boot id).
    pub(crate) host: String,
    /// The key of handshakes over TCP if no token is set.
    secret: Key,
}

impl Identity {
    /// Creates the identity of an engine with a random instance number that no other engine has; that of a native engine was
    /// drawn as its cluster id. Returns `Err` with `System` if the kernel provides no random bytes.
    pub(crate) fn new(config: &Config) -> Result<Identity> {
        let Config { cluster, remote_accessible, native, .. } = *config;
        let instance = if native { cluster.0 } else { draw_instance()? };
        // Without a boot id, two processes never recognize that they share a host, and use TCP.
        let host = std::fs::read_to_string(BOOT_ID)
            .map_or_else(|_| format!("{UNKNOWN}{instance}"), |text| text.trim().to_owned());
        let party = Party { cluster: cluster.0, instance, remote_accessible };
        Ok(Identity { party, host, secret: Key::Secret(random()?) })
    }

    fn cluster(&self) -> ClusterId {
        ClusterId(self.party.cluster)
    }
}

/// Draws an instance number that no other engine has, and that may be a cluster id: neither 0 nor the largest number, which
/// programs use for "none".
pub(crate) fn draw_instance() -> Result<u64> {
    loop {
        let drawn = u64::from_le_bytes(random()?);
        if ![0, u64::MAX].contains(&drawn) {
            return Ok(drawn);
        }
    }
}

/// The key of a proof. `Debug` never shows its bytes.
#[derive(Clone)]
pub(super) enum Key {
    /// The token that both sides were configured with.
    Token(Token),
    /// The secret of the accepting engine, which it gives to processes of its own user only.
    Secret([u8; 32]),
    /// Proves nothing by itself. The kernel reports the user of the peer, or every peer is admitted.
    Empty,
}

impl Key {
    /// Returns the token as a key, or the empty key without a token.
    pub(super) fn of(token: Option<&Token>) -> Key {
        token.map_or(Key::Empty, |token| Key::Token(token.clone()))
    }

    /// Whether knowledge of this key authenticates the peer.
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

/// Runs the dialing side of the handshake on `stream`, and returns the welcome of the peer. Returns `Err`
/// with `LinkFailed` if the peer does not prove that it knows `key`, or is not the cluster `asked`.
pub(super) fn dial(
    stream: &Stream,
    me: &Identity,
    key: &Key,
    asked: Option<ClusterId>,
    purpose: Purpose,
    deadline: Deadline,
) -> Result<Welcome> {
    let frame = hello(me, asked, purpose)?;
    stream.send(&frame, deadline)?;
    let hello = &frame[HEADER..];
    let challenge: Challenge = message_io::receive_message(stream, HANDSHAKE_LIMIT, deadline)?;
    let mac = keyed(key, b"dialer", hello, &challenge)?.bytes();
    message_io::send_message(stream, &Proof { mac }, deadline)?;
    let welcome: Welcome = message_io::receive_message(stream, HANDSHAKE_LIMIT, deadline)?;
    let expected = acceptor(key, hello, &challenge, &welcome)?;
    if !expected.is(&welcome.mac) {
        return Err(other_token("the peer at this address", &stream.about.peer));
    }
    if let Some(asked) = asked.filter(|asked| asked.0 != welcome.from.cluster) {
        return Err(wrong_cluster(asked, ClusterId(welcome.from.cluster)));
    }
    Ok(welcome)
}

/// Returns the frame with which the dialing side begins.
fn hello(me: &Identity, asked: Option<ClusterId>, purpose: Purpose) -> Result<Vec<u8>> {
    let (from, asked, host) = (me.party, asked.map(|id| id.0), me.host.clone());
    protocol::encode(&Hello { purpose, from, asked, host, nonce: random()? })
}

/// Tells the peer why this side, which dialed, does not link to it, so that the peer can log the reason. Does not wait. If the
/// peer does not know yet who dialed, `greeting` says it.
pub(super) fn decline(
    stream: &Stream,
    greeting: Option<(&Identity, Option<ClusterId>, Purpose)>,
    error: &Error,
) {
    let greeted = greeting.map_or(Ok(()), |(me, asked, purpose)| {
        hello(me, asked, purpose).and_then(|frame| stream.send_now(&frame, &[]))
    });
    // Fails if the peer has ended the connection.
    let _ = greeted.and_then(|()| stream.send_now(&protocol::refusal(error), &[]));
}

/// A peer whose hello was received and answered with a challenge.
#[derive(Debug)]
pub(super) struct ChallengedPeer {
    hello_body: Vec<u8>,
    challenge: Challenge,
    accepted_keys: Vec<AcceptedKey>,
    /// The key that the peer has proved to know.
    key: Key,
    /// The hello of the peer.
    pub(super) hello: Hello,
}

/// A key that admits the peer.
#[derive(Debug)]
pub(super) struct AcceptedKey {
    key: Key,
    /// Whether this key only entitles the peer to learn the name of the local socket.
    name_only: bool,
}

impl ChallengedPeer {
    /// Returns the peer that sent `hello`, whose encoded form is `hello_body`, and the challenge frame to send.
    pub(super) fn challenge(
        accepted_keys: Vec<AcceptedKey>,
        (hello, hello_body): (Hello, Vec<u8>),
    ) -> Result<(ChallengedPeer, Vec<u8>), Refusal> {
        let challenge = Challenge { nonce: random()? };
        let frame = protocol::encode(&challenge)?;
        Ok((ChallengedPeer { hello_body, challenge, accepted_keys, key: Key::Empty, hello }, frame))
    }

    /// Checks the proof in a frame. Returns `Ok(false)` if it only entitles the peer to learn the name of the
    /// local socket.
    pub(super) fn prove(
        &mut self,
        stream: &Stream,
        me: &Identity,
        (kind, body): (u8, &[u8]),
    ) -> Result<bool, Refusal> {
        let given: Proof = protocol::open(kind, body).map_err(Refusal::unreadable)?;
        let mut open = None;
        for accepted in &self.accepted_keys {
            let expected = keyed(&accepted.key, b"dialer", &self.hello_body, &self.challenge)?;
            if expected.is(&given.mac) && open.is_none() {
                open = Some((accepted.key.clone(), accepted.name_only));
            }
        }
        let Some((key, name_only)) = open else {
            return Err(self.unproved(stream, me));
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

    fn unproved(&self, stream: &Stream, me: &Identity) -> Refusal {
        if self.accepted_keys.iter().any(|accepted| matches!(accepted.key, Key::Token(_))) {
            return Refusal::new(Reason::Token, other_token("the peer that dialled", &stream.about.peer));
        }
        // A peer without a token would have proved the empty key, so this peer has a token.
        if self.accepted_keys.iter().any(|accepted| matches!(accepted.key, Key::Empty)) {
            return Refusal::new(Reason::Token, unexpected_token(&stream.about.peer));
        }
        self.unproven(stream, me)
    }

    /// Refuses the peer because it has not proved that it is on this host.
    pub(super) fn unproven(&self, stream: &Stream, me: &Identity) -> Refusal {
        Refusal::new(Reason::Unproven, unproven(stream, [&me.host, &self.hello.host]))
    }

    /// Returns the welcome frame. `local` is the name of the local socket that the peer should use instead;
    /// `secret` says whether the frame contains the key of TCP handshakes.
    pub(super) fn welcome(&self, me: &Identity, local: Option<String>, secret: bool) -> Result<Vec<u8>> {
        let secret = match me.secret {
            Key::Secret(bytes) if secret => Some(bytes),
            _ => None,
        };
        let mut welcome = Welcome { from: me.party, mac: [0; 32], local, secret };
        welcome.mac = acceptor(&self.key, &self.hello_body, &self.challenge, &welcome)?.bytes();
        protocol::encode(&welcome)
    }
}

/// Returns the keys that admit the peer that sent `hello` on `stream`, or a refusal if there are none
/// (docs/security.md).
pub(super) fn accepted_keys(
    stream: &Stream,
    me: &Identity,
    config: &LinkConfig,
    hello: &Hello,
) -> Result<Vec<AcceptedKey>, Refusal> {
    let accepted = |key| AcceptedKey { key, name_only: false };
    if let Some(token) = &config.token {
        return Ok(vec![accepted(Key::Token(token.clone()))]);
    }
    let local = stream.about.carries_descriptors;
    if config.accept_remote {
        return Ok(vec![accepted(me.secret.clone()), accepted(Key::Empty)]);
    }
    if local {
        return match stream.about.credentials {
            Some(peer) if same_user(peer) => Ok(vec![accepted(Key::Empty)]),
            _ => Err(Refusal::new(Reason::User, other_user("the peer that dialled", stream))),
        };
    }
    if !stream.about.same_host {
        return Err(Refusal::new(Reason::Unproven, unproven(stream, [&me.host, &hello.host])));
    }
    let mut accepted_keys = vec![accepted(me.secret.clone())];
    // Two processes of one host first connect at the local socket; its name is no secret.
    if matches!(hello.purpose, Purpose::Link { probe_local: true, .. }) && hello.host == me.host {
        accepted_keys.push(AcceptedKey { key: Key::Empty, name_only: true });
    }
    Ok(accepted_keys)
}

fn keyed(key: &Key, side: &[u8], hello: &[u8], challenge: &Challenge) -> Result<KeyProof> {
    KeyProof::over(key.bytes(), side, &[hello, &challenge.nonce])
}

/// Computes the proof of the accepting side. It also covers the welcome message, with the proof field set to
/// zeros.
fn acceptor(key: &Key, hello: &[u8], challenge: &Challenge, welcome: &Welcome) -> Result<KeyProof> {
    let welcome = protocol::encode(&Welcome { mac: [0; 32], ..welcome.clone() })?;
    KeyProof::over(key.bytes(), b"acceptor", &[hello, &challenge.nonce, &welcome[HEADER..]])
}

/// The remedy that error messages offer a peer that could not authenticate.
const REMEDY: &str = "set the same token on both sides, or let both accept every peer that can reach them";

fn other_token(who: &str, address: &str) -> Error {
    let text = format!("{who} does not know this side's token; set the same token on both sides");
    Error::new(ErrorKind::LinkFailed, text).with("peer", address).of_option(OptionName::TOKEN)
}

fn unexpected_token(address: &str) -> Error {
    let text = "the peer that dialled uses a token, and this side has none; set the same token on both sides";
    Error::new(ErrorKind::LinkFailed, text).with("peer", address).of_option(OptionName::TOKEN)
}

/// Refuses a peer on a local socket: no token is set, and the kernel does not report that the peer runs as
/// the same user.
pub(super) fn other_user(who: &str, stream: &Stream) -> Error {
    let own = rustix::process::geteuid().as_raw();
    // The numbers are equal, and still prove nothing (`same_user`).
    let same = stream.about.credentials.is_some_and(|peer| peer.uid == own);
    let cause = if same {
        ": both run under the overflow user id, which several users may share, and /proc/self/uid_map does not map every \
         user; use another user, or mount /proc if it is missing"
    } else {
        ""
    };
    let text =
        format!("{who} is not known to run as this process's user, and no token is set{cause}; {REMEDY}");
    let uid = stream.about.credentials.map_or_else(|| "unknown".into(), |peer| peer.uid.to_string());
    Error::new(ErrorKind::LinkFailed, text)
        .with("peer", &stream.about.peer)
        .with("peer_uid", uid)
        .with("own_uid", own)
        .of_option(OptionName::TOKEN)
        .of_option(OptionName::ACCEPT_REMOTE)
}

/// Refuses a peer outside the local socket: no token is set, and the peer has not proved that it is on this
/// host. `hosts` are the names of the hosts of both sides, as far as they are known.
pub(super) fn unproven(stream: &Stream, hosts: [&str; 2]) -> Error {
    let cause = if hosts.iter().any(|host| host.starts_with(UNKNOWN)) {
        format!(
            ": the processes cannot find out whether they run on one host, because one of them cannot read {BOOT_ID}; \
             mount /proc there,"
        )
    } else {
        ";".to_owned()
    };
    let or = if cause == ";" { "" } else { " or" };
    let text = format!(
        "no token is set, and the other side has not proved that it runs on this host as the same user{cause}{or} {REMEDY}"
    );
    Error::new(ErrorKind::LinkFailed, text)
        .with("peer", &stream.about.peer)
        .of_option(OptionName::TOKEN)
        .of_option(OptionName::ACCEPT_REMOTE)
}

fn wrong_cluster(asked: ClusterId, found: ClusterId) -> Error {
    let text = "another engine answered than the one that was expected";
    Error::new(ErrorKind::LinkFailed, text).with("cluster", asked).with("answered_cluster", found)
}

fn other_mode(peer: &Party, own: &Party) -> Error {
    let mode = |party: &Party| if party.remote_accessible { "on" } else { "off" };
    let text = format!(
        "one-sided transfers are {} at the side that dialled and {} at the other; both need the same",
        mode(peer),
        mode(own)
    );
    Error::new(ErrorKind::InvalidArgument, text).of_option(OptionName::ONE_SIDED)
}
