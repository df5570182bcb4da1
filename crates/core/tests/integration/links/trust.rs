//! Who is admitted without a token, what a peer that stalls costs, and what a communicator learns at once.
//!
//! Not for: other users of the host, and attacks by whole processes (`tests/test_hostile_peers.py`).

use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use llm_datadist_core::testing::net::{Address, Stream, Transport, Unix};
use llm_datadist_core::testing::plan::SpanList;
use llm_datadist_core::testing::protocol::{
    Comm, Control, Purpose, Reply, Request, WireName, WirePlan, WireSpan, WireSteps,
};
use llm_datadist_core::{
    CacheKind, ClusterId, CommStatus, Config, DataDist, ErrorKind, Layers, Placement, PullRows,
};

use super::fake::{Fake, hear, say};
use super::{Held, LONG, Way, config, eventually, link, of, open, row};
use crate::bed::desc;
use crate::log;

const SLOT: PullRows = PullRows::Slot { local: 0, size: -1 };

/// A configuration as most users have it: no token, and nobody is believed without a proof.
fn strict(cluster: u64, way: Way) -> Config {
    let mut config = config(cluster, way);
    config.links.accept_remote = false;
    config
}

fn works(local: &DataDist, remote: &DataDist) {
    let shape = desc(Placement::Device, 2, 1, 64);
    let into = Held::new(local, false, &shape, CacheKind::Batch, &[]);
    let source = Held::new(remote, false, &shape, CacheKind::Batch, &[]);
    let bytes = source.fill(1);
    local.pull(of(remote.config().cluster.0, row(&source, 0)), &into.end(), &SLOT, Layers::ALL).unwrap();
    assert!(into.read() == bytes);
}

#[test]
fn processes_of_one_user_link_without_a_token_over_every_transport() {
    for way in [Way::Shm, Way::Tcp] {
        let (local, remote) = (open(strict(1, way), way), open(strict(2, way), way));
        link(&local, &remote).unwrap();
        let expected = if way == Way::Shm { "shm" } else { "tcp" };
        assert_eq!(local.stats().links[0].transport, expected);
        works(&local, &remote);
        works(&remote, &local);
    }
}

#[test]
fn stranger_over_tcp_is_refused_with_the_reason_that_is_logged() {
    let engine = open(strict(1, Way::Tcp), Way::Tcp);
    let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned();
    let fake = Fake::new(9, 1);
    let purposes = [
        Purpose::Link { link: 5, comm: None, probe_local: false },
        Purpose::Link { link: 5, comm: None, probe_local: true },
        Purpose::Call { link: 5, reverse: false },
        Purpose::Meet,
    ];
    for purpose in purposes {
        let refused = fake.dial(&engine, purpose).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::LinkFailed);
        let text = refused.to_string();
        assert!(text.contains("no token is set") && text.contains("llm.LinkAcceptRemote = 1"), "{text}");
    }
    assert!(engine.stats().links.is_empty());
    // The name of the local socket is all that a process of this host learns, whoever it is.
    assert!(fake.local_of(&engine, host).is_some_and(|name| name.starts_with("llm_datadist.")));
    assert!(!log::errors(&["refused a connection from 127.0.0.1:", "no token is set"]).is_empty());
}

#[test]
fn peer_with_a_token_is_told_that_the_other_side_has_none() {
    for accept_remote in [false, true] {
        let mut without = strict(1, Way::Shm);
        without.links.accept_remote = accept_remote;
        let mut with = strict(2, Way::Shm);
        with.links.accept_remote = accept_remote;
        with.links.token = Some(llm_datadist_core::Token::new("sixteen letters or more"));
        let (local, remote) = (open(with, Way::Shm), open(without, Way::Shm));
        let refused = link(&local, &remote).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::LinkFailed);
        assert!(refused.to_string().contains("uses a token, and this side has none"), "{refused}");
    }
}

