//! How links are made, refused and ended: goodbyes, peers that are gone, silent or not authenticated, and surplus streams.
//!
//! `tests/test_links.py` and `tests/test_link_security.py` cover what `link_clusters` answers. Not for: faults (`broken_streams`).

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::{Name, PeerAddress, Role, Token};
use llm_datadist_core::testing::protocol::{ControlMessage, Purpose, Reply, Request, encode};
use llm_datadist_core::{CacheId, CacheKind, ClusterId, ErrorKind, Result};
use rustix::net::{Shutdown, shutdown};

use super::fake_peer::{Fake, ask, hear, hear_request, say, soon};
use super::identity::answers;
use super::{
    Held, LONG, Pair, TOKEN, WAYS, Way, address, check_pull, config, device, eventually, fails_saying, link,
    of, open, open_with, pull_slot, row, times, unlink,
};
use crate::child_process::{self, report};
use crate::log;

use CacheKind::Batch;

fn kind_of(result: Result<()>) -> ErrorKind {
    result.unwrap_err().kind()
}

/// The option `both_ways` lets both sides link. Either side ends all links.
#[test]
fn links_are_made_and_ended_by_either_side() {
    for (way, both_ways) in WAYS.into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let [local, remote] =
            [1, u64::MAX].map(|cluster| open_with(cluster, way, |config| config.links.both_ways = both_ways));
        let counts = || [local.stats().links.len(), remote.stats().links.len()];
        assert_eq!(kind_of(local.remap()), ErrorKind::NotLinked);
        assert!(local.link_clusters(&[], LONG).is_empty());
        for force in [false, true, true] {
            link(&local, &remote).unwrap();
            if both_ways {
                link(&remote, &local).unwrap();
            }
            assert_eq!(counts(), [1 + usize::from(both_ways); 2]);
            assert_eq!(kind_of(link(&local, &remote)), ErrorKind::AlreadyLinked);
            assert_eq!(kind_of(link(&remote, &local)), ErrorKind::AlreadyLinked);
            local.remap().unwrap();
            local.check_link(ClusterId(u64::MAX)).unwrap();
            remote.check_link(ClusterId(1)).unwrap();
            check_pull(&local, &remote);
            check_pull(&remote, &local);
            // With `force` no address is needed, because the peer is not asked.
            let nowhere = PeerAddress { remote: vec![], ..address(&remote) };
            let unlinked = local.unlink_clusters(&[nowhere], LONG, force).remove(0);
            assert_eq!(unlinked.is_ok(), force);
            if !force {
                assert_eq!(kind_of(unlinked), ErrorKind::InvalidArgument);
                assert_eq!(counts(), [1 + usize::from(both_ways); 2]);
                unlink(&local, &remote).unwrap();
            }
            assert!(local.stats().links.is_empty());
            unlink(&local, &remote).unwrap(); // not an error
            eventually("its end there", || counts() == [0, 0]);
        }
        link(&local, &remote).unwrap();
        unlink(&remote, &local).unwrap();
        eventually("its end here", || counts() == [0, 0]);
    }
}

#[test]
fn cluster_id_passes_to_another_process_once_its_owner_has_gone() {
    for way in WAYS {
        let Pair { local, remote } = Pair::new(way);
        let at = remote.listening();
        drop(remote);
        eventually("the end of the link", || local.stats().links.is_empty());
        fails_saying(local.check_link(ClusterId(2)), ErrorKind::NotLinked, "the peer was closed");
        let remote = open_with(2, way, |config| config.links.listen = at);
        link(&local, &remote).unwrap();
        let second = open(config(1, way), way);
        fails_saying(link(&second, &remote), ErrorKind::LinkFailed, "two processes cannot share an id");
        assert_eq!(remote.stats().links.len(), 1);
        check_pull(&local, &remote);
        drop(local);
        eventually("the end of the first", || remote.stats().links.is_empty());
        link(&second, &remote).unwrap();
        check_pull(&second, &remote);
    }
}

