//! The state that the threads of an engine's links share. Its parts do not refer to this struct.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::answers::Answers;
use super::control_poller::ControlPoller;
use super::dial::Transports;
use super::handshake::Identity;
use super::limits::Connections;
use super::link::Link;
use super::link_attempts::LinkAttempts;
use super::listeners::Listeners;
use super::pushes_in_flight::PushesByEngine;
use super::refusals::Refusals;
use super::registry::Registry;
use super::server::Server;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{ClusterId, Deadline};
use crate::protocol::Party;
use crate::resources::Resources;
use crate::threads::Threads;

/// Shortest and longest time after which another link may replace the link of a silent peer.
const REPLACED_AFTER: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));

pub(crate) struct Shared {
    pub(super) resources: Arc<Resources>,
    pub(super) me: Identity,
    pub(super) registry: Arc<Registry>,
    pub(super) attempts: LinkAttempts,
    pub(super) control: Arc<ControlPoller>,
    pub(super) server: Arc<Server>,
    pub(super) pushes: PushesByEngine,
    pub(super) limits: Connections,
    pub(super) refusals: Arc<Refusals>,
    pub(super) listeners: Listeners,
    /// Whether the warning that other processes may read this one has been logged.
    pub(super) opened_to_readers: AtomicBool,
    pub(super) threads: Arc<Threads>,
    pub(super) transports: Transports,
    /// What the program tells every peer.
    pub(super) metadata: Arc<Vec<u8>>,
}

impl Shared {
    /// Creates the state without links or listeners. Returns `Err` if the system refuses a descriptor or
    /// random bytes.
    pub(super) fn new(resources: Arc<Resources>, transports: Transports) -> Result<Shared> {
        let config = &resources.config;
        let limits = Connections::of_this_process();
        let (threads, refusals) =
            (Threads::of(Some(resources.engine)), Arc::new(Refusals::new(config.native)));
        let me = Identity::new(config)?;
        let control = Arc::new(ControlPoller::new()?);
        let own = (config.cluster, me.party.instance);
        let (events, bell) = (resources.events.clone(), control.bell().clone());
        let registry = Arc::new(Registry::new(own, limits, events, bell));
        let answers = Answers::new(resources.clone());
        let server = Server::new(answers, registry.clone(), refusals.clone(), threads.clone(), limits)?;
        let (instance, watched) = (me.party.instance, control.clone());
        Ok(Shared {
            listeners: Listeners::new(resources.clone(), instance, watched, transports.clone()),
            me,
            registry,
            attempts: LinkAttempts::default(),
            control,
            server: Arc::new(server),
            pushes: PushesByEngine::default(),
            limits,
            refusals,
            opened_to_readers: AtomicBool::default(),
            threads,
            transports,
            metadata: Arc::new(resources.config.metadata.clone()),
            resources,
        })
    }

    /// How long a peer may be silent before its link may be treated as dead: two heartbeats, clamped to
    /// [`REPLACED_AFTER`] so that neither a slow network nor a very long heartbeat makes the value unreasonable.
    pub(super) fn silence_limit(&self) -> Duration {
        self.resources.config.links.heartbeat.saturating_mul(2).clamp(REPLACED_AFTER.0, REPLACED_AFTER.1)
    }

    /// Refuses a link on demand to this engine itself, or to one that has the same cluster id.
    pub(super) fn check_is_other(&self, peer: &Party) -> Result<()> {
        if peer.instance == self.me.party.instance {
            return Err(Error::invalid("the address is that of this engine itself"));
        }
        if peer.cluster == self.me.party.cluster {
            let text = "another engine with the id of this one answers: two engines cannot share an id";
            return Err(Error::new(ErrorKind::LinkFailed, text));
        }
        Ok(())
    }

    pub(super) fn find_other(&self, cluster: ClusterId, deadline: Deadline) -> Result<Arc<Link>> {
        let link = self.registry.find(cluster, self.silence_limit(), deadline)?;
        if link.peer.incarnation == self.me.party.instance { Err(own(cluster)) } else { Ok(link) }
    }
}

/// Refuses a transfer between the engine and itself.
pub(crate) fn own(cluster: ClusterId) -> Error {
    Error::invalid("a transfer needs another engine than this one").with("cluster_id", cluster)
}
