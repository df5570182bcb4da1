//! The identity of peers: what a peer must prove, and that no peer takes the link, streams or local socket of another.
//!
//! `tests/test_link_security.py` and `tests/test_second_user.py` cover tokens and users between processes.

use std::fs;
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::{Config, Token};
use llm_datadist_core::testing::net::{Address, Transport, Unix};
use llm_datadist_core::testing::protocol::{
    Challenge, ControlMessage, HANDSHAKE_LIMIT, Hello, Proof, Purpose, Welcome, decode,
};
use llm_datadist_core::{ClusterId, ErrorKind};

use super::fake_peer::{Fake, hear, say, soon, welcome_mac};
use super::{LONG, Way, config, eventually, fails_saying, link, open};
use crate::{emulation, log};

/// The default configuration: no token, and no peer is admitted without a proof.
fn strict(cluster: u64, way: Way) -> Config {
    let mut config = config(cluster, way);
    config.links.accept_remote = false;
    config
}

/// The name of this host, which peers on it know.
fn host() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned()
}

/// Checks that a link still answers.
pub(super) fn answers(control: &llm_datadist_core::testing::net::Stream) {
    say(control, &ControlMessage::Ping);
    // The engine sends heartbeats too.
    while hear::<ControlMessage>(control).unwrap() != ControlMessage::Pong {}
}

#[test]
fn a_stranger_is_refused_for_the_reason_that_is_logged() {
    let engine = open(strict(1, Way::Tcp), Way::Tcp);
    let stranger = Fake::new(9, 1);
    for purpose in [
        Purpose::Link { link: 5, comm: None, probe_local: false, ensure: false },
        Purpose::Link { link: 5, comm: None, probe_local: true, ensure: false },
        Purpose::Call { link: 5, reverse: false, rings: false },
        Purpose::Meet,
    ] {
        let refused = stranger.dial(&engine, purpose).unwrap_err();
        let text = refused.to_string();
        assert_eq!(refused.kind(), ErrorKind::LinkFailed);
        assert!(text.contains("no token is set") && text.contains("option=token or accept_remote"), "{text}");
    }
    assert!(engine.stats().links.is_empty());
    // Any process of this host learns the name of the local socket, and nothing else.
    assert!(stranger.local_of(&engine, host()).is_some_and(|name| name.starts_with("llm_datadist.")));
    assert!(!log::errors(&["refused a connection from 127.0.0.1:", "no token is set"]).is_empty());
}

/// Without `/proc`, a process has no name of its host to compare. The refusal says so.
#[test]
fn refusal_of_process_without_proc_names_the_cause() {
    let engine = open(strict(1, Way::Tcp), Way::Tcp);
    let text = Fake::new(9, 1).try_local_of(&engine, "unknown 5".into()).unwrap_err().to_string();
    for part in ["boot_id", "mount /proc", "option=token"] {
        assert!(text.contains(part), "{text}");
    }
    let text = Fake::new(9, 1).try_local_of(&engine, "another host".into()).unwrap_err().to_string();
    assert!(!text.contains("/proc"), "{text}");
}

#[test]
fn a_peer_with_a_token_learns_that_the_other_side_has_none() {
    for accept_remote in [false, true] {
        let [mut with, mut without] = [1, 2].map(|cluster| strict(cluster, Way::Shm));
        (with.links.accept_remote, without.links.accept_remote) = (accept_remote, accept_remote);
        with.links.token = Some(Token::new("sixteen letters or more"));
        let refused = link(&open(with, Way::Shm), &open(without, Way::Shm));
        fails_saying(refused, ErrorKind::LinkFailed, "uses a token, and this side has none");
    }
}

#[test]
fn a_listener_that_proves_nothing_is_not_linked() {
    for way in [Way::Shm, Way::Tcp] {
        let engine = open(strict(1, way), way);
        let fake = Fake::new(2, 1);
        let refused = fake.linked_by(&engine, || fake.greet()).0;
        fails_saying(refused, ErrorKind::LinkFailed, "has not proved");
        assert!(engine.stats().links.is_empty());
    }
}

