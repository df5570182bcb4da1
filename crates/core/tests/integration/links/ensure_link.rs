//! Links on demand: what counts as linked, which of two connections is kept, and how an attempt ends.
//!
//! `session/dials.rs` checks the decision in every order of its steps; `tests/native/test_peers.py` covers arguments, separate
//! processes and peers that restart, `tests/test_hostile_links.py` confirmations that break the rules.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Barrier, OnceLock};
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::{Config, DataDist, Token};
use llm_datadist_core::testing::net::Stream;
use llm_datadist_core::testing::protocol::{
    Confirm, ControlMessage, EnteredLink, LinkAnswer, MAX_METADATA, Purpose, Reply, Request,
};
use llm_datadist_core::{ClusterId, Error, ErrorKind, Event, PeerInfo, Result, Transfer, WhileRefused};
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket, sockopt};

use super::asynchronous::outcome;
use super::fake_peer::{Fake, confirm, hear, hear_request, say};
use super::{
    LONG, TOKEN, WAYS, Way, address, check_pull, config, eventually, fails_with, link, open, open_with,
    times, unlink,
};

fn ensure(local: &DataDist, remote: &DataDist) -> Arc<Transfer> {
    at(local, remote.listening().unwrap())
}

fn at(local: &DataDist, address: SocketAddr) -> Arc<Transfer> {
    within(local, address, LONG)
}

fn within(local: &DataDist, address: SocketAddr, limit: Duration) -> Arc<Transfer> {
    local.ensure_link(address, limit, None, WhileRefused::Retry).unwrap()
}

/// The peer, or the failure.
fn linked(transfer: &Transfer) -> Result<PeerInfo> {
    assert_eq!(outcome(transfer)?, 0);
    Ok(transfer.peer().expect("the peer of a success").clone())
}

/// The failure, which must be of this kind.
#[track_caller]
fn failed(transfer: &Transfer, kind: ErrorKind) -> Error {
    let error = fails_with(linked(transfer), kind);
    assert_eq!(transfer.peer(), None);
    error
}

fn pair(way: Way) -> [DataDist; 2] {
    [1, 2].map(|cluster| open(config(cluster, way), way))
}

/// A port that nobody gets by chance, as long as this lives. Who asks for it by number can listen at it.
struct ReservedPort {
    address: SocketAddr,
    _socket: OwnedFd,
}

impl ReservedPort {
    fn new() -> Self {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        sockopt::set_socket_reuseaddr(&socket, true).unwrap();
        bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
        Self { address: getsockname(&socket).unwrap().try_into().unwrap(), _socket: socket }
    }
}

/// An address at which nobody listens.
fn nowhere() -> SocketAddr {
    static PORT: OnceLock<ReservedPort> = OnceLock::new();
    PORT.get_or_init(ReservedPort::new).address
}

/// Returns how many links were made and ended since the last call.
fn news(engine: &DataDist) -> (usize, usize) {
    let events = engine.poll(100).unwrap();
    let count = |is: fn(&Event) -> bool| events.iter().filter(|event| is(event)).count();
    (count(|event| matches!(event, Event::LinkUp(_))), count(|event| matches!(event, Event::LinkDown(_))))
}

/// Waits until `engine` reports that its link ended, and checks that it reports nothing else. A link that breaks leaves
/// [`DataDist::peers`] shortly before its end is reported, so an early call would consume the event of the link's start.
fn await_end(engine: &DataDist) {
    let mut all = (0, 0);
    eventually("the news of the end", || {
        let (made, ended) = news(engine);
        all = (all.0 + made, all.1 + ended);
        all.1 > 0
    });
    assert!(all.0 <= 1 && all.1 == 1, "{all:?}");
    assert!(engine.peers().is_empty());
}

fn await_no_link(local: &DataDist, remote: &DataDist) {
    eventually("the end of the link", || local.peers().is_empty() && remote.peers().is_empty());
}

/// Runs two calls that begin at the same time.
fn at_once<T, U: Send>(here: impl FnOnce() -> T, there: impl FnOnce() -> U + Send) -> (T, U) {
    let start = Barrier::new(2);
    thread::scope(|scope| {
        let there = scope.spawn(|| {
            start.wait();
            there()
        });
        start.wait();
        (here(), there.join().unwrap())
    })
}

