//! Pushes the layers of a layer-wise transfer to one destination, each as soon as it is ready. One request
//! pushes several ready layers if they lie in neighboring tensors on both sides.
//!
//! A layer is an ordinary push of the same plan in other tensors. It is planned once and resolved once. After
//! that the remote cache is named by its id, so a transfer never spreads over two caches.

use std::slice;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::call::{Call, check_accessible};
use super::delivery::LayerSink;
use super::layer_notice::LayerNotice;
use crate::cache::Cache;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::{AddressLocation, CacheId, Deadline, Name, RemoteCacheName, RowList, Verify, Words};
use crate::plan::{CopyPlan, Side};
use crate::resources::Resources;
use crate::session::{DescriptionSource, KnownCache, Link, LinkOfCall};
use crate::stats::Op;
use crate::validate::{self, Destination, LayerDestination, LayerRange, LayerRows, Target};

/// Name of these lists in out-of-memory errors.
const LAYERS: &str = "the layers of a transfer";
/// Pushes layers to one destination.
pub(crate) struct LayerPush {
    pub(crate) resources: Arc<Resources>,
    pub(crate) link: LinkOfCall,
    pub(crate) local: Arc<Cache>,
    pub(crate) rows: Arc<LayerRows>,
    pub(crate) per_layer: u32,
    pub(crate) to: Destination,
    /// The caller's words for arguments.
    pub(crate) words: &'static Words,
    /// How thoroughly the layers are compared.
    pub(crate) verify: Verify,
    /// Whether a push ends only when the peer has ended its reads of this process's memory.
    pub(crate) to_the_end: bool,
    /// The notification for the peer, of which the first destination reserves room.
    pub(crate) notice: Option<Arc<LayerNotice>>,
    pub(crate) found: OnceLock<FoundDestination>,
}

/// A destination whose link and caches were found.
pub(crate) struct FoundDestination {
    link: Arc<Link>,
    /// Rows of the local cache that are read.
    local_rows: RowList,
    /// Parts of each layer of the range.
    layers: Vec<Vec<Part>>,
}

/// Tensors of one or more layers that go to one remote cache.
#[derive(Clone)]
struct Part {
    cache: CacheId,
    plan: CopyPlan,
}

impl FoundDestination {
    /// Returns the parts of each of these layers, if the destination has them all. `first` is its first layer.
    fn parts_of(&self, layers: LayerRange, first: u32) -> Option<&[Vec<Part>]> {
        let index = |layer: u32| Some(layer.checked_sub(first)? as usize);
        self.layers.get(index(layers.first)?..index(layers.end)?).filter(|parts| !parts.is_empty())
    }
}

impl LayerSink for LayerPush {
    fn find(&self, deadline: Deadline) -> Result<u64> {
        let found = self.link.find(deadline);
        let link = found.map_err(|error| self.link.named(error))?;
        self.notice.as_ref().map_or(Ok(()), |notice| notice.reserve(&link))?;
        let found = self.resolve(link.clone(), deadline).map_err(|error| link.named(error))?;
        let bytes = found.layers.iter().flatten().map(|part| part.plan.bytes()).sum();
        // `find` is called once, so the destination is not set yet.
        let _ = self.found.set(found);
        Ok(bytes)
    }

    fn push(&self, ready: LayerRange, max_bytes: u64, deadline: Deadline) -> Result<(u32, u64)> {
        let started = Instant::now();
        let text = "a layer of a transfer whose destination was not found";
        let unknown = || Error::new(ErrorKind::System, text).with("layer", ready.first);
        let found = self.found.get().ok_or_else(unknown)?;
        let parts = found.parts_of(ready, self.to.src_layers.first).ok_or_else(unknown)?;
        let (count, pushed) = match joined(parts, max_bytes) {
            Some((count, part)) => (count, self.push_part(found, &part, count, deadline)),
            None => (1, parts[0].iter().map(|part| self.push_part(found, part, 1, deadline)).sum()),
        };
        let layers = LayerRange { end: ready.first + count, ..ready };
        let pushed = pushed.map_err(|error| with_layers(found.link.named(error), layers));
        self.resources.stats.counted_each(Op::Layer, count, started.elapsed(), pushed.is_ok());
        let bytes = pushed?;
        self.resources.stats.add_bytes(Op::Layer, bytes);
        Ok((count, bytes))
    }

