//! UCX or NIXL for one engine: whether it is used, the pools that peers may read by it, and the pools that peers offer.
//!
//! Each side offers its pools in the last messages of the handshake (`protocol::FabricOffer`), after the other one was
//! admitted.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use llm_datadist_fabric::{Counts, Error as LibraryError, Fabric, Peer};
use llm_datadist_nixl as nixl;
use llm_datadist_ucx as ucx;

use crate::config::{Backend, FabricConfig, FabricLibrary};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{FabricRegion, Region, SharedRegion, TensorBytes, Tensors, load_nixl, load_ucx};
use crate::protocol::{FabricOffer, FabricPool, MAX_OFFER_BYTES, Run};

/// The names under which the system finds the libraries.
const UCX: &str = "libucp.so.0";
const NIXL: &str = "libnixl_capi.so";
/// The transports of UCX that the engine allows, unless the program has chosen others: RDMA. UCX listens on all networks
/// without authentication if it may use TCP. NIXL separates settings by
/// commas, so it can take one name only; `ib` covers all of these except `srd`.
const UCX_TRANSPORTS: &str = "rc,dc,ud,srd";
const NIXL_TRANSPORTS: &str = "ib";
/// What precedes the version in an offer of NIXL.
const NIXL_OFFER: &str = "nixl ";
/// The kernel lists RDMA devices here.
const DEVICES: &str = "/sys/class/infiniband";
/// The reasons why an engine uses neither UCX nor NIXL: the configuration, or the lack of a device.
const SOCKETS_CHOSEN: &str = "llm.TransferBackend=sockets";
const NO_DEVICE: &str = "this host has no RDMA device (/sys/class/infiniband)";

/// What this process can read in place, or the reason why it cannot.
pub type Readable<T> = std::result::Result<T, Cow<'static, str>>;

/// UCX or NIXL of one engine.
#[derive(Debug)]
pub struct EngineFabric {
    library: FabricLibrary,
    pools: [Option<SharedRegion>; 2],
    address: Vec<u8>,
    required: bool,
    // Dropped last: the pools are mapped with it.
    fabric: Box<dyn Fabric>,
}

/// The pools of one peer that UCX or NIXL reads, by placement.
#[derive(Debug)]
pub struct PeerFabric {
    library: FabricLibrary,
    pools: [Option<Arc<FabricRegion>>; 2],
}

