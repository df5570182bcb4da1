//! A panic while the engine answers a peer ends that call and its stream. The link, the slot and the thread stay usable.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use llm_datadist_core::bindings::DataDist;
use llm_datadist_core::testing::device::{Copier, Copy, Device, DeviceSet, HostReach};
use llm_datadist_core::testing::memory::Region;
use llm_datadist_core::testing::memory::kernels::Kernel;
use llm_datadist_core::{CacheKind, ErrorKind, Result};
use llm_datadist_testing::SimDevice;

use super::{Held, Way, config, device, link, of, open, push_blocks, row};

/// Number of pushes that panic. It exceeds the call slots of one link (33) and the handshake steps (8).
const PANICS: usize = 60;

#[derive(Debug)]
struct PanickingDevice {
    inner: SimDevice,
    panics: AtomicBool,
}

impl Copier for PanickingDevice {
    fn copy(&self, batch: &[Copy<'_>], kernel: Kernel) -> Result<()> {
        assert!(!self.panics.load(Ordering::SeqCst), "the device panics, as the test wants");
        self.inner.copy(batch, kernel)
    }
}

impl Device for PanickingDevice {
    fn allocate(&self, name: &str, len: u64) -> Result<Region> {
        self.inner.allocate(name, len)
    }

    fn host_reach(&self) -> HostReach {
        self.inner.host_reach()
    }
}

#[test]
fn a_panic_while_a_peer_is_answered_ends_that_call_alone() {
    let panicking = Arc::new(PanickingDevice {
        inner: SimDevice::new(HostReach::Staged),
        panics: AtomicBool::new(false),
    });
    let (devices, way) = (DeviceSet::with_device(panicking.clone()), Way::TcpDevice);
    let remote = DataDist::open_over(config(2, way), devices, way.transports()).unwrap();
    let local = open(config(1, Way::Tcp), Way::Tcp);
    link(&local, &remote).unwrap();
    let [source, into] =
        [&local, &remote].map(|engine| Held::pool(engine, &device(2, 4, 4096), CacheKind::Blocks));
    let bytes = source.fill(5);
    let push = || push_blocks(&local, &source, &[1], of(2, row(&into, 0)), &[2]);
    panicking.panics.store(true, Ordering::SeqCst);
    for _ in 0..PANICS {
        assert_eq!(push().unwrap_err().kind(), ErrorKind::NotLinked);
    }
    panicking.panics.store(false, Ordering::SeqCst);
    push().unwrap();
    let arrived = into.read();
    assert!((0..2).all(|tensor| arrived[tensor][8192..12288] == bytes[tensor][4096..8192]));
}
