//! The C interface as C calls it: wrong handles, null pointers, panics, texts; and the header that describes it.
//!
//! Part of the crate, because a library for C has nothing that Rust could link with. Not for: what the calls do with
//! bytes (`tests/test_cpp.py`).

mod header;