/// The peer closes the stream, or does not answer.
#[test]
fn unlinking_from_a_failing_peer_ends_the_link_here() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    for (closes, expected) in [(true, ErrorKind::UnlinkFailed), (false, ErrorKind::Timeout)] {
        let (fake, _control) = Fake::linked_to(&engine);
        thread::scope(|scope| {
            let peer = scope.spawn(|| {
                let (call, purpose) = fake.greet();
                assert!(matches!(purpose, Purpose::Call { reverse: false, .. }));
                assert!(matches!(hear_request(&call).unwrap(), Request::Unlink));
                if closes {
                    call.close();
                }
                call
            });
            let limit = if closes { LONG } else { Duration::from_secs(2) };
            assert_eq!(kind_of(engine.unlink_clusters(&[fake.address()], limit, false).remove(0)), expected);
            drop(peer.join().unwrap());
        });
        assert!(engine.stats().links.is_empty());
    }
}

#[test]
fn unauthenticated_connections_are_refused() {
    let engine = open_with(1, Way::Tcp, |config| config.links.token = Some(Token::new(TOKEN)));
    let frames: [&[u8]; 7] = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"LD\x01\x01\x04\0\0\0abcd",
        b"LD\x12\x01\x00\0\0\0",
        b"LD\x12\x01\xFF\xFF\xFF\xFF",
        b"LD\x12\x07\x01\0\0\0x",
        b"LD\x12\x01\x04\0\0\0\xFF\xFF\xFF\xFF",
        b"LD\x12\xFF\x04\0\0\0\x01\0\0\0",
    ];
    for words in frames {
        let mut stream = TcpStream::connect(engine.listening().unwrap()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(words).unwrap();
        let mut answer = Vec::new();
        // A reset ends the stream as well.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.starts_with(b"LD\x12\xFF"), "{words:?}: {answer:?}");
    }
    // Without the token, neither a link nor a stream of a link can be opened.
    let fake = Fake::new(9, 1);
    let link = Purpose::Link { link: 5, comm: None, probe_local: false, ensure: false };
    assert_eq!(fake.dial(&engine, link.clone()).unwrap_err().kind(), ErrorKind::LinkFailed);
    let _link = fake.dial_with(&engine, TOKEN.as_bytes(), link).unwrap();
    assert!(fake.call(&engine, 5).is_err());
}

#[test]
fn calls_need_a_link_of_their_own() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let (fake, other) = (Fake::new(8, 1), Fake::new(9, 1));
    let _control = fake.link(&engine, 5).unwrap();
    assert_eq!(fake.call(&engine, 6).unwrap_err().kind(), ErrorKind::NotLinked);
    assert_eq!(other.call(&engine, 5).unwrap_err().kind(), ErrorKind::NotLinked);
    let call = fake.call(&engine, 5).unwrap();
    ask(&call, &Request::Ping);
    assert!(matches!(hear(&call).unwrap(), Reply::Done { .. }));
    ask(&call, &Request::Describe { name: Name::Row { cache: CacheId(4), row: 0 } });
    assert!(matches!(hear(&call).unwrap(), Reply::Failed { .. }));
    assert_eq!(engine.stats().links.len(), 1);
}

/// Returns the number of threads and of descriptors of this process.
fn resources() -> (usize, usize) {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    (count("/proc/self/task"), count("/proc/self/fd"))
}

