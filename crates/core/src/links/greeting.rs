//! The greeting of every stream: who is there, whether both know the token, and what the stream is for.
//!
//! The side that dials proves first. Proofs are HMAC-SHA256 over everything said before, with a name for each side, so
//! none can be sent back or used again; the second is over the welcome it is part of as well
//! (`a_welcome_cannot_be_changed_on_the_way`); they are compared in constant time
//! (`verify_slice`). Without a token on either side the key is
//! empty, and the gate is the address the peer comes from. Not for: what happens after it (`mod`).

use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::talk;
use crate::config::{LinkConfig, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{ClusterId, Deadline};
use crate::transport::Stream;
use crate::wire::{self, Challenge, GREETING_LIMIT, HEADER, Hello, Party, Proof, Purpose, Welcome};

/// How long a peer may take to greet.
pub(super) const GREETING_TIME: Duration = Duration::from_secs(5);

/// Who this side is.
#[derive(Clone, Debug)]
pub(crate) struct Me {
    /// As peers see it.
    pub(crate) party: Party,
    /// Names the machine.
    pub(crate) host: String,
}

impl Me {
    /// This process as `cluster`, with a number that no other engine of this or any process has.
    pub(crate) fn new(cluster: ClusterId, remote_accessible: bool) -> Result<Me> {
        let instance = u64::from_le_bytes(random()?);
        // Without it two processes never take each other for neighbours, and talk through sockets.
        let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map_or_else(|_| format!("unknown {instance}"), |text| text.trim().to_owned());
        Ok(Me { party: Party { cluster: cluster.0, instance, remote_accessible }, host })
    }

    fn cluster(&self) -> ClusterId {
        ClusterId(self.party.cluster)
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
    token: Option<&Token>,
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
    let frame = wire::encode(&hello)?;
    stream.send(&frame, deadline)?;
    let hello = &frame[HEADER..];
    let challenge: Challenge = talk::hear(stream, GREETING_LIMIT, Duration::ZERO, deadline)?;
    let mac = keyed(token, b"dialer", hello, &challenge)?.finalize().into_bytes().into();
    talk::say(stream, &Proof { mac }, deadline)?;
    let welcome: Welcome = talk::hear(stream, GREETING_LIMIT, Duration::ZERO, deadline)?;
    let expected = acceptor(token, hello, &challenge, &welcome)?;
    if expected.verify_slice(&welcome.mac).is_err() {
        return Err(other_token("the peer at this address", stream.peer()));
    }
    if let Some(asked) = asked.filter(|asked| asked.0 != welcome.from.cluster) {
        return Err(wrong_cluster(asked, ClusterId(welcome.from.cluster)));
    }
    Ok(welcome)
}

/// Greets on a stream that this side accepted: the peer has proved who it is when this returns. The caller answers with
/// [`Greeted::welcome`] or a refusal.
pub(super) fn accept<'a>(
    stream: &'a Stream,
    me: &Me,
    config: &'a LinkConfig,
    deadline: Deadline,
) -> Result<Greeted<'a>> {
    let (kind, said) = stream
        .receive(GREETING_LIMIT, Duration::ZERO, deadline)?
        .ok_or_else(|| Error::new(ErrorKind::LinkFailed, "the peer closed the connection without a word"))?;
    let hello: Hello = wire::open(kind, &said)?;
    let token = config.token.as_ref();
    if token.is_none() && !config.accept_remote && !stream.same_host() {
        let text = "this listener has no token and answers only peers of its own host: give both sides the same \
                    llm.LinkToken (or LLM_DATADIST_TOKEN), or set llm.LinkAcceptRemote = 1";
        return Err(Error::new(ErrorKind::LinkFailed, text).with("peer", stream.peer()));
    }
    let challenge = Challenge { nonce: random()? };
    talk::say(stream, &challenge, deadline)?;
    let given: Proof = talk::hear(stream, GREETING_LIMIT, Duration::ZERO, deadline)?;
    if keyed(token, b"dialer", &said, &challenge)?.verify_slice(&given.mac).is_err() {
        return Err(other_token("the peer that dialled", stream.peer()));
    }
    if let Some(asked) = hello.asked.filter(|&asked| asked != me.party.cluster) {
        return Err(wrong_cluster(ClusterId(asked), me.cluster()));
    }
    if hello.from.remote_accessible != me.party.remote_accessible {
        let say = |on: bool| if on { "1" } else { "0" };
        let text = format!(
            "llm.EnableRemoteCacheAccessible is {} at cluster {} and {} at cluster {}; both sides need the same",
            say(hello.from.remote_accessible),
            hello.from.cluster,
            say(me.party.remote_accessible),
            me.party.cluster,
        );
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(Greeted { stream, token, said, challenge, hello })
}

/// A peer that has proved that it knows the token.
pub(super) struct Greeted<'a> {
    stream: &'a Stream,
    token: Option<&'a Token>,
    said: Vec<u8>,
    challenge: Challenge,
    /// What it said.
    pub(super) hello: Hello,
}

impl Greeted<'_> {
    /// Answers that it is welcome; `local` names the socket of this host that it may come to instead.
    pub(super) fn welcome(&self, me: &Me, local: Option<String>, deadline: Deadline) -> Result<()> {
        let mut welcome = Welcome { from: me.party, mac: [0; 32], local };
        welcome.mac =
            acceptor(self.token, &self.said, &self.challenge, &welcome)?.finalize().into_bytes().into();
        talk::say(self.stream, &welcome, deadline)
    }
}

fn keyed(token: Option<&Token>, side: &[u8], hello: &[u8], challenge: &Challenge) -> Result<Hmac<Sha256>> {
    let key = token.map_or(&[][..], Token::bytes);
    let mut mac = Hmac::<Sha256>::new_from_slice(key)
        .map_err(|_| Error::new(ErrorKind::System, "the token cannot be used as a key"))?;
    mac.update(side);
    mac.update(&[0]);
    mac.update(hello);
    mac.update(&challenge.nonce);
    Ok(mac)
}

/// The proof of the side that accepts: over its welcome too, whose own proof counts as zeros.
fn acceptor(
    token: Option<&Token>,
    hello: &[u8],
    challenge: &Challenge,
    welcome: &Welcome,
) -> Result<Hmac<Sha256>> {
    let mut mac = keyed(token, b"acceptor", hello, challenge)?;
    mac.update(&wire::encode(&Welcome { mac: [0; 32], ..welcome.clone() })?[HEADER..]);
    Ok(mac)
}

#[cold]
fn other_token(who: &str, address: &str) -> Error {
    let text = format!("{who} does not know this side's token (llm.LinkToken, LLM_DATADIST_TOKEN)");
    Error::new(ErrorKind::LinkFailed, text).with("peer", address)
}

#[cold]
fn wrong_cluster(asked: ClusterId, found: ClusterId) -> Error {
    let text = format!("cluster {asked} was asked for, and cluster {found} answered");
    Error::new(ErrorKind::LinkFailed, text)
}
