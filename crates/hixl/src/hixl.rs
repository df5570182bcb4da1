//! The object that programs use.

use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use llm_datadist_core::{Adopted, CacheDesc, Deadline, Result};

use crate::inbox::Notice;
use crate::moves::{Direction, OpDesc};
use crate::open_engine::OpenEngine;
use crate::options::Options;
use crate::regions::{MemKind, MemRange};
use crate::requests::RequestResult;
use crate::states::{ConnectState, TransferState};
use crate::status::{Outcome, Status};
use crate::sync::{lock, read, write};
use crate::tasks::Change;

/// An engine that registers memory, connects to other engines, and reads and writes their memory by address. A process may have any
/// number of them, and any number of threads may use one.
///
/// Every method of an object that is not initialized returns `Failed`, whatever its arguments. Time limits are in milliseconds and cover
/// the whole call; a limit below 1 is `ParamInvalid`.
#[derive(Debug, Default)]
pub struct Hixl {
    open: RwLock<Option<Arc<OpenEngine>>>,
    /// Held while the object is initialized or finalized.
    changing: Mutex<()>,
}

impl Hixl {
    /// The features that `get_capability` knows, by number: `AUTO_CONNECT` and `CLIENT_SERVER_COMM`. All are supported.
    pub const FEATURES: i32 = 2;

    /// Checks options as [`initialize`](Self::initialize) does.
    pub fn check_options<T: AsRef<str>>(options: &[(T, T)]) -> Status {
        Status::of(&Options::read(options))
    }

    /// Opens the engine. Has no effect on an object that is initialized, and returns `Success`.
    pub fn initialize<T: AsRef<str>>(&self, local_engine: &str, options: &[(T, T)]) -> Status {
        let _alone = lock(&self.changing);
        if read(&self.open).is_some() {
            return Status::Success;
        }
        let opened = Options::read(options).and_then(|options| OpenEngine::new(local_engine, options));
        opened.map_or_else(
            |status| status,
            |open| {
                *write(&self.open) = Some(open);
                Status::Success
            },
        )
    }

    /// Waits for the calls that are running, at most until their limits, and closes the engine. Later calls return `Failed` at once.
    /// Cancels requests and asynchronous connections. Afterwards this process no longer reads or writes memory for the engine. Has no
    /// effect on an object that is not initialized.
    pub fn finalize(&self) {
        let _alone = lock(&self.changing);
        let open = write(&self.open).take();
        if let Some(open) = open {
            drop(write(&open.calls));
            open.close();
        }
    }

    /// Runs `call` on the engine, which stays open until it has returned.
    fn run<T>(&self, call: impl FnOnce(&Arc<OpenEngine>) -> Outcome<T>) -> Outcome<T> {
        let slot = read(&self.open);
        let open = slot.clone().ok_or(Status::Failed)?;
        // Before `finalize` can take the engine and wait for its calls.
        let _running = read(&open.calls);
        drop(slot);
        call(&open)
    }

    /// Registers memory and returns its handle, which is not 0. `adopt` makes the promise of [`Adopted::new`] for a cache that is
    /// described so and begins at this address: the memory is valid until the region has ended or the engine is closed.
    pub fn register_mem(
        &self,
        range: MemRange,
        kind: Option<MemKind>,
        adopt: impl FnOnce(&CacheDesc, &[u64]) -> Result<Adopted>,
    ) -> Outcome<u64> {
        self.run(|open| open.regions.register(&open.engine, range, kind.ok_or(Status::ParamInvalid)?, adopt))
    }

    /// Ends the region of a handle, and waits about 10 s at most until nothing uses its memory. After `Timeout`, transfers still use it,
    /// and the same call waits again. An unknown handle is a success; 0 is `ParamInvalid`.
    pub fn deregister_mem(&self, handle: u64) -> Outcome<()> {
        self.run(|open| open.deregister(handle))
    }

    /// Connects to another engine.
    pub fn connect(&self, engine: &str, limit_ms: i32) -> Outcome<()> {
        self.run(|open| {
            open.connect(engine, Deadline::after(limit(limit_ms)?))?;
            open.tasks.forget(engine);
            Ok(())
        })
    }

