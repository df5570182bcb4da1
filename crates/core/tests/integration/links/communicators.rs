//! Links by rank table: who comes first does not matter, who is missing is waited for, who comes back is let in.
//!
//! Not for: reading the table (`ranks`).

use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::{CacheKind, ClusterId, CommStatus, DataDist, ErrorKind, Layers, Placement, PullRows};

use super::{Held, Way, config, eventually, of, open, row};
use crate::bed::desc;
use crate::log;

const TABLE: &str = r#"{"server_count": "1", "server_list": [{"server_id": "127.0.0.1", "device": [
    {"device_id": "0", "rank_id": "0"}, {"device_id": "1", "rank_id": "1"}, {"device_id": "2", "rank_id": "2"}]}],
    "status": "completed", "version": "1.0"}"#;
const SLOT: PullRows = PullRows::Slot { local: 0, size: -1 };
static PORTS: AtomicU16 = AtomicU16::new(0);

/// Ports that no other test of this file uses, nor most other processes that run it; below those the system gives out.
fn ports() -> u16 {
    10_000 + (std::process::id() % 50) as u16 * 440 + PORTS.fetch_add(20, Ordering::Relaxed) % 440
}

fn member(cluster: u64, way: Way, port: u16, total: Duration) -> DataDist {
    let mut config = config(cluster, way);
    config.links.listen = None;
    config.links.rank_port = port;
    config.links.total = total;
    config.sync_timeout = Duration::from_secs(10);
    open(config, way)
}

/// Enters a communicator whose name nobody else on this host has.
fn enter(engine: &DataDist, name: &str, clusters: &[u64]) -> u64 {
    let name = &format!("{name} {} {}", std::process::id(), engine.config().links.rank_port);
    let clusters: Vec<_> = clusters.iter().zip(0..).map(|(&id, rank)| (ClusterId(id), rank)).collect();
    engine.link(name, &clusters, TABLE).unwrap()
}

fn ready(engine: &DataDist, comm: u64) {
    eventually("a communicator", || match engine.comm_status(comm).unwrap() {
        CommStatus::Preparing => false,
        CommStatus::Ready => true,
        CommStatus::Failed => panic!("{comm}: the log says why"),
    });
}

fn works(local: &DataDist, remote: &DataDist) {
    let shape = desc(Placement::Device, 2, 1, 64);
    let into = Held::new(local, false, &shape, CacheKind::Batch, &[]);
    let source = Held::new(remote, false, &shape, CacheKind::Batch, &[]);
    let bytes = source.fill(1);
    local.pull(of(remote.config().cluster.0, row(&source, 0)), &into.end(), &SLOT, Layers::ALL).unwrap();
    assert!(into.read() == bytes);
}

const TOTAL: Duration = Duration::from_secs(15);

#[test]
fn members_meet_in_either_order_and_calls_wait_for_it() {
    for way in [Way::Shm, Way::Tcp] {
        for low_first in [true, false] {
            let port = ports();
            let (low, high) = (member(1, way, port, TOTAL), member(2, way, port, TOTAL));
            let (first, second) = if low_first { (&low, &high) } else { (&high, &low) };
            let comm = enter(first, "pair", &[1, 2]);
            assert_eq!(comm, 1);
            assert_eq!(first.comm_status(comm).unwrap(), CommStatus::Preparing);
            assert_eq!(
                first.switch_role(llm_datadist_core::Role::Mix, None).unwrap_err().kind(),
                ErrorKind::LinksExist
            );
            thread::scope(|scope| {
                // A call that comes too early waits.
                let early = scope.spawn(|| works(first, second));
                thread::sleep(Duration::from_millis(30));
                let other = enter(second, "pair", &[1, 2]);
                early.join().unwrap();
                ready(second, other);
            });
            ready(first, comm);
            works(second, first);
            assert_eq!(first.stats().links[0].transport, if way == Way::Shm { "shm" } else { "tcp" });
            // A second communicator of the same two; each ends on its own.
            let more = (enter(first, "more", &[1, 2]), enter(second, "more", &[1, 2]));
            assert_eq!(more, (2, 2));
            ready(first, 2);
            ready(second, 2);
            // The latest of both carries the calls.
            let transfers =
                || first.stats().links.iter().map(|link| link.transfers.calls).collect::<Vec<_>>();
            let before = transfers();
            works(first, second);
            assert_eq!(transfers(), [before[0], before[1] + 1]);
            first.unlink(1).unwrap();
            works(first, second);
            works(second, first);
            first.unlink(2).unwrap();
            eventually("their end", || first.stats().links.is_empty() && second.stats().links.is_empty());
            for unknown in [0, 1, 2, 3, u64::MAX] {
                assert_eq!(first.unlink(unknown).unwrap_err().kind(), ErrorKind::NotLinked);
                assert_eq!(first.comm_status(unknown).unwrap_err().kind(), ErrorKind::NotLinked);
            }
        }
    }
}

#[test]
fn three_members_meet() {
    for way in [Way::Shm, Way::Tcp] {
        let port = ports();
        let members: Vec<_> = (1..4).map(|id| member(id, way, port, TOTAL)).collect();
        for at in [1, 2, 0] {
            assert_eq!(enter(&members[at], "three", &[1, 2, 3]), 1);
        }
        for engine in &members {
            ready(engine, 1);
            assert_eq!(engine.stats().links.len(), 2);
        }
        for local in 0..3 {
            works(&members[local], &members[(local + 1) % 3]);
        }
        // One leaves; the others keep each other.
        members[1].unlink(1).unwrap();
        eventually("its end", || members[0].stats().links.len() == 1 && members[2].stats().links.len() == 1);
        works(&members[0], &members[2]);
        works(&members[2], &members[0]);
    }
}