#[test]
fn a_link_is_made_once_whoever_asks() {
    for way in WAYS {
        for both_ways in [false, true] {
            let [local, remote] =
                [1, 2].map(|cluster| open_with(cluster, way, |config| config.links.both_ways = both_ways));
            let peer = linked(&ensure(&local, &remote)).unwrap();
            assert_eq!((peer.cluster, local.peers()), (ClusterId(2), vec![peer.clone()]));
            eventually("the link there", || remote.peers().len() == 1);
            assert_eq!(linked(&ensure(&local, &remote)).unwrap(), peer);
            // The other side has the same link.
            assert_eq!(linked(&ensure(&remote, &local)).unwrap(), remote.peers()[0]);
            assert_eq!([local.peers().len(), remote.peers().len()], [1, 1]);
            for (from, to) in [(&local, &remote), (&remote, &local)] {
                assert_eq!(link(from, to).unwrap_err().kind(), ErrorKind::AlreadyLinked);
            }
            check_pull(&local, &remote);
            check_pull(&remote, &local);
            unlink(&remote, &local).unwrap();
            await_no_link(&local, &remote);
        }
    }
}

#[test]
fn a_link_of_link_clusters_counts_on_both_sides() {
    for way in WAYS {
        let [local, remote] = pair(way);
        link(&local, &remote).unwrap();
        assert_eq!(linked(&ensure(&local, &remote)).unwrap(), local.peers()[0]);
        assert_eq!(linked(&ensure(&remote, &local)).unwrap(), remote.peers()[0]);
        assert_eq!([local.peers().len(), remote.peers().len()], [1, 1]);
    }
}

/// Both sides dial at once, many times. One connection is kept, both calls succeed, and neither side sees a link end.
#[test]
fn both_sides_may_dial_at_once() {
    for way in WAYS {
        let [local, remote] = pair(way);
        for engine in [&local, &remote] {
            assert_eq!(news(engine), (0, 0));
        }
        for round in 0..times(200) {
            let (here, there) =
                at_once(|| linked(&ensure(&local, &remote)), || linked(&ensure(&remote, &local)));
            let (here, there) = (here.unwrap(), there.unwrap());
            let context = format!("{way:?}, round {round}");
            assert_eq!((here.cluster, there.cluster), (ClusterId(2), ClusterId(1)), "{context}");
            for (engine, other) in [(&local, ClusterId(2)), (&remote, ClusterId(1))] {
                assert_eq!(engine.peers().len(), 1, "{context}");
                assert_eq!(news(engine), (1, 0), "{context}");
                engine.check_link(other).unwrap();
            }
            // The connection that is refused is not replaced by one over another transport.
            let expected = if way.shares_sockets() || way == Way::Local { "shm" } else { "tcp" };
            assert_eq!((here.transport, there.transport), (expected, expected), "{context}");
            unlink(&local, &remote).unwrap();
            await_end(&local);
            await_end(&remote);
        }
    }
}

/// One side calls `link_clusters` while the other calls `ensure_link`. There may be two links then, and both work.
#[test]
fn link_clusters_at_the_same_time_does_no_harm() {
    for way in WAYS {
        let [local, remote] = pair(way);
        for round in 0..times(60) {
            let (here, there) = at_once(|| link(&local, &remote), || linked(&ensure(&remote, &local)));
            assert!(here.is_ok() || here.unwrap_err().kind() == ErrorKind::AlreadyLinked);
            there.unwrap();
            let counts = [local.peers().len(), remote.peers().len()];
            assert!(counts == [1, 1] || counts == [2, 2], "{way:?}, round {round}: {counts:?}");
            check_pull(&local, &remote);
            check_pull(&remote, &local);
            unlink(&local, &remote).unwrap();
            await_no_link(&local, &remote);
        }
    }
}

/// Many calls of both sides at once make one link.
#[test]
fn many_calls_at_once_make_one_link() {
    for way in WAYS {
        let [local, remote] = pair(way);
        let calls: Vec<_> = (0..40)
            .map(|number| if number % 3 == 0 { ensure(&remote, &local) } else { ensure(&local, &remote) })
            .collect();
        for call in &calls {
            linked(call).unwrap();
        }
        assert_eq!([local.peers().len(), remote.peers().len()], [1, 1]);
        check_pull(&local, &remote);
    }
}

