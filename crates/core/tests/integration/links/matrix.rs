//! Who may link with whom, how links end, and what strangers can do: the matrix of `link_clusters` and `unlink_clusters`.
//!
//! Not for: bytes (`pull`, `push`), or faults in the middle (`broken`).

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::testing::protocol::{Control, Purpose, Reply, Request, WireName};
use llm_datadist_core::{
    CacheKind, ClusterId, DataDist, ErrorKind, Layers, PeerAddress, Placement, PullRows, Role, StatusCode,
    Token,
};

use super::fake::{Fake, hear, say};
use super::{
    Held, LONG, Pair, WAYS, Way, address, config, eventually, link, of, open, row, text, times, unlink,
};
use crate::bed::desc;
use crate::log;

const SLOT: PullRows = PullRows::Slot { local: 0, size: -1 };

fn kind_of(result: llm_datadist_core::Result<()>) -> ErrorKind {
    result.unwrap_err().kind()
}

fn works(local: &DataDist, remote: &DataDist) {
    let shape = desc(Placement::Device, 2, 1, 64);
    let (into, source) = (
        Held::new(local, false, &shape, CacheKind::Batch, &[]),
        Held::new(remote, false, &shape, CacheKind::Batch, &[]),
    );
    let bytes = source.fill(1);
    local.pull(of(remote.config().cluster.0, row(&source, 0)), &into.end(), &SLOT, Layers::ALL).unwrap();
    assert!(into.read() == bytes);
    local.deallocate(into.cache.id()).unwrap();
    remote.deallocate(source.cache.id()).unwrap();
}

#[test]
fn links_come_and_go() {
    for way in WAYS {
        let (local, remote) = (open(config(1, way), way), open(config(u64::MAX, way), way));
        assert_eq!(local.remap().unwrap_err().kind(), ErrorKind::NotLinked);
        for _ in 0..3 {
            link(&local, &remote).unwrap();
            assert_eq!(kind_of(link(&local, &remote)), ErrorKind::AlreadyLinked);
            // The other side counts it as linked, too.
            assert_eq!(kind_of(link(&remote, &local)), ErrorKind::AlreadyLinked);
            local.remap().unwrap();
            local.check_link(ClusterId(u64::MAX)).unwrap();
            remote.check_link(ClusterId(1)).unwrap();
            works(&local, &remote);
            works(&remote, &local);
            assert_eq!(kind_of(local.switch_role(Role::Decoder, None)), ErrorKind::LinksExist);
            unlink(&local, &remote).unwrap();
            assert!(local.stats().links.is_empty() && remote.stats().links.is_empty());
            assert_eq!(kind_of(local.check_link(ClusterId(u64::MAX))), ErrorKind::NotLinked);
            // Once more is no error.
            unlink(&local, &remote).unwrap();
        }
        // By the side that did not make it.
        link(&local, &remote).unwrap();
        unlink(&remote, &local).unwrap();
        eventually("its end here", || local.stats().links.is_empty());
        // Force: without a word to the peer, and without an address.
        link(&local, &remote).unwrap();
        let nowhere = PeerAddress { remote: vec![], ..address(&remote) };
        let refused = local.unlink_clusters(std::slice::from_ref(&nowhere), LONG, false).remove(0);
        assert_eq!(kind_of(refused), ErrorKind::InvalidArgument);
        assert_eq!(local.stats().links.len(), 1);
        local.unlink_clusters(&[nowhere], LONG, true).remove(0).unwrap();
        assert!(local.stats().links.is_empty());
        eventually("its end there", || remote.stats().links.is_empty());
        link(&local, &remote).unwrap();
        works(&local, &remote);
    }
}

#[test]
fn each_peer_of_a_call_has_its_own_result() {
    let remote: Vec<_> = (2..20).map(|id| open(config(id, Way::Shm), Way::Shm)).collect();
    let local = open(config(1, Way::Shm), Way::Shm);
    let mut peers: Vec<_> = remote.iter().map(address).collect();
    peers[3].cluster = ClusterId(77);
    peers[5].remote.clear();
    peers[7].remote = vec!["127.0.0.1:1".parse().unwrap()];
    let results = local.link_clusters(&peers, LONG);
    assert_eq!(results.len(), peers.len());
    for (at, result) in results.iter().enumerate() {
        let expected = match at {
            3 | 7 => Some(ErrorKind::LinkFailed),
            5 => Some(ErrorKind::InvalidArgument),
            _ => None,
        };
        assert_eq!(
            result.as_ref().err().map(llm_datadist_core::Error::kind),
            expected,
            "{at}: {}",
            text(result)
        );
    }
    assert_eq!(local.stats().links.len(), peers.len() - 3);
    peers.retain(|peer| !peer.remote.is_empty());
    assert!(local.unlink_clusters(&peers, LONG, false).iter().all(Result::is_ok));
    assert!(local.stats().links.is_empty());
}

