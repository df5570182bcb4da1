//! Grants against a naive twin, which keeps a list of all grants that ever were, and sets of rows against plain sets.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use llm_datadist_core::testing::grants::{Grant, GrantObserver, GrantedRead, Grants, RowRanges};
use llm_datadist_core::testing::memory::Generations;
use llm_datadist_core::testing::model::{GrantEnd, GrantId};
use llm_datadist_core::testing::transfer::Executor;
use llm_datadist_core::testing::{grant_clock, watch_grants};
use llm_datadist_core::{CacheId, ClusterId, Deadline, Error, ErrorKind, GrantToken};
use proptest::prelude::*;

const LONG: Duration = Duration::from_secs(3600);

/// Records every end in its order.
#[derive(Debug, Default)]
struct Reported(Mutex<Vec<(GrantId, GrantEnd)>>);

impl GrantObserver for Reported {
    fn grant_ended(&self, grant: &Arc<Grant>, why: GrantEnd) {
        self.0.lock().unwrap().push((grant.id(), why));
    }

    fn unpolled(&self) -> usize {
        0
    }
}

fn grants() -> (Arc<Generations>, Arc<Reported>, Arc<Grants>) {
    let (generations, reported_ends) = (Arc::new(Generations::new().unwrap()), Arc::new(Reported::default()));
    let grants = Grants::new(generations.clone(), reported_ends.clone()).unwrap();
    (generations, reported_ends, grants)
}

fn rows(rows: &[u64]) -> RowRanges {
    RowRanges::of(rows.to_vec()).unwrap()
}

