//! What a review found in links, each with the test that would have found it.
//!
//! Not for: what the other files judge already (`communicators`, `linking`, `races`).

use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use llm_datadist_core::testing::net::{Address, Unix};
use llm_datadist_core::testing::protocol::{
    Challenge, Control, HANDSHAKE_LIMIT, HEADER, Hello, Proof, Purpose, Request, Welcome, decode, encode,
};
use llm_datadist_core::{
    CacheKind, ClusterId, CommStatus, Config, DataDist, ErrorKind, Layers, Mode, PeerAddress, Placement,
    PullRows, Role,
};

use super::fake::{Fake, hear, say, soon, welcome_mac};
use super::{Held, LONG, Pair, WAYS, Way, address, config, eventually, link, of, open, row, unlink};
use crate::bed::desc;
use crate::log;

const SLOT: PullRows = PullRows::Slot { local: 0, size: -1 };
const TABLE: &str = r#"{"server_count": "1", "server_list": [{"server_id": "127.0.0.1", "device": [
    {"device_id": "0", "rank_id": "0"}, {"device_id": "1", "rank_id": "1"}]}], "version": "1.0"}"#;

fn member(cluster: u64, port: u16, total: Duration) -> DataDist {
    let mut config = config(cluster, Way::Tcp);
    config.links.listen = None;
    config.links.rank_port = port;
    config.links.total = total;
    open(config, Way::Tcp)
}

fn enter(engine: &DataDist, name: &str) -> u64 {
    let name = format!("{name} {}", std::process::id());
    engine.link(&name, &[(ClusterId(1), 0), (ClusterId(2), 1)], TABLE).unwrap()
}

fn ready(engine: &DataDist, comm: u64) {
    eventually("a communicator", || engine.comm_status(comm).unwrap() == CommStatus::Ready);
}

/// A link that comes about while its communicator is left does not stay.
#[test]
fn nothing_is_left_of_a_communicator_that_was_left_at_once() {
    let (low, high) = (member(1, 24_000, LONG), member(2, 24_000, LONG));
    for round in 0..40u64 {
        let comms = (enter(&low, "brief"), enter(&high, "brief"));
        thread::sleep(Duration::from_micros(round * 97 % 3000));
        low.unlink(comms.0).unwrap();
        assert!(low.stats().links.is_empty(), "round {round}");
        high.unlink(comms.1).unwrap();
        assert!(high.stats().links.is_empty(), "round {round}");
    }
    thread::sleep(Duration::from_millis(50));
    assert!(low.stats().links.is_empty() && high.stats().links.is_empty());
    // The port is given back each time, and can be listened at again.
    let comms = (enter(&low, "last"), enter(&high, "last"));
    ready(&low, comms.0);
    ready(&high, comms.1);
}

/// Many communicators entered at once share one listener, which goes with the last of them.
#[test]
fn communicators_entered_at_once_share_a_listener() {
    let engine = member(1, 24_020, LONG);
    let comms: Vec<u64> = thread::scope(|scope| {
        let engine = &engine;
        let all: Vec<_> =
            (0..8).map(|n| scope.spawn(move || enter(engine, &format!("shared {n}")))).collect();
        all.into_iter().map(|entered| entered.join().unwrap()).collect()
    });
    // The next port was not taken by a listener of the same process.
    drop(TcpListener::bind(("127.0.0.1", 24_021)).unwrap());
    for comm in comms {
        assert!(TcpListener::bind(("127.0.0.1", 24_020)).is_err());
        engine.unlink(comm).unwrap();
    }
    eventually("the port", || TcpListener::bind(("127.0.0.1", 24_020)).is_ok());
}

