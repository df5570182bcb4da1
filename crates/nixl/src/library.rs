//! Loads `libnixl_capi`.

use std::ffi::{CStr, OsStr};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use llm_datadist_fabric::{Error, Version, with_ucx_environment};

use crate::abi::Api;
use crate::agent::{Agent, Role};

/// The oldest version whose interface is that of `abi`.
const OLDEST: Version = Version { major: 1, minor: 0, patch: 0 };
/// The text that precedes the version in the files of NIXL, which have no function that returns it.
const MARK: &[u8] = b"NIXL version: ";
/// The file beside `libnixl_capi.so` that has the version.
const VERSIONED: &str = "libnixl_common.so";

/// The loaded library. It stays loaded while a `Library` or a `Fabric` uses it.
#[derive(Clone)]
pub struct Library {
    pub(crate) api: Arc<Api>,
    path: PathBuf,
    version: Version,
}

impl Library {
    /// Loads the library at `path`, or the one of this name that the system finds, and its plugin for UCX.
    ///
    /// Returns `Err` if there is none, if a function is missing, or if its version is unknown or not 1.x.
    ///
    /// # Safety
    ///
    /// The file must be a `libnixl_capi` of NIXL, or something that behaves like it: its code runs in this process. No other
    /// thread may access the environment through functions of C during the call.
    pub unsafe fn open(path: &Path) -> Result<Library, Error> {
        // SAFETY: promised by the caller.
        unsafe { with_ucx_environment(|| Self::load(path)) }
    }

    /// Loads the library, which is one of NIXL, as the caller of `open` promises.
    fn load(path: &Path) -> Result<Library, Error> {
        let unusable =
            |reason: String| Error::Library(format!("NIXL cannot be used: {}: {reason}", path.display()));
        // SAFETY: a library of NIXL.
        let library = unsafe { libloading::Library::new(path) };
        let library = library.map_err(|error| unusable(explained(&error, path)))?;
        // SAFETY: as above.
        let api = unsafe { Api::of(library) };
        let api =
            api.map_err(|(name, error)| unusable(format!("it has no {name}: {}", explained(&error, path))))?;
        // SAFETY: a function without arguments.
        if unsafe { (api.nixl_capi_is_stub)() } {
            return Err(unusable("it is a stub, which contains no implementation of NIXL".into()));
        }
        let version = version(&api).ok_or_else(|| {
            unusable(format!(
                "its version is unknown: neither it nor {VERSIONED} beside it contains a version"
            ))
        })?;
        if version < OLDEST || version.major != OLDEST.major {
            return Err(unusable(format!("its version is {version}; {OLDEST} or a later 1.x is needed")));
        }
        let api = Arc::new(api);
        let plugin = Agent::without_backend(&api, Role::Reading).and_then(|agent| agent.load_plugin());
        plugin.map_err(|error| {
            let text = "set NIXL_PLUGIN_DIR to use another folder of plugins";
            unusable(format!("it has no usable plugin for UCX: {error}; {text}"))
        })?;
        Ok(Library { api, path: path.to_owned(), version })
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

/// Returns the version that the library or the file beside it names.
fn version(api: &Api) -> Option<Version> {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    let function = api.nixl_capi_create_configured_agent as *const libc::c_void;
    // SAFETY: `found` is written, and zeros are valid for it.
    let known = unsafe { libc::dladdr(function, found.as_mut_ptr()) } != 0;
    // SAFETY: as above.
    let name = unsafe { found.assume_init() }.dli_fname;
    if !known || name.is_null() {
        return None;
    }
    // SAFETY: the loader's name of the file, which it keeps while the file is loaded.
    let file =
        Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes())).canonicalize().ok()?;
    [file.with_file_name(VERSIONED), file].iter().find_map(|file| named_version(&std::fs::read(file).ok()?))
}

/// Finds a version in the bytes of a file.
fn named_version(bytes: &[u8]) -> Option<Version> {
    let at = bytes.windows(MARK.len()).position(|window| window == MARK)? + MARK.len();
    let text = bytes[at..].iter().copied().skip_while(|&byte| byte == 0);
    let text: Vec<u8> = text.take_while(|byte| byte.is_ascii_digit() || *byte == b'.').take(32).collect();
    let mut numbers = std::str::from_utf8(&text).ok()?.split('.').map(|number| number.parse().ok());
    let mut next = || numbers.next().flatten();
    Some(Version { major: next()?, minor: next()?, patch: next()? })
}

/// Returns the text of an error of the loader, without the path that precedes it.
fn explained(error: &libloading::Error, path: &Path) -> String {
    let text = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    text.strip_prefix(&format!("{}: ", path.display())).map_or(text.clone(), ToOwned::to_owned)
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NIXL {} from {}", self.version, self.path.display())
    }
}
