//! Asynchronous connections: tasks for one engine run in order, those for several engines in parallel.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use llm_datadist_core::Deadline;

use crate::address::EngineAddress;
use crate::open_engine::OpenEngine;
use crate::states::ConnectState;
use crate::status::{Outcome, Status};
use crate::sync::lock;

/// What a task does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Connect,
    Disconnect,
}

/// The tasks of one engine.
#[derive(Debug, Default)]
pub(crate) struct Tasks {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    engines: HashMap<Arc<str>, EngineTasks>,
    /// Engines with a task that may begin.
    ready: VecDeque<Arc<str>>,
    /// Number of tasks that have not begun.
    waiting: usize,
    /// Number of threads that wait for a task.
    idle: usize,
    threads: Vec<JoinHandle<()>>,
    closed: bool,
}

/// The tasks for one engine, and the state of the latest one.
#[derive(Debug)]
struct EngineTasks {
    waiting: VecDeque<(Change, Duration)>,
    running: Option<Change>,
    ended: ConnectState,
}

impl EngineTasks {
    fn state(&self) -> ConnectState {
        match (self.waiting.back(), self.running) {
            (Some((Change::Connect, _)), _) => ConnectState::ConnectPending,
            (Some((Change::Disconnect, _)), _) => ConnectState::DisconnectPending,
            (None, Some(Change::Connect)) => ConnectState::Connecting,
            (None, Some(Change::Disconnect)) => ConnectState::Disconnecting,
            (None, None) => self.ended,
        }
    }
}

impl OpenEngine {
    /// Queues a task. `ParamInvalid` for a text that is no address, and `ResourceExhausted` if too many wait.
    pub(crate) fn queue_task(self: &Arc<Self>, engine: &str, change: Change, limit: Duration) -> Outcome<()> {
        EngineAddress::parse(engine).ok_or(Status::ParamInvalid)?;
        let engine: Arc<str> = engine.into();
        let mut state = lock(&self.tasks.state);
        if state.closed {
            return Err(Status::Failed);
        }
        if state.waiting >= self.options.connect_queue {
            return Err(Status::ResourceExhausted);
        }
        if state.idle <= state.ready.len() && state.threads.len() < self.options.connect_threads {
            let open = Arc::downgrade(self);
            match Builder::new().name("llm-hixl-task".into()).spawn(move || run(&open)) {
                Ok(thread) => state.threads.push(thread),
                Err(_) if state.threads.is_empty() => return Err(Status::ResourceExhausted),
                Err(_) => {}
            }
        }
        let ended = ConnectState::NotConnect;
        let tasks = state.engines.entry(engine.clone());
        let tasks = tasks.or_insert_with(|| EngineTasks { waiting: VecDeque::new(), running: None, ended });
        let begins = tasks.running.is_none() && tasks.waiting.is_empty();
        tasks.waiting.push_back((change, limit));
        state.waiting += 1;
        if begins {
            state.ready.push_back(engine);
            self.tasks.changed.notify_one();
        }
        Ok(())
    }

    /// Returns the state of the latest task for an engine. Without one, a connection counts as `Connected`.
    pub(crate) fn task_state(&self, engine: &str) -> ConnectState {
        let known = lock(&self.tasks.state).engines.get(engine).map(EngineTasks::state);
        known.unwrap_or_else(|| {
            if self.connections.is_connected(engine) {
                ConnectState::Connected
            } else {
                ConnectState::NotConnect
            }
        })
    }
}

impl Tasks {
    /// Returns the state of the latest task for each engine that has one, by engine.
    pub(crate) fn states(&self) -> Vec<(String, ConnectState)> {
        let engines = &lock(&self.state).engines;
        let mut states: Vec<_> =
            engines.iter().map(|(engine, tasks)| (engine.to_string(), tasks.state())).collect();
        states.sort_by(|a, b| a.0.cmp(&b.0));
        states
    }

    /// Forgets the ended tasks for an engine, because the program has disconnected from it otherwise.
    pub(crate) fn forget(&self, engine: &str) {
        let mut state = lock(&self.state);
        if state.engines.get(engine).is_some_and(|tasks| tasks.waiting.is_empty() && tasks.running.is_none())
        {
            state.engines.remove(engine);
        }
    }

    /// Ends all threads. The calls that they make must end by themselves.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        self.changed.notify_all();
        let this = std::thread::current().id();
        for thread in threads.into_iter().filter(|thread| thread.thread().id() != this) {
            // It has no result.
            let _ = thread.join();
        }
    }

    /// Returns the next task, and waits for it. `None` once the tasks are closed.
    fn next(&self) -> Option<(Arc<str>, Change, Duration)> {
        let mut state = lock(&self.state);
        loop {
            if state.closed {
                return None;
            }
            if let Some(engine) = state.ready.pop_front() {
                let tasks = state.engines.get_mut(&engine);
                let task = tasks.and_then(|tasks| {
                    let (change, limit) = tasks.waiting.pop_front()?;
                    tasks.running = Some(change);
                    Some((change, limit))
                });
                if let Some((change, limit)) = task {
                    state.waiting -= 1;
                    return Some((engine, change, limit));
                }
                continue;
            }
            state.idle += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }

    /// Notes the end of a task. The next one for the same engine may begin.
    fn ended(&self, engine: &Arc<str>, ended: ConnectState) {
        let mut state = lock(&self.state);
        let Some(tasks) = state.engines.get_mut(engine) else { return };
        (tasks.running, tasks.ended) = (None, ended);
        if !tasks.waiting.is_empty() {
            state.ready.push_back(engine.clone());
            self.changed.notify_one();
        } else if ended == ConnectState::NotConnect {
            state.engines.remove(engine);
        }
    }
}

/// Runs tasks until they are closed.
fn run(open: &Weak<OpenEngine>) {
    while let Some(open) = open.upgrade()
        && let Some((engine, change, limit)) = open.tasks.next()
    {
        let deadline = Deadline::after(limit);
        let ended = match change {
            Change::Connect => match open.connect(&engine, deadline) {
                Ok(()) | Err(Status::AlreadyConnected) => ConnectState::Connected,
                Err(_) => ConnectState::ConnectFailed,
            },
            Change::Disconnect => {
                // Without a connection, there is nothing to end.
                let _ = open.disconnect(&engine, deadline);
                ConnectState::NotConnect
            }
        };
        open.tasks.ended(&engine, ended);
    }
}