#[test]
fn who_does_not_fit_is_refused_by_its_code() {
    for way in WAYS {
        let local = open(config(1, way), way);
        let other_mode = open(
            {
                let mut c = config(2, way);
                c.remote_accessible = true;
                c
            },
            way,
        );
        let wrong = kind_of(link(&local, &other_mode));
        assert_eq!(StatusCode::from(wrong), StatusCode::ParamInvalid);
        let remote = open(config(2, way), way);
        let asked = PeerAddress { cluster: ClusterId(3), ..address(&remote) };
        assert_eq!(kind_of(local.link_clusters(&[asked], LONG).remove(0)), ErrorKind::LinkFailed);
        let two = PeerAddress {
            remote: [address(&remote).remote, address(&local).remote].concat(),
            ..address(&remote)
        };
        assert_eq!(kind_of(local.link_clusters(&[two], LONG).remove(0)), ErrorKind::InvalidArgument);
        assert!(local.link_clusters(&[], LONG).is_empty());
        assert!(local.stats().links.is_empty());
        eventually("no leftovers", || remote.stats().links.is_empty() && other_mode.stats().links.is_empty());
        link(&local, &remote).unwrap();
    }
}

#[test]
fn only_who_knows_the_token_is_let_in() {
    let with = |cluster, token: Option<&str>, way| {
        let mut config = config(cluster, way);
        config.links.token = token.map(Token::new);
        open(config, way)
    };
    let (one, other) = ("sixteen letters or more", "sixteen letters or else");
    for way in WAYS {
        for (local, remote, fits) in [
            (Some(one), Some(one), true),
            (Some(one), Some(other), false),
            (Some(one), None, false),
            (None, Some(one), false),
            (None, None, true),
        ] {
            let (local, remote) = (with(1, local, way), with(2, remote, way));
            match link(&local, &remote) {
                Ok(()) => assert!(fits),
                Err(error) => {
                    assert!(!fits && error.kind() == ErrorKind::LinkFailed, "{way:?}: {error}");
                    let shown = format!("{error:?} {:?} {local:?}", log::texts(&[]));
                    assert!(!shown.contains(one) && !shown.contains(other), "a token shows");
                }
            }
        }
    }
    // A stream of a link cannot be had without it either.
    let engine = with(1, Some(one), Way::Tcp);
    let fake = Fake::new(9, 1);
    assert!(
        fake.dial_with(&engine, one.as_bytes(), Purpose::Link { link: 5, comm: None, probe_local: false })
            .is_ok()
    );
    assert!(fake.dial_with(&engine, b"", Purpose::Call { link: 5, reverse: false }).is_err());
}

#[test]
fn a_process_may_link_to_itself() {
    for way in WAYS {
        let engine = open(config(1, way), way);
        for _ in 0..3 {
            link(&engine, &engine).unwrap();
            assert_eq!(kind_of(link(&engine, &engine)), ErrorKind::AlreadyLinked);
            engine.check_link(ClusterId(1)).unwrap();
            let shape = desc(Placement::Device, 2, 1, 64);
            let held = Held::new(&engine, false, &shape, CacheKind::Batch, &[]);
            let own = engine.pull(of(1, row(&held, 0)), &held.end(), &SLOT, Layers::ALL);
            assert_eq!(kind_of(own), ErrorKind::InvalidArgument);
            unlink(&engine, &engine).unwrap();
            eventually("the end of both halves", || engine.stats().links.is_empty());
        }
    }
}

