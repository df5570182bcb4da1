//! Large pulls and pushes use several streams, over several addresses of the peer if it has them.
//!
//! `tests/test_two_hosts.py` covers networks that are cut, `benches/networks` the throughput.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::{Config, DataDist, Name};
use llm_datadist_core::testing::net::{Stream, Tcp, Transport};
use llm_datadist_core::testing::protocol::{
    self, ControlMessage, EnteredLink, LinkAnswer, NamedCache, Purpose, Reply, Request, Timed, WirePlan,
};
use llm_datadist_core::{CacheKind, ErrorKind};
use tracing::Level;

use super::fake_peer::{Fake, ask, hear, hear_request, one_span, plan_of, say, soon};
use super::{Held, Pair, Way, config, device, of, open, open_with, pull_slot, push_slot, row};
use crate::fixtures::{EventLog, eventually, pattern};

const MIB: usize = 1 << 20;

/// The number of requests that this side has sent over its only link.
fn requests(engine: &DataDist) -> u64 {
    engine.stats().links[0].requests.calls
}

/// Pulls and pushes one row of `bytes` bytes in two tensors, and returns the number of requests that moved the bytes of
/// each.
fn requests_of(pair: &Pair, bytes: usize) -> (u64, u64) {
    let [local, remote] = pair.pools(&device(2, 1, bytes / 2), CacheKind::Batch);
    let name = || of(pair.remote.config().cluster.0, row(&remote, 0));
    // The first pull asks for the description of the cache.
    pull_slot(&pair.local, name(), &local).unwrap();
    let before = requests(&pair.local);
    let source = remote.fill(1);
    pull_slot(&pair.local, name(), &local).unwrap();
    assert!(local.read() == source);
    let between = requests(&pair.local);
    let source = local.fill(2);
    push_slot(&pair.local, &local, 0, name()).unwrap();
    assert!(remote.read() == source);
    let after = requests(&pair.local);
    pair.free(&local, &remote);
    // The last request of a pull releases the key.
    (between - before - 1, after - between)
}

/// Each stream carries at least 8 MiB.
#[test]
fn large_transfers_use_several_streams() {
    for (streams, bytes, expected) in [
        (0, 64, 1),
        (0, 16 * MIB - 4, 1),
        (0, 16 * MIB, 2),
        (0, 24 * MIB + 8, 3),
        (0, 40 * MIB, 4),
        (1, 40 * MIB, 1),
        (5, 40 * MIB, 5),
    ] {
        let pair = Pair::with(Way::Tcp, |config| config.links.streams = streams);
        assert_eq!(requests_of(&pair, bytes), (expected, expected), "{streams} streams, {bytes} bytes");
    }
}

/// The streams of a transfer take turns then, and the bytes and the number of requests are the same.
#[test]
fn without_threads_for_copies_the_caller_moves_all_bytes() {
    let pair = Pair::new(Way::Tcp);
    pair.local.refuse_copy_threads(true);
    let heard = EventLog::new("llm_datadist::transfers");
    let _on_this_thread = tracing::subscriber::set_default(heard.clone());
    let copied = || {
        let cache = Held::pool(&pair.local, &device(1, 64, 64 << 10), CacheKind::Blocks);
        let source = cache.fill(3).remove(0);
        let pairs: Vec<_> = (0..32).map(|row| (row, 32 + row)).collect();
        pair.local.copy_blocks(&cache.end(), &pairs).run().unwrap();
        let half = 32 * (64 << 10);
        assert!(cache.read()[0][half..] == source[..half]);
        cache.free(&pair.local);
    };
    for _ in 0..2 {
        copied();
        assert_eq!(requests_of(&pair, 40 * MIB), (4, 4));
    }
    let lines = heard.lines();
    let [(level, text)] = &lines[..] else { panic!("{lines:?}") };
    assert_eq!(*level, Level::WARN);
    for fact in ["a calling thread copies alone", "ulimit -u", "errno=11", "once"] {
        assert!(text.contains(fact), "{fact}: {text}");
    }
    pair.local.refuse_copy_threads(false);
    copied();
    assert_eq!(requests_of(&pair, 40 * MIB), (4, 4));
    assert_eq!(heard.lines().len(), 1);
}

