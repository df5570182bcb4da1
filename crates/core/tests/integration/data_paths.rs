//! The contract of a data path, checked for each of them: which memory it reaches and in how many hops, that the same plan moves
//! the same bytes on every path, and what is left after a read that was given up. `links/paths.rs` runs all paths over links.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::{Config, FabricConfig};
use llm_datadist_core::testing::copy::{
    CopyEngine, DataPath, Hops, PathJob, PathKind, PeerTensors, Progress, STILL_READING, Staging, StreamPath,
};
use llm_datadist_core::testing::device::{DeviceSet, HostReach};
use llm_datadist_core::testing::fabric::{EngineFabric, PeerFabric};
use llm_datadist_core::testing::memory::{PeerProcess, Reach, Region, Tensors, own_probe};
use llm_datadist_core::testing::net::Stream;
use llm_datadist_core::testing::plan::{CopyPlan, Side};
use llm_datadist_core::testing::protocol::Run;
use llm_datadist_core::{Deadline, ErrorKind, Placement};
use llm_datadist_testing::{SimDevice, Stall};

use crate::emulation::PROCESS_READS;
use crate::fixtures::{
    Buffer, block_plan, config, copy_engine, eventually, local_streams, ringed_streams, soon, tensors_over,
};
use crate::links::stand_ins::{self, stand_in};
use crate::peer_memory::{Peer, ROW, ROWS, TENSOR, TENSORS, source};
use crate::socket_copies::SocketCopies as _;

const REACHES: [Reach; 5] = [Reach::Host, Reach::HostRead, Reach::Process, Reach::Fabric, Reach::Device];

/// Blocks in a shuffled order. Two pairs write one destination, of which the plan keeps the last.
fn pairs() -> Vec<(u64, u64)> {
    let rows = ROWS as u64;
    (0..rows).map(|row| (row, row * 7 % rows)).chain([(3, 5)]).collect()
}

/// The bytes of a tensor filled with `before`, after the pairs were copied in order.
fn expected(tensor: usize, before: u8) -> Vec<u8> {
    let mut bytes = vec![before; TENSOR];
    for (from, to) in pairs() {
        let (from, to) = (from as usize * ROW, to as usize * ROW);
        bytes[to..to + ROW].copy_from_slice(&source(tensor, from, ROW));
    }
    bytes
}

/// Copies all tensors within an engine.
fn copy_all(engine: &CopyEngine, from: (&Arc<Tensors>, Placement), to: (&Arc<Tensors>, Placement)) {
    let all: Vec<_> = (0..ROWS as u64).map(|row| (row, row)).collect();
    let (plan, staging) = (block_plan(&all, ROW as u64, TENSORS as u32), Staging::DEFAULT);
    engine.run(plan, from, to, staging, soon(), &Arc::default()).unwrap();
}

/// An engine, and the memory into which it reads.
struct Destination {
    engine: CopyEngine,
    device: HostReach,
    tensors: Arc<Tensors>,
    placement: Placement,
    /// The memory, if the CPU can address it.
    buffer: Option<Arc<Buffer>>,
}

impl Destination {
    fn host() -> Destination {
        let (buffer, tensors) = tensors_over(TENSORS, ROWS, ROW, |_, _| 0xEE);
        let (engine, device, placement) = (copy_engine(), HostReach::Direct, Placement::Host);
        Destination { engine, device, tensors, placement, buffer: Some(buffer) }
    }

    fn device(device: HostReach) -> Destination {
        let devices = DeviceSet::with_device(Arc::new(SimDevice::new(device)));
        let region = devices.at(Placement::Device).allocate("test", (TENSORS * TENSOR) as u64).unwrap();
        let offsets = (0..TENSORS).map(|tensor| (tensor * TENSOR) as u64);
        let tensors = Tensors::carved(Arc::new(region), offsets, TENSOR as u64, ()).unwrap();
        let engine = CopyEngine::new(&Config { copy_workers: Some(2), ..config(1 << 20) }, devices);
        let (tensors, placement) = (Arc::new(tensors), Placement::Device);
        let (_buffer, blank) = tensors_over(TENSORS, ROWS, ROW, |_, _| 0xEE);
        copy_all(&engine, (&blank, Placement::Host), (&tensors, placement));
        Destination { engine, device, tensors, placement, buffer: None }
    }

    fn check(&self, what: &str) {
        let read = if let Some(buffer) = &self.buffer {
            buffer.read(0, TENSORS * TENSOR)
        } else {
            let (buffer, host) = tensors_over(TENSORS, ROWS, ROW, |_, _| 0);
            copy_all(&self.engine, (&self.tensors, Placement::Device), (&host, Placement::Host));
            buffer.read(0, TENSORS * TENSOR)
        };
        let wanted: Vec<u8> = (0..TENSORS).flat_map(|tensor| expected(tensor, 0xEE)).collect();
        assert!(read == wanted, "{what}");
    }