#[test]
fn both_sides_may_link_where_the_option_says_so() {
    for way in WAYS {
        let pair = Pair::with(way, |config| config.links.both_ways = true);
        assert_eq!(kind_of(link(&pair.local, &pair.remote)), ErrorKind::AlreadyLinked);
        link(&pair.remote, &pair.local).unwrap();
        assert_eq!(kind_of(link(&pair.remote, &pair.local)), ErrorKind::AlreadyLinked);
        assert_eq!((pair.local.stats().links.len(), pair.remote.stats().links.len()), (2, 2));
        works(&pair.local, &pair.remote);
        works(&pair.remote, &pair.local);
        unlink(&pair.local, &pair.remote).unwrap();
        eventually("the end of both", || pair.remote.stats().links.is_empty());
        assert!(pair.local.stats().links.is_empty());
    }
}

#[test]
fn a_process_that_was_replaced_is_noticed() {
    for way in WAYS {
        let local = open(config(1, way), way);
        let remote = open(config(2, way), way);
        link(&local, &remote).unwrap();
        let at = remote.listening().unwrap();
        drop(remote);
        eventually("the end of the link", || local.stats().links.is_empty());
        let why = local.check_link(ClusterId(2)).unwrap_err();
        assert_eq!(why.kind(), ErrorKind::NotLinked);
        assert!(why.to_string().contains("finalized"), "{why}");
        let mut again = config(2, way);
        again.links.listen = Some(at);
        let remote = open(again, way);
        link(&local, &remote).unwrap();
        works(&local, &remote);
        // One that goes by its id while it lives is refused, and told why: two would push each other out for ever.
        let second = open(config(1, way), way);
        let refused = link(&second, &remote).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::LinkFailed);
        assert!(refused.to_string().contains("two processes cannot share a cluster id"), "{refused}");
        assert_eq!(remote.stats().links.len(), 1);
        works(&local, &remote);
        drop(local);
        eventually("the end of the first", || remote.stats().links.is_empty());
        link(&second, &remote).unwrap();
        works(&second, &remote);
    }
}

#[test]
fn who_goes_away_while_being_told_is_unlinked_here_and_said_so() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let fake = Fake::new(2, 1);
    thread::scope(|scope| {
        let peer = scope.spawn(|| {
            let control = fake.linked();
            let (call, purpose) = fake.greet();
            assert!(matches!(purpose, Purpose::Call { reverse: false, .. }));
            assert!(matches!(hear(&call).unwrap(), Request::Unlink { .. }));
            call.close();
            control
        });
        engine.link_clusters(&[fake.address()], LONG).remove(0).unwrap();
        let told = engine.unlink_clusters(&[fake.address()], LONG, false).remove(0).unwrap_err();
        assert_eq!(told.kind(), ErrorKind::UnlinkFailed, "{told}");
        assert!(engine.stats().links.is_empty());
        drop(peer.join().unwrap());
    });
    // One that does not answer costs the time that was given, and no more.
    thread::scope(|scope| {
        let peer = scope.spawn(|| (fake.linked(), fake.greet()));
        engine.link_clusters(&[fake.address()], LONG).remove(0).unwrap();
        let started = Instant::now();
        let told = engine.unlink_clusters(&[fake.address()], Duration::from_millis(100), false).remove(0);
        assert_eq!(kind_of(told), ErrorKind::Timeout);
        assert!(started.elapsed() < Duration::from_secs(10));
        assert!(engine.stats().links.is_empty());
        drop(peer.join().unwrap());
    });
}

