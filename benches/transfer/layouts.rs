//! Pulls of the same bytes between equal KV layouts and between different ones, in turn over one link.
//!
//! Both write the same cache. The source of the first has the layout of that cache, and the source of the second another.
//! Not for: the limit of the memory (the benchmark `layouts`).

use std::fmt::Write as _;
use std::ops::Range;
use std::time::Duration;

use llm_datadist_core::bindings::{
    CacheKey, CallExtras, DataDist, End, GroupMember, Layers, Name, RemoteName, Rows, Side,
};
use llm_datadist_core::{
    CacheDesc, CacheKind, ClusterId, DataType, Deadline, KvLayout, KvPlanes, Placement, TokenOrder,
};

use crate::Options;
use crate::hand::{Shuffle, median, timed};
use crate::memory::{config, word};
use crate::prefill::{LIMIT, Prefill};

/// Seed of the shuffled lists.
const SEED: u64 = 0x5EED_0005;
/// MiB of the pulls.
const SIZES: [u64; 2] = [64, 256];
/// Elements of a head, of two bytes each.
const HEAD_DIM: u32 = 128;
/// Tensors of every cache, two for each layer.
const TENSORS: u32 = 16;

/// The heads of a rank, their order, and the tokens of a block.
#[derive(Clone)]
pub struct Rank {
    heads: Range<u32>,
    order: TokenOrder,
    tokens: u32,
}

impl Rank {
    /// The rank as words of a command.
    fn words(&self) -> String {
        let mut words = format!("{} {} {} ", self.heads.start, self.heads.end, self.tokens);
        write!(words, "{}", if self.order == TokenOrder::Nhd { "NHD" } else { "HND" }).unwrap();
        words
    }

    /// The rank that the words of a command describe.
    pub fn of(words: &[&str]) -> Rank {
        let number = |at: usize| words[at].parse().unwrap();
        let order = if words[3] == "NHD" { TokenOrder::Nhd } else { TokenOrder::Hnd };
        Rank { heads: number(0)..number(1), order, tokens: number(2) }
    }

    fn block_bytes(&self) -> u64 {
        u64::from(self.tokens * self.heads.len() as u32 * HEAD_DIM * 2)
    }

    fn desc(&self, rows: u64) -> CacheDesc {
        let layout = KvLayout {
            tokens_per_block: self.tokens,
            heads: self.heads.clone(),
            total_heads: 128,
            head_dim: HEAD_DIM,
            order: self.order,
            kv: KvPlanes::Separate,
            layers: 0..TENSORS / 2,
            model: String::new(),
        };
        CacheDesc {
            num_tensors: TENSORS,
            shape: vec![rows as i64, self.block_bytes() as i64 / 2],
            data_type: DataType::Float16,
            placement: Placement::Device,
            row_stride: None,
            kv_layout: Some(Box::new(layout)),
        }
    }

    /// The index of the first word of a head of a token in its tensor, from the definition of the layout.
    fn index(&self, block: i64, token: u64, head: u32) -> u64 {
        let (count, tokens) = (self.heads.len() as u64, u64::from(self.tokens));
        let head = u64::from(head - self.heads.start);
        let within = match self.order {
            TokenOrder::Nhd => token * count + head,
            TokenOrder::Hnd => head * tokens + token,
        };
        (block as u64 * count * tokens + within) * HEAD_WORDS
    }
}

/// Words of a head of one token.
const HEAD_WORDS: u64 = HEAD_DIM as u64 * 2 / 8;

/// A cache with a layout, in the pool of an engine of this process.
struct Held {
    id: llm_datadist_core::CacheId,
    addrs: Vec<u64>,
    tensor_words: u64,
}

impl Held {
    fn new(engine: &DataDist, rank: &Rank, rows: u64, key: Option<u64>) -> Held {
        let keys: Vec<_> = key.map(|model| Some(CacheKey::Blocks { model })).into_iter().collect();
        let cache = engine.allocate(&rank.desc(rows), CacheKind::Blocks, &keys).unwrap();
        let tensor_words = rows * rank.block_bytes() / 8;
        Held { id: cache.id(), addrs: cache.addrs().to_vec(), tensor_words }
    }

