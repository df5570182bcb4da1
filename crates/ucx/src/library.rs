//! Loads `libucp`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::abi::Api;
use crate::environment::with_ucx_environment;
use crate::error::Error;

/// The oldest version whose structures are those of `abi`.
const OLDEST: Version = Version { major: 1, minor: 13, patch: 0 };

/// The version of UCX.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Versions with other numbers are incompatible.
    pub major: u32,
    /// Raised by new features.
    pub minor: u32,
    /// Raised by corrections.
    pub patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The loaded library. It stays loaded while a `Library` or a `Fabric` uses it.
#[derive(Clone)]
pub struct Library {
    pub(crate) api: Arc<Api>,
    path: PathBuf,
    version: Version,
}

impl Library {
    /// Loads the library at `path`, or the one of this name that the system finds.
    ///
    /// Returns `Err` if there is none, if a function is missing, or if it is older than UCX 1.13.
    ///
    /// # Safety
    ///
    /// The file must be a `libucp` of UCX, or something that behaves like it: its code runs in this process. No other
    /// thread may access the environment through functions of C during the call.
    pub unsafe fn open(path: &Path) -> Result<Library, Error> {
        let unusable =
            |reason: String| Error::Library(format!("UCX cannot be used: {}: {reason}", path.display()));
        let load = || {
            // SAFETY: promised by the caller.
            unsafe { libloading::Library::new(path) }
        };
        // SAFETY: promised by the caller.
        let library = unsafe { with_ucx_environment(load) };
        let library = library.map_err(|error| unusable(explained(&error, path)))?;
        // SAFETY: promised by the caller.
        let api = unsafe { Api::of(library) };
        let api =
            api.map_err(|(name, error)| unusable(format!("it has no {name}: {}", explained(&error, path))))?;
        let mut found = Version { major: 0, minor: 0, patch: 0 };
        // SAFETY: the function writes three numbers.
        unsafe {
            (api.ucp_get_version)(&raw mut found.major, &raw mut found.minor, &raw mut found.patch);
        };
        let version = found;
        if version < OLDEST || version.major != OLDEST.major {
            return Err(unusable(format!("its version is {version}; {OLDEST} or a later 1.x is needed")));
        }
        Ok(Library { api: Arc::new(api), path: path.to_owned(), version })
    }

    /// Returns the version of the library.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the path from which it was loaded.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Returns the text of an error of the loader, without the path that precedes it.
fn explained(error: &libloading::Error, path: &Path) -> String {
    let text = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    text.strip_prefix(&format!("{}: ", path.display())).map_or(text.clone(), ToOwned::to_owned)
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UCX {} from {}", self.version, self.path.display())
    }
}
