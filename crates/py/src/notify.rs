//! The bytes of a notification.

use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};

use crate::convert::{self, only_support};

arguments! {
    /// The bytes of a notification, or `None`.
    NotifyArg;
}

impl NotifyArg<'_, '_> {
    /// Returns a copy of the bytes. The core checks how many there are.
    pub(crate) fn bytes(self, name: &str) -> PyResult<Option<Vec<u8>>> {
        if self.0.is_none() {
            return Ok(None);
        }
        if let Ok(bytes) = self.0.cast::<PyBytes>() {
            let mut copy = convert::room(self.py(), bytes.as_bytes().len())?;
            copy.extend_from_slice(bytes.as_bytes());
            return Ok(Some(copy));
        }
        let bytes = self
            .0
            .cast::<PyByteArray>()
            .map_err(|_| only_support(name, "['bytes', 'bytearray']", &self.0))?;
        // The copy of a byte array cannot report a lack of memory.
        drop(convert::room::<u8>(self.py(), bytes.len())?);
        Ok(Some(bytes.to_vec()))
    }
}

impl NotifyArg<'_, '_> {
    /// Creates the error for a notification that is `None`.
    #[cold]
    pub(crate) fn missing(self, name: &str) -> PyErr {
        only_support(name, "['bytes', 'bytearray']", &self.0)
    }
}