/// The side that was linked cannot dial, and asks for streams.
#[test]
fn the_linked_side_uses_several_streams_too() {
    let Pair { local, remote } = Pair::new(Way::Tcp);
    let turned = Pair { local: remote, remote: local };
    assert_eq!(requests_of(&turned, 40 * MIB), (4, 4));
}

/// Returns the addresses at which `engine` has established connections, one for each connection.
fn connections(engine: &DataDist) -> Vec<IpAddr> {
    let port = engine.listening().unwrap().port();
    let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
    let local = table.lines().skip(1).filter_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (ip, at) = words.next()?.split_once(':')?;
        let established = words.nth(1)? == "01";
        let ip = u32::from_str_radix(ip, 16).ok()?.to_le_bytes();
        (established && u16::from_str_radix(at, 16) == Ok(port)).then(|| IpAddr::from(ip))
    });
    local.collect()
}

fn ips(last: &[u8]) -> Vec<IpAddr> {
    last.iter().map(|last| IpAddr::from([127, 0, 0, *last])).collect()
}

/// A pair whose sides both have these addresses beside their listening address.
fn with_addresses(last: &[u8]) -> Pair {
    Pair::with(Way::Tcp, |config| config.links.addresses = ips(last))
}

#[test]
fn streams_are_spread_over_the_addresses_of_the_peer() {
    for listen in ["127.0.0.1:0", "0.0.0.0:0"] {
        let pair = Pair::with(Way::Tcp, |config| {
            config.links.listen = Some(listen.parse().unwrap());
            config.links.addresses = ips(&[21, 22, 23]);
        });
        assert_eq!(requests_of(&pair, 40 * MIB), (4, 4), "{listen}");
        let mut at = connections(&pair.remote);
        at.sort();
        at.dedup();
        // The first one is that of the link.
        assert_eq!(at, ips(&[1, 21, 22, 23]), "{listen}");
    }
}

/// Streams are kept for later transfers, at each of the addresses.
#[test]
fn idle_streams_are_used_again() {
    let pair = with_addresses(&[31]);
    requests_of(&pair, 40 * MIB);
    let all = connections(&pair.remote);
    assert_eq!(all.len(), 5, "the control stream and four streams of calls");
    requests_of(&pair, 16 * MIB);
    let mut now = connections(&pair.remote);
    now.sort();
    assert_eq!(now, ips(&[1, 1, 1, 31, 31]));
    assert_eq!(now.len(), all.len());
}

/// Like `a_listener_moves_between_addresses_of_one_port`, with a further address.
#[test]
fn further_listeners_move_with_the_main_one() {
    let engine = open_with(1, Way::Tcp, |config| config.links.addresses = ips(&[61]));
    let port = engine.listening().unwrap().port();
    let reached = |last: u8, port: u16| std::net::TcpStream::connect((ips(&[last])[0], port)).is_ok();
    assert!(reached(61, port) && !reached(62, port));
    engine
        .switch_role(engine.config().role, Some(SocketAddr::new("0.0.0.0".parse().unwrap(), port)))
        .unwrap();
    assert!(reached(61, port) && reached(62, port));
    engine.switch_role(engine.config().role, Some(SocketAddr::new(ips(&[61])[0], port))).unwrap();
    assert!(reached(61, port) && !reached(1, port));
    // The further address is in use there, so nothing changes.
    let taken = std::net::TcpListener::bind((ips(&[61])[0], 0)).unwrap();
    let elsewhere = SocketAddr::new(ips(&[1])[0], taken.local_addr().unwrap().port());
    engine.switch_role(engine.config().role, Some(elsewhere)).unwrap_err();
    assert!(reached(61, port) && !reached(1, elsewhere.port()));
}

#[test]
fn an_address_of_another_host_is_refused() {
    for listen in ["127.0.0.1:0", "0.0.0.0:0"] {
        let mut config = config(1, Way::Tcp);
        config.links.listen = Some(listen.parse().unwrap());
        config.links.addresses = vec!["192.0.2.1".parse().unwrap()];
        let text = DataDist::open(config).unwrap_err().to_string();
        assert!(text.contains("192.0.2.1") && text.contains("option=addresses"), "{text}");
    }
}

