//! Leases: values that a client wants to find again soon. They are not replaced as long as a lease holds them.
//!
//! A lease makes a hit likelier, and nothing else rests on it: it ends with its time or with the connection of its client.

use std::collections::HashMap;
use std::time::Instant;

use crate::index::Location;

/// The leases of one client: each value with the end of its lease.
#[derive(Debug, Default)]
pub(crate) struct ClientLeases(HashMap<Location, Instant>);

/// How many leases hold each value, over all clients.
#[derive(Debug)]
pub(crate) struct HeldValues {
    counts: HashMap<Location, u32>,
    /// The leases of all clients. They bound the memory and the time that leases take.
    leases: usize,
    slots: u32,
}

impl HeldValues {
    /// No leases on the values in `slots` slots.
    pub(crate) fn new(slots: u32) -> HeldValues {
        HeldValues { counts: HashMap::new(), leases: 0, slots }
    }

    /// Leases the value at `location` to a client until `end`. Returns whether the client has a lease on it now: it may have leases for a
    /// quarter of the slots, and all clients together for half of them. Returns `false` if there is no memory for the lease.
    pub(crate) fn lease(&mut self, client: &mut ClientLeases, location: Location, end: Instant) -> bool {
        if let Some(until) = client.0.get_mut(&location) {
            *until = end.max(*until);
            return true;
        }
        let slots = self.slots as usize;
        let room = client.0.len() < slots / 4
            && self.leases < slots / 2
            && client.0.try_reserve(1).is_ok()
            && self.counts.try_reserve(1).is_ok();
        if room {
            client.0.insert(location, end);
            *self.counts.entry(location).or_default() += 1;
            self.leases += 1;
        }
        room
    }

    /// Ends the leases of a client for which `ended` returns `true`. Calls `free` with each value that no lease holds any more.
    pub(crate) fn end(
        &mut self,
        client: &mut ClientLeases,
        mut ended: impl FnMut(&Location, Instant) -> bool,
        mut free: impl FnMut(Location),
    ) {
        for (location, _) in client.0.extract_if(|location, end| ended(location, *end)) {
            if self.release(location) {
                free(location);
            }
        }
    }

    /// Ends the lease of a client on a value. Returns whether this was the last lease on it.
    pub(crate) fn end_one(&mut self, client: &mut ClientLeases, location: Location) -> bool {
        client.0.remove(&location).is_some() && self.release(location)
    }

    /// Counts a lease that has ended. Returns whether it was the last one on its value.
    fn release(&mut self, location: Location) -> bool {
        self.leases -= 1;
        let Some(count) = self.counts.get_mut(&location) else { return false };
        *count -= 1;
        let last = *count == 0;
        if last {
            self.counts.remove(&location);
        }
        last
    }

    /// Returns whether a lease holds the value.
    pub(crate) fn holds(&self, location: Location) -> bool {
        self.counts.contains_key(&location)
    }

    /// Returns the number of values that leases hold.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.counts.len()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn location(slot: u32) -> Location {
        Location { slot, generation: 1 }
    }

    #[test]
    fn a_value_is_free_when_its_last_lease_ends() {
        let mut held = HeldValues::new(40);
        let [mut first, mut second] = [ClientLeases::default(), ClientLeases::default()];
        let now = Instant::now();
        let later = now + Duration::from_secs(5);
        assert!(held.lease(&mut first, location(1), now) && held.lease(&mut second, location(1), later));
        let mut freed = Vec::new();
        held.end(&mut first, |_, end| end <= now, |location| freed.push(location));
        assert!(freed.is_empty() && held.holds(location(1)));
        held.end(&mut second, |_, end| end <= now, |location| freed.push(location));
        assert!(held.holds(location(1)), "its time is not over");
        held.end(&mut second, |_, _| true, |location| freed.push(location));
        assert_eq!((freed, held.count()), (vec![location(1)], 0));
    }

    #[test]
    fn a_client_holds_a_quarter_and_all_hold_half() {
        let mut held = HeldValues::new(40);
        let mut clients: [ClientLeases; 3] = Default::default();
        let now = Instant::now();
        for (number, client) in (0..).zip(&mut clients) {
            let leased = (0..20).filter(|slot| held.lease(client, location(number * 20 + slot), now)).count();
            assert_eq!(leased, if number < 2 { 10 } else { 0 });
        }
        // A lease on a value that another client holds counts as any other, and a lease that exists is renewed.
        assert!(
            !held.lease(&mut clients[2], location(0), now) && held.lease(&mut clients[0], location(0), now)
        );
        assert!(held.end_one(&mut clients[1], location(20)) && !held.end_one(&mut clients[1], location(20)));
        assert!(
            held.lease(&mut clients[2], location(0), now) && !held.lease(&mut clients[2], location(1), now)
        );
        assert_eq!(held.count(), 19);
        assert!(!held.end_one(&mut clients[0], location(0)) && held.end_one(&mut clients[2], location(0)));
        assert_eq!(held.count(), 18);
    }
}