/// A member that comes back after `link_total_time` is still looked for, and it was said that it is away.
#[test]
fn a_member_that_stays_away_for_long_is_met_again() {
    let total = Duration::from_millis(600);
    let (low, high) = (member(1, 24_040, total), member(2, 24_040, total));
    let comms = (enter(&low, "long"), enter(&high, "long"));
    ready(&low, comms.0);
    ready(&high, comms.1);
    let dialled: Vec<bool> = [&low, &high].map(|engine| engine.stats().links[0].outgoing).to_vec();
    assert_eq!(dialled, [false, true], "the higher rank dials");
    drop(low);
    eventually("the line that it is away", || {
        !log::texts(&["127.0.0.1:24040", "still searches for"]).is_empty()
    });
    assert_eq!(high.comm_status(comms.1).unwrap(), CommStatus::Ready);
    let low = member(1, 24_040, LONG);
    let again = enter(&low, "long");
    ready(&low, again);
    // The side that listens has its half first; the other was ready before and waits for nothing.
    eventually("the other half", || high.check_link(ClusterId(1)).is_ok());
    // One that leaves on purpose is not looked for.
    low.unlink(again).unwrap();
    eventually("the end of the link", || high.stats().links.is_empty());
    thread::sleep(Duration::from_millis(100));
    assert!(high.stats().links.is_empty());
}

/// More silent strangers than may greet at a time keep nobody out, neither links nor their streams.
#[test]
fn strangers_keep_no_peer_out() {
    let (local, remote) = (open(config(1, Way::Tcp), Way::Tcp), open(config(2, Way::Tcp), Way::Tcp));
    let at = remote.listening().unwrap();
    let strangers: Vec<_> = (0..300).map(|_| TcpStream::connect(at).unwrap()).collect();
    link(&local, &remote).unwrap();
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| local.check_link(ClusterId(2)).unwrap());
        }
        for _ in 0..100 {
            drop(TcpStream::connect(at).unwrap());
        }
    });
    drop(strangers);
}

/// A peer that opens streams of calls without end is refused at some number, and the link goes on.
#[test]
fn the_streams_of_one_peer_are_bounded() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let fake = Fake::new(2, 1);
    let control = fake.link(&engine, 7).unwrap();
    let mut streams = vec![];
    let refused = loop {
        match fake.call(&engine, 7) {
            Ok(stream) => streams.push(stream),
            Err(error) => break error,
        }
        assert!(streams.len() <= 256);
    };
    assert!(refused.to_string().contains("too many streams"), "{refused}");
    assert!(streams.len() >= 64);
    say(&control, &Control::Ping);
    assert_eq!(hear::<Control>(&control).unwrap(), Control::Pong);
    streams.clear();
    eventually("room for one more", || fake.call(&engine, 7).is_ok());
}

/// A peer that gives no answer does not keep its cluster from being linked again.
#[test]
fn a_dead_link_makes_room() {
    let mut short = config(1, Way::Tcp);
    short.links.heartbeat = Duration::from_millis(400);
    let engine = open(short, Way::Tcp);
    let fake = Fake::new(2, 1);
    thread::scope(|scope| {
        let peer = scope.spawn(|| (fake.linked(), fake.linked()));
        engine.link_clusters(&[fake.address()], LONG).remove(0).unwrap();
        engine.link_clusters(&[fake.address()], LONG).remove(0).unwrap();
        assert_eq!(engine.stats().links.len(), 1);
        drop(peer.join().unwrap());
    });
}

/// A process that goes by the cluster id and the instance of another, which it may have learned from it, gets neither the
/// place of its link nor its streams.
#[test]
fn the_place_of_a_link_that_works_cannot_be_taken() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let peer = Fake::new(2, 1);
    let control = peer.link(&engine, 7).unwrap();
    for id in [7, 8] {
        let refused = Fake::new(2, 1).link(&engine, id).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::LinkFailed);
        assert!(refused.to_string().contains("its link works"), "{refused}");
    }
    say(&control, &Control::Ping);
    assert_eq!(hear::<Control>(&control).unwrap(), Control::Pong);
    peer.call(&engine, 7).unwrap();
    // The process itself closes the one before when it links again.
    drop(control);
    let again = peer.link(&engine, 9).unwrap();
    eventually("one link", || engine.stats().links.len() == 1);
    assert!(peer.call(&engine, 7).is_err());
    peer.call(&engine, 9).unwrap();
    drop(again);
}

