//! UCX for one engine: whether it is used, the pools that peers may read by it, and the pools that peers offer.
//!
//! Each side offers its pools in the last messages of the handshake (`protocol::FabricOffer`), after the other one was
//! admitted.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use llm_datadist_ucx::{Counts, Error as UcxError, Fabric, Options};

use crate::config::{Backend, FabricConfig};
use crate::error::{Error, ErrorKind, OptionName, Result};
use crate::memory::{FabricRegion, Region, SharedRegion, Tensors, load_ucx};
use crate::protocol::{BoundedBytes, FabricOffer, FabricPool, MAX_OFFER_BYTES, Run};

/// The name under which the system finds the library.
const LIBRARY: &str = "libucp.so.0";
/// The transports of UCX that the engine allows, unless the program has chosen others: RDMA. UCX listens on all networks
/// without authentication if it may use TCP.
const TRANSPORTS: &str = "rc,dc,ud,srd";
/// The kernel lists RDMA devices here.
const DEVICES: &str = "/sys/class/infiniband";
/// The reasons why an engine does not use UCX: the configuration, or the lack of a device.
const SOCKETS_CHOSEN: &str = "the configuration chooses sockets";
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
    fabric: Fabric,
}

/// The pools of one peer that UCX reads, by placement.
#[derive(Debug)]
pub struct PeerFabric {
    pools: [Option<Arc<FabricRegion>>; 2],
}

