//! Random bytes from the kernel.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

use crate::error::{Error, ErrorKind, Result};

/// Returns `N` unpredictable bytes from the kernel. Returns `Err` with `System` if the kernel provides none.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let got = getrandom(&mut bytes[filled..], GetRandomFlags::empty());
        filled += got.map_err(|error| {
            let text = "the system provided no random bytes";
            Error::new(ErrorKind::System, text).because(io::Error::from(error))
        })?;
    }
    Ok(bytes)
}
