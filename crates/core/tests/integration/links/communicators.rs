//! Communicators: members that arrive late or return are linked; ports and links end with the last user.
//!
//! `tests/test_rank_table.py` covers their results between processes.

use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::{CommStatus, Config, DataDist, Role, Token};
use llm_datadist_core::{CacheKind, ClusterId, ErrorKind};

use llm_datadist_core::testing::protocol::{REFUSAL, VERSION};

use super::{Held, Way, check_pull, config, device, eventually, fails_with, of, open, pull_slot, row};
use crate::log;

const TABLE: &str = r#"{"server_count": "1", "server_list": [{"server_id": "127.0.0.1", "device": [
    {"device_id": "0", "rank_id": "0"}, {"device_id": "1", "rank_id": "1"}]}],
    "status": "completed", "version": "1.0"}"#;
/// The addresses are reserved for documentation, so that no host has them.
const ELSEWHERE: &str = r#"{"server_count": "2", "server_list": [
    {"server_id": "192.0.2.1", "device": [{"device_id": "0", "rank_id": "0"}]},
    {"server_id": "192.0.2.2", "device": [{"device_id": "0", "rank_id": "1"}]}], "status": "completed", "version": "1.0"}"#;
const LIMIT: Duration = Duration::from_secs(15);

/// Returns a port below those that the system assigns. It and the next ones are used by no other test while this process runs: a
/// name in the abstract namespace of Unix sockets claims them, as `free_ports` of the Python tests does.
fn port() -> u16 {
    static CLAIMS: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());
    for first in (12_000..32_000).step_by(16) {
        let name = SocketAddr::from_abstract_name(format!("llm_datadist tests: ports from {first}")).unwrap();
        if let Ok(claim) = UnixListener::bind_addr(&name) {
            CLAIMS.lock().unwrap().push(claim);
            if (first..first + 16).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
                return first;
            }
        }
    }
    panic!("no free ports");
}

fn member_with(cluster: u64, way: Way, port: u16, change: impl Fn(&mut Config)) -> DataDist {
    let mut config = config(cluster, way);
    (config.links.listen, config.links.rank_port, config.links.total) = (None, port, LIMIT);
    change(&mut config);
    open(config, way)
}

/// Clusters 1 and 2, which use one port.
fn members(way: Way, limit: Duration) -> (u16, [DataDist; 2]) {
    let port = port();
    (port, [1, 2].map(|cluster| member_with(cluster, way, port, |config| config.links.total = limit)))
}

/// Enters a communicator whose name only this process uses.
fn enter(engine: &DataDist, name: &str) -> u64 {
    enter_with(engine, name, TABLE)
}

fn enter_with(engine: &DataDist, name: &str, table: &str) -> u64 {
    let name = format!("{name} {}", std::process::id());
    engine.link(&name, &[(ClusterId(1), 0), (ClusterId(2), 1)], table).unwrap()
}

fn ready(engine: &DataDist, comm: u64) {
    eventually("a communicator", || match engine.comm_status(comm).unwrap() {
        CommStatus::Preparing => false,
        CommStatus::Ready => true,
        CommStatus::Failed => panic!("{comm}: {:#?}", log::texts(&["failed after"])),
    });
}

/// Has both members enter a communicator, and waits for it.
fn meet(members: &[DataDist; 2], name: &str) -> [u64; 2] {
    let comms = members.each_ref().map(|member| enter(member, name));
    members.iter().zip(comms).for_each(|(member, comm)| ready(member, comm));
    comms
}

#[test]
fn the_latest_of_two_communicators_carries_the_calls() {
    for way in [Way::Shm, Way::Tcp] {
        let (_, members) = members(way, LIMIT);
        let [low, high] = &members;
        assert_eq!(enter(low, "first"), 1);
        assert_eq!(low.comm_status(1).unwrap(), CommStatus::Preparing);
        assert_eq!(low.switch_role(Role::Mix, None).unwrap_err().kind(), ErrorKind::LinksExist);
        thread::scope(|scope| {
            let early = scope.spawn(|| check_pull(low, high));
            assert_eq!(enter(high, "first"), 1);
            early.join().unwrap();
        });
        ready(high, 1);
        assert_eq!(low.stats().links[0].transport, if way == Way::Shm { "shm" } else { "tcp" });
        assert_eq!(meet(&members, "second"), [2, 2]);
        let calls = || low.stats().links.iter().map(|link| link.transfers.calls).collect::<Vec<_>>();
        let before = calls();
        check_pull(low, high);
        assert_eq!(calls(), [before[0], before[1] + 1]);
        low.unlink(1).unwrap();
        check_pull(low, high);
        check_pull(high, low);
        low.unlink(2).unwrap();
        eventually("the end of the links", || low.stats().links.is_empty() && high.stats().links.is_empty());
        for unknown in [0, 1, 2, 3, u64::MAX] {
            assert_eq!(low.unlink(unknown).unwrap_err().kind(), ErrorKind::NotLinked);
            assert_eq!(low.comm_status(unknown).unwrap_err().kind(), ErrorKind::NotLinked);
        }
    }
}

