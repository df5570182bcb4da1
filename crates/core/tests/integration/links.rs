//! Two engines of one process, linked over every transport, for the tests of links, pulls and pushes below.
//!
//! `tests/test_peer_faults.py` covers real processes that die.

mod asked_checksums;
mod asynchronous;
mod awaiting;
mod broken_poller;
mod broken_streams;
mod bytes;
mod communicators;
mod damaged_messages;
mod deadlines;
mod ensure_link;
mod fabric;
pub mod fake_peer;
mod identity;
mod kv_layouts;
mod layerwise;
mod layerwise_faults;
mod linking;
mod memory_offers;
mod names;
mod native;

mod padded_rows;
mod panics;
mod paths;
mod pull_and_push;
mod push_ahead;
mod races;
mod rings;
mod several_engines;
mod silent_memory;
pub(crate) mod stand_ins;
mod streams;
mod verification;

use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use llm_datadist_core::bindings::{
    Cache, CacheKey, CallExtras, Config, DataDist, End, GroupMember, Layers, Name, Operation, PeerAddress,
    PoolConfig, RemoteName, Role, Rows, Side, Token, TransportChoice,
};
use llm_datadist_core::testing::device::{DeviceSet, HostReach};
use llm_datadist_core::testing::net::{Accepted, Address, Listener, Stream, Tcp, Transport, Unix};
use llm_datadist_core::testing::session::Transports;
use llm_datadist_core::{
    CacheDesc, CacheKind, ClusterId, Deadline, Error, ErrorKind, GrantToken, GrantUse, Placement, Result,
    Verify,
};

use llm_datadist_testing::SimDevice;

pub use crate::fixtures::LONG;
use crate::fixtures::{self, Chance, Gated, Own, eventually};
use crate::log;

/// How two engines reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Local sockets in the place of TCP.
    Local,
    /// Local sockets, memory shared.
    Shm,
    /// Loopback sockets, nothing shared.
    Tcp,
    /// As `Shm`, with device pools in memory that the CPU cannot address.
    ShmDevice,
    /// As `Tcp`, with device pools in memory that the CPU cannot address.
    TcpDevice,
    /// As `Tcp`, with pools that are read by a stand-in for UCX.
    Fabric,
}

const WAYS: [Way; 6] = [Way::Local, Way::Shm, Way::Tcp, Way::ShmDevice, Way::TcpDevice, Way::Fabric];

/// The ways with sockets of the kernel.
const SOCKETS: [Way; 5] = [Way::Shm, Way::Tcp, Way::ShmDevice, Way::TcpDevice, Way::Fabric];

/// Local sockets with ports as addresses, because links use ports.
#[derive(Debug)]
struct Ports;

#[derive(Debug)]
struct Port(Box<dyn Listener>, SocketAddr);

static NEXT_PORT: AtomicU16 = AtomicU16::new(1);

impl Ports {
    fn named(port: &Address) -> Address {
        Address::Unix(format!("llm_datadist-{port}-{}", std::process::id()))
    }
}

impl Transport for Ports {
    fn name(&self) -> &'static str {
        "local"
    }

    fn dial(&self, to: &Address, deadline: Deadline) -> Result<Stream> {
        Unix.dial(&Self::named(to), deadline)
    }

    fn listen(&self, at: &Address) -> Result<Box<dyn Listener>> {
        let Address::Tcp(mut at) = *at else { return Unix.listen(at) };
        if at.port() == 0 {
            at.set_port(NEXT_PORT.fetch_add(1, Ordering::Relaxed));
        }
        Ok(Box::new(Port(Unix.listen(&Self::named(&Address::Tcp(at)))?, at)))
    }
}

impl Listener for Port {
    fn accept(&self) -> Result<Accepted> {
        self.0.accept()
    }

    fn readiness(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.readiness()
    }

    fn address(&self) -> Address {
        Address::Tcp(self.1)
    }

    fn close(&self) {
        self.0.close();
    }
}

impl Way {
    fn transports(self) -> Transports {
        let tcp: Arc<dyn Transport> = if self == Way::Local { Arc::new(Ports) } else { Arc::new(Tcp) };
        Transports { tcp, unix: Arc::new(Unix) }
    }

    /// Whether memory is seen from the other side.
    fn shares(self) -> bool {
        !matches!(self, Way::Tcp | Way::TcpDevice) && !self.has_fabric()
    }

