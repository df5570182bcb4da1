//! The contract of a data path, checked for each of them: which memory it reaches and in how many hops, and that the same plan
//! ends in the same bytes on every path. `links/paths.rs` runs all paths over links, with UCX and NIXL among them.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use llm_datadist_core::testing::copy::{
    CopyEngine, DataPath, Hops, PathJob, PathKind, Progress, SocketPath, Staging, in_place,
};
use llm_datadist_core::testing::device::{DeviceSet, HostReach};
use llm_datadist_core::testing::memory::{Reach, Tensors};
use llm_datadist_core::testing::net::Stream;
use llm_datadist_core::testing::plan::{CopyPlan, LocalEnd};
use llm_datadist_core::{Config, Deadline, ErrorKind, Placement};
use llm_datadist_testing::SimDevice;

use crate::fixtures::{Buffer, block_plan, config, copy_engine, local_streams, tensors_over};
use crate::peer_memory::{Peer, ROW, ROWS, TENSOR, TENSORS, source};

const REACHES: [Reach; 5] = [Reach::Host, Reach::HostRead, Reach::Process, Reach::Fabric, Reach::Device];

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// Blocks in a shuffled order. One destination is written twice, so there are two waves.
fn pairs() -> Vec<(u64, u64)> {
    let rows = ROWS as u64;
    (0..rows).map(|row| (row, row * 7 % rows)).chain([(3, 5)]).collect()
}

/// What the plan leaves in a tensor that held only this byte before, block after block in the order of the pairs.
fn expected(tensor: usize, before: u8) -> Vec<u8> {
    let mut bytes = vec![before; TENSOR];
    for (from, to) in pairs() {
        let (from, to) = (from as usize * ROW, to as usize * ROW);
        bytes[to..to + ROW].copy_from_slice(&source(tensor, from, ROW));
    }
    bytes
}

/// Where a read ends: an engine with its memory.
struct Destination {
    engine: CopyEngine,
    device: HostReach,
    tensors: Arc<Tensors>,
    placement: Placement,
    /// The memory, if the CPU addresses it.
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
        let tensors = Tensors::carved(Arc::new(region), offsets, TENSOR as u64, Box::new(())).unwrap();
        let engine = CopyEngine::new(&Config { copy_workers: Some(2), ..config(1 << 20) }, devices).unwrap();
        let destination = Destination {
            engine,
            device,
            tensors: Arc::new(tensors),
            placement: Placement::Device,
            buffer: None,
        };
        let (_, blank) = tensors_over(TENSORS, ROWS, ROW, |_, _| 0xEE);
        destination.copy((&blank, Placement::Host), (&destination.tensors, Placement::Device));
        destination
    }

    /// Copies all tensors within the engine.
    fn copy(&self, from: (&Arc<Tensors>, Placement), to: (&Arc<Tensors>, Placement)) {
        let all: Vec<_> = (0..ROWS as u64).map(|row| (row, row)).collect();
        let (plan, staging) = (block_plan(&all, ROW as u64, TENSORS as u32), Staging::DEFAULT);
        self.engine.run(plan, from, to, staging, soon(), &Arc::default()).unwrap();
    }

    fn check(&self, what: &str) {
        let read = match &self.buffer {
            Some(buffer) => buffer.read(0, TENSORS * TENSOR),
            None => {
                let (buffer, host) = tensors_over(TENSORS, ROWS, ROW, |_, _| 0);
                self.copy((&self.tensors, Placement::Device), (&host, Placement::Host));
                buffer.read(0, TENSORS * TENSOR)
            }
        };
        let wanted: Vec<u8> = (0..TENSORS).flat_map(|tensor| expected(tensor, 0xEE)).collect();
        assert!(read == wanted, "{what}");
    }

    fn read(&self, path: &mut dyn DataPath, plan: &Arc<CopyPlan>, what: &str) {
        let progress = Arc::<Progress>::default();
        let job = PathJob { engine: &self.engine, plan, deadline: soon() };
        let to = (&self.tensors, self.placement);
        let hops = path.hops(LocalEnd::Destination, self.tensors.reach(), self.device);
        let read = path.read(job, to, &progress, Arc::new(())).unwrap();
        assert_eq!(
            (Some(read.hops), read.bytes, progress.bytes()),
            (hops, plan.bytes(), plan.bytes()),
            "{what}"
        );
        self.check(what);
    }
}