#[test]
fn metadata_travels_both_ways_with_every_kind_of_link() {
    for way in WAYS {
        let of = |cluster, metadata: &[u8]| {
            open(Config { metadata: metadata.to_vec(), ..config(cluster, way) }, way)
        };
        let [local, remote] = [of(1, b"local"), of(2, &[7; MAX_METADATA])];
        let told = |engine: &DataDist| engine.peers()[0].metadata.to_vec();
        let peer = linked(&ensure(&local, &remote)).unwrap();
        assert_eq!(*peer.metadata, vec![7; MAX_METADATA]);
        for _ in 0..2 {
            eventually("the link there", || !remote.peers().is_empty());
            assert_eq!((told(&local), told(&remote)), (vec![7; MAX_METADATA], b"local".to_vec()));
            unlink(&local, &remote).unwrap();
            eventually("the end of the link", || remote.peers().is_empty());
            link(&local, &remote).unwrap();
        }
    }
}

/// The call tries again while nobody listens, also after the port was busy with a process that closes every connection.
#[test]
fn a_peer_may_start_later() {
    for way in [Way::Shm, Way::Tcp] {
        let local = open(config(1, way), way);
        let ReservedPort { address: port, _socket } = ReservedPort::new();
        let calls = {
            let starting = TcpListener::bind(port).unwrap();
            let calls = [at(&local, port), at(&local, port)];
            drop(starting.accept().unwrap());
            calls
        };
        thread::sleep(Duration::from_millis(300));
        assert!(calls.iter().all(|call| !call.done()));
        let remote = open_with(2, way, |config| config.links.listen = Some(port));
        for call in &calls {
            assert_eq!(linked(call).unwrap().cluster, ClusterId(2));
        }
        assert_eq!([local.peers().len(), remote.peers().len()], [1, 1]);
    }
}

#[test]
fn an_attempt_ends_at_its_deadline() {
    let local = open(config(1, Way::Tcp), Way::Tcp);
    // One listens and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    for (address, errno) in [(nowhere(), Some(111)), (silent.local_addr().unwrap(), None)] {
        let call = within(&local, address, Duration::from_millis(300));
        let error = failed(&call, ErrorKind::Timeout);
        assert_eq!(error.fact("address"), Some(&*address.to_string()), "{error}");
        assert_eq!(error.fact("limit_ms"), Some("300"), "{error}");
        assert_eq!(error.raw_os_error(), errno, "that of the last attempt: {error}");
    }
    assert!(local.peers().is_empty());
}

/// A refusal that no further attempt can change ends the call long before its deadline.
#[test]
fn permanent_refusals_end_the_call() {
    let local = open(config(1, Way::Tcp), Way::Tcp);
    let error = failed(&ensure(&local, &local), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("this engine itself"), "{error}");

    let secret = open_with(2, Way::Tcp, |config| config.links.token = Some(Token::new(TOKEN)));
    failed(&ensure(&local, &secret), ErrorKind::LinkFailed);

    let other = open_with(2, Way::Tcp, |config| config.remote_accessible = !config.remote_accessible);
    failed(&ensure(&local, &other), ErrorKind::InvalidArgument);

    let twin = open(config(1, Way::Tcp), Way::Tcp);
    assert_eq!(failed(&ensure(&local, &twin), ErrorKind::LinkFailed).fact("cluster"), None);
    assert!(local.peers().is_empty() && twin.peers().is_empty());
}

/// A broken link is not dialled again; another call makes another one.
#[test]
fn a_broken_link_is_made_again_by_another_call() {
    let [local, remote] = pair(Way::Tcp);
    assert_eq!(news(&local), (0, 0));
    linked(&ensure(&local, &remote)).unwrap();
    remote.unlink_clusters(&[address(&local)], LONG, true).remove(0).unwrap();
    await_end(&local);
    thread::sleep(Duration::from_millis(100));
    assert!(local.peers().is_empty());
    linked(&ensure(&local, &remote)).unwrap();
    assert_eq!(news(&local), (1, 0));
}

/// Calls with a limit of one hour, to addresses without a listener and to a listener that never answers. There are more calls than
/// workers, so some wait for a worker.
fn many_calls(local: &DataDist) -> (Vec<Arc<Transfer>>, TcpListener) {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let calls = (0..40)
        .map(|number| if number % 2 == 0 { nowhere() } else { silent.local_addr().unwrap() })
        .map(|address| within(local, address, Duration::from_secs(3600)))
        .collect();
    (calls, silent)
}