#[test]
fn listener_that_proves_nothing_is_not_linked() {
    for way in [Way::Shm, Way::Tcp] {
        let engine = open(strict(1, way), way);
        let fake = Fake::new(2, 1);
        thread::scope(|scope| {
            let peer = scope.spawn(|| fake.greet());
            let refused = engine.link_clusters(&[fake.address()], LONG).remove(0).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::LinkFailed);
            assert!(refused.to_string().contains("has not proved"), "{refused}");
            drop(peer.join().unwrap());
        });
        assert!(engine.stats().links.is_empty());
    }
}

#[test]
fn peer_that_does_not_read_its_control_stream_loses_only_its_own_link() {
    let (local, remote) = (open(config(1, Way::Tcp), Way::Tcp), open(config(2, Way::Tcp), Way::Tcp));
    link(&local, &remote).unwrap();
    let fake = Fake::new(9, 1);
    let control = fake.link(&remote, 7).unwrap();
    // Every ping is answered; none of the answers is read.
    thread::scope(|scope| {
        scope.spawn(|| {
            let pings = llm_datadist_core::testing::protocol::encode(&Control::Ping).unwrap().repeat(4096);
            let soon = || llm_datadist_core::Deadline::after(LONG);
            while control.send(&pings, soon()).is_ok() {}
        });
        eventually("the end of the link that is not read", || remote.stats().links.len() == 1);
        works(&local, &remote);
    });
    let why = remote.check_link(ClusterId(9)).unwrap_err().to_string();
    assert!(why.contains("does not read") || why.contains("broke"), "{why}");
}

/// A plan of one span: `len` bytes of one tensor.
fn plan(len: u64) -> WirePlan {
    let span = WireSpan { src: 0, dst: 0, len, count: 1, src_step: 0, dst_step: 0 };
    let steps = WireSteps::Spans { waves: vec![1], spans: SpanList::pack([span]).unwrap() };
    WirePlan { num_tensors: 1, src_tensor: 0, dst_tensor: 0, steps }
}

#[test]
fn peer_that_stalls_loses_its_rows_and_keeps_no_other_waiting() {
    const BYTES: u64 = 32 << 20;
    let mut short = config(2, Way::Tcp);
    short.links.heartbeat = Duration::from_millis(100);
    short.links.silence = Duration::from_millis(700);
    let (local, remote) = (open(config(1, Way::Tcp), Way::Tcp), open(short, Way::Tcp));
    link(&local, &remote).unwrap();
    let shape = desc(Placement::Device, 1, 1, BYTES as usize);
    let held = Held::new(&remote, false, &shape, CacheKind::Batch, &[]);
    let fake = Fake::new(9, 1);
    let control = fake.link(&remote, 7).unwrap();
    // More calls than there are threads, none of whose bytes are read.
    let name = WireName::Row { cache: held.cache.id().0, row: 0 };
    let read = Request::Read {
        name,
        cache: held.cache.id().0,
        plan: plan(BYTES),
        from: 0,
        to: BYTES,
        limit_ms: 600_000,
    };
    let calls: Vec<Stream> = (0..40)
        .map(|_| {
            let call = fake.call(&remote, 7).unwrap();
            say(&call, &read);
            call
        })
        .collect();
    assert!(matches!(hear::<Reply>(&calls[0]).unwrap(), Reply::Ready { bytes: BYTES }));
    works(&local, &remote);
    // The rows come free though the caller announced ten minutes, while its link lives on what it says.
    thread::scope(|scope| {
        let speaking = scope.spawn(|| {
            while remote.stats().links.len() == 2 {
                say(&control, &Control::Pong);
                if remote.copy_blocks(&held.end(), &[]).is_err() {
                    break;
                }
                thread::sleep(Duration::from_millis(50));
                if calls.iter().all(Stream::abandoned) {
                    break;
                }
            }
        });
        let into = Held::new(&local, false, &shape, CacheKind::Batch, &[]);
        let push = local.push(
            &into.end(),
            of(2, row(&held, 0)),
            &llm_datadist_core::PushRows::Slot { local: 0 },
            Layers::ALL,
        );
        push.unwrap();
        speaking.join().unwrap();
    });
}

const TABLE: &str = r#"{"server_count": "1", "server_list": [{"server_id": "127.0.0.1", "device": [
    {"device_id": "0", "rank_id": "0"}, {"device_id": "1", "rank_id": "1"}]}],
    "status": "completed", "version": "1.0"}"#;