/// An engine that ends right after a link was made says so, also while its control thread has not heard of the link yet.
#[test]
fn an_engine_that_ends_at_once_says_goodbye() {
    let local = open(config(1, Way::Tcp), Way::Tcp);
    for round in 0..100 {
        let remote = open(config(2, Way::Tcp), Way::Tcp);
        link(&local, &remote).unwrap();
        drop(remote);
        eventually("the end of the link", || local.stats().links.is_empty());
        let why = local.check_link(ClusterId(2)).unwrap_err().to_string();
        assert!(why.contains("finalized"), "round {round}: {why}");
    }
}

/// Who only says that he is the peer of a link can make one of another kind, and gets none of the calls.
#[test]
fn a_later_link_of_another_kind_takes_no_calls() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let peer = Fake::new(2, 1);
    thread::scope(|scope| {
        let called = scope.spawn(|| {
            let control = peer.linked();
            let (call, purpose) = peer.greet();
            call.close();
            (control, purpose)
        });
        engine.link_clusters(&[peer.address()], LONG).remove(0).unwrap();
        let other = Fake::new(2, 1).link(&engine, 8).unwrap();
        assert_eq!(engine.stats().links.len(), 2);
        engine.check_link(ClusterId(2)).unwrap_err();
        let (control, purpose) = called.join().unwrap();
        assert!(matches!(purpose, Purpose::Call { .. }), "{purpose:?}");
        drop((control, other));
    });
}

/// Of those that link under one cluster id at the same time, one is let in.
#[test]
fn of_many_that_want_one_place_one_gets_it() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let links: Vec<_> = thread::scope(|scope| {
        let link = |instance| Fake::new(2, instance).link(&engine, instance).ok();
        let all: Vec<_> = (1..=16).map(|instance| scope.spawn(move || link(instance))).collect();
        all.into_iter().filter_map(|link| link.join().unwrap()).collect()
    });
    assert_eq!(links.len(), 1);
    say(&links[0], &Control::Ping);
    assert_eq!(hear::<Control>(&links[0]).unwrap(), Control::Pong);
}

/// A call that needs one more stream of a peer that listens no longer is told that it is not linked.
#[test]
fn calls_to_a_peer_that_has_gone() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let fake = Fake::new(2, 1);
    let control = thread::scope(|scope| {
        let peer = scope.spawn(|| fake.linked());
        engine.link_clusters(&[fake.address()], LONG).remove(0).unwrap();
        peer.join().unwrap()
    });
    drop(fake);
    let error = engine.check_link(ClusterId(2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotLinked, "{error}");
    assert!(error.to_string().contains("cannot be reached"), "{error}");
    drop(control);
}

/// A control message may come in pieces; one that is never finished is no sign of life, and its link ends by that.
#[test]
fn half_a_control_message_is_no_sign_of_life() {
    let mut patient = config(1, Way::Tcp);
    patient.links.heartbeat = Duration::from_millis(50);
    patient.links.silence = Duration::from_millis(400);
    let engine = open(patient, Way::Tcp);
    let fake = Fake::new(2, 1);
    let control = fake.link(&engine, 7).unwrap();
    let ping = encode(&Control::Ping).unwrap();
    control.send(&ping[..3], soon()).unwrap();
    control.send(&ping[3..], soon()).unwrap();
    while hear::<Control>(&control).unwrap() != Control::Pong {}
    control.send(&ping[..3], soon()).unwrap();
    eventually("the end of the link", || engine.stats().links.is_empty());
    let why = engine.check_link(ClusterId(2)).unwrap_err().to_string();
    assert!(why.contains("no sign of life"), "{why}");
}