    fn named(&self, error: Error) -> Error {
        self.link.named(error)
    }
}

impl LayerPush {
    /// Pushes a part that covers `layers` layers.
    fn push_part(
        &self,
        found: &FoundDestination,
        part: &Part,
        layers: u32,
        deadline: Deadline,
    ) -> Result<u64> {
        let call = Call {
            resources: self.resources.clone(),
            link: found.link.clone(),
            words: (self.words, Side::Source),
            name: Name::of_cache(part.cache).into(),
            local: self.local.clone(),
            deadline,
            execution: None,
            to_the_end: self.to_the_end,
            notify: None,
            grant: None,
            verify: self.verify,
        };
        let (rows, plans) = (
            || fallible::collect_inline(LAYERS, found.local_rows.iter().copied()),
            slice::from_ref(&part.plan),
        );
        call.counted_as(layers, || call.attempts(|known| call.push(known, plans, rows()?)))
    }

    fn resolve(&self, link: Arc<Link>, deadline: Deadline) -> Result<FoundDestination> {
        check_accessible((self.words, Side::Source), &self.resources, &self.local)?;
        let (local_rows, layers) = match &self.to.target {
            Target::Cache { name, first_layer } => self.to_cache(&link, name, *first_layer, deadline),
            Target::Addresses(addrs) => self.to_addresses(&link, addrs, deadline),
        }?;
        Ok(FoundDestination { link, local_rows, layers })
    }

    /// Returns the rows of the local cache that are read, and the parts of each layer.
    fn to_cache(
        &self,
        link: &Arc<Link>,
        name: &RemoteCacheName,
        first_layer: Option<u32>,
        deadline: Deadline,
    ) -> Result<(RowList, Vec<Vec<Part>>)> {
        let (name, row) = name.without_slot();
        let known = ask(link, &name, deadline)?;
        let remote = known.remote.with_row(row);
        let (range, per_layer) = (self.to.src_layers, self.per_layer);
        let count = range.end - range.first;
        validate::rows_alike((self.words, Side::Source), self.local.kv().map(|kv| &**kv), &remote)?;
        let first_layer = match first_layer {
            Some(first) => first,
            None => validate::equal_layers(self.local.kv().map(|kv| &**kv), &remote, range.first)?,
        };
        validate::destination_layers(self.words, &remote, first_layer, count, per_layer)?;
        let (plan, local_rows) = self.plan(&LayerDestination::Cache(remote))?;
        let layer = |layer: u32| {
            let (src, dst) = ((range.first + layer) * per_layer, (first_layer + layer) * per_layer);
            let part = Part { cache: known.cache, plan: plan.in_tensors(src, dst, per_layer) };
            fallible::collect(LAYERS, std::iter::once(part))
        };
        Ok((local_rows, fallible::try_collect(LAYERS, (0..count).map(layer))?))
    }

    /// Plans what moves of one tensor, and returns the rows of the local cache that are read.
    fn plan(&self, to: &LayerDestination) -> Result<(CopyPlan, RowList)> {
        let local = self.local.layout();
        let mut moves = validate::layer_moves(self.words, local, &self.rows, self.to.src_row, to)?;
        Ok((CopyPlan::moves(&mut moves)?, moves.src_rows))
    }