#[test]
fn who_goes_by_another_name_is_not_met() {
    for way in [Way::Shm, Way::Tcp] {
        let port = ports();
        let total = Duration::from_millis(400);
        let (low, high) = (member(1, way, port, total), member(2, way, port, total));
        enter(&low, "one", &[1, 2]);
        enter(&high, "another", &[1, 2]);
        let started = Instant::now();
        let early = high.check_link(ClusterId(1)).unwrap_err();
        assert_eq!(early.kind(), ErrorKind::NotLinked, "{early}");
        eventually("the failure of both", || {
            [&low, &high].iter().all(|engine| engine.comm_status(1).unwrap() == CommStatus::Failed)
        });
        assert!(started.elapsed() < Duration::from_secs(10));
        eventually("a line that says why", || !log::texts(&["failed after", "rank 0"]).is_empty());
        assert!(low.stats().links.is_empty() && high.stats().links.is_empty());
        // It stays failed, and a new one may succeed.
        assert_eq!(low.comm_status(1).unwrap(), CommStatus::Failed);
        low.unlink(1).unwrap();
        high.unlink(1).unwrap();
        let again = (enter(&low, "same", &[1, 2]), enter(&high, "same", &[1, 2]));
        ready(&low, again.0);
        ready(&high, again.1);
        works(&low, &high);
    }
}

/// Whoever comes back, of either rank, by leaving and entering again or as a new process, is met again.
#[test]
fn who_comes_back_is_let_in() {
    for way in [Way::Shm, Way::Tcp] {
        for low_leaves in [true, false] {
            let port = ports();
            let stays = member(if low_leaves { 2 } else { 1 }, way, port, TOTAL);
            let id = if low_leaves { 1 } else { 2 };
            let leaves = member(id, way, port, TOTAL);
            enter(&stays, "pair", &[1, 2]);
            let comm = enter(&leaves, "pair", &[1, 2]);
            ready(&stays, 1);
            ready(&leaves, comm);
            // A restart: gone, and another process of the same name.
            drop(leaves);
            eventually("its end", || stays.stats().links.is_empty());
            let back = member(id, way, port, TOTAL);
            let comm = enter(&back, "pair", &[1, 2]);
            eventually("the return", || {
                stays.stats().links.len() == 1 && back.comm_status(comm).unwrap() == CommStatus::Ready
            });
            assert_eq!(stays.comm_status(1).unwrap(), CommStatus::Ready);
            works(&stays, &back);
            works(&back, &stays);
        }
    }
}

#[test]
fn so_many_communicators_and_no_more() {
    let port = ports();
    let engine = member(1, Way::Tcp, port, Duration::from_secs(60));
    for id in 1..=512 {
        assert_eq!(enter(&engine, &format!("comm {id}"), &[1, 1000 + id]), id);
    }
    let more = engine.link("one more", &[(ClusterId(1), 0), (ClusterId(2), 1)], TABLE).unwrap_err();
    assert_eq!(more.kind(), ErrorKind::InvalidArgument);
    engine.unlink(7).unwrap();
    assert_eq!(enter(&engine, "more", &[1, 2]), 513);
    let started = Instant::now();
    drop(engine);
    assert!(started.elapsed() < Duration::from_secs(9), "{:?}", started.elapsed());
}

/// Two jobs of one host that use the same names, each with ports of its own: nobody meets a member of the other.
#[test]
fn jobs_of_one_host_keep_apart() {
    let ports = [ports(), ports()];
    let engines = ports.map(|port| [member(1, Way::Shm, port, TOTAL), member(2, Way::Shm, port, TOTAL)]);
    let name = format!("job {}", std::process::id());
    for job in &engines {
        for engine in job {
            engine.link(&name, &[(ClusterId(1), 0), (ClusterId(2), 1)], TABLE).unwrap();
        }
    }
    let shape = desc(Placement::Device, 2, 1, 64);
    for (seed, [low, high]) in engines.iter().enumerate() {
        ready(low, 1);
        ready(high, 1);
        let source = Held::new(low, false, &shape, CacheKind::Batch, &[]);
        let bytes = source.fill(seed as u8);
        let into = Held::new(high, false, &shape, CacheKind::Batch, &[]);
        high.pull(of(1, row(&source, 0)), &into.end(), &SLOT, Layers::ALL).unwrap();
        assert!(into.read() == bytes, "the bytes of the other job");
    }
}

/// Leaving a communicator gives its port back.
#[test]
fn a_port_is_free_again_once_nobody_needs_it() {
    let port = ports();
    let engine = member(1, Way::Tcp, port, TOTAL);
    let bound = || std::net::TcpListener::bind(("127.0.0.1", port)).is_err();
    let (one, two) = (enter(&engine, "one", &[1, 2]), enter(&engine, "two", &[1, 3]));
    assert!(bound());
    engine.unlink(one).unwrap();
    assert!(bound(), "the other still needs it");
    engine.unlink(two).unwrap();
    eventually("the port", || !bound());
}