/// The name of the local socket is part of what the peer proves: nobody on the way can change it.
#[test]
fn a_welcome_cannot_be_changed_on_the_way() {
    let local = open(config(1, Way::Shm), Way::Shm);
    let fake = Fake::new(2, 1);
    thread::scope(|scope| {
        let peer = scope.spawn(|| {
            let stream = fake.accept();
            let (_, said) = stream.receive(HANDSHAKE_LIMIT, Duration::ZERO, soon()).unwrap().unwrap();
            let hello: Hello = decode(&said).unwrap();
            assert!(matches!(hello.purpose, Purpose::Link { probe_local: true, .. }));
            say(&stream, &Challenge { nonce: [7; 16] });
            hear::<Proof>(&stream).unwrap();
            let welcome = Welcome { from: fake.party, mac: [0; 32], local: None, secret: None };
            let mac = welcome_mac(b"", &said, [7; 16], &welcome);
            say(&stream, &Welcome { mac, local: Some("elsewhere".into()), ..welcome });
            stream
        });
        let refused = local.link_clusters(&[fake.address()], LONG).remove(0).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::LinkFailed);
        assert!(refused.to_string().contains("token"), "{refused}");
        drop(peer.join().unwrap());
    });
    assert!(encode(&Control::Pong).unwrap().len() > HEADER);
}

/// Who answers at the local socket must be who answered at the port.
#[test]
fn another_process_at_the_local_socket_is_not_the_peer() {
    let local = open(config(1, Way::Shm), Way::Shm);
    let impostor = open(config(2, Way::Shm), Way::Shm);
    // The name of the impostor's socket, as it tells anybody of this host who asks.
    let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned();
    let asking = Fake::new(1, 5);
    let named = asking.local_of(&impostor, host).expect("a local socket");
    let fake = Fake::new(2, 1);
    thread::scope(|scope| {
        let peer = scope.spawn(|| {
            let sent_away = fake.greet_with(Some(named));
            (sent_away, fake.linked())
        });
        local.link_clusters(&[fake.address()], LONG).remove(0).unwrap();
        assert_eq!(local.stats().links[0].transport, "tcp");
        assert!(!log::texts(&["another process answers"]).is_empty());
        eventually("nothing at the impostor", || impostor.stats().links.is_empty());
        drop(peer.join().unwrap());
    });
}

/// The peer unlinks while it is asked to: what it was asked on ends, it takes no more words, and its goodbye is read late.
#[test]
fn a_goodbye_that_is_read_late_is_one() {
    let local = open(config(1, Way::Shm), Way::Shm);
    let at = Address::Unix(format!("llm-datadist-test-{}-late-goodbye", std::process::id()));
    let (door, fake) = (Fake::new(2, 1), Fake::at(&Unix, &at, 2, 1));
    thread::scope(|scope| {
        let peer = scope.spawn(|| {
            let sent_away = door.greet_with(Some(fake.local()));
            let control = fake.linked();
            let (call, purpose) = fake.greet();
            assert!(matches!(purpose, Purpose::Call { .. }), "{purpose:?}");
            let asked: Request = hear(&call).unwrap();
            // The engine notices that it can tell nothing any more only when it does.
            rustix::net::shutdown(&control, rustix::net::Shutdown::Read).unwrap();
            drop(call);
            thread::sleep(Duration::from_millis(200));
            say(&control, &Control::Bye { reason: "the peer unlinked".into(), unlinked: true });
            (sent_away, control, asked)
        });
        local.link_clusters(&[door.address()], LONG).remove(0).unwrap();
        local.unlink_clusters(&[door.address()], LONG, false).remove(0).unwrap();
        let (_, _, asked) = peer.join().unwrap();
        assert!(matches!(asked, Request::Unlink { .. }), "{asked:?}");
    });
    assert!(local.stats().links.is_empty());
}