#[test]
fn a_call_that_dials_or_waits_can_be_cancelled() {
    let local = open(config(1, Way::Tcp), Way::Tcp);
    let (calls, _silent) = many_calls(&local);
    // Calls to a peer have workers of their own.
    let remote = open(config(2, Way::Tcp), Way::Tcp);
    link(&local, &remote).unwrap();
    check_pull(&local, &remote);
    for call in calls.iter().rev() {
        assert!(call.cancel());
    }
    for call in &calls {
        let error = failed(call, ErrorKind::Cancelled);
        assert!(error.fact("address").is_some(), "{error}");
    }
    linked(&ensure(&remote, &local)).unwrap();
}

/// A peer that enters the link at the moment of the cancellation loses it again.
#[test]
fn a_cancelled_call_enters_no_link() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let fake = Fake::new(2, 7);
    for _ in 0..times(20) {
        let call = at(&engine, fake.address().remote[0]);
        let (stream, _) = fake.greet();
        let _: Confirm = hear(&stream).unwrap();
        assert!(call.cancel());
        say(&stream, &LinkAnswer::Entered(EnteredLink::default()));
        failed(&call, ErrorKind::Cancelled);
        assert!(engine.peers().is_empty());
        assert!(hear::<ControlMessage>(&stream).is_err(), "the engine closes the connection");
    }
}

#[test]
fn the_end_of_the_engine_ends_its_calls() {
    let local = open(config(1, Way::Tcp), Way::Tcp);
    let (calls, _silent) = many_calls(&local);
    drop(local);
    for call in &calls {
        failed(call, ErrorKind::Closed);
    }
}

#[test]
fn calls_count_as_transfers() {
    let local = open_with(1, Way::Tcp, |config| config.max_transfers = 2);
    let calls = [at(&local, nowhere()), at(&local, nowhere())];
    fails_with(local.ensure_link(nowhere(), LONG, None, WhileRefused::Retry), ErrorKind::Busy);
    calls.iter().for_each(|call| assert!(call.cancel()));
    calls.iter().for_each(|call| _ = failed(call, ErrorKind::Cancelled));
    at(&local, nowhere()).cancel();
}

const ENSURE: Purpose = Purpose::Link { link: 5, comm: None, probe_local: false, ensure: true };

fn later() -> LinkAnswer {
    LinkAnswer::Later { reason: "this side is making the link".into() }
}

/// A connection at the local socket that is refused for the sake of another one is not replaced by one over TCP.
#[test]
fn a_link_between_processes_of_one_host_stays_there() {
    let engine = open(config(1, Way::Shm), Way::Shm);
    let (listener, fake, name) = Fake::on_this_host("ensure");
    let call = at(&engine, listener.address().remote[0]);
    for _ in 0..2 {
        let (_probe, purpose) = listener.greet_with(Some(name.clone()));
        assert!(matches!(purpose, Purpose::Link { probe_local: true, ensure: true, .. }), "{purpose:?}");
        fake.answers_link(&later());
    }
    let _probe = listener.greet_with(Some(name));
    let _control = fake.linked();
    assert_eq!(linked(&call).unwrap().transport, "shm");
}

/// The accepting side keeps its own connection if its id is the lower one, and enters the other one otherwise.
#[test]
fn the_lower_id_keeps_its_connection() {
    for (own, peer) in [(1, 2), (2, 1)] {
        let engine = open(config(own, Way::Tcp), Way::Tcp);
        let fake = Fake::new(peer, 7);
        let call = at(&engine, fake.address().remote[0]);
        // The engine has sent its confirmation, so it dials this peer.
        let (first, _) = fake.greet();
        let _: Confirm = hear(&first).unwrap();
        let second = fake.dial(&engine, ENSURE).unwrap();
        let entered = confirm(&second);
        if own < peer {
            assert_eq!(entered.unwrap_err().kind(), ErrorKind::AlreadyLinked);
            assert!(hear::<ControlMessage>(&second).is_err(), "the connection is closed");
            say(&first, &LinkAnswer::Entered(EnteredLink::default()));
        } else {
            entered.unwrap();
            say(&first, &later());
        }
        linked(&call).unwrap();
        assert_eq!(engine.peers().len(), 1);
        drop(first);
    }
}