#[test]
fn the_local_socket_takes_no_descriptor_of_a_stranger() {
    if emulation::REFUSED_DESCRIPTORS.skips() {
        return;
    }
    let engine = open(strict(1, Way::Shm), Way::Shm);
    let name = Fake::new(9, 1).local_of(&engine, host()).unwrap();
    let stream = Unix.dial(&Address::Unix(name), soon()).unwrap();
    let file = fs::File::open("/dev/null").unwrap();
    let refused = stream.send_with(b"L", &[file.as_fd()], soon()).unwrap_err();
    assert!(refused.to_string().contains("errno=1"), "{refused}");
}

/// Another process may know the cluster id and the instance of a peer. One of many rivals is admitted.
#[test]
fn nobody_takes_the_place_of_a_link_that_works() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let link = |instance| {
        let peer = Fake::new(2, instance);
        peer.link(&engine, instance).ok().map(|control| (peer, instance, control))
    };
    let mut admitted: Vec<_> = thread::scope(|scope| {
        let rivals: Vec<_> = (1..=16).map(|instance| scope.spawn(move || link(instance))).collect();
        rivals.into_iter().filter_map(|rival| rival.join().unwrap()).collect()
    });
    let (peer, instance, control) = admitted.pop().unwrap();
    assert!(admitted.is_empty());
    for id in [instance, instance + 1] {
        fails_saying(Fake::new(2, instance).link(&engine, id), ErrorKind::LinkFailed, "its link works");
    }
    answers(&control);
    peer.call(&engine, instance).unwrap();
    // The process itself closes its link before it makes another one.
    drop(control);
    let _again = peer.link(&engine, 99).unwrap();
    eventually("one link", || engine.stats().links.len() == 1);
    assert!(peer.call(&engine, instance).is_err());
    peer.call(&engine, 99).unwrap();
}

/// A process that claims to be the peer can make a link in the other direction. Calls do not take it.
#[test]
fn a_link_made_by_a_claimant_takes_no_calls() {
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

/// The proof covers the name of the local socket, so that nobody between the two sides can change it.
#[test]
fn a_welcome_cannot_be_changed_on_the_way() {
    let local = open(config(1, Way::Shm), Way::Shm);
    let fake = Fake::new(2, 1);
    let (refused, _stream) = fake.linked_by(&local, || {
        let stream = fake.accept();
        let (_, body) = stream.receive(HANDSHAKE_LIMIT, Duration::ZERO, soon()).unwrap().unwrap();
        let hello: Hello = decode(&body).unwrap();
        assert!(matches!(hello.purpose, Purpose::Link { probe_local: true, .. }));
        say(&stream, &Challenge { nonce: [7; 16] });
        hear::<Proof>(&stream).unwrap();
        let welcome = Welcome { from: fake.party, mac: [0; 32], local: None, secret: None };
        let mac = welcome_mac(b"", &body, [7; 16], &welcome);
        say(&stream, &Welcome { mac, local: Some("elsewhere".into()), ..welcome });
        stream
    });
    fails_saying(refused, ErrorKind::LinkFailed, "token");
}

#[test]
fn another_process_at_the_local_socket_is_not_the_peer() {
    let [local, impostor] = [1, 2].map(|cluster| open(config(cluster, Way::Shm), Way::Shm));
    let socket = Fake::new(1, 5).local_of(&impostor, host()).unwrap();
    let fake = Fake::new(2, 1);
    let (linked, _streams) = fake.linked_by(&local, || (fake.greet_with(Some(socket)), fake.linked()));
    linked.unwrap();
    assert_eq!(local.stats().links[0].transport, "tcp");
    assert!(!log::texts(&["another process answers"]).is_empty());
    eventually("nothing at the impostor", || impostor.stats().links.is_empty());
}