    /// As [`to_cache`](Self::to_cache).
    fn to_addresses(
        &self,
        link: &Arc<Link>,
        addrs: &[u64],
        deadline: Deadline,
    ) -> Result<(RowList, Vec<Vec<Part>>)> {
        let (locations, _share) = link.locate(addrs, deadline)?;
        let mut tensors =
            TensorPlans { push: self, known: Vec::new(), plans: Vec::new(), local_rows: RowList::new() };
        let mut layers = Vec::new();
        let mut src = self.to.src_layers.first * self.per_layer;
        for locations in locations.chunks(self.per_layer.max(1) as usize) {
            let mut parts = Vec::new();
            for location in locations {
                let plan = tensors.plan(link, *location, deadline)?;
                add_tensor(&mut parts, location.cache, &plan.in_tensors(src, location.tensor, 1))?;
                src += 1;
            }
            fallible::push(LAYERS, &mut layers, parts)?;
        }
        Ok((tensors.local_rows, layers))
    }
}

/// Adds the plan of one more tensor of a layer: to its last part, if one plan can copy both.
fn add_tensor(parts: &mut Vec<Part>, cache: CacheId, plan: &CopyPlan) -> Result<()> {
    if let Some(last) = parts.last_mut().filter(|last| last.cache == cache)
        && let Some(longer) = last.plan.followed_by(plan)
    {
        last.plan = longer;
        return Ok(());
    }
    fallible::push(LAYERS, parts, Part { cache, plan: plan.clone() })
}

/// Adds to an error which layers the request was for.
fn with_layers(error: Error, LayerRange { first, end }: LayerRange) -> Error {
    let error = error.with("layer", first);
    if end - first > 1 { error.with("end_of_layers", end) } else { error }
}

/// Joins the parts of the first layer and of those after it, as long as one plan can copy them and they have at most `max_bytes`
/// bytes. Returns the number of layers and the joined part. `None` if the first layer does not have exactly one part.
fn joined(layers: &[Vec<Part>], max_bytes: u64) -> Option<(u32, Part)> {
    let (first, next) = layers.split_first()?;
    let [Part { cache, plan }] = &first[..] else { return None };
    let (mut count, mut joined) = (1, plan.clone());
    for parts in next {
        let [part] = &parts[..] else { break };
        let longer = joined.followed_by(&part.plan).filter(|longer| longer.bytes() <= max_bytes);
        let Some(longer) = longer.filter(|_| part.cache == *cache) else { break };
        (count, joined) = (count + 1, longer);
    }
    Some((count, Part { cache: *cache, plan: joined }))
}

/// Asks the owner for the current description of a remote cache, and remembers it by the id of the cache.
fn ask(link: &Arc<Link>, name: &RemoteCacheName, deadline: Deadline) -> Result<Arc<KnownCache>> {
    let known = link.remote_cache(name, DescriptionSource::Owner, deadline)?;
    if known.remote.row == 0 {
        link.view.remember(Name::of_cache(known.cache), known.clone());
    }
    Ok(known)
}

/// What the tensors of one destination have in common. Usually all lie at the same offset in one cache, and
/// one plan serves them all.
struct TensorPlans<'a> {
    push: &'a LayerPush,
    known: Vec<Arc<KnownCache>>,
    plans: Vec<(LayerDestination, CopyPlan)>,
    local_rows: RowList,
}