    fn read(&self, path: &mut dyn DataPath, plan: &CopyPlan, what: &str) {
        let progress = Arc::<Progress>::default();
        let job = PathJob { copy_engine: &self.engine, plan, deadline: soon() };
        let to = (&self.tensors, self.placement);
        let ring = self.engine.ring_bytes();
        let hops = path.hops(Side::Destination, self.tensors.reach(), self.device);
        let read = path.read(job, to, &progress, Arc::new(())).unwrap();
        assert_eq!((Some(read), progress.bytes()), (hops, plan.bytes()), "{what}");
        assert_eq!(self.engine.ring_bytes(), ring, "the ring is for swap-ins, {what}");
        self.check(what);
    }
}

/// Memory of this process that the stand-in for UCX reads like that of a peer.
struct Library {
    config: FabricConfig,
    source: PeerTensors,
    _peer: PeerFabric,
    _owner: EngineFabric,
}

impl Library {
    fn new() -> Library {
        let region = Arc::new(Region::shared("library", (TENSORS * TENSOR) as u64).unwrap());
        let offsets: Vec<_> = (0..TENSORS).map(|tensor| (tensor * TENSOR) as u64).collect();
        let own = Tensors::carved(region.clone(), offsets.iter().copied(), TENSOR as u64, ()).unwrap();
        let (_buffer, filled) = tensors_over(TENSORS, ROWS, ROW, |tensor, at| source(tensor, at, 1)[0]);
        copy_all(&copy_engine(), (&filled, Placement::Host), (&Arc::new(own), Placement::Host));
        let config = stand_in(&[]);
        let owner = EngineFabric::open(&config, true, [Some(region), None]).unwrap().unwrap();
        let peer = owner.take(&owner.offer()).unwrap();
        let runs = Run::pack(&offsets).unwrap();
        let (tensors, pool) = peer.tensors(0, &runs, TENSORS as u32, TENSOR as u64).unwrap().unwrap();
        Library { config, source: PeerTensors::Fabric(tensors, pool), _peer: peer, _owner: owner }
    }
}

/// Sends the bytes of the peer from memory of this process.
fn serve(plan: &CopyPlan, stream: &Stream) {
    let (_buffer, tensors) = tensors_over(TENSORS, ROWS, ROW, |tensor, at| source(tensor, at, 1)[0]);
    copy_engine().send(plan, 0..plan.bytes(), &tensors, stream, soon(), None).unwrap();
}

#[test]
fn paths_move_equal_bytes() {
    let (peer, library) = (Peer::start(), Library::new());
    let plan = block_plan(&pairs(), ROW as u64, TENSORS as u32);
    let destinations = || {
        let devices = [HostReach::Direct, HostReach::Staged].map(Destination::device);
        [Destination::host()].into_iter().chain(devices)
    };
    for mut remote in peer.sources().iter().chain([&library.source]) {
        for to in destinations() {
            let what = format!("{:?} to {:?}, {:?}", remote.kind(), to.tensors.reach(), to.device);
            to.read(&mut remote, &plan, &what);
        }
    }
    let streams = [local_streams, ringed_streams];
    for (to, streams) in streams.into_iter().flat_map(|streams| destinations().map(move |to| (to, streams))) {
        let (local, remote) = streams("every_path");
        thread::scope(|scope| {
            scope.spawn(|| serve(&plan, &local));
            let mut path = StreamPath { stream: &remote, range: 0..plan.bytes(), sum: None };
            to.read(&mut path, &plan, &format!("streams to {:?}, {:?}", to.tensors.reach(), to.device));
        });
    }
}

#[test]
fn paths_report_reachable_memory_and_hops() {
    let (peer, library) = (Peer::start(), Library::new());
    let sources = peer.sources();
    let kinds: Vec<_> = sources.iter().map(|source| source.kind()).collect();
    let expected = [PathKind::Mapped, PathKind::Process];
    assert_eq!(kinds, expected[..if PROCESS_READS.missing().is_some() { 1 } else { 2 }]);
    let (stream, _other) = local_streams("which_memory");
    let (ringed, _other) = ringed_streams("which_memory");
    let into = |host, device| {
        move |memory| match memory {
            Reach::Host => host,
            Reach::Device => device,
            Reach::HostRead | Reach::Process | Reach::Fabric => None,
        }
    };
    let (one, two) = (Some(Hops::One), Some(Hops::Two));
    for device in [HostReach::Direct, HostReach::Staged] {
        for memory in REACHES {
            let what = format!("{memory:?}, {device:?}");
            let hops = |path: &dyn DataPath, end| path.hops(end, memory, device);
            for remote in sources.iter().chain([&library.source]) {
                let (sees, to_device) = match remote.kind() {
                    PathKind::Mapped => (true, if device == HostReach::Direct { one } else { two }),
                    PathKind::Process => (true, two),
                    PathKind::Fabric => (false, two),
                    other => panic!("{other:?}"),
                };
                assert_eq!(remote.kind().sees_generations(), sees);
                assert_eq!(hops(&remote, Side::Destination), into(one, to_device)(memory), "{what}");
                assert_eq!(hops(&remote, Side::Source), None, "{what}");
            }
            for (stream, kind) in [(&stream, PathKind::Sockets), (&ringed, PathKind::Rings)] {
                let path = StreamPath { stream, range: 0..0, sum: None };
                assert_eq!((path.kind(), path.kind().sees_generations()), (kind, false));
                assert_eq!(hops(&path, Side::Destination), into(one, two)(memory), "{what}");
                let sent = if memory == Reach::HostRead { one } else { into(one, two)(memory) };
                assert_eq!(hops(&path, Side::Source), sent, "{what}");
            }
        }
    }
}

