//! Plans that are sent from memory of a device, and received into it: through host buffers, two at a time.
//!
//! `links` has the same device under pulls and pushes, and `peer_memory` reads of another process into it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::{Config, Role};
use llm_datadist_core::testing::copy::{CopyEngine, Progress};
use llm_datadist_core::testing::device::{Copier, Copy, Device, DeviceSet, HostReach};
use llm_datadist_core::testing::memory::kernels::Kernel;
use llm_datadist_core::testing::memory::{Reach, Tensors};
use llm_datadist_core::testing::net::Stream;
use llm_datadist_core::testing::plan::CopyPlan;
use llm_datadist_core::{ClusterId, ErrorKind, Result};

use crate::fixtures::{
    Buffer, Gated, block_plan, copied_bytes, local_streams, pattern, ringed_streams, soon, tensors_over,
};
use crate::socket_copies::{SocketCopies as _, send_and_receive};

const TENSORS: usize = 3;
const ROWS: usize = 300;
const ROW: usize = 5000;
const TENSOR: usize = ROWS * ROW;

/// Rows in no order, of which two are written twice.
fn pairs() -> Vec<(u64, u64)> {
    let mut pairs: Vec<(u64, u64)> = (0..ROWS as u64).map(|row| (row, row * 77 % ROWS as u64)).collect();
    pairs.extend([(8, 77), (9, 77)]);
    pairs
}

/// The rows of a source, moved one after the other.
fn expected(plan: &CopyPlan) -> Vec<u8> {
    let mut bytes = vec![0xEE; TENSORS * TENSOR];
    for (tensor, piece) in plan.pieces(0, plan.bytes()) {
        for at in 0..piece.len as usize {
            bytes[tensor * TENSOR + piece.dst as usize + at] = pattern(4, tensor, piece.src as usize + at);
        }
    }
    bytes
}

/// An engine on a device, and tensors of either kind of memory.
struct Side {
    gate: Arc<Gated>,
    engine: CopyEngine,
    tensors: Arc<Tensors>,
    /// The memory of `tensors`, unless that of the device.
    _kept: Option<Arc<Buffer>>,
}

impl Side {
    /// Makes tensors with the bytes that `fill` returns for a tensor and an offset.
    fn new(on_device: bool, fill: impl Fn(usize, usize) -> u8) -> Side {
        let gate = Gated::new(HostReach::Staged);
        let devices = DeviceSet::with_device(gate.clone());
        let engine = CopyEngine::new(&Config::new(Role::Mix, ClusterId(1)), devices);
        let (kept, host) = tensors_over(TENSORS, ROWS, ROW, fill);
        if !on_device {
            return Side { gate, engine, tensors: host, _kept: Some(kept) };
        }
        let region = Arc::new(gate.allocate("test", (TENSORS * TENSOR) as u64).unwrap());
        let offsets = (0..TENSORS).map(|tensor| (tensor * TENSOR) as u64);
        let tensors = Arc::new(Tensors::carved(region, offsets, TENSOR as u64, ()).unwrap());
        assert_eq!(tensors.reach(), Reach::Device);
        copy_all(&gate, &host, &tensors);
        Side { gate, engine, tensors, _kept: None }
    }

    fn read(&self) -> Vec<u8> {
        let (buffer, host) = tensors_over(TENSORS, ROWS, ROW, |_, _| 0);
        copy_all(&self.gate, &self.tensors, &host);
        buffer.read(0, TENSORS * TENSOR)
    }
}

fn copy_all(device: &Gated, from: &Tensors, to: &Tensors) {
    for tensor in 0..TENSORS {
        let [src, dst] = [from, to].map(|tensors| tensors.window(tensor, 0, TENSOR as u64).unwrap());
        device.copy(&[Copy::one(src, dst)], Kernel::PLAIN).unwrap();
    }
}

/// Moves a range of the plan of [`pairs`]. Returns what the sender and the receiver say.
fn moved(
    range: &Range<u64>,
    (src, local): (&Side, &Stream),
    (dst, remote): (&Side, &Stream),
    progress: &Arc<Progress>,
) -> (Result<()>, Result<()>) {
    let (from, to) = ((&src.engine, &src.tensors, local), (&dst.engine, &dst.tensors, remote));
    send_and_receive(&plan(), range, from, to, (None, progress))
}

fn plan() -> CopyPlan {
    block_plan(&pairs(), ROW as u64, TENSORS as u32)
}

