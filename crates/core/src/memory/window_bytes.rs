//! Reads the bytes of a window into a buffer of this process, for code that computes with them.

use super::Window;
use crate::error::{Error, ErrorKind, Result};

/// Copies the bytes of `window` into `buffer`, which must have the same length. Returns `Err` of kind
/// [`ErrorKind::System`] if it has not, or if the CPU cannot read the window.
///
/// Others may write the memory meanwhile; the copy may then have old, new or mixed bytes.
pub fn read_bytes(window: &Window<'_>, buffer: &mut [u8]) -> Result<()> {
    if window.len() != buffer.len() as u64 || !window.host_addressable() {
        let text = "the CPU can only read a whole window of memory that it can address";
        return Err(Error::new(ErrorKind::System, text)
            .with("window_bytes", window.len())
            .with("buffer_bytes", buffer.len())
            .with("reach", format_args!("{:?}", window.reach())));
    }
    let from = window.addr() as *const u8;
    // SAFETY: the window has as many bytes as the buffer and the CPU can read it (both checked above). It lies inside a
    // live tensor (promise 3). `buffer` is borrowed exclusively, so it is no memory of a cache and does not overlap.
    unsafe { from.copy_to_nonoverlapping(buffer.as_mut_ptr(), buffer.len()) };
    Ok(())
}