#[test]
fn members_exchange_metadata() {
    for way in [Way::Shm, Way::Tcp] {
        let port = port();
        let members = [(1, "one"), (2, "two")].map(|(cluster, metadata)| {
            member_with(cluster, way, port, |config| config.metadata = metadata.into())
        });
        meet(&members, "metadata");
        let [one, two] = members.each_ref().map(|member| member.peers().remove(0).metadata);
        assert_eq!((one.as_slice(), two.as_slice()), (&b"two"[..], &b"one"[..]));
    }
}

#[test]
fn members_of_different_names_fail_and_may_enter_again() {
    for way in [Way::Shm, Way::Tcp] {
        let (_, members) = members(way, Duration::from_secs(3));
        enter(&members[0], "one");
        enter(&members[1], "another");
        assert_eq!(members[1].check_link(ClusterId(1)).unwrap_err().kind(), ErrorKind::NotLinked);
        for engine in &members {
            eventually("the failure", || engine.comm_status(1).unwrap() == CommStatus::Failed);
            assert!(engine.stats().links.is_empty());
        }
        eventually("a line that says why", || !log::texts(&["failed after", "rank 0"]).is_empty());
        assert_eq!(meet(&members, "same"), [2, 2]);
        check_pull(&members[0], &members[1]);
    }
}

/// Different modes cannot match later, so neither member waits for its limit.
#[test]
fn members_of_different_modes_fail_at_once() {
    for first in [0, 1] {
        let (port, name) = (port(), format!("modes {first}"));
        let members = [1, 2].map(|cluster| {
            member_with(cluster, Way::Shm, port, |config| {
                config.links.total = Duration::from_secs(3600);
                config.remote_accessible = cluster == 2;
            })
        });
        for at in [first, 1 - first] {
            assert_eq!(enter(&members[at], &name), 1);
        }
        for member in &members {
            eventually("the failure", || member.comm_status(1).unwrap() == CommStatus::Failed);
        }
        let lines = || log::errors(&[&name, "one-sided transfers are"]).len();
        eventually("the errors of both in the log", || lines() >= 2);
    }
}

/// Tokens do not match later, so the member that dials does not wait for its limit. The other one cannot know who the refused
/// peer is, so it waits, and its report has the reason.
#[test]
fn dialing_member_with_another_token_fails_at_once() {
    for (way, token) in
        [(Way::Tcp, Some("the second token, long enough")), (Way::Shm, None), (Way::Tcp, None)]
    {
        let (port, name) = (port(), format!("tokens {way:?} {}", token.is_some()));
        let members = [1, 2].map(|cluster| {
            member_with(cluster, way, port, |config| {
                let known = if cluster == 1 { Some("the first token, long enough") } else { token };
                config.links.token = known.map(Token::new);
                config.links.accept_remote = false;
                config.links.total =
                    if cluster == 1 { Duration::from_secs(3) } else { Duration::from_secs(3600) };
            })
        });
        members.iter().for_each(|member| _ = enter(member, &name));
        eventually("the failure", || members[1].comm_status(1).unwrap() == CommStatus::Failed);
        let error = fails_with(members[1].check_link(ClusterId(1)), ErrorKind::NotLinked);
        let text = error.to_string();
        assert!(text.contains("token") && text.contains("option="), "{text}");
        let of_dialer = [name.as_str(), "cluster 1 cannot be linked", "token"];
        eventually("the error of the dialing member", || !log::errors(&of_dialer).is_empty());
        eventually("the failure", || members[0].comm_status(1).unwrap() == CommStatus::Failed);
        let of_listener = [name.as_str(), "did not connect", "(reason: ", "token"];
        eventually("the report of the listening member", || !log::errors(&of_listener).is_empty());
    }
}

/// Refuses the next connection at `listener` as an engine of another version does.
fn refuse_as_another_version(listener: &TcpListener) {
    use std::io::{Read, Write};
    let (mut stream, _) = listener.accept().unwrap();
    let _ = stream.read(&mut [0; 4096]).unwrap();
    let text = b"\x09\0\0\0the peer uses another version";
    let mut frame = vec![b'L', b'D', VERSION + 1, REFUSAL];
    frame.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
    frame.extend(text);
    // Fails if the member has stopped.
    let _ = stream.write_all(&frame);
}