#[test]
fn a_peer_that_falls_silent_is_given_up() {
    let mut lively = config(1, Way::Tcp);
    lively.links.heartbeat = Duration::from_millis(20);
    lively.links.silence = Duration::from_millis(120);
    let engine = open(lively, Way::Tcp);
    let fake = Fake::new(2, 1);
    // The engine dials, and the fake does.
    for outgoing in [true, false] {
        let control = if outgoing {
            thread::scope(|scope| {
                let peer = scope.spawn(|| fake.linked());
                engine.link_clusters(&[fake.address()], LONG).remove(0).unwrap();
                peer.join().unwrap()
            })
        } else {
            fake.link(&engine, 77).unwrap()
        };
        // As long as it answers it stays.
        let until = Instant::now() + Duration::from_millis(400);
        while Instant::now() < until {
            match hear(&control).unwrap() {
                Control::Ping => say(&control, &Control::Pong),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(engine.stats().links.len(), 1);
        eventually("the end of a silent link", || engine.stats().links.is_empty());
        let why = engine.check_link(ClusterId(2)).unwrap_err();
        assert!(why.kind() == ErrorKind::NotLinked && why.to_string().contains("no sign of life"), "{why}");
    }
}

#[test]
fn a_peer_that_never_answers_costs_the_limit_and_no_more() {
    let silent = Fake::new(2, 1);
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let limit = Duration::from_millis(100);
    let started = Instant::now();
    assert_eq!(kind_of(engine.link_clusters(&[silent.address()], limit).remove(0)), ErrorKind::Timeout);
    // One that greets and never confirms.
    thread::scope(|scope| {
        let peer = scope.spawn(|| {
            drop(silent.accept());
            silent.greet()
        });
        assert_eq!(kind_of(engine.link_clusters(&[silent.address()], limit).remove(0)), ErrorKind::Timeout);
        drop(peer.join().unwrap());
    });
    assert!(started.elapsed() < Duration::from_secs(10));
    assert!(engine.stats().links.is_empty());
}

/// Reads until the other side ends the stream.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut all = Vec::new();
    // A reset ends it as well.
    let _ = stream.read_to_end(&mut all);
    all
}

#[test]
fn what_strangers_say_is_refused() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let at = engine.listening().unwrap();
    let cases: [(&[u8], bool); 7] = [
        (b"GET / HTTP/1.1\r\n\r\n", true),
        (b"LD\x01\x01\x04\0\0\0abcd", true),
        (b"LD\x05\x01\x00\0\0\0", true),
        (b"LD\x05\x01\xFF\xFF\xFF\xFF", true),
        (b"LD\x05\x07\x01\0\0\0x", true),
        (b"LD\x05\x01\x04\0\0\0\xFF\xFF\xFF\xFF", true),
        (b"LD\x05\xFF\x04\0\0\0\x01\0\0\0", true),
    ];
    for (said, refused) in cases {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.write_all(said).unwrap();
        let answer = rest(&mut stream);
        assert_eq!(answer.starts_with(b"LD\x05\xFF"), refused, "{said:?}: {answer:?}");
    }
    // Half a frame, and the end.
    for said in [&b""[..], b"L", b"LD\x05\x01\x04", b"LD\x05\x01\x10\0\0\0abc"] {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.write_all(said).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        drop(rest(&mut stream));
    }
    // A peer of another version answers: the refusal is told as such.
    let old = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = PeerAddress { cluster: ClusterId(2), remote: vec![old.local_addr().unwrap()], local: vec![] };
    let answering = thread::spawn(move || {
        let (mut stream, _) = old.accept().unwrap();
        stream.write_all(b"LD\x09\x01\x01\0\0\0x").unwrap();
        drop(rest(&mut stream));
    });
    let error = engine.link_clusters(&[peer], LONG).remove(0).unwrap_err();
    assert!(error.kind() == ErrorKind::LinkFailed && format!("{error}").contains("version 9"), "{error}");
    answering.join().unwrap();
    // Calls on links that are not there, or another's.
    let fake = Fake::new(8, 1);
    let _control = fake.link(&engine, 5).unwrap();
    assert_eq!(fake.call(&engine, 6).unwrap_err().kind(), ErrorKind::NotLinked);
    let other = Fake::new(9, 1);
    assert_eq!(other.call(&engine, 5).unwrap_err().kind(), ErrorKind::NotLinked);
    let call = fake.call(&engine, 5).unwrap();
    say(&call, &Request::Ping { limit_ms: 100 });
    assert!(matches!(hear(&call).unwrap(), Reply::Done { .. }));
    say(&call, &Request::Describe { name: WireName::Row { cache: 4, row: 0 }, limit_ms: 100 });
    assert!(matches!(hear(&call).unwrap(), Reply::Failed { .. }));
    assert_eq!(engine.stats().links.len(), 1);
}