    /// Whether UCX reads pools.
    fn has_fabric(self) -> bool {
        self == Way::Fabric
    }

    /// Whether the engines use local sockets.
    fn shares_sockets(self) -> bool {
        matches!(self, Way::Shm | Way::ShmDevice)
    }

    /// Whether the CPU can address the device pools.
    fn addresses_devices(self) -> bool {
        !matches!(self, Way::ShmDevice | Way::TcpDevice)
    }

    fn devices(self) -> DeviceSet {
        if self.addresses_devices() {
            return DeviceSet::host_only();
        }
        DeviceSet::with_device(Arc::new(SimDevice::new(HostReach::Staged)))
    }
}

/// A token that both engines of a test may have.
const TOKEN: &str = "sixteen letters or more";

/// Returns a configuration that listens, with limits that no test reaches by accident.
fn config(cluster: u64, way: Way) -> Config {
    let mut config = Config::new(Role::Prompt, ClusterId(cluster));
    config.device_pool = Some(PoolConfig { memory_size: 64 << 20, page_shift: 12 });
    config.host_pool = config.device_pool;
    config.sync_timeout = LONG;
    config.copy_workers = Some(2);
    config.links.transport = if way.shares_sockets() { TransportChoice::Auto } else { TransportChoice::Tcp };
    if way.has_fabric() {
        config.links.fabric = stand_ins::stand_in(&[]);
        config.links.token = Some(Token::new(TOKEN));
    }
    config.links.listen = Some("127.0.0.1:0".parse().unwrap());
    // On a busy machine a live peer may take seconds to answer.
    config.links.heartbeat = Duration::from_secs(5);
    config.links.silence = LONG;
    // Peers that a test simulates prove nothing; `identity` covers which peers are admitted.
    config.links.accept_remote = true;
    config
}

fn open(config: Config, way: Way) -> DataDist {
    log::collect();
    DataDist::open_over(config, way.devices(), way.transports()).unwrap()
}

/// Opens an engine that listens, with a changed configuration.
fn open_with(cluster: u64, way: Way, change: impl FnOnce(&mut Config)) -> DataDist {
    let mut config = config(cluster, way);
    change(&mut config);
    open(config, way)
}

/// An engine whose device copies wait while `gate` is shut.
fn open_gated(config: Config, way: Way, gate: &Arc<Gated>) -> DataDist {
    DataDist::open_over(config, DeviceSet::with_device(gate.clone()), way.transports()).unwrap()
}

/// The error of a call, which must be of this kind.
#[track_caller]
fn fails_with<T: Debug>(result: Result<T>, kind: ErrorKind) -> Error {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    error
}

/// Returns the error of a call, which must have this kind and contain this text.
#[track_caller]
fn fails_saying<T: Debug>(result: Result<T>, kind: ErrorKind, why: &str) -> Error {
    let error = fails_with(result, kind);
    assert!(error.to_string().contains(why), "{error}");
    error
}

/// The bytes that a path has moved over the only link of `engine`.
fn bytes_by(path: &str, engine: &DataDist) -> u64 {
    let link = engine.stats().links.remove(0);
    link.paths.iter().find(|(name, _)| *name == path).map_or(0, |(_, state)| state.bytes)
}

fn address(of: &DataDist) -> PeerAddress {
    let remote = of.listening().into_iter().collect();
    PeerAddress { cluster: of.config().cluster, remote, local: vec![] }
}

fn link(local: &DataDist, remote: &DataDist) -> Result<()> {
    local.link_clusters(&[address(remote)], LONG).remove(0)
}

fn unlink(local: &DataDist, remote: &DataDist) -> Result<()> {
    local.unlink_clusters(&[address(remote)], LONG, false).remove(0)
}

/// Cluster 1 and cluster 2, linked by 1.
struct Pair {
    local: DataDist,
    remote: DataDist,
}

impl Pair {
    fn new(way: Way) -> Pair {
        Self::with(way, |_| ())
    }

    fn with(way: Way, change: impl Fn(&mut Config)) -> Pair {
        let pair = Pair { local: open_with(1, way, &change), remote: open_with(2, way, &change) };
        link(&pair.local, &pair.remote).unwrap();
        pair
    }

    /// A pool cache of the local engine and one of the remote engine, without keys.
    fn pools(&self, desc: &CacheDesc, kind: CacheKind) -> [Held; 2] {
        [&self.local, &self.remote].map(|engine| Held::pool(engine, desc, kind))
    }

