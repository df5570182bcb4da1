//! From the words to the messages and back.
//!
//! What arrives is checked as far as it can be without the cache it is about; bounds are `plan` and `check`'s work. Not
//! for: bytes (`message`).

use std::ops::Range;

use super::messages::{Arrived, MAX_ARRIVED, Place, Record, Reply, Run, WireName};
use super::plan_codec::{Pairs, WirePlan, WireSteps};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::{CacheDesc, CacheId, CacheKey, CacheKind, DataType, Geometry, Name, Placement};
use crate::plan::{Blocks, CopyPlan, SpanList, Wave};
use crate::validate::Side;

/// Tensors of which a failure says what arrived.
const MOST_ARRIVED: usize = 1 << 12;
/// What the lists of places are for, should there be no memory for one.
const TENSORS: &str = "the places of the tensors of a cache";
/// Characters of a peer's text that are kept.
const LONGEST: usize = 4 << 10;

/// The number of a kind of error: its position in the closed list, which only grows at its end.
#[must_use]
pub fn kind_number(kind: ErrorKind) -> u8 {
    let position = ErrorKind::ALL.iter().position(|&known| known == kind);
    position.and_then(|at| u8::try_from(at).ok()).unwrap_or(u8::MAX)
}

/// The kind of a number; a kind that only the peer knows is [`ErrorKind::System`].
#[must_use]
pub fn kind_of(number: u8) -> ErrorKind {
    ErrorKind::ALL.get(usize::from(number)).copied().unwrap_or(ErrorKind::System)
}

/// The kind an error of the peer has on this side: some kinds speak about whoever reports them.
pub(super) fn told(kind: ErrorKind) -> ErrorKind {
    match kind {
        ErrorKind::Closed | ErrorKind::Interrupted => ErrorKind::NotLinked,
        ErrorKind::Forked => ErrorKind::System,
        ErrorKind::AlreadyLinked | ErrorKind::LinksExist | ErrorKind::UnlinkFailed => ErrorKind::LinkFailed,
        kind => kind,
    }
}

/// A text of a peer as it may stand in a message: not longer than anybody reads, and nothing but text.
pub(super) fn printable(text: &str) -> String {
    let shown = text.chars().take(LONGEST).map(|letter| if letter.is_control() { ' ' } else { letter });
    shown.collect()
}

impl From<Name> for WireName {
    fn from(name: Name) -> Self {
        match name {
            Name::Key(CacheKey::Request { model, id }) => WireName::Request { model, id },
            Name::Key(CacheKey::Prefix { model, id }) => WireName::Prefix { model, id },
            Name::Key(CacheKey::Blocks { model }) => WireName::Blocks { model },
            Name::Row { cache, row } => WireName::Row { cache: cache.0, row },
        }
    }
}

impl From<WireName> for Name {
    fn from(name: WireName) -> Self {
        match name {
            WireName::Request { model, id } => Name::Key(CacheKey::Request { model, id }),
            WireName::Prefix { model, id } => Name::Key(CacheKey::Prefix { model, id }),
            WireName::Blocks { model } => Name::Key(CacheKey::Blocks { model }),
            WireName::Row { cache, row } => Name::Row { cache: CacheId(cache), row },
        }
    }
}

impl TryFrom<&CopyPlan> for WirePlan {
    type Error = Error;

    fn try_from(plan: &CopyPlan) -> Result<WirePlan> {
        let (num_tensors, src_tensor, dst_tensor) =
            (plan.num_tensors(), plan.src_tensor(), plan.dst_tensor());
        let only = if let [wave] = plan.waves() { wave.blocks() } else { None };
        let steps = if let Some(Blocks { len, src, dst, pairs }) = only {
            WireSteps::Blocks { len: *len, src: *src, dst: *dst, pairs: Pairs(pairs.clone()) }
        } else {
            // More spans than a `u32` counts do not fit a frame: they are refused when it is written.
            let count = |wave: &Wave| u32::try_from(wave.num_spans()).unwrap_or(u32::MAX);
            WireSteps::Spans {
                waves: fallible::collect("a request", plan.waves().iter().map(count))?,
                spans: SpanList::pack(plan.waves().iter().flat_map(Wave::spans))?,
            }
        };
        Ok(WirePlan { num_tensors, src_tensor, dst_tensor, steps })
    }
}

impl TryFrom<WirePlan> for CopyPlan {
    type Error = Error;

    fn try_from(plan: WirePlan) -> Result<CopyPlan> {
        let (num_tensors, src_tensor, dst_tensor) = (plan.num_tensors, plan.src_tensor, plan.dst_tensor);
        match plan.steps {
            WireSteps::Blocks { len, src, dst, pairs } => {
                let blocks = Blocks { len, src, dst, pairs: pairs.0 };
                CopyPlan::from_blocks(num_tensors, src_tensor, dst_tensor, blocks)
            }
            WireSteps::Spans { waves, spans } => {
                CopyPlan::from_list(num_tensors, src_tensor, dst_tensor, &waves, spans)
            }
            WireSteps::Unusable(unusable) => Err(unusable.0),
        }
    }
}

