//! Shared parts of the fuzz targets: an allocator that counts, and the messages by number.
//!
//! The assertions of a target are in its file in `targets`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt::Debug;

use llm_datadist_core::testing::protocol::{
    self, Attach, Attached, Challenge, Confirm, ControlMessage, Hello, LinkAnswer, Proof, Reply, Request,
    RingAnswer, RingOffer, Timed, Welcome, WirePlan,
};
use llm_datadist_core::{Error, ErrorKind};
use serde::Serialize;
use serde::de::DeserializeOwned;

struct Counting;

#[global_allocator]
static HEAP: Counting = Counting;

thread_local! {
    /// Bytes that this thread holds, and the most it held since `peak` began.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

fn count(bytes: isize) {
    // A thread may free after its thread-local values are gone.
    let _ = HELD.try_with(|held| {
        let (now, most) = held.get();
        held.set((now + bytes, most.max(now + bytes)));
    });
}

// SAFETY: every call is forwarded unchanged to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: as promised by the caller.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Runs `work` and returns its result with the most bytes this thread held on top of what it held before.
pub fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.with(|held| {
        let (now, _) = held.get();
        held.set((now, now));
        now
    });
    let result = work();
    let most = HELD.with(|held| held.get().1 - before);
    (result, usize::try_from(most).unwrap_or(0))
}

/// Decodes `body`, which has no checksum, as a `T` and asserts what holds for every message: bounded memory, one error kind, and a stable
/// encoding.
pub fn decoded<T: Serialize + DeserializeOwned + PartialEq + Debug>(body: &[u8]) -> Option<T> {
    let (result, most) = peak(|| protocol::decode_message::<T>(body));
    // serde reserves at most one megabyte for a length without the bytes for it, on each of two nested
    // levels.
    assert!(most < 64 * body.len() + (3 << 20), "{most} bytes of memory for {} of a message", body.len());
    let message = match result {
        Ok(message) => message,
        Err(error) => {
            refused_as(&error, &[ErrorKind::NotLinked]);
            return None;
        }
    };
    let Ok(frame) = protocol::encode(&message) else {
        // Only a plan that was decoded but is invalid cannot be encoded again.
        assert!(format!("{message:?}").contains("Unusable"), "{message:?} cannot be encoded again");
        return Some(message);
    };
    let again: T = protocol::decode(&frame[protocol::HEADER..]).expect("an encoded message is decoded again");
    // Without its checksum, it is refused.
    assert!(protocol::decode::<T>(&frame[protocol::HEADER..frame.len() - protocol::CHECKSUM]).is_err());
    assert_eq!(message, again);
    assert_eq!(frame, protocol::encode(&again).expect("encoded twice"));
    Some(message)
}

/// Decodes `body` as the message with the number `which`, and converts what can be converted.
pub fn any_message(which: u8, body: &[u8]) {
    match which % 14 {
        0 => drop(decoded::<Hello>(body)),
        1 => drop(decoded::<Challenge>(body)),
        2 => drop(decoded::<Proof>(body)),
        3 => drop(decoded::<Welcome>(body)),
        4 => drop(decoded::<Attach>(body)),
        5 => drop(decoded::<Attached>(body)),
        6 => drop(decoded::<ControlMessage>(body)),
        7 => drop(decoded::<Timed<Request>>(body)),
        8 => reply(body),
        9 => drop(decoded::<Confirm>(body)),
        10 => drop(decoded::<LinkAnswer>(body)),
        11 => drop(decoded::<RingOffer>(body)),
        12 => drop(decoded::<RingAnswer>(body)),
        _ => drop(decoded::<WirePlan>(body)),
    }
}

fn reply(body: &[u8]) {
    use llm_datadist_core::testing::protocol::{Run, WireLocation};
    match decoded::<Reply>(body) {
        Some(Reply::Described(record)) => {
            match record.layout() {
                Ok(layout) => {
                    if let Err(error) = record.kv_geometry(&layout.geometry) {
                        refused_as(&error, &[ErrorKind::NotLinked]);
                    }
                }
                Err(error) => refused_as(&error, &[ErrorKind::NotLinked]),
            }
            let (WireLocation::Pool { runs, .. } | WireLocation::Process { runs }) = &record.location else {
                return;
            };
            let count: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
            match Run::unpack(runs, record.num_tensors) {
                // Packing and unpacking again gives the same numbers, however the peer had cut the runs.
                Ok(numbers) => {
                    assert_eq!(numbers.len() as u64, count);
                    let packed = Run::pack(&numbers).expect("memory for as many runs as were received");
                    assert_eq!(Run::unpack(&packed, record.num_tensors).ok(), Some(numbers));
                }
                Err(error) => refused_as(&error, &[ErrorKind::NotLinked]),
            }
        }
        Some(Reply::Failed { kind, message, arrived }) => {
            let error = Reply::error(kind, &message, &arrived);
            let text = error.to_string();
            // A peer's text is cut to a readable length, and cannot break a log line.
            assert!(text.len() < 20 << 10, "{} bytes of a peer's text are kept", text.len());
            assert!(!text.chars().any(char::is_control), "{text:?}");
        }
        _ => {}
    }
}

/// Asserts that a refusal has one of the kinds that the caller expects, and a text that fits a log line.
pub fn refused_as(error: &Error, kinds: &[ErrorKind]) {
    assert!(kinds.contains(&error.kind()), "{:?}: {error}", error.kind());
    let text = error.to_string();
    assert!(!text.is_empty());
    assert!(text.len() < 16 << 10, "an error of {} bytes: {text:.200}", text.len());
}