    /// Sets every word to the value that `value` has for its tensor and index.
    fn each(&self, mut value: impl FnMut(u64, u64) -> u64) {
        for (tensor, &addr) in (0..).zip(&self.addrs) {
            for at in 0..self.tensor_words {
                // SAFETY: inside a tensor of a live cache that nothing else uses now.
                unsafe { *((addr + at * 8) as *mut u64) = value(tensor, at) };
            }
        }
    }

    fn read(&self, tensor: usize, at: u64) -> u64 {
        // SAFETY: as in `each`.
        unsafe { *((self.addrs[tensor] + at * 8) as *const u64) }
    }
}

/// The other process: allocates a cache under the key `model`, with contents that differ for each model.
pub fn hold(engine: &DataDist, model: u64, rows: u64, rank: &Rank) -> u64 {
    let held = Held::new(engine, rank, rows, Some(model));
    held.each(|tensor, at| word(seed(model, tensor), at));
    held.id.0.cast_unsigned()
}

/// The seed of a tensor of the cache `model`.
fn seed(model: u64, tensor: u64) -> u64 {
    model * u64::from(TENSORS) + tensor
}

/// One comparison: the destination, and the owners of its heads whose layouts differ from it.
struct Case {
    name: &'static str,
    dst: Rank,
    owners: Vec<Rank>,
}

fn cases() -> Vec<Case> {
    use TokenOrder::{Hnd, Nhd};
    let rank = |heads, order, tokens| Rank { heads, order, tokens };
    let mut cases = Vec::new();
    // Heads of the smaller rank: pieces of 4 and 16 KiB.
    for heads in [16, 64] {
        cases.push(Case {
            name: "TP 2 to 4",
            dst: rank(heads..2 * heads, Nhd, 16),
            owners: vec![rank(0..2 * heads, Nhd, 16)],
        });
        cases.push(Case {
            name: "TP 2 to 1",
            dst: rank(0..2 * heads, Nhd, 16),
            owners: vec![rank(0..heads, Nhd, 16), rank(heads..2 * heads, Nhd, 16)],
        });
    }
    for (name, from, to) in [("NHD to HND", Nhd, Hnd), ("HND to NHD", Hnd, Nhd)] {
        cases.push(Case { name, dst: rank(0..8, to, 128), owners: vec![rank(0..8, from, 128)] });
    }
    cases
}

impl Case {
    fn transposes(&self) -> bool {
        self.owners[0].order != self.dst.order
    }

    fn piece(&self) -> u32 {
        if self.transposes() {
            256
        } else {
            256 * self.owners.iter().map(|it| self.heads_of(it)).min().unwrap()
        }
    }

    fn heads_of(&self, owner: &Rank) -> u32 {
        owner.heads.end.min(self.dst.heads.end) - owner.heads.start.max(self.dst.heads.start)
    }
}

/// One comparison over a link, with its memory.
struct Bed<'a> {
    engine: &'a DataDist,
    case: &'a Case,
    target: Held,
    from: Vec<i64>,
    to: Vec<i64>,
}

/// The model of the source with an equal layout. Those with other layouts follow.
const EQUAL: u64 = 0;

