//! Asynchronous transfers, whose end the program asks for by a number. Each end is reported once.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use llm_datadist_core::{Deadline, MAX_SECONDS, Transfer};

use crate::connection::Connection;
use crate::moves::{Direction, OpDesc, Refusal, check_ops};
use crate::open_engine::OpenEngine;
use crate::states::TransferState;
use crate::status::{Outcome, Status};
use crate::sync::lock;

/// Maximum number of requests whose end the program has not asked for.
pub(crate) const MAX_REQUESTS: usize = 1 << 16;
/// How long the start of a request may wait for its connection and for what the peer knows of its regions.
const START: Duration = Duration::from_secs(1);

/// Numbers of requests. No other request of this process has the same one.
static STARTED: AtomicU64 = AtomicU64::new(1);

/// The requests of one engine whose end was not reported.
#[derive(Debug, Default)]
pub(crate) struct Requests(Mutex<BTreeMap<u64, Request>>);

#[derive(Debug)]
struct Request {
    transfer: Arc<Transfer>,
    connection: Arc<Connection>,
    user_data: u64,
}

impl Requests {
    /// Whether there is room for one more request. The oldest one that ended because the program has disconnected makes room.
    fn has_room(&self) -> bool {
        let mut requests = lock(&self.0);
        if requests.len() < MAX_REQUESTS {
            return true;
        }
        let cancelled = |request: &Request| request.connection.has_ended() && request.transfer.done();
        let oldest = requests.iter().find(|(_, request)| cancelled(request)).map(|(number, _)| *number);
        oldest.and_then(|number| requests.remove(&number)).is_some()
    }
}

/// The state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestResult {
    /// Its number.
    pub request: u64,
    /// What the program has given with it.
    pub user_data: u64,
    /// Its state.
    pub state: TransferState,
}

impl OpenEngine {
    /// Starts a transfer and returns its number.
    pub(crate) fn submit(
        &self,
        engine: &str,
        direction: Direction,
        ops: &[OpDesc],
        user_data: u64,
    ) -> Outcome<u64> {
        check_ops(ops)?;
        if !self.requests.has_room() {
            return Err(Status::ResourceExhausted);
        }
        let deadline = Deadline::after(START);
        let connection = self.connection(engine, deadline)?;
        let limit = Some(Duration::from_secs(MAX_SECONDS));
        let mut started = self.start(&connection, direction, ops, deadline, limit);
        if let Err(Refusal::Outdated) = started {
            connection.regions.clear();
            started = self.start(&connection, direction, ops, deadline, limit);
        }
        let transfer = started.map_err(|refusal| match refusal {
            Refusal::Status(status) => status,
            Refusal::Outdated => Status::ParamInvalid,
        });
        let transfer = transfer.inspect_err(|status| self.drop_failed(&connection, *status))?;
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        lock(&self.requests.0).insert(number, Request { transfer, connection, user_data });
        Ok(number)
    }

    /// Returns the state of a request, and forgets it if it has ended. The status is `NotConnected` if it has failed because the
    /// program has disconnected. A request whose region ends while it runs has failed.
    pub(crate) fn request_state(&self, number: u64) -> (Status, TransferState) {
        if number == 0 {
            return (Status::Failed, TransferState::Failed);
        }
        let mut requests = lock(&self.requests.0);
        let Some(request) = requests.get(&number) else {
            return (Status::ParamInvalid, TransferState::Failed);
        };
        let Some(outcome) = request.transfer.outcome() else {
            return (Status::Success, TransferState::Waiting);
        };
        let Some(Request { transfer, connection, .. }) = requests.remove(&number) else {
            return (Status::ParamInvalid, TransferState::Failed);
        };
        drop(requests);
        connection.untrack(&transfer);
        match outcome {
            Ok(_) => (Status::Success, TransferState::Completed),
            Err(_) if connection.has_ended() => (Status::NotConnected, TransferState::Failed),
            Err(error) => {
                self.drop_failed(&connection, Status::from_error("transfer_async", &error));
                (Status::Success, TransferState::Failed)
            }
        }
    }

    /// Returns the states of at most `most` requests in the order of their start, and forgets those that have ended.
    pub(crate) fn request_states(&self, most: usize, skip_waiting: bool) -> Vec<RequestResult> {
        let known: Vec<_> =
            lock(&self.requests.0).iter().map(|(number, request)| (*number, request.user_data)).collect();
        let mut results = Vec::new();
        for (request, user_data) in known {
            if results.len() >= most {
                break;
            }
            match self.request_state(request) {
                // Another thread has reported its end.
                (Status::ParamInvalid, _) => {}
                (_, TransferState::Waiting) if skip_waiting => {}
                (_, state) => results.push(RequestResult { request, user_data, state }),
            }
        }
        results
    }
}