/// Nobody answers at two of the addresses, and another process at the third.
#[test]
fn addresses_that_lead_nowhere_are_left_out() {
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let (peer, stranger) = (Fake::new(2, 7), open(config(2, Way::Tcp), Way::Tcp));
    let port = peer.address().remote[0].port();
    let addresses = vec![
        SocketAddr::new("127.0.0.41".parse().unwrap(), port),
        SocketAddr::new("0.0.0.0".parse().unwrap(), port),
        SocketAddr::new("127.0.0.42".parse().unwrap(), 0),
        SocketAddr::new("::ffff:127.0.0.43".parse().unwrap(), port),
        SocketAddr::new("::ffff:0.0.0.0".parse().unwrap(), port),
        stranger.listening().unwrap(),
    ];
    let answer = LinkAnswer::Entered(EnteredLink { addresses, ..EnteredLink::default() });
    let (linked, control) = peer.linked_by(&engine, || peer.answers_link(&answer));
    linked.unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..2 {
                let (call, purpose) = peer.greet();
                assert!(matches!(purpose, Purpose::Call { .. }), "{purpose:?}");
                assert!(matches!(hear_request(&call).unwrap(), Request::Describe { .. }));
                // So the next call needs another stream.
                call.close();
            }
        });
        for _ in 0..2 {
            let into = Held::pool(&engine, &device(1, 1, 64), CacheKind::Batch);
            let name = llm_datadist_core::bindings::Name::Row { cache: into.cache.id(), row: 0 };
            pull_slot(&engine, of(2, name), &into).unwrap_err();
            into.free(&engine);
        }
    });
    drop(control);
}

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 130;

/// An engine with a cache, and a simulated peer with two streams for its calls.
struct Owner {
    engine: DataDist,
    into: Held,
    peer: Fake,
    control: Stream,
    calls: [Stream; 2],
}

impl Owner {
    fn new() -> Owner {
        Owner::with(|_| ())
    }

    fn with(change: impl FnOnce(&mut Config)) -> Owner {
        let engine = open_with(2, Way::Tcp, change);
        let into = Held::pool(&engine, &device(1, BLOCKS as usize, BLOCK as usize), CacheKind::Blocks);
        into.fill(1);
        let peer = Fake::new(1, 1);
        let (control, first) = peer.calling(&engine, &Tcp as &dyn Transport, 7);
        let second = peer.call(&engine, 7).unwrap();
        Owner { engine, into, peer, control, calls: [first, second] }
    }

    /// Begins the write of the first two blocks with the bytes `from..to`.
    fn begin(&self, stream: &Stream, id: u64, (from, to): (u64, u64)) -> Reply {
        self.begin_with(stream, id, plan(2), (from, to), 10_000)
    }

    fn begin_with(
        &self,
        stream: &Stream,
        id: u64,
        plan: WirePlan,
        (from, to): (u64, u64),
        limit_ms: u64,
    ) -> Reply {
        self.ask_to_write(stream, Some(id), plan, (from, to), limit_ms);
        hear(stream).unwrap()
    }

    fn ask_to_write(
        &self,
        stream: &Stream,
        shared: Option<u64>,
        plan: WirePlan,
        (from, to): (u64, u64),
        limit_ms: u64,
    ) {
        let cache = self.into.cache.id();
        let cache = NamedCache { name: Name::Row { cache, row: 0 }, id: cache };
        let request = Request::Write { cache, plan, range: from..to, ahead: false, shared };
        say(stream, &Timed { limit_ms, request });
    }

    /// Waits until the rows of the write are free.
    fn is_free(&self) {
        self.engine.copy_blocks(&self.into.end(), &[(2, 0), (3, 1)]).run().unwrap();
    }
}

/// A plan that writes `blocks` blocks from the first on.
fn plan(blocks: u64) -> WirePlan {
    plan_of(0, 1, &[one_span(0, 0, BLOCK * blocks)])
}

fn part(stream: &Stream, write: u64, (from, to): (u64, u64)) -> Reply {
    ask(stream, &Request::WritePart { write, range: from..to });
    hear(stream).unwrap()
}

/// Checks that what was asked on `stream` is done.
fn expect_done(stream: &Stream, bytes: u64) {
    assert_eq!(hear::<Reply>(stream).unwrap(), Reply::Done { bytes });
}

/// Sends the bytes for which `stream` is ready.
fn finish(stream: &Stream, bytes: u64) {
    stream.send(&vec![7; bytes as usize], soon()).unwrap();
    expect_done(stream, bytes);
}