    /// Ends the connection to another engine, with all transfers over it.
    pub fn disconnect(&self, engine: &str, limit_ms: i32) -> Outcome<()> {
        self.run(|open| {
            open.disconnect(engine, Deadline::after(limit(limit_ms)?))?;
            open.tasks.forget(engine);
            Ok(())
        })
    }

    /// Queues a connection to another engine for a thread. `ResourceExhausted` if the queue is full.
    pub fn connect_async(&self, engine: &str, limit_ms: i32) -> Outcome<()> {
        self.run(|open| open.queue_task(engine, Change::Connect, limit(limit_ms)?))
    }

    /// Queues a disconnection from another engine for a thread. `ResourceExhausted` if the queue is full.
    pub fn disconnect_async(&self, engine: &str, limit_ms: i32) -> Outcome<()> {
        self.run(|open| open.queue_task(engine, Change::Disconnect, limit(limit_ms)?))
    }

    /// Returns the state of the asynchronous connection to an engine.
    pub fn connect_state(&self, engine: &str) -> Outcome<ConnectState> {
        self.run(|open| Ok(open.task_state(engine)))
    }

    /// Returns the states of all asynchronous connections, by engine.
    pub fn connect_states(&self) -> Outcome<Vec<(String, ConnectState)>> {
        self.run(|open| Ok(open.tasks.states()))
    }

    /// Reads memory of another engine, or writes it. Returns when all bytes are in place. A write that the other engine reads from
    /// memory of this process may exceed its limit if the process of that engine is stopped: it returns when no process reads the memory.
    pub fn transfer_sync(
        &self,
        engine: &str,
        direction: Option<Direction>,
        ops: &[OpDesc],
        limit_ms: i32,
    ) -> Outcome<()> {
        self.run(|open| {
            let direction = direction.ok_or(Status::ParamInvalid)?;
            open.transfer(engine, direction, ops, Deadline::after(limit(limit_ms)?))
        })
    }

    /// Starts to read or write, and returns the number of the request, which is not 0.
    pub fn transfer_async(
        &self,
        engine: &str,
        direction: Option<Direction>,
        ops: &[OpDesc],
        user_data: u64,
    ) -> Outcome<u64> {
        self.run(|open| open.submit(engine, direction.ok_or(Status::ParamInvalid)?, ops, user_data))
    }

    /// Returns the state of a request. The end of a request is reported once.
    pub fn transfer_state(&self, request: u64) -> (Status, TransferState) {
        let found = self.run(|open| Ok(open.request_state(request)));
        found.unwrap_or((Status::Failed, TransferState::Failed))
    }

    /// Returns the states of at most `most` requests, in the order of their start. Ends are reported once.
    pub fn transfer_states(&self, most: u32, skip_waiting: bool) -> Outcome<Vec<RequestResult>> {
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        self.run(|open| Ok(open.request_states(most, skip_waiting)))
    }

    /// Sends a notification, which has a name and a text. Returns when the other engine has received it. `None` means that a text is not
    /// UTF-8, and returns `ParamInvalid`.
    pub fn send_notify(&self, engine: &str, notice: Option<(&str, &str)>, limit_ms: i32) -> Outcome<()> {
        self.run(|open| {
            let notice = notice.ok_or(Status::ParamInvalid)?;
            open.notify(engine, notice, Deadline::after(limit(limit_ms)?))
        })
    }

    /// Returns all notifications that were not read, and forgets them.
    pub fn notifies(&self) -> Outcome<Vec<Notice>> {
        self.run(|open| Ok(open.inbox.take()))
    }

    /// Returns whether a feature is supported: 1 or 0. `ParamInvalid` for a number below 0.
    pub fn capability(feature: i32) -> Outcome<i32> {
        if feature < 0 { Err(Status::ParamInvalid) } else { Ok(i32::from(feature < Self::FEATURES)) }
    }
}

impl Drop for Hixl {
    fn drop(&mut self) {
        self.finalize();
    }
}

/// Checks a time limit.
fn limit(milliseconds: i32) -> Outcome<Duration> {
    let positive = u64::try_from(milliseconds).ok().filter(|&milliseconds| milliseconds > 0);
    positive.map(Duration::from_millis).ok_or(Status::ParamInvalid)
}
