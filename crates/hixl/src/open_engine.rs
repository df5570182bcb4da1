//! The open engine of an object, with what its calls share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use llm_datadist_core::{Deadline, Engine};

use crate::address::EngineAddress;
use crate::connections::Connections;
use crate::inbox::Inbox;
use crate::messages::METADATA;
use crate::options::Options;
use crate::outbox::Outbox;
use crate::regions::{IN_USE, Regions};
use crate::replies::Replies;
use crate::requests::{MAX_REQUESTS, Requests};
use crate::service;
use crate::status::{Outcome, Status};
use crate::sync::lock;
use crate::tasks::Tasks;

/// Room for the transfers that are no requests: calls that run, links that begin and end, and regions that end.
const OTHER_TRANSFERS: usize = 4096;

/// An engine with its tables.
#[derive(Debug)]
pub(crate) struct OpenEngine {
    pub(crate) engine: Engine,
    pub(crate) options: Options,
    pub(crate) regions: Regions,
    pub(crate) connections: Connections,
    pub(crate) replies: Replies,
    pub(crate) inbox: Inbox,
    pub(crate) outbox: Outbox,
    pub(crate) requests: Requests,
    pub(crate) tasks: Tasks,
    /// Held shared by each call of the program, so that `finalize` waits for it.
    pub(crate) calls: RwLock<()>,
    closing: AtomicBool,
    service: Mutex<Option<JoinHandle<()>>>,
}

impl OpenEngine {
    /// Opens an engine, which listens if its address has a port.
    pub(crate) fn new(local_engine: &str, options: Options) -> Outcome<Arc<OpenEngine>> {
        let address = EngineAddress::parse(local_engine).ok_or(Status::ParamInvalid)?;
        let builder = Engine::builder().name(local_engine).metadata(METADATA);
        let builder = builder.option("max_transfers", (MAX_REQUESTS + OTHER_TRANSFERS) as u64);
        let builder = match address.listener() {
            Some(listener) => builder.listen(&listener.to_string()),
            None => builder,
        };
        // An address in use is no wrong value.
        let engine = builder.open().map_err(|error| match Status::from_error("initialize", &error) {
            Status::ResourceExhausted => Status::ResourceExhausted,
            _ => Status::Failed,
        })?;
        let open = Arc::new(OpenEngine {
            engine,
            options,
            regions: Regions::default(),
            connections: Connections::default(),
            replies: Replies::default(),
            inbox: Inbox::default(),
            outbox: Outbox::new().map_err(|error| Status::from_error("initialize", &error))?,
            requests: Requests::default(),
            tasks: Tasks::default(),
            calls: RwLock::default(),
            closing: AtomicBool::default(),
            service: Mutex::default(),
        });
        let thread = service::start(&open).map_err(|error| Status::from_error("initialize", &error))?;
        *lock(&open.service) = Some(thread);
        Ok(open)
    }

    /// Whether the engine closes.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Closes the engine. Tasks and requests end early. When it returns, nothing of the engine is left.
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.replies.close();
        for connection in self.connections.close() {
            self.end(&connection, Deadline::after(Duration::ZERO));
        }
        // Peers may read memory for transfers that were cancelled.
        self.engine.close(IN_USE);
        self.tasks.close();
        if let Some(thread) = lock(&self.service).take() {
            // It has no result.
            let _ = thread.join();
        }
    }
}