fn refused(reply: Reply, what: &str) -> (ErrorKind, String) {
    let Reply::Failed { kind, message, .. } = reply else { panic!("{what}: {reply:?}") };
    (protocol::kind_of(kind), message)
}

/// The parts of a write may arrive in any order. The rows stay pinned until the last one has arrived.
#[test]
fn parts_share_the_pin_of_their_write() {
    let owner = Owner::new();
    let sent: Vec<u8> = (0..2 * BLOCK as usize).map(|at| pattern(9, 0, at)).collect();
    let [first, second] = &owner.calls;
    assert_eq!(owner.begin(first, 5, (0, 100)), Reply::Ready { bytes: 100 });
    assert_eq!(part(second, 5, (100, 2 * BLOCK)), Reply::Ready { bytes: 2 * BLOCK - 100 });
    second.send(&sent[100..], soon()).unwrap();
    expect_done(second, 2 * BLOCK - 100);
    // The first part is still missing, so a copy of these rows waits.
    thread::scope(|scope| {
        let copied = scope.spawn(|| owner.engine.copy_blocks(&owner.into.end(), &[(0, 4), (1, 5)]).run());
        first.send(&sent[..100], soon()).unwrap();
        expect_done(first, 100);
        copied.join().unwrap().unwrap();
    });
    let now = owner.into.read().remove(0);
    let blocks = |from: u64| &now[(from * BLOCK) as usize..][..sent.len()];
    assert!(blocks(0) == sent && blocks(4) == sent, "the copy has taken a torn block");
    let (kind, text) = refused(part(second, 5, (0, 1)), "a part of a write that has ended");
    assert!(kind == ErrorKind::NotLinked && text.contains("it is complete"), "{text}");
}

/// However many requests of the peer wait for the rows of a write, its parts find a thread, and so do requests that need no rows.
#[test]
fn parts_pass_requests_that_wait_for_their_rows() {
    let owner = Owner::new();
    let [first, second] = &owner.calls;
    // Every other one of the writes that wait has one stream.
    let mut waiting: Vec<(Stream, Option<u64>)> =
        (2..62).map(|id| (owner.peer.call(&owner.engine, 7).unwrap(), (id % 2 == 0).then_some(id))).collect();
    assert_eq!(owner.begin_with(first, 1, plan(2), (0, BLOCK), 60_000), Reply::Ready { bytes: BLOCK });
    for (stream, shared) in &waiting {
        owner.ask_to_write(stream, *shared, plan(2), (0, BLOCK), 60_000);
    }
    // Let the writes that wait take all slots first.
    thread::sleep(Duration::from_millis(200));
    // A request that waits for no rows also gets its reply.
    ask(second, &Request::Ping);
    expect_done(second, 0);
    let finish_part = |id: u64| {
        assert_eq!(part(second, id, (BLOCK, 2 * BLOCK)), Reply::Ready { bytes: BLOCK });
        finish(second, BLOCK);
    };
    finish(first, BLOCK);
    finish_part(1);
    while !waiting.is_empty() {
        let mut next = None;
        eventually("the next write that has its rows", || {
            next = waiting.iter().position(|(stream, _)| stream.readable_within(Duration::ZERO));
            next.is_some()
        });
        let (stream, shared) = waiting.swap_remove(next.unwrap());
        assert_eq!(hear::<Reply>(&stream).unwrap(), Reply::Ready { bytes: BLOCK });
        finish(&stream, BLOCK);
        shared.into_iter().for_each(finish_part);
    }
    owner.is_free();
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    use ErrorKind::{InvalidArgument as Wrong, NotLinked};
    let owner = Owner::new();
    let [first, second] = &owner.calls;
    assert_eq!(owner.begin(first, 1, (0, 100)), Reply::Ready { bytes: 100 });
    for (what, write, range, expected) in [
        ("another write", 2, (100, 200), NotLinked),
        ("the same bytes", 1, (0, 100), Wrong),
        ("one byte of another part", 1, (99, 200), Wrong),
        ("around another part", 1, (0, 2 * BLOCK), Wrong),
        ("past the plan", 1, (100, 2 * BLOCK + 1), Wrong),
        ("behind the plan", 1, (1 << 40, 1 << 41), Wrong),
        ("no bytes", 1, (200, 200), Wrong),
        ("a range that ends before it begins", 1, (300, 200), Wrong),
    ] {
        assert_eq!(refused(part(second, write, range), what).0, expected, "{what}");
    }
    let again = owner.begin_with(second, 1, plan(2), (0, 1), 100);
    assert!(matches!(again, Reply::Failed { .. }), "two writes of one number: {again:?}");
    // The write goes on.
    assert_eq!(part(second, 1, (100, 2 * BLOCK)), Reply::Ready { bytes: 2 * BLOCK - 100 });
    finish(first, 100);
    finish(second, 2 * BLOCK - 100);
    assert!(owner.into.read()[0].starts_with(&[7; 2 * BLOCK as usize]));
    owner.is_free();
}