impl Record {
    /// A record of the row `row` of a cache of these sizes, not yet located and nothing allowed.
    #[must_use]
    pub fn new(at: Place, cache: CacheId, row: u32, side: Side) -> Record {
        Record {
            at,
            cache: cache.0,
            row,
            num_tensors: side.geometry.num_tensors(),
            rows: side.geometry.rows(),
            row_bytes: side.geometry.row_bytes(),
            blocks: side.kind == CacheKind::Blocks,
            placement: side.placement as u8,
            allocated: false,
            accessible: false,
            location: super::Location::Hidden,
        }
    }

    /// Sizes, kind and placement of the remote cache. `Err(NotLinked)` if they make no sense.
    pub fn side(&self) -> Result<Side> {
        let nonsense = |what: &str| {
            let text = format!("the peer described cache {} with {what} that make no sense", self.cache);
            Error::new(ErrorKind::NotLinked, text)
        };
        let placement = Placement::ALL.into_iter().find(|&known| known as u8 == self.placement);
        let placement = placement.ok_or_else(|| nonsense("places"))?;
        let dim = |number: u64| i64::try_from(number).map_err(|_| nonsense("sizes"));
        let desc = CacheDesc {
            num_tensors: self.num_tensors,
            shape: vec![dim(self.rows)?, dim(self.row_bytes)?],
            data_type: DataType::Uint8,
            placement,
        };
        let geometry = Geometry::new(&desc).map_err(|error| nonsense("sizes").because(error))?;
        let kind = if self.blocks { CacheKind::Blocks } else { CacheKind::Batch };
        Ok(Side { geometry, kind, placement })
    }
}

impl Run {
    /// `numbers` in as few runs as neighbours at a constant distance make.
    pub fn pack(numbers: &[u64]) -> Result<Vec<Run>> {
        let mut runs: Vec<Run> = Vec::new();
        for &number in numbers {
            match runs.last_mut() {
                Some(run) if run.count == 1 => {
                    run.step = number.wrapping_sub(run.start);
                    run.count = 2;
                }
                Some(run) if run.at(run.count) == number && run.count < u32::MAX => run.count += 1,
                _ => fallible::push(TENSORS, &mut runs, Run { start: number, step: 0, count: 1 })?,
            }
        }
        Ok(runs)
    }

    /// The numbers of `runs`. `Err(NotLinked)` unless they are `expected`: a count is believed only where something else
    /// said as much.
    pub fn unpack(runs: &[Run], expected: u32) -> Result<Vec<u64>> {
        let count: u64 = runs.iter().fold(0, |sum, run| sum.saturating_add(u64::from(run.count)));
        if count != u64::from(expected) || expected > Geometry::MAX_TENSORS {
            let text = "the peer located another number of tensors than the cache has";
            return Err(Error::new(ErrorKind::NotLinked, text)
                .with("located", count)
                .with("tensors", expected));
        }
        let numbers = runs.iter().flat_map(|run| (0..run.count).map(|k| run.at(k)));
        fallible::gathered(TENSORS, expected as usize, numbers)
    }

    fn at(&self, k: u32) -> u64 {
        self.start.wrapping_add(self.step.wrapping_mul(u64::from(k)))
    }
}

impl Reply {
    /// The answer that a request failed with `error`; its facts and causes are in the message.
    #[must_use]
    pub fn failed(error: &Error) -> Reply {
        // What is left out is not said to have arrived: nobody relies on it.
        let mut left = MAX_ARRIVED - MOST_ARRIVED;
        let mut rows = |(tensor, rows): &(u32, Vec<Range<u64>>)| {
            let rows = &rows[..rows.len().min(left)];
            left -= rows.len();
            Arrived { tensor: *tensor, rows: rows.iter().map(|rows| (rows.start, rows.end)).collect() }
        };
        Reply::Failed {
            kind: kind_number(error.kind()),
            message: error.to_string(),
            facts: Vec::new(),
            arrived: error.arrived().iter().take(MOST_ARRIVED).map(&mut rows).collect(),
        }
    }

    /// The error of a failure at the peer: facts are appended to the text, because the names of facts are fixed here.
    #[must_use]
    pub fn error(kind: u8, message: &str, facts: &[(String, String)], arrived: Vec<Arrived>) -> Error {
        let facts: Vec<String> = facts.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let text =
            if facts.is_empty() { message.to_owned() } else { format!("{message} ({})", facts.join(", ")) };
        let rows = |arrived: Arrived| {
            (arrived.tensor, arrived.rows.into_iter().map(|(from, to)| from..to).collect())
        };
        let arrived = arrived.into_iter().map(rows).collect();
        Error::new(told(kind_of(kind)), printable(&text)).with_arrived(arrived)
    }

    /// Which answer it is, for messages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Reply::Described(_) => "described",
            Reply::Ready { .. } => "ready",
            Reply::Done { .. } => "done",
            Reply::Stale => "stale",
            Reply::Unreachable { .. } => "unreachable",
            Reply::Failed { .. } => "failed",
            Reply::Located(_) => "located",
        }
    }
}