#[test]
fn a_flood_of_strangers_keeps_nobody_out() {
    for way in [Way::Shm, Way::Tcp] {
        let (local, remote) = (open(config(1, way), way), open(config(2, way), way));
        let at = remote.listening().unwrap();
        // Silent ones that stay.
        let silent: Vec<_> = (0..300).map(|_| TcpStream::connect(at).unwrap()).collect();
        link(&local, &remote).unwrap();
        works(&local, &remote);
        unlink(&local, &remote).unwrap();
        // And ones that keep coming.
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut kept = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    kept.extend(TcpStream::connect(at));
                    if kept.len() > 500 {
                        kept.clear();
                    }
                    thread::sleep(Duration::from_micros(500));
                }
            });
            for _ in 0..5 {
                let linked = link(&local, &remote);
                let done = linked.is_err() || unlink(&local, &remote).is_ok();
                if linked.is_err() || !done {
                    stop.store(true, Ordering::Relaxed);
                }
                linked.unwrap();
                assert!(done);
            }
            stop.store(true, Ordering::Relaxed);
        });
        drop(silent);
    }
}

#[test]
fn five_hundred_and_twelve_links_of_one_process() {
    // Each link of a peer takes a descriptor, and an engine keeps most of them for the application.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let mut hub = config(1, Way::Tcp);
    hub.links.heartbeat = Duration::from_millis(200);
    let hub = open(hub, Way::Tcp);
    let fakes: Vec<Fake> = (0..512).map(|id| Fake::new(100 + id, id)).collect();
    let controls: Vec<_> = fakes.iter().map(|fake| fake.link(&hub, fake.party.cluster).unwrap()).collect();
    assert_eq!(hub.stats().links.len(), 512);
    // A real one among them works as ever.
    let local = open(config(2, Way::Tcp), Way::Tcp);
    link(&local, &hub).unwrap();
    works(&local, &hub);
    works(&hub, &local);
    // Half of them go without a word; nobody else suffers.
    let mut controls = controls;
    controls.truncate(256);
    eventually("the end of half of them", || hub.stats().links.len() == 257);
    works(&local, &hub);
    let started = Instant::now();
    drop(hub);
    assert!(started.elapsed() < Duration::from_secs(10));
    for control in &controls {
        let mut bye = false;
        while let Ok(message) = hear::<Control>(control) {
            bye |= matches!(message, Control::Bye { .. });
        }
        assert!(bye, "everyone is told");
    }
    eventually("the end of the real one", || local.stats().links.is_empty());
}

/// Threads and descriptors of this process.
fn held() -> (usize, usize) {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    (count("/proc/self/task"), count("/proc/self/fd"))
}

/// In a process of its own, where nobody else opens and closes: whatever calls are under way, a finalized engine leaves
/// nothing, and its peer keeps only itself.
#[test]
fn finalizing_under_way_leaves_nothing() {
    if std::env::var_os("LLM_DATADIST_TEST_ALONE").is_none() {
        let name = "links::matrix::finalizing_under_way_leaves_nothing";
        let alone = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--test-threads=1", "--nocapture"])
            .env("LLM_DATADIST_TEST_ALONE", "1")
            .output()
            .unwrap();
        assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stderr));
        return;
    }
    let before = held();
    for way in WAYS {
        for round in 0..times(4) {
            let (local, remote) = (Arc::new(open(config(1, way), way)), open(config(2, way), way));
            link(&local, &remote).unwrap();
            let shape = desc(Placement::Device, 2, 1, 1 << 20);
            let source = Held::new(&remote, false, &shape, CacheKind::Batch, &[]);
            let name = of(2, row(&source, 0));
            drop(source);
            let callers: Vec<_> = (0..4)
                .map(|_| {
                    let local = local.clone();
                    thread::spawn(move || {
                        let into = Held::new(&local, false, &shape_of(), CacheKind::Batch, &[]);
                        while local.pull(name, &into.end(), &SLOT, Layers::ALL).is_ok() {}
                    })
                })
                .collect();
            thread::sleep(Duration::from_millis(u64::from(round) * 3));
            if round % 2 == 0 {
                // The peer goes first, then this side.
                drop(remote);
                for caller in callers {
                    caller.join().unwrap();
                }
                drop(local);
            } else {
                // This side is let go while its calls go on: the last of them ends it.
                drop(local);
                thread::sleep(Duration::from_millis(5));
                drop(remote);
                for caller in callers {
                    caller.join().unwrap();
                }
            }
        }
        eventually("all threads and descriptors given back", || held() == before);
    }
    fn shape_of() -> llm_datadist_core::CacheDesc {
        desc(Placement::Device, 2, 1, 1 << 20)
    }
}