impl TensorPlans<'_> {
    /// Returns the plan for a tensor that goes to `location`.
    fn plan(&mut self, link: &Arc<Link>, location: AddressLocation, deadline: Deadline) -> Result<CopyPlan> {
        let known = self.known(link, location.cache, deadline)?;
        let sizes = known.remote.layout.geometry;
        let to = LayerDestination::Memory {
            offset: location.offset,
            tensor_bytes: sizes.tensor_bytes(),
            rows: sizes.row_sizes(),
        };
        if let Some((_, plan)) = self.plans.iter().find(|(known, _)| *known == to) {
            return Ok(plan.clone());
        }
        let (plan, local_rows) = self.push.plan(&to)?;
        self.local_rows = local_rows;
        fallible::push(LAYERS, &mut self.plans, (to, plan.clone()))?;
        Ok(plan)
    }

    fn known(&mut self, link: &Arc<Link>, cache: CacheId, deadline: Deadline) -> Result<Arc<KnownCache>> {
        if let Some(known) = self.known.iter().find(|known| known.cache == cache) {
            return Ok(known.clone());
        }
        let known = ask(link, &Name::of_cache(cache).into(), deadline)?;
        fallible::push(LAYERS, &mut self.known, known.clone())?;
        Ok(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Moves, Pieces, TensorSteps};

    /// The plan of a layer of two tensors, of 256 bytes.
    fn plan() -> CopyPlan {
        let pieces = Pieces::blocks(64, [(3, 1), (0, 2)].into_iter()).unwrap();
        CopyPlan::moves(&mut Moves { pieces, num_tensors: 2, ..Moves::default() }).unwrap()
    }

    #[test]
    fn an_error_names_the_layers_of_its_request() {
        let facts = |first, end| {
            let error = with_layers(Error::new(ErrorKind::Timeout, "late"), LayerRange { first, end });
            ["layer", "end_of_layers"].map(|name| error.fact(name).map(str::to_owned))
        };
        assert_eq!(facts(3, 4), [Some("3".into()), None]);
        assert_eq!(facts(3, 10), [Some("3".into()), Some("10".into())]);
    }

    #[test]
    fn joined_stops_at_a_gap_or_another_cache_or_plan() {
        let (plan, other) = (plan(), plan());
        let of = |cache, plan| vec![Part { cache: CacheId(cache), plan }];
        let part = |cache, plan: &CopyPlan, src, dst| of(cache, plan.in_tensors(src, dst, 2));
        let apart = |src, dst| {
            let steps = |first| TensorSteps { first, step: 2 };
            of(1, plan.in_tensor_steps(steps(src), steps(dst), 2))
        };
        let (first, second, third) = (part(1, &plan, 4, 10), part(1, &plan, 6, 12), part(1, &plan, 8, 14));
        let both = [second.clone(), third.clone()].concat();
        for (what, next, max_bytes, layers) in [
            ("no other layer", vec![], u64::MAX, 1),
            ("two neighboring layers", vec![second.clone(), third.clone()], 768, 3),
            ("a byte too many", vec![second.clone(), third.clone()], 767, 2),
            ("no bytes", vec![second.clone()], 0, 1),
            ("a gap after the second layer", vec![second.clone(), part(1, &plan, 9, 14), third], u64::MAX, 2),
            ("other sources", vec![part(1, &plan, 7, 12)], u64::MAX, 1),
            ("other destinations", vec![part(1, &plan, 6, 13)], u64::MAX, 1),
            ("the same tensors again", vec![first.clone()], u64::MAX, 1),
            ("other steps", vec![apart(6, 12)], u64::MAX, 1),
            ("another cache", vec![part(2, &plan, 6, 12)], u64::MAX, 1),
            ("another plan", vec![part(1, &other, 6, 12)], u64::MAX, 1),
            ("a layer of two parts", vec![both.clone()], u64::MAX, 1),
            ("a layer without parts", vec![vec![]], u64::MAX, 1),
        ] {
            let all = [vec![first.clone()], next].concat();
            let (count, whole) = joined(&all, max_bytes).unwrap();
            assert_eq!(count, layers, "{what}");
            assert_eq!(whole.cache, CacheId(1), "{what}");
            assert_eq!(whole.plan, plan.in_tensors(4, 10, 2 * layers), "{what}");
        }
        let (_, whole) = joined(&[apart(4, 10), apart(8, 14)], u64::MAX).unwrap();
        assert_eq!(whole.plan.num_tensors(), 4, "tensors with equal steps");
        assert_eq!(
            (whole.plan.tensors(Side::Source).first, whole.plan.tensors(Side::Destination).first),
            (4, 10)
        );
        assert!(joined(&[both], u64::MAX).is_none() && joined(&[vec![]], u64::MAX).is_none());
    }
}
