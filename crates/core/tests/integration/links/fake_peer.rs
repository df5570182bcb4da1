//! A simulated peer that follows the protocol only as far as a test needs.
//!
//! Expectations are in the tests.

use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use llm_datadist_core::bindings::{CacheLayout, DataDist, Geometry, PeerAddress};
use llm_datadist_core::testing::net::{Accepted, Address, Listener, Stream, Tcp, Transport, Unix};
use llm_datadist_core::testing::plan::{Span, Template, TensorSteps};
use llm_datadist_core::testing::protocol::{
    self, Attach, Attached, BoundedBytes, Challenge, Confirm, EnteredLink, EntryVersion, HANDSHAKE_LIMIT,
    HEADER, Hello, LinkAnswer, MESSAGE_LIMIT, Party, Proof, Purpose, Reply, Request, RingAnswer, RingOffer,
    Timed, Welcome, WireCache, WirePlan, WireTemplates,
};
use llm_datadist_core::{CacheDesc, CacheId, CacheKind, ClusterId, Placement, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use crate::fixtures::soon;
use crate::fixtures::{LONG, accepted, listed};

pub fn say<T: Serialize>(stream: &Stream, message: &T) {
    // The other side may be gone; some tests rely on that.
    let _ = stream.send(&protocol::encode(message).unwrap(), soon());
}

/// Sends a request whose caller waits 20 seconds.
pub fn ask(stream: &Stream, request: &Request) {
    say(stream, &Timed { limit_ms: 20_000, request });
}

/// Receives a request.
pub fn hear_request(stream: &Stream) -> Result<Request> {
    hear(stream).map(|Timed { request, .. }: Timed<Request>| request)
}

/// Answers a `Describe` request.
pub fn describe(call: &Stream, cache: WireCache) {
    assert!(matches!(hear_request(call).unwrap(), Request::Describe { .. }), "not asked what it is");
    say(call, &Reply::Described(cache));
}

pub fn hear<T: DeserializeOwned>(stream: &Stream) -> Result<T> {
    let (kind, body) = stream.receive(MESSAGE_LIMIT, Duration::ZERO, soon())?.ok_or_else(|| {
        llm_datadist_core::Error::new(llm_datadist_core::ErrorKind::NotLinked, "the stream ended")
    })?;
    protocol::open(kind, &body)
}

/// Describes a cache of this peer that the engine may access.
pub fn described(cache: CacheId, desc: &CacheDesc, kind: CacheKind) -> WireCache {
    let layout = CacheLayout { geometry: Geometry::new(desc).unwrap(), kind, placement: Placement::Device };
    let mut record = WireCache::new(EntryVersion { index: 0, generation: 0 }, cache, 0, layout);
    record.accessible = true;
    record
}

/// `len` bytes from `src` to `dst`.
pub fn one_span(src: u64, dst: u64, len: u64) -> Span {
    Span { src, dst, len, count: 1, src_step: 0, dst_step: 0 }
}

/// A plan from and to consecutive tensors from `first` on, each with these spans.
pub fn plan_of(first: u32, num_tensors: u32, spans: &[Span]) -> WirePlan {
    let steps = TensorSteps::consecutive(first);
    let template = Template::new((0, 0), vec![(0, 0)], spans.to_vec());
    WirePlan { num_tensors, src: steps, dst: steps, templates: WireTemplates(Ok(listed(vec![template]))) }
}

fn mac(token: &[u8], side: &[u8], hello: &[u8], nonce: [u8; 16], rest: &[u8]) -> [u8; 32] {
    let mut mac = Hmac::<sha2::Sha256>::new_from_slice(token).unwrap();
    for part in [side, &[0], hello, &nonce, rest] {
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

/// Returns the proof of the accepting side. It also covers the welcome, with zeros in place of the proof.
pub fn welcome_mac(token: &[u8], hello: &[u8], nonce: [u8; 16], welcome: &Welcome) -> [u8; 32] {
    let blank = protocol::encode(&Welcome { mac: [0; 32], ..welcome.clone() }).unwrap();
    mac(token, b"acceptor", hello, nonce, &blank[HEADER..])
}

/// Offers to the engine at the other end the same memory that the engine has offered.
fn mirror(stream: &Stream) {
    let (_, said, descriptors) = stream.receive_with(HANDSHAKE_LIMIT, soon()).unwrap().unwrap();
    let offered: Attach = protocol::decode(&said).unwrap();
    let same: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    stream.send_with(&protocol::encode(&offered).unwrap(), &same, soon()).unwrap();
    let _: Attached = hear(stream).unwrap();
    say(stream, &Attached { pools: Ok(()), process: Err("not looked at".into()) });
}

/// Confirms a link without metadata, and waits until the engine has entered it.
pub fn confirm(stream: &Stream) -> Result<Vec<u8>> {
    say(stream, &Confirm { name: String::new(), metadata: BoundedBytes::default(), fabric: None });
    Ok(hear::<LinkAnswer>(stream)?.entered()?.metadata.to_vec())
}

/// A process that claims to be `cluster`.
pub struct Fake {
    pub party: Party,
    /// The token with which it proves its identity; none if empty.
    pub token: Vec<u8>,
    listener: Box<dyn Listener>,
}

impl Fake {
    pub fn new(cluster: u64, instance: u64) -> Fake {
        Fake::at(&Tcp, &Address::Tcp("127.0.0.1:0".parse().unwrap()), cluster, instance)
    }

    /// Cluster 2 twice: at a port, and at a local socket with a name of this test, to which the first one directs.
    pub fn on_this_host(test: &str) -> (Fake, Fake, String) {
        let name = format!("llm-datadist-test-{}-{test}", std::process::id());
        (Fake::new(2, 1), Fake::at(&Unix, &Address::Unix(name.clone()), 2, 1), name)
    }

    /// Cluster 2, to which `engine` has linked, and the control stream.
    pub fn linked_to(engine: &DataDist) -> (Fake, Stream) {
        let fake = Fake::new(2, 1);
        let (linked, control) = fake.linked_by(engine, || fake.linked());
        linked.unwrap();
        (fake, control)
    }

    /// Creates the same, which listens at `address`.
    pub fn at(transport: &dyn Transport, address: &Address, cluster: u64, instance: u64) -> Fake {
        let listener = transport.listen(address).unwrap();
        Fake { party: Party { cluster, instance, remote_accessible: false }, token: vec![], listener }
    }

    pub fn address(&self) -> PeerAddress {
        let Address::Tcp(at) = self.listener.address() else { unreachable!("a port") };
        PeerAddress { cluster: ClusterId(self.party.cluster), remote: vec![at], local: vec![] }
    }

    /// Accepts the next stream.
    pub fn accept(&self) -> Stream {
        let stream = accepted(&*self.listener).unwrap();
        stream.expect_descriptors().unwrap();
        stream
    }

    /// Whether somebody has dialled whom it has not accepted. Refuses the connection.
    pub fn is_dialled(&self) -> bool {
        !matches!(self.listener.accept().unwrap(), Accepted::Nobody)
    }

    /// Accepts the next stream and runs its handshake. Returns the stream and its purpose.
    pub fn greet(&self) -> (Stream, Purpose) {
        self.greet_with(None)
    }

    /// Does the same, and directs the peer to the local socket `local`.
    pub fn greet_with(&self, local: Option<String>) -> (Stream, Purpose) {
        let stream = self.accept();
        let (_, said) = stream.receive(HANDSHAKE_LIMIT, Duration::ZERO, soon()).unwrap().unwrap();
        let hello: Hello = protocol::decode(&said).unwrap();
        let nonce = [7; 16];
        say(&stream, &Challenge { nonce });
        let proof: Proof = hear(&stream).unwrap();
        assert_eq!(proof.mac, mac(&self.token, b"dialer", &said, nonce, b""));
        let welcome = Welcome { from: self.party, mac: [0; 32], local, secret: None };
        say(&stream, &Welcome { mac: welcome_mac(&self.token, &said, nonce, &welcome), ..welcome.clone() });
        if matches!(hello.purpose, Purpose::Call { rings: true, .. }) {
            let RingOffer = hear(&stream).unwrap();
            say(&stream, &RingAnswer::Refused { reason: "the peer of a test".into() });
        }
        (stream, hello.purpose)
    }

    /// Accepts a link that the engine makes, and returns its control stream.
    pub fn linked(&self) -> Stream {
        self.answers_link(&LinkAnswer::Entered(EnteredLink::default()))
    }

    /// Accepts a link that the engine makes, up to its confirmation, and answers that.
    pub fn answers_link(&self, answer: &LinkAnswer) -> Stream {
        let (stream, purpose) = self.greet();
        assert!(matches!(purpose, Purpose::Link { .. }));
        if stream.about.carries_descriptors {
            mirror(&stream);
        }
        let _: Confirm = hear(&stream).unwrap();
        say(&stream, answer);
        stream
    }

    /// Makes `engine` link to this process, while `play` acts as the peer.
    pub fn linked_by<T: Send>(&self, engine: &DataDist, play: impl FnOnce() -> T + Send) -> (Result<()>, T) {
        thread::scope(|scope| {
            let peer = scope.spawn(play);
            let linked = engine.link_clusters(&[self.address()], LONG).remove(0);
            (linked, peer.join().unwrap())
        })
    }

    /// Dials `engine`, and runs the handshake up to the welcome.
    pub fn dial(&self, engine: &DataDist, purpose: Purpose) -> Result<Stream> {
        self.dial_with(engine, b"", purpose)
    }

    pub fn dial_with(&self, engine: &DataDist, token: &[u8], purpose: Purpose) -> Result<Stream> {
        self.welcomed((engine, &Tcp), token, purpose, "elsewhere".into()).map(|(stream, _)| stream)
    }

    /// Returns the local socket to which `engine` directs a peer on its host.
    pub fn local_of(&self, engine: &DataDist, host: String) -> Option<String> {
        self.try_local_of(engine, host).unwrap()
    }

    /// As [`local_of`](Self::local_of), for a process that `engine` may refuse.
    pub fn try_local_of(&self, engine: &DataDist, host: String) -> Result<Option<String>> {
        let purpose = Purpose::Link { link: 1, comm: None, probe_local: true, ensure: false };
        Ok(self.welcomed((engine, &Tcp), b"", purpose, host)?.1.local)
    }

    fn welcomed(
        &self,
        (engine, over): (&DataDist, &dyn Transport),
        token: &[u8],
        purpose: Purpose,
        host: String,
    ) -> Result<(Stream, Welcome)> {
        let stream = over.dial(&Address::Tcp(engine.listening().unwrap()), soon())?;
        stream.expect_descriptors()?;
        let asked = Some(engine.config().cluster.0);
        let hello = Hello { purpose, from: self.party, asked, host, nonce: [3; 16] };
        let frame = protocol::encode(&hello)?;
        stream.send(&frame, soon())?;
        let challenge: Challenge = hear(&stream)?;
        say(&stream, &Proof { mac: mac(token, b"dialer", &frame[HEADER..], challenge.nonce, b"") });
        let welcome: Welcome = hear(&stream)?;
        assert_eq!(welcome.mac, welcome_mac(token, &frame[HEADER..], challenge.nonce, &welcome));
        Ok((stream, welcome))
    }

    /// Makes a link to `engine`, and returns its control stream.
    pub fn link(&self, engine: &DataDist, id: u64) -> Result<Stream> {
        let purpose = Purpose::Link { link: id, comm: None, probe_local: false, ensure: false };
        let stream = self.dial(engine, purpose)?;
        confirm(&stream)?;
        Ok(stream)
    }

    /// Makes a link to `engine` through the transport `over`. Returns its control stream and a call stream.
    pub fn calling(&self, engine: &DataDist, over: &dyn Transport, id: u64) -> (Stream, Stream) {
        let dial = |purpose| self.welcomed((engine, over), b"", purpose, "elsewhere".into()).unwrap().0;
        let control = dial(Purpose::Link { link: id, comm: None, probe_local: false, ensure: false });
        if control.about.carries_descriptors {
            mirror(&control);
        }
        confirm(&control).unwrap();
        (control, dial(Purpose::Call { link: id, reverse: false, rings: false }))
    }

    /// Opens a call stream of that link.
    pub fn call(&self, engine: &DataDist, id: u64) -> Result<Stream> {
        self.dial(engine, Purpose::Call { link: id, reverse: false, rings: false })
    }
}