#[test]
fn members_of_unequal_modes_fail_at_once_on_both_sides() {
    for first in [0, 1] {
        let members = [1, 2].map(|cluster| {
            let mut config = strict(cluster, Way::Shm);
            config.links.listen = None;
            config.links.rank_port = 24_100 + 20 * first as u16;
            config.links.total = Duration::from_secs(3600);
            config.remote_accessible = cluster == 2;
            open(config, Way::Shm)
        });
        let name = format!("modes {first} {}", std::process::id());
        let enter =
            |at: usize| members[at].link(&name, &[(ClusterId(1), 0), (ClusterId(2), 1)], TABLE).unwrap();
        let (one, other) = (enter(first), enter(1 - first));
        for (at, comm) in [(first, one), (1 - first, other)] {
            eventually("the failure", || members[at].comm_status(comm).unwrap() == CommStatus::Failed);
        }
        let lines = log::errors(&[&name, "llm.EnableRemoteCacheAccessible is"]);
        assert!(lines.len() >= 2, "{lines:#?}");
    }
}

#[test]
fn member_that_knocks_is_known_or_ignored() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let fake = Fake::new(2, 1);
    let comm = Comm { name: "nobody's".into(), members: vec![(1, 0), (2, 1)], listener: String::new() };
    // It is welcomed, and nothing comes of it.
    drop(fake.dial(&engine, Purpose::Knock { comm }).unwrap());
    assert!(engine.stats().links.is_empty());
}

#[test]
fn local_socket_takes_no_descriptor_of_a_stranger() {
    // Linux 6.16 is the first that can refuse them.
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let version: Vec<u32> = release.split(['.', '-']).map_while(|part| part.parse().ok()).take(2).collect();
    if version < vec![6, 16] {
        return crate::bed::skipped("the kernel is older than 6.16");
    }
    let engine = open(strict(1, Way::Shm), Way::Shm);
    let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned();
    let name = Fake::new(9, 1).local_of(&engine, host).unwrap();
    let stream = Unix.dial(&Address::Unix(name), llm_datadist_core::Deadline::after(LONG)).unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    let sent = stream.send_with(b"L", &[file.as_fd()], llm_datadist_core::Deadline::after(LONG));
    assert!(sent.unwrap_err().to_string().contains("errno=1"), "EPERM");
}

#[test]
fn streams_that_nobody_asked_for_are_not_kept() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let fake = Fake::new(9, 1);
    let _control = fake.link(&engine, 7).unwrap();
    for _ in 0..8 {
        let stream = fake.dial(&engine, Purpose::Call { link: 7, reverse: true }).unwrap();
        eventually("the end of a stream that was not asked for", || stream.abandoned());
    }
}

/// A table whose first member goes by an address that is not one of this host (documentation addresses never are).
const ELSEWHERE: &str = r#"{"server_count": "2", "server_list": [
    {"server_id": "192.0.2.1", "device": [{"device_id": "0", "rank_id": "0"}]},
    {"server_id": "192.0.2.2", "device": [{"device_id": "0", "rank_id": "1"}]}], "status": "completed", "version": "1.0"}"#;

#[test]
fn address_of_another_host_opens_all_interfaces_only_to_peers_that_prove_themselves() {
    for (port, token) in [(24_160_u16, None), (24_180, Some("sixteen characters"))] {
        let mut config = strict(1, Way::Shm);
        config.links.listen = None;
        config.links.rank_port = port;
        config.links.token = token.map(llm_datadist_core::Token::new);
        let engine = open(config, Way::Shm);
        let name = format!("elsewhere {port} {}", std::process::id());
        engine.link(&name, &[(ClusterId(1), 0), (ClusterId(2), 1)], ELSEWHERE).unwrap();
        let listens = std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
        assert_eq!(listens, token.is_some());
        let line =
            if token.is_some() { "listens on all interfaces" } else { "open to members of this host only" };
        assert!(!log::texts(&[&name, line]).is_empty());
    }
}