impl EngineFabric {
    /// Opens UCX or NIXL if the configuration names it, or UCX if it leaves the choice to the engine and there is an RDMA
    /// device. Maps the pools that the CPU can address.
    ///
    /// If the library cannot be used, returns `Err(NotEnabled)` if the configuration names it. Otherwise returns the reason,
    /// and logs a warning unless there is no device.
    ///
    /// Without a `token`, no library is used: a process that gets a key is trusted with the whole pool (docs/networks.md).
    pub fn open(
        config: &FabricConfig,
        token: bool,
        pools: [Option<Arc<Region>>; 2],
    ) -> Result<Readable<EngineFabric>> {
        let library = match config.backend {
            Backend::Sockets => return Ok(Err(SOCKETS_CHOSEN.into())),
            Backend::Auto if !config.assume_device && !has_devices(Path::new(DEVICES)) => {
                return Ok(Err(NO_DEVICE.into()));
            }
            Backend::Ucx | Backend::Auto => FabricLibrary::Ucx,
            Backend::Nixl => FabricLibrary::Nixl,
        };
        let opened = if token {
            Self::opened(library, config, pools)
        } else {
            let why =
                "needs a token (llm.LinkToken or llm.LinkTokenFile), because it does not authenticate peers";
            Err(Error::new(ErrorKind::NotEnabled, format!("{} {why}", library.name())))
        };
        match opened {
            Ok(fabric) => Ok(Ok(fabric)),
            Err(error) if config.backend != Backend::Auto => Err(error),
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

    fn opened(
        library: FabricLibrary,
        config: &FabricConfig,
        pools: [Option<Arc<Region>>; 2],
    ) -> Result<EngineFabric> {
        let failed = |error: LibraryError| unusable(library, config, &error);
        let fabric = open(library, config).map_err(failed)?;
        let mut shared = [None, None];
        for (place, region) in shared.iter_mut().zip(pools) {
            let region = region.filter(|region| region.host_addressable());
            *place =
                region.map(|region| SharedRegion::share(&*fabric, library.name(), region)).transpose()?;
        }
        let address = fabric.address().map_err(failed)?;
        let keys = shared.iter().flatten().map(|region| region.offer().2.len());
        let longest = keys.chain([address.len()]).max().unwrap_or(0);
        if longest > MAX_OFFER_BYTES {
            let text =
                "its address or a key is too long; restrict UCX_NET_DEVICES or UCX_TLS to make it shorter";
            return Err(Error::new(
                ErrorKind::NotEnabled,
                format!("{} cannot be used: {text}", library.name()),
            )
            .with("bytes", longest)
            .with("limit", MAX_OFFER_BYTES));
        }
        let required = config.backend != Backend::Auto;
        Ok(EngineFabric { library, pools: shared, address, required, fabric })
    }

    /// Returns the library.
    pub fn library(&self) -> FabricLibrary {
        self.library
    }

    /// Whether the configuration requires the library, so that its failure fails the link or the call.
    pub fn is_required(&self) -> bool {
        self.required
    }

    /// Returns the version in offers. That of NIXL begins with its name.
    fn offered_version(&self) -> String {
        let prefix = if self.library == FabricLibrary::Nixl { NIXL_OFFER } else { "" };
        format!("{prefix}{}", self.fabric.version())
    }

    /// Returns what this engine offers to a peer.
    pub fn offer(&self) -> FabricOffer {
        let pool = |region: &SharedRegion| {
            let (base, len, key) = region.offer();
            FabricPool { base, len, key: (**key).clone().into() }
        };
        FabricOffer {
            version: self.offered_version(),
            address: self.address.clone().into(),
            pools: self.pools.each_ref().map(|region| region.as_ref().map(pool)),
        }
    }

    /// Takes the offer of a peer. Returns `Err(NotEnabled)` with the reason if it cannot be used.
    pub fn take(&self, offer: &FabricOffer) -> Result<PeerFabric> {
        if offer.version != self.offered_version() {
            // Versions that differ may not understand each other.
            let (own, shown) = (self.fabric.version(), offer.shown_version());
            let (theirs, version) = match shown.strip_prefix(NIXL_OFFER) {
                Some(version) => (FabricLibrary::Nixl, version),
                None => (FabricLibrary::Ucx, shown.as_str()),
            };
            let also = if theirs == self.library { "" } else { &format!("{} ", self.library.name()) };
            let text = format!("the peer uses {} {version}, and this side {also}{own}", theirs.name());
            return Err(Error::new(ErrorKind::NotEnabled, text));
        }
        let peer: Arc<dyn Peer> = self.fabric.peer(offer.address.to_vec()).into();
        let region = |pool: &FabricPool| {
            let key = Arc::new(pool.key.to_vec());
            FabricRegion::new(peer.clone(), self.library.name(), (pool.base, pool.len), key).map(Arc::new)
        };
        let [host, device] = &offer.pools;
        let (host, device) =
            (host.as_ref().map(region).transpose()?, device.as_ref().map(region).transpose()?);
        Ok(PeerFabric { library: self.library, pools: [host, device] })
    }
}

impl PeerFabric {
    /// Returns the library that reads the peer.
    pub fn library(&self) -> FabricLibrary {
        self.library
    }

    /// Has all reads of the peer fail soon.
    pub fn end(&self) {
        self.pools.iter().flatten().for_each(|pool| pool.end());
    }

    /// Returns `count` tensors of these `bytes` in pool `region` of the peer, and that pool; `None` if the peer offers no such
    /// pool. Returns `Err` if the location is invalid.
    pub fn tensors(
        &self,
        region: u8,
        runs: &[Run],
        count: u32,
        bytes: impl Into<TensorBytes>,
    ) -> Result<Option<(Arc<Tensors>, Arc<FabricRegion>)>> {
        let Some(Some(pool)) = self.pools.get(usize::from(region)) else { return Ok(None) };
        Tensors::of_fabric(pool.clone(), Run::unpack(runs, count)?, bytes)
            .map(|tensors| Some((Arc::new(tensors), pool.clone())))
    }
}

/// Returns the error of a library that cannot be used, and what the user can do about it.
fn unusable(library: FabricLibrary, config: &FabricConfig, error: &LibraryError) -> Error {
    let (named, option, cause, transports) = match library {
        FabricLibrary::Ucx => {
            (&config.ucx_library, "llm.UcxLibrary", "UCX_LOG_LEVEL=info shows the cause", UCX_TRANSPORTS)
        }
        FabricLibrary::Nixl => (
            &config.nixl_library,
            "llm.NixlLibrary",
            "NIXL writes the cause to standard error",
            NIXL_TRANSPORTS,
        ),
    };
    let text = match error {
        LibraryError::Library(reason) if named.is_none() => {
            format!("{reason}; set {option} to use another file")
        }
        LibraryError::Library(reason) => reason.clone(),
        error => {
            let name = library.name();
            let chosen = format!("UCX_TLS chooses the transports ({transports} if it is not set)");
            format!("{name} cannot be used: {error}; {cause}, and {chosen}")
        }
    };
    Error::new(ErrorKind::NotEnabled, text)
}

/// Opens a library with the settings of the configuration.
fn open(library: FabricLibrary, config: &FabricConfig) -> Result<Box<dyn Fabric>, LibraryError> {
    let mut settings = config.settings.clone();
    let chosen = std::env::var_os("UCX_TLS").is_some() || settings.iter().any(|(name, _)| name == "TLS");
    let mut allow = |transports: &str| {
        if !chosen {
            settings.push(("TLS".into(), transports.into()));
        }
    };
    let path = |named: &Option<PathBuf>, known: &str| named.clone().unwrap_or_else(|| PathBuf::from(known));
    match library {
        FabricLibrary::Ucx => {
            let loaded = load_ucx(&path(&config.ucx_library, UCX))?;
            tracing::info!(target: "llm_datadist::links", "links may use {loaded:?}");
            allow(UCX_TRANSPORTS);
            let options = ucx::Options { settings, ..ucx::Options::default() };
            ucx::Fabric::open(&loaded, options).map(|fabric| Box::new(fabric) as _)
        }
        FabricLibrary::Nixl => {
            let loaded = load_nixl(&path(&config.nixl_library, NIXL))?;
            tracing::info!(target: "llm_datadist::links", "links may use {loaded:?}");
            allow(NIXL_TRANSPORTS);
            let options = nixl::Options { settings, ..nixl::Options::default() };
            nixl::Fabric::open(&loaded, &options).map(|fabric| Box::new(fabric) as _)
        }
    }
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
        let missing = LibraryError::Library("it cannot be used".into());
        let named = FabricConfig { nixl_library: Some("/nixl".into()), ..FabricConfig::default() };
        for (library, config, text) in [
            (FabricLibrary::Nixl, &named, "it cannot be used"),
            (
                FabricLibrary::Nixl,
                &FabricConfig::default(),
                "it cannot be used; set llm.NixlLibrary to use another file",
            ),
            (FabricLibrary::Ucx, &named, "it cannot be used; set llm.UcxLibrary to use another file"),
        ] {
            assert_eq!(unusable(library, config, &missing).to_string(), text);
        }
    }
}
