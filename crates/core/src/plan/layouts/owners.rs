//! Decides which of several owners is read for which layers and heads of a destination.

use std::ops::Range;

use super::part::{KvPart, overlap};
use crate::error::{Error, Result};
use crate::fallible;
use crate::model::KvLayout;

/// Name of the lists of this file in out-of-memory errors.
const OWNERS: &str = "the owners of a move";

/// Returns for each owner the parts of `wanted` to read from it. The parts of all owners together are `wanted`, each
/// head of each layer once.
///
/// Where several owners hold the same heads, the one with the fewest heads so far is read. If these are equal,
/// `reader` decides: readers with neighbouring numbers, as the ranks of a tensor-parallel group, are spread over the
/// replicas. `Err(InvalidArgument)` names a layer and a head that no owner holds.
pub fn assign_owners(wanted: &KvPart, owners: &[&KvLayout], reader: usize) -> Result<Vec<Vec<KvPart>>> {
    let mut parts = fallible::filled(OWNERS, Vec::new(), owners.len())?;
    let layer_ranges = cut(&wanted.layers, owners.iter().map(|owner| &owner.layers))?;
    let head_ranges = cut(&wanted.heads, owners.iter().map(|owner| &owner.heads))?;
    for layers in &layer_ranges {
        let mut assigned: Vec<Vec<Range<u32>>> = fallible::filled(OWNERS, Vec::new(), owners.len())?;
        for heads in &head_ranges {
            let owner = choose(layers, heads, owners, &assigned, reader)?;
            match assigned[owner].last_mut() {
                Some(last) if last.end == heads.start => last.end = heads.end,
                _ => fallible::push(OWNERS, &mut assigned[owner], heads.clone())?,
            }
        }
        for (parts, heads) in parts.iter_mut().zip(assigned) {
            add(parts, layers, heads)?;
        }
    }
    Ok(parts)
}

/// Cuts `whole` at the ends of `ranges`, so that each of them contains a part completely or not at all.
fn cut<'a>(
    whole: &Range<u32>,
    ranges: impl ExactSizeIterator<Item = &'a Range<u32>>,
) -> Result<Vec<Range<u32>>> {
    let mut ends = fallible::with_capacity(OWNERS, 2 * ranges.len() + 2)?;
    ends.extend([whole.start, whole.end]);
    ends.extend(ranges.map(|range| overlap(whole, range)).flat_map(|inside| [inside.start, inside.end]));
    ends.retain(|end| (whole.start..=whole.end).contains(end));
    ends.sort_unstable();
    ends.dedup();
    fallible::collect(OWNERS, ends.windows(2).map(|two| two[0]..two[1]))
}

/// Returns the owner of `heads` in `layers` with the fewest heads so far.
fn choose(
    layers: &Range<u32>,
    heads: &Range<u32>,
    owners: &[&KvLayout],
    assigned: &[Vec<Range<u32>>],
    reader: usize,
) -> Result<usize> {
    let holds = |owner: usize| {
        let KvLayout { layers: held, heads: held_heads, .. } = owners[owner];
        held.contains(&layers.start) && held_heads.contains(&heads.start)
    };
    let candidates = || (0..owners.len()).filter(|&owner| holds(owner));
    let count = candidates().count();
    let heads_so_far = |owner: usize| assigned[owner].iter().map(ExactSizeIterator::len).sum::<usize>();
    let chosen = candidates().enumerate().min_by_key(|&(at, owner)| {
        // The candidate that is `reader` positions after the first one comes first.
        (heads_so_far(owner), (at + count - reader % count) % count)
    });
    chosen.map(|(_, owner)| owner).ok_or_else(|| {
        let (head, layer) = (heads.start, layers.start);
        Error::invalid(format!("no owner holds head {head} of layer {layer}"))
            .with("heads", format_args!("{heads:?}"))
            .with("layers", format_args!("{layers:?}"))
            .with("owners", owners.len())
    })
}

/// Adds `heads` in `layers` to the parts of one owner. Equal heads of adjacent layers are one part.
fn add(parts: &mut Vec<KvPart>, layers: &Range<u32>, heads: Vec<Range<u32>>) -> Result<()> {
    for heads in heads {
        let before = |part: &&mut KvPart| part.heads == heads && part.layers.end == layers.start;
        match parts.iter_mut().find(before) {
            Some(part) => part.layers.end = layers.end,
            None => fallible::push(OWNERS, parts, KvPart { layers: layers.clone(), heads })?,
        }
    }
    Ok(())
}