/// A peer that refuses for the sake of a connection that it never makes is dialled again.
#[test]
fn a_peer_that_promises_a_link_is_dialled_again() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let fake = Fake::new(2, 7);
    let call = at(&engine, fake.address().remote[0]);
    for _ in 0..3 {
        fake.answers_link(&later());
    }
    let _control = fake.linked();
    linked(&call).unwrap();
    // That answer is no success of `link_clusters`, which never receives it from a peer that follows the protocol.
    let other = Fake::new(3, 7);
    let (refused, _stream) = other.linked_by(&engine, || other.answers_link(&later()));
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::LinkFailed);
}

/// An engine whose heartbeats come at most every `heartbeat`, and that breaks no link because of silence.
fn patient(heartbeat: Duration) -> DataDist {
    open_with(1, Way::Tcp, |config| {
        (config.links.heartbeat, config.links.silence) = (heartbeat, Duration::from_secs(3600));
    })
}

/// A peer, its address, and the control stream and the description of a link that the engine has made to it.
fn linked_fake(engine: &DataDist) -> (Fake, SocketAddr, Stream, PeerInfo) {
    let fake = Fake::new(2, 1);
    let address = fake.address().remote[0];
    let call = at(engine, address);
    let control = fake.linked();
    let peer = linked(&call).unwrap();
    (fake, address, control, peer)
}

/// A call for an address at which an earlier call has found the peer neither dials nor sends a ping. Its transfer has ended when
/// the call returns.
#[test]
fn a_call_to_a_linked_peer_sends_nothing() {
    let engine = patient(Duration::from_secs(600));
    let (fake, address, control, peer) = linked_fake(&engine);
    for _ in 0..1500 {
        let call = at(&engine, address);
        assert!(call.done());
        assert_eq!(linked(&call).unwrap(), peer);
    }
    assert!(!fake.is_dialled());
    drop(engine);
    let first = hear(&control).unwrap();
    assert!(matches!(first, ControlMessage::Bye { .. }), "{first:?}");
}

fn named(engine: &DataDist, address: SocketAddr, name: &str) -> Arc<Transfer> {
    engine.ensure_link(address, LONG, Some(name.into()), WhileRefused::Retry).unwrap()
}

/// Another engine may listen at the address by now, so the call dials before it refuses the name.
#[test]
fn a_call_with_another_name_dials() {
    let engine = patient(Duration::from_secs(600));
    let (mut fake, address, _control, _) = linked_fake(&engine);

    let call = named(&engine, address, "other");
    let _same = fake.greet();
    failed(&call, ErrorKind::LinkFailed);

    fake.party.cluster = 3;
    let call = named(&engine, address, "other");
    let name = "other".to_owned();
    let _other = fake.answers_link(&LinkAnswer::Entered(EnteredLink { name, ..EnteredLink::default() }));
    assert_eq!(linked(&call).unwrap().cluster, ClusterId(3));
    // Each is found by its name.
    for (name, cluster) in [("", 2), ("other", 3)] {
        assert_eq!(linked(&named(&engine, address, name)).unwrap().cluster, ClusterId(cluster));
    }
    assert!(!fake.is_dialled());
}

/// The call waits for the end of the unlink, and makes another link.
#[test]
fn a_link_that_is_being_unlinked_is_not_returned() {
    let engine = patient(Duration::from_secs(600));
    let (fake, address, _control, _) = linked_fake(&engine);
    let call = thread::scope(|scope| {
        let unlink =
            scope.spawn(|| engine.unlink_clusters(&[fake.address()], LONG, false).remove(0).unwrap());
        let (stream, _) = fake.greet();
        assert!(matches!(hear_request(&stream).unwrap(), Request::Unlink));
        let call = at(&engine, address);
        // The second attempt comes after a look for a link that the peer has made.
        for _ in 0..2 {
            let _dials = fake.greet();
        }
        assert!(!call.done());
        say(&stream, &Reply::Done { bytes: 0 });
        unlink.join().unwrap();
        call
    });
    assert!(engine.peers().is_empty());
    let _control = fake.linked();
    let peer = linked(&call).unwrap();
    assert_eq!(engine.peers(), [peer]);
}

/// The peer of an incoming link is found by its first answer at the address.
#[test]
fn the_peer_of_an_incoming_link_is_dialled_once() {
    let engine = patient(Duration::from_secs(600));
    let fake = Fake::new(2, 1);
    let address = fake.address().remote[0];
    let control = fake.dial(&engine, ENSURE).unwrap();
    confirm(&control).unwrap();
    let call = at(&engine, address);
    let _stream = fake.greet();
    let peer = linked(&call).unwrap();
    assert_eq!(linked(&at(&engine, address)).unwrap(), peer);
    assert!(!fake.is_dialled());
}

