//! Messages with one flipped bit: a call over TCP ends with an error or with the correct bytes, and no other byte and no
//! other key changes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use llm_datadist_core::bindings::{DataDist, Name, Operation, Rows};
use llm_datadist_core::testing::net::{
    Address, Interference, Listener, Stream, Tcp, Transport, Way as Direction,
};
use llm_datadist_core::testing::protocol::{self, HEADER, Hello, Purpose, Request, Timed};
use llm_datadist_core::{CacheKind, Deadline, Error, KvLayout, Result, TokenOrder, Verify};

use super::asynchronous::outcome;
use super::kv_layouts::{Rank, good};
use super::{
    Held, LONG, Way, block_rows, config, device, link, of, open, pulling, pushing, request, row, verified,
};

/// Time limit of a call whose request names another length than it has. Then the owner waits for bytes that never come.
const SHORT: Duration = Duration::from_millis(30);

/// What happens to the requests on call streams that this side dials.
#[derive(Debug, Default)]
struct Requests {
    /// The length in bytes of each request since the last call of `take`.
    sent: Vec<usize>,
    /// The number of the request whose bit is flipped, and the bit.
    flip: Option<(usize, usize)>,
}

/// A transport that flips one bit of one request.
#[derive(Debug, Default)]
struct Flipping(Arc<Mutex<Requests>>);

impl Transport for Flipping {
    fn name(&self) -> &'static str {
        Tcp.name()
    }

    fn dial(&self, to: &Address, deadline: Deadline) -> Result<Stream> {
        let mut stream = Tcp.dial(to, deadline)?;
        stream.faults = Some(Box::new(CallStream { requests: self.0.clone(), frames: AtomicUsize::new(0) }));
        Ok(stream)
    }

    fn listen(&self, at: &Address) -> Result<Box<dyn Listener>> {
        Tcp.listen(at)
    }
}

/// One stream that was dialed. The first two frames of a call stream are a `Hello` and a `Proof`, and requests follow.
#[derive(Debug)]
struct CallStream {
    requests: Arc<Mutex<Requests>>,
    frames: AtomicUsize,
}

/// Number of frames at which a stream is counted that is no call stream.
const NO_CALLS: usize = usize::MAX / 2;

