//! UCX for one engine: whether it is used, the pools that peers may read by it, and the pools that peers offer.
//!
//! Each side offers its pools in the last messages of the handshake (`protocol::FabricOffer`), after the other one was
//! admitted.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use llm_datadist_fabric::{Counts, Error as LibraryError, Fabric, Peer};
use llm_datadist_ucx as ucx;

use crate::config::{Backend, FabricConfig};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{FabricRegion, Region, SharedRegion, TensorBytes, Tensors, load_ucx};
use crate::protocol::{FabricOffer, FabricPool, MAX_OFFER_BYTES, Run};

/// The name under which the system finds the library.
const LIBRARY: &str = "libucp.so.0";
/// The transports of UCX that the engine allows, unless the program has chosen others: RDMA. UCX listens on all networks
/// without authentication if it may use TCP.
const TRANSPORTS: &str = "rc,dc,ud,srd";
/// The kernel lists RDMA devices here.
const DEVICES: &str = "/sys/class/infiniband";
/// The reasons why an engine does not use UCX: the configuration, or the lack of a device.
const SOCKETS_CHOSEN: &str = "llm.TransferBackend=sockets";
const NO_DEVICE: &str = "this host has no RDMA device (/sys/class/infiniband)";

/// What this process can read in place, or the reason why it cannot.
pub type Readable<T> = std::result::Result<T, Cow<'static, str>>;

/// UCX of one engine.
#[derive(Debug)]
pub struct EngineFabric {
    pools: [Option<SharedRegion>; 2],
    address: Vec<u8>,
    required: bool,
    // Dropped last: the pools are mapped with it.
    fabric: Box<dyn Fabric>,
}

/// The pools of one peer that are read by UCX, by placement.
#[derive(Debug)]
pub struct PeerFabric {
    pools: [Option<Arc<FabricRegion>>; 2],
}

impl EngineFabric {
    /// Opens UCX if the configuration asks for it, or leaves the choice to the engine and there is an RDMA device. Maps the
    /// pools that the CPU can address.
    ///
    /// If UCX cannot be used, returns `Err(NotEnabled)` if the configuration names UCX. Otherwise returns the reason, and
    /// logs a warning unless there is no device.
    ///
    /// Without a `token`, UCX is not used: a process that gets a key is trusted with the whole pool (docs/networks.md).
    pub fn open(
        config: &FabricConfig,
        token: bool,
        pools: [Option<Arc<Region>>; 2],
    ) -> Result<Readable<EngineFabric>> {
        match config.backend {
            Backend::Sockets => return Ok(Err(SOCKETS_CHOSEN.into())),
            Backend::Auto if !config.assume_device && !has_devices(Path::new(DEVICES)) => {
                return Ok(Err(NO_DEVICE.into()));
            }
            Backend::Ucx | Backend::Auto => {}
        }
        let opened = if token {
            Self::opened(config, pools)
        } else {
            let text = "UCX needs a token (llm.LinkToken or llm.LinkTokenFile), because it does not authenticate peers";
            Err(Error::new(ErrorKind::NotEnabled, text))
        };
        match opened {
            Ok(fabric) => Ok(Ok(fabric)),
            Err(error) if config.backend == Backend::Ucx => Err(error),
            Err(error) => {
                tracing::warn!(target: "llm_datadist::links", "links without shared memory use sockets instead of UCX: {error}");
                Ok(Err(error.to_string().into()))
            }
        }
    }

    /// Returns the version of the library, and what was done with it.
    pub fn state(&self) -> (String, Counts) {
        (self.fabric.version().to_string(), self.fabric.counts())
    }

