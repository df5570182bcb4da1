//! Which of two connections is kept when both sides call `ensure_link` at once.
//!
//! Two steps decide, each under the lock of the registry of its side:
//!
//! 1. The dialing side knows the peer after its welcome. If it has a link to that engine, it uses the link. Otherwise it
//!    records that it dials the engine, until the attempt has ended, and only then confirms the connection.
//! 2. The accepting side, when it gets the confirmation, [decides](decide): it does not enter the connection if it has a
//!    link to that engine, or if it dials the engine itself and its own id is the lower one.
//!
//! So at most one connection is entered. Let `low` and `high` be the two engines, and let both have confirmed one. If
//! `low` gets the confirmation of `high` after step 1 of its own attempt, it refuses it, and only the connection of
//! `low` is left. If `low` gets the
//! confirmation earlier, it enters that connection, finds the link in step 1, and confirms nothing. And at least one
//! is entered: `high` never refuses unless it has a link. The side that was refused uses the link as soon as its registry
//! has it. If it never does, because the attempt of the other side failed, it dials again.

use std::sync::Arc;

use hashbrown::HashMap;

use super::link::{EngineId, Link};

/// What an attempt to make a link on demand finds at its start.
pub(super) enum DialStart<Guard> {
    /// There is a link to the engine that is [kept](Link::is_kept).
    Linked(Arc<Link>),
    /// There is a link to the engine, but its peer has been silent for longer than the limit.
    Silent(Arc<Link>),
    /// The attempt is recorded until the guard is dropped.
    Dials(Guard),
}

/// The attempts of this side to link, by the engine that they have reached.
#[derive(Debug, Default)]
pub(super) struct Dials(HashMap<EngineId, usize>);

impl Dials {
    pub(super) fn begin(&mut self, to: EngineId) {
        *self.0.entry(to).or_default() += 1;
    }

    pub(super) fn end(&mut self, to: EngineId) {
        if let Some(count) = self.0.get_mut(&to) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(&to);
            }
        }
    }

    pub(super) fn any(&self) -> bool {
        !self.0.is_empty()
    }

    pub(super) fn to(&self, engine: EngineId) -> bool {
        self.0.contains_key(&engine)
    }
}

/// Decides about a connection from the engine `peer` to the engine `own`, which has a working link to it, or `dials` it. Returns why
/// the engine `own` does not enter the link, or `None` if it enters it.
pub(super) fn decide(linked: bool, dials: bool, own: EngineId, peer: EngineId) -> Option<&'static str> {
    match (linked, dials && own < peer) {
        (true, _) => Some("there is a link already"),
        (false, true) => Some("this side is making the link"),
        (false, false) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::model::ClusterId;

    /// The stage of the call of one side.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum Call {
        /// It is about to take step 1.
        Welcomed,
        /// The peer has not decided yet.
        Confirmed,
        /// The peer has entered the link, or has refused.
        Answered(bool),
        /// It waits for the other connection.
        Refused,
        Done,
    }

    /// Two sides. A connection has the number of the side that dialled it.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct Sides {
        calls: [Call; 2],
        dials: [bool; 2],
        /// The connection that each side has entered.
        linked: [Option<usize>; 2],
    }

    impl Sides {
        /// Takes the next step of the call of `side`; with `accept`, the step of the accepting side. Returns whether there
        /// was one.
        fn step(&mut self, side: usize, accept: bool) -> bool {
            let id = |side: usize| (ClusterId(side as u64), 0);
            let other = 1 - side;
            match self.calls[side] {
                Call::Confirmed if accept => {
                    let linked = self.linked[other].is_some();
                    let enters = decide(linked, self.dials[other], id(other), id(side)).is_none();
                    if enters {
                        self.linked[other] = Some(side);
                    }
                    self.calls[side] = Call::Answered(enters);
                }
                _ if accept => return false,
                Call::Welcomed | Call::Refused if self.linked[side].is_some() => {
                    self.calls[side] = Call::Done;
                }
                Call::Welcomed => (self.calls[side], self.dials[side]) = (Call::Confirmed, true),
                Call::Answered(entered) => {
                    if entered {
                        assert_eq!(self.linked[side], None, "two connections were entered: {self:?}");
                        self.linked[side] = Some(side);
                    }
                    self.calls[side] = if entered { Call::Done } else { Call::Refused };
                    self.dials[side] = false;
                }
                Call::Refused => self.calls[side] = Call::Welcomed,
                Call::Confirmed | Call::Done => return false,
            }
            true
        }
    }

    #[test]
    fn one_connection_is_kept_in_every_order_of_the_steps() {
        let start = Sides { calls: [Call::Welcomed; 2], dials: [false; 2], linked: [None; 2] };
        let (mut seen, mut ends) = (HashSet::from([start.clone()]), HashSet::new());
        let mut open = vec![start];
        while let Some(sides) = open.pop() {
            let mut moved = false;
            for (side, accept) in [(0, false), (0, true), (1, false), (1, true)] {
                let mut next = sides.clone();
                if next.step(side, accept) {
                    moved = true;
                    if seen.insert(next.clone()) {
                        open.push(next);
                    }
                }
            }
            if !moved {
                assert_eq!(sides.calls, [Call::Done; 2]);
                assert_eq!(sides.linked[0], sides.linked[1], "each side keeps another connection");
                ends.insert(sides.linked[0]);
            }
        }
        assert!(seen.len() >= 20, "{}", seen.len());
        assert_eq!(ends, HashSet::from([Some(0), Some(1)]), "either side can be the one that dials");
    }
}
