//! How links end: goodbyes, peers that are gone or silent, and streams beyond what one peer may have.

use std::thread;
use std::time::Duration;

use llm_datadist_core::testing::net::{Address, Unix};
use llm_datadist_core::testing::protocol::{Control, Purpose, Request, encode};
use llm_datadist_core::{ClusterId, ErrorKind};
use rustix::net::{Shutdown, shutdown};

use super::fake_peer::{Fake, hear, say, soon};
use super::identity::answers;
use super::{LONG, Way, config, eventually, link, open};

/// An engine may end before its control thread has heard of a link.
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

/// The peer unlinks while it is asked to: the request ends, it takes no more messages, and its goodbye is read late.
#[test]
fn a_goodbye_that_is_read_late_counts() {
    let local = open(config(1, Way::Shm), Way::Shm);
    let name = format!("llm-datadist-test-{}-late-goodbye", std::process::id());
    let (listener, fake) = (Fake::new(2, 1), Fake::at(&Unix, &Address::Unix(name.clone()), 2, 1));
    let (linked, (_greeted, control)) =
        listener.linked_by(&local, || (listener.greet_with(Some(name)), fake.linked()));
    linked.unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (call, purpose) = fake.greet();
            assert!(matches!(purpose, Purpose::Call { .. }), "{purpose:?}");
            let request: Request = hear(&call).unwrap();
            assert!(matches!(request, Request::Unlink { .. }), "{request:?}");
            // The engine notices only when it sends that it can send no more.
            shutdown(&control, Shutdown::Read).unwrap();
            drop(call);
            thread::sleep(Duration::from_millis(200));
            say(&control, &Control::Bye { reason: "the peer unlinked".into(), unlinked: true });
        });
        local.unlink_clusters(&[listener.address()], LONG, false).remove(0).unwrap();
    });
    assert!(local.stats().links.is_empty());
}

/// A call that needs one more stream to a peer that no longer listens is not linked.
#[test]
fn a_peer_that_no_longer_listens_cannot_be_called() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let fake = Fake::new(2, 1);
    let (linked, _control) = fake.linked_by(&engine, || fake.linked());
    linked.unwrap();
    drop(fake);
    let error = engine.check_link(ClusterId(2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotLinked, "{error}");
    assert!(error.to_string().contains("cannot be reached"), "{error}");
}

#[test]
fn a_silent_link_is_replaced() {
    let mut short = config(1, Way::Tcp);
    short.links.heartbeat = Duration::from_millis(400);
    let engine = open(short, Way::Tcp);
    let fake = Fake::new(2, 1);
    let links = [(); 2].map(|()| fake.linked_by(&engine, || fake.linked()));
    assert!(links.iter().all(|(linked, _)| linked.is_ok()));
    assert_eq!(engine.stats().links.len(), 1);
}

/// A control message may arrive in pieces. Half of one is no sign of life.
#[test]
fn half_a_control_message_is_no_sign_of_life() {
    let mut short = config(1, Way::Tcp);
    (short.links.heartbeat, short.links.silence) = (Duration::from_millis(50), Duration::from_millis(400));
    let engine = open(short, Way::Tcp);
    let control = Fake::new(2, 1).link(&engine, 7).unwrap();
    let ping = encode(&Control::Ping).unwrap();
    control.send(&ping[..3], soon()).unwrap();
    control.send(&ping[3..], soon()).unwrap();
    while hear::<Control>(&control).unwrap() != Control::Pong {}
    control.send(&ping[..3], soon()).unwrap();
    eventually("the end of the link", || engine.stats().links.is_empty());
    let why = engine.check_link(ClusterId(2)).unwrap_err().to_string();
    assert!(why.contains("no sign of life"), "{why}");
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
    assert!(refused.to_string().contains("too many streams"), "{refused}");
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
        let stream = fake.dial(&engine, Purpose::Call { link: 7, reverse: true }).unwrap();
        eventually("the end of the stream", || stream.abandoned());
    }
}