/// The same port at another address, port 0 again, and nowhere.
#[test]
fn a_listener_moves_between_addresses_of_one_port() {
    let engine = open(config(1, Way::Shm), Way::Shm);
    let at = engine.listening().unwrap();
    engine.switch_role(Role::Decoder, Some("127.0.0.1:0".parse().unwrap())).unwrap();
    assert_eq!(engine.listening(), Some(at), "any port: the one it has");
    let everywhere = format!("0.0.0.0:{}", at.port()).parse().unwrap();
    engine.switch_role(Role::Prompt, Some(everywhere)).unwrap();
    assert_eq!(engine.listening(), Some(everywhere));
    assert!(!log::texts(&[&at.port().to_string(), "without a token"]).is_empty());
    // What cannot be had leaves all as it was.
    let nobodys = format!("192.0.2.1:{}", at.port()).parse().unwrap();
    engine.switch_role(Role::Decoder, Some(nobodys)).unwrap_err();
    assert_eq!((engine.listening(), engine.role()), (Some(everywhere), Role::Prompt));
    let local = open(config(2, Way::Shm), Way::Shm);
    let there = PeerAddress { cluster: ClusterId(1), remote: vec![at], local: vec![] };
    local.link_clusters(std::slice::from_ref(&there), LONG).remove(0).unwrap();
    assert_eq!(engine.switch_role(Role::Mix, None).unwrap_err().kind(), ErrorKind::LinksExist);
    local.unlink_clusters(std::slice::from_ref(&there), LONG, false).remove(0).unwrap();
    engine.switch_role(Role::Mix, None).unwrap();
    assert_eq!(engine.listening(), None);
    local.link_clusters(&[there], LONG).remove(0).unwrap_err();
    engine.switch_role(Role::Mix, Some(at)).unwrap();
    link(&local, &engine).unwrap();
    assert_eq!(local.stats().links[0].transport, "shm", "the local socket is there again");
}

/// Peers that take a connection and say nothing leave the others of the call their time.
#[test]
fn silent_peers_do_not_use_up_the_time_of_others() {
    let (local, remote) = (open(config(1, Way::Tcp), Way::Tcp), open(config(2, Way::Tcp), Way::Tcp));
    let silent: Vec<_> = (0..40).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let mut peers: Vec<PeerAddress> = silent
        .iter()
        .zip(100..)
        .map(|(listener, id)| PeerAddress {
            cluster: ClusterId(id),
            remote: vec![listener.local_addr().unwrap()],
            local: vec![],
        })
        .collect();
    peers.push(address(&remote));
    let mut results = local.link_clusters(&peers, Duration::from_secs(2));
    results.pop().unwrap().unwrap();
    assert!(results.iter().all(|result| result.as_ref().unwrap_err().kind() == ErrorKind::Timeout));
}

/// Without the cache manager a cluster that goes by this one's id is another cluster, also once its link has broken.
#[test]
fn a_peer_of_the_same_id_is_not_this_engine() {
    let opened = || open(Config { mode: Mode::KvCacheManager, ..config(1, Way::Tcp) }, Way::Tcp);
    let (local, remote) = (opened(), opened());
    let shape = desc(Placement::Device, 2, 1, 64);
    let into = Held::new(&local, false, &shape, CacheKind::Batch, &[]);
    let source = Held::new(&remote, false, &shape, CacheKind::Batch, &[]);
    let pull = || local.pull(of(1, row(&source, 0)), &into.end(), &SLOT, Layers::ALL);
    assert_eq!(pull().unwrap_err().kind(), ErrorKind::NotLinked);
    link(&local, &remote).unwrap();
    let bytes = source.fill(3);
    pull().unwrap();
    assert!(into.read() == bytes);
    unlink(&local, &remote).unwrap();
    assert_eq!(pull().unwrap_err().kind(), ErrorKind::NotLinked);
}

/// What links report of themselves: requests that move bytes, and pools that were there to be mapped.
#[test]
fn links_count_what_they_do() {
    for way in WAYS {
        let pair = Pair::with(way, |config| config.host_pool = None);
        let shape = desc(Placement::Device, 2, 1, 64);
        let into = Held::new(&pair.local, false, &shape, CacheKind::Batch, &[]);
        let source = Held::new(&pair.remote, false, &shape, CacheKind::Batch, &[]);
        pair.local.pull(of(2, row(&source, 0)), &into.end(), &SLOT, Layers::ALL).unwrap();
        let links = pair.local.stats().links;
        assert!(links[0].outgoing && !pair.remote.stats().links[0].outgoing);
        let streamed = if way == Way::Tcp { 128 } else { 0 };
        assert_eq!((links[0].requests.bytes, links[0].transfers.bytes), (streamed, 128), "{way:?}");
        assert!(links[0].requests.calls > u64::from(way == Way::Tcp));
        let bare = Pair::with(way, |config| (config.host_pool, config.device_pool) = (None, None));
        assert_eq!(bare.local.stats().links[0].pools, if way.shares() { "none" } else { "stream" });
    }
}