    /// A registered cache of each engine, without keys.
    fn registered(&self, desc: &CacheDesc, kind: CacheKind) -> [Held; 2] {
        [&self.local, &self.remote].map(|engine| Held::new(engine, true, desc, kind, &[]))
    }

    /// Takes back a cache of the local engine and one of the remote engine.
    fn free(&self, local: &Held, remote: &Held) {
        local.free(&self.local);
        remote.free(&self.remote);
    }
}

/// A pair over every transport. A test that fails shows which one.
fn pairs() -> impl Iterator<Item = Pair> {
    WAYS.into_iter().inspect(|way| eprintln!("{way:?}")).map(Pair::new)
}

/// The cache `name` of the cluster that is not this one.
fn of(cluster: u64, name: Name) -> RemoteName {
    RemoteName { cluster: ClusterId(cluster), name }
}

fn request(id: u64) -> CacheKey {
    CacheKey::Request { model: 0, id }
}

fn row(cache: &Held, row: u32) -> Name {
    Name::Row { cache: cache.cache.id(), row }
}

fn device(tensors: u32, rows: usize, row_bytes: usize) -> CacheDesc {
    fixtures::desc(Placement::Device, tensors, rows, row_bytes)
}

/// Pulls a whole slot into slot 0 of `into`.
fn pull_slot(local: &DataDist, from: RemoteName, into: &Held) -> Result<()> {
    local.pull(from, &into.end(), Rows::slot(0, -1), Layers::ALL).run()
}

/// Blocks of the peer's cache, and as many of the own one.
fn block_rows(remote: &[i64], local: &[i64]) -> Rows {
    Rows::Blocks { remote: remote.to_vec(), local: local.to_vec() }
}

/// A call that asks for a comparison, or for none.
fn verified(verify: Verify) -> CallExtras {
    CallExtras { verify: Some(verify), ..CallExtras::default() }
}

/// A pull under a grant.
fn under(token: GrantToken) -> CallExtras {
    CallExtras { grant: Some(GrantUse { token, done: false }), ..CallExtras::default() }
}

/// A pull of all layers of `rows` into a cache.
fn pulling<'a>(
    local: &'a DataDist,
    from: RemoteName,
    into: &Held,
    rows: Rows,
    extras: CallExtras,
) -> Operation<'a> {
    local.transfer(Side::Destination, from, &into.end(), (rows, Layers::ALL), extras)
}

/// A push of all layers of `rows` of a cache.
fn pushing<'a>(
    local: &'a DataDist,
    source: &Held,
    to: RemoteName,
    rows: Rows,
    extras: CallExtras,
) -> Operation<'a> {
    local.transfer(Side::Source, to, &source.end(), (rows, Layers::ALL), extras)
}

/// A part of a group: all layers of `rows`, without a grant.
fn member(remote: RemoteName, local: &Held, rows: Rows) -> GroupMember {
    GroupMember { remote, local: local.end(), rows, layers: Layers::ALL, grant: None }
}

/// Pulls blocks, whole.
fn pull_blocks(
    local: &DataDist,
    from: RemoteName,
    into: &Held,
    remote: &[i64],
    blocks: &[i64],
) -> Result<()> {
    pulling(local, from, into, block_rows(remote, blocks), CallExtras::default()).run()
}

/// Pushes blocks, whole.
fn push_blocks(
    local: &DataDist,
    source: &Held,
    blocks: &[i64],
    to: RemoteName,
    remote: &[i64],
) -> Result<()> {
    pushing(local, source, to, block_rows(remote, blocks), CallExtras::default()).run()
}

/// Checks that `local` can pull from `remote`.
fn check_pull(local: &DataDist, remote: &DataDist) {
    let [into, source] =
        [local, remote].map(|engine| Held::pool(engine, &device(2, 1, 64), CacheKind::Batch));
    let bytes = source.fill(1);
    pull_slot(local, of(remote.config().cluster.0, row(&source, 0)), &into).unwrap();
    assert!(into.read() == bytes);
    into.free(local);
    source.free(remote);
}

/// Pushes slot `slot` of `source`, whole.
fn push_slot(local: &DataDist, source: &Held, slot: u32, to: RemoteName) -> Result<()> {
    local.push(&source.end(), to, Rows::slot(slot, -1), Layers::ALL).run()
}