/// A finalized engine keeps no thread and no descriptor, whichever calls were running.
#[test]
#[ignore = "started by the test below, as other tests open and close descriptors"]
fn finalizing() {
    if child_process::role().is_none() {
        return;
    }
    let before = resources();
    let shape = device(2, 1, 1 << 20);
    for way in WAYS {
        for round in 0..times(4) {
            let Pair { local, remote } = Pair::new(way);
            let local = Arc::new(local);
            let name = of(2, row(&Held::pool(&remote, &shape, Batch), 0));
            let call = |_| {
                let (local, shape) = (local.clone(), shape.clone());
                thread::spawn(move || {
                    let into = Held::pool(&local, &shape, Batch);
                    while pull_slot(&local, name, &into).is_ok() {}
                })
            };
            let callers: Vec<_> = (0..4).map(call).collect();
            thread::sleep(Duration::from_millis(u64::from(round) * 3));
            // Either the remote engine is dropped first, or this one while its calls run; then the last call drops it.
            if round % 2 == 1 {
                drop(local);
                thread::sleep(Duration::from_millis(5));
            }
            drop(remote);
            callers.into_iter().for_each(|caller| caller.join().unwrap());
        }
        eventually("the end of all threads and descriptors", || resources() == before);
    }
    report("done");
}

#[test]
fn finalizing_under_way_leaves_nothing() {
    assert_eq!(child_process::run("links::linking::finalizing", ""), ["done"]);
}

#[test]
fn a_listener_moves_between_addresses_of_one_port() {
    let engine = open(config(1, Way::Shm), Way::Shm);
    let at = engine.listening().unwrap();
    engine.switch_role(Role::Decoder, Some("127.0.0.1:0".parse().unwrap())).unwrap();
    assert_eq!(engine.listening(), Some(at), "port 0 keeps the port that it has");
    let everywhere = format!("0.0.0.0:{}", at.port()).parse().unwrap();
    engine.switch_role(Role::Prompt, Some(everywhere)).unwrap();
    assert_eq!(engine.listening(), Some(everywhere));
    assert!(!log::texts(&[&at.port().to_string(), "without a token"]).is_empty());
    // A refused address changes nothing.
    let foreign = format!("192.0.2.1:{}", at.port()).parse().unwrap();
    engine.switch_role(Role::Decoder, Some(foreign)).unwrap_err();
    assert_eq!((engine.listening(), engine.role()), (Some(everywhere), Role::Prompt));
    let local = open(config(2, Way::Shm), Way::Shm);
    let there = [PeerAddress { cluster: ClusterId(1), remote: vec![at], local: vec![] }];
    local.link_clusters(&there, LONG).remove(0).unwrap();
    assert_eq!(kind_of(engine.switch_role(Role::Mix, None)), ErrorKind::LinksExist);
    local.unlink_clusters(&there, LONG, false).remove(0).unwrap();
    engine.switch_role(Role::Mix, None).unwrap();
    assert_eq!(engine.listening(), None);
    local.link_clusters(&there, LONG).remove(0).unwrap_err();
    engine.switch_role(Role::Mix, Some(at)).unwrap();
    link(&local, &engine).unwrap();
    assert_eq!(local.stats().links[0].transport, "shm", "the local socket is back");
}

#[test]
fn links_count_what_they_do() {
    for way in WAYS {
        let pair = Pair::with(way, |config| config.host_pool = None);
        check_pull(&pair.local, &pair.remote);
        let links = pair.local.stats().links;
        assert!(links[0].outgoing && !pair.remote.stats().links[0].outgoing);
        let mapped = way.has_fabric() || way.shares() && way.addresses_devices();
        let streamed = if mapped { 0 } else { 128 };
        assert_eq!((links[0].requests.bytes, links[0].transfers.bytes), (streamed, 128), "{way:?}");
        assert!(links[0].requests.calls > u64::from(!mapped));
        let bare = Pair::with(way, |config| (config.host_pool, config.device_pool) = (None, None));
        assert_eq!(bare.local.stats().links[0].pools, if way.shares() { "none" } else { "stream" });
    }
}

