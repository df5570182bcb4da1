//! `EngineBuilder`: the name, the pools and the other options of an engine that is about to be opened.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::engine::Engine;
use crate::config::Config;
use crate::error::Result;
use crate::options::{OptionValue, config_from_values};
use crate::validate;

/// The options of an engine, which [`open`](Self::open) checks. Those that are not given come from their environment variables, or
/// have their default.
#[derive(Clone, Default)]
pub struct EngineBuilder {
    name: Option<String>,
    metadata: Vec<u8>,
    options: BTreeMap<String, OptionValue>,
}

impl EngineBuilder {
    /// Sets the name that peers and errors show: 1 to 128 bytes of printable text, by default the names of the host and the process.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets the bytes that peers get when a link is made, at most 16 KiB.
    #[must_use]
    pub fn metadata(mut self, metadata: impl Into<Vec<u8>>) -> Self {
        self.metadata = metadata.into();
        self
    }

    /// Sets the bytes of the device pool, from which caches of [`Placement::Device`](crate::Placement::Device) are allocated.
    #[must_use]
    pub fn pool(self, bytes: u64) -> Self {
        self.option("pool", bytes)
    }

    /// Sets the bytes of the host pool.
    #[must_use]
    pub fn host_pool(self, bytes: u64) -> Self {
        self.option("host_pool", bytes)
    }

    /// Sets the address at which peers can link to the engine: `ip:port` or `[ipv6]:port`. Port 0 takes a free one.
    #[must_use]
    pub fn listen(self, address: &str) -> Self {
        self.option("listen", address)
    }

    /// Sets any option of `llm-datadist options` by its name: a flag, a number, a text, a size in bytes or as a text with a unit, or a
    /// time in seconds or as a `Duration`.
    #[must_use]
    pub fn option(mut self, name: &str, value: impl Into<OptionValue>) -> Self {
        self.options.insert(name.to_owned(), value.into());
        self
    }

    /// Returns the configuration for [`DataDist::open`](crate::engine::DataDist::open). Returns `Err(InvalidArgument)` for an
    /// unknown option or an invalid value.
    #[doc(hidden)]
    pub fn config(self) -> Result<Config> {
        let values: Vec<_> = self.options.into_iter().collect();
        let values: Vec<_> = values.iter().map(|(name, value)| (&**name, value.clone())).collect();
        // A token that is no UTF-8 must not count as none.
        let variable = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let config = config_from_values(&values, &variable)?;
        // An engine without a name is only one of the original's API.
        let name = self
            .name
            .map_or_else(|| Ok(default_name()), |name| validate::cache_name(&name).map(|()| name))?;
        Ok(Config { name, metadata: self.metadata, ..config })
    }

    /// Opens the engine. Returns `Err(InvalidArgument)` for an unknown option or an invalid value.
    pub fn open(self) -> Result<Engine> {
        Engine::open(self.config()?)
    }
}

impl Engine {
    /// Returns a builder without options.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }
}

/// Returns the name of an engine that got none: that of the host, of the process, and a number.
fn default_name() -> String {
    static NAMED: AtomicU64 = AtomicU64::new(1);
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}/{}/{}", host.trim(), std::process::id(), NAMED.fetch_add(1, Ordering::Relaxed))
}

macro_rules! values {
    ($($value:ident: $of:ty => $option:expr,)*) => {
        $(impl From<$of> for OptionValue {
            fn from($value: $of) -> Self {
                $option
            }
        })*
    };
}

values! {
    flag: bool => OptionValue::Flag(flag),
    count: u64 => OptionValue::Int(count.into()),
    number: f64 => OptionValue::Float(number),
    time: Duration => OptionValue::Float(time.as_secs_f64()),
    text: &str => OptionValue::Text(text.to_owned()),
}
