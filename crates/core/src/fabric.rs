//! UCX for one engine: whether it is used, the pools that peers may read by it, and the pools that peers offer.
//!
//! Each side offers its pools when a link is made (`protocol::FabricOffer`), after the other one has proved its identity.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use llm_datadist_ucx as ucx;

use crate::config::{Backend, FabricConfig};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{FabricRegion, Region, SharedRegion, TensorBytes, Tensors, load_ucx};
use crate::protocol::{FabricOffer, FabricPool, Run};

/// The name under which the system finds the library.
const LIBRARY: &str = "libucp.so.0";
/// The kernel lists RDMA devices here.
const DEVICES: &str = "/sys/class/infiniband";

/// UCX of one engine.
#[derive(Debug)]
pub struct EngineFabric {
    pools: [Option<SharedRegion>; 2],
    address: Vec<u8>,
    required: bool,
    // Dropped last: the pools are mapped with it.
    fabric: ucx::Fabric,
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
    /// If the configuration names UCX, returns `Err(NotEnabled)` with the reason if it cannot be used. Otherwise the log has
    /// the reason.
    pub fn open(config: &FabricConfig, pools: [Option<Arc<Region>>; 2]) -> Result<Option<EngineFabric>> {
        let wanted = match config.backend {
            Backend::Sockets => false,
            Backend::Ucx => true,
            Backend::Auto => config.assume_device || has_devices(Path::new(DEVICES)),
        };
        if !wanted {
            return Ok(None);
        }
        match Self::opened(config, pools) {
            Ok(fabric) => Ok(Some(fabric)),
            Err(error) if config.backend == Backend::Ucx => Err(error),
            Err(error) => {
                tracing::warn!(target: "llm_datadist::links", "links use sockets, and not UCX: {error}");
                Ok(None)
            }
        }
    }

    fn opened(config: &FabricConfig, pools: [Option<Arc<Region>>; 2]) -> Result<EngineFabric> {
        let path = config.library.clone().unwrap_or_else(|| PathBuf::from(LIBRARY));
        let library = load_ucx(&path)?;
        let options = ucx::Options { settings: config.settings.clone(), ..ucx::Options::default() };
        let failed = |error: ucx::Error| Error::new(ErrorKind::NotEnabled, error.to_string());
        let fabric = ucx::Fabric::open(&library, options).map_err(failed)?;
        let address = fabric.address().map_err(failed)?;
        let mut shared = [None, None];
        for (place, region) in shared.iter_mut().zip(pools) {
            let region = region.filter(|region| region.host_addressable());
            *place = region.map(|region| SharedRegion::share(&fabric, region)).transpose()?;
        }
        tracing::info!(target: "llm_datadist::links", "links may use {library:?}");
        let required = config.backend == Backend::Ucx;
        Ok(EngineFabric { pools: shared, address, required, fabric })
    }

    /// Whether the configuration names UCX, so that nothing else may be used in its place.
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
        let peer = Arc::new(self.fabric.peer(offer.address.to_vec()));
        let region = |pool: &FabricPool| {
            FabricRegion::new(peer.clone(), pool.base, pool.len, Arc::new(pool.key.to_vec())).map(Arc::new)
        };
        let [host, device] = &offer.pools;
        let (host, device) =
            (host.as_ref().map(region).transpose()?, device.as_ref().map(region).transpose()?);
        Ok(PeerFabric { pools: [host, device] })
    }
}

impl PeerFabric {
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