#[test]
fn paths_refuse_unreachable_memory() {
    let (peer, library) = (Peer::start(), Library::new());
    let plan = block_plan(&pairs(), ROW as u64, TENSORS as u32);
    let (stream, _other) = local_streams("refused");
    let (engine, progress) = (copy_engine(), Arc::<Progress>::default());
    let job = PathJob { copy_engine: &engine, plan: &plan, deadline: soon() };
    for remote in peer.tensors() {
        let to = (&remote, Placement::Host);
        let own = peer.source(&remote);
        let mut socket = StreamPath { stream: &stream, range: 0..plan.bytes(), sum: None };
        let paths: [&mut dyn DataPath; 3] = [&mut &own, &mut &library.source, &mut socket];
        for path in paths {
            let error = path.read(job, to, &progress, Arc::new(())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::System, "{:?}: {error}", path.kind());
        }
    }
    if !PROCESS_READS.skips() {
        let mut path = StreamPath { stream: &stream, range: 0..plan.bytes(), sum: None };
        let error = path.send(job, &peer.read(), &Progress::default()).unwrap_err();
        assert!(error.to_string().contains("cannot be sent through a stream"), "{error}");
    }
    assert_eq!(progress.bytes(), 0);
}

/// A source that does not respond makes the read time out. Nothing is written afterwards, unless the error says so.
#[test]
fn a_read_that_is_given_up_leaves_its_destination_alone() {
    let plan = block_plan(&pairs(), ROW as u64, TENSORS as u32);
    let engine = copy_engine();
    let given_up = |path: &mut dyn DataPath, held: &Arc<()>| {
        let (buffer, tensors) = tensors_over(TENSORS, ROWS, ROW, |_, _| 0xEE);
        let deadline = Deadline::after(Duration::from_millis(100));
        let job = PathJob { copy_engine: &engine, plan: &plan, deadline };
        let error = path.read(job, (&tensors, Placement::Host), &Arc::default(), held.clone()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{:?}: {error}", path.kind());
        (buffer, tensors, error)
    };
    let unchanged = |buffer: &Buffer| buffer.read(0, TENSORS * TENSOR).iter().all(|&byte| byte == 0xEE);

    let (library, held) = (Library::new(), Arc::new(()));
    stand_ins::set(&library.config, "STALL", 0);
    let (buffer, _tensors, error) = given_up(&mut &library.source, &held);
    stand_ins::set(&library.config, "STALL", i64::MAX);
    assert_eq!((error.fact(STILL_READING), Arc::strong_count(&held)), (None, 1));
    thread::sleep(Duration::from_millis(100));
    assert!(unchanged(&buffer), "UCX wrote after the read was given up");

    let (local, remote) = local_streams("given_up");
    let mut path = StreamPath { stream: &remote, range: 0..plan.bytes(), sum: None };
    let (buffer, _tensors, error) = given_up(&mut path, &held);
    assert_eq!((error.fact(STILL_READING), Arc::strong_count(&held)), (None, 1));
    let (_source, from) = tensors_over(TENSORS, ROWS, ROW, |_, _| 0x11);
    let late = PathJob { copy_engine: &engine, plan: &plan, deadline: soon() };
    let _ = StreamPath { stream: &local, range: 0..4096, sum: None }.send(late, &from, &Progress::default());
    assert!(unchanged(&buffer), "bytes arrived after the read was given up");

    if PROCESS_READS.skips() {
        return;
    }
    let (bytes, _own) = tensors_over(TENSORS, ROWS, ROW, |tensor, at| source(tensor, at, 1)[0]);
    let process = PeerProcess::open(std::process::id().cast_signed(), own_probe().unwrap()).unwrap();
    let addrs = (0..TENSORS).map(|tensor| bytes.addr() + (tensor * TENSOR) as u64).collect();
    let remote = Arc::new(Tensors::of_process(process.clone(), addrs, TENSOR as u64).unwrap());
    let stall = Stall::new(bytes.addr()..bytes.addr() + (TENSORS * TENSOR) as u64);
    // A call that was not read yet when its time was over leaves nothing behind.
    let (buffer, tensors) = loop {
        let path = PeerTensors::Process(remote.clone(), process.clone());
        let (buffer, tensors, error) = given_up(&mut &path, &held);
        if error.fact(STILL_READING).is_some() {
            break (buffer, tensors);
        }
    };
    assert!(Arc::strong_count(&held) > 1 && Arc::strong_count(&tensors) > 1, "the kernel may still write");
    assert!(unchanged(&buffer));
    drop(stall);
    eventually("the end of the kernel's calls", || Arc::strong_count(&held) == 1);
}