impl EngineFabric {
    /// Opens UCX if the configuration names it, or leaves the choice to the engine and there is an RDMA device. Maps the pools
    /// that the CPU can address.
    ///
    /// If UCX cannot be used, returns `Err(NotEnabled)` if the configuration names it. Otherwise returns the reason,
    /// and logs a warning unless there is no device.
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
            Backend::Ucx | Backend::Auto => (),
        }
        let opened = if token {
            Self::opened(config, pools)
        } else {
            let why = "UCX needs a token, because it does not authenticate peers";
            Err(Error::new(ErrorKind::NotEnabled, why).of_option(OptionName::TOKEN))
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

    /// Returns the version of UCX, and what was done with it.
    pub fn state(&self) -> (String, Counts) {
        (self.fabric.version().to_string(), self.fabric.counts())
    }

    fn opened(config: &FabricConfig, pools: [Option<Arc<Region>>; 2]) -> Result<EngineFabric> {
        let failed = |error: UcxError| unusable(config, &error);
        let fabric = open(config).map_err(failed)?;
        let mut shared = [None, None];
        for (slot, region) in shared.iter_mut().zip(pools) {
            let region = region.filter(|region| region.host_addressable());
            *slot = region.map(|region| SharedRegion::share(&fabric, region)).transpose()?;
        }
        let address = fabric.address().map_err(failed)?;
        let keys = shared.iter().flatten().map(|region| region.offer().2.len());
        let longest = keys.chain([address.len()]).max().unwrap_or(0);
        if longest > MAX_OFFER_BYTES {
            let text = "UCX cannot be used: its address or a key is too long; restrict UCX_NET_DEVICES or UCX_TLS to make \
                it shorter";
            return Err(Error::new(ErrorKind::NotEnabled, text)
                .with("bytes", longest)
                .with("limit", MAX_OFFER_BYTES));
        }
        let required = config.backend == Backend::Ucx;
        Ok(EngineFabric { pools: shared, address, required, fabric })
    }

    /// Whether the configuration requires UCX, so that its failure fails the link or the call.
    pub fn is_required(&self) -> bool {
        self.required
    }

    /// Returns what this engine offers to a peer.
    pub fn offer(&self) -> FabricOffer {
        let pool = |region: &SharedRegion| {
            let (base, len, key) = region.offer();
            FabricPool { base, len, key: BoundedBytes((**key).clone()) }
        };
        FabricOffer {
            version: self.fabric.version().to_string(),
            address: BoundedBytes(self.address.clone()),
            pools: self.pools.each_ref().map(|region| region.as_ref().map(pool)),
        }
    }

    /// Takes the offer of a peer. Returns `Err(NotEnabled)` with the reason if it cannot be used.
    pub fn take(&self, offer: &FabricOffer) -> Result<PeerFabric> {
        let version = self.fabric.version();
        if offer.version != version.to_string() {
            // Versions that differ may not understand each other.
            let text = format!("the peer uses UCX {}, and this side {version}", offer.shown_version());
            return Err(Error::new(ErrorKind::NotEnabled, text));
        }
        let peer = Arc::new(self.fabric.peer(offer.address.to_vec()));
        let region = |pool: &FabricPool| {
            let key = Arc::new(pool.key.to_vec());
            FabricRegion::new(peer.clone(), (pool.base, pool.len), key).map(Arc::new)
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

    /// Returns `count` tensors of `bytes` bytes in pool `pool` of the peer, and that pool; `None` if the peer offers no such
    /// pool. Returns `Err` if the location is invalid.
    pub fn tensors(
        &self,
        pool: u8,
        runs: &[Run],
        count: u32,
        bytes: u64,
    ) -> Result<Option<(Arc<Tensors>, Arc<FabricRegion>)>> {
        let Some(Some(region)) = self.pools.get(usize::from(pool)) else { return Ok(None) };
        Tensors::of_fabric(region.clone(), Run::unpack(runs, count)?, bytes)
            .map(|tensors| Some((Arc::new(tensors), region.clone())))
    }
}

/// Returns the error of UCX if it cannot be used, and what the user can do about it.
fn unusable(config: &FabricConfig, error: &UcxError) -> Error {
    match error {
        UcxError::Library(reason) => {
            let unusable = Error::new(ErrorKind::NotEnabled, reason);
            if config.ucx_library.is_some() { unusable } else { unusable.of_option(OptionName::UCX_LIBRARY) }
        }
        error => {
            let text = format!(
                "UCX cannot be used: {error}; UCX_LOG_LEVEL=info shows the cause, and UCX_TLS chooses the transports \
                 ({TRANSPORTS} if it is not set)"
            );
            Error::new(ErrorKind::NotEnabled, text)
        }
    }
}

/// Opens UCX with the settings of the configuration.
fn open(config: &FabricConfig) -> Result<Fabric, UcxError> {
    let library = load_ucx(config.ucx_library.as_deref().unwrap_or(Path::new(LIBRARY)))?;
    tracing::info!(target: "llm_datadist::links", "links may use {library:?}");
    let mut settings = config.settings.clone();
    if std::env::var_os("UCX_TLS").is_none() && !settings.iter().any(|(name, _)| name == "TLS") {
        settings.push(("TLS".into(), TRANSPORTS.into()));
    }
    Fabric::open(&library, Options { settings, ..Options::default() })
}

/// Whether the kernel lists an RDMA device.
fn has_devices(listed: &Path) -> bool {
    std::fs::read_dir(listed).is_ok_and(|mut devices| devices.next().is_some())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_host_without_entries_in_the_list_has_no_device() {
        let list = std::env::temp_dir().join(format!("llm_datadist-devices-{}", std::process::id()));
        assert!(!has_devices(&list), "the kernel has no list");
        fs::create_dir(&list).unwrap();
        assert!(!has_devices(&list), "the list is empty");
        fs::create_dir(list.join("mlx5_0")).unwrap();
        assert!(has_devices(&list));
        fs::remove_dir_all(&list).unwrap();
    }

    #[test]
    fn errors_name_the_option_of_a_library_that_the_system_does_not_find() {
        let missing = UcxError::Library("it cannot be used".into());
        let named = FabricConfig { ucx_library: Some("/ucx".into()), ..FabricConfig::default() };
        for (config, text) in [
            (&named, "it cannot be used"),
            (&FabricConfig::default(), "it cannot be used (option=ucx_library)"),
        ] {
            assert_eq!(unusable(config, &missing).to_string(), text);
        }
    }
}