/// An engine may end before its control thread has noticed a link.
#[test]
fn an_engine_that_ends_at_once_says_goodbye() {
    let local = open(config(1, Way::Tcp), Way::Tcp);
    for round in 0..100 {
        let remote = open(config(2, Way::Tcp), Way::Tcp);
        link(&local, &remote).unwrap();
        drop(remote);
        eventually("the end of the link", || local.stats().links.is_empty());
        let why = local.check_link(ClusterId(2)).unwrap_err().to_string();
        assert!(why.contains("the peer was closed"), "round {round}: {why}");
    }
}

/// The peer unlinks while it is asked to unlink. The request ends, and the peer's goodbye is read late.
#[test]
fn a_goodbye_that_is_read_late_counts() {
    let local = open(config(1, Way::Shm), Way::Shm);
    let (listener, fake, name) = Fake::on_this_host("late-goodbye");
    let (linked, (_greeted, control)) =
        listener.linked_by(&local, || (listener.greet_with(Some(name)), fake.linked()));
    linked.unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (call, purpose) = fake.greet();
            assert!(matches!(purpose, Purpose::Call { .. }), "{purpose:?}");
            let request = hear_request(&call).unwrap();
            assert!(matches!(request, Request::Unlink), "{request:?}");
            // The engine notices that it can no longer send only when it tries to.
            shutdown(&control, Shutdown::Read).unwrap();
            drop(call);
            thread::sleep(Duration::from_millis(200));
            say(&control, &ControlMessage::Bye { reason: "the peer unlinked".into(), unlinked: true });
        });
        local.unlink_clusters(&[listener.address()], LONG, false).remove(0).unwrap();
    });
    assert!(local.stats().links.is_empty());
}

/// A call fails with `NotLinked` if it needs another stream to a peer that no longer listens.
#[test]
fn a_peer_that_no_longer_listens_cannot_be_called() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let (fake, _control) = Fake::linked_to(&engine);
    drop(fake);
    fails_saying(engine.check_link(ClusterId(2)), ErrorKind::NotLinked, "cannot be reached");
}

#[test]
fn a_silent_link_is_replaced() {
    let engine = open_with(1, Way::Tcp, |config| config.links.heartbeat = Duration::from_millis(400));
    let fake = Fake::new(2, 1);
    let links = [(); 2].map(|()| fake.linked_by(&engine, || fake.linked()));
    assert!(links.iter().all(|(linked, _)| linked.is_ok()));
    assert_eq!(engine.stats().links.len(), 1);
}

/// A control message may arrive in pieces. Half a message does not count as a sign of life.
#[test]
fn half_a_control_message_is_no_sign_of_life() {
    let engine = open_with(1, Way::Tcp, |config| {
        (config.links.heartbeat, config.links.silence) = (Duration::from_millis(50), Duration::from_secs(2));
    });
    let control = Fake::new(2, 1).link(&engine, 7).unwrap();
    let ping = encode(&ControlMessage::Ping).unwrap();
    control.send(&ping[..3], soon()).unwrap();
    control.send(&ping[3..], soon()).unwrap();
    while hear::<ControlMessage>(&control).unwrap() != ControlMessage::Pong {}
    control.send(&ping[..3], soon()).unwrap();
    eventually("the end of the link", || engine.stats().links.is_empty());
    let why = engine.check_link(ClusterId(2)).unwrap_err().to_string();
    assert!(why.contains("no message from the peer"), "{why}");
}

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
    // With few open files, the limit of all links together is reached first: "too many call streams".
    assert!(refused.to_string().contains("too many "), "{refused}");
    assert!(streams.len() >= 64);
    answers(&control);
    streams.clear();
    eventually("room for one more", || fake.call(&engine, 7).is_ok());
}

#[test]
fn streams_that_were_not_asked_for_are_closed() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let fake = Fake::new(9, 1);
    let _control = fake.link(&engine, 7).unwrap();
    for _ in 0..8 {
        let stream = fake.dial(&engine, Purpose::Call { link: 7, reverse: true, rings: false }).unwrap();
        eventually("the end of the stream", || stream.abandoned());
    }
}