/// Sends the bytes of the peer from memory of this process.
fn serve(plan: &Arc<CopyPlan>, stream: &Stream) {
    let (_buffer, tensors) = tensors_over(TENSORS, ROWS, ROW, |tensor, at| source(tensor, at, 1)[0]);
    let mut path = SocketPath { stream, range: 0..plan.bytes(), sum: None };
    path.serve(PathJob { engine: &copy_engine(), plan, deadline: soon() }, &tensors).unwrap();
}

#[test]
fn every_path_ends_in_the_same_bytes() {
    let (peer, plan) = (Peer::start(), Arc::new(block_plan(&pairs(), ROW as u64, TENSORS as u32)));
    assert!(plan.waves().len() > 1, "the order of the blocks matters");
    let destinations = || {
        let devices = [HostReach::Direct, HostReach::Staged].map(Destination::device);
        [Destination::host()].into_iter().chain(devices)
    };
    for remote in [peer.mapped(), peer.read()] {
        for to in destinations() {
            let mut path = in_place(&remote).unwrap();
            let what = format!("{:?} to {:?}, {:?}", path.kind(), to.tensors.reach(), to.device);
            to.read(&mut *path, &plan, &what);
            let job = PathJob { engine: &to.engine, plan: &plan, deadline: soon() };
            path.serve(job, &remote).expect("the owner has nothing to do");
        }
    }
    for to in destinations() {
        let (local, remote) = local_streams("every_path");
        thread::scope(|scope| {
            scope.spawn(|| serve(&plan, &local));
            let mut path = SocketPath { stream: &remote, range: 0..plan.bytes(), sum: None };
            to.read(&mut path, &plan, &format!("sockets to {:?}, {:?}", to.tensors.reach(), to.device));
        });
    }
}

#[test]
fn a_path_says_which_memory_it_reaches_and_how() {
    let peer = Peer::start();
    let (mapped, process) = (peer.mapped(), peer.read());
    let (stream, _other) = local_streams("which_memory");
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
            for (remote, kind, to_device) in [
                (&mapped, PathKind::Mapped, if device == HostReach::Direct { one } else { two }),
                (&process, PathKind::Process, two),
            ] {
                let path = in_place(remote).unwrap();
                assert_eq!((path.kind(), path.kind().sees_generations()), (kind, true));
                assert_eq!(hops(&*path, LocalEnd::Destination), into(one, to_device)(memory), "{what}");
                assert_eq!(hops(&*path, LocalEnd::Source), None, "{what}");
            }
            let path = SocketPath { stream: &stream, range: 0..0, sum: None };
            assert_eq!((path.kind(), path.kind().sees_generations()), (PathKind::Sockets, false));
            assert_eq!(hops(&path, LocalEnd::Destination), into(one, two)(memory), "{what}");
            let sent = if memory == Reach::HostRead { one } else { into(one, two)(memory) };
            assert_eq!(hops(&path, LocalEnd::Source), sent, "{what}");
        }
    }
    assert!(!PathKind::Fabric.sees_generations());
}

#[test]
fn a_path_refuses_memory_that_it_does_not_reach_and_moves_nothing() {
    let (peer, plan) = (Peer::start(), Arc::new(block_plan(&pairs(), ROW as u64, TENSORS as u32)));
    let (stream, _other) = local_streams("refused");
    let (engine, progress) = (copy_engine(), Arc::<Progress>::default());
    let job = PathJob { engine: &engine, plan: &plan, deadline: soon() };
    for remote in [peer.mapped(), peer.read()] {
        let to = (&remote, Placement::Host);
        let mut path = in_place(&remote).unwrap();
        let error = path.read(job, to, &progress, Arc::new(())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System);
        let mut path = SocketPath { stream: &stream, range: 0..plan.bytes(), sum: None };
        let error = path.read(job, to, &progress, Arc::new(())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System);
        assert!(error.to_string().contains("received"), "{error}");
    }
    let mut path = SocketPath { stream: &stream, range: 0..plan.bytes(), sum: None };
    let error = path.serve(job, &peer.read()).unwrap_err();
    assert!(error.to_string().contains("sent"), "{error}");
    let (_buffer, own) = tensors_over(TENSORS, ROWS, ROW, |_, _| 0);
    assert_eq!(in_place(&own).err().map(|error| error.kind()), Some(ErrorKind::System));
    assert_eq!(progress.bytes(), 0);
}