/// A part that breaks off ends the write, and so do the deadline, silence and the end of the link.
#[test]
fn a_write_that_cannot_be_completed_frees_its_rows() {
    let owner = Owner::with(|config| {
        config.links.heartbeat = Duration::from_millis(100);
        config.links.silence = Duration::from_millis(2000);
    });
    let [first, second] = &owner.calls;
    assert_eq!(owner.begin(first, 1, (0, 100)), Reply::Ready { bytes: 100 });
    assert_eq!(part(second, 1, (100, 200)), Reply::Ready { bytes: 100 });
    second.close();
    finish(first, 100);
    owner.is_free();
    let third = owner.peer.call(&owner.engine, 7).unwrap();
    assert_eq!(refused(part(&third, 1, (200, 300)), "a write that has failed").0, ErrorKind::NotLinked);

    // No part arrives any more, and then the deadline passes, or the time that a peer may be silent. Its link is not silent.
    let freed = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !freed.load(Ordering::Relaxed) {
                say(&owner.control, &ControlMessage::Pong);
                thread::sleep(Duration::from_millis(100));
            }
        });
        for (id, limit_ms) in [(2, 1000), (3, 60_000)] {
            assert_eq!(owner.begin_with(&third, id, plan(2), (0, 1), limit_ms), Reply::Ready { bytes: 1 });
            finish(&third, 1);
            owner.is_free();
        }
        freed.store(true, Ordering::Relaxed);
    });

    assert_eq!(owner.begin(first, 4, (0, 100)), Reply::Ready { bytes: 100 });
    ask(&third, &Request::Unlink);
    expect_done(&third, 0);
    owner.is_free();
}

/// Writes that are begun and left alone take a bounded number of entries.
#[test]
fn the_writes_of_a_peer_are_bounded() {
    let owner = Owner::new();
    let [stream, _] = &owner.calls;
    let to_block = |block: u64| plan_of(0, 1, &[one_span(0, block * BLOCK, 2)]);
    for id in 0..128 {
        assert_eq!(owner.begin_with(stream, id, to_block(id), (0, 1), 60_000), Reply::Ready { bytes: 1 });
        finish(stream, 1);
    }
    let (kind, text) = refused(owner.begin_with(stream, 128, to_block(128), (0, 1), 60_000), "one more");
    assert!(kind == ErrorKind::NotLinked && text.contains("limit=128"), "{text}");
    assert_eq!(part(stream, 0, (1, 2)), Reply::Ready { bytes: 1 });
    finish(stream, 1);
    assert_eq!(owner.begin_with(stream, 128, to_block(128), (0, 1), 60_000), Reply::Ready { bytes: 1 });
    finish(stream, 1);
    let nothing = refused(owner.begin_with(stream, 129, to_block(129), (0, 0), 60_000), "no bytes");
    assert_eq!(nothing.0, ErrorKind::InvalidArgument);
}

/// Many pushes at once into one row wait for each other, and for none of their own parts. Each has two streams, so that more of
/// them wait for the row than one link has slots.
#[test]
fn pushes_into_one_row_take_turns() {
    let pair = Pair::new(Way::Tcp);
    let [local, remote] = pair.pools(&device(2, 1, 8 * MIB), CacheKind::Batch);
    let source = local.fill(4);
    thread::scope(|scope| {
        for _ in 0..40 {
            scope.spawn(|| push_slot(&pair.local, &local, 0, of(2, row(&remote, 0))).unwrap());
        }
    });
    assert!(remote.read() == source);
}