/// A cache of an engine, of its pool or of the test's own memory.
struct Held {
    cache: Arc<Cache>,
    own: Option<Own>,
}

impl Held {
    fn new(
        engine: &DataDist,
        registered: bool,
        desc: &CacheDesc,
        kind: CacheKind,
        keys: &[Option<CacheKey>],
    ) -> Held {
        if registered {
            let own = Own::new(desc, kind, |adopted| engine.register(adopted, keys, Some(true)).unwrap());
            return Held { cache: own.cache.clone(), own: Some(own) };
        }
        Held { cache: engine.allocate(desc, kind, keys).unwrap(), own: None }
    }

    /// A pool cache without keys.
    fn pool(engine: &DataDist, desc: &CacheDesc, kind: CacheKind) -> Held {
        Held::new(engine, false, desc, kind, &[])
    }

    /// Takes the cache back from its engine, whichever way it was made.
    fn free(&self, engine: &DataDist) {
        engine.deallocate(self.cache.id()).unwrap();
        engine.unregister(self.cache.id()).unwrap();
    }

    fn end(&self) -> End {
        End::Managed(self.cache.id())
    }

    fn write(&self, tensors: &[Vec<u8>]) {
        match &self.own {
            Some(own) => own.write(tensors),
            None => fixtures::fill(&self.cache, tensors),
        }
    }

    /// Fills it with bytes that differ everywhere, and returns them.
    fn fill(&self, seed: u8) -> Vec<Vec<u8>> {
        let bytes: Vec<Vec<u8>> = (0..self.cache.num_tensors())
            .map(|tensor| {
                let len = self.cache.geometry().tensor_bytes() as usize;
                (0..len).map(|at| fixtures::pattern(seed, tensor as usize, at)).collect()
            })
            .collect();
        self.write(&bytes);
        bytes
    }

    fn read(&self) -> Vec<Vec<u8>> {
        match &self.own {
            Some(own) => {
                own.outside_untouched();
                own.read()
            }
            None => fixtures::contents(&self.cache),
        }
    }
}

/// Returns how often to run a randomized loop: `PROPTEST_CASES` if it is set, otherwise `default`.
fn times(default: u32) -> u32 {
    fixtures::proptest_cases(default).cases
}

/// Runs `judge` with a linked pair for every transport, `count` times each, with the number of the round. A test that fails shows
/// both.
fn rounds((seed, count): (u64, u32), one_sided: bool, judge: impl Fn(&Pair, &mut Chance, u32)) {
    for way in WAYS {
        let pair = Pair::with(way, |config| config.remote_accessible = one_sided);
        let mut chance = Chance(seed);
        for round in 0..times(count) {
            eprintln!("{way:?}, round {round}");
            judge(&pair, &mut chance, round);
        }
    }
}

/// A kind of memory at one end of a transfer.
#[derive(Clone, Copy, Debug)]
struct Memory {
    registered: bool,
    placement: Placement,
}

impl Memory {
    /// Returns a cache with this number of tensors, rows, and bytes per row.
    fn held(
        self,
        engine: &DataDist,
        (tensors, rows, row_bytes): (u32, usize, usize),
        kind: CacheKind,
        keys: &[Option<CacheKey>],
    ) -> Held {
        let desc = fixtures::desc(self.placement, tensors, rows, row_bytes);
        Held::new(engine, self.registered, &desc, kind, keys)
    }
}

/// Every kind of memory.
fn memories() -> impl Iterator<Item = Memory> {
    let of = |registered| Placement::ALL.map(|placement| Memory { registered, placement });
    [false, true].into_iter().flat_map(of)
}

/// Runs `judge` with a linked pair for every transport and mode, and for every kind of memory of the local and the remote end.
fn each(judge: impl Fn(bool, &Pair, Memory, Memory)) {
    for (way, one_sided) in WAYS.into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let pair = Pair::with(way, |config| config.remote_accessible = one_sided);
        for (local, remote) in memories().flat_map(|local| memories().map(move |remote| (local, remote))) {
            eprintln!("{way:?}, one-sided {one_sided}, {local:?}, {remote:?}");
            judge(one_sided, &pair, local, remote);
        }
        for engine in [&pair.local, &pair.remote] {
            let links = engine.stats().links;
            assert_eq!(links.len(), 1);
            assert_eq!(links[0].pools == "mapped", way.shares(), "{way:?}");
        }
    }
}