impl Interference for CallStream {
    fn garble(&self, way: Direction, bytes: &mut [u8]) {
        if way != Direction::Out || !bytes.starts_with(b"LD") {
            return;
        }
        let frame = self.frames.fetch_add(1, Ordering::SeqCst);
        if frame == 0 {
            let hello: Hello = protocol::decode(&bytes[HEADER..]).unwrap();
            if !matches!(hello.purpose, Purpose::Call { .. }) {
                self.frames.store(NO_CALLS, Ordering::SeqCst);
            }
        } else if (2..NO_CALLS).contains(&frame) {
            protocol::decode::<Timed<Request>>(&bytes[HEADER..]).unwrap();
            let mut requests = self.requests.lock().unwrap();
            let number = requests.sent.len();
            requests.sent.push(bytes.len());
            if let Some((_, bit)) = requests.flip.take_if(|(flipped, _)| *flipped == number) {
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }
}

/// Two engines that are linked over TCP, and the requests of the first one.
struct Damaged {
    local: DataDist,
    remote: DataDist,
    requests: Arc<Mutex<Requests>>,
}

impl Damaged {
    fn new(one_sided: bool) -> Damaged {
        let [mut near, mut far] = [1, 2].map(|cluster| config(cluster, Way::Tcp));
        (near.remote_accessible, far.remote_accessible) = (one_sided, one_sided);
        let flipping = Flipping::default();
        let requests = flipping.0.clone();
        let mut transports = Way::Tcp.transports();
        transports.tcp = Arc::new(flipping);
        let local = DataDist::open_over(near, Way::Tcp.devices(), transports).unwrap();
        let remote = open(far, Way::Tcp);
        link(&local, &remote).unwrap();
        Damaged { local, remote, requests }
    }

    /// Makes a call without damage, then once for each bit of each of its requests, which must be the same each time. `call`
    /// gets the time limit and returns the outcome; it checks the bytes itself. Returns the number of calls that succeeded
    /// with a flipped bit.
    fn each_bit(&self, call: impl Fn(Option<Duration>) -> Result<(), Error>) -> usize {
        let take = || std::mem::take(&mut *self.requests.lock().unwrap());
        // The first call may also describe the remote cache.
        call(Some(LONG)).unwrap();
        take();
        call(Some(LONG)).unwrap();
        let lengths = take().sent;
        assert!(!lengths.is_empty());
        let mut succeeded = 0;
        for (number, &length) in lengths.iter().enumerate() {
            for bit in 0..8 * length {
                self.requests.lock().unwrap().flip = Some((number, bit));
                let short = (4..HEADER).contains(&(bit / 8));
                let outcome = call(Some(if short { SHORT } else { LONG }));
                // A short call may end before it gets to this request.
                assert!(take().flip.is_none() || short && outcome.is_err(), "request {number} was not sent");
                succeeded += usize::from(outcome.is_ok());
            }
        }
        succeeded
    }
}

/// Starts a call, and waits for its outcome.
fn ended(call: Operation<'_>, limit: Option<Duration>) -> Result<(), Error> {
    outcome(&call.within(limit).start().unwrap()).map(drop)
}

const ROW: usize = 64;

/// The key of a slot is resolved in one request, its bytes are read in another, and it is released in a third. Each call has
/// another cache and other keys, so that nothing is known of them. Their numbers take equally many bytes.
#[test]
fn damaged_requests_move_no_wrong_bytes_of_a_slot() {
    let damaged = Damaged::new(false);
    let Damaged { local, remote, .. } = &damaged;
    let near = Held::pool(local, &device(2, 3, ROW), CacheKind::Batch);
    (0..64).for_each(|_| Held::pool(remote, &device(1, 1, 1), CacheKind::Batch).free(remote));
    let next = AtomicUsize::new(1000);
    let succeeded = damaged.each_bit(|limit| {
        let first = next.fetch_add(4, Ordering::SeqCst) as u64;
        let keys = [0, 1, 2, 3].map(|slot| Some(request(first + slot)));
        let far = Held::new(remote, false, &device(2, 4, ROW), CacheKind::Batch, &keys);
        let (source, before) = (far.fill(1), near.fill(2));
        let from = of(2, Name::Key(request(first + 1)));
        let pull = pulling(local, from, &near, Rows::slot(1, -1), verified(Verify::Full));
        let outcome = ended(pull, limit);
        let after = near.read();
        for tensor in 0..2 {
            let row = |bytes: &[Vec<u8>], row: usize| bytes[tensor][row * ROW..][..ROW].to_vec();
            assert!([0, 2].iter().all(|&other| row(&after, other) == row(&before, other)));
            assert!(outcome.is_err() || row(&after, 1) == row(&source, 1), "bytes of another slot");
        }
        for slot in [0, 2, 3] {
            remote.find_key(request(first + slot)).expect("the key of another slot was released");
        }
        far.free(remote);
        outcome
    });
    assert_eq!(succeeded, 0, "a damaged request was answered");
}

#[test]
fn damaged_requests_move_no_wrong_bytes_of_blocks() {
    let damaged = Damaged::new(false);
    let Damaged { local, remote, .. } = &damaged;
    let near = Held::pool(local, &device(2, 6, ROW), CacheKind::Blocks);
    let far = Held::pool(remote, &device(2, 9, ROW), CacheKind::Blocks);
    let source = far.fill(1);
    let (sources, blocks) = (vec![7, 2, 3], vec![0, 3, 2]);
    for verify in [Verify::Full, Verify::Sample, Verify::Off] {
        let pull = |limit| {
            let mut expected = near.fill(2);
            let (from, rows) = (of(2, row(&far, 0)), block_rows(&sources, &blocks));
            ended(pulling(local, from, &near, rows, verified(verify)), limit)?;
            for (tensor, (&from, &to)) in
                (0..2).flat_map(|tensor| sources.iter().zip(&blocks).map(move |pair| (tensor, pair)))
            {
                let block = &source[tensor][from as usize * ROW..][..ROW];
                expected[tensor][to as usize * ROW..][..ROW].copy_from_slice(block);
            }
            assert!(near.read() == expected, "{verify:?}: other blocks");
            Ok(())
        };
        assert_eq!(damaged.each_bit(pull), 0, "a damaged request was answered");
    }
}

/// The destination has the bytes of the source already, so that no comparison of these rows finds bytes that were written
/// elsewhere.
#[test]
fn damaged_requests_write_no_bytes_elsewhere() {
    let damaged = Damaged::new(true);
    let Damaged { local, remote, .. } = &damaged;
    let near = Held::pool(local, &device(2, 6, ROW), CacheKind::Blocks);
    let far = Held::pool(remote, &device(2, 9, ROW), CacheKind::Blocks);
    let source = near.fill(1);
    let mut expected = far.fill(2);
    for (tensor, bytes) in expected.iter_mut().enumerate() {
        for (from, to) in [(5, 7), (0, 2), (1, 3)] {
            bytes[to * ROW..][..ROW].copy_from_slice(&source[tensor][from * ROW..][..ROW]);
        }
    }
    far.write(&expected);
    for verify in [Verify::Full, Verify::Sample, Verify::Off] {
        let push = |limit| {
            let (into, rows) = (of(2, row(&far, 0)), block_rows(&[7, 2, 3], &[5, 0, 1]));
            let outcome = ended(pushing(local, &near, into, rows, verified(verify)), limit);
            assert!(far.read() == expected, "{verify:?}: bytes elsewhere, {outcome:?}");
            outcome
        };
        assert_eq!(damaged.each_bit(push), 0, "a damaged request was answered");
    }
}

#[test]
fn damaged_requests_convert_no_wrong_elements() {
    let damaged = Damaged::new(true);
    let Damaged { local, remote, .. } = &damaged;
    let near = KvLayout { tokens_per_block: 6, order: TokenOrder::Hnd, heads: 1..3, layers: 1..3, ..good() };
    let near = Rank::new(local, near, 5, vec![3, 0]);
    let far = Rank::new(remote, good(), 6, vec![5, 1, 2]);
    far.fill();
    let succeeded = damaged.each_bit(|limit| {
        let before = near.clear();
        let (from, rows) = (of(2, row(&far.held, 0)), block_rows(&far.blocks, &near.blocks));
        ended(pulling(local, from, &near.held, rows, verified(Verify::Full)), limit)?;
        near.check(before, (0, 0, 12), |_| true);
        Ok(())
    });
    assert_eq!(succeeded, 0, "a damaged request was answered");
}