#[derive(Clone, Debug)]
enum Step {
    Lend {
        cache: i64,
        readers: usize,
    },
    /// The n-th grant ends, or is found to have ended.
    End(usize),
    EndOfCache(i64),
    Report(usize, u64),
    Find(usize),
    /// The same with one bit of the id changed.
    Forge(usize, usize),
    Read(usize),
    FinishRead(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let index = 0..20usize;
    prop_oneof![
        (0..3i64, 1..4usize).prop_map(|(cache, readers)| Step::Lend { cache, readers }),
        index.clone().prop_map(Step::End),
        (0..3i64).prop_map(Step::EndOfCache),
        (index.clone(), 0..3u64).prop_map(|(index, reader)| Step::Report(index, reader)),
        index.clone().prop_map(Step::Find),
        (index.clone(), 0..224usize).prop_map(|(index, bit)| Step::Forge(index, bit)),
        index.clone().prop_map(Step::Read),
        index.prop_map(Step::FinishRead),
    ]
}

/// What the twin knows of a grant.
struct Twin {
    grant: Arc<Grant>,
    cache: i64,
    readers: usize,
    reported: BTreeSet<u64>,
    ended: Option<GrantEnd>,
}

fn forged(id: GrantId, bit: usize) -> GrantId {
    let GrantId { slot, generation, mut secret } = id;
    match bit {
        0..32 => GrantId { slot: slot ^ (1 << bit), ..id },
        32..96 => GrantId { generation: generation ^ (1 << (bit - 32)), ..id },
        _ => {
            secret[(bit - 96) / 8] ^= 1 << (bit % 8);
            GrantId { secret, ..id }
        }
    }
}

fn run(steps: Vec<Step>) {
    let (generations, reported_ends, grants) = grants();
    let (mut twins, mut expected): (Vec<Twin>, Vec<(GrantId, GrantEnd)>) = (Vec::new(), Vec::new());
    let mut reads: Vec<(usize, GrantedRead)> = Vec::new();
    for step in steps {
        let mut end = |twin: &mut Twin, why| {
            assert!(twin.ended.is_none());
            twin.ended = Some(why);
            expected.push((twin.grant.id(), why));
        };
        match step {
            Step::Lend { cache, readers } => {
                let grant = grants.lend(CacheId(cache), rows(&[1, 2]), LONG, readers).unwrap();
                assert!(twins.iter().all(|twin| twin.grant.id() != grant.id()), "an id is used once");
                twins.push(Twin { grant, cache, readers, reported: BTreeSet::new(), ended: None });
            }
            Step::End(index) => {
                let Some(twin) = twins.get_mut(index) else { continue };
                assert_eq!(grants.end(&twin.grant, GrantEnd::Revoked), twin.ended.is_none());
                if twin.ended.is_none() {
                    end(twin, GrantEnd::Revoked);
                }
            }
            Step::EndOfCache(cache) => {
                grants.end_of_cache(CacheId(cache));
                let mut live: Vec<_> =
                    twins.iter_mut().filter(|twin| twin.cache == cache && twin.ended.is_none()).collect();
                live.sort_by_key(|twin| twin.grant.id().slot);
                live.into_iter().for_each(|twin| end(twin, GrantEnd::Released));
            }
            Step::Report(index, reader) => {
                let Some(twin) = twins.get_mut(index) else { continue };
                let reported = grants.report(&twin.grant.id(), (ClusterId(1), reader)).map(drop);
                assert_eq!(reported.map_err(|error| error.kind()), Ok(()), "also after the end");
                twin.reported.insert(reader);
                if twin.ended.is_none() && twin.reported.len() >= twin.readers {
                    end(twin, GrantEnd::Done);
                }
            }
            Step::Find(index) => {
                let Some(twin) = twins.get(index) else { continue };
                let found = grants.find(&twin.grant.id());
                assert_eq!(found.map(drop).map_err(|error| why(&error)), open(twin));
            }
            Step::Forge(index, bit) => {
                let Some(twin) = twins.get(index) else { continue };
                let id = forged(twin.grant.id(), bit);
                let errors = [
                    grants.find(&id).unwrap_err(),
                    grants.read(&id).unwrap_err(),
                    grants.report(&id, (ClusterId(1), 9)).unwrap_err(),
                ];
                for error in errors {
                    assert_eq!(why(&error), (ErrorKind::GrantEnded, None));
                    assert!(error.reason().contains("never given"), "{error}");
                }
            }
            Step::Read(index) => {
                let Some(twin) = twins.get(index) else { continue };
                match grants.read(&twin.grant.id()) {
                    Ok(read) => reads.push((index, read)),
                    Err(error) => assert_eq!(Err(why(&error)), open(twin)),
                }
            }
            Step::FinishRead(index) => {
                let Some(at) = reads.iter().position(|&(of, _)| of == index) else { continue };
                let (_, read) = reads.swap_remove(at);
                assert_eq!(read.finish().map_err(|error| why(&error)), open(&twins[index]));
            }
        }
        for (index, twin) in twins.iter().enumerate() {
            let GrantId { slot, generation, .. } = twin.grant.id();
            assert_eq!(twin.grant.ended(), twin.ended);
            assert_eq!(generations.of_grant(slot) == generation, twin.ended.is_none(), "what readers see");
            let idle = grants.wait_for_reads(&twin.grant, Deadline::after(Duration::ZERO)).is_ok();
            assert_eq!(idle, reads.iter().all(|&(of, _)| of != index));
        }
        assert_eq!(grants.live(), twins.iter().filter(|twin| twin.ended.is_none()).count());
        assert_eq!(*reported_ends.0.lock().unwrap(), expected);
    }
    grants.close();
    assert!(twins.iter().all(|twin| twin.grant.ended().is_some()));
    assert_eq!(grants.lend(CacheId(1), rows(&[1]), LONG, 1).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(*reported_ends.0.lock().unwrap(), expected, "a closing engine reports nothing");
}

/// The kind of an error, and the reason that it gives for the end of a grant.
type Why = (ErrorKind, Option<String>);

fn why(error: &Error) -> Why {
    (error.kind(), error.fact("ended").map(str::to_owned))
}

fn open(twin: &Twin) -> Result<(), Why> {
    twin.ended.map_or(Ok(()), |why| Err((ErrorKind::GrantEnded, Some(why.name().into()))))
}

/// The owner remembers the reasons of 4,096 grants, also if others have their entries.
#[test]
fn the_reasons_of_the_latest_ends_are_known() {
    let (_, _, grants) = grants();
    let ended_grant = |end: GrantEnd| {
        let grant = grants.lend(CacheId(1), rows(&[1]), LONG, 1).unwrap();
        assert!(grants.end(&grant, end));
        grant.id()
    };
    let first = ended_grant(GrantEnd::Expired);
    let all: Vec<_> = (1..4096).map(|_| ended_grant(GrantEnd::Revoked)).collect();
    let reason = |id: &GrantId| why(&grants.find(id).unwrap_err());
    assert_eq!(reason(&first), (ErrorKind::GrantEnded, Some("expired".into())));
    ended_grant(GrantEnd::Done);
    assert_eq!(reason(&first), (ErrorKind::GrantEnded, None), "too long ago");
    for id in [&all[0], &all[4094]] {
        assert_eq!((id.slot, reason(id)), (first.slot, (ErrorKind::GrantEnded, Some("revoked".into()))));
    }
}

proptest! {
    #[test]
    fn grants_behave_as_their_twin(steps in prop::collection::vec(step(), 1..80)) {
        run(steps);
    }

    #[test]
    fn row_ranges_are_sets(given in prop::collection::vec(0..40u64, 0..40), asked in prop::collection::vec(0..45u64, 0..10)) {
        let (ranges, set) = (rows(&given), given.iter().copied().collect::<BTreeSet<_>>());
        let listed: Vec<u64> = ranges.ranges().iter().cloned().flatten().collect();
        prop_assert_eq!(&listed, &set.iter().copied().collect::<Vec<_>>());
        prop_assert_eq!(ranges.first_missing(&asked), asked.iter().copied().find(|row| !set.contains(row)));
        prop_assert_eq!(RowRanges::from_ranges(ranges.ranges().to_vec()), Some(ranges));
    }

    #[test]
    fn tokens_round_trip(cluster: u64, incarnation: u64, slot: u32, generation: u64, secret: [u8; 16]) {
        let grant = GrantId { slot, generation, secret };
        let token = GrantToken { cluster: ClusterId(cluster), incarnation, grant };
        let bytes = token.to_bytes();
        let by_hand = [
            &b"LDG\x01"[..],
            &cluster.to_le_bytes(),
            &incarnation.to_le_bytes(),
            &slot.to_le_bytes(),
            &generation.to_le_bytes(),
            &secret,
        ];
        prop_assert_eq!(&bytes[..], by_hand.concat());
        prop_assert_eq!(GrantToken::from_bytes("token", &bytes).unwrap(), token);
        let damaged = bytes.map(|byte| !byte);
        for wrong in [&bytes[1..], &damaged[..]] {
            let text = GrantToken::from_bytes("grant", wrong).unwrap_err().to_string();
            prop_assert!(text.contains("grant= is not a token of a grant"), "{text}");
        }
    }
}

#[test]
fn ranges_that_are_no_set_are_refused() {
    let wrong: [&[(u64, u64)]; 5] =
        [&[(2, 2)], &[(3, 1)], &[(0, 2), (1, 3)], &[(0, 2), (2, 3)], &[(4, 5), (0, 1)]];
    for ranges in wrong {
        let ranges: Vec<_> = ranges.iter().map(|&(first, end)| first..end).collect();
        assert_eq!(RowRanges::from_ranges(ranges.clone()), None, "{ranges:?}");
    }
    assert_eq!(RowRanges::from_ranges(vec![]), Some(RowRanges::default()));
}

/// What passes no check of the twin, because it depends on the clock.
#[test]
fn a_grant_whose_time_has_passed_is_found_to_have_ended() {
    let (generations, reported_ends, grants) = grants();
    let short = grants.lend(CacheId(1), rows(&[1]), Duration::from_nanos(1), 1).unwrap();
    let expiry = grants.next_expiry();
    let long = grants.lend(CacheId(1), rows(&[1]), LONG, 1).unwrap();
    assert_eq!(grants.next_expiry(), expiry);
    assert_eq!(grants.find(&short.id()).unwrap_err().kind(), ErrorKind::GrantEnded);
    assert_eq!((short.ended(), generations.of_grant(short.id().slot)), (Some(GrantEnd::Expired), 1));
    grants.expire();
    assert_eq!(*reported_ends.0.lock().unwrap(), [(short.id(), GrantEnd::Expired)]);
    assert!(grants.next_expiry() > expiry && long.ended().is_none());
    let expiry = grants.next_expiry();
    let other = grants.lend(CacheId(1), rows(&[1]), Duration::from_nanos(1), 1).unwrap();
    assert!(grants.next_expiry() < expiry);
    grants.expire();
    assert_eq!(other.ended(), Some(GrantEnd::Expired));
}

/// The program may reuse the blocks as soon as it sees the end.
#[test]
fn who_sees_the_end_knows_that_readers_see_it() {
    let (generations, _, grants) = grants();
    for _ in 0..2000 {
        let grant = grants.lend(CacheId(1), rows(&[1]), LONG, 1).unwrap();
        let GrantId { slot, generation, .. } = grant.id();
        std::thread::scope(|scope| {
            scope.spawn(|| grants.end(&grant, GrantEnd::Revoked));
            while grant.ended().is_none() {
                std::hint::spin_loop();
            }
            assert_ne!(generations.of_grant(slot), generation);
        });
    }
}

#[test]
fn a_grant_that_nobody_got_ends_without_an_event() {
    let (generations, reported_ends, grants) = grants();
    let grant = grants.lend(CacheId(1), rows(&[1]), LONG, 1).unwrap();
    grants.withdraw(&grant);
    assert_eq!((grants.live(), generations.of_grant(grant.id().slot)), (0, 1));
    assert_eq!(*reported_ends.0.lock().unwrap(), []);
}

#[test]
fn secrets_are_not_shown() {
    let (_, _, grants) = grants();
    let grant = grants.lend(CacheId(1), rows(&[1]), LONG, 1).unwrap();
    let shown = format!("{:?} {grant:?}", grant.id());
    assert!(shown.contains("slot: 0, generation: 0, .."), "{shown}");
    assert!(!shown.contains("secret") && !shown.contains(&format!("{:?}", grant.id().secret)), "{shown}");
}

/// One alarm is set, however many grants come and go beside one that lasts.
#[test]
fn grants_take_one_alarm() {
    let executor = Executor::default();
    let (_, reported_ends, grants) = grants();
    let clock = grant_clock(executor.handle(), &grants);
    let long = grants.lend(CacheId(1), rows(&[1]), LONG, 1).unwrap();
    for count in 1..20 {
        grants.lend(CacheId(1), rows(&[1]), Duration::from_millis(1), 1).unwrap();
        watch_grants(&clock).unwrap();
        assert!(executor.handle().alarms() <= 1);
        while reported_ends.0.lock().unwrap().len() < count {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    while executor.handle().alarms() != 1 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(long.ended(), None);
}

/// Threads lend, read, report and revoke at the same time. Each grant ends once, and a read that ends well did so before.
#[test]
fn many_threads_end_each_grant_once() {
    let (_, reported_ends, grants) = grants();
    let lent: Vec<_> = (0..2000).map(|_| grants.lend(CacheId(1), rows(&[1]), LONG, 2).unwrap()).collect();
    std::thread::scope(|scope| {
        for reader in 0..2u64 {
            let (grants, lent) = (&grants, &lent);
            scope.spawn(move || {
                for grant in lent {
                    if let Ok(read) = grants.read(&grant.id()) {
                        let _ = read.finish();
                    }
                    let _ = grants.report(&grant.id(), (ClusterId(1), reader));
                }
            });
        }
        for grant in lent.iter().rev() {
            grants.end(grant, GrantEnd::Revoked);
            grants.wait_for_reads(grant, Deadline::after(LONG)).unwrap();
            assert!(grants.read(&grant.id()).is_err());
        }
    });
    let reported_ends = reported_ends.0.lock().unwrap();
    assert_eq!(reported_ends.iter().map(|(id, _)| id.slot).collect::<BTreeSet<_>>().len(), lent.len());
    assert_eq!((reported_ends.len(), grants.live()), (lent.len(), 0));
}

#[test]
fn a_grant_is_renewed_but_never_shortened() {
    let (generations, reported_ends, grants) = grants();
    let grant = grants.lend(CacheId(1), rows(&[1]), LONG, 1).unwrap();
    let first = grants.next_expiry();
    grants.renew(&grant, Duration::from_secs(1)).unwrap();
    assert_eq!(grants.next_expiry(), first);
    grants.renew(&grant, 2 * LONG).unwrap();
    assert!(grants.next_expiry() > first);
    assert_eq!(generations.of_grant(grant.id().slot), 0, "readers that have its description may read on");
    grants.end(&grant, GrantEnd::Revoked);
    assert_eq!(grants.next_expiry(), None, "nothing is left of it");
    // Another grant takes its entry.
    let other = grants.lend(CacheId(1), rows(&[1]), LONG, 1).unwrap();
    assert_eq!(other.id().slot, grant.id().slot);
    let expiry = grants.next_expiry();
    let error = grants.renew(&grant, 2 * LONG).unwrap_err();
    assert_eq!(why(&error), (ErrorKind::GrantEnded, Some("revoked".into())));
    assert_eq!(grants.next_expiry(), expiry);
    let late = grants.lend(CacheId(1), rows(&[1]), Duration::from_nanos(1), 1).unwrap();
    let error = grants.renew(&late, LONG).unwrap_err();
    assert_eq!(why(&error), (ErrorKind::GrantEnded, Some("expired".into())));
    assert_eq!((late.ended(), generations.of_grant(late.id().slot)), (Some(GrantEnd::Expired), 1));
    let ends = [(grant.id(), GrantEnd::Revoked), (late.id(), GrantEnd::Expired)];
    assert_eq!(*reported_ends.0.lock().unwrap(), ends);
}