/// The process at the first port of the member refuses as an engine of another version does. The member may be at another port,
/// or start later, so the refusal is only the reason that is reported at the limit.
#[test]
fn engine_of_another_version_does_not_end_the_search() {
    let port = port();
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let (refusing, refused) = mpsc::channel();
    // Ends with the test process.
    thread::spawn(move || {
        loop {
            refuse_as_another_version(&listener);
            let _ = refusing.send(());
        }
    });
    let high = member_with(2, Way::Tcp, port, |config| config.links.total = Duration::from_secs(3));
    let alone = enter(&high, "other version alone");
    eventually("the failure", || high.comm_status(alone).unwrap() == CommStatus::Failed);
    let text = high.check_link(ClusterId(1)).unwrap_err().to_string();
    assert!(text.contains("the peer uses another version"), "{text}");
    let line = ["other version alone", "failed after 3000 ms", "the peer uses another version"];
    eventually("the reason in the log", || !log::errors(&line).is_empty());

    drop(high);
    while refused.try_recv().is_ok() {}
    let high = member_with(2, Way::Tcp, port, |_| ());
    let searching = enter(&high, "other version and member");
    refused.recv().unwrap();
    let low = member_with(1, Way::Tcp, port, |_| ());
    let listening = enter(&low, "other version and member");
    ready(&low, listening);
    ready(&high, searching);
}

#[test]
fn a_member_that_returns_after_the_limit_is_linked_again() {
    let (port, members) = members(Way::Tcp, Duration::from_secs(3));
    let comms = meet(&members, "long");
    let dialled = members.each_ref().map(|engine| engine.stats().links[0].outgoing);
    assert_eq!(dialled, [false, true], "the higher rank dials");
    let [low, high] = members;
    drop(low);
    let address = format!("127.0.0.1:{port}");
    eventually("the line about the lost member", || {
        !log::texts(&[&address, "still searches for"]).is_empty()
    });
    assert_eq!(high.comm_status(comms[1]).unwrap(), CommStatus::Ready);
    let low = member_with(1, Way::Tcp, port, |_| ());
    let again = enter(&low, "long");
    ready(&low, again);
    eventually("the link of the other side", || high.check_link(ClusterId(1)).is_ok());
    // A member that leaves is not searched for.
    low.unlink(again).unwrap();
    eventually("the end of the link", || high.stats().links.is_empty());
    thread::sleep(Duration::from_millis(100));
    assert!(high.stats().links.is_empty());
}

/// A link that is made while its communicator is being left does not stay.
#[test]
fn a_communicator_that_is_left_at_once_leaves_nothing() {
    let (_, members) = members(Way::Tcp, LIMIT);
    for round in 0..40u64 {
        let comms = members.each_ref().map(|member| enter(member, "brief"));
        thread::sleep(Duration::from_micros(round * 97 % 3000));
        for (member, comm) in members.iter().zip(comms) {
            member.unlink(comm).unwrap();
            assert!(member.stats().links.is_empty(), "round {round}");
        }
    }
    thread::sleep(Duration::from_millis(50));
    assert!(members.iter().all(|member| member.stats().links.is_empty()));
    meet(&members, "last");
}

/// Communicators entered at once share one listener, which ends with the last of them.
#[test]
fn communicators_share_a_listener() {
    let port = port();
    let engine = member_with(1, Way::Tcp, port, |_| ());
    let comms: Vec<u64> = thread::scope(|scope| {
        let engine = &engine;
        let entering: Vec<_> =
            (0..8).map(|number| scope.spawn(move || enter(engine, &format!("shared {number}")))).collect();
        entering.into_iter().map(|entered| entered.join().unwrap()).collect()
    });
    let bind = |port| TcpListener::bind(("127.0.0.1", port));
    assert!(bind(port + 1).is_ok(), "a second listener took the next port");
    for comm in comms {
        assert!(bind(port).is_err());
        engine.unlink(comm).unwrap();
    }
    eventually("the port", || bind(port).is_ok());
}

/// Two jobs on one host use the same names, each with a port of its own.
#[test]
fn jobs_with_other_ports_keep_apart() {
    let jobs = [(); 2].map(|()| members(Way::Shm, LIMIT).1);
    jobs.iter().flatten().for_each(|engine| _ = enter(engine, "job"));
    for (seed, [low, high]) in jobs.iter().enumerate() {
        ready(low, 1);
        ready(high, 1);
        let [source, into] =
            [low, high].map(|engine| Held::pool(engine, &device(2, 1, 64), CacheKind::Batch));
        let bytes = source.fill(seed as u8);
        pull_slot(high, of(1, row(&source, 0)), &into).unwrap();
        assert!(into.read() == bytes, "the bytes of the other job");
    }
}

#[test]
fn an_address_of_another_host_opens_all_interfaces_only_with_a_token() {
    for token in [None, Some("sixteen characters")] {
        let port = port();
        let engine = member_with(1, Way::Shm, port, |config| {
            config.links.accept_remote = false;
            config.links.token = token.map(Token::new);
        });
        enter_with(&engine, &format!("elsewhere {port}"), ELSEWHERE);
        assert_eq!(TcpStream::connect(("127.0.0.1", port)).is_ok(), token.is_some());
        let line = token.map_or("open to members of this host only", |_| "listens on all interfaces");
        assert!(!log::texts(&[&format!("elsewhere {port}"), line]).is_empty());
    }
}