/// There are more calls than workers, so some begin after the attempt.
#[test]
fn calls_for_one_address_share_an_attempt() {
    let engine = patient(Duration::from_secs(600));
    let fake = Fake::new(2, 1);
    let address = fake.address().remote[0];
    let calls: Vec<_> = (0..80).map(|_| at(&engine, address)).collect();
    let _control = fake.linked();
    for call in &calls {
        assert_eq!(linked(call).unwrap().cluster, ClusterId(2));
    }
    assert!(!fake.is_dialled());
    // The end of a call that was cancelled or late is its own.
    let other = Fake::new(3, 1);
    let address = other.address().remote[0];
    let first = at(&engine, address);
    let (refused, _) = other.greet();
    let others: Vec<_> = (0..3).map(|_| at(&engine, address)).collect();
    let late = within(&engine, address, Duration::from_millis(50));
    failed(&late, ErrorKind::Timeout);
    assert!(first.cancel());
    failed(&first, ErrorKind::Cancelled);
    drop(refused);
    let _control = other.linked();
    for call in &others {
        assert_eq!(linked(call).unwrap().cluster, ClusterId(3));
    }
    assert!(!other.is_dialled());
}

/// The first connection is accepted and never answered. Calls that share its attempt make attempts of their own after a while.
#[test]
fn calls_leave_an_attempt_that_is_stuck() {
    let engine = patient(Duration::from_secs(600));
    let fake = Fake::new(2, 1);
    let address = fake.address().remote[0];
    let stuck = at(&engine, address);
    let _silent = fake.accept();
    let call = at(&engine, address);
    let _control = fake.linked();
    let peer = linked(&call).unwrap();
    assert!(!stuck.done());
    assert!(stuck.cancel());
    failed(&stuck, ErrorKind::Cancelled);
    assert_eq!(engine.peers(), [peer]);
}

/// A peer that was silent for longer than its heartbeats allow is asked. A call with too little time to tell leaves the link.
#[test]
fn a_short_call_breaks_no_link() {
    let engine = patient(Duration::from_secs(1));
    // From the first poll on, links are news.
    assert_eq!(news(&engine), (0, 0));
    let (fake, address, control, peer) = linked_fake(&engine);
    assert_eq!(news(&engine), (1, 0));
    thread::sleep(Duration::from_millis(2100));

    let short = within(&engine, address, Duration::from_millis(350));
    let _stream = fake.greet();
    failed(&short, ErrorKind::Timeout);
    // It may have dialled once more, just before its time limit passed.
    while fake.is_dialled() {}
    assert_eq!((engine.peers(), news(&engine)), (vec![peer.clone()], (0, 0)));

    // The peer answers.
    let call = at(&engine, address);
    let _stream = fake.greet();
    while !call.done() {
        if hear::<ControlMessage>(&control).unwrap() == (ControlMessage::Ping {}) {
            say(&control, &ControlMessage::Pong {});
            eventually("the end of the call", || call.done());
        }
    }
    assert_eq!((linked(&call).unwrap(), news(&engine)), (peer, (0, 0)));

    // It does not answer any more.
    thread::sleep(Duration::from_millis(2100));
    let call = at(&engine, address);
    let _replacement = fake.linked();
    linked(&call).unwrap();
    assert_eq!((engine.peers().len(), news(&engine)), (1, (1, 1)));
}

/// A call with too little time to ask the peer of a silent link over the local socket does not try TCP instead.
#[test]
fn a_short_call_does_not_fall_back_to_tcp() {
    let engine = open_with(1, Way::Shm, |config| {
        (config.links.heartbeat, config.links.silence) = (Duration::from_secs(1), LONG);
    });
    let (listener, fake, socket) = Fake::on_this_host("short");
    let address = listener.address().remote[0];
    let call = at(&engine, address);
    let _probe = listener.greet_with(Some(socket.clone()));
    let _control = fake.linked();
    linked(&call).unwrap();
    thread::sleep(Duration::from_millis(2100));

    let short = within(&engine, address, Duration::from_millis(350));
    let _probe = listener.greet_with(Some(socket));
    let _stream = fake.greet();
    failed(&short, ErrorKind::Timeout);
    assert!(!fake.is_dialled(), "it did not ask for the secret of the peer, which a link over TCP needs");
    assert_eq!(engine.peers().len(), 1);
}