impl Bed<'_> {
    fn part(&self, model: u64) -> (RemoteName, Rows) {
        let rows = Rows::Sequence {
            remote: self.from.clone(),
            local: self.to.clone(),
            remote_tokens: None,
            local_tokens: None,
        };
        (RemoteName { cluster: ClusterId(2), name: Name::Key(CacheKey::Blocks { model }) }, rows)
    }

    fn pull(&self, owners: &[u64]) {
        let local = End::Managed(self.target.id);
        if let [model] = owners {
            let (remote, rows) = self.part(*model);
            return self.engine.pull(remote, &local, rows, Layers::ALL).run().unwrap();
        }
        let member = |&model: &u64| {
            let (remote, rows) = self.part(model);
            GroupMember { remote, local: local.clone(), rows, layers: Layers::ALL, grant: None }
        };
        let owners = owners.iter().map(member).collect();
        let pull =
            self.engine.transfer_group(Side::Destination, owners, true, CallExtras::default(), None).unwrap();
        pull.join(Deadline::after(Duration::MAX)).unwrap();
    }

    fn poison(&self) {
        self.target.each(|_, _| 0xEEEE_EEEE_EEEE_EEEE);
    }

    /// Stops the benchmark unless every word of every head came from its place in `owners`.
    fn verify(&self, owners: &[(u64, &Rank)]) {
        let dst = &self.case.dst;
        for head in dst.heads.clone() {
            let &(model, owner) = owners.iter().find(|(_, owner)| owner.heads.contains(&head)).unwrap();
            for (&from, &to) in self.from.iter().zip(&self.to) {
                for token in 0..dst.tokens.into() {
                    let (src, dst) = (owner.index(from, token, head), dst.index(to, token, head));
                    for tensor in 0..TENSORS as usize {
                        for at in 0..HEAD_WORDS {
                            let expected = word(seed(model, tensor as u64), src + at);
                            assert_eq!(
                                self.target.read(tensor, dst + at),
                                expected,
                                "block {from}, head {head}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Prints a line for each transport, size and case.
pub fn layouts(options: &Options) {
    println!(
        "\npulls between KV layouts: {} rounds, {} streams; GB/s = 10^9 bytes; the range is without the outer tenths",
        options.rounds, options.streams
    );
    println!(
        "{:6} {:>5} {:12} {:>8} {:>8} {:>10} {:>7}  (range)",
        "", "MiB", "layouts", "piece", "equal", "different", "ratio"
    );
    for transport in ["tcp", "shm"] {
        for mib in SIZES.into_iter().filter(|&mib| mib <= options.mib) {
            for case in cases().iter().filter(|case| options.case.is_empty() || options.case == case.name) {
                line(options, transport, mib, case);
            }
        }
    }
}

fn line(options: &Options, transport: &str, mib: u64, case: &Case) {
    let mut prefill = Prefill::start();
    let rows = (mib << 20) / (u64::from(TENSORS) * case.dst.block_bytes());
    let held = case.owners.iter().chain([&case.dst]).map(Rank::block_bytes).sum::<u64>();
    let there = ((held * rows * u64::from(TENSORS)) >> 20) + 1;
    let peer = prefill.open(transport, true, there, options.streams);
    let mut own = config(1, transport, true, mib + 1, options.streams);
    own.copy_workers = options.workers;
    let engine = DataDist::open(own).unwrap();
    engine.link_clusters(&[peer], LIMIT).remove(0).unwrap();
    let different: Vec<(u64, &Rank)> = (EQUAL + 1..).zip(&case.owners).collect();
    for (model, rank) in [(EQUAL, &case.dst)].iter().chain(&different) {
        prefill.ask(&format!("layout {model} {rows} {}", rank.words()));
    }
    let mut shuffle = Shuffle(SEED);
    let (from, to) = (shuffle.order(rows), shuffle.order(rows));
    let bed = Bed { engine: &engine, case, target: Held::new(&engine, &case.dst, rows, None), from, to };
    let variants = [vec![(EQUAL, &case.dst)], different];
    let models = variants.each_ref().map(|owners| owners.iter().map(|(model, _)| *model).collect::<Vec<_>>());
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..=options.rounds {
        for step in 0..2 {
            let who = (step + round) % 2;
            bed.poison();
            let took = timed(|| bed.pull(&models[who]));
            bed.verify(&variants[who]);
            if round > 0 {
                times[who].push(took);
            }
        }
    }
    show(transport, mib, case, times);
}

fn show(transport: &str, mib: u64, case: &Case, [equal, different]: [Vec<f64>; 2]) {
    let mut ratios: Vec<f64> = equal.iter().zip(&different).map(|(equal, other)| equal / other).collect();
    let (ratio, rounds) = (median(&mut ratios), equal.len());
    let speed = |mut times: Vec<f64>| (mib << 20) as f64 / median(&mut times) / 1e9;
    println!(
        "{transport:6} {mib:5} {:12} {:6} B {:8.2} {:10.2} {ratio:7.2}  ({:.2}-{:.2})",
        case.name,
        case.piece(),
        speed(equal),
        speed(different),
        ratios[rounds / 10],
        ratios[rounds - 1 - rounds / 10],
    );
}