fn source(on_device: bool) -> Side {
    Side::new(on_device, |tensor, at| pattern(4, tensor, at))
}

fn destination(on_device: bool) -> Side {
    Side::new(on_device, |_, _| 0xEE)
}

#[test]
fn a_plan_through_a_stream_ends_like_a_plan_in_memory() {
    let plan = plan();
    assert!(plan.bytes() > 4 << 20);
    for (from_device, to_device) in [(true, false), (false, true), (true, true), (false, false)] {
        let src = source(from_device);
        // In one range, and in three ranges that cut rows and buffers.
        for cuts in [vec![], vec![1_234_567, plan.bytes() - 17]] {
            for (local, remote) in [local_streams("staged"), ringed_streams("staged")] {
                let dst = destination(to_device);
                let progress = Arc::new(Progress::default());
                let mut from = 0;
                for to in cuts.iter().copied().chain([plan.bytes()]) {
                    let ends = moved(&(from..to), (&src, &local), (&dst, &remote), &progress);
                    assert!(matches!(ends, (Ok(()), Ok(()))), "{ends:?}");
                    from = to;
                    assert_eq!(progress.bytes(), to);
                }
                assert!(dst.read() == expected(&plan), "{from_device} {to_device}");
            }
        }
    }
}

#[test]
fn a_device_that_fails_ends_the_call_and_what_is_done_is_in_place() {
    let plan = plan();
    for allowed in [0, 1, 150, 400] {
        let (src, dst) = (source(false), destination(true));
        let (local, remote) = local_streams("staged");
        let progress = Arc::new(Progress::default());
        dst.gate.fail_after(allowed);
        let whole = 0..plan.bytes();
        let error = moved(&whole, (&src, &local), (&dst, &remote), &progress).1.unwrap_err();
        assert!(error.to_string().contains("failed as requested"), "{error}");
        assert_eq!(copied_bytes(&error), (progress.bytes(), plan.bytes()));
        dst.gate.fail_after(u64::MAX);
        let (got, mut wanted) = (dst.read(), vec![0xEE; TENSORS * TENSOR]);
        for (tensor, piece) in plan.pieces(0, progress.bytes()) {
            for at in 0..piece.len as usize {
                let position = tensor * TENSOR + piece.dst as usize + at;
                wanted[position] = pattern(4, tensor, piece.src as usize + at);
                assert_eq!(got[position], wanted[position], "{allowed} copies: {position} is not in place");
            }
        }
        // The sender's device fails too.
        let (src, dst) = (source(true), destination(false));
        let (local, remote) = local_streams("staged");
        src.gate.fail_after(allowed);
        let (sent, _) = moved(&whole, (&src, &local), (&dst, &remote), &Arc::default());
        assert!(sent.unwrap_err().to_string().contains("failed as requested"));
    }
}

/// The peer is gone while a worker has the device write. The call ends after that.
#[test]
fn a_receive_ends_after_its_last_write() {
    let plan = plan();
    let (src, dst) = (source(false), destination(true));
    let (local, remote) = local_streams("staged");
    dst.gate.shut();
    let whole = plan.clone();
    thread::scope(|scope| {
        scope.spawn(move || {
            let _ = src.engine.send(&plan, 0..plan.bytes() / 2, &src.tensors, &local, soon(), None);
            local.close();
        });
        let receiving = scope.spawn(|| {
            let progress = Arc::new(Progress::default());
            let (engine, tensors) = (&dst.engine, &dst.tensors);
            engine.receive(&whole, 0..whole.bytes(), tensors, &remote, soon(), &progress).unwrap_err()
        });
        dst.gate.wait_for(1);
        thread::sleep(Duration::from_millis(100));
        assert!(!receiving.is_finished());
        dst.gate.open();
        receiving.join().unwrap();
        assert_eq!(dst.gate.inside.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn a_device_that_panics_fails_the_call() {
    let (src, dst) = (source(true), destination(false));
    let (local, remote) = local_streams("staged");
    *src.gate.panics.lock().unwrap() = Some("llm-copy".into());
    let (sent, _) = moved(&(0..plan().bytes()), (&src, &local), (&dst, &remote), &Arc::default());
    // The hop that panics may also be run by the thread that sends, if no worker has begun it.
    if src.gate.panics.lock().unwrap().is_none() {
        assert_eq!(sent.unwrap_err().kind(), ErrorKind::System);
    }
}