    fn opened(config: &FabricConfig, pools: [Option<Arc<Region>>; 2]) -> Result<EngineFabric> {
        let path = config.library.clone().unwrap_or_else(|| PathBuf::from(LIBRARY));
        let library = load_ucx(&path)?;
        let mut settings = config.settings.clone();
        let chosen = std::env::var_os("UCX_TLS").is_some() || settings.iter().any(|(name, _)| name == "TLS");
        if !chosen {
            settings.push(("TLS".into(), TRANSPORTS.into()));
        }
        let options = ucx::Options { settings, ..ucx::Options::default() };
        let failed = |error: LibraryError| Error::new(ErrorKind::NotEnabled, error.to_string());
        let fabric: Box<dyn Fabric> = Box::new(ucx::Fabric::open(&library, options).map_err(failed)?);
        let mut shared = [None, None];
        for (place, region) in shared.iter_mut().zip(pools) {
            let region = region.filter(|region| region.host_addressable());
            *place = region.map(|region| SharedRegion::share(&*fabric, region)).transpose()?;
        }
        let address = fabric.address().map_err(failed)?;
        let keys = shared.iter().flatten().map(|region| region.offer().2.len());
        let longest = keys.chain([address.len()]).max().unwrap_or(0);
        if longest > MAX_OFFER_BYTES {
            let text = "the address or a key of UCX is too long; UCX_NET_DEVICES and UCX_TLS make it shorter";
            return Err(Error::new(ErrorKind::NotEnabled, text)
                .with("bytes", longest)
                .with("limit", MAX_OFFER_BYTES));
        }
        tracing::info!(target: "llm_datadist::links", "links may use {library:?}");
        let required = config.backend == Backend::Ucx;
        Ok(EngineFabric { pools: shared, address, required, fabric })
    }

    /// Whether the configuration requires UCX, so that a failure of UCX fails the link or the call.
    pub fn is_required(&self) -> bool {
        self.required
    }

    /// Returns what this engine offers to a peer.
    pub fn offer(&self) -> FabricOffer {
        let pool = |region: &SharedRegion| {
            let (base, len, key) = region.offer();
            FabricPool { base, len, key: (**key).clone().into() }
        };
        FabricOffer {
            version: self.fabric.version().to_string(),
            address: self.address.clone().into(),
            pools: self.pools.each_ref().map(|region| region.as_ref().map(pool)),
        }
    }

    /// Takes the offer of a peer. Returns `Err(NotEnabled)` with the reason if it cannot be used.
    pub fn take(&self, offer: &FabricOffer) -> Result<PeerFabric> {
        let own = self.fabric.version().to_string();
        if offer.version != own {
            // Versions of UCX that differ may not understand each other.
            let text = format!("the peer uses UCX {}, and this side {own}", offer.shown_version());
            return Err(Error::new(ErrorKind::NotEnabled, text));
        }
        let peer: Arc<dyn Peer> = self.fabric.peer(offer.address.to_vec()).into();
        let region = |pool: &FabricPool| {
            let key = Arc::new(pool.key.to_vec());
            FabricRegion::new(peer.clone(), "UCX", (pool.base, pool.len), key).map(Arc::new)
        };
        let [host, device] = &offer.pools;
        let (host, device) =
            (host.as_ref().map(region).transpose()?, device.as_ref().map(region).transpose()?);
        Ok(PeerFabric { pools: [host, device] })
    }
}

impl PeerFabric {
    /// Has all reads of the peer fail soon.
    pub fn end(&self) {
        self.pools.iter().flatten().for_each(|pool| pool.end());
    }

    /// Returns `count` tensors of these `bytes` in pool `region` of the peer; `None` if the peer offers no such pool. Returns
    /// `Err` if the location is invalid.
    pub fn tensors(
        &self,
        region: u8,
        runs: &[Run],
        count: u32,
        bytes: impl Into<TensorBytes>,
    ) -> Result<Option<Arc<Tensors>>> {
        let Some(Some(pool)) = self.pools.get(usize::from(region)) else { return Ok(None) };
        Tensors::of_fabric(pool.clone(), Run::unpack(runs, count)?, bytes)
            .map(|tensors| Some(Arc::new(tensors)))
    }
}

/// Whether the kernel lists an RDMA device.
fn has_devices(listed: &Path) -> bool {
    std::fs::read_dir(listed).is_ok_and(|mut devices| devices.next().is_some())
}
